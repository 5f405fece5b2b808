// Curves on a canvas: several runs in one picture, smoothed, read by hovering, opened by a click.

import { h } from "./dom.js";
import { exact, onClock, short, span } from "./format.js";

export const COLORS = ["#3b6fd4", "#d9662b", "#1b9a6c", "#a853c0", "#b58900", "#d0456b", "#2a9fb3", "#7d7266"];
const LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 26;

/** Round numbers from `low` to `high`, about `wanted` of them. */
export function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(wanted, 1);
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999) ?? raw;
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6 && found.length < 50; tick += step)
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return found;
}

const UNITS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];

/** Round lengths of time between `low` and `high`, in seconds, about `wanted` of them. */
export function timeTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(wanted, 1), step = UNITS.find((one) => one >= raw);
  if (raw < 1 || !step) return ticks(low, high, wanted);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) found.push(tick);
  return found;
}

const FLAT = 1e-3;

/** The ends of a scale for values from `low` to `high`: what varies by less than a thousandth of its size looks flat. */
export function scaled(low, high) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (low === high) return [low - (size * 0.1 || 0.5), high + (size * 0.1 || 0.5)];
  const lacking = Math.max(size * FLAT - (high - low), 0) / 2;
  return [low - lacking, high + lacking];
}

/** A tick with the digits that tell it from its neighbours. */
export function onScale(tick, all) {
  const step = all.length > 1 ? Math.abs(all[1] - all[0]) : Math.abs(tick) || 1, size = Math.max(...all.map(Math.abs));
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return tick === 0 ? "0" : tick.toExponential(Math.min(Math.max(Math.ceil(Math.log10(Math.abs(tick) / step)), 0), 6)).replace("e+", "e");
  return tick.toFixed(Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9))));
}

