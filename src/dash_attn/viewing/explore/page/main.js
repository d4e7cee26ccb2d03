// The page: what charts share, and the buttons above them.

const THEMES = ["system", "light", "dark"];
const LEAST_SPAN = 1e-6; // of the whole time that can be in sight
const narrow = matchMedia("(max-width: 600px)"); // as a phone

const state = {
  charts: [],
  view: new Stretch(1, LEAST_SPAN, () => state.redrawSoon()),
  chosen: null,
  moment: null,
  showPath: false,
  playing: false,

  showAll() {
    for (const stretch of [...this.charts.map((chart) => chart.lanes), this.view]) stretch.showAll();
  },

  /** Keyboard and buttons zoom around the chosen task, else around the middle. */
  zoom(factor) {
    const time = this.chosen === null ? NaN : this.chosen.chart.run.span(this.chosen.item, COMPUTE)[0];
    this.view.zoom(factor, this.view.has(time) ? time : (this.view.from + this.view.to) / 2);
  },

  redrawSoon() {
    address.soon();
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.redraw();
    });
  },

  redraw() {
    for (const chart of this.charts) chart.draw();
  },

  redrawOverlays() {
    for (const chart of this.charts) drawOverlay(chart);
  },

  choose(chart, item) {
    this.chosen = item === null ? null : { chart, item };
    showDetails(byId("details"), chart, item);
    if (chart) this.grid.show(chart, item);
    address.soon();
    byId("spoken").textContent = item === null ? "Nothing is chosen." : spoken(chart, item);
    showPath(this);
    this.redrawOverlays();
  },

  togglePath(shown) {
    this.showPath = shown;
    byId("show-path").setAttribute("aria-pressed", String(shown));
    address.soon();
    this.redrawOverlays();
  },

  alongPath(chart, by) {
    const { path } = chart.run;
    if (!path.length) return;
    if (!this.showPath) this.togglePath(true);
    const known = path.findIndex((event) => event.item === chart.chosen);
    let at = known < 0 ? (by > 0 ? 0 : path.length - 1) : known;
    while (known >= 0 && path[at + by] && path[at].item === path[known].item) at += by;
    chart.go(path[at].item);
  },

  setMoment(moment) {
    const { whole } = this.view;
    this.moment = Math.min(whole, Math.max(0, moment));
    byId("time").value = String((1000 * this.moment) / whole);
    const words = withUnit(this.charts[0].run, this.moment);
    byId("time").setAttribute("aria-valuetext", words);
    byId("now").textContent = words;
    byId("at-moment").hidden = false;
    byId("at-moment").replaceChildren(element("h3", {}, `At ${words}`), ...this.charts.map(({ run }) => momentOf(run, this.moment)));
    address.soon();
    this.redrawOverlays();
  },

  step(by) {
    if (!this.charts.length) return;
    const moment = nextEvent(this.charts, this.moment ?? (by > 0 ? -1 : Infinity), by);
    if (Number.isFinite(moment)) this.setMoment(moment);
    if (!this.view.has(this.moment)) this.view.showAround(this.moment);
  },

  play() {
    this.playing = !this.playing;
    byId("play").textContent = this.playing ? "Pause" : "Play";
    if (!this.playing) return;
    const { whole } = this.view;
    const [began, from] = [performance.now(), this.moment === null || this.moment >= whole ? 0 : this.moment];
    const tick = (now) => {
      if (!this.playing) return;
      this.setMoment(from + (Math.max(0, now - began) / 1000 / PLAY_SECONDS) * whole);
      if (this.moment >= whole) this.play();
      else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  },

  /** For the address: what differs from what is shown at first. */
  inSight() {
    const { view, chosen, moment, charts, grid } = this;
    const found = view.inSight();
    if (charts.some(({ lanes }) => lanes.zoomed)) found.lanes = charts.map(({ lanes }) => `${lanes.from}:${lanes.to}`).join();
    if (grid.order !== "turns") found.order = grid.order;
    if (chosen) Object.assign(found, { chart: charts.indexOf(chosen.chart), task: chosen.chart.run.title(chosen.item) });
    if (this.showPath) found.path = "shown";
    return moment === null ? found : { ...found, moment };
  },

  bringInSight({ chart = 0, task, from, to, lanes = "", order = "turns", path, moment }) {
    const shown = this.charts[Number(chart)];
    const item = shown && task ? shown.run.itemNamed(task) : -1;
    if (item >= 0) shown.go(item);
    else this.choose(this.charts[0], null);
    this.view.show(Number(from ?? 0), Number(to ?? this.view.whole));
    const ranges = lanes.split(",").map((range) => range.split(":").map(Number));
    this.charts.forEach((each, place) => each.lanes.show(...(ranges[place]?.length === 2 ? ranges[place] : [0, each.lanes.whole])));
    if (Object.hasOwn(ORDERS, order)) this.grid.measure(order);
    this.togglePath(path !== undefined);
    if (moment !== undefined) this.setMoment(Number(moment) || 0);
  },
};

