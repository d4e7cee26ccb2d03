// Two runs, by their ledgers: a tree of modules over steps, its chart, and the page with what `dash-attn diff` says.

const MOST_OPEN = 40; // rows that are shown at first

class ModuleTree {
  constructor(answer) {
    Object.assign(this, answer);
    this.steps = decoded(answer.steps);
    [this.compared, this.differing] = [answer.compared.map(decoded), answer.differing.map(decoded)];
    this.apart = new Map(answer.apart.map(([cell, ...sizes]) => [cell, sizes]));
    this.number = new Map(this.modules.map((module, place) => [module, place]));
    this.parent = this.modules.map((module) => (module ? this.number.get(module.split(".").slice(0, -1).join(".")) : -1));
    this.depth = this.parent.map(() => 0);
    this.parent.forEach((parent, place) => (this.depth[place] = parent < 0 ? 0 : this.depth[parent] + 1)); // parents come first
    this.children = this.modules.map(() => 0);
    for (const parent of this.parent) if (parent >= 0) this.children[parent]++;
    this.open = this.openedAtFirst();
  }

  /** As many levels as have room, and the way to the module that is to blame. */
  openedAtFirst() {
    let depth = 0;
    while (depth < 8 && this.depth.filter((level) => level <= depth + 1).length <= MOST_OPEN) depth++;
    const open = new Set([...this.modules.keys()].filter((place) => this.depth[place] < depth && this.children[place]));
    const blamed = this.comparison.first?.module;
    for (let place = this.number.get(blamed) ?? -1; place >= 0; place = this.parent[place]) if (this.parent[place] >= 0) open.add(this.parent[place]);
    return open;
  }

  /** Numbers of the modules whose parents are all open. */
  shownModules() {
    const shown = new Set(); // parents come first
    this.parent.forEach((parent, place) => {
      if (parent < 0 || (shown.has(parent) && this.open.has(parent))) shown.add(place);
    });
    return [...shown];
  }

  name(place) {
    return this.modules[place] || "the model";
  }

  shortName(place) {
    return this.modules[place].split(".").at(-1) || "the model";
  }

  /** Tensors that were compared and that differ in some steps, of some directions. */
  counts(module, first, end, directions = this.directions.keys()) {
    let [compared, differing] = [0, 0];
    const row = module * this.steps.length;
    for (const direction of directions) {
      for (let at = row + first; at < row + end; at++) {
        compared += this.compared[direction][at];
        differing += this.differing[direction][at];
      }
    }
    return [compared, differing];
  }

  /** Of elements that were kept. */
  howFar(direction, module, step) {
    const sizes = this.apart.get((direction * this.modules.length + module) * this.steps.length + step);
    if (!sizes) return "by how much is not known: no such values were kept (keep=)";
    return `by up to ${sizes[0].toPrecision(3)} (${(100 * sizes[1]).toPrecision(2)} % of the largest value)`;
  }

  words(module, step) {
    return this.directions.map((direction, place) => {
      const [compared, differing] = this.counts(module, step, step + 1, [place]);
      const found = differing ? `${plain(differing)} of ${counted(compared, "tensor")} ${differing === 1 ? "differs" : "differ"}, ${this.howFar(place, module, step)}` : compared === 1 ? "the tensor agrees" : `all ${plain(compared)} tensors agree`;
      return [direction, compared ? found : "not recorded"];
    });
  }
}

const ROW = 20;
const TREE_WIDTH = 210;
const LEAST_PARTS = 9; // pixels of a step from which on its directions are drawn side by side
const LEDGER_KEYS = [
  ["Arrows", "from step to step and from module to module"],
  ["Enter", "opens or closes a module"],
  ["+ \u2212 0", "zoom in, out, show all"],
  ["f", "goes to where the runs part"],
  ["Mouse", "wheel with Shift zooms; click chooses, opens or closes"],
];

class LedgerChart extends CanvasChart {
  constructor(tree) {
    const summary = `${tree.verdict} ${counted(tree.modules.length, "module")}, ${counted(tree.steps.length, "step")}.`;
    super(new Stretch(tree.steps.length, 2, () => this.drawSoon()), "chart of modules over steps", summary);
    this.tree = tree;
    this.chosen = this.placeOfFirst() ?? { module: 0, step: 0 };
    this.figure = element("figure", {}, this.stack);
    this.listen({
      click: (event) => this.clicked(event),
      wheel: (event) => this.wheeled(event),
      pointermove: (event) => showModule(this.tree, this.cellAt(event) ?? this.chosen),
      pointerleave: () => showModule(this.tree, this.chosen),
    });
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
    this.fit((this.rows.length + 2) * ROW, 300);
    const left = Math.min(TREE_WIDTH, 0.4 * this.width);
    this.plot = { left, width: this.width - left - 10 };
  }

