// What a model needs.

// what the loss is without each layer, block or source, beside the weight that is on it
function importanceFigure(figure) {
  const names = unique(data.runs.flatMap((run) => run.importance.map((one) => one.by)));
  const state = { by: 0, isRoot: true };
  const controls = add(figure, "div", { class: "controls" });
  const plot = add(figure, "div", { class: "plot", role: "group" });
  const output = add(figure, "output");

  function panel(svg, top, height, left, width, limits, isRoot, label) {
    const root = (v) => (isRoot ? Math.sign(v) * Math.sqrt(Math.abs(v)) : v);
    const up = scale([root(limits[0]), root(limits[1])], height, false);
    const y = (value) => top + height - up(root(value));
    const steps = isRoot
      ? [0, ...[-3, -2, -1, 0, 1].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power))]
        .flatMap((v) => (v ? [v, -v] : [v]))
      : ticks(limits, false, height / 40);
    let last = null;
    for (const at of steps.filter((v) => v >= limits[0] && v <= limits[1])
      .sort((a, b) => b - a).sort((a, b) => (b === 0) - (a === 0) || Math.abs(b) - Math.abs(a))) {
      if (last !== null && last.some((other) => Math.abs(other - y(at)) < 15)) continue;
      last = [...(last || []), y(at)];
      add(svg, "path", { class: at === 0 ? "axis" : "grid", d: `M${left} ${y(at)}h${width}` });
      const text = minus(String(+at.toPrecision(3)));
      add(svg, "text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, text);
    }
    const turn = `translate(12 ${top + height / 2}) rotate(-90)`;
    add(svg, "text", { transform: turn, "text-anchor": "middle" }, label);
    return y;
  }

  function draw() {
    const known = (one) => one && { ...one, items: one.items.filter((item) => item.change !== null) };
    const found = data.runs.map((run) => known(run.importance.find((one) => one.by === names[state.by])));
    const items = unique(found.flatMap((one) => (one ? one.items.map((item) => item.name) : [])));
    items.sort((a, b) => a.startsWith("running") - b.startsWith("running"));
    const all = found.flatMap((one) => (one ? one.items : []));
    const hasMass = all.some((item) => item.mass !== null);
    plot.replaceChildren();
    const width = plot.clientWidth, left = 62, size = width - left - 8;
    const longest = Math.max(0, ...items.map((name) => name.length));
    const foot = 12 + 6.6 * longest, height = 230, second = hasMass ? 110 : 0;
    const total = height + (hasMass ? second + 26 : 0) + foot + 14;
    const svg = add(plot, "svg", { width, height: total, role: "img",
      "aria-label": `growth of the loss without each ${names[state.by]}` });
    const ends = all.flatMap((item) => [item.change - (item.error || 0),
      item.change + (item.error || 0)]);
    const limits = [Math.min(0, ...ends), Math.max(0, ...ends)];
    if (limits[0] === limits[1]) limits[1] = 1;
    const y = panel(svg, 8, height, left, size, limits, state.isRoot, "growth of the loss, nats");
    const top = height + 26;
    const mass = hasMass && panel(svg, top, second, left, size,
      [0, Math.max(...all.map((item) => item.mass || 0)) * 1.08 || 1], false, "weight");
    const step = size / items.length, wide = Math.min(26, 0.72 * step / found.length);
    const bottom = hasMass ? top + second : height + 8;
    const every = 2 ** Math.max(0, Math.ceil(Math.log2(13 / step)));
    items.forEach((name, i) => {
      const middle = left + (i + 0.5) * step;
      found.forEach((one, r) => {
        const item = one && one.items.find((other) => other.name === name);
        if (!item) return;
        const x = middle + (r - (found.length - 1) / 2) * wide;
        const colour = `c${[4, 6][r]}`, [a, b] = [y(Math.max(item.change, 0)), y(Math.min(item.change, 0))];
        add(svg, "rect", { class: `fill ${colour}`, x: x - 0.45 * wide, width: 0.9 * wide, y: a,
          height: Math.max(b - a, 0.8) });
        if (item.error !== null)
          add(svg, "path", { class: "whisker",
            d: `M${x} ${y(item.change - item.error)}V${y(item.change + item.error)}` });
        if (item.mass !== null) mark(svg, [[4, 6][r], 0, [4, 6][r]], x, mass(item.mass));
      });
      if (i % every === 0)
        add(svg, "text", { "text-anchor": "end",
          transform: `translate(${middle + 4} ${bottom + 8}) rotate(-90)` }, name);
    });
    const index = (event) => Math.floor(
      (event.clientX - plot.getBoundingClientRect().left - left) / step);
    plot.onpointermove = (event) => {
      const name = items[index(event)];
      if (name === undefined) return;
      output.textContent = data.runs.map((run, r) => {
        const item = found[r] && found[r].items.find((other) => other.name === name);
        if (!item) return "";
        const error = item.error === null ? "" : ` \u00b1 ${item.error.toFixed(4)}`;
        const weight = item.mass === null ? "" : `; ${(100 * item.mass).toFixed(1)} % of the weight`;
        const of = both ? `${run.label}: ` : "";
        return `${of}without ${name} the loss is ${signed(item.change, 4)}${error} nats${weight}`;
      }).filter(Boolean).join(". ");
    };
    output.textContent = "Point at a bar for its numbers.";
  }

  pick(controls, "Without each", names, state, "by", draw);
  box(controls, "root scale", state, "isRoot", draw);
  if (both) {
    const keys = add(controls, "span", { class: "legend" });
    data.runs.forEach((run, r) => {
      const key = add(keys, "span");
      add(key, "span", { class: `key c${[4, 6][r]}` });
      key.append(run.label);
    });
  }
  redraws.push(draw);
  draw();
}
