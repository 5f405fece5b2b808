// Evaluations and validations over the run, with their 95 % intervals.

import { ask } from "./api.js";
import { scaled, ticks } from "./chart.js";
import { fill, h, s, table } from "./dom.js";
import { count, exact, percent, several, short, shown, span } from "./format.js";
import { read } from "./state.js";

/** The name of the result that counts: the reward, or a validation's loss. */
const mainOf = (rows) => (rows.some((row) => "reward" in row) ? "reward" : "loss");

/** Points with bars for their intervals. */
function picture(rows, name) {
  const found = rows.filter((row) => Number.isFinite(row[name])), width = 640, height = 190, left = 56, bottom = 26;
  if (!found.length) return null;
  const half = (row) => row[`${name}_ci95`] ?? 0;
  const [low, high] = scaled(Math.min(...found.map((row) => row[name] - half(row))), Math.max(...found.map((row) => row[name] + half(row))));
  const first = found[0].step, last = found.at(-1).step;
  const x = (step) => (first === last ? (left + width) / 2 : left + 14 + ((step - first) / (last - first)) * (width - left - 34));
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - bottom - 14);
  return s("svg", { class: "tree lanes small", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name} by step` },
    ticks(low, high, 4).map((tick) => [s("line", { x1: left, x2: width - 8, y1: y(tick), y2: y(tick) }), s("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(Number(tick.toPrecision(6))))]),
    ticks(first, last, 8).filter(Number.isInteger).map((tick) => s("text", { x: x(tick), y: height - 8, "text-anchor": "middle" }, tick)),
    s("polyline", { points: found.map((row) => `${x(row.step)},${y(row[name])}`).join(" "), fill: "none", stroke: "#3b6fd4", "stroke-width": 1.6 }),
    found.map((row) => s("g", null, s("title", null, `step ${row.step}: ${exact(row[name])}${half(row) ? ` ± ${exact(half(row))}` : ""}`),
      half(row) ? s("path", { d: `M ${x(row.step)} ${y(row[name] - half(row))} V ${y(row[name] + half(row))} M ${x(row.step) - 4} ${y(row[name] - half(row))} h 8 M ${x(row.step) - 4} ${y(row[name] + half(row))} h 8`, stroke: "#3b6fd4", "stroke-width": 1.5 }) : null,
      s("circle", { cx: x(row.step), cy: y(row[name]), r: 4, fill: "#3b6fd4" }))));
}

/** Two steps to choose, the newest ones at first, and the problems that flipped from the one to the other. */
function flips(name, steps) {
  const box = h("div"), choice = { before: steps.at(-2), after: steps.at(-1) };
  const pick = (which) => h("select", { "aria-label": which, on: { change: (event) => { choice[which] = Number(event.target.value); load(); } } },
    steps.map((step) => { const option = h("option", { value: step }, `step ${step}`); option.selected = step === choice[which]; return option; }));
  const list = (title, found) => (found.length ? [h("h3", null, title), table([
    ["problem", (one) => one.problem, "num"],
    ["question", (one) => h("span", { class: "line-text", dir: "auto" }, shown(one.question))],
    ["right before", (one) => h("span", { title: exact(one.before) }, percent(one.before)), "num"],
    ["after", (one) => h("span", { title: exact(one.after) }, percent(one.after)), "num"],
    ["first answer before", (one) => h("span", { class: "line-text", dir: "auto" }, shown(one.text_before))],
    ["first answer after", (one) => h("span", { class: "line-text", dir: "auto" }, shown(one.text_after))],
  ], found)] : null);
  async function load() {
    try {
      const found = await ask("flips", { run: read().run, name, ...choice });
      const { gained, lost } = found;
      fill(box, h("p", { data: { gained: gained.length, lost: lost.length } }, `${several(gained.length, "problem")} went from wrong to right, ${lost.length} from right to wrong; ${found.both} are right and ${found.neither} wrong with both.`,
        gained.length + lost.length ? ` If flips went either way by chance, so uneven a split would have a chance of ${percent(found.chance)}.` : "",
        found.unmatched ? ` ${several(found.unmatched, "problem")} can't be compared: one of the two has no rewarded answer.` : ""),
      list("From wrong to right", gained), list("From right to wrong", lost),
      h("p", { class: "quiet" }, `A problem is right if half of its answers have a reward of ${short(found.right_from)} or more.`));
    } catch (error) {
      fill(box, h("p", { class: "error" }, shown(error.message)));
    }
  }
  const toggle = (event) => event.target.open && !box.firstChild && load();
  return h("details", { data: { keep: name }, on: { toggle } }, h("summary", null, "which problems flipped between two steps"), h("div", { class: "bar-line" }, "from", pick("before"), "to", pick("after")), box);
}

