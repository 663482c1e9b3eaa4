// What a reader does, by page, then all that can be chosen or pointed at; PAGE is put in.
const found = { page: PAGE, width: window.innerWidth, odd: null, errors: [] };
addEventListener("error", (event) => found.errors.push(event.message));
const figure = (name) => document.querySelector(`figure[data-figure=${name}]`);
const told = (name) => figure(name).querySelector("output").textContent;
const texts = (name, css) => [...figure(name).querySelectorAll(css)].map((one) => one.textContent);
const count = (name, css) => figure(name).querySelectorAll(css).length;
const send = (target, x, y, type) => target.dispatchEvent(
  new PointerEvent(type, { bubbles: true, clientX: x, clientY: y }));
const point = (target, x, y, type = "pointermove") => {
  const box = target.getBoundingClientRect();
  send(target, box.left + x * box.width, box.top + y * box.height, type);
};
const press = (target, key) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const menu = (name, label) => [...figure(name).querySelectorAll("label")]
  .find((one) => one.textContent.startsWith(label)).querySelector("select");
const options = (name, label) => [...menu(name, label).options].map((one) => one.textContent);
const choose = (name, label, text) => {
  const select = menu(name, label);
  select.value = options(name, label).indexOf(text);
  select.dispatchEvent(new Event("change"));
};
// at the middle of a cell of the map in place `k`
const cell = (name, i, j, rows, columns, k = 0) => {
  const image = figure(name).querySelectorAll("image")[k];
  point(image, (j + 0.5) / columns, (i + 0.5) / rows);
  return told(name);
};
const walk = (name, steps) => {
  const plot = figure(name).querySelector(".plot");
  return steps.map((key) => { press(plot, key); return told(name); });
};
const middle = (one) => {
  const box = one.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
};
// where marks of a colour stand, and the lines that mark places along an axis, with their texts
const marks = (name, colour) =>
  [...figure(name).querySelectorAll(`.plot path.mark.c${colour}`)].map(middle);
const lines = (name, way) => {
  const of = (css) => [...figure(name).querySelectorAll(`.plot ${css}`)];
  const grid = of("path.grid").filter((one) => one.getAttribute("d").includes(way));
  const texts = of(`text[text-anchor=${way === "V" ? "middle" : "end"}]`);
  return grid.map((one, i) => [texts[i].textContent, middle(one)[way === "V" ? 0 : 1]]);
};
const seen = () => {
  const odd = document.querySelector("main").innerHTML.match(/NaN|Infinity|undefined/);
  found.odd ??= odd && odd[0];
  found.overflow = Math.max(found.overflow ?? -9999,
    document.documentElement.scrollWidth - window.innerWidth);
};
seen();
found.figures = [...document.querySelectorAll("figure")].map((one) => one.dataset.figure);
found.still = document.querySelectorAll(".static").length;
found.empty = [...document.querySelectorAll("figure")]
  .filter((one) => !one.querySelector(".plot svg, .tokens")).map((one) => one.dataset.figure);

