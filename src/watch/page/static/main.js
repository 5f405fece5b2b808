// The page's frame: the list of runs, the head of the chosen one, its views, keys, and looking anew.

import { ask } from "./api.js";
import { COLORS } from "./chart.js";
import { add, button, fill, h } from "./dom.js";
import { ago, count, percent, short, shown, span, tail } from "./format.js";
import { address, change, elsewhere, follow, go, read } from "./state.js";
import * as checkpoints from "./checkpoints.js";
import * as discarded from "./discarded.js";
import * as evaluations from "./evaluations.js";
import * as ledger from "./ledger.js";
import * as logs from "./logs.js";
import * as overview from "./overview.js";
import * as rollouts from "./rollouts.js";
import * as runs from "./runs.js";
import * as timeline from "./timeline.js";

const VIEWS = [
  ["overview", "Overview", overview],
  ["rollouts", "Rollouts", rollouts],
  ["discarded", "Discarded", discarded],
  ["ledger", "Ledger", ledger],
  ["checkpoints", "Checkpoints", checkpoints],
  ["evaluations", "Evaluations", evaluations],
  ["timeline", "Time line", timeline],
  ["logs", "Logs", logs],
];
const ONLY_RL = ["rollouts", "discarded", "ledger"];
const PULSE = 2000, RUNS = 8000;

const side = h("aside", { id: "side" }), main = h("main", { id: "main" });
const head = h("div", { id: "head" }), body = h("div", { id: "view" });
let lines = [], folder = "", about = null, view = null, drawn = null, beats = 0;

const theme = () => document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("theme", name);
  } catch { /* a browser without storage */ }
  view?.refresh?.();
}

/** The name of a run in lists: its path below the folder, or the folder's own name. */
export const nameOf = (id) => (id === "." ? tail(folder, 1) : id);

/** The runs that are shown together: the chosen one first. */
export function together() {
  const { run, runs: others } = read();
  return [run, ...others.filter((one) => one !== run)].map((id, place) => ({ id, name: nameOf(id), color: COLORS[place % COLORS.length] }));
}

async function lookForRuns() {
  try {
    const found = await ask("runs");
    [lines, folder] = [found.runs, found.folder];
  } catch (error) {
    fill(side, h("p", { class: "error" }, error.message));
    return;
  }
  drawSide();
}

/** Those that are going on first, and else by name, so that nothing jumps. */
function inOrder() {
  const live = (line) => (line.state === "running" || line.state === "stopping" ? 0 : 1);
  return [...lines].sort((a, b) => live(a) - live(b) || a.id.localeCompare(b.id, "en", { numeric: true }));
}

function drawSide() {
  const { run, runs: others } = read();
  const colors = run ? Object.fromEntries(together().map((one) => [one.id, one.color])) : {};
  fill(side,
    h("h1", null, h("img", { src: "icon.svg", alt: "" }), h("a", { href: "#" }, "Cairn")),
    lines.length ? null : h("p", { class: "quiet pad" }, `There is no run in ${folder} yet; one that begins appears here.`),
    inOrder().map((line) => h("div", {
      class: `run${line.id === run ? " current" : ""}`, title: line.path, data: { run: line.id },
      on: { click: (event) => event.target.closest("input") || go({ run: line.id, view: "overview", runs: [] }) },
    },
    h("input", {
      type: "checkbox", checked: line.id === run || others.includes(line.id), disabled: !run || line.id === run, hidden: !run, title: "lay its curves over those of the chosen run",
      on: { change: (event) => change({ runs: event.target.checked ? [...others, line.id] : others.filter((one) => one !== line.id) }) },
    }),
    h("div", { class: "name" }, colors[line.id] ? h("i", { class: "dot", style: { background: colors[line.id] } }) : null, shown(nameOf(line.id))),
    h("div", { class: "more" }, h("span", { class: `state ${line.state}` }, line.state), ` ${line.command ?? ""} ${line.step}${line.max_steps ? `/${line.max_steps}` : ""}`,
      line.findings.length ? h("div", { class: "warn" }, shown(line.findings.slice(0, 2).join(", "))) : null))),
    h("div", { class: "foot" },
      button(theme() === "dark" ? "light" : "dark", () => { setTheme(theme() === "dark" ? "light" : "dark"); drawSide(); }, { class: "small", title: "colours" }), " ",
      button("keys", keysHelp, { class: "small" }),
      run && lines.length > 1 ? h("p", null, "Tick further runs to lay their curves over each other.") : null));
}

function keysHelp() {
  const keys = [["1 to 8", "the views"], ["j  k", "next and previous: prompt, rollout, run"], ["Left  Right", "previous and next step; point of a curve"], ["Enter", "open what is chosen"], ["/", "search"], ["Escape", "close, or one level up"], ["?", "this list"]];
  const box = h("dialog", null, h("h2", null, "Keys"), h("table", null, keys.map(([key, does]) => h("tr", null, h("td", { class: "nowrap" }, h("kbd", null, key)), h("td", null, does)))),
    h("p", { class: "quiet" }, "In a curve: click a point to open its step, drag to zoom, double-click for all of it. The address of the page holds what is shown: keep it or hand it on."));
  box.addEventListener("close", () => box.remove());
  box.addEventListener("click", () => box.close());
  document.body.append(box);
  box.showModal();
}

