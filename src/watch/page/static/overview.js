// The overview of a run: what is wrong, above the few curves that matter, and what everybody is doing.

import { ask } from "./api.js";
import { shares } from "./bars.js";
import { Chart } from "./chart.js";
import { button, command, fill, h, inUse, save, table } from "./dom.js";
import { bytes, exact, percent, short, shown, span } from "./format.js";
import { change, elsewhere, go, read } from "./state.js";

const AXES = [["step", "steps"], ["tokens", "tokens"], ["time", "time at work"]];

export function open(root, { about, together, nameOf }) {
  const findings = h("div", { class: "panel" }), bar = h("div", { class: "bar-line" }), grid = h("div", { class: "charts" }), more = h("div", { class: "two", style: { "margin-top": "14px" } });
  fill(root, findings, bar, grid, more);
  const charts = new Map();
  let names = [], points = new Map(), closed = false, drawnFor = "";

  function isRl() {
    return !["sft", "dpo", "reward"].includes(about().command);
  }

  function drawFindings() {
    const run = about();
    fill(findings, h("h2", null, "What is wrong"), h("ul", { class: "findings" }, run.findings.length
      ? run.findings.map((finding) => h("li", { class: finding.level > 1 ? "high" : null, data: { rule: finding.rule } }, h("b", null, `${shown(finding.what)}.`), h("div", { class: "do" }, `${shown(finding.advice)}.`)))
      : h("li", { class: "fine" }, run.step ? "Nothing is wrong by any of the rules that `diagnose` knows." : "There is no step yet to judge.")));
    if (run.findings.length && isRl() && run.step) findings.append(h("p", { style: { margin: "10px 0 0" } }, h("a", { href: "#", id: "look", on: { click: (event) => { event.preventDefault(); go(elsewhere("rollouts", {})); } } }, "Look at the newest step's prompts, and the rewards of their answers")));
    if (run.resume) findings.append(h("div", { style: { "margin-top": "10px" } }, h("span", { class: "quiet" }, "It goes on with"), command(run.resume)));
  }

  function chosenKeys() {
    const { keys } = read();
    return keys ? keys.split(",") : about().curves.slice(0, 8).map((curve) => curve.key);
  }

  function drawBar() {
    const state = read(), weight = Number(state.smooth ?? 0);
    const pick = h("input", { list: "metrics", placeholder: "add any metric", size: "18", "aria-label": "add a curve", on: { change: (event) => {
      if (names.includes(event.target.value)) change({ keys: [...new Set([...chosenKeys(), event.target.value])].join(",") });
      event.target.value = "";
    } } });
    fill(bar,
      h("h2", null, "Curves"),
      h("label", null, "by", h("select", { "aria-label": "axis", on: { change: (event) => change({ axis: event.target.value === "step" ? "" : event.target.value }) } },
        AXES.map(([name, label]) => { const option = h("option", { value: name }, label); option.selected = (state.axis ?? "step") === name; return option; }))),
      h("label", null, "smooth", h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: weight, "aria-label": "smoothing", on: { change: (event) => change({ smooth: Number(event.target.value) || "" }, { replace: true }) } }), weight ? weight.toFixed(2) : "off"),
      pick, h("datalist", { id: "metrics" }, names.map((name) => h("option", { value: name }))),
      state.keys ? button("the usual curves", () => change({ keys: "" }), { class: "small" }) : null,
      h("span", { class: "quiet" }, isRl() ? "Click a point: the answers of its step." : "Click a point: all numbers of its step."));
  }

  function pickPoint(point) {
    if (isRl()) go(elsewhere("rollouts", { run: point.run, step: point.step }));
    else showRow(point.run, point.step);
  }

  async function load(again = false) {
    if (closed) return;
    const state = read(), keys = chosenKeys(), axis = state.axis ?? "step", shownRuns = together();
    if (!again || !inUse(bar)) drawBar();
    const found = await Promise.all(shownRuns.map((one) => ask("points", { run: one.id, keys: keys.join(","), axis }).catch(() => [])));
    if (closed) return;
    points = new Map(shownRuns.map((one, place) => [one.id, found[place]]));
    const layout = keys.join(",");
    if (layout !== drawnFor) {
      charts.clear();
      fill(grid, keys.map((key) => panel(key)));
      drawnFor = layout;
    }
    for (const key of keys) {
      const { chart, value, label, box } = charts.get(key);
      const series = shownRuns.map((one) => ({ ...(points.get(one.id).find((curve) => curve.key === key) ?? { xs: [], values: [], steps: [] }), run: one.id, name: one.name, color: one.color })).filter((one) => one.xs.length);
      const own = points.get(shownRuns[0].id).find((curve) => curve.key === key);
      box.hidden = !series.length;
      label.textContent = shown(own?.label ?? key);
      const newest = own?.values.at(-1);
      value.textContent = short(newest);
      value.title = exact(newest);
      value.dataset.exact = exact(newest);
      chart.show(series, { weight: Number(state.smooth ?? 0), axis });
    }
    if (!grid.querySelector("section:not([hidden])")) grid.append(h("p", { class: "quiet" }, "no step yet"));
  }

  function panel(key) {
    const chart = new Chart({ title: key, axis: read().axis ?? "step", onPick: pickPoint, pickHint: isRl() ? "click: its prompts and answers" : "click: all its numbers" });
    const value = h("span", { class: "value" }), label = h("h3", null, key);
    const file = key.replaceAll(/[^A-Za-z0-9_-]+/g, "_");
    const box = h("section", { class: "panel", data: { key } },
      h("header", null, label, h("span", { class: "key", title: key }, key),
        h("span", { class: "tools" }, button("PNG", async () => save(`${file}.png`, await chart.png()), { class: "small", title: "the curve as a picture" }),
          button("CSV", () => csv(key, file), { class: "small", title: "all points of the curve" }),
          button("×", () => change({ keys: chosenKeys().filter((one) => one !== key).join(",") }), { class: "small", title: "take it away" })), value),
      chart.element);
    charts.set(key, { chart, value, label, box });
    return box;
  }

  async function csv(key, file) {
    const axis = read().axis ?? "step", parts = [["run", "step", ...(axis === "step" ? [] : [axis]), key]];
    for (const one of together()) {
      const [curve] = await ask("points", { run: one.id, keys: key, axis, most: 300000 });
      for (const [place, step] of curve?.steps.entries() ?? []) parts.push([one.name, step, ...(axis === "step" ? [] : [curve.xs[place]]), curve.values[place]]);
    }
    const quote = (cell) => (/[",\n]/.test(String(cell)) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell));
    save(`${file}.csv`, new Blob([parts.map((cells) => cells.map(quote).join(",")).join("\n"), "\n"], { type: "text/csv" }));
  }

  async function showRow(run, step) {
    const row = await ask("row", { run, step });
    const box = h("dialog", null, h("div", { class: "title" }, h("h2", null, `${nameOf(run)}, step ${step}`), button("close", () => box.close(), { class: "small" })),
      table([["metric", ([key]) => h("code", null, shown(key))], ["value", ([, value]) => shown(exact(value)), "num"]], Object.entries(row).sort()));
    box.addEventListener("close", () => box.remove());
    document.body.append(box);
    box.showModal();
  }

  function drawMore() {
    const run = about(), { step, wait } = run.shares;
    const roles = h("div", { class: "panel" }, h("h2", null, "Roles"), run.roles.length ? table([
      ["role", (role) => shown(role.name), "nowrap"],
      ["state", (role) => h("span", { class: `state ${role.state}` }, role.state)],
      ["doing", (role) => shown(role.doing ?? "")],
      ["for", (role) => span(role.seconds), "num"],
    ], run.roles) : h("p", { class: "quiet" }, "none has begun"));
    const time = h("div", { class: "panel" }, h("h2", null, "Where the time of a step goes"),
      step !== undefined ? shares([["the trainer computes", step, "c1", percent(step)], ["it waits for its batch", wait, "c2", percent(wait)]]) : h("p", { class: "quiet" }, "no step yet"),
      run.pace !== null ? h("p", { class: "quiet", style: { "margin-top": "8px" } }, `A step takes ${span(run.pace)}, the mean of the newest ones; `, h("a", { href: "#", on: { click: (event) => { event.preventDefault(); go(elsewhere("timeline")); } } }, "the time line"), " has each.") : null,
      run.saved ? h("p", null, `Newest checkpoint: step ${run.saved.step}, ${bytes(run.saved.nbytes)}`) : null,
      h("details", { data: { keep: "settings" } }, h("summary", null, "settings of the latest attempt (config.json)"), h("pre", { class: "text" }, shown(JSON.stringify(run.config, null, 1)))));
    fill(more, time, roles);
  }

  async function all(again = true) {
    drawFindings();
    drawMore();
    await load(again);
    if (!names.length && !closed) {
      names = await ask("keys", { run: read().run }).catch(() => []);
      if (!closed) drawBar();
    }
  }
  all(false);
  return { update: () => load(), refresh: () => all(), close: () => { closed = true; } };
}
