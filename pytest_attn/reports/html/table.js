// A table that sorts by its headers and writes a hundred rows at a time: five thousand would keep the reader waiting.

const PAGE = 100;

// columns: {title, value: row => what to sort by, cell: row => text or element, numeric, header}
function sortableTable({ caption, columns, rows, noun, page = PAGE }) {
  let sorted = { column: -1, descending: false };
  let order = rows;
  let shown = 0;
  const body = el("tbody");
  const more = el("p", { class: "more" });
  const headers = columns.map((column, index) =>
    el("th", { scope: "col", class: column.numeric ? "number" : null, "aria-sort": "none" },
      column.value ? el("button", { type: "button", class: "sort", onclick: () => sortBy(index) }, breakable(column.title)) : column.title),
  );
  const table = el("table", { class: "list" }, el("caption", {}, caption), el("thead", {}, el("tr", {}, headers)), body);
  function sortBy(index) {
    const descending = sorted.column === index ? !sorted.descending : false;
    sorted = { column: index, descending };
    headers.forEach((header, i) => header.setAttribute("aria-sort", i === index ? (descending ? "descending" : "ascending") : "none"));
    order = inOrder(rows, columns[index].value, descending);
    shown = 0;
    body.replaceChildren();
    add(page);
  }
  function add(count) {
    body.append(...order.slice(shown, shown + count).map((row) => el("tr", {}, columns.map((column) => cellOf(column, row)))));
    shown = Math.min(order.length, shown + count);
    const left = order.length - shown;
    const next = Math.min(page, left);
    more.replaceChildren(
      ...(left
        ? [`${shown.toLocaleString("en")} of ${plural(order.length, noun)}. `,
           el("button", { type: "button", class: "no-print", onclick: () => add(next) }, `Show ${next} more`), " ",
           el("button", { type: "button", class: "no-print", onclick: () => add(left) }, "Show all")]
        : []),
    );
  }
  add(page);
  return el("div", {}, scrolling(caption, table), more);
}

function cellOf(column, row) {
  const properties = column.header ? { scope: "row" } : column.numeric ? { class: "number" } : {};
  return el(column.header ? "th" : "td", properties, (column.cell ?? column.value)(row));
}

// What has no value stands last, whichever way.
function inOrder(rows, valueOf, descending) {
  const isMissing = (value) => value === null || value === undefined || value === "" || Number.isNaN(value);
  const sign = descending ? -1 : 1;
  return rows
    .map((row) => [valueOf(row), row])
    .sort(([a], [b]) => {
      if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
      return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    })
    .map(([, row]) => row);
}

// What is wider than the page scrolls by itself, and by keyboard.
const scrolling = (label, content) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
