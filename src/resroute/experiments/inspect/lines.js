// Charts of lines over depth, over training, and over numbers of vectors.

const KIND_LOOKS = {
  embedding: [0, 0, 0], state: [4, 0, 4], update: [4, 0, 4], "running state": [3, 0, 3],
  "running update": [3, 0, 3], phase: [6, 0, 6], "running phase": [6, 1, 6], split: [5, 0, 5],
  "running split": [5, 1, 5],
};
const both = data.runs.length > 1;
// of names without a look of their own
const otherLook = (i) => [[2, 1, 7][i % 3], Math.floor(i / 3) % DASHES.length, i % MARKS.length];
const kindLook = (name, i) => KIND_LOOKS[name] || otherLook(i);
const siteLook = (place) => [[4, 6, 5, 2, 1][place % 5], 0, [4, 6, 5, 2, 1][place % 5]];
const dashed = ([colour, , shape], dash) => [colour, dash, shape];
const ofRun = (run, name) => (both ? `${name}, ${run.label}` : name);
const kindOf = (source) => source.replace(/ \d+$/, "");
const unique = (values) => [...new Set(values)];

// Draws what `spec` tells at each draw: { x, y, lines }, each line with name, look, x and y; also
// `least` and `most` that the axis must show, and `say` to put a point into words.
function lineFigure(figure, spec, state, build) {
  const controls = add(figure, "div", { class: "controls" });
  const plot = add(figure, "div", {
    class: "plot", tabindex: 0, role: "group",
    "aria-label": `${figure.dataset.title}: arrow keys walk along the points`,
  });
  const keys = add(figure, "div", { class: "legend" });
  const output = add(figure, "output");
  const hidden = new Set();
  let chart = null;
  const walk = walker(plot, ({ line, i }) => {
    output.textContent = chart.say ? chart.say(line, i)
      : `${line.name}: ${short(line.y[i])}, ${chart.x} ${short(line.x[i])}`;
  });

  function drawLine(area, line, x, y) {
    const isShown = (i) => line.y[i] !== null && (!state.logY || line.y[i] > 0);
    const shown = [...line.x.keys()].filter(isShown);
    const at = (i) => [x(line.x[i]), y(line.y[i])];
    let [run, runs] = [[], []];
    // where a site has no such source the line has a hole
    shown.forEach((i, k) => {
      if (k && shown[k - 1] !== i - 1 && line.hasHoles) { runs.push(run); run = []; }
      run.push(at(i));
    });
    for (const points of [...runs, run])
      if (points.length > 1)
        add(area, "path", {
          class: `line c${line.look[0]}`, d: path(points), "stroke-dasharray": DASHES[line.look[1]],
        });
    const every = Math.ceil(shown.length / 16);
    shown.forEach((i, k) => {
      if (shown.length === 1) mark(area, line.look, ...at(i), "mark", 1.7);
      else if (k % every === 0 || k === shown.length - 1) mark(area, line.look, ...at(i));
      walk.points.push({ line, i, at: at(i) });
    });
  }

  function draw() {
    chart = spec();
    const lines = chart.lines.filter((line) => !hidden.has(line.name));
    const xs = chart.lines.flatMap((line) => line.x);
    const kept = lines.flatMap((line) => line.y).filter((v) => v !== null);
    const values = state.logY ? kept.filter((v) => v > 0)
      : [...kept, ...(kept.length ? chart.edges || [] : [])];
    let y = range(values);
    if (chart.edges && !state.logY) y = [Math.max(y[0], Math.min(0, ...kept)), y[1]];
    if (state.logY && values.length) y = [0.8 * Math.min(...values), 1.25 * Math.max(...values)];
    const x = [Math.min(...xs), Math.max(...xs)];
    if (x[0] === x[1]) { x[0] -= 0.5; x[1] += 0.5; }
    const logs = { x: false, y: Boolean(state.logY && values.length) };
    // no marks between layers, or steps
    const whole = ticks(x, false, plot.clientWidth / 62).filter((at) => Number.isInteger(at));
    const drawn = frame(plot, chart, { x, y }, logs, chart.places || whole);
    walk.begin(drawn.area);
    for (const line of lines) drawLine(drawn.area, line, drawn.x, drawn.y);
    legend(keys, chart.lines, hidden, draw);
    output.textContent = "Point at the figure for a value; a click holds it.";
  }

  build(controls, draw);
  redraws.push(draw);
  draw();
}

