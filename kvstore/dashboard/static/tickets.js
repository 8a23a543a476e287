// Tickets: long acts that workers are at, or were.

import { ago, bar, card, el, freshness, id, matches, name, number, percent, table } from "./dom.js";

const LEVELS = { running: "", waiting: "", done: "good", failed: "bad", cancelled: "warn" };

export function tickets({ doc, state }) {
  if (!doc.tickets) {
    const error = doc.sources.tickets.error;
    return [card("Tickets", {}, el("p", { class: error ? "bad" : "empty" }, error ?? "Asking the workers …")), freshness(doc.sources)];
  }
  const rows = doc.tickets.filter((row) => matches(state.filter, row.act, row.about, row.identity, row.state, row.tenant, row.id));
  return [
    card("Tickets", {}, table("Tickets", [
      { name: "Act", sort: (row) => row.act, cell: (row) => row.act },
      { name: "About", cell: (row) => name(row.about) },
      { name: "State", sort: (row) => row.state, cell: (row) => el("span", { class: LEVELS[row.state] ?? "" }, row.state) },
      { name: "Progress", right: true, sort: (row) => row.done, cell: (row) => [row.total ? `${number(row.done)} of ${number(row.total)} ${row.unit}` : `${number(row.done)} ${row.unit}`, " ", row.total ? bar(row.done / row.total, percent(row.done / row.total), LEVELS[row.state]) : ""] },
      { name: "Began", right: true, sort: (row) => row.began_s, cell: (row) => ago(row.began_s, doc.now_s) },
      { name: "By", sort: (row) => row.identity, cell: (row) => name(row.identity) },
      { name: "Said", cell: (row) => (row.message ? name(row.message) : "–") },
      { name: "Id", cell: (row) => id(row.id) },
    ], rows, { key: (row) => row.id, sort: state.sort.Tickets, empty: doc.tickets.length ? "no ticket that matches" : "no ticket: nothing long is under way, and nothing was lately" })),
    el("p", { class: "muted" }, "Begun and cancelled on the command line: ", el("code", {}, "kvstore tickets"), "."),
    freshness(doc.sources),
  ];
}
