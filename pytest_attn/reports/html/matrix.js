// Backends x workloads: the gravest verdict of each cell, with counts; arrow keys move, Enter and click show what is behind.

const MOST_ROWS = 30; // workloads beyond which the rows are groups

const matrix = {
  id: "matrix",
  title: "Verdicts",
  has: (cases) => cases.length > 0,
  rows: null,
  order: "gravest",
  skipped: false,
  open: new Set(),
  draw(cases) {
    const workloads = new Set(cases.map((one) => one.workload.id)).size;
    const rows = this.rows ?? (workloads > MOST_ROWS ? "groups" : "workloads");
    const set = (key) => (value) => { this[key] = value; redraw(this); };
    const backends = columnsOf(cases, this.skipped, this.order);
    const idle = [...new Set(cases.map((one) => one.backend))].filter((name) => name !== "-").length - columnsOf(cases, false).length;
    const panel = el("aside", { class: "panel", "aria-label": "Behind the chosen cell", "aria-live": "polite" }, el("p", { class: "quiet" }, "Choose a cell to see its reasons, its figures and the command that repeats it."));
    const tableOf = matrixTable(cases, backends, rows, this, panel);
    return [
      el("p", { class: "lead" }, "Each cell is the worst verdict of a backend there. Below it: how many judgments have it, the largest z, and how many were skipped. z is the error divided by the rounding error that a fault-free kernel typically makes at that element; its limit is 8."),
      el("div", { class: "choices no-print" },
        choice("Rows", "matrix-rows", [["groups", "groups"], ["workloads", "workloads"]], rows, set("rows")),
        choice("Order", "matrix-order", [["gravest", "worst first"], ["run", "as run"], ["name", "by name"]], this.order, set("order")),
        idle || this.skipped ? el("label", { class: "choice" }, el("input", { type: "checkbox", checked: this.skipped, onchange: (event) => set("skipped")(event.target.checked) }), `show ${plural(idle, "backend")} that ran nowhere`) : ""),
      el("div", { class: "beside" }, scrolling("Verdicts, backends by workloads", tableOf), panel),
    ];
  },
};

// Backends whose every case was skipped say nothing here; the section of skips has their reasons.
function columnsOf(cases, withSkipped, order = "run") {
  const names = [...grouped(cases, (one) => one.backend)].filter(([name]) => name !== "-");
  const ran = names.filter(([, found]) => withSkipped || found.some((one) => one.verdict !== "skipped"));
  return inRank(ran.length ? ran : names, order).map(([name]) => name);
}

function matrixTable(cases, backends, rows, section, panel) {
  const cells = new Map(); // element -> what is behind it
  const table = el("table", { class: "matrix", role: "grid", "aria-label": "Verdicts" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, rows === "groups" ? "group" : "workload"), backends.map((name) => el("th", { scope: "col" }, el("span", {}, breakable(name)))))));
  const body = el("tbody");
  table.append(body);
  const workloadsOf = (found) => [...grouped(found, (one) => one.workload.id)];
  const rowOf = (name, found, properties, head) => {
    const byBackend = grouped(found, (one) => one.backend);
    return el("tr", properties, el("th", { scope: "row" }, head ?? name), backends.map((backend) => cell(backend, name, byBackend.get(backend), cells)));
  };
  const childRows = (found) => inRank(workloadsOf(found), section.order).map(([name, mine]) => rowOf(name, mine, { class: "child" }));
  const top = rows === "groups" ? [...grouped(cases, (one) => one.workload.group || "no group")] : workloadsOf(cases);
  for (const [name, found] of inRank(top, section.order)) {
    const workloads = workloadsOf(found);
    if (rows === "workloads" || workloads.length === 1) {
      body.append(rowOf(rows === "workloads" ? name : workloads[0][0], found, {}));
      continue;
    }
    const children = [];
    const button = el("button", { type: "button", class: "expand", "aria-expanded": "false" }, name, el("span", { class: "quiet" }, ` ${workloads.length}`));
    const row = rowOf(name, found, { class: "group" }, button);
    const toggle = (isOpen) => {
      button.setAttribute("aria-expanded", String(isOpen));
      section.open[isOpen ? "add" : "delete"](name);
      children.splice(0).forEach((child) => child.remove());
      if (isOpen) row.after(...children.concat(childRows(found)).map((child) => (children.push(child), child)));
    };
    button.addEventListener("click", () => toggle(button.getAttribute("aria-expanded") === "false"));
    body.append(row);
    if (section.open.has(name)) toggle(true);
  }
  listen(table, cells, panel);
  return table;
}

