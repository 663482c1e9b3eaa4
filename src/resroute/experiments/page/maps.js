// Maps: what each site takes from each source, as colours.
const VIRIDIS = [[68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140],
  [40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37]];

const viridis = (weight) => {
  const place = Math.sqrt(Math.min(Math.max(weight, 0), 1)) * 8;
  const [low, share] = [Math.min(7, Math.floor(place)), place - Math.min(7, Math.floor(place))];
  return VIRIDIS[low].map((v, i) => Math.round(v + share * (VIRIDIS[low + 1][i] - v)));
};

function picture(map, colour) {
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

function colourBar(controls, places, colour, name) {
  const [low, high] = [places[0], places.at(-1)];
  const root = (v) => Math.sign(v) * Math.sqrt(Math.abs(v));
  const x = scale([root(low), root(high)], 200, false);
  const svg = add(controls, "svg", { width: 210, height: 30, role: "img", "aria-label": name });
  for (let i = 0; i < 100; i++) {
    const at = root(low) + (i + 0.5) / 100 * (root(high) - root(low));
    const fill = `rgb(${colour(at * Math.abs(at))})`;
    add(svg, "rect", { x: 5 + 2 * i, width: 2.2, height: 10, fill });
  }
  places.forEach((at, i) => {
    const anchor = i === 0 ? "start" : i === places.length - 1 ? "end" : "middle";
    const place = { x: 5 + x(root(at)), y: 24, "text-anchor": anchor };
    add(svg, "text", { ...place, "font-size": 11, fill: "currentColor" }, minus(String(at)));
  });
  return svg;
}

const WEIGHTS = [0, 0.05, 0.2, 0.5, 1];

// `say` is told a row and a column that the pointer is at, and `pick` those that are clicked
function drawMap(card, map, colour, say, pick) {
  const plot = add(card, "div", { class: "plot" });
  const [left, top, foot, width] = [84, 8, 108, plot.clientWidth];
  const [rows, columns] = [map.sites.length, map.sources.length];
  const size = { width: width - left - 4, height: Math.min(620, Math.max(150, (map.rowHeight || 5.5) * rows)) };
  const svg = add(plot, "svg", {
    width, height: size.height + foot, role: "img", "aria-label": map.title,
  });
  const area = add(svg, "g", { transform: `translate(${left} ${top})` });
  add(area, "rect", { class: "none", ...size });
  add(area, "image", { href: picture(map, colour), ...size, preserveAspectRatio: "none" });
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
  const at = (act) => (event) => {
    const corner = plot.getBoundingClientRect();
    const j = Math.floor((event.clientX - corner.left - left) / cell.x);
    const i = Math.floor((event.clientY - corner.top - top) / cell.y);
    if (map.weights[i]?.[j] !== undefined) act(i, j);
  };
  plot.addEventListener("pointermove", at(say));
  if (pick) plot.addEventListener("click", at(pick));
}

