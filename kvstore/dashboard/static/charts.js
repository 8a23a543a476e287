// Charts over time and the flame of prefixes, drawn as SVG at the width they have; no library.

import { el, svg } from "./dom.js";

const HEIGHT = 150, LEFT = 62, RIGHT = 8, TOP = 8, BOTTOM = 20;

// A figure that draws itself: spec {id, title, series: [{name, class, values}], at, format, stacked?, max?, empty}.
export function figure(spec) {
  const last = spec.series.map((one) => one.values.at(-1));
  const legend = el("ul", { class: "legend" }, spec.series.map((one, at) =>
    el("li", {}, el("span", { class: `swatch ${one.class}`, "aria-hidden": "true" }), one.name, " ", el("b", {}, last[at] === undefined || last[at] === null ? "–" : spec.format(last[at])))));
  const node = el("figure", { class: "chart card", "data-key": spec.id, "data-chart": spec.id },
    el("figcaption", {}, el("h2", {}, spec.title), legend),
    el("div", { class: "plot", "data-own": true, "data-plot": spec.id }));
  return node;
}

const plots = new Map();

export function draw(panel, specs) {
  for (const spec of specs) {
    const place = panel.querySelector(`[data-plot="${spec.id}"]`);
    if (place) plot(place, spec);
  }
}

function plot(place, spec) {
  const width = Math.max(220, Math.floor(place.clientWidth));
  const { at, series } = spec;
  if (at.length < 2) {
    place.replaceChildren(el("p", { class: "empty" }, spec.empty ?? "Nothing to draw yet: two readings are needed."));
    plots.delete(place);
    return;
  }
  const from = at[0], to = at.at(-1);
  const tops = spec.stacked ? at.map((_, i) => series.reduce((sum, one) => sum + (one.values[i] ?? 0), 0)) : series.flatMap((one) => one.values);
  const max = spec.max ?? nice(Math.max(spec.least ?? 0, ...tops.filter((value) => value !== null)), spec.binary);
  const x = (t) => LEFT + ((t - from) / Math.max(1, to - from)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - Math.min(1, value / max)) * (HEIGHT - TOP - BOTTOM);
  const gap = 2.6 * (spec.step ?? 2) + 1;

  const labels = levels(max, spec.format);
  const grid = [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const line = y(share * max);
    return [svg("line", { x1: LEFT, x2: width - RIGHT, y1: line, y2: line, class: share ? "grid" : "axis" }),
      labels.has(share) ? svg("text", { x: LEFT - 6, y: line + 4, class: "tick end" }, labels.get(share)) : null];
  });
  const times = ticks(from, to, width).map((t) => svg("text", { x: x(t), y: HEIGHT - 5, class: "tick middle" }, clock(t, to - from > 7200)));
  const below = new Array(at.length).fill(0);
  const shapes = series.map((one) => {
    const base = spec.stacked ? [...below] : null;
    if (spec.stacked) one.values.forEach((value, i) => { below[i] += value ?? 0; });
    // What adds nothing to a stack is not drawn: its line would hide the one below.
    const tops = one.values.map((value, i) => (value === null || (base && !value) ? null : value + (base ? base[i] : 0)));
    const area = spec.stacked || spec.filled ? svg("path", { class: `area ${one.class}`, d: areas(at, tops, base, x, y, gap) }) : null;
    return [area, svg("path", { class: `line ${one.class}`, d: lines(at, tops, x, y, gap) })];
  });
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  const words = summary(spec);
  const drawing = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": words }, grid, times, shapes, cross);
  const tip = el("div", { class: "tip", hidden: true, role: "status" });
  const before = plots.get(place);
  if (before && before.drawing.isConnected) {
    // Kept, with its focus; only what is in it is new.
    before.drawing.replaceChildren(...drawing.childNodes);
    for (const attribute of ["width", "viewBox", "aria-label"]) before.drawing.setAttribute(attribute, drawing.getAttribute(attribute));
    Object.assign(before, { spec, x, width, cross });
    if (before.index !== null) point(before, Math.min(before.index, at.length - 1));
    return;
  }
  const state = { spec, x, width, cross, tip, drawing, index: null };
  plots.set(place, state);
  drawing.addEventListener("pointermove", (event) => point(state, nearest(state, event.clientX - drawing.getBoundingClientRect().left)));
  drawing.addEventListener("pointerleave", () => leave(state));
  drawing.addEventListener("blur", () => leave(state));
  drawing.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!step) return;
    event.preventDefault();
    const last = state.spec.at.length - 1;
    point(state, Math.max(0, Math.min(last, (state.index ?? last + 1) + step)));
  });
  place.replaceChildren(drawing, tip);
}

