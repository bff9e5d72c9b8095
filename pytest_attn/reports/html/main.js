// Puts the sections in order, draws each when it is reached or there is time, and draws them anew for a filter.

const SECTIONS = [problems, matrix, layers, curve, race, errors, roofline, past, kernels, skips, allCases];

let shown = [];
const drawing = new Map(); // section -> promise of its charts
const THEMES = ["system", "light", "dark"];

function redraw(section) {
  const focused = document.activeElement?.name && section.body.contains(document.activeElement) ? document.activeElement : null;
  const parts = section.draw(shown).flat(3).filter((part) => part !== "");
  section.body.replaceChildren(...parts.filter((part) => typeof part !== "function"));
  const charts = parts.filter((part) => typeof part === "function");
  section.isDrawn = true;
  drawing.set(section, Promise.all(charts.map((chart) => chart())));
  if (focused) section.body.querySelector(`[name="${CSS.escape(focused.name)}"][value="${CSS.escape(focused.value)}"], select[name="${CSS.escape(focused.name)}"]`)?.focus();
}

const reached = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    const section = SECTIONS.find((one) => one.id === target.id);
    section.isNear = isIntersecting;
    if (isIntersecting && !section.isDrawn && window.vegaEmbed) redraw(section);
  }
}, { rootMargin: "400px" });

// The rest is drawn while nothing else is to do, so that a print shows all of it.
function drawWhenIdle() {
  const wait = window.requestIdleCallback ?? (((call) => setTimeout(call, 30)));
  wait(async () => {
    const next = SECTIONS.find((section) => section.body && !section.isDrawn);
    if (next && window.vegaEmbed) {
      redraw(next);
      await drawing.get(next);
    }
    if (SECTIONS.some((section) => section.body && !section.isDrawn)) drawWhenIdle();
    else allIsDrawn();
  }, { timeout: 100 }); // a page behind another one is never idle
}

function allIsDrawn() {
  document.documentElement.dataset.drawn = "all";
  performance.mark("attn-drawn");
}

function refresh() {
  shown = shownCases();
  const all = casesOfMachine().length;
  byId("showing").textContent = shown.length === all ? plural(all, "judgment") : `${shown.length.toLocaleString("en")} of ${plural(all, "judgment")}`;
  delete document.documentElement.dataset.drawn;
  for (const section of SECTIONS.filter((one) => one.body)) {
    section.isDrawn = false;
    if (section.isNear && (window.vegaEmbed || !section.missing)) redraw(section);
  }
  drawWhenIdle();
}

// -- sections ------------------------------------------------------------------------------------------------------------------

function layOut() {
  const mine = casesOfMachine();
  const there = SECTIONS.filter((section) => section.has(mine));
  SECTIONS.forEach((section) => { section.body = null; section.isNear = false; });
  byId("main").replaceChildren(...there.map((section) => {
    section.body = el("div", { class: "body" });
    return el("section", { id: section.id, "aria-labelledby": `${section.id}-title` }, el("h2", { id: `${section.id}-title` }, section.title), section.body);
  }));
  byId("contents").replaceChildren(el("ul", {}, there.map((section) => el("li", {}, el("a", { href: `#${section.id}` }, section.title)))));
  const missing = SECTIONS.filter((section) => section.missing && !section.has(mine));
  byId("missing").replaceChildren(...missing.map((section) => el("li", {}, section.missing)));
  byId("missing").hidden = byId("missing-title").hidden = !missing.length;
  there.slice(0, 2).forEach((section) => (section.isNear = true));
  reached.disconnect();
  document.querySelectorAll("main section").forEach((section) => reached.observe(section));
}

// -- filters -------------------------------------------------------------------------------------------------------------------

