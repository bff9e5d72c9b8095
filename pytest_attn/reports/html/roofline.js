// How much of the device each case reached, and which kernels did the work.

const roofline = {
  id: "roofline",
  title: "Roofline",
  missing: "Roofline: time something, with attn.measure(fn); --attn-profile adds the ceilings",
  has: (cases) => cases.some((one) => isTimed(one) && workOf(one).flops),
  draw(cases) {
    const timed = cases.filter((one) => isTimed(one) && workOf(one).flops && workOf(one).bytes);
    if (!timed.length) return [el("p", { class: "nothing" }, "Nothing timed passes the filters.")];
    const ceilings = ceilingsOf(casesOfMachine());
    const points = timed.map((one) => rooflinePoint(one, ceilings));
    if (points.length === 1) { // a plot of one point says less than its words
      const [{ backend, workload, rate, intensity, share }] = points;
      return [el("p", { class: "lead" }, `${backend} on ${workload}: ${rate} at ${digits(intensity, 3)} FLOP per byte, ${share === "not known" ? "the ceiling is not known: --attn-profile measures it" : `${share} of the ceiling`}.`)];
    }
    const dtypes = new Set(points.map((point) => point.dtype));
    const roofs = [...ceilings].filter(([dtype]) => dtypes.has(dtype)).flatMap(([dtype, found]) => roofOf(dtype, found, points));
    const chart = el("div", { class: "chart" });
    const backends = [...new Set(points.map((point) => point.backend))];
    return [
      el("p", { class: "lead" }, roofs.length
        ? "Gray: the ceilings that --attn-profile measured on this device (a large matrix product, a large copy), as far as this run's workloads give them away. A point may lie above its ceiling where data stayed in a cache, or a kernel computes with fewer bits."
        : "The ceilings of this device are not known: --attn-profile measures them. Points show FLOP/s against FLOP per byte, as the workload needs them."),
      legend(backends), chart,
      numbersOf("The same as a table", sortableTable({
        caption: "FLOP/s of each timed case", noun: "case", rows: points,
        columns: [
          { title: "case", header: true, value: (point) => `${point.backend} on ${point.workload}` },
          { title: "FLOP per byte", numeric: true, value: (point) => point.intensity, cell: (point) => digits(point.intensity, 3) },
          { title: "reached", numeric: true, value: (point) => point.achieved, cell: (point) => point.rate },
          { title: "of the ceiling", numeric: true, value: (point) => point.part, cell: (point) => point.share },
          { title: "p50", numeric: true, value: (point) => point.p50, cell: (point) => point.time },
        ],
      })),
      () => draw(chart, "roofline", [...roofs, ...points], `Roofline: FLOP/s against arithmetic intensity of ${points.length} cases`),
    ];
  },
};

// dtype -> intensity -> FLOP/s that the device allows there
function ceilingsOf(cases) {
  const found = new Map();
  for (const one of cases)
    for (const profile of one.profiles || []) {
      const bytes = one.workload.bytes?.[profile.direction];
      if (!profile.roofline || !profile.flops || !bytes) continue;
      if (!found.has(one.workload.dtype)) found.set(one.workload.dtype, new Map());
      found.get(one.workload.dtype).set(profile.flops / bytes, profile.flops / profile.roofline);
    }
  return found;
}

// A ceiling is min(peak, bandwidth x intensity): cases on both sides of the bend give it away exactly.
function roofOf(dtype, found, points) {
  const known = [...found].sort(([a], [b]) => a - b);
  const peak = Math.max(...known.map(([, rate]) => rate));
  const bandwidth = Math.max(...known.map(([intensity, rate]) => rate / intensity));
  const bend = peak / bandwidth;
  const isBent = known[0][0] < bend * 0.999 && bend * 1.001 < known.at(-1)[0];
  const ends = points.filter((point) => point.dtype === dtype).map((point) => point.intensity).concat(bend, known.map(([intensity]) => intensity));
  const line = isBent ? [Math.min(...ends), bend, Math.max(...ends)].map((x) => [x, Math.min(peak, bandwidth * x)]) : known;
  const rows = line.map(([intensity, achieved]) => ({ kind: "roof", dtype, intensity, achieved, label: "" }));
  rows[isBent ? 1 : 0].label = `${dtype} ceiling`;
  return rows;
}