function nearest(state, px) {
  let best = 0;
  state.spec.at.forEach((t, i) => { if (Math.abs(state.x(t) - px) < Math.abs(state.x(state.spec.at[best]) - px)) best = i; });
  return best;
}
function point(state, index) {
  const { spec, tip, cross } = state;
  state.index = index;
  const px = state.x(spec.at[index]);
  cross.setAttribute("x1", px);
  cross.setAttribute("x2", px);
  tip.replaceChildren(el("b", {}, clock(spec.at[index], false, true)), ...spec.series.map((one) =>
    el("span", {}, el("span", { class: `swatch ${one.class}` }), `${one.name} `, el("b", {}, one.values[index] === null ? "–" : spec.format(one.values[index])))));
  tip.hidden = false;
  const room = tip.offsetWidth + 14;
  tip.style.left = `${px + room > state.width ? px - room : px + 10}px`;
}
function leave(state) {
  state.index = null;
  state.tip.hidden = true;
  state.cross.setAttribute("x1", -9);
  state.cross.setAttribute("x2", -9);
}
function summary(spec) {
  const said = spec.series.map((one) => {
    const values = one.values.filter((value) => value !== null);
    if (!values.length) return `${one.name}: nothing`;
    return `${one.name}: now ${spec.format(values.at(-1))}, between ${spec.format(Math.min(...values))} and ${spec.format(Math.max(...values))}`;
  });
  return `${spec.title}. ${said.join("; ")}. Arrow keys read single values.`;
}
function runs(at, values, gap) {
  const found = [];
  let run = [];
  at.forEach((t, i) => {
    if (values[i] === null || (run.length && t - at[run.at(-1)] > gap)) {
      if (run.length) found.push(run);
      run = [];
    }
    if (values[i] !== null) run.push(i);
  });
  if (run.length) found.push(run);
  return found;
}
// A round number on an axis needs no digits that are zero.
const brief = (text) => text.replace(/(\d)\.0+(?=\D|$)/, "$1").replace(/(\.\d*[1-9])0+(?=\D|$)/, "$1");
// Labels by their height; one that reads as another, because the digits do not tell them apart, is left out.
export function levels(max, format) {
  const labels = new Map();
  for (const share of [0, 1, 0.5]) {
    const text = brief(format(share * max));
    if (![...labels.values()].includes(text)) labels.set(share, text);
  }
  return labels;
}
const place = (value) => value.toFixed(1);
function lines(at, values, x, y, gap) {
  return runs(at, values, gap).map((run) => "M" + run.map((i) => `${place(x(at[i]))} ${place(y(values[i]))}`).join("L")).join("");
}
function areas(at, values, base, x, y, gap) {
  return runs(at, values, gap).map((run) => {
    const top = run.map((i) => `${place(x(at[i]))} ${place(y(values[i]))}`);
    const bottom = [...run].reverse().map((i) => `${place(x(at[i]))} ${place(y(base ? base[i] : 0))}`);
    return `M${top.join("L")}L${bottom.join("L")}Z`;
  }).join("");
}
function nice(value, binary) {
  if (!(value > 0)) return 1;
  const unit = binary ? 1024 ** Math.max(0, Math.floor(Math.log(value) / Math.log(1024))) : 1;
  const scaled = value / unit, power = 10 ** Math.floor(Math.log10(scaled));
  return unit * power * [1, 2, 4, 5, 8, 10].find((step) => step * power >= scaled * 1.02 || step === 10);
}
const STEPS = [10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600];
function ticks(from, to, width) {
  const step = STEPS.find((each) => (to - from) / each <= width / 90) ?? 86400;
  const found = [];
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) found.push(t);
  // The first and last must not be cut off at the edges.
  return found.filter((t) => ((t - from) / (to - from)) * (width - LEFT - RIGHT) > 14 && ((to - t) / (to - from)) * (width - LEFT - RIGHT) > 14);
}
const two = (value) => String(value).padStart(2, "0");
function clock(t, short, seconds) {
  const when = new Date(1000 * t);
  const base = `${two(when.getHours())}:${two(when.getMinutes())}`;
  return short || (!seconds && when.getSeconds() === 0) ? base : `${base}:${two(when.getSeconds())}`;
}

// The flame of runs: width is bytes with all that continues a run, one row for each fork; colour is the last use.
const ROW = 24, ROWS_MAX = 14;
export function flame(place, runs, { words, colour, label }) {
  const width = Math.max(220, Math.floor(place.clientWidth));
  const children = new Map();
  const known = new Set(runs.map((run) => run.id));
  const tops = [];
  for (const run of runs) {
    if (run.above && known.has(run.above)) children.set(run.above, [...(children.get(run.above) ?? []), run]);
    else tops.push(run);
  }
  const total = tops.reduce((sum, run) => sum + run.below.bytes, 0) || 1;
  const shapes = [];
  let deepest = 0;
  const row = (list, left, level) => {
    if (level >= ROWS_MAX) return;
    for (const run of list) {
      const size = (run.below.bytes / total) * width;
      if (size < 1.5) {
        left += size;
        continue;
      }
      deepest = Math.max(deepest, level);
      const text = label(run);
      const shown = size > 46 ? text.slice(0, Math.floor((size - 10) / 6.4)) : "";
      shapes.push(svg("g", { "data-act": "zoom", "data-id": run.id, class: "flame-run" },
        svg("title", {}, words(run)),
        svg("rect", { x: (left + 0.5).toFixed(1), y: level * ROW + 0.5, width: Math.max(1, size - 1).toFixed(1), height: ROW - 2, rx: 2, class: colour(run) }),
        shown.length > 3 ? svg("text", { x: (left + 6).toFixed(1), y: level * ROW + 16, class: `flame-text ${colour(run)}` }, shown.length < text.length ? `${shown.slice(0, -1)}…` : shown) : null));
      row(children.get(run.id) ?? [], left, level + 1);
      left += size;
    }
  };
  row(tops, 0, 0);
  const height = (deepest + 1) * ROW;
  // What it shows the table below says as well, row by row.
  place.replaceChildren(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", class: "flame" }, shapes));
}
