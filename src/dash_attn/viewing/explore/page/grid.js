// The Q x KV tiles of one head, beside the charts: which the mask keeps whole or in part, and in which order they add to dQ or are visited.

const GRID = { left: 30, top: 20, most: 256, least: 6, flat: 40 }; // pixels
const ORDERS = {
  turns: ["turn, the place of a tile among those that add to its dQ tile (a row)", (run, item) => [run.turn[item], run.turnsOf(item)]],
  steps: ["step, the place of a tile in the walk of its chain (a column)", (run, item) => [run.placeOf(item), run.chains.tasks[run.chainOf[item]]]],
};
const RAMPS = [BLUES, ORANGES].map((stops) => Array.from({ length: 64 }, (_, place) => between(stops, place / 63))); // of full tiles and of partial ones
const GRID_KEYS = "Arrows go to the next tile that is kept, h and H to the next head and the one before.";

class TileGrid extends CanvasChart {
  constructor(state) {
    super(null, "grid of tiles", GRID_KEYS);
    Object.assign(this, { state, order: "turns", chart: null, marked: null });
    this.title = element("p", { class: "hint" });
    this.buttons = Object.keys(ORDERS).map((order) => element("button", { type: "button", title: `Show the ${ORDERS[order][0]}`, onclick: () => this.measure(order) }, order));
    this.colours = element("ul", { class: "legend" });
    this.figure = element("figure", {}, element("figcaption", {}, element("b", {}, "Tiles"), element("span", {}, ...this.buttons)), this.title, this.stack, this.colours);
    this.listen({
      pointermove: (event) => this.chart?.hover(this.itemAt(...this.pointOf(event))),
      pointerleave: () => this.chart?.hover(null),
      click: (event) => this.clicked(event),
    });
  }

  /** A finger taps without having moved there before. */
  clicked(event) {
    const item = this.chart && this.itemAt(...this.pointOf(event));
    if (item !== null) this.chart.go(item);
  }

  /** Of the head of a task, which is marked; null: as it was, with no mark. */
  show(chart, item) {
    const { run } = chart;
    this.figure.hidden = run.itemWord !== "task" || !run.items;
    if (this.figure.hidden) return;
    const head = item === null ? (this.chart === chart ? this.head : run.headOf(0)) : run.headOf(item);
    const other = chart !== this.chart || head !== this.head;
    Object.assign(this, { chart, head, marked: item });
    if (other) this.readHead(run);
    else this.draw();
  }

  readHead(run) {
    const tasks = run.tasksOf(this.head);
    this.items = new Map(Array.from(tasks, (item) => [run.tileOf(item), item]));
    const tiles = run.q_tiles * run.kv_tiles;
    const counts = [[tasks.length - run.partialTiles.size, "full"], [run.partialTiles.size, "partial"], [tiles - tasks.length, "empty"]];
    const words = counts.map(([count, kind]) => `${plain(count)} ${kind}`).join(", ");
    this.title.textContent = `${run.headName(this.head)} of ${run.name}: ${words}`;
    this.lower.setAttribute("aria-label", `${run.q_tiles} Q tiles by ${run.kv_tiles} KV tiles, ${this.title.textContent}. ${GRID_KEYS}`);
    this.measure();
  }

