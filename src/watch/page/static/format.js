// How numbers, times and texts of a run are written.

/** A number in a few digits; the exact one belongs into a title. */
export function short(value) {
  const number = Number(value);
  if (value === null || value === undefined) return "";
  if (!Number.isFinite(number)) return String(value);
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e6 || size < 1e-4) return number.toExponential(2).replace("e+", "e");
  if (Number.isInteger(number)) return number.toLocaleString("en-US");
  return String(Number(number.toPrecision(4)));
}

/** All digits of a number, as the Python API has them. */
export const exact = (value) => (value === null || value === undefined ? "" : String(value));

export const count = (value) => (value === null || value === undefined ? "" : Number(value).toLocaleString("en-US"));

export function percent(share) {
  if (!Number.isFinite(share)) return "";
  if (share > 0 && share < 0.0005) return "0 %";
  if (share > 0 && share < 0.01) return `${(share * 100).toFixed(1)} %`;
  if (share > 0.99 && share < 1) return "99 %";
  return `${Math.round(share * 100)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (value >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  return `${value} bytes`;
}

/** A length of time in its two largest units, as the commands write it. */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.max(Math.round(seconds), 0);
  if (seconds > 0 && seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (whole < 120) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A length of time on an axis: without rounding, in the unit that fits. */
export function onClock(seconds) {
  const two = (number) => String(number).padStart(2, "0"), part = (whole, rest, unit) => `${whole}${rest ? `:${two(rest)}` : ""} ${unit}`;
  if (seconds < 120 || !Number.isInteger(seconds)) return `${Number(seconds.toPrecision(4))} s`;
  if (seconds < 7200) return part(Math.floor(seconds / 60), seconds % 60, "min");
  if (seconds < 172800) return part(Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60), "h");
  return `${Number((seconds / 86400).toPrecision(4))} d`;
}

export const ago = (seconds) => (seconds === null || seconds === undefined ? "" : `${span(seconds)} ago`);

/** A moment, in seconds since 1970, on this clock. */
export function clock(seconds, withDay = true) {
  const date = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return withDay ? `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}` : time;
}

// Control characters, and those that turn the direction of what follows, which text of a run must not do here.
// biome-ignore lint/suspicious/noControlCharactersInRegex: they are what is looked for
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** A text of the run with control characters as escapes. */
export function shown(text) {
  return String(text ?? "").replace(CONTROL, (one) => {
    const code = one.codePointAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** Several of a thing in words. */
export const several = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** The last folders of a path, so that it fits. */
export const tail = (path, most = 2) => path.split("/").slice(-most).join("/");
