// The explorer of prefixes: which are stored, how long, how big, how lately used; as a flame and as a tree.

import { ago, bar, bytes, card, el, freshness, id, matches, name, number, percent } from "./dom.js";

const ORDERS = { bytes: "by size", recent: "by last use", long: "by length" };
const TIMES = ["never again", "once", "twice", "three times or more"];

const tokens = (run, chunks) => (run.namespace.chunk_tokens ? `${number(chunks * run.namespace.chunk_tokens)} tokens` : `${number(chunks)} chunks`);
export const label = (run) => tokens(run, run.chunks);
export const words = (run) => `${label(run)} from ${tokens(run, run.first)} on, ${run.namespace.name ?? run.namespace.id}: ${bytes(run.below.bytes)} with all that continues it`;
export const heat = (now) => (run) => {
  const idle = now - run.below.last_use_s;
  return idle < 180 ? "heat4" : idle < 900 ? "heat3" : idle < 3600 ? "heat2" : idle < 86400 ? "heat1" : "heat0";
};

export function prefixes({ doc, state }) {
  const { runs, way } = doc;
  if (doc.share === null) {
    const error = doc.sources.forest.error;
    return [card("Prefixes", {}, el("p", { class: error ? "bad" : "empty" }, error ?? "Reading headers on the root …")), freshness(doc.sources)];
  }
  const seen = runs.filter((run) => matches(state.filter, run.namespace.name, run.namespace.tenant, run.id));
  const scope = doc.share < 1 ? `A sample: ${percent(doc.share)} of the root, ${number(doc.chunks_seen)} chunks looked at; sizes and counts are estimates.` : `All of the root: ${number(doc.chunks_seen)} chunks.`;
  return [
    el("div", { class: "row tools-row" },
      el("label", {}, "Namespace ", el("select", { "data-act": "namespace", id: "namespace-select" },
        el("option", { value: "", selected: !state.namespace }, "all"),
        doc.namespaces.map((one) => el("option", { value: one.id, selected: state.namespace === one.id }, option(one))))),
      el("div", { role: "radiogroup", "aria-label": "Order", class: "row" }, Object.entries(ORDERS).map(([order, text]) =>
        el("button", { type: "button", role: "radio", "aria-checked": String(state.order === order), "data-act": "order", "data-order": order, class: "choice" }, text)))),
    el("p", { class: "muted" }, scope, doc.is_whole ? "" : " It was cut short: some prefixes are missing.", doc.unreadable ? ` ${number(doc.unreadable)} files could not be read.` : ""),
    way.length || state.at ? el("nav", { "aria-label": "Way to this prefix", class: "crumbs" },
      el("button", { type: "button", "data-act": "zoom", "data-id": "" }, "all prefixes"),
      way.map((run) => [" › ", el("button", { type: "button", "data-act": "zoom", "data-id": run.id }, label(run))]),
      runs.length ? [" › ", el("b", {}, label(runs[0]))] : null) : null,
    runs.length ? card("Where the bytes are", {},
      el("div", { class: "flame-place", "data-own": true, "data-flame": true }),
      el("p", { class: "heat-legend muted" }, "Width: bytes with all that continues a prefix. Last used: ",
        [["heat4", "3 min"], ["heat3", "15 min"], ["heat2", "1 h"], ["heat1", "a day"], ["heat0", "longer"]].map(([shade, text]) => [el("span", { class: `swatch ${shade}`, "aria-hidden": "true" }), `${text} `])))
      : null,
    card("Prefixes", {}, seen.length ? tree(seen, doc, state) : el("p", { class: "empty" }, runs.length ? "no prefix that matches" : "nothing is stored")),
    blocks(doc),
    freshness(doc.sources),
  ];
}

function option(one) {
  const said = `${one.name ?? one.id}${one.tenant ? ` (${one.tenant})` : ""}`;
  return said.length > 60 ? `${said.slice(0, 59)}…` : said;
}

function tree(runs, doc, state) {
  const known = new Set(runs.map((run) => run.id));
  const below = new Map();
  for (const run of runs) {
    const above = known.has(run.above) ? run.above : "";
    below.set(above, [...(below.get(above) ?? []), run]);
  }
  const most = Math.max(1, ...runs.map((run) => run.below.bytes));
  const rows = [];
  const add = (run, level) => {
    const inner = below.get(run.id) ?? [];
    const open = state.open.has(run.id) || (state.at && level === 0) || Boolean(state.filter);
    rows.push(line(run, level, inner.length, open, most, doc.now_s));
    if (open) inner.forEach((one) => add(one, level + 1));
  };
  (below.get("") ?? []).forEach((run) => add(run, 0));
  const heads = ["Prefix", "Namespace", "Size", "Longest", "Ends", "Last use", "Used again"];
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Prefixes" },
    el("table", { role: "treegrid", class: "tree" },
      el("caption", { class: "sr" }, "Prefixes; a row can be opened to show what continues it"),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, heads.map((head, at) => el("th", { scope: "col", role: "columnheader", class: at > 1 ? "right" : null }, head)))),
      el("tbody", { role: "rowgroup" }, rows)));
}

function line(run, level, inner, open, most, now) {
  const cell = (head, ...inside) => el("td", { role: "gridcell", "data-label": head, class: head === "Namespace" ? null : "right" }, el("span", { class: "cell" }, inside));
  const depth = Math.min(level, 12);
  const first = el("span", { class: "cell branch" },
    inner ? el("button", { type: "button", class: "toggle", "data-act": "toggle", "data-id": run.id, "aria-expanded": String(open), "aria-label": `${open ? "Close" : "Open"} ${label(run)}` }, open ? "▾" : "▸") : el("span", { class: "toggle" }),
    el("button", { type: "button", class: "link", "data-act": "zoom", "data-id": run.id, title: words(run) }, label(run)),
    " ", el("span", { class: "muted" }, run.first ? `from ${number(run.first * (run.namespace.chunk_tokens ?? 1))}` : "", run.rooted ? "" : " (its beginning is gone)", run.forks > 1 ? ` · ${run.forks} ways on` : ""));
  first.style.paddingInlineStart = `${depth * 14}px`;
  return el("tr", { role: "row", "aria-level": level + 1, "aria-expanded": inner ? String(open) : null, "data-key": `run-${run.id}` },
    el("th", { scope: "row", role: "rowheader", "data-label": "Prefix" }, first),
    cell("Namespace", name(run.namespace.name), " ", run.namespace.tenant ? el("span", { class: "muted" }, name(run.namespace.tenant)) : ""),
    cell("Size", bytes(run.below.bytes), " ", bar(run.below.bytes / most, `${percent(run.below.bytes / most)} of the largest`, heat(now)(run))),
    cell("Longest", tokens(run, run.first + run.below.depth)),
    cell("Ends", number(run.below.ends)),
    cell("Last use", ago(run.below.last_use_s, now)),
    cell("Used again", TIMES[run.below.uses] ?? number(run.below.uses)));
}

function blocks(doc) {
  const rows = doc.namespaces.filter((one) => one.blocks.count);
  if (!rows.length) return null;
  return card("Blocks that engines hashed themselves", {}, el("ul", {}, rows.map((one) => el("li", {}, name(one.name), ` ${number(one.blocks.count)} blocks, ${bytes(one.blocks.bytes)} `, id(one.id, 16)))));
}
