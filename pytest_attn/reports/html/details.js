// The panel beside the matrix: what stands behind the cell that was chosen.

const MOST_DETAILS = 12;

function detailsOf(title, cases) {
  const ranked = [...cases].sort((a, b) => verdicts[a.verdict].rank - verdicts[b.verdict].rank || badness(b) - badness(a));
  return [
    el("h3", {}, title),
    el("p", {}, countsOf(cases)),
    el("ul", { class: "cases" }, ranked.slice(0, MOST_DETAILS).map((one) => el("li", {}, detail(one, ranked.length === 1)))),
    ranked.length > MOST_DETAILS ? el("p", { class: "quiet" }, `${plural(ranked.length - MOST_DETAILS, "more judgment")}: use Find, and see All judgments.`) : "",
  ];
}

function countsOf(cases) {
  const counts = [...grouped(cases, (one) => one.verdict)].sort(([a], [b]) => verdicts[a].rank - verdicts[b].rank);
  return counts.flatMap(([verdict, found], i) => [i ? " " : "", badge(verdict, found.length)]);
}

function detail(one, isOpen) {
  const facts = [
    one.z ? `z ${zFigure(one.z[0])} element, ${zFigure(one.z[1])} row, ${zFigure(one.z[2])} head (limits 8, 4, 1.5)${one.worst ? `, worst in ${one.worst}` : ""}` : "",
    one.latency ? `p50 ${duration(one.latency.p50)} (${span(one.latency.interval)}), ${one.latency.mode}` : "",
    one.compile ? `first calls of the compiled kernel took ${digits(one.compile[0], 3)} s, ${plural(one.compile[1], "graph break")}` : "",
    one.is_sampled ? "some rows and keys of a long workload were compared" : "",
  ].filter(Boolean);
  return [
    el("p", { class: "what" }, badge(one.verdict), " ", el("strong", {}, one.workload.id), ` ${one.question}, ${one.direction || "forward"}`),
    one.reason ? el("p", { class: "reason" }, one.reason) : "",
    explanation(one.explanation),
    facts.map((line) => el("p", { class: "quiet" }, line)),
    one.tensors ? el("details", { open: isOpen }, el("summary", {}, `Figures of ${plural(one.tensors.length, "tensor")}`), tensorTable(one)) : "",
    one.command ? command(one.command) : "",
  ];
}

function tensorTable(one) {
  const titles = ["tensor", "z element", "z row", "z head", "z slope", "abs max", "mean abs", "mse", "relative L2", "cosine"];
  const rows = tensorsOf(one).map((tensor) => [
    el("tr", {}, el("th", { scope: "row" }, `${tensor.passed ? "" : "✗ "}${tensor.name}/${tensor.distribution}`),
      TENSOR.map((key) => el("td", { class: "number" }, key.startsWith("z_") ? zFigure(tensor[key]) : digits(tensor[key], key === "cosine" ? 7 : 3)))),
    tensor.passed || !tensor.worst?.length ? "" : el("tr", {}, el("td", { colspan: titles.length, class: "quiet" },
      `worst at [${tensor.worst.join(", ")}]: ${digits(tensor.found)}, exact ${digits(tensor.exact)}, budget ${digits(tensor.budget, 3)}`)),
  ]);
  return scrolling("Figures", el("table", { class: "list" }, el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, rows)));
}
