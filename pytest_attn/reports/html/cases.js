// Every judgment with its reason and command, and why the rest did not run.

const allCases = {
  id: "cases",
  title: "All judgments",
  has: (cases) => cases.length > 0,
  draw(cases) {
    if (!cases.length) return [el("p", { class: "nothing" }, "Nothing passes the filters.")];
    const rows = inOrder(inOrder(cases, badness, true), (one) => verdicts[one.verdict].rank, false);
    return [sortableTable({
      caption: "All judgments, worst first", noun: "judgment", rows,
      columns: [
        { title: "verdict", value: (one) => verdicts[one.verdict].rank, cell: (one) => badge(one.verdict) },
        { title: "backend", header: true, value: (one) => one.backend },
        { title: "workload", value: (one) => one.workload.id },
        { title: "question", value: (one) => one.question },
        { title: "direction", value: (one) => one.direction },
        { title: "z", numeric: true, value: (one) => one.z?.[0], cell: (one) => (one.z ? zFigure(one.z[0]) : "-") },
        { title: "p50", numeric: true, value: (one) => (one.latency ? comparedOf(one.latency) : null), cell: (one) => (one.latency ? duration(comparedOf(one.latency)) : "-") },
        { title: "reason", value: (one) => one.reason, cell: reasonAndMore },
      ],
    })];
  },
};

function reasonAndMore(one) {
  const fill = (event) => event.target.open && event.target.children.length === 1 && event.target.append(...detail(one, true).flat().filter(Boolean));
  return el("details", { ontoggle: fill }, el("summary", {}, one.reason || el("span", { class: "quiet" }, "details")));
}

const skips = {
  id: "skipped",
  title: "Skipped, and why",
  has: (cases) => cases.some((one) => one.verdict === "skipped"),
  draw(cases) {
    const skipped = cases.filter((one) => one.verdict === "skipped");
    if (!skipped.length) return [el("p", { class: "nothing" }, "Nothing that is shown was skipped.")];
    const rows = [...grouped(skipped, (one) => one.reason)].map(([reason, found]) => ({ reason, found, backends: [...new Set(found.map((one) => one.backend))].join(", "), workloads: [...new Set(found.map((one) => one.workload.id))] }));
    return [sortableTable({
      caption: "Reasons of skips", noun: "reason", page: 40, rows: inOrder(rows, (row) => -row.found.length, false),
      columns: [
        { title: "reason", header: true, value: (row) => row.reason },
        { title: "backends", value: (row) => row.backends },
        { title: "cases", numeric: true, value: (row) => row.found.length },
        { title: "workloads", value: (row) => row.workloads.length, cell: (row) => (row.workloads.length > 4 ? `${row.workloads.slice(0, 3).join(", ")} and ${row.workloads.length - 3} more` : row.workloads.join(", ")) },
      ],
    })];
  },
};
