"use strict";
// Line charts and histograms as SVG: axes with units, a crosshair by pointer or arrow keys, a table beside each.

const PAD = { left: 66, right: 14, top: 10, bottom: 36 };
let chartCount = 0;

// isWhole: of steps, between which there is nothing
function ticksOf(low, high, isLog, wanted, base, isWhole) {
  if (isLog) {
    const root = base || 10, log = (v) => Math.log(v) / Math.log(root);
    const from = Math.ceil(log(low) - 1e-9), to = Math.floor(log(high) + 1e-9);
    const step = Math.max(1, Math.ceil((to - from) / wanted));
    const found = [];
    for (let exponent = Math.ceil(from / step) * step; exponent <= to; exponent += step) found.push(root ** exponent);
    if (found.length >= 2) return found;
    return ticksOf(low, high, false, wanted);
  }
  const rough = (high - low) / wanted, unit = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(isWhole ? 1 : 0, [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= rough * 0.999));
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) found.push(tick);
  return found;
}
function tickText(value, isLog, base) {
  if (isLog && base === 2) return power(2, Math.round(Math.log2(value)));
  if (isLog && (value >= 1e5 || value < 1e-2) && value > 0 && Number.isInteger(Math.round(Math.log10(value) * 1e6) / 1e6))
    return power(10, Math.round(Math.log10(value)));
  return short(Number(value.toPrecision(6)));
}
// all in powers or none, and with so many digits that no two are the same
function tickTexts(ticks, spec) {
  const inPowers = spec.log && (spec.base !== 2 || ticks.every((tick) => Number.isInteger(Math.log2(tick))));
  const texts = ticks.map((tick) => (spec.format ? spec.format(tick) : tickText(tick, inPowers, spec.base)));
  const areApart = (values) => new Set(values).size === values.length;
  if (areApart(texts)) return texts;
  const say = (tick, digits) => (spec.format === percent ? `${Number((100 * tick).toPrecision(digits))} %` : String(Number(tick.toPrecision(digits))));
  const digits = [3, 4, 5, 6, 7, 8, 9, 10, 12].find((each) => areApart(ticks.map((tick) => say(tick, each)))) || 15;
  return ticks.map((tick) => say(tick, digits));
}
function extent(values, isLog) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value) || (isLog && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return isLog ? [0.1, 10] : [0, 1];
  if (isLog) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  const room = high === low ? Math.max(Math.abs(high) * 0.1, 1e-9) : 0.04 * (high - low);
  return [low - room, high + room];
}

