// Elements and words: how everything on the page is made, and how numbers and names are said.
// Text goes in as text nodes only; nothing here or elsewhere parses markup, so a name that looks like markup stays a name.

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

export const el = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

// Makes `old` look like `fresh` and keeps what need not change: focus, scrolling, open details, selected text.
// An element with data-own looks after its children by itself.
export function patch(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.dataset?.key !== fresh.dataset?.key) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open" && name !== "style") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  // Not as an attribute, which the content security policy forbids.
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  if (old.dataset.own !== undefined) return;
  patchChildren(old, [...fresh.childNodes]);
}

export function patchChildren(parent, fresh) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.dataset?.key) keyed.set(child.dataset.key, child);
  fresh.forEach((child, at) => {
    let old = parent.childNodes[at];
    const same = child.dataset?.key && keyed.get(child.dataset.key);
    if (same && same !== old) {
      parent.insertBefore(same, old ?? null);
      old = same;
    }
    if (old) patch(old, child);
    else parent.append(child);
  });
  while (parent.childNodes.length > fresh.length) parent.lastChild.remove();
}

// What is invisible, or turns the text around it, is shown as its code.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb]|[\ud800-\udfff](?![\udc00-\udfff])/gu;
export const visible = (text) =>
  text.replace(HIDDEN, (one) => `⟨${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

const NAME_MAX = 48;
// A name that somebody chose: isolated from the text around it, shortened in the middle, whole in its title.
export function name(text, empty = "–") {
  if (text === null || text === undefined) return el("span", { class: "muted" }, "unknown");
  if (text === "") return el("span", { class: "muted" }, empty);
  const shown = [...visible(text)];
  const short = shown.length > NAME_MAX ? [...shown.slice(0, NAME_MAX - 12), "…", ...shown.slice(-11)] : shown;
  return el("bdi", { class: "name", title: shown.join("") }, short.join(""));
}
export const id = (hex, digits = 10) => el("code", { title: hex }, hex ? hex.slice(0, digits) : "–");

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1e6) return `${three(value / 1e6)} M`;
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return three(value);
}
export function three(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 2 : 3);
}
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let at = 0;
  while (Math.abs(value) >= 1000 && at < UNITS.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at ? three(value) : Math.round(value)} ${UNITS[at]}`;
}
export const counted = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
export const rate = (value) => `${bytes(value ?? 0)}/s`;
export const percent = (share) => (share === null || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`);
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 0 && seconds < 2) return `${three(seconds)} s`;
  const s = Math.max(0, Math.round(seconds));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}
export const ago = (at, now) => (at ? `${span(Math.max(2, now - at))} ago` : "never");
export const ratio = (part, whole) => (whole > 0 ? part / whole : null);

// A bar of a share from 0 to 1, with marks; said in words to those who do not see it.
export function bar(share, said, level = "", marks = []) {
  const width = Math.max(0, Math.min(1, share ?? 0));
  const inner = el("span", { class: "fill" });
  inner.style.width = `${(100 * width).toFixed(2)}%`;
  const lines = marks.map((mark) => {
    const line = el("span", { class: "mark", title: mark.text });
    line.style.left = `${(100 * Math.min(1, mark.at)).toFixed(2)}%`;
    return line;
  });
  return el("span", { class: `bar ${level}`, role: "img", "aria-label": said, title: said }, inner, lines);
}

// A table. columns: {name, title?, cell(row), sort?(row), wide?, right?}; on a phone each row becomes a card.
export function table(what, columns, rows, { key, sort, empty = "none", note } = {}) {
  const ordered = sort ? sorted(rows, columns, sort) : rows;
  const head = columns.map((column) => {
    const active = sort && sort.column === column.name;
    const direction = active ? (sort.down ? "descending" : "ascending") : null;
    const label = column.sort
      ? el("button", { type: "button", "data-act": "sort", "data-table": what, "data-column": column.name }, column.name, el("span", { class: "arrow", "aria-hidden": "true" }, active ? (sort.down ? "▾" : "▴") : ""))
      : column.name;
    return el("th", { scope: "col", role: "columnheader", class: column.right ? "right" : null, "aria-sort": direction, title: column.title }, label);
  });
  const body = ordered.map((row) =>
    el("tr", { role: "row", "data-key": key ? `row-${key(row)}` : null, class: row.class },
      columns.map((column, at) =>
        el(at === 0 ? "th" : "td", { role: at === 0 ? "rowheader" : "cell", scope: at === 0 ? "row" : null, "data-label": column.name, class: column.right ? "right" : null }, el("span", { class: "cell" }, column.cell(row))))));
  if (!body.length) return el("p", { class: "empty" }, empty);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": what },
    el("table", { role: "table" },
      el("caption", { class: "sr" }, what, note ?? ""),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, head)),
      el("tbody", { role: "rowgroup" }, body)));
}
function sorted(rows, columns, sort) {
  const value = columns.find((column) => column.name === sort.column)?.sort;
  if (!value) return rows;
  const order = (a, b) => (typeof a === "string" || typeof b === "string" ? String(a ?? "").localeCompare(String(b ?? "")) : (a ?? -Infinity) - (b ?? -Infinity));
  return [...rows].sort((a, b) => order(value(a), value(b)) * (sort.down ? -1 : 1));
}

// Whether a row has all words of the filter in what it says.
export function matches(filter, ...texts) {
  const all = texts.map((text) => (text ?? "").toString().toLowerCase()).join("\u0000");
  return filter.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

export const card = (title, attributes, ...children) => el("section", { class: "card", ...attributes }, title ? el("h2", {}, title) : null, children);

// How fresh sources are, and what is wrong with them: under every view.
export function freshness(sources) {
  return el("ul", { class: "sources", "aria-label": "Sources" },
    Object.entries(sources).map(([source, { age_s, error }]) =>
      el("li", { class: error ? "bad" : age_s === null ? "waiting" : "good", "data-key": source },
        el("b", {}, source), " ", error ? `${error}${age_s === null ? "" : ` (shown: ${span(Math.ceil(age_s))} old)`}` : age_s === null ? "being read …" : age_s < 2 ? "now" : `${span(age_s)} old`)));
}
