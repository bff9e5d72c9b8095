// What is wrong, first and in full; then what could not be decided.

const problems = {
  id: "wrong",
  title: "What is wrong",
  has: () => true,
  draw(cases) {
    const bad = cases.filter((one) => verdicts[one.verdict].tone === "bad");
    const doubtful = cases.filter((one) => verdicts[one.verdict].tone === "doubt");
    const nothing = el("p", { class: "nothing" }, cases.length ? "Nothing that is shown is wrong." : "Nothing passes the filters.");
    return [
      bad.length ? findings(bad) : nothing,
      ...(doubtful.length ? [el("h3", {}, "To look at: neither right nor wrong"), findings(doubtful)] : []),
    ];
  },
};

const MOST_FINDINGS = 12;

// One entry per backend, verdict and kind of reason: five hundred cases of one fault are one finding.
function findings(cases) {
  const found = [...grouped(cases, (one) => [one.verdict, one.backend, kindOf(one.reason)].join("\n")).values()];
  const most = (some) => Math.max(...some.map(badness));
  found.sort((a, b) => verdicts[a[0].verdict].rank - verdicts[b[0].verdict].rank || b.length - a.length || most(b) - most(a));
  const list = el("ol", { class: "findings" }, found.slice(0, MOST_FINDINGS).map(finding));
  const rest = found.slice(MOST_FINDINGS);
  if (!rest.length) return list;
  const button = el("button", { type: "button", onclick: () => { list.append(...rest.map(finding)); button.remove(); } }, `Show ${plural(rest.length, "more finding")}`);
  return el("div", {}, list, button);
}

const kindOf = (reason) => reason.replace(/[-+]?\d[\d.,]*(e[-+]?\d+)?%?/gi, "#").slice(0, 120);

function finding(cases) {
  const first = cases.reduce((worst, one) => (badness(one) > badness(worst) ? one : worst));
  const others = cases.filter((one) => one !== first);
  return el("li", {},
    el("p", { class: "what" }, badge(first.verdict), " ", el("strong", {}, first.backend), ` on ${first.workload.id}`, first.direction ? `, ${first.direction}` : "",
      others.length ? el("span", { class: "quiet" }, ` and ${plural(others.length, "more case")} like it`) : ""),
    first.reason ? el("p", { class: "reason" }, first.reason) : "",
    explanation(first.explanation),
    command(first.command),
    others.length ? el("details", {}, el("summary", {}, others.length > 1 ? `The other ${others.length} cases` : "The other case"), el("ul", {}, others.slice(0, 50).map((one) => el("li", {}, `${one.workload.id}, ${one.direction}: `, el("span", { class: "quiet" }, one.reason)))),
      others.length > 50 ? el("p", { class: "quiet" }, `${others.length - 50} more under All judgments`) : "") : "");
}

const badness = (one) => (one.z ? one.z[0] : one.latency ? (number(one.latency.decision.change) ?? 0) : 0);
