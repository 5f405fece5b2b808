// The run on the clock: what trainer, servers, rewards and saves did when, attempts and restarts, and where the time went.

import { ask } from "./api.js";
import { shares } from "./bars.js";
import { timeTicks } from "./chart.js";
import { button, fill, h, s, table } from "./dom.js";
import { accounts } from "./goodput.js";
import { clock, onClock, several, shown, span } from "./format.js";
import { elsewhere, go, read } from "./state.js";

const PHASES = { "time/wait": "the trainer waits for a batch", "time/step": "the trainer computes", "time/validation": "validations, part of computing", "time/save_stall": "the trainer stands still for a save", "time/generate": "servers generate", "time/server_idle": "servers have nothing to do", "time/push": "servers load new weights", "time/reward": "a call of the environment, on average" };
const KIND = { attempt: "#3b6fd4", restart: "#d0456b", saved: "#1b9a6c", recompute: "#d9662b", change: "#a853c0" };
const DOES = {
  computing: ["#3b6fd4", "the trainer computes"], waiting: ["#d9662b66", "it waits"], other: ["#8a93a366", "it does something else"], saves: ["#1b9a6c", "a step is saved"],
  servers: ["#1b9a6c99", "servers generate"], weights: ["#a853c0", "servers load weights"], rewards: ["#b5890099", "environments compute rewards"], exports: ["#2a9fb3", "exports"], uploads: ["#2a9fb3", "uploads"],
};
const LEFT = 70, LANE = 34;

