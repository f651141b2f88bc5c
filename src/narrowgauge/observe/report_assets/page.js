"use strict";
// The page: sections from the data, in the order in which one looks; again on fresh data where the run goes on.

const state = { data: null, run: 0, map: null, cell: null, histogramAt: null, logLoss: false };
const SEVERITY = { serious: ["▲", "Serious"], look: ["●", "Worth a look"], note: ["○", "Note"] };

function section(id, title, lead, ...content) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title`, text: title }), lead ? el("p", { class: "lead", text: lead }) : null, ...content);
}
const several = () => state.data.runs.length > 1;
const runColour = (at) => `run${at % 6}`;

// ---- the top
function facts() {
  const host = el("div", { class: "runs" });
  state.data.runs.forEach((run, at) => {
    const f = run.facts, held = run.bytes ? Object.values(run.bytes.roles).reduce((a, b) => a + b, 0) : null;
    const tiles = [
      ["recipe", f.recipe || "–"], ["steps", integer(f.last_step) + (f.planned_steps && f.planned_steps !== f.last_step ? ` of ${integer(f.planned_steps)}` : "")],
      ["last loss", short(f.last_loss), "nats a token"], ["validation loss", short(f.validation_loss), f.best_validation_loss === null ? "" : `best ${short(f.best_validation_loss)}`],
      ["skipped", integer(f.skipped), "steps"], ["speed", f.tokens_per_s === null ? "–" : integer(f.tokens_per_s), "tokens/s, median"],
      ["parameters", integer(f.parameters), held && run.bytes.parameters ? `${(held / run.bytes.parameters).toFixed(2)} bytes each` : ""],
    ];
    host.append(el("div", { class: "run" }, el("h2", { class: "run-name" }, el("i", { class: `swatch c-${runColour(at)}`, "aria-hidden": "true" }), run.name,
      several() && at === state.data.reference ? el("span", { class: "chip", text: "reference" }) : null),
      el("dl", { class: "tiles" }, ...tiles.map(([name, value, unit]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }), unit ? el("dd", { class: "unit", text: unit }) : null)))));
  });
  return host;
}

// ---- what needs attention
function attention() {
  const host = el("ol", { class: "findings" }), notes = el("ol", { class: "findings" });
  state.data.attention.forEach((found, at) => (found.severity === "note" ? notes : host).append(finding(found, at)));
  const noted = notes.children.length
    ? el("details", { id: "notes" }, el("summary", { text: `${notes.children.length} note${notes.children.length > 1 ? "s" : ""}` }), notes) : null;
  const rules = state.data.checked.flatMap(({ run, rules }) => [several() ? el("h3", { text: run }) : null, el("ul", {}, ...rules.map((text) => el("li", { text })))]);
  const checked = el("details", { id: "checked" }, el("summary", { text: "What was checked, and how often" }), ...rules.filter(Boolean));
  const serious = state.data.attention.filter((each) => each.severity === "serious").length;
  const look = state.data.attention.filter((each) => each.severity === "look").length;
  const lead = serious || look
    ? [serious ? `${serious} serious` : "", look ? `${look} worth a look` : ""].filter(Boolean).join(", ") + "; the worst first."
    : `Nothing${state.data.attention.length ? " but notes" : ""}: all rules below were checked and none was broken. ${state.data.runs.map((run) => run.sampling).join(" ")}.`;
  return section("attention", "What needs attention", lead, host.children.length ? host : null, noted, checked);
}
function finding(found, at) {
  const [sign, word] = SEVERITY[found.severity];
  const run = state.data.runs[found.run];
  const more = found.layers.length > 1
    ? fold(`finding-${at}-layers`, `All ${found.layers.length} layers`, ["layer", "since step", "worst"], () => found.layers.map((each) => [each.layer, integer(each.step), each.value])) : null;
  const canShow = found.layer && run.precision && run.precision.layers.includes(found.layer);
  const show = canShow ? el("button", { type: "button", class: "show", onclick: () => reveal(found), "aria-label": `Show ${found.layer}, ${found.role}, over time`, text: "Show over time" }) : null;
  return el("li", { class: `finding ${found.severity}` },
    el("p", { class: "severity" }, el("span", { "aria-hidden": "true", text: sign }), ` ${word}${several() ? ` · ${run.name}` : ""}${found.step >= 0 ? ` · since step ${integer(found.step)}` : ""}`),
    el("h3", { text: found.title }), prose("p", found.text), found.remedy ? put(prose("p", found.remedy, el("b", { text: "What to do: " })), { class: "remedy" }) : null, show, more);
}
function reveal(found) {
  if (state.run !== found.run) { state.run = found.run; drawMap(); }
  const map = state.map;
  if (map.measures.has(found.measure) && map.measure !== found.measure) {
    map.measure = found.measure;
    document.getElementById("map-measure").value = found.measure;
    map.draw();
  }
  const cell = map.cellOf(map.data.layers.indexOf(found.layer), map.data.roles.indexOf(found.role));
  if (cell !== undefined) map.show(cell);
  document.getElementById("map").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  const title = document.getElementById("detail-title");
  if (title) title.focus({ preventScroll: true });
}

// ---- losses
function columnsOf(steps, name) {
  if (!steps.count) return [];
  const last = unpack(steps.last), [low, mean, high] = ["low", "mean", "high"].map((each) => unpack(steps[name][each]));
  return Array.from(last, (x, at) => [x, low[at], mean[at], high[at]]);
}
const plainRows = (points) => () => points.map(([x, low, mid, high]) => [integer(x), short(mid), short(low), short(high)]);
function losses() {
  const lines = state.data.runs.map((run, at) => ({ name: run.name, colour: runColour(at), points: columnsOf(run.steps, "loss") }));
  const dots = state.data.runs.map((run, at) => ({ name: run.evaluations.length ? `${run.name}, validation` : "", colour: runColour(at), points: run.evaluations.map(([x, y]) => [x, y === null ? NaN : y]) }));
  const first = lines[state.data.reference].points;
  const loss = chart({ id: "loss-chart", title: "Loss", note: "mean, and range of the single steps", y: "nats a token", height: 300, lines, dots, log: state.logLoss,
    range: lossRange(lines, dots), marks: several() ? null : { name: "skipped step", xs: state.data.runs[0].skips }, columns: ["step", "mean", "least", "greatest"], rows: plainRows(first) });
  const charts = [loss];
  const others = state.data.runs.map((run, at) => ({ run, at })).filter(({ run }) => run.difference);
  if (others.length) {
    const points = (d) => d.last.map((x, at) => [x, d.mean[at], d.mean[at], d.mean[at]]);
    charts.push(chart({ id: "difference-chart", title: `Loss less that of ${state.data.runs[state.data.reference].name}`, note: "mean of a window; its band holds nine of ten steps; points: validation", y: "nats a token", height: 300, zero: true,
      lines: others.map(({ run, at }) => ({ name: run.name, colour: runColour(at), points: points(run.difference) })),
      areas: others.map(({ run, at }) => ({ name: `${run.name}: 5th to 95th percentile`, colour: runColour(at), points: run.difference.last.map((x, n) => [x, run.difference.low[n], run.difference.high[n]]) })),
      dots: others.map(({ run, at }) => ({ name: "", colour: runColour(at), points: run.difference.evaluations })),
      columns: ["step", ...others.map(({ run }) => run.name)], rows: () => others[0].run.difference.last.map((x, n) => [integer(x), ...others.map(({ run }) => short(run.difference.mean[n]))]) }));
  } else {
    const norms = columnsOf(state.data.runs[0].steps, "grad_norm");
    charts.push(chart({ id: "norm-chart", title: "Gradient norm", note: "before clipping; mean, and range of the single steps", y: "norm", height: 300, log: true,
      lines: [{ name: "", colour: "run0", points: norms }], columns: ["step", "mean", "least", "greatest"], rows: plainRows(norms) }));
  }
  const missing = several() && others.length < state.data.runs.length - 1 ? el("p", { class: "muted", text: "Runs without a step in common with the reference have no difference." }) : null;
  const box = el("input", { type: "checkbox", id: "loss-log", onchange: (e) => { state.logLoss = e.target.checked; const old = document.getElementById("loss"); old.replaceWith(losses()); redraw(); } });
  box.checked = state.logLoss;
  return section("loss", "Loss", "", el("div", { class: "controls" }, el("div", { class: "field inline" }, box, el("label", { for: "loss-log", text: "logarithmic loss" }))), el("div", { class: "pair" }, ...charts), missing);
}
function lossRange(lines, dots) {
  // a spike must not press the rest of the curve flat: beyond three times the outer tenths the chart is cut, and says so in its values
  const values = [...lines.flatMap((l) => l.points.flatMap(([, low, , high]) => [low, high])), ...dots.flatMap((d) => d.points.map(([, y]) => y))].filter(Number.isFinite).sort((a, b) => a - b);
  if (values.length < 20) return null;
  const low = values[0], middle = values[Math.floor(values.length * 0.5)], high = values[values.length - 1];
  const cut = middle + 4 * (values[Math.floor(values.length * 0.99)] - low);
  if (high <= cut) return null;
  const room = 0.04 * (cut - low);
  return state.logLoss ? [low * 0.97, cut] : [low - room, cut];
}

// ---- the map, the chosen cell, histograms, scales
function drawMap() {
  const run = state.data.runs[state.run], host = document.getElementById("map");
  const pick = several() ? el("div", { class: "controls" }, el("div", { class: "field" }, el("label", { for: "map-run", text: "Run" }),
    el("select", { id: "map-run", onchange: (e) => { state.run = Number(e.target.value); drawMap(); } }, ...state.data.runs.map((each, at) => el("option", { value: at, text: each.name, selected: at === state.run }))))) : null;
  const parts = [pick];
  if (!run.precision) parts.push(el("p", { class: "empty", text: "The journal holds no sampled step, so there is no map: set statistics_every in the configuration." }));
  else {
    const old = state.map;
    state.map = new PrecisionMap(run, chooseCell);
    if (old) for (const key of ["order", "filter"]) state.map[key] = old[key];
    if (old && state.map.measures.has(old.measure)) state.map.measure = old.measure;
    const aside = el("div", { class: "detail", id: "detail", role: "region", "aria-label": "The chosen cell over time" });
    parts.push(el("div", { class: "split" }, state.map.build(), aside));
  }
  const made = section("map", "Precision map", "Each cell is one tensor of one layer. Choose one, by pointer or Enter, to see it over time.", ...parts.filter(Boolean));
  host.replaceWith(made);
  if (!run.precision) { layerSection(null); redraw(); return; }
  const wanted = state.cell && cellNamed(state.map, ...state.cell);
  const urgent = state.data.attention.find((each) => each.run === state.run && each.layer && cellNamed(state.map, each.layer, each.role) !== undefined);
  state.map.show(wanted !== null && wanted !== undefined ? wanted : urgent ? cellNamed(state.map, urgent.layer, urgent.role) : state.map.worstCell());
}
function cellNamed(map, layer, role) { return map.cellOf(map.data.layers.indexOf(layer), map.data.roles.indexOf(role)); }
function chooseCell(cell) {
  const map = state.map, [layer, role] = map.data.cells[cell];
  state.cell = [map.data.layers[layer], map.data.roles[role]];
  const { host } = detail(map, cell, state.data.runs[state.run].histograms ? cellHistogram : null);
  document.getElementById("detail").replaceChildren(host);
  layerSection(state.cell[0]);
  redraw();
}
function histogramsAt() {
  const all = state.data.runs[state.run].histograms;
  if (!all.shares) { const roots = unpack(all.roots); all.shares = Float32Array.from(roots, (root) => (root / 65535) ** 2); }
  const at = state.histogramAt === null ? all.steps.length - 1 : Math.min(state.histogramAt, all.steps.length - 1);
  return { all, at, row: all.steps[at] };
}
function cellHistogram(layer, role, id) {
  const { all, row } = histogramsAt();
  const entry = row.cells.find(([a, b]) => a === layer && b === role);
  if (!entry) return null;
  const [, , low, offset, length] = entry;
  const cell = state.map ? cellNamed(state.map, layer, role) : undefined, spec = cell === undefined ? null : specOf(state.map.data, cell);
  return histogram({ id, title: id === "cell-histogram" ? "Magnitudes against the format's range" : role, note: `step ${integer(row.step)}`, low, shares: all.shares.slice(offset, offset + length), range: rangeAt(layer, role, row.step), isWhole: spec && !inTiles(spec), keeps: spec && spec.rounding, height: 150 });
}
function rangeAt(layer, role, step) {
  const map = state.map, cell = map ? cellNamed(map, layer, role) : undefined;
  if (cell === undefined) return null;
  const points = pointsOf(map, "scale", cell);
  const at = points.find(([x]) => x >= step) || points[points.length - 1];
  return at ? rangeOf(specOf(map.data, cell), at[3]) : null;
}
function layerSection(layer) {
  const old = document.getElementById("layer"), run = state.data.runs[state.run];
  const parts = [];
  if (layer !== null && run.histograms) {
    const { all, at } = histogramsAt();
    const slider = el("input", { type: "range", id: "histogram-step", min: 0, max: all.steps.length - 1, value: at, "aria-valuetext": `step ${all.steps[at].step}`, oninput: (e) => {
      state.histogramAt = Number(e.target.value);
      const focus = document.activeElement && document.activeElement.id;
      layerSection(layer);
      redraw();
      if (focus) document.getElementById(focus).focus();
    } });
    const shown = run.precision.roles.map((role) => cellHistogram(layer, role, `histogram-${role}`)).filter(Boolean);
    parts.push(el("div", { class: "controls" }, el("div", { class: "field" }, el("label", { for: "histogram-step", text: "When" }), slider, el("output", { for: "histogram-step", text: `step ${integer(all.steps[at].step)}` }))));
    parts.push(el("ul", { class: "legend" }, ...[["area c-range", "what the format holds, with its scale (of tiles: the largest)"], ["area solid c-run0", "held"], ["area c-below", "below: becomes zero"], ["area c-above", "above: cut off"]].map(([kind, text]) => el("li", {}, el("i", { class: kind, "aria-hidden": "true" }), text))));
    parts.push(shown.length ? el("div", { class: "multiples" }, ...shown) : el("p", { class: "empty", text: "No histogram of this layer was taken at this step." }));
  } else parts.push(el("p", { class: "empty", text: `The journal holds no exponent histograms${run.why_no_histograms}.` }));
  const scales = layer === null ? [] : run.precision.roles.map((role, at) => ({ name: role, colour: `role${at % 8}`, points: pointsOf(state.map, "scale", cellNamed(state.map, layer, role)) })).filter((line) => line.points.length);
  if (scales.length)
    parts.push(chart({ id: "scale-chart", title: "Scale history of its tensors", note: "dequantization scale; largest of the tiles", y: "scale", log: true, base: 2, height: 240, lines: scales,
      columns: ["step", ...scales.map((line) => line.name)], rows: () => scales[0].points.map(([x], at) => [integer(x), ...scales.map((line) => (line.points[at] ? short(line.points[at][3]) : ""))]) }));
  const made = section("layer", layer === null ? "Histograms and scales" : `Histograms and scales of ${layer}`, layer === null ? "" : "How the magnitudes of each tensor lie against what its format holds. The map chooses the layer.", ...parts);
  old.replaceWith(made);
}

// ---- loss scale, bytes, events, environment
function scaling() {
  const run = state.data.runs[0];
  const scaleLines = state.data.runs.map((each, at) => ({ name: each.name, colour: runColour(at), points: columnsOf(each.steps, "loss_scale") }));
  const speed = state.data.runs.map((each, at) => ({ name: each.name, colour: runColour(at), points: columnsOf(each.steps, "tokens_per_s") }));
  const skipped = state.data.runs.reduce((sum, each) => sum + each.facts.skipped, 0);
  return section("scaling", "Loss scale, skipped steps, speed", `${integer(skipped)} step${skipped === 1 ? " was" : "s were"} skipped because a gradient was not finite.`, el("div", { class: "pair" },
    chart({ id: "loss-scale-chart", title: "Loss scale", note: "1: the recipe needs none", y: "factor", log: true, base: 2, lines: scaleLines, marks: { name: "skipped step", xs: state.data.runs.flatMap((each) => each.skips) }, columns: ["step", "mean", "least", "greatest"], rows: plainRows(scaleLines[0].points) }),
    chart({ id: "speed-chart", title: "Speed", y: "tokens/s", lines: speed, columns: ["step", "mean", "least", "greatest"], rows: plainRows(columnsOf(run.steps, "tokens_per_s")) })));
}
const BYTE_ROLES = ["param", "master", "grad", "exp_avg", "exp_avg_sq", "momentum", "scaling", "activation", "buffer", "step"];
function byteSection() {
  const held = state.data.runs.map((run, at) => ({ run, at })).filter(({ run }) => run.bytes);
  if (!held.length) return section("bytes", "Memory and wire bytes by role", "", el("p", { class: "empty", text: "The journal holds no bytes by role." }));
  const sizes = held.map(({ run }) => ({ ...run.bytes.roles, ...(run.bytes.activation ? { activation: run.bytes.activation } : {}) }));
  const roles = [...new Set(sizes.flatMap((each) => Object.keys(each)))].filter((role) => sizes.some((each) => each[role] > 0));
  roles.sort((a, b) => rank(a) - rank(b));
  const most = Math.max(...sizes.map((each) => Object.values(each).reduce((a, b) => a + b, 0)), 1);
  const bars = held.map(({ run }, at) => {
    const state = Object.values(run.bytes.roles).reduce((a, b) => a + b, 0);
    const parts = roles.filter((role) => sizes[at][role]).map((role) => {
      const part = el("span", { class: `part c-role${roles.indexOf(role) % 8}`, title: `${role}: ${bytes(sizes[at][role])}` });
      part.style.width = `${100 * sizes[at][role] / most}%`;
      return part;
    });
    return el("div", { class: "bar-row" }, el("p", {}, el("b", { text: run.name }), ` state ${bytes(state)}${run.bytes.parameters ? `, ${(state / run.bytes.parameters).toFixed(2)} bytes a parameter` : ""}; activations ${bytes(run.bytes.activation)}; sent in a step: ${bytes(run.bytes.wire)}`),
      el("div", { class: "stack", role: "img", "aria-label": roles.filter((r) => sizes[at][r]).map((role) => `${role} ${bytes(sizes[at][role])}`).join(", ") }, ...parts));
  });
  const rows = roles.map((role) => [role, ...sizes.map((each) => bytes(each[role] || 0))]);
  rows.push(["all", ...sizes.map((each) => bytes(Object.values(each).reduce((a, b) => a + b, 0)))], ["sent in a step", ...held.map(({ run }) => bytes(run.bytes.wire))]);
  return section("bytes", "Memory and wire bytes by role", "Counted from the real storages of this process; 1 MB = 10⁶ bytes. Activations are what is saved for backward.",
    ...bars, el("ul", { class: "legend" }, ...roles.map((role, at) => el("li", {}, el("i", { class: `area solid c-role${at % 8}`, "aria-hidden": "true" }), role))),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Bytes by role" }, table(["role", ...held.map(({ run }) => run.name)], rows)));
}
function rank(role) { const at = BYTE_ROLES.indexOf(role); return at < 0 ? BYTE_ROLES.length : at; }
function eventSection() {
  const rows = state.data.runs.flatMap((run) => run.events.map((event) => ({ run, event })));
  rows.sort((a, b) => a.event.step - b.event.step);
  const lines = rows.map(({ run, event }) => {
    const where = [event.layer, event.role].filter(Boolean).join(", ");
    const what = event.kind === "guard" ? `guard: ${event.action}` : event.kind;
    const text = event.message || (event.kind === "recipe" ? `${event.before} → ${event.after}` : "");
    const numbers = event.kind === "guard" && event.measure ? `${event.measure} ${short(event.value)} against ${short(event.threshold)}${event.before ? `; ${event.before} → ${event.after}` : ""}` : "";
    return [integer(event.step), ...(several() ? [run.name] : []), what, where, text, numbers];
  });
  const columns = ["step", ...(several() ? ["run"] : []), "what", "where", "in words", "numbers"];
  return section("events", "Guard and other events", rows.length ? "Every decision with its numbers, in order." : "", rows.length
    ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" }, table(columns, lines))
    : el("p", { class: "empty", text: "The guard did nothing, the recipe did not change, and nothing was warned of." }));
}
function environment() {
  const names = state.data.runs.map((run) => run.name);
  const keys = [...new Set(state.data.runs.flatMap((run) => Object.keys(run.environment)))];
  const recipes = state.data.runs.map((run) => flat(run.recipe));
  const fields = [...new Set(recipes.flatMap((each) => [...each.keys()]))];
  const scroll = (label, made) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, made);
  const conversions = state.data.runs.map((run, at) => (run.conversion.length ? fold(`conversion-${at}`, `Layers of ${run.name}: ${run.conversion.length}`, ["layer", "status", "backend", "casts", "reason"],
    () => run.conversion.map((row) => [row.name, row.status, row.backend, row.casts, row.reason])) : null));
  const missing = state.data.runs.flatMap((run) => run.missing.map((text) => el("li", { text: several() ? `${run.name}: ${text}` : text })));
  return section("environment", "Environment and recipe", "", scroll("Environment", table(["", ...names], keys.map((key) => [key, ...state.data.runs.map((run) => run.environment[key] || "")]))),
    fields.length ? fold("recipe-table", "The recipe, field by field", ["field", ...names], () => fields.map((key) => [key, ...recipes.map((each) => each.get(key) || "")])) : null, ...conversions,
    missing.length ? el("div", { class: "missing" }, el("h3", { text: "What this journal does not have" }), el("ul", {}, ...missing)) : null);
}
function flat(value, prefix) {
  const found = new Map();
  for (const [key, item] of Object.entries(value || {})) {
    const name = prefix ? `${prefix}.${key}` : key;
    if (item !== null && typeof item === "object" && !Array.isArray(item)) for (const [a, b] of flat(item, name)) found.set(a, b);
    else found.set(name, item === null ? "none" : Array.isArray(item) ? JSON.stringify(item) : String(item));
  }
  return found;
}

// ---- putting it together
function redraw() { for (const each of document.querySelectorAll("figure.chart")) if (each.redraw) each.redraw(); }
function render(data) {
  const open = [...document.querySelectorAll("details[open]")].map((each) => each.id);
  const focus = document.activeElement && document.activeElement.id;
  state.data = data;
  state.run = Math.min(state.run, data.runs.length - 1);
  const main = document.getElementById("report");
  main.replaceChildren(facts(), attention(), losses(), el("section", { id: "map" }), el("section", { id: "layer" }), scaling(), byteSection(), eventSection(), environment());
  drawMap(); // which draws all charts, with those of the cell it chooses
  for (const id of open) { const each = id && document.getElementById(id); if (each) each.open = true; }
  if (focus && document.getElementById(focus)) document.getElementById(focus).focus({ preventScroll: true });
}
function theme() {
  const button = document.getElementById("theme");
  const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const say = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`); };
  button.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; say(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", say);
  say();
}
function follow(seconds) {
  const status = document.getElementById("live");
  let tag = "";
  const again = async () => {
    try {
      const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) { tag = answer.headers.get("ETag") || ""; render(await answer.json()); }
      else if (answer.status !== 304) throw new Error(String(answer.status));
      status.textContent = `live, step ${integer(state.data.runs[0].facts.last_step)}`;
    } catch { status.textContent = "the run has ended, or is not reached: these are its last numbers"; }
    setTimeout(again, 1000 * seconds);
  };
  setTimeout(again, 1000 * seconds);
}
function start() {
  theme();
  render(JSON.parse(document.getElementById("data").textContent));
  document.getElementById("print").addEventListener("click", () => window.print());
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => { if (innerWidth === width) return; width = innerWidth; clearTimeout(waiting); waiting = setTimeout(redraw, 80); });
  const every = Number(document.documentElement.dataset.live || 0);
  if (every) follow(every);
  document.documentElement.dataset.drawn = String(Math.round(performance.now())); // ms from the navigation on
}
start();
