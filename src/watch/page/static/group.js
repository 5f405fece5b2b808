// The answers to one prompt side by side, and one of them as a whole conversation with its tokens.

import { ask } from "./api.js";
import { rewardColor } from "./bars.js";
import { button, fill, h } from "./dom.js";
import { count, exact, several, short, shown, span } from "./format.js";
import { change, elsewhere, go, read } from "./state.js";
import { tokenView } from "./tokens.js";

// What separates messages in a rendered prompt, in the usual templates; it is only greyed.
const MARKUP = /(<\|[^|<>]*\|>|\[\/?INST\]|<\/?(?:s|bos|eos|pad|think|system|user|assistant|tool_call|tool_response|tools)>|<(?:start|end)_of_turn>)/;
const MARKED = 50000;

/** A text of the run; `part` is {text, characters}, and `whole()` gets the rest if there is more. */
export function textOf(part, { tall = false, whole } = {}) {
  const box = h("pre", { class: `text${tall ? " tall" : ""}`, dir: "auto" });
  draw(part.text);
  function draw(text) {
    const clean = shown(text);
    if (clean.length > MARKED) box.replaceChildren(clean);
    else box.replaceChildren(...clean.split(MARKUP).map((piece, place) => (place % 2 ? h("span", { class: "mark" }, piece) : piece)));
    if (!clean) box.replaceChildren(h("span", { class: "quiet" }, "(empty)"));
  }
  if (part.characters <= part.text.length) return box;
  const more = button(`show all ${count(part.characters)} characters`, async () => {
    const text = await whole();
    draw(text);
    more.remove();
  }, { class: "small" });
  return h("div", null, box, more);
}

export class Group {
  constructor(root, { about }) {
    this.root = root;
    this.about = about;
    this.place = null;
    this.found = null;
    this.drawn = null;
    this.turn = 0;
  }

  clear(...children) {
    this.place = null;
    this.found = null;
    this.drawn = null;
    this.turn += 1;
    fill(this.root, ...children);
  }

  first() {
    return this.found?.answers[0]?.sample ?? "";
  }

  async show(step, place, sample, [low, high]) {
    const own = ++this.turn, key = `${read().run} ${step} ${place}`;
    this.place = place;
    this.range = [low, high];
    if (this.key !== key || !this.found) {
      this.key = key;
      try {
        this.found = await ask("group", { run: read().run, step, place });
      } catch (error) {
        if (own === this.turn) fill(this.root, h("p", { class: "error" }, shown(error.message)));
        this.key = this.drawn = null;
        return;
      }
      if (own !== this.turn) return;
    }
    const drawn = `${key} ${sample} ${low} ${high}`;
    if (drawn === this.drawn) return;  // what is open in it stays so while a run is followed
    this.drawn = drawn;
    const answer = sample === null ? null : this.found.answers.find((one) => one.sample === sample);
    if (answer) this.#drawOne(answer);
    else this.#drawAll();
  }

