// A chart: one run, two canvases, pointer and keyboard. What charts share is in `state` (main.js).

const MOST_HEIGHT = 400;
const KEYS_HELP = "Arrows move from task to task, plus and minus zoom, c follows the critical path, w goes to what it waited for.";

class Chart {
  constructor(run, state) {
    [this.run, this.state, this.view] = [run, state, state.view];
    this.lanes = { from: 0, to: run.lanes };
    this.hovered = null;
    this.lower = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "Gantt chart" });
    this.upper = element("canvas", { "aria-hidden": "true" });
    this.lower.setAttribute("aria-label", this.summary());
    this.stack = element("div", { class: "stack" }, this.lower, this.upper);
    this.height = MARGIN.top + MARGIN.bottom + Math.min(MOST_HEIGHT, Math.max(60, run.lanes * 24));
    this.stack.style.height = `${this.height}px`;
    const caption = element("figcaption", {}, element("b", {}, run.name), element("span", {}, this.shortNotes()));
    this.figure = element("figure", {}, caption, this.stack);
    [this.context, this.over] = [this.lower.getContext("2d"), this.upper.getContext("2d")];
    this.listen();
  }

  shortNotes() {
    return this.run.figures.slice(0, 5).map(([name, value]) => `${name} ${value}`).join(" · ") + ` · ${this.run.unit === "microseconds" ? "time in microseconds" : this.run.unit}`;
  }

  summary() {
    const { run } = this;
    const words = run.figures.map(([name, value]) => `${name} ${value}`).join(", ");
    return `${run.name}, ${run.source}: ${run.workers} ${run.laneWord}s over ${run.unit}, ${plain(run.items)} ${run.itemWord}s; ${words}. ${KEYS_HELP}`;
  }

  /** Sizes and colours, when they may have changed. */
  measure() {
    this.width = Math.max(200, this.stack.clientWidth);
    this.ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.lower, this.upper]) {
      const size = [Math.round(this.width * this.ratio), Math.round(this.height * this.ratio)];
      if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    }
    this.plot = {
      left: MARGIN.left,
      top: MARGIN.top,
      width: this.width - MARGIN.left - MARGIN.right,
      height: this.height - MARGIN.top - MARGIN.bottom,
    };
    this.theme = themeColours();
    this.palette = new Palette(this.run.colours(), this.theme);
  }

  draw() {
    drawChart(this);
    drawOverlay(this);
  }

  get laneHeight() {
    return this.plot.height / (this.lanes.to - this.lanes.from);
  }

  x(time) {
    return this.plot.left + ((time - this.view.from) / (this.view.to - this.view.from)) * this.plot.width;
  }

  laneTop(lane) {
    return this.plot.top + (lane - this.lanes.from + (1 - LANE) / 2) * this.laneHeight;
  }

  *lanesInSight() {
    for (let lane = Math.floor(this.lanes.from); lane < Math.min(this.run.lanes, Math.ceil(this.lanes.to)); lane++) yield lane;
  }

  timeAt(x) {
    return this.view.from + ((x - this.plot.left) / this.plot.width) * (this.view.to - this.view.from);
  }

  /** The task under a point, or null. */
  itemAt(x, y) {
    const { run } = this;
    const lane = Math.floor(this.lanes.from + (y - this.plot.top) / this.laneHeight);
    const time = this.timeAt(x) * run.ticks;
    if (lane < 0 || lane >= run.lanes || x < this.plot.left || time < 0) return null;
    const below = y - this.laneTop(lane) > this.laneHeight * LANE * (1 - BAND);
    for (const bars of run.back && this.crisp && below ? [run.back, run.bars] : [run.bars]) {
      const bar = bars.at(lane, time);
      if (bar >= 0) return bars.item[bar];
    }
    return null;
  }

  /** The task to show: the chosen one of this chart, else the one under the pointer. */
  shown() {
    const { chosen } = this.state;
    if (chosen !== null) return chosen.chart === this ? chosen.item : null;
    return this.hovered;
  }

  listen() {
    const canvas = this.lower;
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("pointerdown", (event) => this.pressed(event));
    canvas.addEventListener("pointerup", (event) => this.released(event));
    canvas.addEventListener("pointercancel", () => this.drop());
    canvas.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.keyed(event));
    for (const [name, focused] of [["focus", true], ["blur", false]]) {
      canvas.addEventListener(name, () => {
        this.focused = focused && canvas.matches(":focus-visible");
        drawOverlay(this);
      });
    }
  }

  pointOf(event) {
    const box = this.lower.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  moved(event) {
    if (!this.held) return this.hover(this.itemAt(...this.pointOf(event)));
    const [dx, dy] = [event.clientX - this.held.x, event.clientY - this.held.y];
    if (Math.abs(dx) + Math.abs(dy) > 4) this.held.dragged = true;
    if (!this.held.dragged) return undefined;
    this.stack.classList.add("dragging");
    this.moveLanes(this.held.lanes.from - (dy / this.plot.height) * (this.held.lanes.to - this.held.lanes.from) - this.lanes.from);
    const span = this.held.to - this.held.from;
    return this.state.show(this.held.from - (dx / this.plot.width) * span, this.held.to - (dx / this.plot.width) * span);
  }

  pressed(event) {
    if (event.button !== 0) return;
    this.lower.setPointerCapture(event.pointerId);
    this.held = { x: event.clientX, y: event.clientY, dragged: false, ...this.view, lanes: { ...this.lanes } };
  }

  released(event) {
    const held = this.held;
    this.drop();
    if (!held || held.dragged) return;
    this.state.choose(this, this.itemAt(...this.pointOf(event)));
  }

  drop() {
    this.held = null;
    this.stack.classList.remove("dragging");
  }

  wheeled(event) {
    event.preventDefault();
    const [x, y] = this.pointOf(event);
    const factor = Math.exp((event.deltaY || event.deltaX) * 0.0015);
    if (event.shiftKey) this.zoomLanes(factor, (y - this.plot.top) / this.plot.height);
    else this.state.zoom(factor, this.timeAt(x));
  }

  hover(item) {
    if (item === this.hovered) return;
    this.hovered = item;
    drawOverlay(this);
    this.state.hovered(this);
  }

  zoomLanes(factor, share = 0.5) {
    const [size, span] = [this.run.lanes, this.lanes.to - this.lanes.from];
    const wanted = Math.min(size, Math.max(Math.min(2, size), span * factor));
    const from = Math.min(size - wanted, Math.max(0, this.lanes.from + (span - wanted) * share));
    this.lanes = { from, to: from + wanted };
    this.draw();
  }

  moveLanes(by) {
    const span = this.lanes.to - this.lanes.from;
    const from = Math.min(this.run.lanes - span, Math.max(0, this.lanes.from + by));
    this.lanes = { from, to: from + span };
  }

  /** Bring a task into sight. */
  reveal(item) {
    const lane = this.run.laneOf(item);
    if (lane < this.lanes.from || lane + 1 > this.lanes.to) this.moveLanes(lane - (this.lanes.from + this.lanes.to) / 2);
    const [start] = this.run.span(item, COMPUTE);
    const end = this.run.span(item, REDUCE)[1];
    const span = this.view.to - this.view.from;
    if (start < this.view.from || end > this.view.to) this.state.show((start + end - span) / 2, (start + end + span) / 2);
  }

  keyed(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (this.pressedKey(event.key)) event.preventDefault();
  }

  /** Whether the key meant something. */
  pressedKey(key) {
    const { state } = this;
    const actions = {
      ArrowRight: () => this.along(1),
      ArrowLeft: () => this.along(-1),
      ArrowDown: () => this.across(1),
      ArrowUp: () => this.across(-1),
      "+": () => state.zoom(0.7),
      "=": () => state.zoom(0.7),
      "-": () => state.zoom(1 / 0.7),
      v: () => this.zoomLanes(0.7),
      V: () => this.zoomLanes(1 / 0.7),
      0: () => state.showAll(),
      w: () => this.follow(this.run.needs(this.current()).filter((need) => need.last && need.item !== this.current())),
      n: () => this.follow(this.run.neededBy(this.current())),
      c: () => state.alongPath(this, 1),
      C: () => state.alongPath(this, -1),
      ".": () => state.step(1),
      ",": () => state.step(-1),
      " ": () => state.play(),
      Escape: () => state.choose(this, null),
    };
    if (!(key in actions) || !this.run.items) return false;
    actions[key]();
    return true;
  }

  /** The chosen task; without one, the first in sight. */
  current() {
    const { chosen } = this.state;
    if (chosen !== null && chosen.chart === this) return chosen.item;
    const lane = Math.max(0, Math.floor(this.lanes.from));
    for (let at = lane; at < this.run.lanes; at++) {
      const [bar, end] = this.run.bars.between(at, this.view.from * this.run.ticks, this.view.to * this.run.ticks);
      if (bar < end) return this.run.bars.item[bar];
    }
    return 0;
  }

  along(by) {
    const { bars } = this.run;
    const item = this.current();
    if (this.state.chosen?.chart !== this) return this.go(item);
    const lane = this.run.laneOf(item);
    let bar = bars.after(lane, this.run.span(item, COMPUTE)[0] * this.run.ticks) - 1;
    while (bar >= bars.first[lane] && bar < bars.first[lane + 1] && bars.item[bar] === item) bar += by;
    return bar >= bars.first[lane] && bar < bars.first[lane + 1] ? this.go(bars.item[bar]) : undefined;
  }

  across(by) {
    const item = this.current();
    if (this.state.chosen?.chart !== this) return this.go(item);
    const time = this.run.span(item, COMPUTE)[0] * this.run.ticks;
    for (let lane = this.run.laneOf(item) + by; lane >= 0 && lane < this.run.lanes; lane += by) {
      const [first, end] = [this.run.bars.first[lane], this.run.bars.first[lane + 1]];
      if (end > first) return this.go(this.run.bars.item[Math.min(end - 1, Math.max(first, this.run.bars.after(lane, time) - 1))]);
    }
    return undefined;
  }

  follow(links) {
    const found = links.at(-1);
    if (found !== undefined) this.go(found.item);
  }

  go(item) {
    this.reveal(item);
    this.state.choose(this, item);
  }
}
