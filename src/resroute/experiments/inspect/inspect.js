// Figures of inspected models; depth weights are here, the others in files of their own.

// from blue over nothing to red
const diverging = (value) => {
  const share = Math.sqrt(Math.min(Math.abs(value), 1));
  const end = value < 0 ? [0, 90, 181] : [200, 60, 0];
  return [242, 242, 242].map((v, i) => Math.round(v + share * (end[i] - v)));
};
const signed = (value, digits) => (value > 0 ? "+" : "") + minus(value.toFixed(digits));

function ranked(map, i) {
  const found = map.sources.map((name, j) => [map.weights[i][j], name])
    .filter(([weight]) => weight !== null).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]));
  return found.slice(0, 3).map(([weight, name]) => `${name} ${weight.toFixed(3)}`).join(", ");
}

function mapFigure(figure) {
  const routed = data.runs.filter((run) => run.tables);
  const names = unique(routed.flatMap((run) => Object.keys(run.tables)));
  const kinds = unique(routed.flatMap((run) => run.kinds));
  const steps = unique(routed.flatMap((run) => run.past.map((one) => one.step)))
    .sort((a, b) => a - b);
  const state = { tokens: 0, sites: 0, step: steps.length };
  const controls = add(figure, "div", { class: "controls" });
  const output = add(figure, "output");
  const grid = add(figure, "div", { class: "maps wide" });

  function tableOf(run) {
    // earlier checkpoints were looked at without classes of tokens
    const past = run.past.find((one) => one.step === steps[state.step]);
    if (past) return [past, names[0], past.step];
    const name = names[state.tokens] in run.tables ? names[state.tokens] : names[0];
    return [run.tables[name], name, run.step];
  }

  function mapOf(run) {
    const [table, tokens, at] = tableOf(run);
    const kept = [...run.sites.keys()].filter((i) => table.weights[i].some((w) => w !== null)
      && (state.sites === 0 || run.sites[i].kind === kinds[state.sites - 1]));
    const count = table.tokens === undefined ? "" : `, ${table.tokens.toLocaleString("en")} of them`;
    const step = steps.length && at !== null ? `, step ${at}` : "";
    return {
      tokens,
      title: `${both ? `${run.label}: ` : ""}${tokens}${count}${step}`,
      sites: kept.map((i) => run.sites[i].name),
      sources: table.sources,
      details: table.sources.map((name) => run.details.includes(name)),
      weights: kept.map((i) => table.weights[i]), rowHeight: 9,
    };
  }

  const isSame = (a, b) => JSON.stringify([a.tokens, a.sites, a.sources])
    === JSON.stringify([b.tokens, b.sites, b.sources]);

  function draw() {
    grid.replaceChildren();
    // of a model that diverged nothing may be known
    const maps = routed.map(mapOf).filter((map) => map.sites.length);
    const cards = maps.map((map) => [map, viridis, "takes"]);
    if (maps.length === 2 && isSame(...maps))
      cards.push([{
        ...maps[0], title: "second less first",
        weights: maps[1].weights.map((row, i) => row.map((weight, j) => {
          const other = maps[0].weights[i][j];
          return weight === null || other === null ? null : weight - other;
        })),
      }, diverging, "differs by"]);
    const made = cards.map(([map, colour, verb]) => {
      const card = add(grid, "div");
      add(card, "h3", {}, map.title);
      return [card, map, colour, verb];
    });
    for (const [card, map, colour, verb] of made) {
      const isDifference = colour === diverging;
      const say = (i, j) => {
        const weight = map.weights[i][j];
        const value = weight === null ? "has no source"
          : `${verb} ${isDifference ? signed(weight, 3) : weight.toFixed(3)} from`;
        const most = isDifference ? "" : `; most from ${ranked(map, i)}`;
        output.textContent = `${map.sites[i]} ${value} ${map.sources[j]}${most}`;
      };
      drawMap(card, map, colour, say);
    }
    output.textContent = "Point at a map for its numbers.";
  }

  const withCounts = names.map((name) => {
    const found = routed.map((run) => run.tables[name]?.tokens).filter((n) => n !== undefined);
    return found.length ? `${name} (${found.map((n) => n.toLocaleString("en")).join(", ")})` : name;
  });
  pick(controls, "Tokens", withCounts, state, "tokens", draw);
  pick(controls, "Sites", ["all", ...kinds], state, "sites", draw);
  if (steps.length)
    pick(controls, "Step", [...steps.map(String), "the newest"], state, "step", draw);
  colourBar(controls, WEIGHTS, viridis, "weight by colour");
  if (routed.length === 2 && isSame(...routed.map(mapOf)))
    colourBar(controls, [-1, -0.2, 0, 0.2, 1], diverging, "difference by colour");
  redraws.push(draw);
  draw();
}

drawFigures((figure, name) => ({
  depth_weights: mapFigure, kinds: kindsFigure, measures: measuresFigure,
  training: trainingFigure, prompt: promptFigure, importance: importanceFigure, bases: basesFigure,
})[name](figure));