function fillFilters() {
  const mine = casesOfMachine();
  const counts = [...grouped(mine, (one) => one.verdict)].sort(([a], [b]) => verdicts[a].rank - verdicts[b].rank);
  byId("filter-verdict").replaceChildren(el("option", { value: "" }, "all"), ...counts.map(([name, found]) => el("option", { value: name }, `${verdicts[name].glyph} ${verdicts[name].word} (${found.length})`)));
  const directions = [...new Set(mine.map((one) => one.direction).filter(Boolean))];
  byId("filter-direction").replaceChildren(el("option", { value: "" }, "all"), ...directions.map((name) => el("option", { value: name }, name)));
  const boxes = [...new Set(mine.map((one) => one.backend))].map((name) => el("label", {}, el("input", { type: "checkbox", name: "backend", value: name, checked: !state.hidden.has(name) }), name));
  const all = (isChecked) => () => { byId("filter-backends").querySelectorAll("input").forEach((box) => (box.checked = isChecked)); chooseBackends(); };
  const buttons = el("div", {}, el("button", { type: "button", onclick: all(true) }, "All"), " ", el("button", { type: "button", onclick: all(false) }, "None"));
  byId("filter-backends").querySelector("fieldset").replaceChildren(el("legend", {}, "Show these backends"), buttons, ...boxes);
  nameBackends();
}

function chooseBackends() {
  const boxes = [...byId("filter-backends").querySelectorAll("input")];
  state.hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.value));
  nameBackends();
  refresh();
}

function nameBackends() {
  const boxes = byId("filter-backends").querySelectorAll("input").length;
  byId("filter-backends").querySelector("summary span").textContent = state.hidden.size ? `${boxes - state.hidden.size} of ${boxes}` : "all";
}

function listenToFilters() {
  let waiting;
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filter-text").addEventListener("input", (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { state.text = event.target.value; refresh(); }, 120);
  });
  byId("filter-verdict").addEventListener("change", (event) => { state.verdict = event.target.value; refresh(); });
  byId("filter-direction").addEventListener("change", (event) => { state.direction = event.target.value; refresh(); });
  byId("filter-backends").addEventListener("change", chooseBackends);
  byId("filter-backends").addEventListener("keydown", (event) => { if (event.key === "Escape") { byId("filter-backends").open = false; byId("filter-backends").querySelector("summary").focus(); } });
  document.addEventListener("click", (event) => { if (!byId("filter-backends").contains(event.target)) byId("filter-backends").open = false; });
  byId("clear").addEventListener("click", () => {
    Object.assign(state, { text: "", verdict: "", direction: "", hidden: new Set() });
    byId("filters").reset();
    fillFilters();
    refresh();
  });
}

// -- machine, theme, print -----------------------------------------------------------------------------------------------------

function showMachine() {
  const { sentence, why, facts } = data.machines[state.machine];
  const isBad = casesOfMachine().some((one) => verdicts[one.verdict].tone === "bad");
  byId("sentence").textContent = sentence;
  byId("why").textContent = why;
  byId("sentence").className = `sentence ${isBad ? "bad" : "fine"}`;
  byId("facts").replaceChildren(...facts.map(([term, words]) => el("div", {}, el("dt", {}, term), el("dd", {}, words))));
  state.hidden = new Set();
  layOut();
  fillFilters();
  refresh();
}

function offerMachines() {
  const nameOfMachine = ({ facts }) => facts.filter(([term]) => ["Machine", "torch"].includes(term)).map(([term, words]) => (term === "torch" ? `torch ${words}` : words)).join(", ");
  byId("machine").replaceChildren(...data.machines.map((machine, i) => el("option", { value: i }, nameOfMachine(machine))));
  byId("machine-field").hidden = data.machines.length < 2;
  byId("machine").addEventListener("change", (event) => {
    Object.assign(state, { machine: Number(event.target.value), verdict: "", direction: "", text: "" });
    byId("filters").reset();
    showMachine();
  });
}

function offerThemes() {
  const button = byId("theme");
  button.addEventListener("click", () => {
    const chosen = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length];
    document.documentElement.dataset.theme = chosen;
    button.textContent = `Theme: ${chosen}`;
  });
}

async function printAll() {
  for (const section of SECTIONS.filter((one) => one.body && !one.isDrawn)) redraw(section);
  await Promise.all(drawing.values());
  window.print();
}

offerMachines();
offerThemes();
listenToFilters();
byId("print").addEventListener("click", printAll);
if (data.machines.length) showMachine();
else {
  byId("filters").hidden = byId("missing-title").hidden = true;
  allIsDrawn();
}
requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("attn-read")));
