// The page: what charts share, and the buttons above them.

const byId = (id) => document.getElementById(id);
const THEMES = ["system", "light", "dark"];
const LEAST_SPAN = 1e-6; // of the whole time that can be in sight

const state = {
  charts: [],
  view: { from: 0, to: 1 },
  whole: 1,
  chosen: null,
  moment: null,
  showPath: false,
  playing: null,
  ledgers: null, // the chart of two runs, where the page is about those

  show(from, to) {
    const span = Math.min(this.whole, Math.max(this.whole * LEAST_SPAN, to - from));
    this.view.from = Math.min(this.whole - span, Math.max(0, from));
    this.view.to = this.view.from + span;
    this.redrawSoon();
  },

  showAll() {
    for (const chart of this.charts) chart.lanes = { from: 0, to: chart.run.lanes };
    this.show(0, this.whole);
  },

  zoom(factor, around = this.middle()) {
    this.show(around - (around - this.view.from) * factor, around + (this.view.to - around) * factor);
  },

  /** Keyboard and buttons zoom around the chosen task, else around the middle. */
  middle() {
    const { chosen, view } = this;
    const time = chosen === null ? NaN : chosen.chart.run.span(chosen.item, COMPUTE)[0];
    return time >= view.from && time <= view.to ? time : (view.from + view.to) / 2;
  },

  redrawSoon() {
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

  hovered(chart) {
    if (this.chosen === null) showDetails(byId("details"), chart, chart.hovered);
  },

  choose(chart, item) {
    this.chosen = item === null ? null : { chart, item };
    showDetails(byId("details"), chart, item);
    byId("spoken").textContent = item === null ? "Nothing is chosen." : spoken(chart, item);
    if (byId("path").open) showPath(byId("path").lastElementChild, this.charts, this);
    this.redrawOverlays();
  },

  togglePath(shown) {
    this.showPath = shown;
    byId("show-path").setAttribute("aria-pressed", String(shown));
    this.redrawOverlays();
  },

  alongPath(chart, by) {
    const { path } = chart.run;
    if (!path.length) return;
    if (!this.showPath) this.togglePath(true);
    const known = this.chosen?.chart === chart ? path.findIndex((event) => event.item === this.chosen.item) : -1;
    let at = known < 0 ? (by > 0 ? 0 : path.length - 1) : known;
    while (known >= 0 && path[at + by] && path[at].item === path[known].item) at += by;
    chart.go(path[at].item);
  },

  setMoment(moment) {
    this.moment = Math.min(this.whole, Math.max(0, moment));
    byId("time").value = String((1000 * this.moment) / this.whole);
    const words = withUnit(this.charts[0].run, this.moment);
    byId("time").setAttribute("aria-valuetext", words);
    byId("now").textContent = words;
    showMoment(byId("at-moment"), this.charts, this.moment);
    this.redrawOverlays();
  },

  step(by) {
    if (!this.charts.length) return;
    const moment = nextEvent(this.charts, this.moment ?? (by > 0 ? -1 : Infinity), by);
    if (Number.isFinite(moment)) this.setMoment(moment);
    const span = this.view.to - this.view.from;
    if (this.moment < this.view.from || this.moment > this.view.to) this.show(this.moment - span / 2, this.moment + span / 2);
  },

  play() {
    byId("play").textContent = this.playing === null ? "Pause" : "Play";
    if (this.playing !== null) {
      this.playing = null;
      return;
    }
    this.playing = performance.now();
    let before = this.playing;
    const start = this.moment === null || this.moment >= this.whole ? 0 : this.moment;
    this.setMoment(start);
    const tick = (now) => {
      if (this.playing === null) return;
      this.setMoment(this.moment + ((now - before) / 1000 / PLAY_SECONDS) * this.whole);
      before = now;
      if (this.moment >= this.whole) this.play();
      else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  },

  /** The chart that keys of the toolbar act on. */
  active() {
    return this.chosen?.chart ?? this.charts[0];
  },
};

function showAnswer(answer) {
  state.playing = null;
  byId("play").textContent = "Play";
  const runs = answer.runs.map((data) => (data.kind === "tasks" ? new TaskRun(data) : new UnitRun(data)));
  Object.assign(state, { chosen: null, moment: null });
  state.whole = 1.015 * Math.max(...runs.map((run) => Math.max(run.makespan, run.bound ?? 0)), 1e-9);
  state.charts = runs.map((run) => new Chart(run, state));
  byId("title").replaceChildren(...answer.title.map((line) => element("p", {}, line)));
  byId("refused").textContent = answer.refused.map(([name, why]) => `${name} cannot serve this problem: ${why.split("\n")[0]}`).join(" ");
  byId("figures").replaceChildren(figuresOf(runs));
  byId("charts").replaceChildren(...state.charts.map((chart) => chart.figure));
  byId("command").replaceChildren("The same figures: ", element("code", {}, answer.command));
  byId("at-moment").hidden = true;
  byId("now").textContent = "";
  byId("time").value = "0";
  showDetails(byId("details"), null, null);
  if (byId("path").open) showPath(byId("path").lastElementChild, state.charts, state);
  resized();
  state.showAll();
}

function figuresOf(runs) {
  const names = [...new Set(runs.flatMap((run) => run.figures.map(([name]) => name)))];
  const head = element("tr", {}, element("th", { scope: "col" }, runs[0].itemWord === "task" ? "schedule" : ""), ...names.map((name) => element("th", { scope: "col" }, name)));
  const rows = runs.map((run) => {
    const values = Object.fromEntries(run.figures);
    return element("tr", {}, element("th", { scope: "row" }, run.name), ...names.map((name) => element("td", {}, values[name] ?? "-")));
  });
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function showLegend() {
  const run = state.charts[0]?.run;
  if (!run) return;
  const { theme, palette } = state.charts[0];
  const own = run.itemWord === "task" ? palette.css.slice(0, run.q_tiles) : palette.css.slice(0, 8);
  const entries = [[run.itemWord === "task" ? `compute, by Q tile (0 to ${run.q_tiles - 1})` : "units, by heads; a number is the chunk of their keys", own]];
  if (run.itemWord === "task") entries.push(["reduce", palette.css.slice(run.q_tiles, 2 * run.q_tiles)], ["stall", [theme.stall]], ["start of a chain", [theme.startup]]);
  if (run.adds?.count) entries.push(["add dK and dV", [theme.add]]);
  entries.push(["idle", [theme.idle]], ["makespan", [theme.ink]]);
  if (run.bound !== null) entries.push(["lower bound", [theme.bound]]);
  byId("legend").replaceChildren(...entries.map(([text, colours]) => element("li", {}, swatch(colours), text)));
}

function swatch(colours) {
  const canvas = element("canvas", { width: "26", height: "12", "aria-hidden": "true" });
  const brush = canvas.getContext("2d");
  for (let x = 0; x < 26; x++) {
    brush.fillStyle = colours[Math.floor((x / 26) * colours.length)];
    brush.fillRect(x, 0, 1, 12);
  }
  return canvas;
}

function resized() {
  for (const chart of state.charts) chart.measure();
  showLegend();
  state.redraw();
  if (state.ledgers === null) return;
  state.ledgers.measure();
  ledgerLegend(state.ledgers);
  state.ledgers.draw();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";

function applyTheme() {
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  byId("theme").textContent = `Colours: ${theme}`;
  byId("theme").setAttribute("aria-label", `Colours: ${theme}`);
  resized();
}

function listen() {
  const actions = {
    in: () => state.zoom(0.6),
    out: () => state.zoom(1 / 0.6),
    all: () => state.showAll(),
    "path-on": () => state.alongPath(state.active(), 1),
    "path-back": () => state.alongPath(state.active(), -1),
    "step-on": () => state.step(1),
    "step-back": () => state.step(-1),
  };
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => state.charts.length && actions[button.dataset.do]());
  byId("show-path").addEventListener("click", () => state.togglePath(!state.showPath));
  byId("play").addEventListener("click", () => state.charts.length && state.play());
  byId("time").addEventListener("input", () => state.charts.length && state.setMoment((Number(byId("time").value) / 1000) * state.whole));
  byId("path").addEventListener("toggle", () => byId("path").open && showPath(byId("path").lastElementChild, state.charts, state));
  byId("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    applyTheme();
  });
  dark.addEventListener("change", applyTheme);
  window.addEventListener("resize", resized);
}

async function begin() {
  listen();
  applyTheme();
  const [packing, data] = await embeddedData();
  if (packing !== "form") return data.kind === "ledgers" ? showLedgers(data) : showAnswer(data);
  window.explore.form = new Form(byId("form"), data, showAnswer);
  return window.explore.form.ask();
}

window.explore = { state }; // for tests and for the curious
window.explore.ready = begin();
