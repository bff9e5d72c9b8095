// How near each backend comes to its limits: the distribution of z over every tensor and input distribution.

const compared = (cases) => cases.filter((one) => one.tensors);
const LEAST = 0.01; // where a logarithmic axis begins: an exact result has z 0

const errors = {
  id: "errors",
  title: "Error distributions",
  missing: "Error distributions: check something, with attn.check(fn)",
  has: (cases) => compared(cases).length > 0,
  draw(cases) {
    const byBackend = [...grouped(compared(cases), (one) => one.backend)];
    if (!byBackend.length) return [el("p", { class: "nothing" }, "Nothing that was compared passes the filters.")];
    const rows = byBackend.map(([backend, found]) => ({ backend, tensors: found.flatMap((one) => tensorsOf(one).map((tensor) => ({ tensor, one }))) }));
    if (rows.length === 1 && rows[0].tensors.length === 1) {
      const [{ backend, tensors: [{ tensor, one }] }] = rows;
      const levels = LIMITS.map(([key, level, limit]) => `${zFigure(tensor[key])} in one ${level} (limit ${limit})`).join(", ");
      return [el("p", { class: "lead" }, `${backend}, ${tensor.name} on ${one.workload.id}: z ${levels}.`)];
    }
    const panels = LIMITS.map(([key, level, limit]) => ({ key, level, limit, chart: el("div", { class: "chart" }), rows: rows.map((row) => spreadOf(row, key, limit)) }));
    const rank = new Map(panels[0].rows.map((row) => [row.backend, row.largest]));
    panels.forEach((panel) => panel.rows.sort((a, b) => rank.get(b.backend) - rank.get(a.backend)));
    return [
      el("p", { class: "lead" }, "z is the error divided by its budget, the rounding error that a fault-free kernel typically makes at that element: it looks the same for every shape, dtype and scale. Bars: the middle half of all tensors; whiskers: 5 to 95 %; point: the largest; dashed: the limit. A cross is over it."),
      el("div", { class: "three" }, panels.map((panel) => el("figure", {}, el("figcaption", {}, `in one ${panel.level}, limit ${panel.limit}`), panel.chart))),
      numbersOf("The same as a table", spreadTable(panels)),
      () => Promise.all(panels.map((panel) => draw(panel.chart, "errors", onScale(panel.rows), `z in one ${panel.level}, by backend, limit ${panel.limit}`, { height: 22 * panel.rows.length }))),
    ];
  },
};

function spreadOf({ backend, tensors }, key, limit) {
  const sorted = tensors.filter(({ tensor }) => tensor[key] !== null && !Number.isNaN(tensor[key])).sort((a, b) => a.tensor[key] - b.tensor[key]);
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))]?.tensor[key] ?? 0;
  const last = sorted.at(-1);
  const where = last ? `${last.tensor.name}/${last.tensor.distribution}, ${last.one.workload.id}` : "";
  return { backend, limit, number: tensors.length, p5: at(0.05), p25: at(0.25), p50: at(0.5), p75: at(0.75), p95: at(0.95), largest: at(1), middle: zFigure(at(0.5)), most: zFigure(at(1)), where };
}

// What a logarithmic axis cannot show stands at its end: zero at the left, the infinite ten times beyond the rest.
function onScale(rows) {
  const figures = ["p5", "p25", "p50", "p75", "p95", "largest"];
  const finite = rows.flatMap((row) => [row.limit, ...figures.map((key) => row[key])]).filter(Number.isFinite);
  const most = Math.max(...finite) * 10;
  const clamp = (value) => (Number.isFinite(value) ? Math.max(LEAST, value) : most);
  return rows.map((row) => ({ ...row, ...Object.fromEntries(figures.map((key) => [key, clamp(row[key])])) }));
}

function spreadTable(panels) {
  const at = (panel, backend) => panel.rows.find((row) => row.backend === backend);
  return sortableTable({
    caption: "z by backend: median and largest, over element, row and head", noun: "backend", rows: panels[0].rows.map((row) => row.backend),
    columns: [
      { title: "backend", header: true, value: (backend) => backend },
      { title: "tensors", numeric: true, value: (backend) => at(panels[0], backend).number },
      ...panels.flatMap((panel) => [
        { title: `${panel.level}, median`, numeric: true, value: (backend) => at(panel, backend).p50, cell: (backend) => at(panel, backend).middle },
        { title: `${panel.level}, largest (limit ${panel.limit})`, numeric: true, value: (backend) => at(panel, backend).largest, cell: (backend) => `${at(panel, backend).largest > panel.limit ? "✗ " : ""}${at(panel, backend).most}` },
      ]),
      { title: "largest in", value: (backend) => at(panels[0], backend).where },
    ],
  });
}
