"use strict";
// The precision map: layers x roles, coloured by a measure; and beside it the cell that is chosen, over time.

const WORST_IS_LOW = { sqnr_db: true };
// edges of the ten colours, from the worst to the best
const EDGES = {
  sqnr_db: [3, 6, 9, 12, 15, 18, 21, 26, 32],
  share: [0.5, 0.25, 0.1, 0.05, 0.01, 0.001, 1e-4, 1e-5, 1e-9],
};
const MAP_LABELS = 40; // layers up to which each cell shows its number

class PrecisionMap {
  constructor(run, onChoose) {
    this.run = run;
    this.data = run.precision;
    this.onChoose = onChoose;
    this.measures = new Map(Object.entries(this.data.measures).map(([name, raw]) => [name, new Measure(raw)]));
    this.at = new Map(this.data.cells.map(([layer, role], cell) => [`${layer}/${role}`, cell]));
    const order = ["sqnr_db", "saturated", "flushed", "zero", "lost", "amax", "scale"];
    this.names = order.filter((name) => this.measures.has(name)).concat([...this.measures.keys()].filter((n) => !order.includes(n)));
    this.measure = this.names[0];
    this.bin = null; // null: the worst of the run
    this.order = "model";
    this.filter = "";
    this.chosen = null;
  }
  cellOf(layer, role) { return this.at.get(`${layer}/${role}`); }
  isLow() { return Boolean(WORST_IS_LOW[this.measure]); }
  edges() {
    if (SHARES.includes(this.measure)) return EDGES.share;
    if (EDGES[this.measure]) return EDGES[this.measure];
    const values = this.data.cells.map((_, cell) => this.value(cell)).filter((v) => Number.isFinite(v) && v > 0).sort((a, b) => b - a);
    if (!values.length) return [1];
    const high = Math.ceil(Math.log2(values[0])), low = Math.floor(Math.log2(values[values.length - 1]));
    const step = Math.max(1, Math.ceil((high - low) / 9));
    return Array.from({ length: 9 }, (_, at) => 2 ** (high - step * (at + 1)));
  }
  value(cell) { return this.measures.get(this.measure).worst(cell, this.isLow(), this.bin); }
  level(value, edges) {
    if (Number.isNaN(value)) return "none";
    const found = edges.findIndex((edge) => (this.isLow() ? value < edge : value >= edge));
    return found < 0 ? 9 : found;
  }
  build() {
    this.host = el("div", { class: "map" });
    this.grid = el("div", { class: "scroll map-scroll" });
    this.tip = el("p", { class: "readout", "aria-live": "polite" });
    this.legendHost = el("div", { class: "ramp" });
    this.host.append(this.controls(), this.legendHost, this.grid, this.tip);
    this.host.append(fold("map-table", "Map as a table", ["layer", ...this.data.roles], () => this.data.layers.map((name, layer) =>
      [name, ...this.data.roles.map((_, role) => { const c = this.cellOf(layer, role); return c === undefined ? "" : amount(this.measure, this.value(c)); })])));
    this.draw();
    return this.host;
  }
  controls() {
    const measure = el("select", { id: "map-measure", onchange: (e) => { this.measure = e.target.value; this.draw(); } },
      ...this.names.map((name) => el("option", { value: name, text: MEASURE_WORDS[name] || name, selected: name === this.measure })));
    const bins = this.data.last.length;
    const when = el("output", { id: "map-when", for: "map-step" });
    const slider = el("input", { type: "range", id: "map-step", min: 0, max: bins, value: bins, oninput: (e) => {
      const at = Number(e.target.value);
      this.bin = at === bins ? null : at;
      say();
      this.draw();
    } });
    const say = () => {
      const text = this.bin === null ? "worst of the whole run" : this.data.first[this.bin] === this.data.last[this.bin]
        ? `step ${integer(this.data.last[this.bin])}` : `steps ${integer(this.data.first[this.bin])} to ${integer(this.data.last[this.bin])}`;
      when.textContent = text;
      slider.setAttribute("aria-valuetext", text);
    };
    say();
    const order = el("select", { id: "map-order", onchange: (e) => { this.order = e.target.value; this.draw(); } },
      el("option", { value: "model", text: "as in the model", selected: this.order === "model" }),
      el("option", { value: "worst", text: "worst first", selected: this.order === "worst" }));
    const filter = el("input", { type: "search", id: "map-filter", placeholder: "part of a name", value: this.filter,
      oninput: (e) => { this.filter = e.target.value; this.draw(); } });
    const field = (id, text, ...input) => el("div", { class: "field" }, el("label", { for: id, text }), ...input);
    return el("div", { class: "controls" }, field("map-measure", "Colour by", measure), field("map-step", "When", slider, when),
      field("map-order", "Order", order), field("map-filter", "Find a layer", filter));
  }
  drawLegend(edges) {
    const say = (edge) => (this.measure === "sqnr_db" ? String(edge) : SHARES.includes(this.measure) ? (edge <= 1e-9 ? "> 0" : percent(edge)) : tickText(edge, true, 2));
    const swatches = Array.from({ length: edges.length + 1 }, (_, at) => el("i", { class: `l${at === edges.length ? 9 : at}` }));
    const marks = edges.map((edge) => el("span", { text: say(edge) }));
    const isJudged = this.measure === "sqnr_db" || SHARES.includes(this.measure);
    const unit = this.measure === "sqnr_db" ? ", dB" : SHARES.includes(this.measure) ? ", %" : "";
    this.legendHost.replaceChildren(
      el("p", { text: `${MEASURE_WORDS[this.measure] || this.measure}${unit}: ${isJudged ? "worse on the left, better on the right" : "larger on the left"}` }),
      el("div", { class: "swatches", "aria-hidden": "true" }, ...swatches), el("div", { class: "marks" }, ...marks));
  }
  rows() {
    const wanted = this.filter.trim().toLowerCase();
    const rowOf = this.measures.get(this.measure).rowOf;
    let rows = this.data.layers.map((name, layer) => ({ name, layer })).filter(({ name, layer }) =>
      name.toLowerCase().includes(wanted) && this.data.roles.some((_, role) => rowOf.has(this.cellOf(layer, role))));
    if (this.order === "worst") {
      const sign = this.isLow() ? 1 : -1;
      const worst = ({ layer }) => Math.min(...this.data.roles.map((_, role) => {
        const cell = this.cellOf(layer, role), value = cell === undefined ? NaN : this.value(cell);
        return Number.isNaN(value) ? Infinity : sign * value;
      }));
      rows = rows.map((row) => ({ ...row, worst: worst(row) })).sort((a, b) => (a.worst === b.worst ? a.layer - b.layer : a.worst - b.worst));
    }
    return rows;
  }
  draw() {
    const edges = this.edges(), rows = this.rows(), showsNumbers = rows.length <= MAP_LABELS;
    this.drawLegend(edges);
    const used = this.data.roles.map((_, role) => role).filter((role) =>
      this.data.layers.some((_, layer) => this.measures.get(this.measure).rowOf.has(this.cellOf(layer, role))));
    const head = el("tr", {}, el("th", { scope: "col", text: "layer" }),
      ...used.map((role) => el("th", { scope: "col", text: ROLE_SHORT[this.data.roles[role]] || this.data.roles[role] })));
    const body = rows.map(({ name, layer }) => {
      const cells = used.map((role) => this.cell(layer, role, name, edges, showsNumbers));
      return el("tr", {}, el("th", { scope: "row", title: name }, el("span", { text: name })), ...cells);
    });
    const made = el("table", { class: `cells${showsNumbers ? " numbers" : ""}`, role: "grid",
      "aria-label": "Precision map. Arrow keys move, Enter shows a cell over time." }, el("thead", {}, head), el("tbody", {}, ...body));
    made.addEventListener("click", (event) => this.choose(event.target.closest("[data-cell]")));
    made.addEventListener("keydown", (event) => this.key(event));
    made.addEventListener("focusin", (event) => this.say(event.target));
    made.addEventListener("pointerover", (event) => this.say(event.target.closest("[data-cell]")));
    if (!rows.length) made.append(el("caption", { text: "No layer has this in its name." }));
    this.grid.replaceChildren(made);
    const first = made.querySelector(`[data-cell="${this.chosen}"]`) || made.querySelector("[data-cell]");
    if (first) first.tabIndex = 0;
    this.mark();
  }
  cell(layer, role, name, edges, showsNumbers) {
    const cell = this.cellOf(layer, role);
    const value = cell === undefined ? NaN : this.value(cell);
    if (Number.isNaN(value)) return el("td", { class: "none", role: "gridcell", "aria-label": "no sample" });
    const text = amount(this.measure, value);
    return el("td", { class: `l${this.level(value, edges)}`, role: "gridcell", tabindex: "-1", "data-cell": cell, "data-short": showsNumbers ? inFewSigns(this.measure, value) : null,
      "aria-label": `${name}, ${this.data.roles[role]}: ${text}` }, showsNumbers ? el("span", { text: text.replace(" dB", "") }) : null);
  }
  say(target) { if (target && target.dataset.cell) this.tip.textContent = target.getAttribute("aria-label"); }
  key(event) {
    const here = event.target.closest("[data-cell]");
    if (!here) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.choose(here); return; }
    const row = here.parentElement;
    let next = null;
    if (event.key === "ArrowRight") next = here.nextElementSibling;
    if (event.key === "ArrowLeft") next = here.previousElementSibling;
    if (event.key === "ArrowDown") next = row.nextElementSibling && row.nextElementSibling.cells[here.cellIndex];
    if (event.key === "ArrowUp") next = row.previousElementSibling && row.previousElementSibling.cells[here.cellIndex];
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    while (next && !next.dataset.cell) {
      if (event.key === "ArrowRight") next = next.nextElementSibling;
      else if (event.key === "ArrowLeft") next = next.previousElementSibling;
      else {
        const other = event.key === "ArrowDown" ? next.parentElement.nextElementSibling : next.parentElement.previousElementSibling;
        next = other && other.cells[here.cellIndex];
      }
    }
    if (!next) return;
    here.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
  choose(target) {
    if (!target) return;
    for (const other of this.grid.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    target.tabIndex = 0;
    this.show(Number(target.dataset.cell));
  }
  show(cell) { this.chosen = cell; this.mark(); this.onChoose(cell); }
  mark() {
    for (const each of this.grid.querySelectorAll("[aria-selected]")) each.removeAttribute("aria-selected");
    const here = this.grid.querySelector(`[data-cell="${this.chosen}"]`);
    if (here) here.setAttribute("aria-selected", "true");
  }
  // where to begin: the cell that needs attention most, else the worst of the map
  worstCell() {
    let found = 0, worst = NaN;
    this.data.cells.forEach((_, cell) => {
      const value = this.value(cell);
      if (!(this.isLow() ? value >= worst : value <= worst) && !Number.isNaN(value)) { found = cell; worst = value; }
    });
    return found;
  }
}

// a value in four signs, for cells on a phone: whole percents or tenths, whole dB from 100 on, powers of two
function inFewSigns(measure, value) {
  if (!Number.isFinite(value)) return "∞";
  if (measure === "sqnr_db") return value >= 100 ? value.toFixed(0) : value.toFixed(1);
  if (!SHARES.includes(measure)) return value > 0 ? power(2, Math.round(Math.log2(value))) : "0";
  const size = 100 * value;
  return size === 0 ? "0" : size < 0.1 ? "<0.1" : size < 9.95 ? size.toFixed(1) : size.toFixed(0);
}

// ---- one cell over time
function rangeOf(spec, scale) {
  return spec && spec.max && spec.min && scale > 0 && Number.isFinite(scale) ? [spec.min * scale, spec.max * scale] : null;
}
const inTiles = (spec) => spec.granularity !== "per tensor";
function specOf(precision, cell) { return precision.spec_of[cell] >= 0 ? precision.specs[precision.spec_of[cell]] : null; }
function pointsOf(map, measure, cell) {
  const series = map.measures.has(measure) ? map.measures.get(measure).series(cell) : null;
  if (!series) return [];
  return series.map(([low, high], at) => [map.data.last[at], low, WORST_IS_LOW[measure] ? low : high, high])
    .filter(([, low]) => !Number.isNaN(low));
}
// whether the guard changed the cast of a cell: its own, or with all products
const OPERANDS = ["input", "weight", "grad_output"];
function concerns(event, layer, role) {
  if (event.action !== "promote" && event.action !== "demote") return false;
  return event.layer ? event.layer === layer && (!event.role || event.role === role) : OPERANDS.includes(role);
}
function detail(map, cell, hist) {
  const [layer, role] = map.data.cells[cell], spec = specOf(map.data, cell);
  const name = map.data.layers[layer], roleName = map.data.roles[role];
  const host = el("div", { class: "detail-body" });
  const format = spec && spec.format ? `${spec.name}, ${spec.granularity || "granularity unknown"}, scale ${spec.scale || "unknown"}` : "its format is not in the journal";
  host.append(el("h3", { id: "detail-title", tabindex: "-1" }, el("span", { class: "where", text: name }), el("span", { class: "role", text: roleName })),
    el("p", { class: "muted", text: format }));
  const acts = map.run.events.filter((each) => each.kind === "guard" && concerns(each, name, roleName));
  if (acts.length)
    host.append(el("p", { class: "muted", text: `The guard acted ${acts.length === 1 ? "once, at" : `${acts.length} times, first at`} step ${integer(acts[0].step)}: ${acts[0].action}${acts[0].layer ? "" : " of all layers"}, to ${acts[0].after || "another format"}. Ranges below are those of the format at the run's start.` }));
  const scales = pointsOf(map, "scale", cell), amax = pointsOf(map, "amax", cell);
  const ranges = scales.map(([x, low, , high]) => { const a = rangeOf(spec, low), b = rangeOf(spec, high); return a && [x, a[0], b[1]]; }).filter(Boolean);
  const parts = [];
  const data = (points, names) => ({ columns: ["step", ...names], rows: () => points.map(([x, ...rest]) => [integer(x), ...rest.map(short)]) });
  if (amax.length)
    parts.push({ id: "cell-amax", title: "Largest magnitude against the format's range", y: "magnitude", log: true, base: 2, lines: [{ name: "amax", colour: "run0", points: amax }],
      areas: ranges.length ? [{ name: `what the format holds, with its ${inTiles(spec) ? "largest tile's " : ""}scale`, colour: "range", points: ranges }] : [], ...data(amax.map((p) => [p[0], p[1], p[3]]), ["amax, least", "amax, greatest"]) });
  const sqnr = pointsOf(map, "sqnr_db", cell);
  if (sqnr.length) {
    const lines = [{ name: "SQNR", colour: "run0", points: sqnr }];
    if (spec && spec.sqnr_db) lines.push({ name: `about what ${spec.name} gives`, colour: "grey", dashed: true, points: sqnr.map(([x]) => [x, spec.sqnr_db, spec.sqnr_db, spec.sqnr_db]) });
    parts.push({ id: "cell-sqnr", title: "Signal to quantization noise of the cast", y: "dB", lines, ...data(sqnr.map((p) => [p[0], p[1], p[3]]), ["least, dB", "greatest, dB"]) });
  }
  const shares = SHARES.map((measure, at) => ({ name: measure, colour: `role${at}`, points: pointsOf(map, measure, cell) })).filter((line) => line.points.length);
  if (shares.length)
    parts.push({ id: "cell-shares", title: "Shares of the values", y: "share", log: true, range: shareRange(shares), format: percent, note: "logarithmic; 0 % lies on the lower edge", lines: shares,
      columns: ["step", ...shares.map((line) => line.name)], rows: () => shares[0].points.map(([x], at) => [integer(x), ...shares.map((line) => (line.points[at] ? percent(line.points[at][3]) : ""))]) });
  if (scales.length)
    parts.push({ id: "cell-scale", title: "Scale", y: "dequantization scale", log: true, base: 2, lines: [{ name: "scale", colour: "run0", points: scales }], ...data(scales.map((p) => [p[0], p[1], p[3]]), ["least", "greatest"]) });
  const charts = parts.map((part) => chart({ height: 170, marks: { name: "guard acted", xs: acts.map((each) => each.step) }, ...part }));
  const shown = hist ? hist(name, roleName, "cell-histogram") : null;
  if (shown) charts.splice(1, 0, shown);
  if (!charts.length) host.append(el("p", { text: "Nothing was measured of it over time." }));
  host.append(...charts);
  return { host, charts };
}
function shareRange(lines) {
  const [low] = extent(lines.flatMap((line) => line.points.flatMap(([, a, , b]) => [a, b])), true);
  return [Math.min(low, 1e-3), 1];
}