function inRank(entries, order) {
  if (order === "name") return [...entries].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  if (order === "run") return entries;
  const rankOf = new Map(entries.map(([name, found]) => [name, verdicts[gravest(found).verdict]]));
  const place = (name) => (["bad", "doubt"].includes(rankOf.get(name).tone) ? rankOf.get(name).rank : 1e6);
  return [...entries].sort(([a], [b]) => place(a) - place(b));
}

const SHORT = { "invariant broken": "broken", "slower, not confirmed": "slower", "wrong as expected": "expected", "right despite a known defect": "right?", "right as approximate": "right", "invariants hold": "holds", "invariants hold that apply": "holds", "as fast as recorded": "fast" };

function cell(backend, row, found, cells) {
  if (!found) return el("td", { class: "empty", "aria-label": `${backend} on ${row}: not run` });
  const worst = gravest(found);
  const { word, glyph, tone } = verdicts[worst.verdict];
  const toneOf = (one) => verdicts[one.verdict].tone;
  const same = found.filter((one) => toneOf(one) === tone).length;
  const judged = found.filter((one) => ["bad", "doubt", "good"].includes(toneOf(one))).length;
  const skipped = found.filter((one) => toneOf(one) === "none").length;
  const number = judged > same ? `${same} of ${judged}` : `${same}`;
  const largest = Math.max(...found.map((one) => (one.z ? one.z[0] : -1)));
  const z = largest >= 0 ? `z ${zFigure(largest)}` : "";
  const element = el("td", { class: tone, tabindex: "-1", "data-cell": true, "aria-label": `${backend} on ${row}: ${word}, ${number}${z && `, ${z}`}${skipped && tone !== "none" ? `, ${skipped} skipped` : ""}${worst.reason && `, ${worst.reason}`}` },
    el("b", {}, `${glyph} ${SHORT[word] ?? word}`), el("small", {}, [number, z].filter(Boolean).join(", ")), skipped && tone !== "none" ? el("small", {}, `${skipped} skipped`) : "");
  cells.set(element, { title: `${backend} on ${row}`, found });
  return element;
}

// One stop for the Tab key, arrows inside, as in any grid; one listener for all cells.
function listen(table, cells, panel) {
  let current = table.querySelector("td[data-cell]");
  if (current) current.tabIndex = 0;
  const choose = (element) => {
    current?.setAttribute("tabindex", "-1");
    table.querySelector("td[aria-selected]")?.removeAttribute("aria-selected");
    current = element;
    current.tabIndex = 0;
    current.setAttribute("aria-selected", "true");
    const { title, found } = cells.get(element);
    panel.replaceChildren(...detailsOf(title, found).filter(Boolean));
  };
  table.addEventListener("click", (event) => {
    const element = event.target.closest("td[data-cell]");
    if (element) choose(element);
  });
  table.addEventListener("focusin", (event) => event.target.matches("td[data-cell]") && choose(event.target));
  table.addEventListener("mouseover", (event) => {
    const element = event.target.closest("td[data-cell]");
    if (element && !element.title) element.title = element.getAttribute("aria-label");
  });
  table.addEventListener("keydown", (event) => {
    const element = event.target.closest("td[data-cell]");
    const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!element || !steps) return;
    const next = neighbor(table, element, steps);
    if (next) {
      event.preventDefault();
      next.tabIndex = 0;
      next.focus();
    }
  });
}

function neighbor(table, element, [down, right]) {
  const rows = [...table.tBodies[0].rows];
  for (let row = rows.indexOf(element.parentElement), column = element.cellIndex; ; ) {
    row += down;
    column += right;
    const next = rows[row]?.cells[column];
    if (!next || column < 1) return null;
    if (next.matches("[data-cell]")) return next;
  }
}
