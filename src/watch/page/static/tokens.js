// The sampled tokens of a turn, coloured by how sure the policy was, or by the policy that sampled them.

import { COLORS } from "./chart.js";
import { button, fill, h } from "./dom.js";
import { count, exact, short, shown } from "./format.js";

/** What `tokens` of the server gives, as text with a choice of colours. */
export function tokenView(found) {
  const versions = [...new Set(found.versions)], box = h("div", { class: "text tall tokens", dir: "auto" }), legend = h("span", { class: "scale" });
  const kinds = [["logprob", "by logprob"], ...(versions.length > 1 ? [["version", "by policy"]] : []), ["none", "plain"]];
  const buttons = kinds.map(([kind, label]) => button(label, () => draw(kind), { class: "small", "data-kind": kind }));

  function color(kind, place) {
    const logprob = Number(found.logprobs[place]);
    if (kind === "logprob" && Number.isFinite(logprob)) return `rgb(217 102 43 / ${Math.round(Math.min(-logprob / 5, 1) * 62)}%)`;
    if (kind === "version") return `${COLORS[versions.indexOf(found.versions[place]) % COLORS.length]}55`;
    return "transparent";
  }

  function draw(kind) {
    for (const one of buttons) one.classList.toggle("on", one.dataset.kind === kind);
    fill(box, found.ids.map((id, place) => {
      const text = found.texts ? found.texts[place] : `${id} `, logprob = found.logprobs[place];
      const chance = Number.isFinite(Number(logprob)) ? `, chance ${short(Math.exp(logprob) * 100)} %` : "";
      return h("span", { class: place % 2 ? "odd" : null, style: { background: color(kind, place) }, title: `token ${place}: id ${id}, logprob ${exact(logprob)}${chance}, policy of step ${found.versions[place] ?? "?"}` }, shown(text) || "·");
    }));
    const note = { logprob: "no colour: the policy was sure; orange: it was not (logprob -5 or less)", version: versions.map((one) => `policy of step ${one}`).join(", "), none: "" }[kind];
    fill(legend, note);
  }
  draw("logprob");
  const values = found.logprobs.map(Number).filter(Number.isFinite), mean = values.reduce((a, b) => a + b, 0) / values.length;
  return h("div", null,
    h("div", { class: "bar-line" }, buttons, legend),
    box,
    h("p", { class: "quiet" }, `${count(found.count)} tokens`, found.count > found.ids.length ? ` (the first ${count(found.ids.length)} are shown)` : "", values.length ? `, mean logprob ${short(mean)}` : "",
      found.learned ? "; the answer was trained on" : "; the answer was not trained on",
      found.texts ? "" : "; the run's tokenizer is not at hand, so these are the ids"));
}
