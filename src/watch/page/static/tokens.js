// The sampled tokens of a turn, coloured by what server and trainer say of them, or by the policy that sampled them.

import { COLORS } from "./chart.js";
import { button, fill, h } from "./dom.js";
import { count, exact, short, shown } from "./format.js";

const ORANGE = "217 102 43", BLUE = "59 111 212";
const shade = (tint, share) => `rgb(${tint} / ${Math.round(Math.min(Math.max(share, 0), 1) * 62)}%)`;

/** The ways to colour tokens: what each is called, its colour of a token, and what the colours mean. */
function kindsOf(found) {
  const versions = [...new Set(found.versions)];
  const value = (name, place) => Number(found[name]?.[place] ?? NaN);
  const of = (name, color) => (place) => (Number.isFinite(value(name, place)) ? color(value(name, place)) : "transparent");
  return [
    found.gaps && ["gap", "by gap", of("gaps", (gap) => shade(gap > 0 ? ORANGE : BLUE, Math.abs(gap) / 0.5)), "the trainer's logprob minus the server's; orange: higher, blue: lower, full from 0.5 on"],
    found.ratios && ["ratio", "by ratio", of("ratios", (ratio) => shade(ratio > 1 ? ORANGE : BLUE, Math.abs(ratio - 1) / 0.2)), "the importance ratio, trainer to server; orange: above 1, blue: below, full from 0.2 away on"],
    ["logprob", "by logprob", of("logprobs", (logprob) => shade(ORANGE, -logprob / 5)), "no colour: the policy was sure; orange: it was not (logprob -5 or less)"],
    found.entropies && ["entropy", "by entropy", of("entropies", (entropy) => shade(ORANGE, entropy / 3)), "the trainer's entropy, full from 3 nats on"],
    found.mask && ["mask", "by mask", (place) => (found.mask[place] ? shade(BLUE, 0.5) : "transparent"), "blue: learned from; no colour: masked, cut off or left out"],
    versions.length > 1 && ["version", "by policy", (place) => `${COLORS[versions.indexOf(found.versions[place]) % COLORS.length]}55`, versions.map((one) => `policy of step ${one}`).join(", ")],
    ["none", "plain", () => "transparent", ""],
  ].filter(Boolean);
}

/** What is known of a token, in words. */
function titleOf(found, place) {
  const logprob = found.logprobs[place], known = [`token ${place}: id ${found.ids[place]}`, `logprob ${exact(logprob)}`];
  if (Number.isFinite(Number(logprob))) known.push(`chance ${short(Math.exp(logprob) * 100)} %`);
  for (const [name, label] of [["trained", "trainer's logprob"], ["gaps", "gap"], ["ratios", "ratio"], ["entropies", "entropy"]])
    if (Number.isFinite(Number(found[name]?.[place] ?? NaN))) known.push(`${label} ${exact(found[name][place])}`);
  if (found.mask) known.push(found.mask[place] ? "learned" : "not learned");
  return [...known, `policy of step ${found.versions[place] ?? "?"}`].join(", ");
}

/** What `tokens` of the server gives, as text with a choice of colours. */
export function tokenView(found) {
  const box = h("div", { class: "text tall tokens", dir: "auto" }), legend = h("span", { class: "scale" }), kinds = kindsOf(found);
  const buttons = kinds.map(([kind, label]) => button(label, () => draw(kind), { class: "small", "data-kind": kind }));

  function draw(chosen) {
    const [, , color, meaning] = kinds.find(([kind]) => kind === chosen);
    for (const one of buttons) one.classList.toggle("on", one.dataset.kind === chosen);
    fill(box, found.ids.map((id, place) => h("span", { class: place % 2 ? "odd" : null, style: { background: color(place) }, title: titleOf(found, place) }, shown(found.texts ? found.texts[place] : `${id} `) || "·")));
    fill(legend, meaning);
  }
  draw(kinds[0][0]);
  const largest = (found.gaps ?? []).reduce((best, gap, place) => (Math.abs(Number(gap)) > Math.abs(Number(found.gaps[best])) || found.gaps[best] === "NaN" ? place : best), 0);
  const values = found.logprobs.map(Number).filter(Number.isFinite), mean = values.reduce((a, b) => a + b, 0) / values.length;
  return h("div", null,
    h("div", { class: "bar-line" }, buttons, legend),
    box,
    h("p", { class: "quiet" }, `${count(found.count)} tokens`, found.count > found.ids.length ? ` (the first ${count(found.ids.length)} are shown)` : "", values.length ? `, mean logprob ${short(mean)}` : "",
      found.gaps ? `; the largest gap to the trainer, ${short(found.gaps[largest])}, is at token ${largest}` : "",
      found.learned ? "; the answer was trained on" : "; the answer was not trained on",
      found.texts ? "" : "; the run's tokenizer is not at hand, so these are the ids"));
}