function panel({ name, rows }, flipped) {
  const main = mainOf(rows), passes = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((key) => /^pass@\d+$/.test(key)).sort((a, b) => Number(a.slice(5)) - Number(b.slice(5)));
  const withInterval = (row, key) => (Number.isFinite(row[key]) ? h("span", { title: `${exact(row[key])}${row[`${key}_ci95`] !== undefined ? ` ± ${exact(row[`${key}_ci95`])}` : ""}`, data: { exact: exact(row[key]) } }, `${short(row[key])}${row[`${key}_ci95`] !== undefined ? ` ± ${Number(row[`${key}_ci95`].toPrecision(2))}` : ""}`) : "");
  const best = rows.filter((row) => Number.isFinite(row[main])).reduce((a, b) => (a === null || (main === "loss" ? b[main] < a[main] : b[main] > a[main]) ? b : a), null);
  const last = rows.at(-1);
  return h("div", { class: "panel", data: { evaluation: name } },
    h("div", { class: "title" }, h("h2", null, shown(name)), h("span", { class: "quiet" }, main === "loss" ? "validation loss" : "mean reward over its problems")),
    best && last !== best && Number.isFinite(last?.[main]) ? h("p", null, `Best ${short(best[main])} at step ${best.step}; the newest, step ${last.step}, has ${short(last[main])}`,
      overlap(best, last, main) ? ": their intervals overlap, so this may be chance." : main === "reward" && best.reward_ci95 !== undefined ? ": their intervals do not overlap." : ".") : null,
    picture(rows, main),
    table([
      ["step", (row) => h("b", null, count(row.step)), "num"],
      [main, (row) => withInterval(row, main), "num"],
      ...passes.map((key) => [key, (row) => withInterval(row, key), "num"]),
      ...(main === "reward" ? [["problems", (row) => count(row.problems), "num"], ["answers", (row) => count(row.samples), "num"],
        ["failed", (row) => (row.failed ? h("span", { class: "bad", title: shown(row.error ?? "") }, count(row.failed)) : "0"), "num"],
        ["tokens", (row) => short(row.tokens), "num"], ["cut off", (row) => (row.truncated === undefined ? "" : percent(row.truncated)), "num"]] : [["perplexity", (row) => short(row.perplexity), "num"]]),
      ["took", (row) => span(row.seconds), "num"],
    ], [...rows].reverse()),
    flipped);
}

const overlap = (a, b, key) => a[`${key}_ci95`] !== undefined && b[`${key}_ci95`] !== undefined && Math.abs(a[key] - b[key]) <= a[`${key}_ci95`] + b[`${key}_ci95`];

export function open(root) {
  const comparisons = new Map();
  let closed = false;

  /** The comparison of an evaluation, the same element as long as it has the same steps. */
  function comparison({ name, steps }) {
    const key = `${name} ${steps}`;
    if (!comparisons.has(key)) comparisons.set(key, steps.length > 1 ? flips(name, steps) : null);
    return comparisons.get(key);
  }

  async function load() {
    try {
      const found = await ask("evaluations", { run: read().run });
      if (closed) return;
      fill(root, found.length ? found.map((one) => panel(one, comparison(one))) : h("div", { class: "note" }, "There is no result yet. [[eval]] (RL) and [[validation]] (SFT, preferences) in the settings ask for them."),
        found.length ? h("p", { class: "quiet" }, "± is half the width of the 95 % interval, from the spread between problems.") : null);
    } catch (error) {
      fill(root, h("p", { class: "error" }, shown(error.message)));
    }
  }
  load();
  return { refresh: load, close: () => { closed = true; } };
}