/** New charts, on one axis of time. */
function takeRuns(answer) {
  if (state.playing) state.play();
  const runs = answer.runs.map((data) => (data.kind === "tasks" ? new TaskRun(data) : new UnitRun(data)));
  Object.assign(state, { chosen: null, moment: null });
  const whole = 1.015 * Math.max(...runs.map((run) => Math.max(run.makespan, run.bound ?? 0)), 1e-9);
  state.view = new Stretch(whole, whole * LEAST_SPAN, state.view.changed);
  state.charts = runs.map((run) => new Chart(run, state));
  state.meanings = answer.meanings;
}

function showAnswer(answer, view = null) {
  const first = !state.charts.length;
  byId("layout").classList.remove("empty");
  takeRuns(answer);
  byId("title").replaceChildren(...answer.title.map((line) => element("p", {}, line)));
  byId("refused").textContent = answer.refused.map(([name, why]) => `${name} cannot serve this problem: ${why.split("\n")[0]}`).join(" ");
  byId("meanings").replaceChildren(listOf(Object.entries(answer.meanings)));
  byId("charts").replaceChildren(...state.charts.map((chart) => chart.figure));
  byId("tiles").replaceChildren(state.grid.figure);
  byId("command").replaceChildren("The same figures: ", element("code", {}, answer.command));
  byId("at-moment").hidden = true;
  byId("now").textContent = "";
  byId("time").value = "0";
  showDetails(byId("details"), null, null);
  showKeys(KEYS);
  showPath(state);
  address.options = byId("form").hidden ? {} : answer.options;
  resized();
  state.showAll();
  state.grid.show(state.charts[0], null);
  if (view) state.bringInSight(view);
  address.write(!first && !view);
  if (!first && narrow.matches) byId("layout").scrollIntoView();
}

function figuresOf(runs) {
  const names = [...new Set(runs.flatMap((run) => run.figures.map(([name]) => name)))];
  const meanings = { ...state.meanings, ...Object.fromEntries(runs.map((run) => [run.name, state.meanings[run.schedule]])) };
  const rows = runs.map((run) => {
    const values = Object.fromEntries(run.figures);
    return [run.name, ...names.map((name) => values[name] ?? "-")];
  });
  const title = runs[0].itemWord === "task" ? "schedule" : "";
  if (!narrow.matches) return tableOf([title, ...names], rows, null, meanings);
  return tableOf([title, ...rows.map(([name]) => name)], names.map((name, place) => [name, ...rows.map((row) => row[place + 1])]), null, meanings);
}

function resized() {
  for (const chart of [...state.charts, state.grid]) chart.measure();
  if (state.charts.length) fillLegend(byId("legend"), state.charts[0].legend());
  if (state.charts.length && !state.ledger) byId("figures").replaceChildren(figuresOf(state.charts.map((chart) => chart.run)));
  state.redraw();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";

function applyTheme(wanted = theme) {
  theme = wanted;
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  byId("theme").textContent = `Colours: ${theme}`;
  resized();
}

function listen() {
  for (const button of document.querySelectorAll("[data-key]")) {
    button.addEventListener("click", () => (state.chosen?.chart ?? state.charts[0])?.pressedKey(button.dataset.key));
  }
  byId("to-form").addEventListener("click", () => byId("form").scrollIntoView());
  byId("show-path").addEventListener("click", () => state.togglePath(!state.showPath));
  byId("time").addEventListener("input", () => state.charts.length && state.setMoment((Number(byId("time").value) / 1000) * state.view.whole));
  byId("path").addEventListener("toggle", () => showPath(state));
  byId("theme").addEventListener("click", () => applyTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]));
  dark.addEventListener("change", () => applyTheme());
  window.addEventListener("resize", resized);
  window.addEventListener("popstate", () => address.follow(window.explore.form));
}

async function begin() {
  listen();
  applyTheme();
  const [encoding, data] = await embeddedData();
  const { options, view } = readAddress();
  if (encoding !== "form") return data.kind === "ledgers" ? showLedgers(data, view) : showAnswer(data, view);
  const form = (window.explore.form = new Form(byId("form"), data, showAnswer));
  form.set(Object.keys(options).length ? options : data.options);
  return form.ask(view);
}

state.grid = new TileGrid(state);
window.explore = { state }; // for tests and for the curious
window.explore.ready = begin();
