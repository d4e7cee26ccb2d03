// The page of two runs: what `dash-attn diff` says, and a chart of modules over steps.

const ROW = 20;
const TREE_WIDTH = 210;
const LEAST_PARTS = 9; // pixels of a step from which on its directions are drawn side by side
const LEDGER_KEYS = "Arrows go from step to step and from module to module, Enter opens or closes a module, plus and minus zoom, f goes to where the runs part.";

class LedgerChart {
  constructor(tree) {
    this.tree = tree;
    this.view = { from: 0, to: tree.steps.length };
    this.chosen = this.placeOfFirst() ?? { module: 0, step: 0 };
    this.lower = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "chart of modules over steps" });
    this.lower.setAttribute("aria-label", `${tree.verdict} ${tree.modules.length} modules, ${tree.steps.length} steps. ${LEDGER_KEYS}`);
    this.stack = element("div", { class: "stack" }, this.lower);
    this.figure = element("figure", {}, this.stack);
    this.context = this.lower.getContext("2d");
    this.listen();
  }

  /** Where the runs part. */
  placeOfFirst() {
    const { first } = this.tree.comparison;
    if (!first) return null;
    const step = Math.max(0, this.tree.steps.indexOf(first.step));
    return { module: this.tree.number.get(first.module) ?? 0, step };
  }

  measure() {
    this.rows = this.tree.shownModules();
    this.theme = themeColours();
    this.width = Math.max(300, this.stack.clientWidth);
    this.height = (this.rows.length + 2) * ROW;
    this.stack.style.height = `${this.height}px`;
    this.ratio = window.devicePixelRatio || 1;
    [this.lower.width, this.lower.height] = [Math.round(this.width * this.ratio), Math.round(this.height * this.ratio)];
    this.plot = { left: TREE_WIDTH, width: this.width - TREE_WIDTH - 10 };
  }

  x(step) {
    return this.plot.left + ((step - this.view.from) / (this.view.to - this.view.from)) * this.plot.width;
  }

  draw() {
    const { context, theme } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    this.rows.forEach((module, row) => this.drawRow(module, row * ROW));
    this.drawAxis();
    [context.strokeStyle, context.lineWidth] = [theme.chosen, 2];
    const row = this.rows.indexOf(this.chosen.module);
    const left = Math.max(this.plot.left, this.x(this.chosen.step));
    const right = Math.min(this.plot.left + this.plot.width, this.x(this.chosen.step + 1));
    if (row >= 0 && right > left) context.strokeRect(left, row * ROW + 1, Math.max(2, right - left), ROW - 2);
  }

  drawRow(module, top) {
    const { context, theme, tree } = this;
    const indent = 8 + 12 * tree.depth[module];
    context.fillStyle = theme.ink;
    [context.font, context.textAlign, context.textBaseline] = ["12px ui-monospace, monospace", "left", "middle"];
    if (tree.children[module]) context.fillText(tree.open.has(module) ? "\u25be" : "\u25b8", indent - 8, top + ROW / 2);
    context.fillText(tree.shortName(module), indent + 4, top + ROW / 2, TREE_WIDTH - indent - 10);
    const [first, end] = [Math.floor(this.view.from), Math.min(tree.steps.length, Math.ceil(this.view.to))];
    const perStep = this.plot.width / (this.view.to - this.view.from);
    if (perStep >= 1) for (let step = first; step < end; step++) this.drawStep(module, step, top, perStep);
    else this.drawColumns(module, top);
  }

  drawStep(module, step, top, width) {
    const parts = width >= LEAST_PARTS ? this.tree.directions.map((_, direction) => direction) : [-1];
    const [from, to] = [this.x(step), this.x(step + 1) - (width >= 3 ? 1 : 0)];
    parts.forEach((direction, place) => {
      const share = (to - from) / parts.length;
      this.fill(this.tree.counts(module, step, step + 1, direction), from + place * share, share, top);
    });
  }

  /** Many steps per pixel: a column shows whether any of its steps differs. */
  drawColumns(module, top) {
    const perPixel = (this.view.to - this.view.from) / this.plot.width;
    for (let x = 0; x < this.plot.width; x++) {
      const first = Math.floor(this.view.from + x * perPixel);
      const end = Math.min(this.tree.steps.length, Math.max(first + 1, Math.floor(this.view.from + (x + 1) * perPixel)));
      this.fill(this.tree.counts(module, first, end), this.plot.left + x, 1, top);
    }
  }

  fill([compared, differing], left, width, top) {
    const from = Math.max(this.plot.left, left);
    const to = Math.min(this.plot.left + this.plot.width, left + width);
    if (!compared || to <= from) return;
    this.context.fillStyle = differing ? this.theme.stall : this.theme.agree;
    this.context.fillRect(from, top + 1, Math.max(0.5, to - from), ROW - 2);
  }

  drawAxis() {
    const { context, theme, tree } = this;
    const top = this.rows.length * ROW;
    [context.fillStyle, context.font, context.textAlign, context.textBaseline] = [theme.muted, "11px system-ui, sans-serif", "center", "top"];
    const jump = Math.max(1, niceStep((60 * (this.view.to - this.view.from)) / this.plot.width));
    for (let step = Math.ceil(this.view.from / jump) * jump; step < Math.min(this.view.to, tree.steps.length); step += jump) {
      context.fillText(plain(tree.steps[step]), (this.x(step) + this.x(step + 1)) / 2, top + 5);
    }
    context.textAlign = "left";
    context.fillText("step", 8, top + 5);
  }

  listen() {
    const canvas = this.lower;
    canvas.addEventListener("click", (event) => this.clicked(event));
    canvas.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (this.pressedKey(event.key)) event.preventDefault();
    });
    canvas.addEventListener("pointermove", (event) => {
      const place = this.placeAt(event);
      showModule(this.tree, place ?? this.chosen);
    });
    canvas.addEventListener("pointerleave", () => showModule(this.tree, this.chosen));
  }

  placeAt(event) {
    const box = this.lower.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const module = this.rows[Math.floor(y / ROW)];
    const step = Math.floor(this.view.from + ((x - this.plot.left) / this.plot.width) * (this.view.to - this.view.from));
    if (module === undefined || step >= this.tree.steps.length) return null;
    return { module, step: x < this.plot.left ? this.chosen.step : step, onTree: x < this.plot.left };
  }

  clicked(event) {
    const place = this.placeAt(event);
    if (place === null) return;
    if (place.onTree) this.toggle(place.module);
    this.choose(place.module, place.step);
  }

  wheeled(event) {
    if (!event.shiftKey && !event.ctrlKey) return; // the list itself scrolls
    event.preventDefault();
    this.zoom(Math.exp((event.deltaY || event.deltaX) * 0.0015));
  }

  toggle(module) {
    if (!this.tree.children[module]) return;
    if (!this.tree.open.delete(module)) this.tree.open.add(module);
    this.measure();
  }

  choose(module, step) {
    this.chosen = { module, step: Math.max(0, Math.min(this.tree.steps.length - 1, step)) };
    const [span, at] = [this.view.to - this.view.from, this.chosen.step];
    if (at < this.view.from || at + 1 > this.view.to) this.show(at + 0.5 - span / 2, at + 0.5 + span / 2);
    this.draw();
    showModule(this.tree, this.chosen);
    const words = this.tree.words(module, this.chosen.step).map((pair) => pair.join(": ")).join(", ");
    byId("spoken").textContent = `${this.tree.name(module)}, step ${this.tree.steps[this.chosen.step]}: ${words}`;
  }

  show(from, to) {
    const all = this.tree.steps.length;
    const span = Math.min(all, Math.max(Math.min(all, 2), to - from));
    this.view.from = Math.min(all - span, Math.max(0, from));
    this.view.to = this.view.from + span;
    this.draw();
  }

  zoom(factor) {
    const middle = this.chosen.step + 0.5;
    this.show(middle - (middle - this.view.from) * factor, middle + (this.view.to - middle) * factor);
  }

  pressedKey(key) {
    const { module, step } = this.chosen;
    const row = this.rows.indexOf(module);
    const go = (by) => this.choose(this.rows[Math.max(0, Math.min(this.rows.length - 1, row + by))], step);
    const first = this.placeOfFirst();
    const actions = {
      ArrowRight: () => this.choose(module, step + 1),
      ArrowLeft: () => this.choose(module, step - 1),
      ArrowDown: () => go(1),
      ArrowUp: () => go(-1),
      Enter: () => this.toggle(module) ?? this.draw(),
      "+": () => this.zoom(0.6),
      "=": () => this.zoom(0.6),
      "-": () => this.zoom(1 / 0.6),
      0: () => this.show(0, this.tree.steps.length),
      f: () => first && this.choose(first.module, first.step),
    };
    if (!(key in actions)) return false;
    actions[key]();
    return true;
  }
}

