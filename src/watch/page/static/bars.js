// Small pictures of counts: a histogram whose bars can be clicked, shares of a whole, and a row of rewards.

import { h, s } from "./dom.js";
import { count, percent, short } from "./format.js";

/** A histogram. `pick(low, high)` gets the ends of the bar that is clicked. */
export function histogram({ edges, counts }, { pick, chosen, width = 420, height = 64 } = {}) {
  if (!counts.length) return h("p", { class: "quiet" }, "no rewards");
  const most = Math.max(...counts), each = width / counts.length;
  const bars = counts.map((number, place) => {
    const tall = number ? Math.max((number / most) * (height - 4), 2) : 0;
    const low = edges[place], high = edges[place + 1];
    const on = chosen && low >= chosen[0] - 1e-12 && high <= chosen[1] + 1e-12;
    return s("g", { class: `bar${on ? " on" : ""}`, data: { low, high, count: number }, on: { click: () => number && pick?.(low, high) } },
      s("title", null, `${short(low)} to ${short(high)}: ${count(number)}`),
      s("rect", { x: place * each, y: 0, width: each, height, class: "back" }),
      s("rect", { x: place * each + 1, y: height - tall, width: Math.max(each - 2, 1), height: tall, class: "front" }));
  });
  return h("figure", { class: "histogram" },
    s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": "rewards" }, bars),
    h("figcaption", null, h("span", { title: String(edges[0]) }, short(edges[0])), h("span", { class: "quiet" }, "reward; click a bar to select"), h("span", { title: String(edges.at(-1)) }, short(edges.at(-1)))));
}

/** Shares of a whole as one bar with a legend: [name, value, colour class, words]. */
export function shares(parts, { title } = {}) {
  const whole = parts.reduce((sum, [, value]) => sum + Math.max(value, 0), 0);
  if (!(whole > 0)) return null;
  const there = parts.filter(([, value]) => value > 0);
  return h("div", { class: "shares", title },
    h("div", { class: "stack" }, there.map(([name, value, kind]) => h("span", { class: `part ${kind}`, title: `${name}: ${percent(value / whole)}`, style: { "flex-grow": value / whole } }))),
    h("div", { class: "legend" }, there.map(([name, value, kind, words]) => h("span", null, h("i", { class: `dot ${kind}` }), `${name} `, h("b", null, words ?? percent(value / whole))))));
}

/** The colour of a reward between the lowest and the highest of its kind: red, through yellow, to green. */
export function rewardColor(reward, low, high) {
  if (reward === null || reward === undefined || !Number.isFinite(Number(reward))) return "var(--line)";
  if (!(high > low)) return "var(--quiet)";
  const share = (reward - low) / (high - low);
  return `hsl(${Math.round(8 + share * 130)} 62% 48%)`;
}

/** A square for each answer of a group, in the colour of its reward. */
export function squares(rewards, low, high) {
  return h("span", { class: "squares" }, rewards.map((reward) =>
    h("i", { title: reward === null ? "no reward: it failed" : String(reward), class: reward === null ? "none" : null, style: { background: rewardColor(reward, low, high) } })));
}