  measure(order = this.order) {
    if (order !== this.order) address.soon();
    this.order = order;
    if (!this.chart || this.figure.hidden || !this.figure.isConnected) return;
    const { q_tiles: rows, kv_tiles: columns } = this.chart.run;
    const room = Math.max(GRID.least, Math.min(this.stack.clientWidth - GRID.left - 1, GRID.most));
    const height = Math.min(GRID.most, Math.max(GRID.flat, (room * rows) / columns)); // so tiles need not be squares
    this.fit(GRID.top + height + 1, 60);
    this.plot = { left: GRID.left, top: GRID.top, width: room, height };
    this.image = this.picture();
    this.draw();
    const [blues, oranges] = RAMPS.map((colours) => colours.map(css));
    fillLegend(this.colours, [["full, first to last", blues], ["partial", oranges], ["empty", [this.theme.idle]]]);
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.textContent === this.order));
  }

  draw() {
    const { context, theme, plot, chart: { run } } = this;
    this.clear(context);
    context.fillStyle = theme.idle;
    context.fillRect(plot.left, plot.top, plot.width, plot.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.image, plot.left, plot.top, plot.width, plot.height);
    if (Math.min(plot.width / run.kv_tiles, plot.height / run.q_tiles) >= 15) this.writeOrder();
    [context.fillStyle, context.font, context.textBaseline] = [theme.muted, "11px system-ui, sans-serif", "alphabetic"];
    context.textAlign = "left";
    context.fillText("KV tile \u2192", plot.left, plot.top - 6);
    context.fillText("Q \u2193", 2, plot.top + 10);
    for (const [item, width] of [[this.marked, 1.5], [this.chart.chosen, 3]]) {
      if (item === null || run.headOf(item) !== this.head) continue;
      const [left, top, wide, tall] = this.boxOf(item);
      [context.strokeStyle, context.lineWidth] = [theme.chosen, width];
      context.strokeRect(left - 1, top - 1, Math.max(4, wide + 2), Math.max(4, tall + 2));
    }
  }

  /** A pixel per tile; where there are more tiles than pixels, several share one, and partial ones are seen. */
  picture() {
    const { plot, chart: { run }, items } = this;
    const [width, height] = [Math.min(run.kv_tiles, Math.ceil(plot.width * this.ratio)), Math.min(run.q_tiles, Math.ceil(plot.height * this.ratio))];
    const made = element("canvas", { width: String(width), height: String(height) });
    const image = new ImageData(width, height);
    const isPartial = ([tile]) => run.partialTiles.has(tile);
    for (const [tile, item] of [...items].sort((a, b) => isPartial(a) - isPartial(b))) {
      const [row, column] = [Math.floor(tile / run.kv_tiles), tile % run.kv_tiles];
      const at = Math.floor((row * height) / run.q_tiles) * width + Math.floor((column * width) / run.kv_tiles);
      image.data.set([...this.colourOf(item), 255], 4 * at);
    }
    made.getContext("2d").putImageData(image, 0, 0);
    return made;
  }

  colourOf(item) {
    const { run } = this.chart;
    const [place, of] = ORDERS[this.order][1](run, item);
    return RAMPS[Number(run.partialTiles.has(run.tileOf(item)))][of > 1 ? Math.round((63 * place) / (of - 1)) : 0];
  }

  writeOrder() {
    const { context, chart: { run } } = this;
    [context.font, context.textAlign, context.textBaseline] = ["11px system-ui, sans-serif", "center", "middle"];
    for (const item of this.items.values()) {
      const [left, top, width, height] = this.boxOf(item);
      context.fillStyle = textOn(this.colourOf(item));
      context.fillText(String(ORDERS[this.order][1](run, item)[0]), left + width / 2, top + height / 2 + 0.5);
    }
  }

  boxOf(item) {
    const { plot, chart: { run } } = this;
    const [wide, tall] = [plot.width / run.kv_tiles, plot.height / run.q_tiles];
    const tile = run.tileOf(item);
    return [plot.left + (tile % run.kv_tiles) * wide, plot.top + Math.floor(tile / run.kv_tiles) * tall, wide, tall];
  }

  /** The task of the tile under a point, or null. */
  itemAt(x, y) {
    const { plot, chart: { run } } = this;
    const [column, row] = [Math.floor(((x - plot.left) / plot.width) * run.kv_tiles), Math.floor(((y - plot.top) / plot.height) * run.q_tiles)];
    if (column < 0 || column >= run.kv_tiles || row < 0 || row >= run.q_tiles) return null;
    return this.items.get(row * run.kv_tiles + column) ?? null;
  }

  /** To the next tile that is kept, some columns or rows on; where nothing is chosen here, to the first. */
  move(columns, rows) {
    const { run, chosen } = this.chart;
    if (chosen === null || run.headOf(chosen) !== this.head) return this.chart.go(run.tasksOf(this.head)[0]);
    const tile = run.tileOf(chosen);
    let [column, row] = [(tile % run.kv_tiles) + columns, Math.floor(tile / run.kv_tiles) + rows];
    for (; column >= 0 && column < run.kv_tiles && row >= 0 && row < run.q_tiles; column += columns, row += rows) {
      const item = this.items.get(row * run.kv_tiles + column);
      if (item !== undefined) return this.chart.go(item);
    }
    return undefined;
  }

  /** The same tile of another head, if it has one. */
  toHead(by) {
    const { run, chosen } = this.chart;
    const tasks = run.tasksOf(this.head + by);
    if (tasks.length) this.chart.go(tasks.find((item) => chosen !== null && run.tileOf(item) === run.tileOf(chosen)) ?? tasks[0]);
  }

  actions() {
    if (!this.chart) return {};
    return {
      ArrowRight: () => this.move(1, 0),
      ArrowLeft: () => this.move(-1, 0),
      ArrowDown: () => this.move(0, 1),
      ArrowUp: () => this.move(0, -1),
      h: () => this.toHead(1),
      H: () => this.toHead(-1),
      Escape: () => this.state.choose(this.chart, null),
    };
  }
}
