// A chart of a run: two canvases, pointer and keyboard. What charts share is in `state` (main.js).

const MOST_HEIGHT = 400;
const KEYS = [
  ["Arrows", "the task before or after, the worker above or below"],
  ["+ \u2212 0", "zoom in, out, show all"],
  ["v V", "show fewer or more workers"],
  ["w n", "go to what it waited for, to who waits for it"],
  ["c C", "forward and back along the critical path"],
  [". ,", "step forward and back in time; space plays"],
  ["Escape", "choose nothing"],
  ["In the tiles", "arrows: the next tile that is kept; h H: the next head, the one before"],
  ["Mouse", "wheel zooms, with Shift workers; drag moves; click chooses"],
];
const KEYS_HELP = "Arrows move from task to task, plus and minus zoom, c follows the critical path, w goes to what it waited for.";

class Chart extends CanvasChart {
  constructor(run, state) {
    const words = run.figures.map((pair) => pair.join(" "));
    const summary = `${run.name}, ${run.source}: ${counted(run.workers, run.laneWord)} over ${run.unit}, ${counted(run.items, run.itemWord)}; ${words.join(", ")}. ${KEYS_HELP}`;
    super(state.view, "Gantt chart", summary);
    [this.run, this.state, this.hovered] = [run, state, null];
    this.lanes = new Stretch(run.lanes, 2, () => state.redrawSoon());
    this.upper = element("canvas", { "aria-hidden": "true" });
    this.over = this.upper.getContext("2d");
    this.stack.append(this.upper);
    this.figure = element("figure", {}, element("figcaption", {}, element("b", {}, run.name), element("span", {}, `in ${run.unit}`)), this.stack);
    this.listen({
      pointermove: (event) => this.moved(event),
      pointerleave: () => this.hover(null),
      pointerdown: (event) => this.pressed(event),
      pointerup: (event) => this.released(event),
      pointercancel: () => this.drop(),
      wheel: (event) => this.wheeled(event),
    });
  }

  measure() {
    this.fit(MARGIN.top + MARGIN.bottom + Math.min(MOST_HEIGHT, Math.max(60, this.run.lanes * 24)), 200);
    const [width, height] = [this.width - MARGIN.left - MARGIN.right, this.height - MARGIN.top - MARGIN.bottom];
    this.plot = { left: MARGIN.left, top: MARGIN.top, width, height };
    this.palette = new Palette(this.run.colours(), this.theme);
  }

  draw() {
    drawChart(this);
    drawOverlay(this);
  }

  legend() {
    const { run, palette, theme } = this;
    const bound = run.bound === null ? [] : [["lower bound", [theme.bound]]];
    return [...run.legend(palette, theme), ["idle", [theme.idle]], ["makespan", [theme.ink]], ...bound];
  }

  get laneHeight() {
    return this.plot.height / this.lanes.span;
  }

  laneTop(lane) {
    return this.plot.top + (lane - this.lanes.from + (1 - LANE) / 2) * this.laneHeight;
  }

  *lanesInSight() {
    for (let lane = Math.floor(this.lanes.from); lane < Math.min(this.run.lanes, Math.ceil(this.lanes.to)); lane++) yield lane;
  }

  /** [first, end) of the bars of a lane that are in sight. */
  barsInSight(bars, lane) {
    return bars.between(lane, this.view.from * this.run.ticks, this.view.to * this.run.ticks);
  }

  /** The task under a point, or null. */
  itemAt(x, y) {
    const { run } = this;
    const lane = Math.floor(this.lanes.from + (y - this.plot.top) / this.laneHeight);
    const time = this.placeAt(x) * run.ticks;
    if (lane < 0 || lane >= run.lanes || x < this.plot.left || time < 0) return null;
    const below = y - this.laneTop(lane) > this.laneHeight * LANE * (1 - BAND);
    for (const bars of run.back && this.crisp && below ? [run.back, run.bars] : [run.bars]) {
      const bar = bars.at(lane, time);
      if (bar >= 0) return bars.item[bar];
    }
    return null;
  }

  /** The chosen task, if it is one of this chart. */
  get chosen() {
    return this.state.chosen?.chart === this ? this.state.chosen.item : null;
  }

  moved(event) {
    const { held, plot } = this;
    if (!held) return this.hover(this.itemAt(...this.pointOf(event)));
    const [dx, dy] = [event.clientX - held.x, event.clientY - held.y];
    if (Math.abs(dx) + Math.abs(dy) > 4) held.dragged = true;
    if (!held.dragged) return undefined;
    this.stack.classList.add("dragging");
    const [right, down] = [(dx / plot.width) * held.view.span, (dy / plot.height) * held.lanes.span];
    this.lanes.show(held.lanes.from - down, held.lanes.to - down);
    return this.view.show(held.view.from - right, held.view.to - right);
  }

