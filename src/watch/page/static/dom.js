// Elements of the page. Text is only ever set as text: nothing here parses markup.

/** An element. `props`: `class`, `on` (listeners), `data`, DOM properties, and any other as an attribute. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

/** Appends children: nodes, texts, numbers, or lists of these; empty ones are left out. */
export function add(element, children) {
  for (const child of children.flat(4)) {
    if (child === undefined || child === null || child === false || child === "") continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** Replaces what an element holds; details with the same `data-keep` as one that was open are open again. */
export function fill(element, ...children) {
  const open = new Set([...element.querySelectorAll("details[open][data-keep]")].map((one) => one.dataset.keep));
  element.replaceChildren();
  add(element, children);
  for (const one of element.querySelectorAll("details[data-keep]")) if (open.has(one.dataset.keep)) one.open = true;
  return element;
}

/** Whether somebody is typing or choosing in an element: what follows a run leaves it alone meanwhile. */
export const inUse = (element) => element.contains(document.activeElement) && document.activeElement.matches("input,select");

const SVG = "http://www.w3.org/2000/svg";

/** An element of a drawing. */
export function s(tag, props, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, String(value));
  }
  add(element, children);
  return element;
}

/** A button that looks like a link or a button. */
export function button(text, run, props) {
  return h("button", { type: "button", ...props, on: { click: run } }, text);
}

/** A table: `columns` are [name, of(row), class]; `open(row)` makes rows clickable. */
export function table(columns, rows, { open, current, id } = {}) {
  const head = h("tr", null, columns.map(([name, , kind]) => h("th", { class: kind }, name)));
  const body = rows.map((row, place) => {
    const cells = columns.map(([, of, kind]) => h("td", { class: kind }, of(row)));
    const chosen = current?.(row, place);
    return h("tr", {
      class: [open ? "clickable" : "", chosen ? "current" : ""].join(" ").trim() || null,
      data: { place: String(place) },
      on: open ? { click: (event) => event.target.closest("a,button,input") || open(row, place) } : {},
    }, cells);
  });
  return h("div", { class: "scroll-x" }, h("table", { id }, h("thead", null, head), h("tbody", null, body)));
}

/** Offers bytes or text as a file to save. */
export function save(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** A command with a button that copies it. */
export function command(text) {
  const copy = button("copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "copied";
    } catch {
      copy.textContent = "select it";
    }
  }, { class: "small" });
  return h("div", { class: "command" }, h("code", null, text), copy);
}
