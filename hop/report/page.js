"use strict";
// Every text goes through textContent, so that none of it is taken for HTML.

const data = JSON.parse(document.getElementById("data").textContent);

// ---- small helpers

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const number = (x) => (typeof x === "string" ? (x === "inf" ? Infinity : x === "-inf" ? -Infinity : NaN) : x);

function decibels(x) {
  if (x === null || x === undefined) return "";
  const value = number(x);
  return value === Infinity ? "exact" : value === -Infinity ? "−∞" : value.toFixed(1);
}

function bytes(count) {
  if (!count) return "";
  for (const [unit, factor] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (count >= factor) return `${(count / factor).toPrecision(3)} ${unit}`;
  return `${count} B`;
}

function milliseconds(seconds) {
  if (seconds === null) return "";
  return (1e3 * seconds).toFixed(seconds < 1e-2 ? 3 : 1);
}

function short(x) {
  const value = number(x);
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

const shape = (sizes) => (sizes.length ? sizes.join(" × ") : "one number");

// Where the rows of the nodes are stacked, and those of the schemes; as in the style.
const narrow = matchMedia("(max-width: 800px)"), phone = matchMedia("(max-width: 560px)");

// ---- light and dark

const theme = document.getElementById("theme");
const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const sayTheme = () => (theme.textContent = isDark() ? "Light" : "Dark");
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  sayTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", sayTheme);
sayTheme();

// ---- charts

function histogram(spread, what) {
  const { bins, limit } = spread;
  const width = 320, height = 86, base = height - 18;
  let first = bins.findIndex((count) => count > 0), last = bins.length - 1;
  while (last > first && bins[last] === 0) last -= 1;
  const range = `${short(spread.low)} to ${short(spread.high)}`;
  const picture = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${what}: ${range}` });
  if (first >= 0) {
    const most = Math.log1p(Math.max(...bins)), step = width / (last - first + 1);
    for (let i = first; i <= last; i += 1) {
      const tall = bins[i] ? Math.max(1.5, ((base - 4) * Math.log1p(bins[i])) / most) : 0;
      const bar = draw("rect", {
        class: what.startsWith("Error") ? "bar error" : "bar",
        x: ((i - first) * step + 0.5).toFixed(2), y: (base - tall).toFixed(2),
        width: Math.max(step - 1, 0.5).toFixed(2), height: tall.toFixed(2),
      });
      picture.append(bar);
    }
    const edge = (i) => short(-limit + (2 * limit * i) / bins.length);
    picture.append(
      draw("line", { class: "axis", x1: 0, x2: width, y1: base, y2: base }),
      draw("text", { class: "label", x: 0, y: height - 4 }, edge(first)),
      draw("text", { class: "label", x: width, y: height - 4, "text-anchor": "end" }, edge(last + 1)),
    );
    const zero = (bins.length / 2 - first) * step;
    if (zero > 40 && zero < width - 40) picture.append(draw("text", { class: "label", x: zero, y: height - 4, "text-anchor": "middle" }, "0"));
  }
  const rest = spread.rest ? `, ${spread.rest} not finite` : "";
  return make("div", {}, make("h3", {}, what), picture,
    make("div", { class: "under" }, `${range}; ${spread.count.toLocaleString("en")} numbers${rest}; counts on a log scale`));
}

// ---- the rows of the table

const rows = data.report ? data.report.rows : [];
rows.forEach((row, i) => {
  row.index = i;
  row.text = [row.name, row.path, row.module, row.operator, row.formats, row.result.name, row.kernel].join(" ").toLowerCase();
  row.milliseconds = row.seconds;
  row.sqnr = row.error ? row.error.sqnr : null;
  row.inputs = row.operands.map((operand) => operand.row).filter((at) => at !== null);
});

const columns = [
  { key: "index", title: "Flow", width: null },
  { key: "name", title: "Node", className: "name-column" },
  { key: "operator", title: "Operator", className: "operator-column" },
  { key: "formats", title: "Computes in", className: "formats-column" },
  { key: "kernel", title: "Kernel", className: "kernel-column" },
  { key: "sqnr", title: "SQNR dB", className: "number sqnr-column" },
  { key: "parameter_bytes", title: "Bytes", className: "number bytes-column" },
  { key: "milliseconds", title: "ms", className: "number ms-column" },
].filter((column) => column.key !== "sqnr" || data.report === null || data.report.has_reference);
const numeric = new Set(["index", "sqnr", "parameter_bytes", "milliseconds"]);

const filters = [
  ["All", () => true],
  ["Without views", (row) => row.sort !== "move"],
  ["Products", (row) => row.sort === "product"],
  ["Low-bit", (row) => row.kind === "low-bit"],
  ["Still float", (row) => row.sort === "product" && row.kind === "float"],
  ["Changes", (row) => row.changes.length > 0 || row.sort === "quantize"],
];

const state = { key: "index", down: false, filter: 0, words: [], open: new Set(), focus: 0 };

function shown() {
  const keep = filters[state.filter][1];
  const found = rows.filter((row) => keep(row) && state.words.every((word) => row.text.includes(word)));
  if (state.key === "index") return state.down ? found.reverse() : found;
  const sign = state.down ? -1 : 1;
  const value = (row) => (numeric.has(state.key) ? number(row[state.key]) : row[state.key].toLowerCase());
  return found.sort((a, b) => {
    const x = value(a), y = value(b);
    if (x === null || y === null) return (x === null) - (y === null) || a.index - b.index; // last, whichever way
    return x === y ? a.index - b.index : sign * (x < y ? -1 : 1);
  });
}

// ---- rails: which values are alive at each row, and in which lane

const LANE = 13, LANES = 9;
const rowHeight = () => (narrow.matches ? 104 : 44); // as in the style

function rails(list) {
  const places = new Map(list.map((row, i) => [row.index, i]));
  const nearest = new Map(); // of a row that is not shown, the shown ones that it depends on
  const sources = (at) => {
    if (places.has(at)) return [at];
    if (!nearest.has(at)) nearest.set(at, [...new Set(rows[at].inputs.flatMap(sources))]);
    return nearest.get(at);
  };
  const inputs = list.map((row) => [...new Set(row.inputs.flatMap(sources))]);
  const last = new Map();
  inputs.forEach((of, i) => of.forEach((at) => last.set(at, i)));
  const lanes = []; // the row whose value is in it, or undefined
  return list.map((row, i) => {
    const before = lanes.slice();
    const ins = inputs[i].map((at) => ({ lane: before.indexOf(at), kind: rows[at].result.kind }));
    inputs[i].forEach((at) => { if (last.get(at) === i) lanes[lanes.indexOf(at)] = undefined; });
    const free = inputs[i].map((at) => before.indexOf(at)).find((lane) => lanes[lane] === undefined);
    let lane = free;
    for (let k = 0; lane === undefined; k += 1) if (lanes[k] === undefined && before[k] === undefined) lane = k;
    const through = before.flatMap((at, k) => (at !== undefined && lanes[k] === at ? [{ lane: k, kind: rows[at].result.kind }] : []));
    const goesOn = last.has(row.index);
    if (goesOn) lanes[lane] = row.index;
    const below = lanes.flatMap((at, k) => (at === undefined ? [] : [{ lane: k, kind: rows[at].result.kind }]));
    return { lane, ins, through, goesOn, below, width: Math.max(lane, ...before.keys(), ...lanes.keys(), 0) + 1 };
  });
}

const middle = (lane) => LANE * (Math.min(lane, LANES) + 0.5) + 3;

function mark(row, x, y) {
  const changes = row.changes.length > 0 || row.sort === "quantize";
  if (changes) return draw("rect", { class: `dot ${row.result.kind}`, x: x - 5, y: y - 5, width: 10, height: 10, transform: `rotate(45 ${x} ${y})` });
  const isSmall = row.sort === "move";
  return draw("circle", { class: `dot ${row.kind}${isSmall ? " small" : ""}`, cx: x, cy: y, r: isSmall ? 3 : 5.5 });
}

function rail(row, found) {
  const height = rowHeight(), y = height / 2;
  const picture = draw("svg", { width: LANE * (LANES + 1) + 6, height, "aria-hidden": "true" });
  if (!found) {
    picture.append(mark(row, middle(0), y));
    return picture;
  }
  const x = middle(found.lane);
  const edge = (kind, path) => picture.append(draw("path", { class: `edge ${kind}`, d: path }));
  for (const { lane, kind } of found.through) edge(kind, `M${middle(lane)} 0V${height}`);
  for (const { lane, kind } of found.ins) {
    const from = middle(lane);
    edge(kind, from === x ? `M${x} 0V${y}` : `M${from} 0C${from} ${y} ${x} ${y / 4} ${x} ${y}`);
  }
  if (found.goesOn) edge(row.result.kind, `M${x} ${y}V${height}`);
  picture.append(mark(row, x, y));
  return picture;
}

// ---- one row, and what opens under it

function formats(row) {
  const parts = [];
  row.computes.forEach((type, i) => {
    if (i) parts.push(" × ");
    parts.push(make("span", { class: `kind-${type.kind}` }, type.name.split(" ")[0]));
  });
  const under = make("div", { class: "under" });
  if (row.changes.length) {
    const [from, to] = row.changes[0];
    under.append(make("span", { class: `kind-${from.kind}` }, from.name.split(" ")[0]), " → ", make("span", { class: `kind-${to.kind}` }, to.name.split(" ")[0]));
  } else if (row.sort === "product") {
    under.append("gives ", make("span", { class: `kind-${row.result.kind}` }, row.result.name.split(" ")[0]));
  }
  return [make("div", {}, ...parts), under];
}

const best = Math.max(1, ...rows.map((row) => number(row.sqnr)).filter(Number.isFinite));
const longest = Math.max(...rows.map((row) => row.seconds || 0), 1e-12);

function meter(share) {
  const inner = make("i");
  inner.style.width = `${Math.round(100 * Math.min(1, Math.max(0, share)))}%`;
  return make("div", { class: "meter" }, inner);
}

function cells(row, found) {
  const by = {
    index: () => [rail(row, found)],
    name: () => [
      make("div", { class: "name", title: row.name }, row.name, row.output === null ? null : make("span", { class: "tag" }, `output ${row.output}`)),
      make("div", { class: "path", title: row.path }, make("bdi", {}, row.path || " ")),
    ],
    operator: () => [make("div", { title: row.operator }, row.operator.replaceAll(".default", ""))],
    formats: () => formats(row),
    kernel: () => [make("div", { title: row.kernel }, row.kernel)],
    sqnr: () => (row.sqnr === null ? [] : [make("div", { class: Number.isFinite(number(row.sqnr)) ? "unit" : null }, decibels(row.sqnr)), meter(number(row.sqnr) / best)]),
    parameter_bytes: () => [make("div", {}, bytes(row.parameter_bytes))],
    milliseconds: () => (row.seconds === null ? [] : [make("div", { class: "unit" }, milliseconds(row.seconds)), meter(row.seconds / longest)]),
  };
  return columns.map((column) => make("td", { role: "cell", class: column.key === "index" ? "flow" : column.className || null }, ...by[column.key]()));
}

function facts(row) {
  const list = make("dl");
  const add = (name, ...values) => list.append(make("dt", {}, name), make("dd", {}, ...values));
  add("operator", make("code", {}, row.operator));
  if (row.path) add("module", `${row.path}${row.module ? ` (${row.module})` : ""}`);
  for (const operand of row.operands)
    add(operand.row === null ? "parameter" : "reads", make("code", {}, operand.name), operand.type ? ` ${operand.type.name}` : "");
  add("gives", `${row.result.name}, ${shape(row.shape)}`);
  if (row.inexact) add("may differ", row.inexact);
  if (row.parameter_bytes) add("parameters", `${row.parameter_bytes.toLocaleString("en")} bytes`);
  return make("div", {}, make("h3", {}, "Node"), list);
}

function comparison(row) {
  const error = row.error, list = make("dl");
  const add = (name, value) => list.append(make("dt", {}, name), make("dd", {}, value));
  add("beside", make("code", {}, error.reference));
  add("differ", `${error.differing.toLocaleString("en")} of ${error.elements.toLocaleString("en")}`);
  add("largest", short(error.largest));
  if (error.sqnr !== null) {
    add("came in", number(error.before) === Infinity ? "exact" : `${decibels(error.before)} dB`);
    add("goes out", number(error.sqnr) === Infinity ? "exact" : `${decibels(error.sqnr)} dB`);
    add("noise added", number(row.added) === 0 ? "none" : `${short(row.added)} of the signal`);
  }
  return make("div", {}, make("h3", {}, "Against the reference"), list);
}

function kernels(row) {
  const list = make("ul");
  for (const reason of row.reasons) list.append(make("li", {}, reason));
  list.append(make("li", {}, make("b", {}, row.kernel), " ran"));
  return make("div", {}, make("h3", {}, "Kernels, in the order asked"), list);
}

function panel(row) {
  const words = make("div", { class: "words" }, facts(row));
  if (row.kernel) words.append(kernels(row));
  const charts = make("div", { class: "charts" });
  if (row.error) charts.append(comparison(row));
  if (row.error && row.error.spread) charts.append(histogram(row.error.spread, "Error"));
  if (row.values) charts.append(histogram(row.values, "Values of the result"));
  if (row.weights) charts.append(histogram(row.weights, "Weights"));
  return make("div", { class: "panels" }, words, charts);
}

// ---- the table

const table = document.getElementById("rows"), body = table.tBodies[0];
let listed = [];

function details(row, found) {
  const picture = draw("svg", { width: LANE * (LANES + 1) + 6, "aria-hidden": "true" });
  for (const { lane, kind } of found ? found.below : [])
    picture.append(draw("line", { class: `edge ${kind}`, x1: middle(lane), x2: middle(lane), y1: 0, y2: "100%" }));
  const seen = [...table.tHead.rows[0].cells].filter((head) => getComputedStyle(head).display !== "none");
  const cell = make("td", { class: "panel", role: "cell", colspan: seen.length - 1 }, panel(row));
  return make("tr", { class: "details", role: "row", id: `details-${row.index}` }, make("td", { class: "flow", role: "cell" }, picture), cell);
}

function render() {
  listed = shown();
  const found = state.key === "index" && !state.down ? rails(listed) : null;
  table.dataset.lanes = found ? Math.min(LANES + 1, Math.max(1, ...found.map((r) => r.width))) : 1;
  flow.style.width = `${Math.max(66, LANE * table.dataset.lanes + 10)}px`;
  table.style.setProperty("--flow", `${LANE * table.dataset.lanes + 10}px`);
  const made = document.createDocumentFragment();
  state.focus = Math.max(0, Math.min(state.focus, listed.length - 1));
  listed.forEach((row, i) => {
    const open = state.open.has(row.index);
    const line = make("tr", { role: "row", class: `row ${row.sort}`, tabindex: i === state.focus ? 0 : -1, "aria-expanded": open, "data-index": row.index }, ...cells(row, found && found[i]));
    made.append(line);
    if (open) made.append(details(row, found && found[i]));
    row.found = found && found[i];
  });
  if (!listed.length) made.append(make("tr", {}, make("td", { class: "empty", colspan: columns.length }, "No node fits the search and the filter.")));
  body.replaceChildren(made);
  document.getElementById("count").textContent = `${listed.length} of ${rows.length} nodes`;
  for (const cell of table.tHead.rows[0].cells)
    cell.setAttribute("aria-sort", cell.dataset.key !== state.key ? "none" : state.down ? "descending" : "ascending");
}

function toggle(line) {
  const row = rows[Number(line.dataset.index)];
  const open = !state.open.has(row.index);
  line.setAttribute("aria-expanded", open);
  if (open) {
    state.open.add(row.index);
    line.after(details(row, row.found));
  } else {
    state.open.delete(row.index);
    line.nextElementSibling.remove();
  }
}

function moveTo(place) {
  const lines = body.querySelectorAll("tr.row");
  if (!lines.length) return;
  const wanted = Math.max(0, Math.min(place, lines.length - 1));
  lines[state.focus].tabIndex = -1;
  state.focus = wanted;
  lines[wanted].tabIndex = 0;
  lines[wanted].focus();
}

function onKey(event) {
  const line = event.target.closest("tr.row");
  if (!line || event.target !== line) return;
  const place = listed.findIndex((row) => row.index === Number(line.dataset.index));
  const places = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: listed.length - 1, PageDown: place + 10, PageUp: place - 10 };
  if (event.key in places) moveTo(places[event.key]);
  else if (event.key === "Enter" || event.key === " ") toggle(line);
  else if (event.key === "Escape" && state.open.has(Number(line.dataset.index))) toggle(line);
  else return;
  event.preventDefault();
}

const flow = document.createElement("col");

function begin() {
  document.getElementById("layers").hidden = false;
  table.prepend(make("colgroup", {}, flow, ...columns.slice(1).map((column) => make("col", { class: column.className || null }))));
  for (const column of columns) {
    const button = make("button", { type: "button", title: `Sort by ${column.title}` }, column.title);
    button.addEventListener("click", () => {
      const same = state.key === column.key;
      Object.assign(state, { key: column.key, down: same ? !state.down : ["parameter_bytes", "milliseconds"].includes(column.key), focus: 0 });
      render();
    });
    table.tHead.rows[0].append(make("th", { scope: "col", role: "columnheader", class: column.className || null, "data-key": column.key }, button));
  }
  filters.forEach(([title], i) => {
    const button = make("button", { type: "button", "aria-pressed": i === state.filter }, title);
    button.addEventListener("click", () => {
      state.filter = i;
      [...button.parentNode.children].forEach((other, k) => other.setAttribute("aria-pressed", k === i));
      render();
    });
    document.getElementById("filters").append(button);
  });
  const search = document.getElementById("search");
  search.addEventListener("input", () => {
    state.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    render();
  });
  search.addEventListener("keydown", (event) => { if (event.key === "ArrowDown") { event.preventDefault(); moveTo(0); } });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target !== search) { event.preventDefault(); search.focus(); }
  });
  body.addEventListener("click", (event) => {
    const line = event.target.closest("tr.row");
    if (!line || String(getSelection())) return;
    moveTo(listed.findIndex((row) => row.index === Number(line.dataset.index)));
    toggle(line);
  });
  body.addEventListener("keydown", onKey);
  for (const list of [narrow, matchMedia("(max-width: 1000px)")]) list.addEventListener("change", render);
  legend();
  render();
}

function legend() {
  const box = document.getElementById("legend");
  for (const [kind, words] of [["float", "floats"], ["integer", "integers"], ["low-bit", "low-bit formats"]])
    box.append(make("span", {}, draw("svg", { width: 26, height: 12 }, draw("path", { class: `edge ${kind}`, d: "M1 6H25" })), words));
  const at = draw("svg", { width: 14, height: 14 }, draw("rect", { class: "dot low-bit", x: 3, y: 3, width: 8, height: 8, transform: "rotate(45 7 7)" }));
  box.append(make("span", {}, at, "the format changes"));
}

function tiles() {
  const box = document.getElementById("tiles");
  const add = (value, words) => box.append(make("div", { class: "tile" }, make("b", {}, value), make("span", {}, words)));
  const report = data.report;
  if (!report) return;
  const out = rows.filter((row) => row.output !== null && row.sqnr !== null);
  if (out.length) add(number(out[0].sqnr) === Infinity ? "exact" : `${decibels(out[0].sqnr)} dB`, "SQNR of the output");
  add(bytes(report.parameter_bytes) || "none", "parameters");
  add(`${milliseconds(rows.reduce((sum, row) => sum + (row.seconds || 0), 0))} ms`, "all nodes, one by one");
  const products = rows.filter((row) => row.sort === "product");
  add(`${products.filter((row) => row.kind !== "float").length} of ${products.length}`, "products in low precision");
  add(String(rows.length), "nodes");
}

// ---- the sweep: a picture of quality over bytes, and a table

function nice(low, high, count) {
  const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + 1e-9 * step; x += step) found.push(Number(x.toPrecision(12)));
  return found;
}

function scatter(all, sweep) {
  const [width, height] = phone.matches ? [350, 320] : [560, 400];
  const left = 48, right = 18, top = 14, bottom = 40;
  const points = all.filter((row) => row.scheme && Number.isFinite(number(row.quality)));
  const xs = points.map((row) => row.parameter_bytes / 1e6), ys = points.map((row) => number(row.quality));
  const pad = (low, high, share) => [low - share * (high - low || 1), high + share * (high - low || 1)];
  const [x0, x1] = pad(Math.min(...xs), Math.max(...xs), 0.12), [y0, y1] = pad(Math.min(...ys), Math.max(...ys), 0.1);
  const x = (value) => left + ((value - x0) / (x1 - x0)) * (width - left - right);
  const y = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);
  const words = sweep.has_loss ? "−loss" : "SQNR of the outputs, dB";
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${words} over megabytes of parameters; the table has the numbers` });
  picture.setAttribute("width", "100%");
  for (const value of nice(x0, x1, 6)) picture.append(
    draw("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: height - bottom }),
    draw("text", { class: "label", x: x(value), y: height - bottom + 16, "text-anchor": "middle" }, String(value)));
  for (const value of nice(y0, y1, 6)) picture.append(
    draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    draw("text", { class: "label", x: left - 7, y: y(value) + 4, "text-anchor": "end" }, String(value)));
  picture.append(
    draw("text", { class: "label", x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, "parameters, MB"),
    draw("text", { class: "label", x: 12, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${height / 2})` }, words));
  const front = points.filter((row) => row.front).sort((a, b) => a.parameter_bytes - b.parameter_bytes);
  const line = front.map((row) => `${x(row.parameter_bytes / 1e6)} ${y(number(row.quality))}`);
  if (line.length > 1) picture.append(draw("path", { class: "front", d: `M${line.join("L")}` }));
  const taken = points.map((row) => [x(row.parameter_bytes / 1e6) - 6, y(number(row.quality)) - 6, 12, 12]);
  for (const row of points) {
    const cx = x(row.parameter_bytes / 1e6), cy = y(number(row.quality)), wide = 6.1 * row.name.length;
    const places = [4, -9, 17, -21, 29].flatMap((dy) => [[cx + 10, cy + dy], [cx - 10 - wide, cy + dy], [cx - wide / 2, cy + dy - 2]]).filter(([, py]) => py !== cy + 2);
    const covered = ([px, py]) => taken.reduce((sum, [a, b, w, h]) =>
      sum + Math.max(0, Math.min(px + wide, a + w) - Math.max(px, a)) * Math.max(0, Math.min(py + 1, b + h) - Math.max(py - 10, b)), px < left || px + wide > width ? 1e4 : 0);
    const [lx, ly] = places.reduce((best, place) => (covered(place) < covered(best) ? place : best));
    taken.push([lx, ly - 11, wide, 11]);
    const told = `${row.name}: ${decibels(row.sqnr)} dB, cosine ${row.cosine.toFixed(4)}, ${bytes(row.parameter_bytes)}, ${milliseconds(row.seconds)} ms`;
    picture.append(
      draw("g", { class: "pick" }, draw("title", {}, told), draw("circle", { class: row.front ? "point best" : "point", cx, cy, r: 5 }),
        draw("text", { class: "label", x: lx, y: ly }, row.name)));
  }
  return picture;
}

function beginSweep(sweep) {
  const box = document.getElementById("sweep");
  box.hidden = false;
  const order = { key: null, down: false };
  const fields = [
    ["name", "Scheme"], ["sqnr", "SQNR dB"], ["cosine", "Cosine"], ...(sweep.has_loss ? [["loss", "Loss"]] : []),
    ["parameter_bytes", "Parameters"], ["seconds", "ms"], ["float_seconds", "float ms"], ["slowdown", "× float"],
  ];
  const text = {
    name: (row) => row.name, sqnr: (row) => decibels(row.sqnr), cosine: (row) => number(row.cosine).toFixed(5),
    loss: (row) => short(row.loss), parameter_bytes: (row) => bytes(row.parameter_bytes),
    seconds: (row) => (1e3 * row.seconds).toPrecision(4), float_seconds: (row) => (1e3 * row.float_seconds).toPrecision(4),
    slowdown: (row) => row.slowdown.toFixed(2),
  };
  const head = make("tr", { role: "row" }), lines = make("tbody", { role: "rowgroup" });
  const fill = () => {
    const sorted = sweep.rows.slice();
    if (order.key) sorted.sort((a, b) => {
      const [x, y] = [a, b].map((row) => (order.key === "name" ? row.name : number(row[order.key])));
      return (x === y ? 0 : x < y ? -1 : 1) * (order.down ? -1 : 1);
    });
    lines.replaceChildren(...sorted.map((row) =>
      make("tr", { class: row.pareto ? "best" : null, role: "row" },
        ...fields.map(([key, title]) => make("td", { class: key === "name" ? null : "number", "data-title": title, role: "cell" }, text[key](row), key === "name" && row.pareto ? make("span", { class: "tag" }, "Pareto") : null, key === "name" && row.left ? make("span", { class: "tag" }, `${row.left} left float`) : null)))));
    [...head.cells].forEach((cell, i) => cell.setAttribute("aria-sort", fields[i][0] !== order.key ? "none" : order.down ? "descending" : "ascending"));
  };
  for (const [key, title] of fields) {
    const button = make("button", { type: "button", title: `Sort by ${title}` }, title);
    button.addEventListener("click", () => {
      Object.assign(order, { down: order.key === key ? !order.down : key === "sqnr" || key === "cosine", key });
      fill();
    });
    head.append(make("th", { scope: "col", role: "columnheader", class: key === "name" ? null : "number" }, button));
  }
  fill();
  const table = make("table", { role: "table", "aria-label": "Schemes" }, make("thead", { role: "rowgroup" }, head), lines);
  const picture = make("div", {}, scatter(sweep.rows, sweep));
  phone.addEventListener("change", () => picture.replaceChildren(scatter(sweep.rows, sweep)));
  const hint = make("p", { class: "hint" }, "Pareto: no other is as good, as small and as fast, and better in one of the three. The line joins those that none beats in quality and bytes.");
  box.append(make("h2", {}, "What other formats would cost"), make("div", { class: "both" }, picture, make("div", { class: "scroll" }, table, hint)));
}

tiles();
if (data.sweep) beginSweep(data.sweep);
if (data.report) begin();
