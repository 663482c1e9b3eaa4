// Axes of a chart.

// axes around an area whose own coordinates start at its upper left corner
function frame(plot, chart, limits, logs, places) {
  const width = plot.clientWidth, height = Math.min(430, Math.max(270, 0.55 * width));
  const yTicks = ticks(limits.y, logs.y, height / 44);
  const digits = digitsOf(yTicks);
  const labels = yTicks.map((at) => minus(at.toFixed(digits)));
  const left = 30 + 7 * Math.max(3, ...labels.map((text) => text.length)), top = 10, bottom = 42;
  const size = { left, top, width: width - left - 14, height: height - top - bottom };
  plot.replaceChildren();
  const svg = add(plot, "svg", { width, height, role: "img", "aria-label": chart.y });
  const x = scale(limits.x, size.width, logs.x), up = scale(limits.y, size.height, logs.y);
  const y = (value) => size.height - up(value);
  const group = add(svg, "g", { transform: `translate(${left} ${top})` });
  yTicks.forEach((at, i) => {
    add(group, "path", { class: "grid", d: `M0 ${y(at)}H${size.width}` });
    add(group, "text", { x: -7, y: y(at) + 4, "text-anchor": "end" }, labels[i]);
  });
  for (const at of places || ticks(limits.x, logs.x, size.width / 62)) {
    add(group, "path", { class: "grid", d: `M${x(at)} 0V${size.height}` });
    const text = { x: x(at), y: size.height + 17, "text-anchor": "middle" };
    add(group, "text", text, short(at));
  }
  add(group, "path", { class: "axis", d: `M0 0V${size.height}H${size.width}` });
  const middle = { x: size.width / 2, y: size.height + 36, "text-anchor": "middle" };
  add(group, "text", middle, chart.x);
  const turn = `translate(${13 - left} ${size.height / 2}) rotate(-90)`;
  add(group, "text", { transform: turn, "text-anchor": "middle" }, chart.y);
  // marks on the edge keep their width; what leaves the area upwards or downwards is cut
  const area = add(svg, "svg", {
    x: left - 7, y: top, width: size.width + 14, height: size.height,
    viewBox: `-7 0 ${size.width + 14} ${size.height}`,
  });
  return { svg, area, x, y, size };
}

// lets a pointer or arrow keys walk along the points of a chart; a click holds one
function walker(plot, show) {
  let chosen = -1, isHeld = false, ring = null, area = null;
  const points = [];

  function choose(index) {
    if (index === chosen || !points.length) return;
    chosen = (index + points.length) % points.length;
    if (ring) ring.remove();
    const [cx, cy] = points[chosen].at;
    ring = add(area, "circle", { class: "ring", cx, cy, r: 7 });
    show(points[chosen]);
  }

  function nearest(event) {
    const corner = area.getBoundingClientRect();
    const [x, y] = [event.clientX - corner.left - 7, event.clientY - corner.top];
    const far = points.map(({ at }) => Math.hypot(at[0] - x, at[1] - y));
    return far.indexOf(Math.min(...far));
  }

  plot.addEventListener("pointermove", (event) => { if (!isHeld) choose(nearest(event)); });
  plot.addEventListener("click", (event) => { isHeld = !isHeld; choose(nearest(event)); });
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen < 0 && step < 0 ? points.length - 1 : chosen + step);
  });
  const begin = (next) => { [area, chosen, ring] = [next, -1, null]; points.length = 0; };
  return { points, begin };
}