function rooflinePoint(one, ceilings) {
  const { flops, bytes } = workOf(one);
  const intensity = flops / bytes;
  const achieved = flops / one.latency.p50;
  const allowed = ceilings.get(one.workload.dtype)?.get(intensity);
  const shown = { rate: flopRate(achieved), share: allowed ? percent(achieved / allowed, 0) : "not known", time: duration(one.latency.p50) };
  return { kind: "case", dtype: one.workload.dtype, backend: one.backend, workload: `${one.workload.id}, ${directionOf(one)}`, intensity, achieved, part: allowed ? achieved / allowed : null, p50: one.latency.p50, ...shown, ...lookOf(one.backend) };
}

// -- kernels -----------------------------------------------------------------------------------------------------------------

const kernels = {
  id: "kernels",
  title: "Kernels of each case",
  missing: "Kernels of each case: --attn-profile",
  has: (cases) => cases.some((one) => one.profiles),
  draw(cases) {
    const found = new Map();
    for (const one of cases) for (const profile of one.profiles || []) if (!found.has(`${nameOf({ ...one, direction: profile.direction })}`)) found.set(nameOf({ ...one, direction: profile.direction }), { one, profile });
    const rows = [...found].map(([name, entry]) => ({ name, ...entry }));
    if (!rows.length) return [el("p", { class: "nothing" }, "Nothing profiled passes the filters.")];
    return [
      el("p", { class: "lead" }, "What was really launched, by torch's profiler; open a case for its kernels."),
      sortableTable({
        caption: "Kernels by case", noun: "case", page: 25, rows,
        columns: [
          { title: "case", header: true, value: (row) => row.name, cell: (row) => kernelList(row) },
          { title: "launches", numeric: true, value: (row) => row.profile.launches.reduce((sum, [, calls]) => sum + calls, 0) },
          { title: "device time", numeric: true, value: (row) => row.profile.seconds, cell: (row) => duration(row.profile.seconds) },
          { title: "reached", numeric: true, value: (row) => row.profile.flops / row.profile.seconds, cell: (row) => (row.profile.seconds ? flopRate(row.profile.flops / row.profile.seconds) : "-") },
          { title: "of the roofline", numeric: true, value: (row) => row.profile.roofline && row.profile.roofline / row.profile.seconds, cell: (row) => (row.profile.roofline && row.profile.seconds ? percent(row.profile.roofline / row.profile.seconds, 0) : "-") },
          { title: "peak memory", numeric: true, value: (row) => row.profile.peak_memory, cell: (row) => mebibytes(row.profile.peak_memory) },
        ],
      }),
    ];
  },
};

function kernelList({ name, profile }) {
  const fill = (event) => event.target.open && event.target.children.length === 1 && event.target.append(kernelTable(name, profile));
  return el("details", { ontoggle: fill }, el("summary", {}, name));
}

function kernelTable(name, profile) {
  const titles = ["framework", "category", "architecture", "operation", "calls", "time", "share", "symbol"];
  const rows = profile.launches.map(([index, calls, seconds]) => {
    const [framework, category, architecture, operation, symbol] = data.launches[index];
    return el("tr", {}, [framework, category, architecture, operation].map((word) => el("td", {}, word || "-")),
      [String(calls), duration(seconds), profile.seconds ? percent(seconds / profile.seconds) : "-"].map((figure) => el("td", { class: "number" }, figure)), el("td", { class: "symbol" }, symbol));
  });
  return el("table", { class: "list", "aria-label": `Kernels of ${name}` }, el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, rows));
}