// weight on each kind of source, over depth
function kindsFigure(figure) {
  const routed = data.runs.filter((run) => run.tables);
  const names = unique(routed.flatMap((run) => Object.keys(run.tables)));
  const siteKinds = unique(routed.flatMap((run) => run.kinds));
  const state = { run: 0, tokens: 0, sites: 1 };
  const places = ["all", ...siteKinds, ...(siteKinds.length > 1 ? ["one against the other"] : [])];

  function lines(run, table, wanted, suffix, dash) {
    const kinds = unique(table.sources.map(kindOf));
    const rows = run.sites.map((site, i) => [site, table.weights[i]])
      .filter(([site, row]) => (wanted === null || site.kind === wanted)
        && row.some((weight) => weight !== null));
    return kinds.map((kind, place) => {
      const columns = table.sources.map((name, j) => (kindOf(name) === kind ? j : -1))
        .filter((j) => j >= 0);
      const sums = rows.map(([, row]) => {
        const found = columns.map((j) => row[j]).filter((weight) => weight !== null);
        return found.length ? found.reduce((a, b) => a + b) : null;
      });
      return {
        name: kind + suffix, look: dashed(kindLook(kind, place), (dash ?? kindLook(kind, place)[1]) % DASHES.length),
        x: rows.map(([site]) => site.depth), y: sums, hasHoles: true,
        sites: rows.map(([site]) => site.name),
      };
    }).filter((line) => line.y.some((value) => value !== null));
  }

  function spec() {
    const place = places[state.sites], isBoth = state.run === routed.length;
    const found = (isBoth ? routed : [routed[state.run]]).flatMap((run, r) => {
      // a text may have no token of the class
      const table = run.tables[names[state.tokens]];
      if (!table) return [];
      const of = isBoth ? `, ${run.label}` : "";
      if (place !== "one against the other")
        return lines(run, table, place === "all" ? null : place, of, isBoth ? r : null);
      const apart = (kind, i) => lines(run, table, kind, ` (${kind})${of}`, i + 2 * r);
      return run.kinds.flatMap(apart);
    });
    return {
      x: "layer", y: "weight", lines: found, edges: [0],
      say: (line, i) => `${line.name}: ${line.y[i].toFixed(3)} of what ${line.sites[i]} reads`,
    };
  }

  lineFigure(figure, spec, state, (controls, draw) => {
    const labels = routed.map((run) => run.label);
    pick(controls, "Run", labels.length > 1 ? [...labels, "both"] : labels, state, "run", draw);
    pick(controls, "Tokens", names, state, "tokens", draw);
    pick(controls, "Sites", places, state, "sites", draw);
  });
}

// one number a site, over depth
function measuresFigure(figure) {
  const names = unique(data.runs.flatMap((run) => run.measures.map((one) => one.name)));
  const state = { measure: 0, logY: false };

  function spec() {
    const found = [];
    let label = "";
    data.runs.forEach((run, dash) => {
      const measure = run.measures.find((one) => one.name === names[state.measure]);
      if (!measure) return;
      label = measure.unit;
      unique(run.sites.map((site) => site.kind)).filter((kind) => kind !== null)
        .forEach((kind, place) => {
          const rows = [...run.sites.keys()].filter((i) => run.sites[i].kind === kind
            && i < measure.values.length && measure.values[i] !== null);
          if (rows.length) found.push({
            name: ofRun(run, kind), look: dashed(siteLook(place), dash),
            x: rows.map((i) => run.sites[i].depth), y: rows.map((i) => measure.values[i]),
          });
        });
    });
    return { x: "layer", y: label, lines: found };
  }

  lineFigure(figure, spec, state, (controls, draw) => {
    pick(controls, "Show", names, state, "measure", draw);
    box(controls, "log scale", state, "logY", draw);
  });
}

// what was logged, over training
function trainingFigure(figure) {
  const names = unique(data.runs.flatMap((run) => run.history.map((one) => one.name)));
  const state = { measure: 0, logY: false };

  function spec() {
    const found = [];
    let label = "";
    data.runs.forEach((run, dash) => {
      const measure = run.history.find((one) => one.name === names[state.measure]);
      if (!measure) return;
      label = measure.unit;
      measure.lines.forEach((line, i) => {
        const known = KIND_LOOKS[kindOf(line.name)];
        const look = dashed(known || otherLook(i), both ? dash : (known || otherLook(i))[1]);
        found.push({ ...line, name: ofRun(run, line.name), look });
      });
    });
    return { x: "step", y: label, lines: found };
  }

  lineFigure(figure, spec, state, (controls, draw) => {
    pick(controls, "Show", names, state, "measure", draw);
    box(controls, "log scale", state, "logY", draw);
  });
}

// how much of a block's updates so many vectors hold
function basesFigure(figure) {
  const names = unique(data.runs.flatMap((run) => run.bases.map((block) => block.name)));
  const sets = unique(data.runs.flatMap((run) => run.bases.slice(0, 1))
    .flatMap((block) => block.sets.map((set) => set.name)));
  const state = { block: 0 };

  function spec() {
    const found = [];
    data.runs.forEach((run, dash) => {
      const block = run.bases.find((one) => one.name === names[state.block]);
      if (!block) return;
      const size = block.pca.length;
      found.push({
        name: ofRun(run, "the best vectors (PCA)"), look: [0, dash, 0], size,
        x: [...block.pca.keys()].map((i) => i + 1), y: block.pca,
      });
      block.sets.forEach((set) => {
        const i = sets.indexOf(set.name);
        const look = [[4, 6, 5, 2, 1, 3][i % 6], dash, (i + 3) % MARKS.length];
        found.push({ name: ofRun(run, set.name), look, size, x: [set.count], y: [set.share] });
      });
    });
    return {
      x: "vectors", y: "share of the updates", lines: found, edges: [0, 1],
      places: unique(found.flatMap((line) => line.x)),
      say: (line, i) => `${line.name}: ${(100 * line.y[i]).toFixed(1)} % of the updates' energy by `
        + `${line.x[i]} of ${line.size} vectors`,
    };
  }

  lineFigure(figure, spec, state, (controls, draw) => {
    pick(controls, "Show", names, state, "block", draw);
  });
}
