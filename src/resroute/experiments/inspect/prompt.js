// One text, token by token.

// weights come as bytes: the root of each, of 255
function unpacked(prompt) {
  if (prompt.bytes) return prompt;
  const text = atob(prompt.weights);
  prompt.bytes = Uint8Array.from(text, (sign) => sign.charCodeAt(0));
  let at = 0;
  for (const site of prompt.sites) {
    site.start = at;
    at += site.sources.length * prompt.tokens.length;
  }
  return prompt;
}

function promptFigure(figure) {
  const runs = data.runs.filter((run) => run.prompt);
  const state = { run: 0, site: 0, show: 0, token: -1 };
  const controls = add(figure, "div", { class: "controls" });
  const bar = add(figure, "div", { class: "controls" });
  const text = add(figure, "div", { class: "tokens", tabindex: 0, role: "group",
    "aria-label": "a text by its tokens: arrow keys walk along them" });
  const output = add(figure, "output");
  const card = add(figure, "div", { class: "maps wide" });
  let spans = [];
  const sites = unique(runs.flatMap((run) => run.prompt.sites.map((site) => site.name)));
  const detailed = runs.some((run) => run.details.length);
  const shows = [
    ["depth it is read from", "layers", (weights, site) =>
      weights.reduce((sum, weight, j) => sum + weight * site.depths[j], 0)],
    ["effective sources", "sources", (weights) =>
      Math.exp(-weights.reduce((sum, w) => sum + (w > 0 ? w * Math.log(w) : 0), 0))],
    ...(detailed ? [["weight on details", "weight", (weights, site, run) =>
      weights.reduce((sum, w, j) => sum + (run.details.includes(site.sources[j]) ? w : 0), 0)]] : []),
    ["weight on the embedding", "weight", (weights, site) =>
      weights.reduce((sum, w, j) => sum + (site.sources[j] === "embedding" ? w : 0), 0)],
    ["loss", "nats", null],
  ];

  function weightsAt(prompt, site, token) {
    const start = site.start + token * site.sources.length;
    const found = site.sources.map((_, j) => (prompt.bytes[start + j] / 255) ** 2);
    const total = found.reduce((a, b) => a + b, 0) || 1;
    return found.map((weight) => weight / total);
  }

  function values(run) {
    const prompt = unpacked(run.prompt), [, , measure] = shows[state.show];
    if (measure === null) return prompt.losses;
    const wanted = prompt.sites.filter((site) => !state.site || site.name === sites[state.site - 1]);
    return prompt.tokens.map((_, token) => {
      const found = wanted.map((site) => measure(weightsAt(prompt, site, token), site, run));
      return found.length ? found.reduce((a, b) => a + b) / found.length : null;
    });
  }

  function choose(token) {
    const run = runs[state.run], prompt = unpacked(run.prompt);
    state.token = (token + prompt.tokens.length) % prompt.tokens.length;
    spans.forEach((span, i) => span.classList.toggle("chosen", i === state.token));
    const sources = unique(prompt.sites.flatMap((site) => site.sources));
    // running sources last, as in the map above
    sources.sort((a, b) => a.startsWith("running") - b.startsWith("running"));
    const map = {
      title: "", rowHeight: 9, sites: prompt.sites.map((site) => site.name), sources,
      details: sources.map((name) => run.details.includes(name)),
      weights: prompt.sites.map((site) => {
        const weights = weightsAt(prompt, site, state.token);
        return sources.map((name) => weights[site.sources.indexOf(name)] ?? null);
      }),
    };
    card.replaceChildren();
    if (!sources.length) return;
    const box = add(card, "div");
    const about = `token ${state.token + 1}, ${JSON.stringify(prompt.tokens[state.token])}`;
    add(box, "h3", {}, about);
    drawMap(box, map, viridis, (i, j) => {
      const weight = map.weights[i][j];
      output.textContent = weight === null
        ? `${map.sites[i]} has no source ${map.sources[j]}`
        : `${map.sites[i]} reads ${weight.toFixed(2)} of ${about} from ${map.sources[j]}`;
    });
  }

  function draw() {
    const run = runs[state.run], found = values(run), [name, unit] = shows[state.show];
    const kept = found.filter((value) => value !== null);
    const [low, high] = [Math.min(...kept), Math.max(...kept)];
    const place = (value) => ((value - low) / (high - low || 1)) ** 2;
    bar.replaceChildren();
    if (kept.length) {
      const svg = add(bar, "svg", { width: 210, height: 30, role: "img", "aria-label": name });
      for (let i = 0; i < 100; i++)
        add(svg, "rect", { x: 5 + 2 * i, width: 2.2, height: 10,
          fill: `rgb(${viridis(((i + 0.5) / 100) ** 2)})` });
      const label = { y: 24, "font-size": 11, fill: "currentColor" };
      add(svg, "text", { ...label, x: 5, "text-anchor": "start" }, low.toFixed(2));
      add(svg, "text", { ...label, x: 205, "text-anchor": "end" }, `${high.toFixed(2)} ${unit}`);
    }
    text.replaceChildren();
    spans = run.prompt.tokens.map((token, i) => {
      const span = add(text, "span", {}, token === "" ? "\u2400" : token.replace(/\n/g, "\u21b5\n"));
      if (found[i] !== null) {
        const [r, g, b] = viridis(place(found[i]));
        span.style.background = `rgb(${r} ${g} ${b})`;
        span.style.color = 0.3 * r + 0.59 * g + 0.11 * b > 128 ? "#000" : "#fff";
      }
      const say = () => {
        const value = found[i] === null ? "not known" : `${found[i].toFixed(3)} ${unit}`;
        const where = state.site && shows[state.show][2] ? `, ${sites[state.site - 1]}` : "";
        output.textContent = `${JSON.stringify(token)}: ${name} ${value}${where}`;
      };
      span.addEventListener("pointerenter", say);
      span.addEventListener("click", () => { choose(i); say(); });
      span.say = say;
      return span;
    });
    choose(state.token < 0 ? Math.floor(run.prompt.tokens.length / 2) : state.token);
    output.textContent = "Point at a token for its number; a click shows all its weights.";
  }

  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(state.token + step);
    spans[state.token].say();
  });
  pick(controls, "Run", runs.map((run) => run.label), state, "run", draw);
  pick(controls, "Colour", shows.map(([name]) => name), state, "show", draw);
  pick(controls, "Site", ["mean of all", ...sites], state, "site", draw);
  redraws.push(draw);
  draw();
}