  draw() {
    const { context, theme, chosen } = this;
    this.clear(context);
    this.rows.forEach((module, row) => this.drawRow(module, row * ROW));
    this.drawAxis();
    const row = this.rows.indexOf(chosen.module);
    const [left, right] = this.insidePlot(this.x(chosen.step), this.x(chosen.step + 1));
    for (const [colour, width] of row >= 0 && right > left ? [[theme.paper, 5], [theme.chosen, 2]] : []) {
      [context.strokeStyle, context.lineWidth] = [colour, width];
      context.strokeRect(left, row * ROW + 1, Math.max(2, right - left), ROW - 2);
    }
  }

  insidePlot(left, right) {
    return [Math.max(this.plot.left, left), Math.min(this.plot.left + this.plot.width, right)];
  }

  drawRow(module, top) {
    const { context, theme, tree } = this;
    const indent = 8 + 12 * tree.depth[module];
    context.fillStyle = theme.ink;
    [context.font, context.textAlign, context.textBaseline] = ["12px ui-monospace, monospace", "left", "middle"];
    if (tree.children[module]) context.fillText(tree.open.has(module) ? "\u25be" : "\u25b8", indent - 8, top + ROW / 2);
    context.fillText(tree.shortName(module), indent + 4, top + ROW / 2, this.plot.left - indent - 10);
    for (const [first, end, left, width] of this.columns()) {
      const parts = end - first === 1 && width >= LEAST_PARTS ? [...tree.directions.keys()].map((direction) => [direction]) : [undefined];
      const share = (width - (width >= 3 ? 1 : 0)) / parts.length;
      parts.forEach((directions, place) => this.fill(tree.counts(module, first, end, directions), left + place * share, share, top));
    }
  }

  /** [first, end) of the steps of each column, its place and its width: one step, or as many as share a pixel. */
  *columns() {
    const [steps, { plot, view }] = [this.tree.steps.length, this];
    const perColumn = Math.max(1, view.span / plot.width);
    for (let first = Math.floor(view.from); first < Math.min(steps, view.to); ) {
      const end = Math.min(steps, Math.max(first + 1, Math.round(first + perColumn)));
      yield [first, end, this.x(first), this.x(end) - this.x(first)];
      first = end;
    }
  }

  fill([compared, differing], left, width, top) {
    const [from, to] = this.insidePlot(left, left + width);
    if (!compared || to <= from) return;
    this.context.fillStyle = differing ? this.theme.stall : this.theme.agree;
    this.context.fillRect(from, top + 1, Math.max(0.5, to - from), ROW - 2);
  }

  drawAxis() {
    const { context, theme, tree } = this;
    const top = this.rows.length * ROW;
    [context.fillStyle, context.font, context.textAlign, context.textBaseline] = [theme.muted, "11px system-ui, sans-serif", "center", "top"];
    const jump = Math.max(1, niceStep((60 * this.view.span) / this.plot.width));
    for (let step = Math.ceil(this.view.from / jump) * jump; step < Math.min(this.view.to, tree.steps.length); step += jump) {
      context.fillText(plain(tree.steps[step]), (this.x(step) + this.x(step + 1)) / 2, top + 5);
    }
    context.textAlign = "left";
    context.fillText("step", 8, top + 5);
  }

  /** The module and step under the pointer, or null. On the tree: the chosen step. */
  cellAt(event) {
    const [x, y] = this.pointOf(event);
    const [module, step] = [this.rows[Math.floor(y / ROW)], Math.floor(this.placeAt(x))];
    if (module === undefined || step >= this.tree.steps.length) return null;
    return { module, step: x < this.plot.left ? this.chosen.step : step, onTree: x < this.plot.left };
  }

  clicked(event) {
    const cell = this.cellAt(event);
    if (cell === null) return;
    if (cell.onTree) this.toggle(cell.module);
    this.choose(cell.module, cell.step);
  }

  wheeled(event) {
    if (!event.shiftKey && !event.ctrlKey) return; // the list itself scrolls
    event.preventDefault();
    this.zoom(wheelFactor(event));
  }

  toggle(module) {
    if (!this.tree.children[module]) return;
    if (!this.tree.open.delete(module)) this.tree.open.add(module);
    this.measure();
  }

