// The cluster at a glance: what needs attention, the figures of the last minute, and how they came about.

import { figure } from "./charts.js";
import { bar, bytes, card, counted, el, freshness, number, percent, rate, ratio } from "./dom.js";

const tile = (label, value, note, link) =>
  el("div", { class: "tile", "data-key": `tile-${label}` }, el("dt", {}, link ? el("a", { href: `#${link}` }, label) : label), el("dd", {}, el("strong", {}, value), note ? el("span", { class: "note" }, note) : null));

export function overview({ doc, history, state }) {
  const { rates, totals, cluster, space } = doc;
  const held = totals.memory_held_bytes ?? 0, memory = totals.memory_size_bytes ?? 0;
  const disk = totals.disk_bytes_max ?? 0, onDisk = totals.disk_held_bytes ?? 0;
  const chunks = rates.memory_chunks + rates.root_chunks;
  return [
    attention(doc.attention),
    el("dl", { class: "tiles" },
      tile("Hit ratio", percent(ratio(rates.tokens_matched, rates.tokens_asked)), `${percent(ratio(totals.tokens_matched, totals.tokens_asked))} since start`),
      tile("Read", rate(rates.memory_bytes + rates.root_bytes), `${number(chunks)} chunks/s, ${percent(ratio(rates.memory_chunks, chunks))} from memory`),
      tile("Written", rate(rates.written_bytes), `${counted(totals.chunks_written ?? 0, "chunk")} since start`),
      tile("Requests", `${number(rates.matches + rates.gets + rates.puts)}/s`, `${number(rates.gets)} get, ${number(rates.puts)} put`),
      tile("Workers", `${doc.workers.answering} of ${Math.max(doc.workers.known, doc.workers.answering)}`, beside(doc), "workers"),
      root(space, cluster),
      tile("Memory", memory ? [percent(held / memory), bar(held / memory, `${bytes(held)} of ${bytes(memory)} hold chunks`)] : "none", memory ? `${bytes(held)} of ${bytes(memory)}` : "workers without --memory", "workers"),
      disk ? tile("Local disk", [percent(onDisk / disk), bar(onDisk / disk, `${bytes(onDisk)} of ${bytes(disk)}`)], `${bytes(onDisk)} of ${bytes(disk)}`, "workers") : null,
      tile("Namespaces", cluster ? number(cluster.namespaces) : "–", cluster ? counted(cluster.tenants, "tenant") : null, "namespaces"),
      tile("Pins", cluster ? number(cluster.pins) : "–", cluster?.sweeps ? `${counted(cluster.sweeps, "sweep")} in flight` : "no sweep in flight", "pins"),
      tile("Damaged", number(damaged(totals)), doc.quarantine === null ? "quarantine unknown" : `${number(doc.quarantine)} in quarantine`, "damage")),
    el("div", { class: "row", role: "radiogroup", "aria-label": "Time shown" },
      [["fine", "15 minutes"], ["coarse", "24 hours"]].map(([step, label]) =>
        el("button", { type: "button", role: "radio", "aria-checked": String(state.step === step), "data-act": "step", "data-step": step, class: "choice", "data-key": `step-${step}` }, label))),
    el("div", { class: "charts" }, charts(history, state).map(figure)),
    freshness(doc.sources),
  ];
}

function beside({ cluster }) {
  return cluster ? `${counted(cluster.engines, "engine")} as ${cluster.engines === 1 ? "a node" : "nodes"}` : null;
}

// The share of what a collector lets chunks take; of the file system where none says so.
function root(space, cluster) {
  if (cluster?.capacity_bytes) {
    const { used_bytes: used, capacity_bytes: most } = cluster, free = space?.total_bytes ? `, ${bytes(space.free_bytes)} free on its file system` : "";
    return tile("Root", [percent(used / most), bar(used / most, `${bytes(used)} of ${bytes(most)} that chunks may take`, level(used / most))], `of ${bytes(most)} that chunks may take${free}`, "capacity");
  }
  if (!space?.total_bytes) return tile("Root", "–", "room unknown", "capacity");
  const used = space.total_bytes - space.free_bytes, share = used / space.total_bytes;
  return tile("Root", [percent(share), bar(share, `${bytes(used)} of ${bytes(space.total_bytes)} used`, level(share))], `of its file system, ${bytes(space.free_bytes)} free`, "capacity");
}

export function charts(history, state) {
  if (!history) return [];
  const { columns: c, step_s: step } = history;
  const at = c.at_s;
  const base = { at, step, empty: state.step === "coarse" ? "A minute has to pass first." : undefined };
  const share = at.map((_, i) => ratio(c.tokens_matched[i], c.tokens_asked[i]));
  return [
    { ...base, id: "hits", title: "Hit ratio", max: 1, filled: true, format: percent, series: [{ name: "tokens found", class: "s1", values: share }] },
    { ...base, id: "chunks", title: "Chunks read per second", stacked: true, format: number, series: [
      { name: "memory", class: "s1", values: without(c.memory_chunks, c.peers_chunks, c.disk_chunks) }, { name: "peers", class: "s2", values: c.peers_chunks },
      { name: "local disk", class: "s3", values: c.disk_chunks }, { name: "root", class: "s4", values: c.root_chunks }] },
    { ...base, id: "read", title: "Read by clients", stacked: true, binary: true, format: rate, series: [
      { name: "from memory", class: "s1", values: c.memory_bytes }, { name: "from the root", class: "s4", values: c.root_bytes }] },
    { ...base, id: "write", title: "Written", binary: true, format: rate, series: [
      { name: "by clients", class: "s1", values: c.received_bytes }, { name: "to the root", class: "s4", values: c.written_bytes }] },
    { ...base, id: "requests", title: "Requests per second", format: number, series: [
      { name: "match", class: "s1", values: c.matches }, { name: "get", class: "s2", values: c.gets }, { name: "put", class: "s3", values: c.puts }] },
    { ...base, id: "memory", title: "Memory", binary: true, format: bytes, filled: true, series: [
      { name: "chunks", class: "s1", values: c.memory_held_bytes }, { name: "not on the root yet", class: "s3", values: c.behind_bytes }] },
    { ...base, id: "load", title: "Under way", format: number, least: 4, series: [
      { name: "calls", class: "s1", values: c.calls }, { name: "waiting for the root", class: "s3", values: c.queue }] },
    { ...base, id: "trouble", title: "Trouble per second", format: number, series: [
      { name: "refused", class: "s3", values: c.refused }, { name: "damaged", class: "s5", values: c.damaged }] },
  ];
}

// What memory served, without what a peer or the disk had just given it.
const without = (all, peers, disk) => all.map((value, i) => Math.max(0, value - peers[i] - disk[i]));
const damaged = (totals) => ["miss_damaged", "memory_damaged", "disk_damaged", "peers_damaged"].reduce((sum, key) => sum + (totals[key] ?? 0), 0);
const level = (share) => (share > 0.98 ? "bad" : share > 0.96 ? "warn" : "");

function attention(items) {
  if (!items.length) return el("p", { class: "calm", "data-key": "calm" }, el("span", { class: "dot good" }), " Nothing needs attention.");
  return card("Needs attention", { class: "card attention", "data-key": "attention" },
    el("ul", {}, items.map((item) =>
      el("li", { class: item.level }, el("span", { class: "tag" }, item.level === "bad" ? "problem" : "note"), el("span", {}, item.text, " "), el("a", { href: `#${item.view}` }, `see ${item.view}`)))));
}
