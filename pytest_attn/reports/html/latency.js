// Times: against sequence length, against each other, against what was recorded.

const directionOf = (one) => one.direction || "forward";

// Workloads that differ in their length only are one curve.
function familyOf(one) {
  const w = one.workload;
  if (!w.kv_len) return null;
  const grouping = w.heads === w.kv_heads ? `${w.heads} heads` : `${w.heads}/${w.kv_heads} heads`;
  const queries = w.q_len === w.kv_len ? "" : `, ${w.q_len} queries`;
  const mask = w.mask ? `, ${w.mask}` : "";
  return `${w.group || "own workloads"}: batch ${w.batch}, ${grouping}, head_dim ${w.head_dim}${w.v_head_dim === w.head_dim ? "" : `/${w.v_head_dim}`}, ${w.dtype}${queries}${mask}; ${directionOf(one)}`;
}

function familiesOf(cases) {
  const families = [...grouped(cases.filter((one) => isTimed(one) && familyOf(one)), familyOf)];
  const size = (found) => new Set(found.map((one) => one.workload.kv_len)).size;
  return families.filter(([, found]) => size(found) > 1).sort(([, a], [, b]) => size(b) * 1000 + b.length - size(a) * 1000 - a.length);
}

const curve = {
  id: "curve",
  title: "p50 against sequence length",
  missing: "p50 against sequence length: time workloads that differ in their length only, such as attn.measure on --attn-workloads=flux",
  has: (cases) => familiesOf(cases).length > 0,
  family: null,
  scale: null,
  draw(cases) {
    const families = familiesOf(cases);
    if (!families.length) return [el("p", { class: "nothing" }, "Nothing timed at two lengths passes the filters.")];
    const [family, found] = families.find(([name]) => name === this.family) ?? families[0];
    const set = (key) => (value) => { this[key] = value; redraw(this); };
    const rows = found.map(pointOf).sort((a, b) => a.length - b.length);
    const backends = [...new Set(rows.map((row) => row.backend))];
    const chart = el("div", { class: "chart" });
    const ticks = [...new Set(rows.map((row) => row.length))];
    const scale = this.scale ?? (rows.some((row) => row.p50 > 8 * rows[0].p50) ? "log" : "linear");
    const about = `p50 against sequence length of ${backends.length} backends, ${family}`;
    return [
      el("p", { class: "lead" }, "Lower is faster. Bars are intervals of the p50; most are smaller than their point."),
      el("div", { class: "choices" },
        el("label", { class: "choice" }, "Workloads ", el("select", { onchange: (event) => set("family")(event.target.value) }, families.map(([name]) => el("option", { value: name, selected: name === family }, name)))),
        choice("Scale", "scale", [["linear", "linear"], ["log", "log"]], scale, set("scale"))),
      legend(backends), chart,
      numbersOf("The same as a table", timesByLength(rows, backends, ticks, about)),
      () => draw(chart, `latency-${scale}`, rows, about, { ticks }),
    ];
  },
};

function pointOf(one) {
  const [low, high] = one.latency.interval;
  const shown = { time: duration(one.latency.p50), interval: span([low, high]) };
  return { backend: one.backend, workload: one.workload.id, length: one.workload.kv_len, p50: one.latency.p50, low, high, ...shown, ...lookOf(one.backend) };
}

function timesByLength(rows, backends, lengths, caption) {
  const at = (backend, length) => rows.find((row) => row.backend === backend && row.length === length);
  return sortableTable({
    caption, noun: "backend", rows: backends,
    columns: [{ title: "backend", value: (backend) => backend, header: true },
      ...lengths.map((length) => ({ title: String(length), numeric: true, value: (backend) => at(backend, length)?.p50, cell: (backend) => at(backend, length)?.time ?? "-" }))],
  });
}

// -- against each other ----------------------------------------------------------------------------------------------------

// Rows of timed workload and direction, each with what its backends took against the fastest that is exact and right.
function racesOf(cases) {
  const wrong = new Set(cases.filter((one) => ["mismatch", "no result", "raised", "broken"].includes(one.verdict)).map((one) => `${one.backend}\n${one.workload.id}`));
  const approximate = new Set(cases.filter((one) => one.verdict === "approximate").map((one) => one.backend));
  const timed = cases.filter((one) => isTimed(one) && !wrong.has(`${one.backend}\n${one.workload.id}`));
  const races = [...grouped(timed, (one) => `${one.workload.id}\n${directionOf(one)}`).values()];
  return races.map((found) => raceOf(found, approximate)).filter((race) => race.times.size > 1);
}

function raceOf(found, approximate) {
  const entries = new Map();
  for (const one of found) if (!entries.has(one.backend) || one.latency.p50 < entries.get(one.backend).p50) entries.set(one.backend, { p50: one.latency.p50, interval: one.latency.interval, isApproximate: approximate.has(one.backend) });
  const exact = [...entries].filter(([, entry]) => !entry.isApproximate);
  const [fastest, best] = (exact.length ? exact : [...entries]).reduce((a, b) => (b[1].p50 < a[1].p50 ? b : a));
  const times = new Map([...entries].map(([backend, { p50, interval: [low, high], isApproximate }]) => {
    const ratio = [p50 / best.p50, low / best.interval[1], high / best.interval[0]];
    return [backend, { p50, ratio, isApproximate, isFastest: backend === fastest, isTie: backend !== fastest && low <= best.interval[1] && high >= best.interval[0] }];
  }));
  return { workload: found[0].workload.id, direction: directionOf(found[0]), fastest, best, times };
}

