// What the page shows is in the fragment of its address, so that an address can be kept and handed on.

const listeners = new Set();

/** The fragment as an object; `runs` is a list. */
export function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = Object.fromEntries(given.entries());
  found.runs = given.getAll("with");
  delete found.with;
  found.view ??= "overview";
  return found;
}

/** The fragment for a state. */
export function address(state) {
  const made = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (name === "runs") for (const run of value) made.append("with", run);
    else if (value !== undefined && value !== null && value !== "" && !(name === "view" && value === "overview")) made.set(name, String(value));
  }
  return `#${made}`;
}

/** Changes parts of the state. `replace`: without a new entry in the browser's history. */
export function change(parts, { replace = false } = {}) {
  go({ ...read(), ...parts }, { replace });
}

/** Goes to a state. */
export function go(state, { replace = false } = {}) {
  const next = address(state);
  if (next === location.hash || (next === "#" && !location.hash)) return;
  history[replace ? "replaceState" : "pushState"](null, "", next);
  tell();
}

/** The state of another view of the same run. */
export const elsewhere = (view, parts = {}) => ({ run: read().run, runs: read().runs, view, ...parts });

/** Calls `listener` whenever the state changes. */
export function follow(listener) {
  listeners.add(listener);
}

function tell() {
  for (const listener of listeners) listener();
}

addEventListener("popstate", tell);
addEventListener("hashchange", tell);
