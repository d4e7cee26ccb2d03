// The critical path in words: what it is made of, and the events around the chosen one.

const AROUND = 8;
const MEANING = {
  start: "nothing: it could start at once",
  worker: "its worker, busy with the chain before",
  compute: "a compute",
  buffer: "an earlier reduce of its chain, which frees a buffer",
  drain: "a free drain",
  turn: "the turn before",
  rank: "its rank",
  states: "its states, from the unit before",
  turns: "turns of another unit",
  keys: "keys and values, gathered from all ranks",
};

function showPath(box, charts, state) {
  box.replaceChildren(...charts.map((chart) => pathOf(chart, state)));
}

function pathOf(chart, state) {
  const { run } = chart;
  const counts = new Map();
  for (const { cause } of run.path) counts.set(cause, (counts.get(cause) ?? 0) + 1);
  const causes = [...counts].map(([cause, count]) => `${plain(count)} waited for ${MEANING[cause] ?? cause}`);
  const at = Math.max(0, state.chosen?.chart === chart ? run.path.findIndex((event) => event.item === state.chosen.item) : 0);
  const from = Math.max(0, Math.min(at - AROUND, run.path.length - 2 * AROUND - 1));
  const rows = run.path.slice(from, from + 2 * AROUND + 1).map((event, place) => rowOf(chart, event, from + place));
  const head = element("tr", {}, ...["", "event", "from", "to", "waited for"].map((word) => element("th", { scope: "col" }, word)));
  const table = element("table", { class: "left" }, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", {}, element("h3", {}, `${run.name}: ${plain(run.path.length)} events`), element("p", { class: "hint" }, causes.join("; ")), table);
}

function rowOf(chart, event, place) {
  const { run } = chart;
  const [start, end] = run.span(event.item, event.phase, event.index);
  const button = element("button", { type: "button", onclick: () => chart.go(event.item) }, run.title(event.item));
  const what = element("td", {}, button, run.itemWord === "task" ? ` ${PHASES[event.phase]}` : "");
  const cells = [plain(start), plain(end), MEANING[event.cause] ?? event.cause].map((text) => element("td", {}, text));
  return element("tr", {}, element("td", {}, String(place + 1)), what, ...cells);
}
