// The logs of all roles: what they report as wrong, each thing once, and the end of each.

import { ask } from "./api.js";
import { button, fill, h, table } from "./dom.js";
import { ago, bytes, count, several, shown } from "./format.js";
import { change, read } from "./state.js";

const WRONG = /\b(ERROR|CRITICAL|FATAL|Traceback)\b|^(?:\w+\.)*\w*(?:Error|Exception)\b/, WARNING = /\bWARN(ING)?\b/;

const ERRORS = 15000;

export function open(root) {
  const errors = h("div", { class: "panel" }), bar = h("div", { class: "bar-line" }), box = h("pre", { class: "log", id: "log" });
  let closed = false, page = null, lines = [], files = [], looked = 0;
  fill(root, errors, bar, box);

  function drawErrors(found) {
    const bad = found.filter((one) => one.level === "error"), warnings = found.filter((one) => one.level !== "error");
    const list = (rows) => table([
      ["times", (one) => h("b", null, count(one.count)), "num"], ["log", (one) => shown(one.log), "nowrap"],
      ["newest", (one) => h("details", { data: { keep: `${one.log} ${one.text}` } }, h("summary", { class: "line-text" }, shown(one.text)), h("pre", { class: "text" }, one.details.map(shown).join("\n")), button("in the log", () => change({ log: one.log, at: one.at }), { class: "small" }))],
    ], rows);
    fill(errors, h("h2", null, bad.length ? several(bad.length, "error") : "No errors"), bad.length ? list(bad) : h("p", { class: "good" }, "No log reports an error."),
      warnings.length ? h("details", { data: { keep: "warnings" } }, h("summary", null, several(warnings.length, "warning")), list(warnings)) : null);
  }

  function drawBar() {
    const name = read().log ?? page?.name;
    fill(bar, h("h2", null, "Logs"), files.map((file) => button(`${file.name} (${bytes(file.nbytes)})`, () => change({ log: file.name, at: "" }), { class: `small${file.name === name ? " on" : ""}`, title: `written ${ago(Date.now() / 1000 - file.written)}` })),
      page?.begin > 0 ? button("earlier", earlier, { class: "small" }) : null);
  }

  function draw(atEnd) {
    const near = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    fill(box, lines.map((line) => h("div", { class: WRONG.test(line) ? "bad" : WARNING.test(line) ? "warn" : null }, shown(line) || " ")));
    if (atEnd || near) box.scrollTop = box.scrollHeight;
  }

  async function earlier() {
    const found = await ask("log", { run: read().run, name: page.name, before: page.begin });
    lines = [...found.lines.slice(0, -1), ...lines];
    page = { ...page, begin: found.begin, extended: true };
    drawBar();
    draw(false);
    box.scrollTop = 0;
  }

  // Looking for errors reads the ends of all logs, so while a run goes on that is done less often.
  async function load(atEnd = true) {
    const state = read();
    try {
      if (atEnd || Date.now() - looked > ERRORS) {
        looked = Date.now();
        const found = await ask("logs", { run: state.run });
        if (closed) return;
        files = found.files;
        drawErrors(found.errors);
      }
      const name = state.log ?? files.find((file) => file.name === "trainer.log")?.name ?? files[0]?.name;
      if (!name) return fill(box, "There is no log yet.");
      const around = state.at ? Number(state.at) + 20000 : undefined;
      page = await ask("log", { run: state.run, name, before: around });
      if (closed) return;
      lines = page.lines;
      drawBar();
      draw(atEnd && around === undefined);
      if (around !== undefined) [...box.children].find((line) => line.className === "bad" || line.className === "warn")?.scrollIntoView({ block: "center" });
    } catch (error) {
      fill(box, h("span", { class: "bad" }, shown(error.message)));
    }
  }
  load();
  return {
    update: () => load(),
    live: true,
    refresh: () => (read().at || page?.extended ? null : load(false)),
    close: () => { closed = true; },
    key(event) {
      const here = files.findIndex((file) => file.name === page?.name);
      if (event.key !== "j" && event.key !== "k") return false;
      const next = files[here + (event.key === "j" ? 1 : -1)];
      if (next) change({ log: next.name, at: "" });
      return true;
    },
  };
}