const race = {
  id: "speed",
  title: "Speed-up",
  missing: "Speed-up: time two or more backends on a workload, with attn.measure(attn_backend)",
  has: (cases) => racesOf(cases).length > 0,
  draw(cases) {
    const races = racesOf(cases);
    if (!races.length) return [el("p", { class: "nothing" }, "No workload with two timed backends passes the filters.")];
    const backends = [...new Set(races.flatMap((one) => [...one.times.keys()]))];
    return [
      el("p", { class: "lead" }, "How many times as long as the fastest right backend (1.00×). Small: the range that both intervals allow. ", el("b", {}, "tie"), ": the intervals overlap. ", el("b", {}, "≈"), ": approximate, never the measure of others."),
      sortableTable({
        caption: "p50 relative to the fastest right backend", noun: "row", page: 50, rows: races,
        columns: [
          { title: "workload", header: true, value: (one) => one.workload },
          { title: "direction", value: (one) => one.direction },
          { title: "fastest", value: (one) => one.fastest, cell: (one) => [el("strong", {}, one.fastest), el("small", {}, duration(one.best.p50))] },
          ...backends.map((backend) => ({ title: backend, numeric: true, value: (one) => one.times.get(backend)?.ratio[0], cell: (one) => ratioCell(one.times.get(backend)) })),
        ],
      }),
    ];
  },
};

function ratioCell(entry) {
  if (!entry) return "-";
  const [ratio, low, high] = entry.ratio;
  const text = `${entry.isApproximate ? "≈ " : ""}${ratio.toFixed(2)}×`;
  if (entry.isFastest) return [el("b", {}, text), el("small", {}, "fastest")];
  return [entry.isTie ? el("b", {}, text) : text, el("small", {}, entry.isTie ? "tie" : `${low.toFixed(2)} to ${high.toFixed(2)}`)];
}

// -- against what was recorded -----------------------------------------------------------------------------------------------

const recordedCases = (cases) => cases.filter((one) => isTimed(one) && one.latency.baseline?.p50?.length);

const past = {
  id: "history",
  title: "p50 against the baseline's history",
  missing: 'p50 against history: record baselines with --attn-update-baselines "first recording"',
  has: (cases) => recordedCases(cases).length > 0,
  chosen: null,
  draw(cases) {
    const found = inOrder(recordedCases(cases), (one) => verdicts[one.verdict].rank * 10 - Math.min(9, changeOf(one) ?? 0), false);
    if (!found.length) return [el("p", { class: "nothing" }, "Nothing with a baseline passes the filters.")];
    const chosen = found.find((one) => one.index === this.chosen) ?? found[0];
    const show = (one) => { this.chosen = one.index; redraw(this); };
    const chart = el("div", { class: "chart" });
    const rows = historyRows(chosen);
    const about = `p50 of ${nameOf(chosen)} over its recordings`;
    return [
      el("p", { class: "lead" }, "Blue: the medians that were recorded; the band is what the processes of the last recording spread over, the ticks are those processes. Orange: this run, with its interval."),
      el("h3", {}, `${nameOf(chosen)} `, badge(chosen.verdict)),
      chosen.reason ? el("p", { class: "reason" }, chosen.reason) : "",
      chart,
      sortableTable({
        caption: "Every timed case against its baseline", noun: "case", page: 25, rows: found,
        columns: [
          { title: "case", header: true, value: nameOf, cell: (one) => el("button", { type: "button", class: "link", "aria-pressed": String(one === chosen), onclick: () => show(one) }, nameOf(one)) },
          { title: "verdict", value: (one) => verdicts[one.verdict].rank, cell: (one) => badge(one.verdict) },
          { title: "change", numeric: true, value: changeOf, cell: (one) => (changeOf(one) === null ? "-" : signed(changeOf(one))) },
          { title: "95 % interval", numeric: true, cell: (one) => one.latency.decision.interval?.map((bound) => signed(number(bound))).join(" to ") ?? "-" },
          { title: "would find", numeric: true, value: (one) => number(one.latency.decision.detectable), cell: (one) => (one.latency.decision.detectable ? percent(number(one.latency.decision.detectable)) : "-") },
          { title: "p50", numeric: true, value: (one) => comparedOf(one.latency), cell: (one) => duration(comparedOf(one.latency)) },
          { title: "recorded", numeric: true, value: (one) => medianOf(one.latency.baseline.p50), cell: (one) => duration(medianOf(one.latency.baseline.p50)) },
          { title: "on", numeric: true, value: (one) => one.latency.baseline.date },
          { title: "recordings", numeric: true, value: (one) => one.latency.baseline.history.length },
        ],
      }),
      () => draw(chart, "history", rows, about),
    ];
  },
};

const changeOf = (one) => number(one.latency.decision.change) ?? null;

function historyRows(one) {
  const { baseline, p50, interval } = one.latency;
  const recordings = baseline.history.length ? baseline.history : [[baseline.date, medianOf(baseline.p50), baseline.reason]];
  const days = grouped(recordings, ([date]) => date);
  const whenOf = ([date], i) => (days.get(date).length > 1 ? `${date} #${i + 1}` : date);
  const last = whenOf(recordings.at(-1), recordings.length - 1);
  return [
    { kind: "band", low: Math.min(...baseline.p50), high: Math.max(...baseline.p50) },
    ...recordings.map((row, i) => ({ kind: "recorded", what: "recorded median", when: whenOf(row, i), p50: row[1], time: duration(row[1]), reason: row[2] })),
    ...baseline.p50.map((seconds) => ({ kind: "run", what: "one recorded process", when: last, p50: seconds, time: duration(seconds), reason: baseline.reason })),
    ...(one.latency.decision.runs ?? []).map((seconds) => ({ kind: "run", what: "new process of this run", when: "this run", p50: seconds, time: duration(seconds), reason: "" })),
    { kind: "now", what: "this run", when: "this run", p50, low: interval[0], high: interval[1], time: duration(p50), reason: one.reason },
  ];
}
