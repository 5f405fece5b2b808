// Discarded and failed answers: why nothing was learned from them, and what they have cost.

import { ask } from "./api.js";
import { shares } from "./bars.js";
import { fill, h, table } from "./dom.js";
import { count, percent, several, shown, span } from "./format.js";
import { elsewhere, go, read } from "./state.js";

export function open(root) {
  let closed = false, chosen = -1, groups = [];
  const top = h("div", { class: "panel" }), list = h("div", { class: "panel" }), tries = h("div");
  fill(root, top, list, tries);

  function openGroup(group) {
    const [step, place, sample] = group.newest;
    go(elsewhere("rollouts", { step, place, sample }));
  }

  function drawList() {
    fill(list, h("h2", null, "By reason"), groups.length ? table([
      ["answers", (one) => h("b", null, count(one.answers)), "num"],
      ["problems", (one) => count(one.problems), "num"],
      ["tokens", (one) => count(one.tokens), "num"],
      ["steps", (one) => (one.first_step === one.last_step ? one.first_step : `${one.first_step} to ${one.last_step}`), "nowrap"],
      ["environment", (one) => shown(one.environment), "nowrap"],
      ["what", (one) => h("span", { class: one.failed ? "badge bad" : "badge flat" }, one.failed ? "failed" : "discarded"), "nowrap"],
      ["reason (numbers as #)", (one) => h("span", { class: "line-text", dir: "auto" }, shown(one.reason))],
    ], groups, { open: openGroup, current: (_, place) => place === chosen, id: "reasons" }) : h("p", { class: "good" }, "Every answer that is kept was trained on."),
    groups.length ? h("p", { class: "quiet" }, "Click a reason: its newest answer. ", h("a", { href: "#", on: { click: (event) => { event.preventDefault(); go(elsewhere("rollouts", { list: 1, trained: 0 })); } } }, "All of them in the list")) : null);
  }

  async function load() {
    for (;;) {
      let found;
      try {
        found = await ask("discarded", { run: read().run });
      } catch (error) {
        return fill(top, h("p", { class: "error" }, shown(error.message)));
      }
      if (closed) return;
      groups = found.groups;
      const sum = (name, wanted = () => true) => groups.filter(wanted).reduce((total, one) => total + one[name], 0);
      const { answers, tokens, seconds } = found.totals, lost = sum("tokens");
      fill(top, h("h2", null, "What sampling went to"),
        answers ? [
          shares([
            ["trained on", tokens - lost, "c3", `${percent((tokens - lost) / tokens)}, ${count(tokens - lost)} tokens`],
            ["failed", sum("tokens", (one) => one.failed), "c6", `${percent(sum("tokens", (one) => one.failed) / tokens)}, ${count(sum("tokens", (one) => one.failed))} tokens`],
            ["discarded", sum("tokens", (one) => !one.failed), "c5", `${percent(sum("tokens", (one) => !one.failed) / tokens)}, ${count(sum("tokens", (one) => !one.failed))} tokens`],
          ]),
          h("p", { style: { "margin-top": "8px" } }, `${several(answers, "answer")} are kept; nothing was learned from `, h("b", { data: { exact: sum("answers") } }, several(sum("answers"), "answer")), ` (${percent(sum("answers") / answers)}), which took ${span(sum("seconds"))} of ${span(seconds)} of answering, many at the same time.`),
        ] : h("p", { class: "quiet" }, "No rollouts are kept."),
        found.left ? h("p", { class: "quiet" }, `${several(found.left, "file")} to go …`) : null);
      drawList();
      const lostTries = Object.entries(found.tries);
      fill(tries, lostTries.length ? h("div", { class: "panel" }, h("h2", null, "Tries that were dropped, and their prompts issued again"),
        h("p", { class: "quiet" }, "Their answers are not kept; the ledger has the prompts and the reasons."),
        table([["prompts", ([, number]) => count(number), "num"], ["reason", ([reason]) => shown(reason === "stale" ? "stale: older than max_off_policy_steps allows" : reason)]], lostTries)) : null);
      if (!found.left) return;
    }
  }
  load();
  return {
    refresh: load,
    close: () => { closed = true; },
    key(event) {
      if (event.key === "j" || event.key === "k") chosen = Math.min(Math.max(chosen + (event.key === "j" ? 1 : -1), 0), groups.length - 1);
      else if (event.key === "Enter" && groups[chosen]) openGroup(groups[chosen]);
      else return false;
      drawList();
      return true;
    },
  };
}
