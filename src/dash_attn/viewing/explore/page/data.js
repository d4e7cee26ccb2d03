// Answers of the server, and what is in a saved page.

const TYPES = { B: Uint8Array, H: Uint16Array, i: Int32Array, d: Float64Array };

/** The whole numbers that packing.py packed: a letter for the type, then the bytes in base64. */
function unpacked(text) {
  const raw = atob(text.slice(1));
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new TYPES[text[0]](bytes.buffer);
}

function unpackedAll(packed) {
  const found = {};
  for (const [name, value] of Object.entries(packed)) found[name] = typeof value === "string" ? unpacked(value) : value;
  return found;
}

/** Where each part begins, and where the last one ends, from how many each has. */
function offsetsOf(counts) {
  const offsets = new Int32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) offsets[i + 1] = offsets[i] + counts[i];
  return offsets;
}

async function embeddedData() {
  const element = document.getElementById("data");
  const text = element.textContent;
  if (element.dataset.packing !== "gzip") return [element.dataset.packing, JSON.parse(text)];
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
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
