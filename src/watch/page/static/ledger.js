// The ledger's account: every prompt that was issued is trained, on its way, or discarded for a reason.

import { ask } from "./api.js";
import { shares } from "./bars.js";
import { command, fill, h, table } from "./dom.js";
import { count, several, shown } from "./format.js";
import { read } from "./state.js";

export function open(root, { about }) {
  let closed = false;

  async function load() {
    let account;
    try {
      account = await ask("account", { run: read().run });
    } catch (error) {
      return fill(root, h("p", { class: "error" }, shown(error.message)));
    }
    if (closed) return;
    if (!account) return fill(root, h("div", { class: "note" }, "This run has no ledger: only RL runs have one."));
    const rows = account.environments.map((one) => ({ ...one, lost: Object.values(one.discarded).reduce((a, b) => a + b, 0) }));
    const sum = (name) => rows.reduce((total, one) => total + one[name], 0);
    const total = { label: "all", issued: sum("issued"), trained: sum("trained"), shipped: sum("shipped"), waiting: sum("waiting"), lost: sum("lost"), again: sum("again"), missing: sum("missing") };
    const waiting = total.shipped + total.waiting + total.again;
    fill(root,
      h("div", { class: "panel" },
        h("h2", null, "Every prompt that was issued"),
        h("ul", { class: "findings" }, h("li", { class: account.whole ? "fine" : "high" },
          h("b", { id: "sum" }, `${count(total.issued)} issued = ${count(total.trained)} trained + ${count(waiting)} waiting + ${count(total.lost)} discarded${total.missing ? ` + ${count(total.missing)} missing` : ""}`),
          h("div", { class: "do" }, account.whole ? "From the ledger: each prompt is in one place, none is in two, none is missing."
            : `This must not be: ${total.missing ? `${several(total.missing, "prompt")} missing ` : ""}${account.repeated ? `${several(account.repeated, "prompt")} in two batches` : ""}`))),
        h("div", { style: { "margin-top": "12px" } }, shares([
          ["trained", total.trained, "c3", count(total.trained)], ["in a batch, not trained yet", total.shipped, "c1", count(total.shipped)],
          ["waiting for answers or a batch", total.waiting, "c4", count(total.waiting)], ["dropped, to be issued again", total.again, "c2", count(total.again)],
          ["discarded", total.lost, "c5", count(total.lost)], ["missing", total.missing, "c6", count(total.missing)]]))),
      h("div", { class: "panel" }, h("h2", null, "By environment"), table([
        ["environment", (one) => h("b", null, shown(one.label) || "(all)")],
        ["issued", (one) => count(one.issued), "num"], ["trained", (one) => count(one.trained), "num"],
        ["in a batch", (one) => count(one.shipped), "num"], ["waiting", (one) => count(one.waiting), "num"],
        ["issued again", (one) => count(one.again), "num"], ["discarded", (one) => count(one.lost), "num"],
        ["why", (one) => Object.entries(one.discarded).map(([reason, number]) => h("div", { class: "line-text", dir: "auto" }, `${count(number)}: ${shown(reason)}`))],
      ], rows.length > 1 ? [...rows, { ...total, discarded: {} }] : rows, { id: "account" })),
      h("div", { class: "panel" }, h("h2", null, "What the trainer was given"),
        h("p", null, `${several(account.batches, "batch", "batches")} shipped, those through step ${account.trained_through} trained: ${several(account.samples, "sample")}, ${several(account.tokens, "token")} with their prompts.`),
        account.waiting_answers ? h("p", null, `${several(account.waiting_answers, "whole answer")} wait${account.waiting_answers === 1 ? "s" : ""} for the rest of ${account.waiting_answers === 1 ? "its" : "their"} group.`) : null,
        Object.keys(account.tries).length ? h("p", null, "Tries that were dropped: ", Object.entries(account.tries).map(([reason, number]) => `${count(number)} ${shown(reason)}`).join(", "), ".") : null,
        h("p", { class: "quiet" }, "The full proof, with checkpoints and the trainer's own digests:"), command(`ckpt audit ${about().path}`)));
  }
  load();
  return { refresh: load, close: () => { closed = true; } };
}
