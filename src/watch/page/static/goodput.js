// What became of a run's time and of its tokens: a sentence, a bar of shares, and a table with money if a price is known.

import { shares } from "./bars.js";
import { h, table } from "./dom.js";
import { count, exact, percent, shown, span } from "./format.js";

const CLASSES = ["c3", "c2", "c6", "c5", "c4", "c1", "c7", "c8"];

/** A panel: the values by kind, each with what it means; `say` makes words of a value. */
function panel(title, name, found, say) {
  const { values } = found;
  const whole = Object.values(values).reduce((sum, value) => sum + value, 0), there = Object.entries(values).filter(([, value]) => value > 0);
  const classOf = (kind) => CLASSES[Object.keys(values).indexOf(kind) % CLASSES.length];
  return h("div", { class: "panel", data: { account: name } }, h("h2", null, title),
    h("p", null, shown(found.sentence)),
    shares(there.map(([kind, value]) => [kind, value, classOf(kind)])),
    there.length ? table([
      ["", ([kind]) => h("span", null, h("i", { class: `dot ${classOf(kind)}` }), kind), "nowrap"],
      [name, ([kind, value]) => h("span", { title: exact(value), data: { kind, exact: exact(value) } }, say(value)), "num"],
      ["share", ([, value]) => percent(value / whole), "num"],
      ...(found.price ? [["price", ([kind]) => h("span", { title: exact(found.price[kind]) }, found.price[kind].toFixed(2)), "num"]] : []),
      ["what it is", ([kind]) => found.meaning[kind]],
    ], there) : null);
}

/** Both panels, of what `goodput` of the server gives. */
export function accounts({ time, tokens }) {
  return [
    h("div", null, panel("What became of the time", "time", time, span), time.idle >= 1 ? h("p", { class: "quiet" }, `and for ${span(time.idle)} between attempts nobody was at work on it`) : null),
    panel("What became of the tokens", "tokens", tokens, count),
  ];
}
