// Rollouts: by step (its prompts, and the answers to one side by side), or all of them searched and sorted.

import { ask } from "./api.js";
import { histogram, squares } from "./bars.js";
import { Chart } from "./chart.js";
import { button, fill, h, inUse, table } from "./dom.js";
import { count, exact, several, short, shown } from "./format.js";
import { Group } from "./group.js";
import { change, elsewhere, go, read } from "./state.js";

const SORTS = [["newest", "newest first"], ["oldest", "oldest first"], ["best", "highest reward"], ["worst", "lowest reward"], ["longest", "longest"], ["shortest", "shortest"], ["slowest", "slowest"]];
const PAGE = 40;
const FILTERS = ["q", "env", "problem", "rfrom", "rto", "failed", "end", "trained", "sort", "first", "last"];

export function open(root, context) {
  const modes = h("div", { class: "bar-line" }), inner = h("div");
  fill(root, modes, inner);
  let mode = null, shownMode = null;

  function pick() {
    const state = read(), wanted = state.list ? "list" : "step";
    fill(modes,
      button("By step", () => go(elsewhere("rollouts", { step: state.step })), { class: wanted === "step" ? "on" : "" }),
      button("Search all", () => go(elsewhere("rollouts", { list: 1 })), { class: wanted === "list" ? "on" : "", id: "search-all" }),
      h("span", { class: "quiet" }, wanted === "step" ? "j k: prompts, Left Right: steps, Enter: one answer, /: search" : "/: search, j k: rollouts, Enter: open"));
    if (shownMode !== wanted) {
      mode?.close?.();
      shownMode = wanted;
      mode = wanted === "list" ? listMode(fill(inner)) : stepMode(fill(inner), context);
    } else mode.update();
  }
  pick();
  return {
    update: pick,
    refresh: () => mode.refresh(),
    close: () => mode.close?.(),
    key(event) {
      if (event.key === "/" && shownMode === "step") {
        go(elsewhere("rollouts", { list: 1 }));
        document.getElementById("search")?.focus();
        return true;
      }
      return mode.key(event);
    },
  };
}

// By step

