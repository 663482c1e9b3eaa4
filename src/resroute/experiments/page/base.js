"use strict";
// What all pages share: elements, scales, controls, sorted tables, drawing anew. What comes from runs
// enters a page as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const DASHES = ["", "7 1.5 1.5 1.5", "1.5 2.5", "11 2 1.5 2 1.5 2"];
const PLUS = "M-1.5-4.4h3v2.9h2.9v3h-2.9v2.9h-3v-2.9h-2.9v-3h2.9z";
const MARKS = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", PLUS, PLUS, "M0-5L4.4 0L0 5L-4.4 0z",
  "M-3.7-3.7h7.4v7.4h-7.4z", "M0-4.7L4.6 3.6H-4.6z", "M0 4.7L4.6-3.6H-4.6z",
];
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

function mark(parent, [colour, , shape], x, y, name = "mark", size = 1) {
  const turn = shape === 2 ? " rotate(45)" : "";
  return add(parent, "path", {
    class: `${name} c${colour}`, d: MARKS[shape], transform: `translate(${x} ${y}) scale(${size})${turn}`,
  });
}

// buttons that put names into `hidden`, or take them out again
function legend(parent, lines, hidden, draw) {
  const redraw = (text) => {
    draw();
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

// a menu of names, of which `state[key]` is the number; none where there is nothing to choose
function pick(controls, label, names, state, key, draw) {
  if (names.length < 2) return;
  const select = add(add(controls, "label", {}, `${label} `), "select");
  names.forEach((name, i) => add(select, "option", { value: i }, name));
  select.value = state[key];
  select.addEventListener("change", () => { state[key] = +select.value; draw(); });
}

const choice = (controls, panels, state, draw) =>
  pick(controls, "Show", panels.map((panel) => panel.title), state, "panel", draw);

function box(controls, text, state, key, draw) {
  const label = add(controls, "label");
  const input = add(label, "input", { type: "checkbox" });
  input.checked = state[key];
  label.append(text);
  input.addEventListener("change", () => { state[key] = input.checked; draw(); });
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
        const by = isNaN(one) || isNaN(two) ? one.localeCompare(two, "en", { numeric: true }) : one - two;
        return isUp ? by : -by;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}

// every figure by a function of its name; pages are drawn anew when their width changes
function drawFigures(draw) {
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll("figure[data-figure]").forEach((figure) => {
    const still = figure.querySelector(".static");
    draw(figure, figure.dataset.figure);
    still.remove();
  });
  let known = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === known) return;
    known = document.body.clientWidth;
    redraws.forEach((again) => again());
  }).observe(document.body);
}
