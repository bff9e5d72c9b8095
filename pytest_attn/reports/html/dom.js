// Elements, and numbers as people read them. Text becomes a text node: nothing that comes from a test is ever markup.

function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined));
  return element;
}

// A long name may break after _, + and :, and nowhere else.
const breakable = (name) => name.split(/(?<=[_+:/-])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));

const byId = (id) => document.getElementById(id);

function say(text) {
  byId("said").textContent = text;
}

const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// Four digits, as in 0.01234, 21,830 or 2.5e-7; "-" where there is no number.
function digits(value, count = 4) {
  if (value === null || value === undefined) return "-";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "infinite" : "-infinite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(2);
  return Number(value.toPrecision(count)).toLocaleString("en", { maximumSignificantDigits: count });
}

// A z, as in 7.31 or 21,825: as a terminal writes it.
function zFigure(z) {
  if (!Number.isFinite(z) || z >= 1e6) return z >= 1e6 && z < Infinity ? z.toExponential(1).replace("+", "") : digits(z);
  return z < 100 ? z.toFixed(2) : Math.round(z).toLocaleString("en");
}

// A time, as a terminal writes it.
function duration(seconds) {
  if (!Number.isFinite(seconds)) return "-";
  if (seconds >= 1) return `${digits(seconds)} s`;
  return seconds >= 1e-4 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds * 1e6)} us`;
}

const span = ([low, high]) => `${duration(low)} to ${duration(high)}`;
const percent = (share, count = 1) => `${(share * 100).toFixed(count)} %`;
const signed = (share) => `${share > 0 ? "+" : ""}${percent(share)}`;

const flopRate = (rate) => (rate >= 1e11 ? `${digits(rate * 1e-12, 3)} TFLOP/s` : `${digits(rate * 1e-9, 3)} GFLOP/s`);

function mebibytes(bytes) {
  return bytes ? `${(bytes / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 1 })} MiB` : "-";
}

// A verdict is a word and a glyph; its color only repeats them.
function badge(verdict, number = 0) {
  const { word, glyph, tone } = verdicts[verdict];
  return el("span", { class: `badge ${tone}` }, el("span", { "aria-hidden": "true" }, `${glyph} `), word, number > 1 ? ` ×${number}` : "");
}

// What a failure says in a terminal, less its first line, which is the reason.
function explanation(lines) {
  if (!lines.length) return "";
  return el("dl", { class: "explanation" }, lines.slice(lines[0][0] ? 0 : 1).map(([label, words]) => [el("dt", {}, label), el("dd", {}, words)]));
}

// A command with a button that copies it; where the browser does not allow that, the text is selected, ready to copy.
function command(text) {
  const code = el("code", { tabindex: "0" }, text);
  const copy = async (event) => {
    const button = event.currentTarget;
    const done = (await written(text)) || selectedAndCopied(code);
    button.textContent = done ? "Copied" : "Selected";
    say(done ? "Command copied" : "Command selected: press Control C");
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return el("div", { class: "command" }, code, el("button", { type: "button", class: "no-print", "aria-label": `Copy the command: ${text}`, onclick: copy }, "Copy"));
}

async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

function selectedAndCopied(element) {
  getSelection().selectAllChildren(element);
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  }
}