function showModule(tree, { module, step }) {
  const { first } = tree.comparison;
  const blamed = first && tree.modules[module] === first.module && tree.steps[step] === first.step;
  const steps = [...tree.steps.keys()].filter((at) => tree.counts(module, at, at + 1)[1]);
  byId("details").replaceChildren(
    element("h2", {}, tree.name(module)),
    element("p", { class: "hint" }, `step ${plain(tree.steps[step])}${blamed ? ": here the runs part" : ""}`),
    listOf(tree.words(module, step)),
    element("h3", {}, "In all steps"),
    element("p", {}, steps.length ? `differs in ${plain(steps.length)} of ${plain(tree.steps.length)} steps, first in step ${plain(tree.steps[steps[0]])}` : "agrees in all steps"),
  );
}

/** Everything of the page that is about two runs. */
function showLedgers(answer) {
  const chart = new LedgerChart(new ModuleTree(answer));
  for (const id of ["tools", "path", "at-moment", "keys"]) byId(id).hidden = true;
  byId("title").replaceChildren(element("p", {}, answer.verdict), ...answer.title.map((line) => element("p", {}, line)));
  byId("figures").replaceChildren(listOf(answer.rows));
  byId("figures").classList.add("facts");
  byId("refused").textContent = answer.comparison.notes.map((note) => `Note: ${note}.`).join(" ");
  byId("charts").replaceChildren(chart.figure, ...changesOf(answer.comparison));
  byId("command").replaceChildren("The same in words: ", element("code", {}, answer.command), element("br"), `In the chart: ${LEDGER_KEYS} Shift and the wheel zoom.`);
  state.ledgers = chart;
  resized();
  chart.choose(chart.chosen.module, chart.chosen.step);
}

function changesOf({ environment, attention }) {
  return [["Attention plans differ", attention], ["Environments differ", environment]].filter(([, rows]) => rows.length).map(([title, rows]) => {
    const head = element("tr", {}, ...["", "A", "B"].map((word) => element("th", { scope: "col" }, word)));
    const body = rows.map(({ name, a, b }) => element("tr", {}, ...[name, a, b].map((text) => element("td", {}, text))));
    return element("div", {}, element("h3", {}, title), element("table", { class: "left" }, element("thead", {}, head), element("tbody", {}, ...body)));
  });
}

function ledgerLegend({ theme }) {
  const entries = [["the same bits in both runs", theme.agree], ["other bits", theme.stall], ["not recorded", theme.paper]];
  const parts = element("li", {}, "wide steps have three parts: forward, backward, update");
  byId("legend").replaceChildren(...entries.map(([text, colour]) => element("li", {}, swatch([colour]), text)), parts);
}
