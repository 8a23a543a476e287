// The page: which view is shown, its documents every two seconds, the keys. Everything else is in the views.

import { charts, overview } from "./overview.js";
import { capacity } from "./capacity.js";
import { damage } from "./damage.js";
import { draw, flame } from "./charts.js";
import { el, patchChildren, span } from "./dom.js";
import { heat, label, prefixes, words } from "./prefixes.js";
import { namespaces } from "./namespaces.js";
import { pins } from "./pins.js";
import { workers } from "./workers.js";

const VIEWS = { overview, capacity, namespaces, pins, workers, prefixes, damage };
const NAMES = Object.keys(VIEWS);
const POLL_MS = 2000, PATIENCE_MS = 10000;
// What is read anew once a minute at most need not be asked for every other second, once it is there.
const SLOW = { prefixes: (doc) => doc.share !== null, capacity: (doc) => doc.plan, namespaces: (doc) => doc.is_counted };
const SLOW_MS = 8000;
const THEMES = ["auto", "light", "dark"];

const at = (id) => document.getElementById(id);
const state = { view: "overview", filter: "", sort: {}, step: "fine", namespace: "", order: "bytes", at: "", open: new Set() };
const histories = { fine: null, coarse: null };
const docs = {};
let failedSince = null, timer = null, asking = null;

// Asking

class Refused extends Error {}

async function ask(path) {
  const token = sessionStorage.getItem("token");
  const timeout = AbortSignal.timeout(PATIENCE_MS);
  const signal = AbortSignal.any([asking.signal, timeout]);
  const answer = await fetch(`/api/${path}`, { signal, headers: token ? { authorization: `Bearer ${token}` } : {} });
  const said = await answer.json();
  if (answer.status === 401) {
    askForToken(token ? said.error : "This dashboard shows names of tenants and models, and asks who you are.");
    throw new Refused(said.error);
  }
  if (!answer.ok) throw new Refused(said.error ?? `status ${answer.status}`);
  return said;
}

async function askHistory(step) {
  const before = histories[step];
  const since = before?.columns.at_s.at(-1) ?? 0;
  const fresh = await ask(`history?step=${step}&after=${since}`);
  if (!before) {
    histories[step] = fresh;
    return;
  }
  for (const [key, values] of Object.entries(fresh.columns)) {
    before.columns[key] = [...before.columns[key], ...values].slice(-fresh.points_max);
  }
}

async function refresh() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  const view = state.view;
  try {
    const query = view === "prefixes" ? `?${new URLSearchParams({ namespace: state.namespace, at: state.at, order: state.order })}` : "";
    const [doc] = await Promise.all([ask(view + query), view === "overview" ? askHistory(state.step) : null]);
    if (mine.signal.aborted) return;
    docs[view] = doc;
    failedSince = null;
    trouble("");
    render();
  } catch (error) {
    if (mine.signal.aborted) return;
    failedSince ??= Date.now();
    trouble(error instanceof Refused ? error.message : `The dashboard does not answer (for ${span((Date.now() - failedSince) / 1000)}): what is shown is old.`);
  }
  live();
  const isThere = failedSince === null && SLOW[view]?.(docs[view]);
  if (!document.hidden) timer = setTimeout(refresh, isThere ? SLOW_MS : POLL_MS);
}

function trouble(text) {
  at("trouble").hidden = !text;
  if (at("trouble").textContent !== text) at("trouble").textContent = text;
}

function live() {
  const doc = docs[state.view];
  const bad = doc && Object.entries(doc.sources).filter(([, one]) => one.error).map(([source]) => source);
  const [level, text] = failedSince ? ["bad", "no connection"] : !doc ? ["", "connecting"] : bad.length ? ["warn", `live, without ${bad.join(", ")}`] : ["good", "live"];
  at("live").className = level;
  if (at("live-text").textContent !== text) at("live-text").textContent = text;
}

// Showing

function render() {
  const doc = docs[state.view];
  const panel = at("panel");
  panel.setAttribute("aria-busy", String(!doc));
  if (!doc) {
    panel.replaceChildren(el("p", { class: "empty" }, "Loading …"));
    return;
  }
  const history = histories[state.step];
  const fresh = [VIEWS[state.view]({ doc, history, state })].flat(Infinity).filter(Boolean);
  patchChildren(panel, fresh);
  drawings(doc, history);
  if (at("where").textContent !== doc.root) at("where").replaceChildren(el("bdi", { title: doc.root }, doc.root));
}

