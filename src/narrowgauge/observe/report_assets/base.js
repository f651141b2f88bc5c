"use strict";
// Small tools: elements without innerHTML (names come from anywhere), packed arrays, numbers in words.

const SVG_SPACE = "http://www.w3.org/2000/svg";

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children || []) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => put(document.createElementNS(SVG_SPACE, tag), attributes, children);

// text whose parts between backticks are code
function prose(tag, text, ...before) {
  return el(tag, {}, ...before, ...text.split("`").map((part, at) => (at % 2 ? el("code", { text: part }) : part)));
}

const ARRAYS = { u16: Uint16Array, u32: Uint32Array, f32: Float32Array };
function unpack(packed) {
  const text = atob(packed.base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return new ARRAYS[packed.type](bytes.buffer);
}

// Series of a measure as 16-bit codes: report_bins.coded says what they mean. Decoded when they are looked at.
const MISSING = 65535, INFINITE = 65534, ZERO = 65533, LARGEST_CODE = 65500;
class Measure {
  constructor(raw) {
    this.isLog = raw.log;
    this.raw = raw;
    this.rowOf = new Map();
    unpack(raw.cells).forEach((cell, row) => this.rowOf.set(cell, row));
  }
  load() {
    if (this.codes) return;
    this.codes = unpack(this.raw.codes);
    this.least = unpack(this.raw.least);
    this.width = unpack(this.raw.width);
    this.bins = this.rowOf.size ? this.codes.length / this.rowOf.size / 2 : 0;
  }
  value(row, at) {
    const code = this.codes[at];
    if (code === MISSING) return NaN;
    if (code === INFINITE) return Infinity;
    if (code === ZERO) return this.isLog ? 0 : -Infinity;
    const plain = this.least[row] + (code / LARGEST_CODE) * this.width[row];
    return this.isLog ? 2 ** plain : plain;
  }
  // [[low, high], ...] of each bin; null where the cell has none
  series(cell) {
    const row = this.rowOf.get(cell);
    if (row === undefined) return null;
    this.load();
    const found = [];
    for (let bin = 0, at = row * this.bins * 2; bin < this.bins; bin++, at += 2)
      found.push([this.value(row, at), this.value(row, at + 1)]);
    return found;
  }
  // the worst value of all bins (the least where isLow), or of one bin
  worst(cell, isLow, bin) {
    const row = this.rowOf.get(cell);
    if (row === undefined) return NaN;
    this.load();
    const from = bin === null ? 0 : bin, to = bin === null ? this.bins : bin + 1;
    let found = NaN;
    for (let each = from; each < to; each++) {
      const value = this.value(row, (row * this.bins + each) * 2 + (isLow ? 0 : 1));
      if (!(isLow ? value >= found : value <= found) && !Number.isNaN(value)) found = value;
    }
    return found;
  }
}

const SHARES = ["saturated", "flushed", "zero", "lost"];
const MEASURE_WORDS = {
  sqnr_db: "SQNR of the cast", saturated: "share saturated", flushed: "share flushed to zero",
  zero: "share of exact zeros", lost: "share of updates lost", amax: "largest magnitude (amax)", scale: "scale",
};
const ROLE_SHORT = {
  input: "input", weight: "weight", grad_output: "grad output", grad: "grad", exp_avg: "exp avg",
  exp_avg_sq: "exp avg sq", param: "param", collective: "sent",
};

function integer(value) { return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US"); }
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replace("-", "−");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}
function percent(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (value === 0) return "0 %";
  const size = 100 * value;
  return (size >= 10 ? size.toFixed(0) : size > 0.00009 ? String(Number(size.toPrecision(2))) : size.toExponential(0)) + " %";
}
function amount(measure, value) {
  if (Number.isNaN(value)) return "no sample";
  if (measure === "sqnr_db") return value === Infinity ? "exact" : value.toFixed(1) + " dB";
  return SHARES.includes(measure) ? percent(value) : short(value);
}
function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= unit) return Number((value / unit).toPrecision(3)) + " " + name;
  return value + " B";
}
const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (base, exponent) => base + [...String(exponent)].map((sign) => SUPERSCRIPT[sign]).join("");

// A table in a fold, made when it is opened: the text alternative of a picture.
function fold(id, title, columns, rows) {
  const body = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
  const made = el("details", { id, class: "data" }, el("summary", { text: title }), body);
  made.addEventListener("toggle", () => {
    if (made.open && !body.firstChild) body.append(table(columns, rows()));
  });
  return made;
}
function table(columns, rows) {
  const head = el("thead", {}, el("tr", {}, ...columns.map((text) => el("th", { scope: "col", text }))));
  const lines = rows.map((row) =>
    el("tr", {}, ...row.map((cell, at) => el(at ? "td" : "th", { text: cell, scope: at ? null : "row" }))));
  return el("table", { class: "plain" }, head, el("tbody", {}, ...lines));
}