  #drawAll() {
    const { found } = this, rewards = found.answers.map((one) => one.reward).filter((one) => one !== null);
    if (!found.answers.length) return fill(this.root, h("div", { class: "note" }, `There is no prompt ${found.place} in step ${found.step}.`));
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const flat = found.flat;
    fill(this.root,
      h("div", { class: "panel" },
        h("div", { class: "title" }, h("h2", null, `Problem ${found.problem}`), h("span", { class: "quiet" }, shown(found.environment)), h("span", { class: "quiet" }, `place ${found.place} in the run's order`),
          button("this problem in all steps", () => go(elsewhere("rollouts", { list: 1, problem: found.problem, env: found.environment, sort: "oldest" })), { class: "small" })),
        h("p", { style: { "margin-top": "6px" } }, `${several(found.answers.length, "answer")}, mean reward `, h("b", { title: exact(mean) }, short(mean)), flat ? h("span", { class: "badge flat", style: { "margin-left": "8px" } }, "no spread: every answer has the same reward, so comparing them teaches nothing") : null),
        textOf(found.prompt, { whole: () => this.#whole(found.answers[0].sample, (row) => row.prompt.text) })),
      h("div", { class: "answers" }, found.answers.map((answer) => this.#card(answer))),
      h("p", { class: "quiet", style: { "margin-top": "10px" } }, found.advantages.exact
        ? `Advantages are computed again from the kept rewards, by ${shown(found.advantages.how)} as the orchestrator does.`
        : `The advantage shown is the reward minus the group's mean: what ${shown(found.advantages.how)} makes of it can't be computed again from what is kept.`));
  }

  #facts(answer) {
    const versions = [...new Set(answer.turns.flatMap((turn) => turn.versions.map((one) => one.step ?? one.version)))];
    return h("div", { class: "facts-line" },
      answer.advantage !== null ? h("span", { title: exact(answer.advantage), class: answer.advantage > 0 ? "good" : answer.advantage < 0 ? "bad" : "" }, `advantage ${answer.advantage > 0 ? "+" : ""}${short(answer.advantage)}`) : null,
      h("span", null, several(answer.tokens, "token")),
      h("span", { class: answer.finish_reason === "length" ? "warn" : "" }, answer.finish_reason === "length" ? "cut off" : answer.finish_reason ?? "not ended"),
      answer.seconds !== null ? h("span", null, span(answer.seconds)) : null,
      versions.length ? h("span", { title: "optimiser steps of the policies that sampled it" }, `policy ${versions.map(shown).join(", ")}`) : null,
      answer.turns.length > 1 ? h("span", null, several(answer.turns.length, "turn")) : null,
      answer.diverged ? h("span", { class: "warn", title: "it asked something else after a restart than before" }, "diverged") : null);
  }

  #parts(answer) {
    const parts = Object.entries(answer.parts ?? {});
    return parts.length ? h("div", { class: "facts-line" }, parts.map(([name, value]) => h("span", { title: exact(value) }, `${shown(name)} ${short(value)}`))) : null;
  }

  #card(answer) {
    const color = rewardColor(answer.reward, ...this.range);
    return h("article", { class: "answer", data: { sample: answer.sample }, style: { "border-top-color": color } },
      h("header", null, h("span", { class: "reward", title: exact(answer.reward), data: { exact: exact(answer.reward) } }, answer.reward === null ? "failed" : short(answer.reward)), h("span", { class: "quiet" }, `answer ${answer.sample}`),
        button("open", () => change({ sample: answer.sample }), { class: "small" })),
      this.#parts(answer), this.#facts(answer),
      answer.failed ? h("p", { class: "error" }, shown(answer.failed)) : null,
      textOf(answer.text, { whole: () => this.#whole(answer.sample, (row) => row.text.text) }));
  }

  #drawOne(answer) {
    const { found } = this, samples = found.answers.map((one) => one.sample), here = samples.indexOf(answer.sample);
    const color = rewardColor(answer.reward, ...this.range), several_ = new Set(answer.turns.map((turn) => turn.branch)).size > 1;
    const to = (place) => () => change({ sample: samples[place] });
    fill(this.root,
      h("div", { class: "panel answer", style: { "border-top-color": color } },
        h("div", { class: "title" }, button("◀ all answers", () => change({ sample: "" }), { class: "small" }),
          h("span", { class: "reward", title: exact(answer.reward), data: { exact: exact(answer.reward) } }, answer.reward === null ? "failed" : `reward ${short(answer.reward)}`),
          h("span", { class: "quiet" }, `answer ${answer.sample} to problem ${found.problem}, rollout `, h("code", null, `${found.step}/${found.place}/${answer.sample}`)),
          button("before", to(here - 1), { class: "small", disabled: here === 0 }), button("next", to(here + 1), { class: "small", disabled: here === samples.length - 1 })),
        this.#parts(answer), this.#facts(answer),
        answer.failed ? h("p", { class: "error" }, shown(answer.failed)) : null,
        answer.turns.length ? answer.turns.map((turn, number) => this.#turn(answer, turn, number, several_))
          : h("div", { class: "turn said" }, h("h3", null, "answer"), textOf(answer.text, { tall: true, whole: () => this.#whole(answer.sample, (row) => row.text.text) }))));
  }

  #turn(answer, turn, number, several_) {
    const branch = several_ ? `, branch ${turn.branch}` : "";
    const body = h("div", null, textOf(turn.text, { tall: true, whole: () => this.#whole(answer.sample, (row) => row.turns[number].text.text) }));
    const tokens = button("tokens", async () => {
      if (tokens.classList.toggle("on")) {
        fill(body, h("p", { class: "quiet" }, "reading"));
        try {
          fill(body, tokenView(await ask("tokens", { run: read().run, step: answer.step, place: answer.place, sample: answer.sample, turn: number })));
        } catch (error) {
          fill(body, h("p", { class: "error" }, shown(error.message)));
        }
      } else fill(body, textOf(turn.text, { tall: true, whole: () => this.#whole(answer.sample, (row) => row.turns[number].text.text) }));
    }, { class: "small", title: "each token with its logprob and the policy that sampled it" });
    return [
      h("div", { class: "turn" }, h("h3", null, number ? `shown to the model next${branch}` : `shown to the model${branch}`), textOf(turn.prompt, { tall: true, whole: () => this.#whole(answer.sample, (row) => row.turns[number].prompt.text) })),
      h("div", { class: "turn said" }, h("h3", null, `answer ${answer.turns.length > 1 ? number + 1 : ""}`, h("span", null, several(turn.tokens, "token")), h("span", null, turn.finish_reason ?? "not ended"),
        h("span", null, `policy of step ${[...new Set(turn.versions.map((one) => one.step ?? shown(one.version)))].join(", ")}`), turn.tokens ? tokens : null), body),
    ];
  }

  async #whole(sample, part) {
    const row = await ask("conversation", { run: read().run, step: this.found.step, place: this.found.place, sample, whole: 1 });
    return part(row);
  }
}