/** The exponential moving average of values, without the bias of its beginning; gaps stay gaps. */
export function smoothed(values, weight) {
  if (!(weight > 0)) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    mean = mean * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** One picture. `onPick(point)` is called with {run, step, x, value}; `axis`: step, tokens or time. */
export class Chart {
  constructor({ title, axis = "step", height = 170, onPick, pickHint = "" }) {
    Object.assign(this, { title, axis, onPick, pickHint, series: [], weight: 0, range: null, at: null, drag: null });
    this.canvas = h("canvas", { class: "curve", tabindex: "0", role: "img", "aria-label": `curve of ${title}`, style: { height: `${height}px` } });
    this.note = h("div", { class: "tip", hidden: true });
    this.element = h("div", { class: "chart" }, this.canvas, this.note);
    this.canvas.addEventListener("pointermove", (event) => this.#move(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    this.canvas.addEventListener("pointerdown", (event) => { this.drag = { from: event.offsetX, to: event.offsetX }; });
    this.canvas.addEventListener("pointerup", (event) => this.#up(event));
    this.canvas.addEventListener("dblclick", () => { this.range = null; this.draw(); });
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.element);
  }

  /** Shows these curves: `name`, `color`, `xs`, `values`, `steps`, `run` of each. */
  show(series, { weight = this.weight, axis = this.axis } = {}) {
    this.series = series.map((one) => {
      const values = one.values.map(Number);
      return { ...one, values, smooth: smoothed(values, weight) };
    });
    this.weight = weight;
    if (axis !== this.axis) this.range = null;
    this.axis = axis;
    this.draw();
  }

  #scale(width, height) {
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    for (const { xs, values } of this.series)
      xs.forEach((x, place) => {
        if (this.range && (x < this.range[0] || x > this.range[1])) return;
        first = Math.min(first, x);
        last = Math.max(last, x);
        if (!Number.isFinite(values[place])) return;
        low = Math.min(low, values[place]);
        high = Math.max(high, values[place]);
      });
    if (this.range) [first, last] = this.range;
    if (!Number.isFinite(first)) return null;
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    [low, high] = scaled(low, high);
    const margin = (high - low) * 0.06;
    low -= margin;
    high += margin;
    if (first === last) [first, last] = [first - 0.5, last + 0.5];
    const px = (x) => LEFT + ((x - first) / (last - first)) * (width - LEFT - RIGHT);
    const py = (y) => height - BOTTOM - ((y - low) / (high - low)) * (height - TOP - BOTTOM);
    const back = (at) => first + ((at - LEFT) / (width - LEFT - RIGHT)) * (last - first);
    return { low, high, first, last, px, py, back };
  }

  draw(canvas = this.canvas, ratio = devicePixelRatio || 1, size = null) {
    const width = size?.width ?? canvas.clientWidth, height = size?.height ?? canvas.clientHeight;
    if (!width || !height) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const ink = style("--quiet"), line = style("--line");
    if (size) {
      pen.fillStyle = style("--panel");
      pen.fillRect(0, 0, width, height);
    }
    pen.font = "11px system-ui, sans-serif";
    const scale = this.#scale(width, height);
    this.scale = scale;
    if (!scale) {
      pen.fillStyle = ink;
      pen.fillText("no values", LEFT, height / 2);
      return;
    }
    const { px, py } = scale;
    pen.strokeStyle = line;
    pen.fillStyle = ink;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const rungs = ticks(scale.low, scale.high, Math.max(2, Math.floor((height - TOP - BOTTOM) / 28)));
    for (const tick of rungs) {
      const y = Math.round(py(tick)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(width - RIGHT, y);
      pen.stroke();
      pen.fillText(onScale(tick, rungs), LEFT - 6, y);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const marks = (this.axis === "time" ? timeTicks : ticks)(scale.first, scale.last, Math.floor((width - LEFT - RIGHT) / 90));
    for (const tick of marks) {
      if (this.axis === "step" && !Number.isInteger(tick)) continue;
      pen.fillText(this.#onAxis(tick), Math.min(px(tick), width - RIGHT - 14), height - BOTTOM + 7);
    }
    pen.save();
    pen.beginPath();
    pen.rect(LEFT - 4, 0, width - LEFT - RIGHT + 8, height - BOTTOM + 4);
    pen.clip();
    for (const one of this.series) {
      if (this.weight > 0) this.#line(pen, one, one.values, 0.28, 1);
      this.#line(pen, one, one.smooth, 1, 1.7);
      this.#dots(pen, one, width);
    }
    if (this.drag && Math.abs(this.drag.to - this.drag.from) > 4) {
      pen.fillStyle = style("--accent");
      pen.globalAlpha = 0.15;
      pen.fillRect(Math.min(this.drag.from, this.drag.to), TOP, Math.abs(this.drag.to - this.drag.from), height - TOP - BOTTOM);
      pen.globalAlpha = 1;
    }
    if (this.at && !size) {
      const x = px(this.at.x);
      pen.strokeStyle = ink;
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(x, TOP);
      pen.lineTo(x, height - BOTTOM);
      pen.stroke();
      pen.setLineDash([]);
      for (const point of this.at.points) {
        if (!Number.isFinite(point.value)) continue;
        pen.fillStyle = point.color;
        pen.beginPath();
        pen.arc(px(point.x), py(point.value), 4, 0, 7);
        pen.fill();
      }
    }
    pen.restore();
  }

  #onAxis(value) {
    if (this.axis === "time") return onClock(value);
    return short(value);
  }

  #line(pen, { xs, color }, values, alpha, thick) {
    const { px, py } = this.scale;
    pen.globalAlpha = alpha;
    pen.strokeStyle = color;
    pen.lineWidth = thick;
    pen.lineJoin = "round";
    pen.beginPath();
    let on = false;
    for (let place = 0; place < xs.length; place++) {
      if (!Number.isFinite(values[place])) {
        on = false;
        continue;
      }
      if (on) pen.lineTo(px(xs[place]), py(values[place]));
      else pen.moveTo(px(xs[place]), py(values[place]));
      on = true;
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }

  #dots(pen, { xs, values, smooth, color }, width) {
    const { px, py } = this.scale;
    const inside = xs.filter((x) => !this.range || (x >= this.range[0] && x <= this.range[1])).length;
    if (inside * 12 > width && inside > 1) return;
    pen.fillStyle = color;
    xs.forEach((x, place) => {
      if (!Number.isFinite(values[place])) return;
      pen.beginPath();
      pen.arc(px(x), py(smooth[place]), 2.6, 0, 7);
      pen.fill();
    });
  }

  /** The points nearest to a place on the axis, one of each curve. */
  #nearest(x) {
    const points = [];
    for (const one of this.series) {
      let best = -1;
      one.xs.forEach((own, place) => {
        if (best < 0 || Math.abs(own - x) < Math.abs(one.xs[best] - x)) best = place;
      });
      if (best >= 0) points.push({ run: one.run, name: one.name, color: one.color, x: one.xs[best], step: one.steps[best], raw: one.values[best], value: one.smooth[best] });
    }
    if (!points.length) return null;
    const nearest = points.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
    const reach = (this.scale.last - this.scale.first) / 40;
    return { x: nearest.x, nearest, points: points.filter((point) => point === nearest || Math.abs(point.x - nearest.x) <= reach) };
  }

  #move(event) {
    if (!this.scale) return;
    if (this.drag) this.drag.to = event.offsetX;
    this.#point(this.#nearest(this.scale.back(event.offsetX)));
  }

  #point(at) {
    this.at = at;
    this.draw();
    if (!at) return this.#leave();
    const lines = at.points.map((point) =>
      h("div", null, h("i", { class: "dot", style: { background: point.color } }), this.series.length > 1 ? `${point.name} ` : "", h("b", { title: exact(point.raw) }, exact(point.raw)),
        this.weight > 0 ? ` (smoothed ${short(point.value)})` : ""));
    const where = this.axis === "step" ? "" : `, ${this.axis === "time" ? span(at.x) : `${short(at.x)} tokens`}`;
    this.note.replaceChildren(h("div", { class: "quiet" }, `step ${at.nearest.step}${where}`), ...lines, this.pickHint ? h("div", { class: "quiet" }, this.pickHint) : "");
    this.note.hidden = false;
    const x = this.scale.px(at.x), wide = this.canvas.clientWidth;
    this.note.style.left = x < wide / 2 ? `${x + 12}px` : "auto";
    this.note.style.right = x < wide / 2 ? "auto" : `${wide - x + 12}px`;
  }

  #leave() {
    this.at = null;
    this.drag = null;
    this.note.hidden = true;
    this.draw();
  }

  #up(event) {
    const drag = this.drag;
    this.drag = null;
    if (drag && Math.abs(event.offsetX - drag.from) > 8) {
      const ends = [this.scale.back(drag.from), this.scale.back(event.offsetX)].sort((a, b) => a - b);
      this.range = ends;
      this.draw();
      return;
    }
    if (this.at) this.onPick?.(this.at.nearest);
  }

  #key(event) {
    if (!this.series.length || !["ArrowLeft", "ArrowRight", "Enter"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    const { xs } = this.series[0];
    if (event.key === "Enter") {
      if (this.at) this.onPick?.(this.at.nearest);
      return;
    }
    let place = this.at ? xs.indexOf(this.at.points[0].x) : xs.length - 1;
    if (this.at) place = Math.min(Math.max(place + (event.key === "ArrowLeft" ? -1 : 1), 0), xs.length - 1);
    this.#point(this.#nearest(xs[place]));
  }

  /** The picture as a PNG, with a title. */
  png() {
    const canvas = document.createElement("canvas");
    const size = { width: 960, height: 420 };
    this.draw(canvas, 2, size);
    const pen = canvas.getContext("2d");
    pen.fillStyle = style("--ink");
    pen.font = "600 13px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.textBaseline = "top";
    let x = LEFT + 8;
    for (const one of this.series) {
      pen.fillStyle = one.color;
      const text = this.series.length > 1 ? one.name : this.title;
      pen.fillText(text, x, 4);
      x += pen.measureText(text).width + 16;
    }
    this.draw();
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }
}