export function open(root, { about }) {
  const rl = () => !["sft", "dpo", "reward"].includes(about()?.command);
  let closed = false, found = null, range = null, many = 500, drawnAt = 0;
  const drawing = h("div", { class: "panel" }), became = h("div", { class: "two" }), below = h("div", { class: "two" }), events = h("div", { class: "panel" });
  fill(root, drawing, became, below, events);
  new ResizeObserver(() => closed || !found || Math.abs(drawing.clientWidth - drawnAt) < 2 || draw()).observe(drawing);

  function draw() {
    const { marks } = found, bars = Object.values(found.lanes).flat(), WIDTH = Math.max(drawing.clientWidth - 28, 500);
    drawnAt = drawing.clientWidth;
    if (!bars.length && !marks.length) return fill(root, h("div", { class: "note" }, "Nothing has happened yet."));
    // What lies far from the steps, as a copy's times may, is in the list of events only.
    const times = bars.length ? bars.map((one) => one.begin) : marks.map((mark) => mark.time);
    const earliest = times.reduce((a, b) => Math.min(a, b)), latest = (bars.length ? bars.map((one) => one.end) : times).reduce((a, b) => Math.max(a, b)), slack = (latest - earliest) / 10;
    const near = marks.map((mark) => mark.time).filter((time) => time > earliest - (found.total > found.steps ? 0 : 10 * slack) && time < latest + slack);
    const whole = [Math.min(earliest, ...near), Math.max(latest, ...near, found.alive ? found.now : -Infinity)];
    const [first, last] = range ?? (whole[0] === whole[1] ? [whole[0] - 1, whole[1] + 1] : whole);
    const x = (time) => LEFT + ((Math.min(Math.max(time, first), last) - first) / (last - first)) * (WIDTH - LEFT - 10);
    const inside = (begin, end) => end >= first && begin <= last;
    const saved = marks.some((mark) => mark.kind === "saved" && mark.time >= first && mark.time <= last);
    const lanes = [...new Set([...Object.keys(found.lanes), ...(saved ? ["saves"] : []), "events"])], y = (name) => 14 + lanes.indexOf(name) * LANE, height = 14 + lanes.length * LANE + 24;
    const parts = [], there = new Set();
    for (const [lane, own] of Object.entries(found.lanes)) {
      for (const one of own) {
        if (!(one.end > one.begin && inside(one.begin, one.end))) continue;
        const open_ = rl() && one.step !== null ? { click: () => go(elsewhere("rollouts", { step: one.step })) } : {};
        there.add(one.kind);
        parts.push(s("rect", { x: x(one.begin), y: y(lane), width: Math.max(x(one.end) - x(one.begin), 0.6), height: 22, fill: DOES[one.kind][0], cursor: open_.click ? "pointer" : null, data: { lane, kind: one.kind }, on: open_ }, s("title", null, `${shown(one.text)}: ${span(one.end - one.begin)}`)));
      }
    }
    for (const mark of marks) {
      if (mark.time < first || mark.time > last) continue;
      const lane = mark.kind === "saved" ? "saves" : "events", color = KIND[mark.kind] ?? "#8a93a3";
      parts.push(s("g", null, s("title", null, `${clock(mark.time)}: ${shown(mark.text)}`), s("line", { x1: x(mark.time), x2: x(mark.time), y1: y(lane) - 4, y2: y(lane) + 22, style: null, stroke: color }), s("path", { d: `M ${x(mark.time)} ${y(lane) + 2} l 6 9 l -6 9 l -6 -9 z`, fill: color })));
    }
    const zoom = (share, shift) => () => {
      const middle = (first + last) / 2 + shift * (last - first), half = ((last - first) / 2) * share;
      range = share === 0 ? null : [middle - half, middle + half];
      draw();
    };
    fill(drawing,
      h("div", { class: "bar-line" }, h("h2", null, "Time line"), h("span", { class: "quiet" }, `${clock(first)} to ${clock(last, false)}`),
        button("+", zoom(0.5, 0), { class: "small", title: "closer" }), button("−", zoom(2, 0), { class: "small", title: "further" }), button("◀", zoom(1, -0.4), { class: "small" }), button("▶", zoom(1, 0.4), { class: "small" }), button("all", zoom(0, 0), { class: "small" }),
        found.total > found.steps ? button(`all ${several(found.total, "step")} (now the newest ${found.steps})`, () => { many = found.total; load(); }, { class: "small" }) : null),
      s("svg", { class: "tree lanes", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": "time line" },
        timeTicks(0, last - first, WIDTH / 110).map((tick) => [s("line", { x1: x(first + tick), x2: x(first + tick), y1: 6, y2: height - 22 }), s("text", { x: x(first + tick), y: height - 6, "text-anchor": "middle" }, tick ? `+${onClock(tick)}` : "")]),
        lanes.map((lane) => s("text", { x: 4, y: y(lane) + 16 }, lane)), parts),
      h("div", { class: "legend" }, [...Object.entries(DOES).filter(([kind]) => there.has(kind)).map(([, does]) => does), [KIND.saved, "saved"], [KIND.restart, "restart"]].map(([color, name]) => h("span", null, h("i", { class: "dot", style: { background: color } }), name))),
      Object.keys(found.lanes).length > 1 ? null : h("p", { class: "quiet" }, "What the other processes did when is recorded on the run's disk (spans/), and is not here: the trainer's steps lie where metrics.jsonl puts them."));
  }

  function drawBelow() {
    const sums = found.shares, wait = sums["time/wait"] ?? 0, work = sums["time/step"] ?? 0, stall = sums["time/save_stall"] ?? 0;
    fill(below,
      h("div", { class: "panel" }, h("h2", null, "Where the trainer's time went, in the whole run"), shares([["computes", work, "c1"], ["waits for a batch", wait, "c2"], ["stands still for saves", stall, "c3"]]) ?? h("p", { class: "quiet" }, "no step yet"),
        sums["time/generate"] !== undefined ? [h("h3", { style: { "margin-top": "12px" } }, "and the servers'"), shares([["generate", sums["time/generate"], "c3"], ["nothing to do", sums["time/server_idle"] ?? 0, "c7"], ["load weights", sums["time/push"] ?? 0, "c4"]])] : null),
      h("div", { class: "panel" }, h("h2", null, "Sums"), table([["", ([key]) => PHASES[key] ?? key], ["metric", ([key]) => h("code", null, key)], ["sum", ([key, value]) => h("span", { title: `${value} s` }, key === "time/reward" ? span(value / Math.max(found.total, 1)) : span(value)), "num"]], Object.entries(sums))));
    fill(events, h("h2", null, "Events"), found.marks.length ? table([
      ["when", (mark) => clock(mark.time), "nowrap"], ["what", (mark) => h("span", null, h("i", { class: "dot", style: { background: KIND[mark.kind] ?? "#8a93a3" } }), mark.kind.replaceAll("_", " ")), "nowrap"], ["", (mark) => shown(mark.text)],
    ], [...found.marks].reverse().slice(0, 200)) : h("p", { class: "quiet" }, "none"));
  }

  async function load() {
    try {
      found = await ask("timeline", { run: read().run, last: many });
    } catch (error) {
      return fill(drawing, h("p", { class: "error" }, shown(error.message)));
    }
    if (closed) return;
    draw();
    if (found.total || found.marks.length) drawBelow();
    try {
      const account = await ask("goodput", { run: read().run });
      if (!closed) fill(became, accounts(account));
    } catch (error) {
      fill(became, h("p", { class: "error" }, shown(error.message)));
    }
  }
  load();
  return { refresh: load, close: () => { closed = true; } };
}