const readers = {
  one() {
    found.tokens = options("depth_weights", "Tokens");
    found.sites = options("depth_weights", "Sites");
    found.steps = options("depth_weights", "Step");
    found.titles = [texts("depth_weights", "h3")];
    found.cells = [cell("depth_weights", 1, 3, 5, 4), cell("depth_weights", 0, 1, 5, 4)];
    choose("depth_weights", "Tokens", "vowel (1,234)");
    found.titles.push(texts("depth_weights", "h3"));
    found.cells.push(cell("depth_weights", 1, 3, 5, 4));
    choose("depth_weights", "Sites", "mlp");
    // one of two rows
    found.cells.push(cell("depth_weights", 1, 0, 2, 4));
    choose("depth_weights", "Step", "10");
    found.titles.push(texts("depth_weights", "h3"));
    found.cells.push(cell("depth_weights", 0, 0, 2, 4));
    choose("depth_weights", "Sites", "all");

    found.kinds = walk("kinds", ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"]);
    choose("kinds", "Sites", "mlp");
    found.kinds.push(...walk("kinds", ["ArrowRight", "ArrowLeft"]));
    choose("kinds", "Tokens", "vowel");
    found.kinds.push(...walk("kinds", ["ArrowLeft"]));
    choose("kinds", "Sites", "one against the other");
    found.apart = texts("kinds", ".legend button");

    const text = figure("prompt").querySelector(".tokens");
    const spans = () => [...text.children];
    found.spans = spans().map((one) => one.textContent);
    found.colours = spans().map((one) => one.style.background);
    const chosen = () => spans().findIndex((one) => one.classList.contains("chosen"));
    found.chosen = [chosen()];
    for (const key of ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"]) {
      press(text, key);
      found.chosen.push(chosen());
    }
    found.reads = [told("prompt")];
    point(spans()[1], 0.5, 0.5, "pointerenter");
    found.reads.push(told("prompt"));
    point(spans()[1], 0.5, 0.5, "click");
    found.head = texts("prompt", "h3");
    found.reads.push(cell("prompt", 0, 0, 2, 4), cell("prompt", 0, 1, 2, 4),
      cell("prompt", 1, 2, 2, 4));
    choose("prompt", "Site", "readout");
    point(spans()[1], 0.5, 0.5, "pointerenter");
    found.reads.push(told("prompt"));
    choose("prompt", "Colour", "loss");
    found.losses = spans().map((one) => {
      point(one, 0.5, 0.5, "pointerenter");
      return told("prompt");
    });
    found.uncoloured = spans().map((one) => one.style.background === "");
    found.shows = options("prompt", "Colour");

    found.bars = [];
    const bars = () => [...figure("importance").querySelectorAll("rect.fill")];
    for (const bar of bars()) { point(bar, 0.5, 0.5); found.bars.push(told("importance")); }
    const heights = () => bars().map((bar) => bar.getBoundingClientRect().height);
    const root = heights();
    figure("importance").querySelector("input").click();
    found.heights = [root[1] / root[0], heights()[1] / heights()[0]];
    found.whiskers = count("importance", ".whisker");
    choose("importance", "Without each", "block");
    point(bars()[0], 0.5, 0.5);
    found.bars.push(told("importance"));
    found.falling = heights();

    choose("measures", "Show", "size of updates");
    found.measures = walk("measures", ["ArrowRight", "ArrowRight"]);
    found.layers = lines("measures", "V").map(([text]) => text);
    choose("measures", "Show", "update beside read");
    found.measures.push(...walk("measures", ["ArrowRight"]));
    choose("training", "Show", "loss");
    found.training = walk("training", ["ArrowRight", "ArrowRight"]);
    found.steps_shown = lines("training", "V").map(([text]) => text);

    found.bases = walk("bases", ["ArrowRight", "ArrowLeft", "ArrowLeft"]);
    choose("bases", "Show", "block 10");
    found.bases.push(...walk("bases", ["ArrowRight"]));
    found.vectors = lines("bases", "V");
    found.shares = lines("bases", "H");
    found.best = marks("bases", 0);
    found.single = [...marks("bases", 4), ...marks("bases", 6)];
    found.widths = [4, 0].map((colour) => figure("bases")
      .querySelector(`.plot path.mark.c${colour}`).getBoundingClientRect().width);

    const table = document.querySelector("#bases table");
    const sorted = (column) => {
      table.tHead.rows[0].cells[column].querySelector("button").click();
      return [...table.tBodies[0].rows].map((row) => row.cells[column].textContent);
    };
    found.sorted = [sorted(2), sorted(2), sorted(5), sorted(0)];
  },
  same() {
    found.titles = [texts("depth_weights", "h3")];
    found.cells = [0, 1, 2].map((k) => cell("depth_weights", 3, 0, 5, 4, k));
    found.cells.push(cell("depth_weights", 1, 3, 5, 4, 2), cell("depth_weights", 0, 1, 5, 4, 2));
    choose("depth_weights", "Tokens", "vowel (1,234)");
    found.titles.push(texts("depth_weights", "h3"));
    choose("depth_weights", "Step", "10");
    found.titles.push(texts("depth_weights", "h3"));
    choose("kinds", "Run", "both");
    found.legend = texts("kinds", ".legend button");
    choose("kinds", "Tokens", "vowel");
    found.legend_of_class = texts("kinds", ".legend button");
    point(figure("importance").querySelector("rect.fill"), 0.5, 0.5);
    found.bar = told("importance");
    // only the first has a mean of blocks
    choose("bases", "Show", "block 0");
    found.bases = [];
    for (const button of figure("bases").querySelectorAll(".legend button"))
      if (button.textContent === "none") button.click();
    for (const run of [0, 1]) {
      const pca = [...figure("bases").querySelectorAll(".legend button")]
        .filter((one) => one.textContent.startsWith("the best vectors"))[run];
      pca.click();
      found.bases.push(...walk("bases", ["ArrowLeft"]));
    }
  },
  real() {
    found.titles = [texts("depth_weights", "h3")];
    choose("prompt", "Run", "Block AttnRes");
    found.runs = options("prompt", "Run");
  },
};
const act = (what) => {
  try { what(); } catch (error) { found.errors.push(`${error} ${error.stack}`); }
};
act(() => readers[PAGE]?.());

// everything that can be chosen, pointed at or pressed
act(() => document.querySelectorAll("figure").forEach((box) => {
  const sweep = () => {
    for (const plot of box.querySelectorAll(".plot"))
      for (const at of [[0.3, 0.2], [0.6, 0.5], [0.95, 0.1]]) point(plot, ...at);
    for (const plot of box.querySelectorAll(".plot, .tokens"))
      for (const key of ["ArrowLeft", "ArrowRight"]) press(plot, key);
    seen();
  };
  for (const input of box.querySelectorAll("input")) { input.click(); sweep(); }
  for (const select of box.querySelectorAll("select"))
    for (const option of select.options) {
      select.value = option.value;
      select.dispatchEvent(new Event("change"));
      sweep();
    }
  for (const input of box.querySelectorAll("input")) { input.click(); sweep(); }
  for (const name of ["none", "all"])
    [...box.querySelectorAll(".legend button")].find((one) => one.textContent === name)?.click();
  sweep();
}));
parent.postMessage(JSON.stringify(found), "*");
