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

async function asked(path, options) {
  const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(options) };
  const reply = await fetch(path, request).catch(() => {
    throw new Error("Nobody answers. Is `dash-attn explore` still running?");
  });
  if (!reply.ok) throw new Error((await reply.json()).error);
  return reply;
}

/** 128 for 128.0, 46.8 for 46.8. */
function plain(value) {
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(7)).toLocaleString("en", { maximumFractionDigits: 3 });
}

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

/** Cells are texts, elements or lists of these. Without `attributes` the first cell of a row names it. */
function tableOf(names, rows, attributes = null) {
  const cellOf = (cell, place) => (place || attributes ? element("td", {}, ...[cell].flat()) : element("th", { scope: "row" }, cell));
  const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map(cellOf)));
  return element("table", attributes ?? {}, element("thead", {}, head), element("tbody", {}, ...body));
}