function drawings(doc, history) {
  const panel = at("panel");
  if (state.view === "overview" && history) draw(panel, charts(history, state));
  const place = panel.querySelector("[data-flame]");
  if (place && doc.runs) flame(place, doc.runs, { words, label, colour: heat(doc.now_s) });
}

function tabs() {
  at("tabs").replaceChildren(...NAMES.map((view, index) =>
    el("button", { type: "button", role: "tab", id: `tab-${view}`, "aria-controls": "panel", "aria-selected": String(view === state.view), tabindex: view === state.view ? "0" : "-1", "data-view": view, "aria-keyshortcuts": String(index + 1) }, view[0].toUpperCase() + view.slice(1))));
}

function show(view) {
  if (!NAMES.includes(view)) view = "overview";
  const changed = view !== state.view;
  state.view = view;
  if (changed) setFilter("");
  for (const tab of at("tabs").children) {
    const chosen = tab.dataset.view === view;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  at("panel").setAttribute("aria-labelledby", `tab-${view}`);
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · kvstore`;
  if (changed) at("panel").replaceChildren();
  render();
  refresh();
}

function setFilter(text) {
  state.filter = text;
  if (at("filter").value !== text) at("filter").value = text;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const said = { auto: "as the system", light: "light", dark: "dark" }[theme];
  at("theme").setAttribute("aria-label", `Theme: ${said}`);
  at("theme").textContent = { auto: "◐", light: "○", dark: "●" }[theme];
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  setTheme(theme);
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // Storage may be forbidden; the theme is then for this page only.
  }
}

function askForToken(why) {
  const dialog = at("token-dialog");
  if (dialog.open) return;
  at("token-why").textContent = why;
  at("token").value = "";
  dialog.showModal();
}

function useToken() {
  const token = at("token").value.trim();
  if (!token) return;
  sessionStorage.setItem("token", token);
  at("token-dialog").close();
  refresh();
}

// Acting

const ACTS = {
  sort: ({ table, column }) => {
    const now = state.sort[table];
    state.sort[table] = { column, down: now?.column === column ? !now.down : true };
    render();
  },
  step: ({ step }) => { state.step = step; render(); refresh(); },
  order: ({ order }) => { state.order = order; refresh(); },
  zoom: ({ id }) => { state.at = id; state.open.clear(); refresh(); },
  toggle: ({ id }) => { state.open.has(id) ? state.open.delete(id) : state.open.add(id); render(); },
};

document.addEventListener("click", (event) => {
  const tab = event.target.closest("[role=tab]");
  if (tab) location.hash = tab.dataset.view;
  const act = event.target.closest("[data-act]");
  if (act && ACTS[act.dataset.act]) ACTS[act.dataset.act](act.dataset);
});
document.addEventListener("change", (event) => {
  if (event.target.dataset?.act === "namespace") {
    state.namespace = event.target.value;
    state.at = "";
    refresh();
  }
});
at("filter").addEventListener("input", () => { state.filter = at("filter").value; render(); });
at("theme").addEventListener("click", nextTheme);
at("help").addEventListener("click", () => at("help-dialog").showModal());
at("token-form").addEventListener("submit", (event) => { event.preventDefault(); useToken(); });

at("tabs").addEventListener("keydown", (event) => {
  const here = NAMES.indexOf(event.target.dataset?.view);
  const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: NAMES.length - 1 }[event.key];
  if (next === undefined || here < 0) return;
  event.preventDefault();
  const view = NAMES[(next + NAMES.length) % NAMES.length];
  location.hash = view;
  at(`tab-${view}`).focus();
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea, dialog");
  if (event.key === "Escape" && event.target === at("filter")) {
    setFilter("");
    render();
    at("filter").blur();
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    at("filter").focus();
    at("filter").select();
  } else if (event.key === "?") at("help-dialog").showModal();
  else if (event.key === "t") nextTheme();
  else if (event.key >= "1" && event.key <= String(NAMES.length)) location.hash = NAMES[Number(event.key) - 1];
});

let resized = null;
new ResizeObserver(() => {
  clearTimeout(resized);
  resized = setTimeout(() => { if (docs[state.view]) drawings(docs[state.view], histories[state.step]); }, 100);
}).observe(at("main"));
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
addEventListener("hashchange", () => show(location.hash.slice(1)));

let saved = null;
try {
  saved = localStorage.getItem("theme");
} catch {
  // As above.
}
setTheme(THEMES.includes(saved) ? saved : "auto");
tabs();
show(location.hash.slice(1) || "overview");
