// All runs: state, step, newest value, what is wrong, and the command that goes on with each.

import { command, fill, h, table } from "./dom.js";
import { ago, count, exact, short, shown } from "./format.js";
import { change } from "./state.js";

export function open(root, { lines, folder }) {
  let chosen = -1;
  function draw() {
    const found = lines();
    const going = found.filter((line) => line.resume);
    fill(root,
      h("div", { class: "title" }, h("h1", null, "Runs"), h("span", { class: "path" }, shown(folder()))),
      h("div", { class: "panel", style: { "margin-top": "12px" } },
        found.length ? table([
          ["run", (line) => h("b", null, shown(line.id))],
          ["command", (line) => line.command ?? ""],
          ["state", (line) => h("span", { class: `state ${line.state}` }, line.state)],
          ["step", (line) => `${count(line.step)}${line.max_steps ? ` / ${count(line.max_steps)}` : ""}`, "num"],
          ["newest", (line) => (line.label ? h("span", { title: exact(line.newest) }, `${line.label} ${short(line.newest)}`) : ""), "nowrap"],
          ["seen", (line) => ago(line.age), "nowrap"],
          ["wrong", (line) => (line.damaged ? h("span", { class: "bad" }, shown(line.damaged)) : h("span", { class: "warn" }, shown(line.findings.join(", "))))],
        ], found, { open: (line) => change({ run: line.id }), current: (_, place) => place === chosen, id: "runs" })
          : h("p", { class: "quiet" }, "There is no run here yet. A run that begins below this folder appears by itself.")),
      going.length ? h("div", { class: "panel" }, h("h2", null, "Those that have not reached their last step go on with"), going.map((line) => command(line.resume))) : null);
  }
  draw();
  return {
    refresh: draw,
    update: draw,
    key(event) {
      const found = lines();
      if (event.key === "j" || event.key === "k") chosen = Math.min(Math.max(chosen + (event.key === "j" ? 1 : -1), 0), found.length - 1);
      else if (event.key === "Enter" && found[chosen]) change({ run: found[chosen].id });
      else return false;
      draw();
      return true;
    },
  };
}