  choose(module, step) {
    const at = Math.max(0, Math.min(this.tree.steps.length - 1, step));
    this.chosen = { module, step: at };
    if (!this.view.has(at, at + 1)) this.view.showAround(at + 0.5);
    this.draw();
    showModule(this.tree, this.chosen);
    const words = this.tree.words(module, at).map((pair) => pair.join(": ")).join(", ");
    address.soon();
    byId("spoken").textContent = `${this.tree.name(module)}, step ${this.tree.steps[at]}: ${words}`;
  }

  drawSoon() {
    address.soon();
    this.draw();
  }

  zoom(factor) {
    this.view.zoom(factor, this.chosen.step + 0.5);
  }

  /** For the address. */
  inSight() {
    return { ...this.view.inSight(), module: this.tree.modules[this.chosen.module], step: this.tree.steps[this.chosen.step] };
  }

  bringInSight({ module, step, from, to }) {
    this.view.show(Number(from ?? 0), Number(to ?? this.view.whole));
    const [there, at] = [this.tree.number.get(module), this.tree.steps.indexOf(Number(step))];
    if (there === undefined || step === undefined || at < 0) return this.choose(this.chosen.module, this.chosen.step);
    for (let place = this.tree.parent[there]; place >= 0; place = this.tree.parent[place]) this.tree.open.add(place);
    this.measure();
    return this.choose(there, at);
  }

  actions() {
    const { module, step } = this.chosen;
    const row = this.rows.indexOf(module);
    const go = (by) => this.choose(this.rows[Math.max(0, Math.min(this.rows.length - 1, row + by))], step);
    const first = this.placeOfFirst();
    return {
      ArrowRight: () => this.choose(module, step + 1),
      ArrowLeft: () => this.choose(module, step - 1),
      ArrowDown: () => go(1),
      ArrowUp: () => go(-1),
      Enter: () => this.toggle(module) ?? this.draw(),
      "+": () => this.zoom(0.6),
      "-": () => this.zoom(1 / 0.6),
      0: () => this.view.showAll(),
      f: () => first && this.choose(first.module, first.step),
    };
  }

  legend() {
    const { agree, stall, paper } = this.theme;
    const parts = ["wide steps have three parts: forward, backward, update", null];
    return [["the same bits in both runs", [agree]], ["other bits", [stall]], ["not recorded", [paper]], parts];
  }
}

function showModule(tree, { module, step }) {
  const { first } = tree.comparison;
  const blamed = first && tree.modules[module] === (first.module ?? "") && tree.steps[step] === first.step;
  const steps = [...tree.steps.keys()].filter((at) => tree.counts(module, at, at + 1)[1]);
  byId("details").replaceChildren(
    element("h2", {}, tree.name(module)),
    element("p", { class: "hint" }, `step ${plain(tree.steps[step])}${blamed ? ": here the runs part" : ""}`),
    listOf(tree.words(module, step)),
    element("h3", {}, "In all steps"),
    element("p", {}, steps.length ? `differs in ${plain(steps.length)} of ${counted(tree.steps.length, "step")}, first in step ${plain(tree.steps[steps[0]])}` : "agrees in all steps"),
  );
}

/** Everything of the page that is about two runs. */
function showLedgers(answer, view) {
  const chart = new LedgerChart(new ModuleTree(answer));
  byId("layout").classList.remove("empty");
  for (const id of ["along", "moment", "path", "at-moment", "words"]) byId(id).hidden = true;
  byId("to-first").hidden = !answer.comparison.first;
  byId("title").replaceChildren(element("p", {}, answer.verdict), ...answer.title.map((line) => element("p", {}, line)));
  byId("figures").replaceChildren(listOf(answer.rows));
  byId("refused").textContent = answer.comparison.notes.map((note) => `Note: ${note}.`).join(" ");
  byId("charts").replaceChildren(chart.figure, ...changesOf(answer.comparison));
  byId("command").replaceChildren("The same in words: ", element("code", {}, answer.command));
  showKeys(LEDGER_KEYS);
  [state.charts, state.ledger] = [[chart], chart];
  resized();
  chart.bringInSight(view);
}

function changesOf({ environment, attention }) {
  return [["Attention plans differ", attention], ["Environments differ", environment]].filter(([, rows]) => rows.length).map(([title, rows]) =>
    element("div", {}, element("h3", {}, title), tableOf(["", "A", "B"], rows.map(({ name, a, b }) => [name, a, b]), { class: "left" })),
  );
}