function drawHead(state) {
  if (!about) return fill(head);
  const done = about.max_steps ? Math.min(about.step / about.max_steps, 1) : null;
  const facts = [
    ["step", about.max_steps ? `${count(about.step)} of ${count(about.max_steps)}` : count(about.step)],
    about.left !== null ? ["left", span(about.left)] : null,
    about.quiet !== null && about.quiet > Math.max(10, 3 * (about.pace ?? 0)) ? [about.pace ? "no step for" : "starting for", span(about.quiet)] : null,
    about.pace !== null ? ["a step takes", span(about.pace)] : null,
    about.tokens_per_second !== null ? ["learned tokens/s", short(about.tokens_per_second)] : null,
    about.mfu !== null ? ["MFU", percent(about.mfu), "model FLOPs utilisation: the share of the GPUs' peak that training uses while it computes"] : null,
    about.mfu !== null && about.attention !== null ? ["attention", shown(about.attention)] : null,
    about.saved ? ["last checkpoint", `step ${about.saved.step}${about.saved.age === null ? "" : `, ${ago(about.saved.age)}`}`] : ["last checkpoint", "none"],
    ["restarts", about.restarts ? `${about.restarts}, ${about.recomputed} step${about.recomputed === 1 ? "" : "s"} recomputed` : "0"],
    // Starting counts against goodput, so in a short run without restarts it says nothing.
    about.restarts || about.recomputed || about.step * (about.pace ?? 0) > 600 ? ["goodput", Number(about.goodput).toFixed(2), "share of the time that went into steps that count; starting counts against it, so it is low in a short run"] : null,
    about.age !== null && !isAlive() ? ["seen", ago(about.age)] : null,
  ].filter(Boolean);
  fill(head,
    h("div", { class: "title" }, h("h1", null, shown(nameOf(state.run))), h("span", { class: `state ${about.state}` }, about.state), h("span", null, about.command ?? ""),
      h("span", { class: `live${isAlive() ? " on" : ""}` }, isAlive() ? "live" : ""), h("span", { class: "path" }, shown(about.path))),
    done !== null ? h("div", { class: "progress" }, h("span", { style: { width: `${done * 100}%` } })) : null,
    h("div", { class: "facts", style: { "margin-top": "8px" } }, facts.map(([name, value, title]) => h("dl", { title }, h("dt", null, name), h("dd", null, value)))),
    h("nav", { class: "tabs" }, tabs().map(([name, label], place) =>
      h("a", { href: address(elsewhere(name)), class: state.view === name ? "on" : null, data: { view: name } }, label, h("kbd", null, place + 1)))));
}

const isAlive = () => about && (about.state === "running" || about.state === "stopping");
const tabs = () => VIEWS.filter(([name]) => !ONLY_RL.includes(name) || !["sft", "dpo", "reward"].includes(about?.command));

let turn = 0;

async function draw() {
  const state = read(), own = ++turn;
  drawSide();
  if (!state.run && lines.length === 1) return change({ run: lines[0].id }, { replace: true });
  const kind = state.run ? `${state.run} ${state.view}` : "runs";
  if (kind === drawn && view) {
    drawHead(state);
    view.update?.(state);
    return;
  }
  view?.close?.();
  [view, drawn] = [null, kind];
  if (!state.run) {
    about = null;
    fill(head);
    document.title = "Cairn";
    view = runs.open(fill(body), { lines: () => lines, folder: () => folder });
    return;
  }
  if (about?.id !== state.run) {
    about = null;
    fill(body, h("p", { class: "quiet" }, "reading the run"));
    try {
      about = await ask("overview", { run: state.run });
    } catch (error) {
      if (own !== turn) return;
      fill(head, h("div", { class: "title" }, h("h1", null, shown(state.run))));
      fill(body, h("p", { class: "error" }, shown(error.message)), h("a", { href: "#" }, "all runs"));
      drawn = null;
      return;
    }
    if (own !== turn) return;
  }
  document.title = `${nameOf(state.run)} · Cairn`;
  drawHead(state);
  const [, , module] = VIEWS.find(([name]) => name === state.view) ?? VIEWS[0];
  view = module.open(fill(body), { state, about: () => about, together, nameOf });
}

async function beat() {
  beats += 1;
  if (document.hidden) return;
  const { run } = read();
  if (!run || !about) {
    if (beats * PULSE % RUNS === 0) await lookForRuns().then(() => view?.refresh?.());
    return;
  }
  if (beats * PULSE % RUNS === 0) await lookForRuns();
  try {
    const pulse = await ask("pulse", { run });
    const changed = pulse.stamp !== about.stamp;
    if (changed || (isAlive() && beats % 2 === 0)) {
      about = await ask("overview", { run });
      if (read().run !== run) return;
      drawHead(read());
    }
    if (changed || (isAlive() && view?.live)) view?.refresh?.();
  } catch (error) {
    if (read().run === run) fill(head, h("p", { class: "error" }, shown(error.message)));
  }
}

function key(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input,select,textarea");
  if (event.key === "Escape" && typing && typing.type !== "checkbox") return typing.blur();
  if (typing && typing.type !== "checkbox") return;
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "?") return keysHelp();
  const place = "12345678".indexOf(event.key);
  if (read().run && event.key.length === 1 && place >= 0 && tabs()[place]) return go(elsewhere(tabs()[place][0]));
  if (view?.key?.(event)) {
    event.preventDefault();
    return;
  }
  if (event.key === "Escape" && read().run) go(read().view === "overview" ? { runs: [], view: "overview" } : elsewhere("overview"));
}

async function start() {
  try {
    const kept = localStorage.getItem("theme");
    if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  } catch { /* a browser without storage */ }
  fill(document.getElementById("app"), add(h("div", { id: "shell" }), [side, add(main, [head, body])]));
  addEventListener("keydown", key);
  follow(() => { draw(); });
  await lookForRuns();
  await draw();
  document.documentElement.dataset.ready = "1";
  for (;;) {
    await new Promise((done) => setTimeout(done, PULSE));
    await beat();
  }
}

start();