function stepMode(root, context) {
  const top = h("div", { class: "bar-line" }), list = h("div", { class: "panel prompts" }), right = h("div"), browse = h("div", { class: "browse" }, list, right);
  fill(root, top, browse);
  const group = new Group(right, context);
  let found = null, asked = null, closed = false;

  async function load(again = false) {
    const state = read();
    let step = state.step === undefined ? null : Number(state.step);
    if (step === null) {
      const ends = await ask("rollouts", { run: state.run, count: 0 }).catch(() => null);
      if (closed) return;
      if (!ends?.steps) return fill(root, h("div", { class: "note" }, "No rollouts are kept yet. They are written when the batch of a step is complete, unless orchestrator.keep_rollouts_gb is 0; runs of sft and dpo have none."));
      [, step] = ends.steps;
      return change({ step }, { replace: true });
    }
    if (asked !== step || again) {
      asked = step;
      try {
        found = await ask("prompts", { run: state.run, step });
      } catch (error) {
        found = null;
        return fill(list, h("p", { class: "error" }, shown(error.message)));
      }
      if (closed || asked !== step) return;
    }
    if (found?.step === step) draw(again);  // else it is on its way
  }

  function draw(again) {
    const state = read(), { prompts } = found;
    if (!again || !inUse(top)) drawTop();
    if (!prompts.length) {
      fill(list);
      group.clear(h("div", { class: "note" }, `No rollouts of step ${found.step} are kept`, found.kept ? `; those of steps ${found.kept[0]} to ${found.kept[1]} are.` : "."));
      return;
    }
    const place = state.place === undefined ? (prompts.find((one) => !one.flat) ?? prompts[0]).place : Number(state.place);
    const rewards = prompts.flatMap((prompt) => prompt.rewards).filter((one) => one !== null);
    const low = Math.min(...rewards), high = Math.max(...rewards);
    fill(list, prompts.map((prompt) => h("div", { class: `prompt${prompt.place === place ? " current" : ""}`, data: { place: prompt.place }, on: { click: () => change({ place: prompt.place, sample: "" }) } },
      h("div", { class: "q line-text", dir: "auto" }, shown(prompt.question) || "(empty)"),
      h("div", { class: "more" }, squares(prompt.rewards, low, high), h("span", null, `problem ${prompt.problem}`),
        prompt.trained ? (!prompt.flat ? null : h("span", { class: "badge flat", title: "all its answers have the same reward, so an advantage that compares them is 0" }, "no spread")) : h("span", { class: "badge bad" }, "not trained on"),
        prompt.failed ? h("span", { class: "badge bad" }, `${prompt.failed} failed`) : null))));
    const current = list.querySelector(".current");  // scrollIntoView would move the page as well
    if (current && current.offsetTop < list.scrollTop) list.scrollTop = current.offsetTop - 8;
    else if (current && current.offsetTop + current.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = current.offsetTop + current.offsetHeight - list.clientHeight + 8;
    group.show(found.step, place, state.sample === undefined ? null : Number(state.sample), [low, high]);
  }

  function drawTop() {
    const flat = found.prompts.filter((prompt) => prompt.trained && prompt.flat).length, { prompts } = found;
    const go = (step) => () => change({ step, place: "", sample: "" });
    fill(top,
      button("◀", go(found.before), { disabled: found.before === null, title: "the step before (Left)" }),
      h("label", null, "step", h("input", { type: "number", value: found.step, size: "7", style: { width: "90px" }, "aria-label": "step", on: { change: (event) => change({ step: event.target.value, place: "", sample: "" }) } })),
      button("▶", go(found.after), { disabled: found.after === null, title: "the next step (Right)" }),
      h("span", null, several(prompts.length, "prompt"), ", ", several(prompts.reduce((sum, prompt) => sum + prompt.rewards.length, 0), "answer")),
      prompts.length ? h("span", { class: flat ? "warn" : "quiet" }, flat ? `${flat} of ${several(prompts.length, "prompt")} without spread: all answers have the same reward, so comparing them teaches nothing` : "every prompt has answers that differ in reward") : null);
  }

  function move(by) {
    const places = found.prompts.map((prompt) => prompt.place), here = places.indexOf(group.place);
    const next = places[Math.min(Math.max(here + by, 0), places.length - 1)];
    if (next !== undefined) change({ place: next, sample: "" }, { replace: true });
  }

  load();
  return {
    update: () => load(),
    refresh: () => load(true),
    close: () => { closed = true; },
    key(event) {
      if (!found) return false;
      if (event.key === "j") move(1);
      else if (event.key === "k") move(-1);
      else if (event.key === "ArrowRight" && found.after !== null) change({ step: found.after, place: "", sample: "" });
      else if (event.key === "ArrowLeft" && found.before !== null) change({ step: found.before, place: "", sample: "" });
      else if (event.key === "Enter" && read().sample === undefined) change({ sample: group.first() });
      else if (event.key === "Escape" && read().sample !== undefined) change({ sample: "" });
      else return false;
      return true;
    },
  };
}

// All rollouts

function listMode(root) {
  const form = h("div", { class: "bar-line" }), picture = h("div"), status = h("p", { class: "quiet" }), rows = h("div", { class: "panel" }), overSteps = h("div");
  fill(root, form, h("div", { class: "two" }, h("div", null, picture, status), overSteps), rows);
  let found = [], total = 0, chosen = -1, asked = "", turn = 0, closed = false, environments = [];

  function query() {
    const state = read();
    return { run: state.run, text: state.q, environment: state.env, problem: state.problem, reward_from: state.rfrom, reward_to: state.rto, failed: state.failed, end: state.end, trained: state.trained, sort: state.sort, first_step: state.first, last_step: state.last };
  }

  function input(name, label, props) {
    return h("label", null, label, h("input", { value: read()[name] ?? "", "aria-label": label || name, ...props, on: { change: (event) => change({ [name]: event.target.value.trim() }) } }));
  }

  function select(name, label, choices) {
    return h("label", null, label, h("select", { "aria-label": label, on: { change: (event) => change({ [name]: event.target.value }) } }, choices.map(([value, text]) => { const option = h("option", { value }, text); option.selected = (read()[name] ?? choices[0][0]) === value; return option; })));
  }

  function drawForm() {
    const some = FILTERS.some((name) => name !== "sort" && read()[name] !== undefined);
    fill(form,
      input("q", "", { id: "search", role: "searchbox", placeholder: "search prompts and answers", size: "30", "aria-label": "search" }),
      select("sort", "", SORTS),
      environments.length > 1 ? select("env", "environment", [["", "all"], ...environments.map((one) => [one, one])]) : null,
      input("rfrom", "reward", { size: "5", placeholder: "from" }), input("rto", "to", { size: "5", placeholder: "to" }),
      input("first", "step", { size: "5", placeholder: "from" }), input("last", "to", { size: "5", placeholder: "to" }),
      input("problem", "problem", { size: "6" }),
      select("end", "ended", [["", "any way"], ["stop", "stop"], ["length", "length: cut off"]]),
      select("failed", "", [["", "failed or not"], ["1", "only failed"], ["0", "without failed"]]),
      some ? button("clear", () => go(elsewhere("rollouts", { list: 1 })), { class: "small" }) : null);
  }

  async function load(again = false) {
    const wanted = JSON.stringify(query());
    if (wanted === asked && !again) return;
    if (wanted !== asked) [found, chosen] = [[], -1];
    asked = wanted;
    const own = ++turn;
    const typing = !again && document.activeElement?.id === "search";
    if (!again || !inUse(form)) drawForm();
    if (typing) document.getElementById("search").focus();
    drawOverSteps();
    const many = Math.max(PAGE, found.length);
    for (;;) {
      let answer;
      try {
        answer = await ask("rollouts", { ...query(), count: Math.min(many, 500) });
      } catch (error) {
        fill(rows, h("p", { class: "error" }, shown(error.message)));
        return;
      }
      if (own !== turn || closed) return;
      [found, total] = [answer.rows, answer.total];
      if (answer.environments.join() !== environments.join()) {
        environments = answer.environments;
        if (!form.contains(document.activeElement)) drawForm();
      }
      draw(answer);
      if (!answer.left) return;
    }
  }

  function draw(answer) {
    const state = read();
    fill(picture, histogram(answer.rewards, { pick: (low, high) => change(isChosen(low, high) ? { rfrom: "", rto: "" } : { rfrom: low, rto: high }), chosen: state.rfrom !== undefined && state.rto !== undefined ? [Number(state.rfrom), Number(state.rto)] : null }));
    status.replaceChildren(h("b", { id: "total", data: { exact: String(total), left: String(answer.left) } }, several(total, "rollout")),
      state.q ? `, ${several(answer.searched, "step")} searched` : "", answer.left ? `; ${several(answer.left, "file")} to go …` : "",
      answer.damaged.length ? h("div", { class: "error", title: answer.damaged.map(shown).join("\n") }, `${several(answer.damaged.length, "file")} can't be read: ${shown(answer.damaged[0])}`) : "");
    drawRows();
  }

  function isChosen(low, high) {
    return Number(read().rfrom) === low && Number(read().rto) === high;
  }

  function drawRows() {
    const many = new Set(found.map((row) => row.environment)).size > 1;
    fill(rows, found.length ? table([
      ["rollout", (row) => h("code", null, `${row.step}/${row.place}/${row.sample}`), "nowrap"],
      ["problem", (row) => row.problem, "num"],
      ...(many ? [["environment", (row) => shown(row.environment), "nowrap"]] : []),
      ["reward", (row) => (row.reward === null ? h("span", { class: "bad" }, "failed") : h("b", { title: exact(row.reward), data: { exact: exact(row.reward) } }, short(row.reward))), "num"],
      ["end", (row) => (row.finish_reason === "length" ? h("span", { class: "warn" }, "length") : row.finish_reason ?? ""), "nowrap"],
      ["tokens", (row) => count(row.tokens), "num"],
      ["question", (row) => lines(row.question)],
      ["answer", (row) => (row.failed ? lines(row.failed, "bad") : lines(row.text))],
    ], found, { open: openRow, current: (_, place) => place === chosen, id: "rollouts" }) : h("p", { class: "quiet" }, "no rollout is selected"),
    found.length && found.length < total && found.length < 500 ? button(`more (${count(total - found.length)})`, more) : null,
    found.length >= 500 && total > 500 ? h("p", { class: "quiet" }, "These are the first 500: filter or sort to see others.") : null);
  }

  // At most three lines of a text, with what was searched for marked.
  function lines(text, kind = "") {
    const clean = shown(text), needle = (read().q ?? "").toLowerCase(), pieces = [];
    let from = 0;
    for (let at = needle ? clean.toLowerCase().indexOf(needle) : -1; at >= 0 && pieces.length < 20; at = clean.toLowerCase().indexOf(needle, from)) {
      pieces.push(clean.slice(from, at), h("mark", null, clean.slice(at, at + needle.length)));
      from = at + needle.length;
    }
    return h("div", { class: `line-text three ${kind}`, dir: "auto" }, pieces, clean.slice(from));
  }

  async function more() {
    const own = turn, answer = await ask("rollouts", { ...query(), begin: found.length, count: PAGE });
    if (own !== turn) return;
    found = [...found, ...answer.rows];
    drawRows();
  }

  function openRow(row) {
    go(elsewhere("rollouts", { step: row.step, place: row.place, sample: row.sample }));
  }

  // The same problem in all steps: how its answers did as the run went on.
  async function drawOverSteps() {
    const state = read();
    fill(overSteps);
    if (!state.problem) return;
    const answer = await ask("rollouts", { run: state.run, problem: state.problem, environment: state.env, sort: "oldest", count: 500 }).catch(() => null);
    if (closed || !answer?.rows.length || read().problem !== state.problem) return;
    const means = new Map();
    for (const row of answer.rows) if (row.reward !== null) means.set(row.step, [...(means.get(row.step) ?? []), row.reward]);
    const steps = [...means.keys()], values = steps.map((step) => means.get(step).reduce((a, b) => a + b, 0) / means.get(step).length);
    const chart = new Chart({ title: `mean reward of problem ${state.problem}`, height: 90, onPick: (point) => go(elsewhere("rollouts", { step: point.step, place: answer.rows.find((row) => row.step === point.step).place })), pickHint: "click: its answers" });
    fill(overSteps, h("h3", null, `Problem ${state.problem} over the run: mean reward of its answers`), chart.element);
    chart.show([{ run: state.run, name: "mean reward", color: "#3b6fd4", xs: steps, steps, values }]);
  }

  load();
  return {
    update: () => load(),
    refresh: () => load(true),
    close: () => { closed = true; },
    key(event) {
      if (event.key === "/") document.getElementById("search").focus();
      else if (event.key === "j" || event.key === "k") {
        chosen = Math.min(Math.max(chosen + (event.key === "j" ? 1 : -1), 0), found.length - 1);
        drawRows();
        rows.querySelector("tr.current")?.scrollIntoView({ block: "nearest" });
      } else if (event.key === "Enter" && found[chosen]) openRow(found[chosen]);
      else return false;
      return true;
    },
  };
}
