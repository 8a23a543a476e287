// Pins and who holds them.

import { bar, card, el, freshness, id, matches, name, number, span, table } from "./dom.js";

export function pins({ doc, state }) {
  const rows = doc.pins.filter((row) => matches(state.filter, row.owner, row.namespace, row.tenant, row.id));
  const owners = new Map();
  for (const row of rows) {
    const sum = owners.get(row.owner) ?? { owner: row.owner, pins: 0, chunks: 0, tokens: 0, next: Infinity };
    owners.set(row.owner, { ...sum, pins: sum.pins + 1, chunks: sum.chunks + row.chunks, tokens: sum.tokens + row.tokens, next: Math.min(sum.next, row.expires_s) });
  }
  const left = (row) => row.expires_s - doc.now_s;
  return [
    doc.count > doc.pins.length ? el("p", { class: "muted" }, `The ${doc.pins.length} that end first, of ${number(doc.count)}.`) : null,
    card("Who holds pins", {}, table("Owners", [
      { name: "Owner", sort: (row) => row.owner, cell: (row) => name(row.owner) },
      { name: "Pins", right: true, sort: (row) => row.pins, cell: (row) => number(row.pins) },
      { name: "Tokens", right: true, sort: (row) => row.tokens, cell: (row) => number(row.tokens) },
      { name: "Chunks", right: true, sort: (row) => row.chunks, cell: (row) => number(row.chunks) },
      { name: "Next ends in", right: true, sort: (row) => row.next, cell: (row) => span(row.next - doc.now_s) },
    ], [...owners.values()], { key: (row) => row.owner, sort: state.sort.Owners ?? { column: "Chunks", down: true }, empty: doc.pins.length ? "no owner that matches" : "nothing is pinned" })),
    card("Pins", {}, table("Pins", [
      { name: "Owner", sort: (row) => row.owner, cell: (row) => name(row.owner) },
      { name: "Namespace", sort: (row) => row.namespace, cell: (row) => (row.namespace === null ? id(row.namespace_id, 16) : name(row.namespace)) },
      { name: "Tenant", sort: (row) => row.tenant, cell: (row) => name(row.tenant, "(no tenant)") },
      { name: "Tokens", right: true, sort: (row) => row.tokens, cell: (row) => number(row.tokens) },
      { name: "Chunks", right: true, sort: (row) => row.chunks, cell: (row) => number(row.chunks) },
      { name: "Ends in", right: true, sort: left, cell: (row) => [span(left(row)), " ", bar(left(row) / row.ttl_s, `${span(left(row))} of ${span(row.ttl_s)} left`)] },
      { name: "Id", cell: (row) => id(row.id) },
    ], rows, { key: (row) => row.id, sort: state.sort.Pins, empty: doc.pins.length ? "no pin that matches" : "nothing is pinned" })),
    freshness(doc.sources),
  ];
}
