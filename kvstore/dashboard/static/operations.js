// Operations: what workers do or did that takes long.

import { ago, bar, card, el, freshness, id, matches, name, number, percent, table } from "./dom.js";

const LEVELS = { running: "", waiting: "", done: "good", failed: "bad", cancelled: "warn" };

export function operations({ doc, state }) {
  if (!doc.operations) {
    const error = doc.sources.operations.error;
    return [card("Operations", {}, el("p", { class: error ? "bad" : "empty" }, error ?? "Asking the workers …")), freshness(doc.sources)];
  }
  const rows = doc.operations.filter((row) => matches(state.filter, row.kind, row.about, row.identity, row.state, row.tenant, row.id));
  return [
    card("Operations", {}, table("Operations", [
      { name: "Kind", sort: (row) => row.kind, cell: (row) => row.kind },
      { name: "About", cell: (row) => name(row.about) },
      { name: "State", sort: (row) => row.state, cell: (row) => el("span", { class: LEVELS[row.state] ?? "" }, row.state) },
      { name: "Progress", right: true, sort: (row) => row.done, cell: (row) => [row.total ? `${number(row.done)} of ${number(row.total)} ${row.unit}` : `${number(row.done)} ${row.unit}`, " ", row.total ? bar(row.done / row.total, percent(row.done / row.total), LEVELS[row.state]) : ""] },
      { name: "Began", right: true, sort: (row) => row.began_s, cell: (row) => ago(row.began_s, doc.now_s) },
      { name: "By", sort: (row) => row.identity, cell: (row) => name(row.identity) },
      { name: "Message", cell: (row) => (row.message ? name(row.message) : "–") },
      { name: "Id", cell: (row) => id(row.id) },
    ], rows, { key: (row) => row.id, sort: state.sort.Operations, empty: doc.operations.length ? "no operation that matches" : "no operation is unfinished or was finished lately" })),
    el("p", { class: "muted" }, "Listed and cancelled on the command line: ", el("code", {}, "kvstore ops"), "."),
    freshness(doc.sources),
  ];
}
