// Namespaces and tenants: what there is, and how much of the root each takes.

import { bar, bytes, card, counted, el, freshness, id, matches, name, number, percent, table } from "./dom.js";

export function namespaces({ doc, state }) {
  const all = doc.namespaces;
  // A plan counts what is on the root; it has not seen a namespace that is new.
  const unknown = doc.is_counted ? "–" : "counting …";
  const total = all.reduce((sum, row) => sum + (row.bytes ?? 0), 0) || 1;
  const rows = all.filter((row) => matches(state.filter, row.name, row.tenant, row.fingerprint, row.id));
  const tenants = new Map();
  for (const row of rows) {
    const key = JSON.stringify(row.tenant);
    const sum = tenants.get(key) ?? { tenant: row.tenant, namespaces: 0, chunks: null, bytes: null };
    tenants.set(key, { ...sum, namespaces: sum.namespaces + 1, chunks: plus(sum.chunks, row.chunks), bytes: plus(sum.bytes, row.bytes) });
  }
  const size = (row) => (row.bytes !== null ? [bytes(row.bytes), " ", bar(row.bytes / total, `${percent(row.bytes / total)} of all`)] : unknown);
  return [
    doc.count > all.length ? el("p", { class: "muted" }, `The ${all.length} largest, of ${number(doc.count)}.`) : null,
    doc.odd ? el("p", { class: "bad" }, `${counted(doc.odd, "record")} in etcd cannot be read: of another version?`) : null,
    card("Tenants", {}, table("Tenants", [
      { name: "Tenant", sort: (row) => row.tenant, cell: (row) => name(row.tenant, "(no tenant)") },
      { name: "Namespaces", right: true, sort: (row) => row.namespaces, cell: (row) => number(row.namespaces) },
      { name: "Chunks", right: true, sort: (row) => row.chunks, cell: (row) => (row.chunks !== null ? number(row.chunks) : unknown) },
      { name: "Size", right: true, sort: (row) => row.bytes, cell: size },
    ], [...tenants.values()], { key: (row) => JSON.stringify(row.tenant), sort: state.sort.Tenants ?? { column: "Size", down: true }, empty: "no tenant that matches" })),
    card("Namespaces", {}, table("Namespaces", [
      { name: "Namespace", sort: (row) => row.name, cell: (row) => name(row.name) },
      { name: "Tenant", sort: (row) => row.tenant, cell: (row) => name(row.tenant, "(no tenant)") },
      { name: "Chunks", right: true, sort: (row) => row.chunks, cell: (row) => (row.chunks !== null ? number(row.chunks) : unknown) },
      { name: "Size", right: true, sort: (row) => row.bytes, cell: size },
      { name: "Layout", title: "layers × K and V × tokens × heads × dim", cell: (row) => (row.layout ? layout(row.layout) : "–") },
      { name: "Weights", cell: (row) => (row.fingerprint ? name(row.fingerprint.length > 24 ? `${row.fingerprint.slice(0, 10)}…${row.fingerprint.slice(-8)}` : row.fingerprint) : "–") },
      { name: "Settings", cell: (row) => { const list = Object.entries(row.attributes ?? {}); return list.length ? list.map(([key, value]) => el("div", {}, name(key), " = ", name(value))) : "–"; } },
      { name: "Id", cell: (row) => id(row.id, 16) },
    ], rows, { key: (row) => row.id, sort: state.sort.Namespaces ?? { column: "Size", down: true }, empty: all.length ? "no namespace that matches" : "no namespace yet" })),
    freshness(doc.sources),
  ];
}
const plus = (a, b) => (b === null ? a : (a ?? 0) + b);
const layout = (one) => `${one.layers} × 2 × ${one.chunk_tokens} × ${one.kv_heads} × ${one.head_dim} ${one.dtype}`;
