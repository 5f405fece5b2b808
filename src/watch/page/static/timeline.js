// The run on the clock: the trainer's steps and waits, attempts, restarts and saves, and where the time went.

import { ask } from "./api.js";
import { shares } from "./bars.js";
import { timeTicks } from "./chart.js";
import { button, fill, h, s, table } from "./dom.js";
import { accounts } from "./goodput.js";
import { clock, onClock, several, shown, span } from "./format.js";
import { elsewhere, go, read } from "./state.js";

const PHASES = { "time/wait": "the trainer waits for a batch", "time/step": "the trainer computes", "time/validation": "validations, part of computing", "time/save_stall": "the trainer stands still for a save", "time/generate": "servers generate", "time/server_idle": "servers have nothing to do", "time/push": "servers load new weights", "time/reward": "a call of the environment, on average" };
const KIND = { attempt: "#3b6fd4", restart: "#d0456b", saved: "#1b9a6c", recompute: "#d9662b", change: "#a853c0" };
const LEFT = 70;

export function open(root) {
  let closed = false, found = null, range = null, many = 500, drawnAt = 0;
  const drawing = h("div", { class: "panel" }), became = h("div", { class: "two" }), below = h("div", { class: "two" }), events = h("div", { class: "panel" });
  fill(root, drawing, became, below, events);
  new ResizeObserver(() => closed || !found || Math.abs(drawing.clientWidth - drawnAt) < 2 || draw()).observe(drawing);

  function draw() {
    const { steps, marks } = found, WIDTH = Math.max(drawing.clientWidth - 28, 500);
    drawnAt = drawing.clientWidth;
    if (!steps.length && !marks.length) return fill(root, h("div", { class: "note" }, "Nothing has happened yet."));
    // What lies far from the steps, as a copy's times may, is in the list of events only.
    const times = steps.length ? [steps[0].begin, steps.at(-1).end] : marks.map((mark) => mark.time), slack = (times.at(-1) - times[0]) / 10;
    const near = marks.map((mark) => mark.time).filter((time) => time > times[0] - (found.total > steps.length ? 0 : 10 * slack) && time < times.at(-1) + slack);
    const whole = [Math.min(times[0], ...near), Math.max(times.at(-1), ...near, found.alive ? found.now : -Infinity)];
    const [first, last] = range ?? (whole[0] === whole[1] ? [whole[0] - 1, whole[1] + 1] : whole);
    const x = (time) => LEFT + ((Math.min(Math.max(time, first), last) - first) / (last - first)) * (WIDTH - LEFT - 10);
    const inside = (begin, end) => end >= first && begin <= last;
    const served = steps.some((one) => one.phases["time/generate"] !== undefined), saved = marks.some((mark) => mark.kind === "saved" && mark.time >= first && mark.time <= last);
    const lanes = ["trainer", served && "servers", saved && "saves", "events"].filter(Boolean), y = (name) => 14 + lanes.indexOf(name) * 40, height = 14 + lanes.length * 40 + 24;
    const parts = [], bar = (begin, end, lane, color, title, run) => {
      if (end > begin && inside(begin, end)) parts.push(s("rect", { x: x(begin), y: y(lane), width: Math.max(x(end) - x(begin), 0.6), height: 24, fill: color, cursor: run ? "pointer" : null, on: run ? { click: run } : {} }, s("title", null, title)));
    };
    for (const one of steps) {
      const open_ = () => go(elsewhere("rollouts", { step: one.step }));
      bar(one.begin, one.work, "trainer", "#d9662b66", `step ${one.step}: waits ${span(one.work - one.begin)}`, open_);
      bar(one.work, one.end, "trainer", "#3b6fd4", `step ${one.step}: computes ${span(one.end - one.work)}`, open_);
      if (!served) continue;
      // Servers' times are sums since the last batch: they are laid where they must have been, before the step.
      const push = one.phases["time/push"] ?? 0, generate = one.phases["time/generate"] ?? 0;
      bar(one.end, one.end + push, "servers", "#a853c0", `weights of step ${one.step}: loading takes ${span(push)}`);
      bar(Math.max(one.work - generate, one.begin), one.work, "servers", "#1b9a6c99", `answers for step ${one.step}: ${span(generate)} of generating`, open_);
    }
    for (const mark of marks) {
      if (mark.time < first || mark.time > last) continue;
      const lane = mark.kind === "saved" ? "saves" : "events", color = KIND[mark.kind] ?? "#8a93a3";
      parts.push(s("g", null, s("title", null, `${clock(mark.time)}: ${shown(mark.text)}`), s("line", { x1: x(mark.time), x2: x(mark.time), y1: y(lane) - 4, y2: y(lane) + 24, style: null, stroke: color }), s("path", { d: `M ${x(mark.time)} ${y(lane) + 2} l 6 9 l -6 9 l -6 -9 z`, fill: color })));
    }
    const zoom = (share, shift) => () => {
      const middle = (first + last) / 2 + shift * (last - first), half = ((last - first) / 2) * share;
      range = share === 0 ? null : [middle - half, middle + half];
      draw();
    };
    fill(drawing,
      h("div", { class: "bar-line" }, h("h2", null, "Time line"), h("span", { class: "quiet" }, `${clock(first)} to ${clock(last, false)}`),
        button("+", zoom(0.5, 0), { class: "small", title: "closer" }), button("−", zoom(2, 0), { class: "small", title: "further" }), button("◀", zoom(1, -0.4), { class: "small" }), button("▶", zoom(1, 0.4), { class: "small" }), button("all", zoom(0, 0), { class: "small" }),
        found.total > steps.length ? button(`all ${several(found.total, "step")} (now the newest ${steps.length})`, () => { many = found.total; load(); }, { class: "small" }) : null),
      s("svg", { class: "tree lanes", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": "time line" },
        timeTicks(0, last - first, WIDTH / 110).map((tick) => [s("line", { x1: x(first + tick), x2: x(first + tick), y1: 6, y2: height - 22 }), s("text", { x: x(first + tick), y: height - 6, "text-anchor": "middle" }, tick ? `+${onClock(tick)}` : "")]),
        lanes.map((lane) => s("text", { x: 4, y: y(lane) + 16 }, lane)), parts),
      h("div", { class: "legend" }, [["#3b6fd4", "computes"], ["#d9662b66", "waits for a batch"], ...(served ? [["#1b9a6c99", "servers generate"], ["#a853c0", "servers load weights"]] : []), ["#1b9a6c", "saved"], ["#d0456b", "restart"]].map(([color, name]) => h("span", null, h("i", { class: "dot", style: { background: color } }), name))),
      h("p", { class: "quiet" }, "Steps lie where metrics.jsonl and history.jsonl put them. Servers' times are sums of a step, laid before it."));
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
    if (found.steps.length || found.marks.length) drawBelow();
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
