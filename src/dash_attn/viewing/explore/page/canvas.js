// What all charts need: a stretch that can be zoomed, a canvas that can have the focus, and a few strokes of a brush.

/** The part of a whole that is in sight. It has at least a given length. `changed` is called when it is another one. */
class Stretch {
  constructor(whole, least, changed) {
    Object.assign(this, { from: 0, to: whole, whole, least: Math.min(least, whole), changed });
  }

  get span() {
    return this.to - this.from;
  }

  /** Whether not all is in sight. Drags round. */
  get zoomed() {
    return this.span < this.whole * (1 - 1e-9);
  }

  /** For the address. */
  inSight() {
    return this.zoomed ? { from: this.from, to: this.to } : {};
  }

  has(from, to = from) {
    return from >= this.from && to <= this.to;
  }

  show(from, to) {
    if (!(from < to)) return; // an address can say anything
    const span = this.inLimits(to - from);
    this.from = Math.min(this.whole - span, Math.max(0, from));
    this.to = this.from + span;
    this.changed();
  }

  inLimits(span) {
    return Math.min(this.whole, Math.max(this.least, span));
  }

  showAll() {
    this.show(0, this.whole);
  }

  showAround(middle) {
    this.show(middle - this.span / 2, middle + this.span / 2);
  }

  zoom(factor, around) {
    const factorInLimits = this.inLimits(this.span * factor) / this.span;
    this.show(around - (around - this.from) * factorInLimits, around + (this.to - around) * factorInLimits);
  }
}

/** A chart over a stretch `view`. It has `actions()` by key. */
class CanvasChart {
  constructor(view, kind, words) {
    this.view = view;
    this.lower = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": kind, "aria-label": words });
    this.stack = element("div", { class: "stack" }, this.lower);
    this.context = this.lower.getContext("2d");
    this.listen({
      keydown: (event) => {
        if (event.ctrlKey || event.altKey || event.metaKey) return;
        if (this.pressedKey(event.key)) event.preventDefault();
      },
    });
  }

  listen(handlers) {
    for (const [name, handle] of Object.entries(handlers)) this.lower.addEventListener(name, handle, { passive: false });
  }

  /** Whether the key meant something. Buttons press keys, too. */
  pressedKey(key) {
    const action = this.actions()[key === "=" ? "+" : key];
    action?.();
    return action !== undefined;
  }

  /** Sizes and colours, when they may have changed. */
  fit(height, leastWidth) {
    this.stack.style.height = `${height}px`;
    [this.height, this.width] = [height, Math.max(leastWidth, this.stack.clientWidth)];
    this.ratio = window.devicePixelRatio || 1;
    const size = [this.width, height].map((length) => Math.round(length * this.ratio));
    for (const canvas of this.stack.children) if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    this.theme = themeColours();
  }

  /** An empty canvas, measured in pixels of the page. */
  clear(context) {
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, context.canvas.width, context.canvas.height);
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
  }

  x(place) {
    return this.plot.left + ((place - this.view.from) / this.view.span) * this.plot.width;
  }

  placeAt(x) {
    return this.view.from + ((x - this.plot.left) / this.plot.width) * this.view.span;
  }

  pointOf(event) {
    const box = this.lower.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

const wheelFactor = (event) => Math.exp((event.deltaY || event.deltaX) * 0.0015);

function strokeLine(context, from, to, colour, width, dashes = []) {
  [context.strokeStyle, context.lineWidth] = [colour, width];
  context.setLineDash(dashes);
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
  context.setLineDash([]);
}

function drawClipped(context, { left, top, width, height }, draw) {
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  draw();
  context.restore();
}

/** 1, 2 or 5 times a power of ten, at least as large. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999);
}

function fillLegend(list, entries) {
  list.replaceChildren(...entries.map(([text, colours]) => element("li", {}, ...(colours ? [swatch(colours)] : []), text)));
}

function swatch(colours) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `linear-gradient(to right, ${colours.flatMap((colour) => [colour, colour])})`;
  return made;
}
