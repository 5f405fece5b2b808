// Checkpoints: the tree of branches, and each step with its size, why it is kept, and how to go on from it.

import { ask } from "./api.js";
import { command, fill, h, s, table } from "./dom.js";
import { ago, bytes, exact, several, short, shown } from "./format.js";
import { read } from "./state.js";

export function open(root) {
  let closed = false, chosen = null, found = null;

  /** Branches as lanes, from the first at the top; a step of a lane is a circle, a fork a line. */
  function tree() {
    const { branches, rows } = found;
    if (branches.length < 1) return null;
    const steps = [...new Set(rows.map((row) => row.step).filter(Number.isFinite))].sort((a, b) => a - b);
    const left = 150, each = Math.min(90, Math.max(34, 900 / Math.max(steps.length, 1))), lane = 46;
    const x = (step) => left + steps.indexOf(step) * each + 20, y = (place) => 26 + place * lane;
    const width = left + steps.length * each + 40, height = branches.length * lane + 22;
    const parts = [];
    branches.forEach((branch, place) => {
      const above = branch.from ? branches.findIndex((other) => other.branch === branch.from.branch) : -1;
      const color = branch.abandoned ? "var(--quiet)" : "var(--accent)";
      if (above >= 0) parts.push(s("path", { d: `M ${x(branch.from.step)} ${y(above)} C ${x(branch.from.step) + 26} ${y(place)}, ${x(branch.steps[0]) - 30} ${y(place)}, ${x(branch.steps[0])} ${y(place)}`, fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": branch.abandoned ? "4 3" : null }));
      parts.push(s("line", { x1: x(branch.steps[0]), x2: x(branch.steps.at(-1)), y1: y(place), y2: y(place), stroke: color, "stroke-width": 2, "stroke-dasharray": branch.abandoned ? "4 3" : null }));
      parts.push(s("text", { x: 6, y: y(place) + 4 }, shown(branch.branch)), branch.abandoned ? s("text", { x: 6, y: y(place) + 19, class: "q" }, "set aside") : branch.origin ? s("text", { x: 6, y: y(place) + 19, class: "q" }, `fork of step ${branch.origin.step}`) : null);
      for (const step of branch.steps) {
        const row = rows.find((one) => one.step === step && one.branch === branch.branch), bad = /damaged/.test(row?.state ?? ""), aside = row?.state.startsWith("abandoned");
        const dense = steps.length > 24 && steps.indexOf(step) % Math.ceil(steps.length / 24);
        parts.push(s("g", { data: { step }, on: { click: () => { chosen = row.folder; draw(); document.querySelector("#steps tr.current")?.scrollIntoView({ block: "nearest" }); } } }, s("title", null, `step ${step}, ${bytes(row?.bytes)}, ${row?.state}`),
          s("circle", { cx: x(step), cy: y(place), r: row?.folder === chosen ? 8 : 6, fill: bad ? "var(--bad)" : aside ? "var(--panel)" : color, stroke: bad ? "var(--bad)" : color, "stroke-width": 2, cursor: "pointer" }),
          dense ? null : s("text", { x: x(step), y: y(place) + 21, "text-anchor": "middle", class: "q" }, step)));
      }
    });
    return h("div", { class: "panel scroll-x" }, h("h2", null, branches.length > 1 ? `${branches.length} branches: a new one begins when the run goes back to an earlier step` : "One branch: the run never went back"),
      s("svg", { class: "tree", viewBox: `0 0 ${width} ${height}`, width, height }, parts.filter(Boolean)));
  }

  function draw() {
    const { rows } = found, row = rows.find((one) => one.folder === chosen) ?? rows.findLast((one) => one.resume);
    fill(root,
      found.warnings.map((warning) => h("p", { class: "error" }, shown(warning))),
      rows.length ? null : h("div", { class: "note" }, `No checkpoint in ${found.folder} yet.`),
      tree(),
      row?.resume ? h("div", { class: "panel" }, h("h2", null, `Go on from ${row.name}`), command(row.resume), h("p", { class: "quiet" }, "Steps after it are set aside as a branch, and nothing of them is lost.")) : null,
      rows.length ? h("div", { class: "panel" }, h("h2", null, `${several(rows.length, "step")}, ${bytes(found.total_bytes)}`), table([
        ["step", (one) => h("b", null, one.step ?? shown(one.name)), "nowrap"],
        ["state", (one) => h("span", { class: one.state.startsWith("complete") ? "good" : one.state.startsWith("abandoned") ? "quiet" : "bad" }, shown(one.state.replaceAll(`${one.folder}/`, "").replace(/^abandoned .*/, "set aside when the run went back")))],
        ["size", (one) => bytes(one.bytes), "num"],
        ["saved", (one) => h("span", { title: one.created }, ago(one.age)), "nowrap"],
        ["branch", (one) => shown(one.branch ?? ""), "nowrap"],
        ["kept by", (one) => (one.kept_by ?? []).join(", ")],
        ["workers", (one) => one.world_size ?? "", "num"],
        ["newest values", (one) => Object.entries(one.metrics).map(([key, value]) => h("span", { title: exact(value) }, `${key} ${short(value)} `))],
        ["from", (one) => (one.parent ? `run ${shown(one.parent.run_id)}, step ${one.parent.step}` : "")],
      ], [...rows.filter((one) => !one.state.startsWith("abandoned")).reverse(), ...rows.filter((one) => one.state.startsWith("abandoned")).reverse()], { open: (one) => { chosen = one.folder; draw(); }, current: (one) => one.folder === chosen, id: "steps" }),
      h("p", { class: "quiet" }, "Sizes and names are checked here, content is not: `ckpt verify` reads every byte."), command(`ckpt verify ${found.folder}`)) : null);
  }

  async function load() {
    try {
      found = await ask("checkpoints", { run: read().run });
    } catch (error) {
      return fill(root, h("p", { class: "error" }, shown(error.message)));
    }
    if (!closed) draw();
  }
  load();
  return { refresh: load, close: () => { closed = true; } };
}
