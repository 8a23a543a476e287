// Capacity, and what garbage collection would take next and why.

import { bar, bytes, card, counted, el, freshness, id, matches, name, number, percent, span, table } from "./dom.js";

export function capacity({ doc, state }) {
  const { plan, space } = doc;
  return [
    el("div", { class: "columns" }, room(doc), next(doc)),
    plan ? perNamespace(plan, state) : null,
    sweeps(doc),
    freshness(doc.sources),
    space ? null : el("p", { class: "muted" }, "The root did not say yet how much room it has."),
  ];
}

function room({ plan, space, is_full }) {
  const rows = [];
  if (plan?.capacity_bytes) {
    const { used_bytes_before: used, capacity_bytes: most, target_bytes: target } = plan;
    rows.push(el("div", { class: "gauge" },
      el("p", {}, el("strong", {}, bytes(used)), ` of ${bytes(most)} that chunks may take (${percent(used / most)})`),
      bar(used / most, `chunks take ${bytes(used)} of ${bytes(most)}`, used > most ? "bad" : used > target ? "warn" : "", [{ at: target / most, text: `eviction keeps them below ${bytes(target)}` }]),
      el("p", { class: "muted" }, `Eviction keeps them below ${bytes(target)}.`)));
  } else if (plan) {
    rows.push(el("p", {}, el("strong", {}, bytes(plan.used_bytes_before)), " in chunks; the root does not say how much room there is."));
  }
  if (space?.total_bytes) {
    const used = space.total_bytes - space.free_bytes;
    rows.push(el("div", { class: "gauge" },
      el("p", {}, el("strong", {}, bytes(space.free_bytes)), ` free of ${bytes(space.total_bytes)} of the file system`),
      bar(used / space.total_bytes, `${bytes(used)} of ${bytes(space.total_bytes)} used, by whomever`, used / space.total_bytes > 0.95 ? "bad" : "")));
  }
  if (is_full) rows.push(el("p", { class: "bad" }, "A collector says that the root is full: nodes refuse puts until there is room."));
  return card("Room", {}, rows.length ? rows : el("p", { class: "empty" }, "Not known yet."), space ? el("p", { class: "muted wrap" }, el("code", {}, space.url)) : null);
}

function next({ plan, sources }) {
  if (!plan) {
    const error = sources.plan.error;
    return card("What would go next", {}, el("p", { class: error ? "bad" : "empty" }, error ?? "Asking the collector …"));
  }
  const chosen = Object.entries(plan.chosen), kept = Object.entries(plan.kept);
  const freed = plan.used_bytes_before - plan.used_bytes_after;
  const rows = (list) => list.map(([reason, tally]) => ({ reason, ...tally }));
  const columns = [
    { name: "Why", cell: (row) => row.reason },
    { name: "Chunks", right: true, cell: (row) => number(row.chunks) },
    { name: "Size", right: true, cell: (row) => bytes(row.bytes) },
  ];
  return card("What would go next", {},
    el("p", {}, chosen.length ? ["A round that began now would take ", el("strong", {}, bytes(freed)), "."] : "A round that began now would take nothing."),
    chosen.length ? table("What would go, by reason", columns, rows(chosen), { key: (row) => row.reason }) : null,
    kept.length ? [el("h3", {}, "Kept all the same"), table("What is kept, by reason", columns, rows(kept), { key: (row) => row.reason })] : null,
    el("p", { class: "muted" }, `kvstore-gc --dry-run looked at ${counted(plan.scanned.chunks, "chunk")}, ${bytes(plan.scanned.bytes)}, in ${span(Object.values(plan.seconds).reduce((a, b) => a + b, 0))}.`));
}

function perNamespace(plan, state) {
  const rows = plan.namespaces.filter((row) => matches(state.filter, row.name, row.tenant, row.id));
  const taken = (row, what) => Object.values(row.chosen).reduce((sum, tally) => sum + tally[what], 0);
  const most = Math.max(1, ...plan.namespaces.map((row) => row.scanned.bytes));
  return card("By namespace", {}, table("What namespaces have, and what would go of it", [
    { name: "Namespace", sort: (row) => row.name, cell: (row) => name(row.name) },
    { name: "Tenant", sort: (row) => row.tenant, cell: (row) => name(row.tenant) },
    { name: "Chunks", right: true, sort: (row) => row.scanned.chunks, cell: (row) => number(row.scanned.chunks) },
    { name: "Size", right: true, sort: (row) => row.scanned.bytes, cell: (row) => [bytes(row.scanned.bytes), bar(row.scanned.bytes / most, `${percent(row.scanned.bytes / most)} of the largest`)] },
    { name: "Would go", right: true, sort: (row) => taken(row, "bytes"), cell: (row) => (taken(row, "chunks") ? bytes(taken(row, "bytes")) : "–") },
    { name: "Why", cell: (row) => Object.keys(row.chosen).join(", ") || "–" },
  ], rows, { key: (row) => row.id, sort: state.sort["What namespaces have, and what would go of it"] ?? { column: "Size", down: true }, empty: "nothing that matches" }));
}

function sweeps({ sweeps: list, collectors }) {
  if (list === null) return null;
  const victims = list.reduce((sum, one) => sum + (one.victims ?? 0), 0);
  return card("Collectors", {},
    el("p", {}, collectors.length ? [`${collectors.length} at work: `, collectors.map((one) => [id(one), " "])] : "None runs as a service."),
    el("p", {}, list.length ? `${counted(list.length, "sweep")} in flight, of ${counted(victims, "chunk")}.` : "No sweep is in flight."));
}