// spec: {id, title, note, y, x, log, base, height, format, lines: [{name, colour, dashed, points: [[x, low, mid, high]]}],
//   areas: [{name, colour, points: [[x, low, high]]}], dots: [{name, colour, points: [[x, y]]}], marks: {name, xs}, zero}
function chart(spec) {
  const host = el("figure", { class: "chart", id: spec.id });
  const title = el("figcaption", {}, el("strong", { text: spec.title }), spec.note ? el("span", { text: spec.note }) : null);
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const frame = el("div", { class: "frame", tabindex: "0", role: "application",
    "aria-label": `${spec.title}. Chart; arrow keys read the values.` });
  host.append(title, legend(spec), frame, readout);
  if (spec.rows) host.append(fold(`${spec.id}-table`, "Data as a table", spec.columns, spec.rows));
  host.redraw = () => drawChart(spec, frame, readout);
  return host;
}
function legend(spec) {
  const items = [...(spec.areas || []), ...spec.lines, ...(spec.dots || [])].filter((each) => each.name);
  if (spec.marks && spec.marks.xs.length) items.push({ name: spec.marks.name, colour: "bad", mark: true });
  return el("ul", { class: "legend" }, ...items.map((each) => {
    const kind = each.mark ? "mark" : spec.areas && spec.areas.includes(each) ? "area"
      : spec.dots && spec.dots.includes(each) ? "dot" : each.dashed ? "dashed" : "line";
    return el("li", {}, el("i", { class: `${kind} c-${each.colour}`, "aria-hidden": "true" }), each.name);
  }));
}
function drawChart(spec, frame, readout) {
  const width = Math.max(260, frame.clientWidth || 600), height = spec.height || 220;
  const xs = [], ys = [];
  for (const line of spec.lines) for (const [x, low, , high] of line.points) { xs.push(x); ys.push(low, high); }
  for (const area of spec.areas || []) for (const [x, low, high] of area.points) { xs.push(x); ys.push(low, high); }
  for (const dots of spec.dots || []) for (const [x, y] of dots.points) { xs.push(x); ys.push(y); }
  if (xs.length && spec.marks) xs.push(...spec.marks.xs);
  if (spec.zero) ys.push(0);
  let x0 = 0, x1 = 1;
  const [y0, y1] = spec.range || extent(ys, spec.log);
  [x0, x1] = xs.length ? [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))] : [0, 1]; // no room at the sides
  const X = (x) => PAD.left + (width - PAD.left - PAD.right) * (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5);
  const scaleY = spec.log ? (y) => Math.log(Math.max(y, 1e-300) / y0) / Math.log(y1 / y0) : (y) => (y - y0) / (y1 - y0);
  const Y = (y) => height - PAD.bottom - (height - PAD.top - PAD.bottom) * Math.min(1.02, Math.max(-0.02, scaleY(y)));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
  drawAxes(picture, { spec, width, height, X, Y, x0, x1, y0, y1 });
  for (const area of spec.areas || [])
    picture.append(svg("path", { class: `area c-${area.colour}`, d: band(area.points, X, Y, 1, 2) }));
  for (const line of spec.lines) {
    if (line.points.some(([, low, , high]) => high > low))
      picture.append(svg("path", { class: `spread c-${line.colour}`, d: band(line.points, X, Y, 1, 3) }));
    picture.append(svg("path", { class: `line c-${line.colour}${line.dashed ? " dashed" : ""}`, d: trace(line.points, X, Y) }));
    if (line.points.length === 1)
      picture.append(svg("circle", { class: `dot c-${line.colour}`, cx: X(line.points[0][0]), cy: Y(line.points[0][2]), r: 3.5 }));
  }
  for (const dots of spec.dots || [])
    for (const [x, y] of dots.points)
      if (Number.isFinite(y)) picture.append(svg("circle", { class: `dot c-${dots.colour}`, cx: X(x), cy: Y(y), r: 3.5 }));
  if (spec.marks)
    for (const x of spec.marks.xs)
      picture.append(svg("path", { class: "mark", d: `M${X(x).toFixed(1)} ${height - PAD.bottom}v-9` }));
  const cross = svg("path", { class: "cross", d: "" });
  picture.append(cross);
  frame.replaceChildren(picture);
  crosshair(spec, frame, readout, picture, cross, { X, x0, x1, width, height });
}
function drawAxes(picture, { spec, width, height, X, Y, x0, x1, y0, y1 }) {
  const ticks = ticksOf(y0, y1, spec.log, 5, spec.base), texts = tickTexts(ticks, spec);
  for (const [at, tick] of ticks.entries()) {
    const y = Y(tick);
    picture.append(svg("path", { class: tick === 0 && spec.zero ? "zero" : "grid", d: `M${PAD.left} ${y}H${width - PAD.right}` }));
    picture.append(svg("text", { class: "tick", x: PAD.left - 7, y: y + 4, "text-anchor": "end", text: texts[at] }));
  }
  for (const tick of x1 > x0 ? ticksOf(x0, x1, false, Math.max(2, Math.floor(width / 110)), 10, true) : [x0])
    picture.append(svg("text", { class: "tick", x: X(tick), y: height - PAD.bottom + 17, "text-anchor": "middle", text: integer(tick) }));
  picture.append(svg("path", { class: "axis", d: `M${PAD.left} ${height - PAD.bottom}H${width - PAD.right}` }));
  picture.append(svg("text", { class: "axis-name", x: width - PAD.right, y: height - 3, "text-anchor": "end", text: spec.x || "step" }));
  picture.append(svg("text", { class: "axis-name", x: 0, y: 0, "text-anchor": "middle",
    transform: `translate(10 ${(height - PAD.bottom + PAD.top) / 2}) rotate(-90)`, text: spec.y }));
}
function trace(points, X, Y) {
  let path = "", isOpen = false;
  for (const [x, , y] of points) {
    if (!Number.isFinite(y)) { isOpen = false; continue; }
    path += `${isOpen ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
    isOpen = true;
  }
  return path;
}
function band(points, X, Y, low, high) {
  const parts = [];
  let run = [];
  for (const point of [...points, null]) {
    if (point && Number.isFinite(point[low]) && Number.isFinite(point[high])) { run.push(point); continue; }
    if (run.length) {
      const up = run.map((each) => `${X(each[0]).toFixed(1)} ${Y(each[high]).toFixed(1)}`);
      const down = run.map((each) => `${X(each[0]).toFixed(1)} ${Y(each[low]).toFixed(1)}`).reverse();
      parts.push(`M${[...up, ...down].join("L")}Z`);
    }
    run = [];
  }
  return parts.join("");
}
function crosshair(spec, frame, readout, picture, cross, { X, x0, x1, width, height }) {
  const longest = [...spec.lines, ...(spec.areas || [])].reduce((a, b) => (b.points.length > a.length ? b.points : a), []);
  if (!longest.length) return;
  let at = longest.length - 1;
  const format = spec.format || short;
  const show = (index) => {
    at = Math.max(0, Math.min(longest.length - 1, index));
    const x = longest[at][0];
    cross.setAttribute("d", `M${X(x).toFixed(1)} ${PAD.top}V${height - PAD.bottom}`);
    const said = spec.lines.map((line) => {
      const point = nearest(line.points, x);
      if (!point) return null;
      const [, low, mid, high] = point;
      return `${line.name || spec.title} ${format(mid)}${high > low ? ` (${format(low)} to ${format(high)})` : ""}`;
    }).filter(Boolean);
    for (const area of spec.areas || []) {
      const point = nearest(area.points, x);
      if (point) said.push(`${area.name} ${format(point[1])} to ${format(point[2])}`);
    }
    readout.textContent = `${spec.x || "step"} ${integer(x)}: ${said.join(" · ")}`;
  };
  frame.onpointermove = (event) => {
    const box = picture.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) / box.width * width - PAD.left) / (width - PAD.left - PAD.right) * (x1 - x0);
    show(indexOf(longest, x));
  };
  const hide = () => { cross.setAttribute("d", ""); readout.textContent = ""; };
  frame.onpointerleave = hide;
  frame.onblur = hide;
  frame.onfocus = () => { if (frame.matches(":focus-visible")) show(at); };
  frame.onkeydown = (event) => {
    const jump = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 }[event.key];
    if (jump === undefined) return;
    event.preventDefault();
    show(at + jump);
  };
}
function indexOf(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle; else high = middle;
  }
  return x - points[low][0] > points[high][0] - x ? high : low;
}
const nearest = (points, x) => (points.length ? points[indexOf(points, x)] : null);

// shares of the values by exponent, against the range that the format holds under the scale
// spec: {id, title, low, shares, range: [least, largest] | null, isWhole, keeps, height}
// isWhole: all values have this range; of tiles, each has its own. keeps: no value but zero becomes zero for sure
function histogram(spec) {
  const host = el("figure", { class: "chart", id: spec.id });
  const frame = el("div", { class: "frame", role: "img" });
  host.append(el("figcaption", {}, el("strong", { text: spec.title }), spec.note ? el("span", { text: spec.note }) : null), frame);
  const least = spec.range ? Math.log2(spec.range[0]) : null, largest = spec.range ? Math.log2(spec.range[1]) : null;
  // below half of the smallest positive value, or wholly above the largest
  const place = (exponent) => (spec.range === null || !spec.isWhole ? "" : exponent + 1 <= least - 1 ? (spec.keeps ? "" : "below") : exponent > largest ? "above" : "");
  host.append(fold(`${spec.id}-table`, "Data as a table", ["magnitude from", "share of the values", ""],
    () => [...spec.shares].map((share, at) => [power(2, spec.low + at), percent(share),
      { below: "becomes zero", above: "cut off", "": "" }[place(spec.low + at)]])));
  let below = 0, above = 0;
  spec.shares.forEach((share, at) => {
    if (place(spec.low + at) === "below") below += share;
    if (place(spec.low + at) === "above") above += share;
  });
  frame.setAttribute("aria-label", `${spec.title}: values from ${power(2, spec.low)} to ${power(2, spec.low + spec.shares.length)}`
    + (spec.range && spec.isWhole ? `; ${percent(below)} become zero, ${percent(above)} are cut off` : ""));
  host.redraw = () => drawHistogram(spec, frame, place, least, largest);
  return host;
}
const LEAST_SHARE = 1e-6;
function drawHistogram(spec, frame, place, least, largest) {
  const width = Math.max(230, frame.clientWidth || 300), height = spec.height || 150;
  let from = spec.low, to = spec.low + spec.shares.length;
  if (spec.range) { from = Math.min(from, Math.floor(least)); to = Math.max(to, Math.ceil(largest) + 1); }
  from -= 1; to += 1;
  const left = 62, right = 8, X = (exponent) => left + (width - left - right) * (exponent - from) / (to - from);
  const bottom = height - 32, Y = (share) => bottom - (bottom - 8) * (1 - Math.log(Math.max(share, LEAST_SHARE)) / Math.log(LEAST_SHARE));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
  if (spec.range)
    picture.append(svg("rect", { class: "range", x: X(least), y: 4, width: Math.max(1, X(largest) - X(least)), height: bottom - 4 }));
  for (const share of [1, 1e-2, 1e-4, 1e-6]) {
    picture.append(svg("path", { class: "grid", d: `M${left} ${Y(share)}H${width - right}` }));
    picture.append(svg("text", { class: "tick", x: left - 6, y: Y(share) + 4, "text-anchor": "end", text: percent(share).replace(" ", " ") }));
  }
  spec.shares.forEach((share, at) => {
    if (share < LEAST_SHARE) return;
    const exponent = spec.low + at, x = X(exponent);
    picture.append(svg("rect", { class: `bar ${place(exponent)}`, x: x + 0.5, y: Y(share), width: Math.max(1, X(exponent + 1) - x - 1), height: Math.max(0.5, bottom - Y(share)) }));
  });
  const step = Math.max(1, Math.ceil((to - from) / Math.floor((width - left) / 44)));
  for (let exponent = Math.ceil(from / step) * step; exponent <= to; exponent += step)
    picture.append(svg("text", { class: "tick", x: X(exponent), y: bottom + 15, "text-anchor": "middle", text: power(2, exponent) }));
  picture.append(svg("path", { class: "axis", d: `M${left} ${bottom}H${width - right}` }));
  picture.append(svg("text", { class: "axis-name", x: width - right, y: height - 3, "text-anchor": "end", text: "magnitude" }));
  frame.replaceChildren(picture);
}
