// Charts: Vega-Lite specifications that Python wrote, with rows from here. Each has a table with the same numbers.

const COLORS = ["#3b7dd8", "#d1601f", "#2b9a66", "#ad50c4", "#c2453c", "#8f6d2f", "#1593a5", "#7d848f"];
const SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-left"];
const DASHES = [[1, 0], [7, 4], [2, 3], [9, 3, 2, 3], [14, 4]];

// A backend looks the same in all charts: color and shape tell eight apart, the dash the next eight.
function lookOf(backend) {
  const place = data.subjects.findIndex((one) => one.name === backend);
  return { color: COLORS[place % COLORS.length], shape: SHAPES[place % SHAPES.length], dash: DASHES[Math.floor(place / COLORS.length) % DASHES.length] };
}

// Draws into `target`; ticks: where the x axis has its ticks; height: where the specification leaves it open.
async function draw(target, name, rows, description, { ticks = null, height = null } = {}) {
  const specification = structuredClone(specifications[name]);
  for (const layer of specification.layer) if (ticks && layer.encoding.x?.axis) layer.encoding.x.axis.values = ticks;
  Object.assign(specification, { datasets: { rows }, description }, height && { height });
  target.style.minHeight ||= "60px";
  const options = { actions: false, ast: true, renderer: "svg", tooltip: { theme: "custom" } };
  const drawn = await window.vegaEmbed(target, specification, options);
  target.setAttribute("role", "group");
  return drawn;
}

function legend(backends) {
  return el("ul", { class: "legend", "aria-label": "Backends in this chart" }, backends.map((backend) => el("li", {}, swatch(lookOf(backend)), backend)));
}

const PATHS = {
  circle: "M16 1a5 5 0 1 0 .01 0z",
  square: "M11.5 1.5h9v9h-9z",
  "triangle-up": "M16 .5l5.5 10h-11z",
  diamond: "M16 0l4.5 6l-4.5 6l-4.5-6z",
  cross: "M14.2 1h3.6v3.2h3.2v3.6h-3.2v3.2h-3.6v-3.2h-3.2v-3.6h3.2z",
  "triangle-down": "M16 11.5l5.5-10h-11z",
  "triangle-left": "M10.5 6l10-5.5v11z",
};

function swatch({ color, shape, dash }) {
  const svg = (tag, properties) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(properties).forEach(([key, value]) => element.setAttribute(key, value));
    return element;
  };
  const image = svg("svg", { width: 32, height: 12, "aria-hidden": "true" });
  image.append(svg("path", { d: "M0 6h32", stroke: color, "stroke-width": 2, "stroke-dasharray": dash.join(" ") }), svg("path", { d: PATHS[shape], fill: color }));
  return image;
}

function numbersOf(caption, table) {
  return el("details", { class: "numbers" }, el("summary", {}, caption), table);
}

// A choice among a few, as radio buttons; or among many, as a list.
function choice(legendText, name, options, chosen, onchange) {
  if (options.length > 4)
    return el("label", { class: "choice" }, `${legendText} `, el("select", { name, onchange: (event) => onchange(event.target.value) },
      options.map(([value, words]) => el("option", { value, selected: value === chosen }, words))));
  return el("fieldset", { class: "choice" }, el("legend", {}, legendText),
    options.map(([value, words]) => el("label", {}, el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => onchange(value) }), words)));
}
