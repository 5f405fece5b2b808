import { fill, h } from "./dom.js"; export function open(root) { fill(root, h("p", null, "not yet")); return {}; }
