// Answers of the server, what is in a saved page, and small helpers.

const TYPES = { B: Uint8Array, H: Uint16Array, i: Int32Array, d: Float64Array };
const byId = (id) => document.getElementById(id);

/** The whole numbers that runs.py encoded: a letter for the type, then the bytes in base64. */
function decoded(text) {
  return new TYPES[text[0]](bytesOf(text.slice(1)).buffer);
}

function bytesOf(base64) {
  const raw = atob(base64);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

function decodedAll(columns) {
  return Object.fromEntries(Object.entries(columns).map(([name, value]) => [name, typeof value === "string" ? decoded(value) : value]));
}

/** Where each part begins, and where the last one ends, from how many each has. */
function offsetsOf(counts) {
  const offsets = new Int32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) offsets[i + 1] = offsets[i] + counts[i];
  return offsets;
}

/** The first place of [low, high) from which on something holds; high if it never does. */
function firstWhere(low, high, holds) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

async function embeddedData() {
  const { dataset, textContent } = byId("data");
  if (dataset.encoding !== "gzip") return [dataset.encoding, JSON.parse(textContent)];
  const stream = new Blob([bytesOf(textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return ["plain", JSON.parse(await new Response(stream).text())];
}

/** The answer to a question: the last line. Those before it, of long work, say how far it has come. */
async function asked(path, options, signal, told) {
  const parts = [];
  try {
    const reply = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(options), signal });
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
      for (const [place, text] of value.split("\n").entries()) {
        if (place) told(JSON.parse(parts.splice(0).join("")));
        parts.push(text);
      }
    }
  } catch {
    throw new Error("Nobody answers. Is `dash-attn explore` still running?");
  }
  const answer = JSON.parse(parts.join(""));
  if (answer.error) throw new Error(answer.error);
  return answer;
}

/** 128 for 128.0, 46.8 for 46.8. */
function plain(value) {
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(7)).toLocaleString("en", { maximumFractionDigits: 3 });
}

const counted = (count, noun) => `${plain(count)} ${noun}${count === 1 ? "" : "s"}`;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function listOf(rows) {
  return element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

/** Cells are texts, elements or lists of these. Without `attributes` the first cell of a row names it. `meanings`: of names, for those who point at one. */
function tableOf(names, rows, attributes = null, meanings = {}) {
  const cellOf = (cell, place) => (place || attributes ? element("td", {}, ...[cell].flat()) : element("th", { scope: "row", title: meanings[cell] ?? "" }, cell));
  const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col", title: meanings[name] ?? "" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map(cellOf)));
  return element("table", attributes ?? {}, element("thead", {}, head), element("tbody", {}, ...body));
}