  pressed(event) {
    if (event.button !== 0) return;
    this.lower.setPointerCapture(event.pointerId);
    const [view, lanes] = [this.view, this.lanes].map(({ from, to, span }) => ({ from, to, span }));
    this.held = { x: event.clientX, y: event.clientY, dragged: false, view, lanes };
  }

  released(event) {
    const { held } = this;
    this.drop();
    if (held && !held.dragged) this.state.choose(this, this.itemAt(...this.pointOf(event)));
  }

  drop() {
    this.held = null;
    this.stack.classList.remove("dragging");
  }

  wheeled(event) {
    event.preventDefault();
    const [x, y] = this.pointOf(event);
    if (event.shiftKey) this.zoomLanes(wheelFactor(event), (y - this.plot.top) / this.plot.height);
    else this.view.zoom(wheelFactor(event), this.placeAt(x));
  }

  hover(item) {
    if (item === this.hovered) return;
    this.hovered = item;
    drawOverlay(this);
    this.state.grid.show(this, item ?? this.chosen);
    if (this.state.chosen === null) showDetails(byId("details"), this, item);
  }

  zoomLanes(factor, share = 0.5) {
    this.lanes.zoom(factor, this.lanes.from + share * this.lanes.span);
  }

  /** Bring a task into sight. */
  reveal(item) {
    const lane = this.run.laneOf(item);
    if (!this.lanes.has(lane, lane + 1)) this.lanes.showAround(lane);
    const [start, end] = [this.run.span(item, COMPUTE)[0], this.run.span(item, REDUCE)[1]];
    if (!this.view.has(start, end)) this.view.showAround((start + end) / 2);
  }

  actions() {
    const { state } = this;
    if (!this.run.items) return {};
    const item = this.current();
    const from = (move) => (this.chosen === null ? this.go(item) : move()); // where nothing is chosen, an arrow chooses the current task
    return {
      ArrowRight: () => from(() => this.along(item, 1)),
      ArrowLeft: () => from(() => this.along(item, -1)),
      ArrowDown: () => from(() => this.across(item, 1)),
      ArrowUp: () => from(() => this.across(item, -1)),
      "+": () => state.zoom(0.7),
      "-": () => state.zoom(1 / 0.7),
      v: () => this.zoomLanes(0.7),
      V: () => this.zoomLanes(1 / 0.7),
      0: () => state.showAll(),
      w: () => this.follow(this.run.needs(item).filter((need) => need.last && need.item !== item)),
      n: () => this.follow(this.run.neededBy(item)),
      c: () => state.alongPath(this, 1),
      C: () => state.alongPath(this, -1),
      ".": () => state.step(1),
      ",": () => state.step(-1),
      " ": () => state.play(),
      Escape: () => state.choose(this, null),
    };
  }

  /** The chosen task; without one, the first in sight. */
  current() {
    if (this.chosen !== null) return this.chosen;
    for (let lane = Math.floor(this.lanes.from); lane < this.run.lanes; lane++) {
      const [bar, end] = this.barsInSight(this.run.bars, lane);
      if (bar < end) return this.run.bars.item[bar];
    }
    return 0;
  }

  along(item, by) {
    const [{ bars }, lane] = [this.run, this.run.laneOf(item)];
    const inLane = (bar) => bar >= bars.first[lane] && bar < bars.first[lane + 1];
    let bar = this.barAtStart(item, lane);
    while (inLane(bar) && bars.item[bar] === item) bar += by;
    if (inLane(bar)) this.go(bars.item[bar]);
  }

  across(item, by) {
    const { bars } = this.run;
    for (let lane = this.run.laneOf(item) + by; lane >= 0 && lane < this.run.lanes; lane += by) {
      const [first, end] = [bars.first[lane], bars.first[lane + 1]];
      if (end > first) return this.go(bars.item[Math.min(end - 1, Math.max(first, this.barAtStart(item, lane)))]);
    }
    return undefined;
  }

  /** The last bar of a lane that has started when a task starts. */
  barAtStart(item, lane) {
    return this.run.bars.after(lane, this.run.span(item, COMPUTE)[0] * this.run.ticks) - 1;
  }

  follow(links) {
    if (links.length) this.go(links.at(-1).item);
  }

  go(item) {
    this.reveal(item);
    this.state.choose(this, item);
  }
}
