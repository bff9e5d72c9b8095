// The judgments of the run, from the JSON in the page, and which of them are shown.

const data = JSON.parse(byId("data").textContent);
const specifications = JSON.parse(byId("charts").textContent);

const verdicts = {};
data.verdicts.forEach(([name, word, glyph, tone], rank) => {
  const place = ["bad", "doubt", "good", "plain", "none"].indexOf(tone);
  verdicts[name] = { name, word, glyph, tone, rank: place * 100 + rank };
});

const number = (value) => (typeof value === "string" ? Number(value) : value); // "Infinity" and "NaN", which JSON has no word for
const text = (index) => data.texts[index];
const TENSOR = ["z_element", "z_row", "z_head", "z_slope", "absmax", "mean_abs", "mse", "relative_l2", "cosine"];
const LIMITS = [["z_element", "element", 8], ["z_row", "row", 4], ["z_head", "head", 1.5]];

function tensorOf([name, distribution, passed, ...rest]) {
  const figures = rest.slice(0, TENSOR.length).map(number);
  const [worst, found, exact, budget] = rest.slice(TENSOR.length);
  const failed = passed ? {} : { worst, found: number(found), exact: number(exact), budget: number(budget) };
  return { name: text(name), distribution: text(distribution), passed: Boolean(passed), ...failed, ...Object.fromEntries(TENSOR.map((key, i) => [key, figures[i]])) };
}

function caseOf(row, index) {
  const one = { index };
  data.fields.forEach((field, place) => (one[field] = row[place] ?? 0));
  for (const field of ["question", "verdict", "direction", "reason", "test", "command"]) one[field] = text(one[field]);
  one.workload = data.workloads[one.workload];
  one.backend = data.subjects[one.subject].name;
  one.explanation = (one.explanation || []).map((line) => line.map(text));
  one.z = one.z ? one.z.map(number) : null;
  one.worst = one.worst ? one.worst.map(text).join("/") : "";
  return one;
}

const callsOf = (one) => (one.calls || []).map(([module, asks, tensor, passed, z]) => ({ module: text(module), asks: text(asks), tensor: text(tensor), passed: Boolean(passed), z: z ? z.map(number) : null }));
const tensorsOf = (one) => (one.tensors ? one.tensors.map(tensorOf) : []);
const everyCase = data.cases.map(caseOf);
const state = { machine: 0, text: "", hidden: new Set(), verdict: "", direction: "" };

const casesOfMachine = () => everyCase.filter((one) => one.machine === state.machine);

function shownCases() {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  return casesOfMachine().filter(
    (one) =>
      !state.hidden.has(one.backend) &&
      (!state.verdict || one.verdict === state.verdict) &&
      (!state.direction || one.direction === state.direction) &&
      words.every((word) => searchable(one).includes(word)),
  );
}

function searchable(one) {
  one.searched ??= [one.backend, one.workload.id, one.workload.group, ...one.workload.aliases, one.test, one.reason, ...one.explanation.flat(), one.question, verdicts[one.verdict].word].join(" ").toLowerCase();
  return one.searched;
}

const gravest = (cases) => cases.reduce((worst, one) => (verdicts[one.verdict].rank < verdicts[worst.verdict].rank ? one : worst));

function grouped(cases, keyOf) {
  const found = new Map();
  for (const one of cases) {
    const key = keyOf(one);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(one);
  }
  return found;
}

// Operations and bytes of a case's direction: those of both passes where both were timed.
function workOf(one) {
  const passes = one.direction === "forward+backward" ? ["forward", "backward"] : [one.direction];
  const sum = (totals) => (totals ? passes.reduce((all, pass) => all + totals[pass], 0) : 0);
  return { flops: sum(one.workload.flops), bytes: sum(one.workload.bytes) };
}

function medianOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

// The p50 that was compared: of new processes, where these decided; as a terminal has it.
const comparedOf = (latency) => medianOf(latency.decision.runs ?? [latency.p50]);

const isTimed = (one) => Boolean(one.latency) && one.verdict !== "raised";
const nameOf = (one) => `${one.backend} on ${one.workload.id}, ${one.direction || "forward"}`;
