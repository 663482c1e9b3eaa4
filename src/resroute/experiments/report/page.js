"use strict";
// Draws a report's figures from the data beside it, and lets its tables be sorted. What comes from
// runs enters the page as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const DASHES = ["", "7 1.5 1.5 1.5", "1.5 2.5", "11 2 1.5 2 1.5 2"];
const PLUS = "M-1.5-4.4h3v2.9h2.9v3h-2.9v2.9h-3v-2.9h-2.9v-3h2.9z";
const MARKS = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", PLUS, PLUS, "M0-5L4.4 0L0 5L-4.4 0z",
  "M-3.7-3.7h7.4v7.4h-7.4z", "M0-4.7L4.6 3.6H-4.6z", "M0 4.7L4.6-3.6H-4.6z",
];
const VIRIDIS = [[68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140],
  [40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37]];
const hidden = new Set();
const redraws = [];

function add(parent, name, attributes = {}, text) {
  const isSvg = parent instanceof SVGElement || name === "svg";
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

const minus = (text) => text.replace("-", "\u2212");
const loss = (value) => minus(value.toFixed(4));

function short(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)}${unit}`;
  return minus(String(+value.toPrecision(3)));
}

function scale([low, high], length, isLog) {
  const f = isLog ? Math.log10 : (v) => v;
  return (value) => ((f(value) - f(low)) / (f(high) - f(low))) * length;
}

function ticks([low, high], isLog, count) {
  if (isLog && high / low > 4) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of high / low > 300 ? [1] : [1, 2, 5]) found.push(digit * 10 ** power);
    return found.filter((v) => v >= low && v <= high);
  }
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => (high - low) / s <= count);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found.map((v) => +v.toPrecision(12));
}

function digitsOf(marks) {
  const step = marks.length > 1 ? marks[1] - marks[0] : 1;
  return Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
}

function range(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (!values.length) return [0, 1];
  const margin = 0.06 * (high - low) || 0.5;
  return [low - margin, high + margin];
}

// intervals of few seeds may be far wider than all there is to see
function limited(means, ends) {
  const [low, high] = [Math.min(...means), Math.max(...means)];
  const kept = ends.filter((v) => v !== null);
  if (low === high) return [...means, ...kept];
  return [...means, ...kept.map((v) => Math.min(Math.max(v, 2 * low - high), 2 * high - low))];
}

const path = (points) => "M" + points.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L");

function mark(parent, [colour, , shape], x, y, name = "mark") {
  const turn = shape === 2 ? " rotate(45)" : "";
  return add(parent, "path", {
    class: `${name} c${colour}`, d: MARKS[shape], transform: `translate(${x} ${y})${turn}`,
  });
}

function tell(output, text, places) {
  output.textContent = text;
  const runs = places.map((place) => data.runs[place]);
  const labels = new Set(runs.map((run) => run.label)).size;
  runs.forEach((run, i) => {
    output.append(i ? ", " : " \u2013 ");
    const words = labels > 1 ? `${run.label} seed ${run.seed}` : `seed ${run.seed}`;
    add(output, "a", { href: run.href, title: run.name }, words);
  });
}

function choice(controls, panels, state, draw) {
  if (panels.length < 2) return;
  const select = add(add(controls, "label", {}, "Show "), "select");
  panels.forEach((panel, i) => add(select, "option", { value: i }, panel.title));
  select.value = state.panel;
  select.addEventListener("change", () => { state.panel = +select.value; draw(); });
}

function box(controls, text, state, key, draw) {
  const label = add(controls, "label");
  const input = add(label, "input", { type: "checkbox" });
  input.checked = state[key];
  label.append(text);
  input.addEventListener("change", () => { state[key] = input.checked; draw(); });
}

function legend(parent, lines) {
  const redraw = (text) => {
    redraws.forEach((draw) => draw());
    [...parent.children].find((button) => button.textContent === text).focus();
  };
  parent.replaceChildren();
  for (const [text, change] of lines.length > 4 ? [["all", "delete"], ["none", "add"]] : []) {
    add(parent, "button", { type: "button" }, text).addEventListener("click", () => {
      lines.forEach((line) => hidden[change](line.name));
      redraw(text);
    });
  }
  for (const line of lines) {
    const button = add(parent, "button", {
      type: "button", "aria-pressed": !hidden.has(line.name),
    });
    const sample = add(button, "svg", { width: 36, height: 12, "aria-hidden": "true" });
    add(sample, "path", {
      class: `c${line.look[0]}`, d: "M1 6H35", stroke: "currentColor", "stroke-width": 2,
      "stroke-dasharray": DASHES[line.look[1]],
    });
    mark(sample, line.look, 18, 6);
    button.append(line.name);
    button.addEventListener("click", () => {
      if (!hidden.delete(line.name)) hidden.add(line.name);
      redraw(line.name);
    });
  }
}

function differencesFigure(figure, panels) {
  const state = { panel: 0 };
  const controls = add(figure, "div", { class: "controls" });
  const list = add(figure, "div", { class: "plot rows" });
  const output = add(figure, "output");

  function draw() {
    const rows = panels[state.panel].rows;
    list.replaceChildren();
    const drawings = rows.map((row) => {
      const css = row.isPrimary ? "label primary" : "label";
      const label = add(list, "div", { class: css }, row.name);
      add(label, "span", {}, `${row.setting}, n=${row.n}`);
      return add(list, "div");
    });
    add(list, "div");
    const foot = add(list, "div");
    const width = foot.clientWidth;
    const ends = rows.flatMap((row) => [row.low, row.high]);
    const limits = range(limited([...rows.map((row) => row.mean), 0], ends));
    const x = scale(limits, width, false), height = 30;
    const marks = ticks(limits, false, width / 80);
    rows.forEach((row, i) => {
      const about = { role: "img", "aria-label": row.verdict };
      const svg = add(drawings[i], "svg", { width, height, ...about });
      for (const at of marks) {
        const name = at === 0 ? "axis" : "grid";
        add(svg, "path", { class: name, d: `M${x(at)} 0V${height}` });
      }
      const colour = `c${row.look[0]}`;
      if (row.low !== null)
        add(svg, "path", { class: `bar ${colour}`, d: `M${x(row.low)} 12H${x(row.high)}` });
      if (row.seeds.length > 1)
        for (const [, value] of row.seeds)
          add(svg, "circle", { class: `dot ${colour}`, cx: x(value), cy: 23, r: 2.4 });
      const isFound = row.verdict === "better" || row.verdict === "worse";
      mark(svg, row.look, x(row.mean), 12, isFound ? "mark" : "hollow");
      const show = () => {
        const interval = row.low === null ? "" : ` (${loss(row.low)} .. ${loss(row.high)})`;
        const text = `${row.name}, ${row.setting}: ${loss(row.mean)}${interval} nats/char, `;
        tell(output, `${text}${row.verdict}`, row.runs);
      };
      drawings[i].addEventListener("pointerenter", show);
      drawings[i].addEventListener("click", show);
    });
    const axis = add(foot, "svg", { width, height: 38 });
    const digits = digitsOf(marks);
    for (const at of marks)
      add(axis, "text", { x: x(at), y: 14, "text-anchor": "middle" }, minus(at.toFixed(digits)));
    add(axis, "text", { x: width / 2, y: 33, "text-anchor": "middle" },
      "difference, nats/char");
    output.textContent = "Point at a row for its numbers and runs.";
  }

  choice(controls, panels, state, draw);
  redraws.push(draw);
  draw();
}

const colour = (weight) => {
  const place = Math.sqrt(Math.min(Math.max(weight, 0), 1)) * 8;
  const [low, share] = [Math.min(7, Math.floor(place)), place - Math.min(7, Math.floor(place))];
  return VIRIDIS[low].map((v, i) => Math.round(v + share * (VIRIDIS[low + 1][i] - v)));
};

function picture(map) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [map.sources.length, map.sites.length];
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  map.weights.flat().forEach((weight, i) => {
    if (weight !== null) image.data.set([...colour(weight), 255], 4 * i);
  });
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

function drawMap(card, map, output) {
  const plot = add(card, "div", { class: "plot" });
  const [left, top, foot, width] = [84, 8, 108, plot.clientWidth];
  const [rows, columns] = [map.sites.length, map.sources.length];
  const size = { width: width - left - 4, height: Math.min(420, Math.max(150, 5.5 * rows)) };
  const svg = add(plot, "svg", {
    width, height: size.height + foot, role: "img", "aria-label": map.title,
  });
  const area = add(svg, "g", { transform: `translate(${left} ${top})` });
  add(area, "rect", { class: "none", ...size });
  add(area, "image", { href: picture(map), ...size, preserveAspectRatio: "none" });
  const cell = { x: size.width / columns, y: size.height / rows };
  const thinned = (count, room) => {
    const step = 2 ** Math.max(0, Math.ceil(Math.log2(13 / room)));
    const last = count - 1;
    const isShown = (i) => i === last || (i % step === 0 && i < count - step / 2);
    return [...Array(count).keys()].filter(isShown);
  };
  for (const i of thinned(rows, cell.y))
    add(area, "text", { x: -5, y: (i + 0.5) * cell.y + 4, "text-anchor": "end" }, map.sites[i]);
  for (const i of thinned(columns, cell.x))
    add(area, "text", {
      class: map.details[i] ? "detail" : "", "text-anchor": "end",
      transform: `translate(${(i + 0.5) * cell.x + 4} ${size.height + 6}) rotate(-90)`,
    }, map.sources[i]);
  plot.addEventListener("pointermove", (event) => {
    const corner = plot.getBoundingClientRect();
    const j = Math.floor((event.clientX - corner.left - left) / cell.x);
    const i = Math.floor((event.clientY - corner.top - top) / cell.y);
    const weight = map.weights[i]?.[j];
    if (weight === undefined) return;
    const text = weight === null ? "has no source" : `takes ${weight.toFixed(3)} from`;
    tell(output, `${map.title}: ${map.sites[i]} ${text} ${map.sources[j]}`, map.runs);
  });
}

function mapsFigure(figure, panels) {
  const first = data.charts.curves?.panels[data.charts.curves.first].title;
  const state = { panel: Math.max(0, panels.findIndex((panel) => panel.title === first)) };
  const controls = add(figure, "div", { class: "controls" });
  const fill = (weight) => `rgb(${colour(weight)})`;
  const bar = add(controls, "svg", { width: 210, height: 30, "aria-label": "weight by colour" });
  for (let i = 0; i < 100; i++)
    add(bar, "rect", { x: 5 + 2 * i, width: 2.2, height: 10, fill: fill((i / 99) ** 2) });
  for (const at of [0, 0.05, 0.2, 0.5, 1]) {
    const anchor = { 0: "start", 1: "end" }[at] || "middle";
    const place = { x: 5 + 200 * Math.sqrt(at), y: 24, "text-anchor": anchor };
    add(bar, "text", { ...place, "font-size": 11, fill: "currentColor" }, String(at));
  }
  const output = add(figure, "output");
  const grid = add(figure, "div", { class: "maps" });

  function draw() {
    grid.replaceChildren();
    const cards = panels[state.panel].maps.map((map) => {
      const card = add(grid, "div");
      add(card, "h3", {}, map.name);
      return [card, map];
    });
    // all cards are there by now, and have their final width
    for (const [card, map] of cards) drawMap(card, map, output);
    output.textContent = "Point at a map for its numbers and runs.";
  }

  choice(controls, panels, state, draw);
  redraws.push(draw);
  draw();
}

function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const names = [...head.childNodes];
    const button = add(head, "button", { type: "button" });
    button.append(...names);
    names[0].after(document.createElement("i"));
    button.addEventListener("click", () => {
      const isUp = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const order = (a, b) => {
        const [one, two] = [key(a), key(b)];
        // what is missing stays at the end
        if (one === "-" || two === "-") return (one === "-") - (two === "-");
        const by = isNaN(one) || isNaN(two) ? one.localeCompare(two) : one - two;
        return isUp ? by : -by;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}
