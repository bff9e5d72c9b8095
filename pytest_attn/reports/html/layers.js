// Attention calls within models: a table per model, a row per layer, a column per backend.

const layers = {
  id: "layers",
  title: "Layers of models",
  has: (cases) => cases.some((one) => one.calls),
  draw(cases) {
    const found = cases.flatMap((one) => callsOf(one).map((call) => ({ ...call, backend: one.backend, model: one.workload.id })));
    if (!found.length) return [el("p", { class: "nothing" }, "No model that was checked passes the filters.")];
    const worst = found.reduce(nearer);
    return [
      el("p", { class: "lead" }, `Each cell is the largest z of a layer's attention calls, each judged on its own tensors, and the tensor that has it. Nearest to its limits: ${worst.backend} in ${worst.model}, ${worst.module}: ${levelOf(worst)}.`),
      [...grouped(found, (call) => call.model)].map(([model, calls]) => layerTable(model, calls)),
    ];
  },
};

// What could not be compared has no z, and is over every limit.
const excessOf = (call) => (call.z ? Math.max(...LIMITS.map(([, , limit], i) => (Number.isFinite(call.z[i]) ? call.z[i] / limit : Infinity))) : Infinity);
const nearer = (one, other) => (!other.passed - !one.passed || excessOf(other) - excessOf(one)) > 0 ? other : one;
const levelOf = (call) => `${call.passed ? "" : "✗ "}${call.z ? `${zFigure(call.z[0])} ${call.tensor}` : "not compared"}`;

function layerTable(model, calls) {
  const backends = [...new Set(calls.map((call) => call.backend))];
  const rows = [...grouped(calls, (call) => call.module)].map(([module, mine]) => {
    const byBackend = new Map([...grouped(mine, (call) => call.backend)].map(([backend, same]) => [backend, same.reduce(nearer)]));
    return { module, asks: [...new Set(mine.map((call) => call.asks))].join(", "), byBackend };
  });
  const columns = backends.map((backend) => ({
    title: backend, numeric: true,
    value: (row) => row.byBackend.get(backend)?.z?.[0],
    cell: (row) => (row.byBackend.has(backend) ? levelOf(row.byBackend.get(backend)) : "-"),
  }));
  return sortableTable({
    caption: `Layers of ${model}`, noun: "layer", rows,
    columns: [{ title: "layer", header: true, value: (row) => row.module }, { title: "workload", value: (row) => row.asks }, ...columns],
  });
}
