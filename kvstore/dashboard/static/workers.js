// Workers with what they do now, their counts, and the sessions of engines that are nodes themselves.

import { ago, bar, bytes, card, el, freshness, id, matches, name, number, percent, rate, ratio, table } from "./dom.js";

export function workers({ doc, state }) {
  const rows = doc.workers.filter((row) => matches(state.filter, row.address, row.host, row.version, row.session));
  const count = (row, key) => row.counts?.[key] ?? 0;
  return [
    card("Workers", {}, table("Workers", [
      { name: "Worker", sort: (row) => row.address, cell: (row) => [el("bdi", { class: "name strong" }, row.address), el("div", { class: "muted" }, name(row.host), row.pid ? ` pid ${row.pid}` : "", row.version ? [" ", name(row.version)] : "")] },
      { name: "State", cell: state_ },
      { name: "Hit ratio", right: true, title: "of all tokens since it started", sort: (row) => ratio(count(row, "tokens_matched"), count(row, "tokens_asked")), cell: (row) => percent(ratio(count(row, "tokens_matched"), count(row, "tokens_asked"))) },
      { name: "Reads", right: true, title: "sent to clients, mapped memory included", sort: (row) => read(row), cell: (row) => rate(read(row)) },
      { name: "Requests", right: true, sort: (row) => asked(row), cell: (row) => `${number(asked(row))}/s` },
      { name: "Memory", right: true, sort: (row) => count(row, "memory_held_bytes"), cell: (row) => (count(row, "memory_size_bytes") ? [bytes(count(row, "memory_held_bytes")), " ", bar(count(row, "memory_held_bytes") / count(row, "memory_size_bytes"), `of ${bytes(count(row, "memory_size_bytes"))}`)] : "–") },
      { name: "Behind", right: true, title: "acknowledged, not on the root yet", sort: (row) => count(row, "behind_bytes"), cell: (row) => bytes(count(row, "behind_bytes")) },
      { name: "Calls", right: true, sort: (row) => count(row, "calls_in_flight"), cell: (row) => number(count(row, "calls_in_flight")) },
      { name: "Holds", right: true, sort: (row) => count(row, "holds"), cell: (row) => number(count(row, "holds")) },
      { name: "Session", cell: (row) => (row.session ? id(row.session) : el("span", { class: "muted" }, "none in etcd")) },
    ], rows, { key: (row) => row.address, sort: state.sort.Workers, empty: doc.workers.length ? "no worker that matches" : "no worker is known" })),
    doc.engines.length ? card("Engines that are nodes themselves", {}, table("Engines", [
      { name: "Session", cell: (row) => id(row.session, 32) },
      { name: "Behind collectors by", right: true, title: "revisions of etcd between now and the last that it announced", cell: (row) => (row.announced === null ? "unknown" : number(Math.max(0, (doc.revision ?? row.announced) - row.announced))) },
    ], doc.engines.filter((row) => matches(state.filter, row.session)), { key: (row) => row.session })) : null,
    rows.filter((row) => row.counts).map((row) =>
      el("details", { class: "card", "data-key": `counts-${row.address}` }, el("summary", {}, "All counts of ", el("bdi", {}, row.address)), counts(row, doc.now_s))),
    freshness(doc.sources),
  ];
}

const read = (row) => row.rates.wire_bytes_out ?? 0;
const asked = (row) => (row.rates.requests_match ?? 0) + (row.rates.requests_get ?? 0) + (row.rates.requests_put ?? 0);

function state_(row) {
  if (row.error) return el("span", { class: "bad", title: row.error }, "no answer: ", row.error);
  const counts = row.counts ?? {};
  const said = [
    counts.root_hangs ? el("span", { class: "bad" }, "root hangs") : null,
    counts.session_alive === 0 ? el("span", { class: "bad" }, "no session") : null,
    counts.protected === 0 ? el("span", { class: "bad" }, "not protected") : null,
    counts.draining ? el("span", { class: "warn" }, "draining") : null,
  ].filter(Boolean);
  return said.length ? said.map((one) => [one, " "]) : el("span", { class: "good" }, "serves");
}

function counts(row, now_s) {
  const list = Object.entries(row.counts).filter(([, value]) => value).sort(([a], [b]) => a.localeCompare(b));
  return el("dl", { class: "counts" }, list.map(([key, value]) => {
    const time = key.endsWith("_timestamp_seconds");
    const shown = time ? (at) => ago(at, now_s) : key.split("_").includes("bytes") ? bytes : number;
    const now = time ? 0 : row.rates[key];
    return el("div", { "data-key": key }, el("dt", {}, key.replace("_timestamp_seconds", "").replaceAll("_", " ")), el("dd", {}, shown(value), now ? el("span", { class: "muted" }, ` ${shown(now)}/s`) : null));
  }));
}
