// Figures of a report besides its charts: differences and maps.
const hidden = new Set();

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

function mapsFigure(figure, panels) {
  const first = data.charts.curves?.panels[data.charts.curves.first].title;
  const state = { panel: Math.max(0, panels.findIndex((panel) => panel.title === first)) };
  const controls = add(figure, "div", { class: "controls" });
  colourBar(controls, WEIGHTS, viridis, "weight by colour");
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
    for (const [card, map] of cards) {
      drawMap(card, map, viridis, (i, j) => {
        const weight = map.weights[i][j];
        const text = weight === null ? "has no source" : `takes ${weight.toFixed(3)} from`;
        tell(output, `${map.title}: ${map.sites[i]} ${text} ${map.sources[j]}`, map.runs);
      });
    }
    output.textContent = "Point at a map for its numbers and runs.";
  }

  choice(controls, panels, state, draw);
  redraws.push(draw);
  draw();
}

