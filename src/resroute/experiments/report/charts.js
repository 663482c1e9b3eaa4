// Charts of lines: learning curves, trends, gaps.

function chartFigure(figure, chart) {
  const isTrend = chart.style === "trend", isCurve = chart.style === "curves";
  const state = { panel: chart.first, logX: chart.isLog, logY: false, end: false, seeds: isTrend,
    training: false };
  const controls = add(figure, "div", { class: "controls" });
  const plot = add(figure, "div", {
    class: "plot", tabindex: 0, role: "group",
    "aria-label": `${figure.dataset.title}: arrow keys walk along the points`,
  });
  const keys = add(figure, "div", { class: "legend" });
  const output = add(figure, "output");
  let area = null;

  function limitsOf(panel, lines) {
    const all = panel.lines.flatMap((line) => line.x);
    const most = Math.max(...all, 1e-9), least = Math.min(...all.filter((v) => v > 0), most);
    const start = isTrend || state.logX ? 0 : state.end ? 2 / 3 : data.start;
    const inside = (v) => v >= start * most && (!state.logX || v > 0);
    const hasBands = isTrend || lines.length <= data.mostBands;
    const means = [], ends = [], others = [];
    for (const line of lines) {
      line.x.forEach((v, i) => {
        if (!inside(v)) return;
        means.push(line.y[i]);
        if (hasBands) ends.push(line.low[i], line.high[i]);
      });
      const drawn = [...(state.seeds ? line.traces : []),
        ...(state.training ? line.training : [])];
      for (const trace of drawn) others.push(...trace.y.filter((_, i) => inside(trace.x[i])));
    }
    if (chart.style === "gap") others.push(0);
    if (panel.floor !== null && isCurve && !state.end) others.push(panel.floor);
    let y = range([...limited(means, ends), ...others]);
    if (state.logY && y[0] <= 0) y = [Math.min(...means, ...others), y[1]];
    if (!isTrend) return { x: state.logX ? [least, most] : [state.end ? 0.66 * most : 0, most], y };
    const margin = 0.1 * (most - least) || 1;
    return { x: state.logX ? [least / 1.25, most * 1.25] : [least - margin, most + margin], y };
  }

  function drawLine(line, x, y, shift, hasBand) {
    const at = (i) => [x(line.x[i]) + shift, y(line.y[i])];
    const shown = [...line.x.keys()].filter((i) => !state.logX || line.x[i] > 0);
    const ends = shown.filter((i) => line.low[i] !== null);
    const colour = `c${line.look[0]}`;
    if (isTrend) {
      for (const i of ends) {
        const d = `M${at(i)[0]} ${y(line.low[i])}V${y(line.high[i])}`;
        add(area, "path", { class: `bar ${colour}`, d });
      }
    } else if (hasBand && ends.length > 1) {
      const d = path([...ends.map((i) => [x(line.x[i]), y(line.low[i])]),
        ...ends.reverse().map((i) => [x(line.x[i]), y(line.high[i])])]);
      add(area, "path", { class: `band ${colour}`, d: d + "Z" });
    }
    const thin = [...(state.seeds ? line.traces : []), ...(state.training ? line.training : [])];
    for (const trace of thin) {
      const found = trace.x.map((v, i) => [x(v) + shift, y(trace.y[i])])
        .filter((_, i) => !state.logX || trace.x[i] > 0);
      if (isTrend) {
        for (const [cx, cy] of found)
          add(area, "circle", { class: `dot ${colour}`, cx, cy, r: 2.4 });
      } else if (found.length) add(area, "path", { class: `thin ${colour}`, d: path(found) });
    }
    if (!shown.length) return;
    add(area, "path", {
      class: `line ${colour}`, d: path(shown.map(at)), "stroke-dasharray": DASHES[line.look[1]],
    });
    const every = Math.ceil(shown.length / 14);
    for (const i of shown) {
      if (i % every === 0 || i === shown.at(-1)) mark(area, line.look, ...at(i));
      if (line.x[i] === line.openFrom)
        add(area, "circle", { class: `open ${colour}`, cx: at(i)[0], cy: at(i)[1], r: 8 });
      walk.points.push({ line, i, at: at(i) });
    }
  }

  function draw() {
    const panel = chart.panels[state.panel];
    const lines = panel.lines.filter((line) => !hidden.has(line.name));
    const places = isTrend && [...new Set(panel.lines.flatMap((l) => l.x))].sort((a, b) => a - b);
    const logs = { x: state.logX, y: state.logY };
    const drawn = frame(plot, chart, limitsOf(panel, lines), logs, places);
    area = drawn.area;
    walk.begin(area);
    const across = (y, css) => add(area, "path", { class: css, d: `M0 ${y}H${drawn.size.width}` });
    if (chart.style === "gap") across(drawn.y(0), "axis");
    if (panel.floor !== null && isCurve && !state.end) {
      across(drawn.y(panel.floor), "floor");
      const text = { x: drawn.size.width, y: drawn.y(panel.floor) - 6, "text-anchor": "end" };
      add(area, "text", text, panel.floorText);
    }
    lines.forEach((line, i) => {
      const shift = isTrend ? 6 * (i - (lines.length - 1) / 2) : 0;
      drawLine(line, drawn.x, drawn.y, shift, lines.length <= data.mostBands);
    });
    legend(keys, panel.lines, hidden, () => redraws.forEach((again) => again()));
    output.textContent = "Point at the figure for a value and its runs; a click holds it.";
  }

  const walk = walker(plot, ({ line, i }) => {
    const ends = line.low[i] === null ? "" : ` (${loss(line.low[i])} .. ${loss(line.high[i])})`;
    const where = `${chart.x} ${short(line.x[i])}`;
    const opened = line.openFrom === null || line.openFrom === undefined ? ""
      : `, open from ${short(line.openFrom)} on`;
    tell(output, `${line.name}: ${loss(line.y[i])}${ends} nats/char, ${where}${opened}`,
      line.runs[i] || line.runs[0]);
  });
  choice(controls, chart.panels, state, draw);
  const lines = chart.panels.flatMap((panel) => panel.lines);
  if (!isTrend) box(controls, "last third", state, "end", draw);
  box(controls, `log ${chart.x}`, state, "logX", draw);
  if (isCurve) box(controls, "log loss", state, "logY", draw);
  if (isCurve && lines.some((line) => line.traces.length > 1))
    box(controls, "single runs", state, "seeds", draw);
  if (lines.some((line) => line.training.length))
    box(controls, "training loss", state, "training", draw);
  redraws.push(draw);
  draw();
}

drawFigures((figure, name) => {
  if (name === "differences") differencesFigure(figure, data.differences);
  else if (name === "depth_weights") mapsFigure(figure, data.maps);
  else chartFigure(figure, data.charts[name]);
});
