// What is said of the charts: one task, what it waits for and who waits for it; a moment; the critical path.

function showDetails(panel, chart, item) {
  if (chart === null || item === null) {
    panel.replaceChildren(element("p", { class: "hint" }, "Point at a task, tap it, or choose one with the arrow keys."));
    return;
  }
  const { run } = chart;
  const [needs, others] = [run.needs(item).filter((need) => need.item !== item), run.neededBy(item)];
  panel.replaceChildren(
    element("h2", {}, run.title(item)),
    element("p", { class: "hint" }, `${run.name} (${run.unit})`),
    listOf(run.facts(item)),
    element("h3", {}, "Waits for"),
    needs.length ? linksOf(chart, needs, (need) => `until ${plain(need.at)}${need.last ? ", the last to come" : ""}`) : nothing(),
    element("h3", {}, "Waited for by"),
    others.length ? linksOf(chart, others, () => "") : nothing(),
  );
}

const nothing = () => element("p", { class: "hint" }, "nothing");

function linksOf(chart, links, note) {
  const phases = { [COMPUTE]: "to compute: ", [REDUCE]: "to reduce: " };
  const rows = links.slice(0, 40).map((found) => {
    const button = element("button", { type: "button", onclick: () => chart.go(found.item) }, chart.run.title(found.item));
    const to = (chart.run.phases.length > 1 && phases[found.phase]) || "";
    return element("li", found.last ? { class: "last" } : {}, `${to}${found.words} `, button, ` ${note(found)}`);
  });
  if (links.length > rows.length) rows.push(element("li", {}, `and ${links.length - rows.length} more`));
  return element("ul", {}, ...rows);
}

function showKeys(keys) {
  byId("keys").replaceChildren(element("summary", {}, "Keys"), listOf(keys));
}

/** One sentence for screen readers. */
function spoken(chart, item) {
  const { run } = chart;
  const facts = run.facts(item).map(([name, value]) => `${name} ${value}`).join(", ");
  const last = run.needs(item).filter((need) => need.last && need.item !== item).map((need) => `${need.words} ${run.title(need.item)}`);
  const waited = last.length ? `Waited last for ${last.join(" and ")}.` : "Waited for nothing.";
  const others = run.neededBy(item).map((found) => run.title(found.item));
  return `${run.title(item)}: ${facts}. ${waited} ${others.length ? `Waited for by ${others.slice(0, 6).join(", ")}.` : "Nobody waits for it."}`;
}

const DOING = ["computing", "reducing", "adding dK and dV", "stalled", "starting a chain"];
const PLAY_SECONDS = 20; // for a whole run
const MOST_STALLED = 6;

function withUnit(run, time) {
  return `${plain(Number(time.toPrecision(7)))}${run.unit === "microseconds" ? " us" : ""}`;
}

function momentOf(run, moment) {
  const lanes = Array.from({ length: run.lanes }, (_, lane) => ({ lane, bar: run.bars.at(lane, moment * run.ticks) })).filter(({ bar }) => bar >= 0);
  const inPhase = (phase) => lanes.filter(({ bar }) => run.bars.phase[bar] === phase);
  const units = run.itemWord === "unit";
  const words = DOING.map((doing, phase) => [inPhase(phase).length, doing]).filter(([count]) => count).map(([count, doing]) => (units ? `${counted(count, "unit")} running` : `${count} ${doing}`));
  if (!units) words.push(`${run.workers - lanes.length} idle`);
  const stalled = inPhase(STALL).map(({ lane, bar }) => [lane, run.bars.item[bar]]);
  const rows = stalled.slice(0, MOST_STALLED).map(([lane, item]) => element("li", {}, `worker ${lane}: ${run.title(item)} ${run.stallOf(item)}`));
  if (stalled.length > rows.length) rows.push(element("li", {}, `and ${counted(stalled.length - rows.length, "more stalled worker")}`));
  return element("div", {}, element("b", {}, `${run.name}: `), words.join(", "), element("ul", {}, ...rows));
}

/** The next time after (by = 1) or before (by = -1) a moment at which anything begins or ends; the moment itself if there is none. */
function nextEvent(charts, moment, by) {
  const times = [];
  for (const { run } of charts) {
    for (const bars of [run.bars, run.back].filter(Boolean)) {
      for (let lane = 0; lane < run.lanes; lane++) {
        const after = bars.after(lane, moment * run.ticks);
        const about = [Math.max(bars.first[lane], after - bars.atOnce - 1), Math.min(bars.first[lane + 1], after + 1)];
        for (const column of [bars.start, bars.end]) times.push(...column.slice(...about).map((time) => time / run.ticks));
      }
    }
  }
  const beyond = times.filter((time) => (by > 0 ? time > moment : time < moment));
  return beyond.length ? Math[by > 0 ? "min" : "max"](...beyond) : moment;
}

const AROUND = 8;

/** Around the chosen event, while anybody looks. */
function showPath({ charts }) {
  if (byId("path").open) byId("path").lastElementChild.replaceChildren(...charts.map(pathOf));
}

function pathOf(chart) {
  const { run } = chart;
  const counts = new Map();
  for (const { cause } of run.path) counts.set(cause, (counts.get(cause) ?? 0) + 1);
  const causes = [...counts].map(([cause, count]) => `${cause} ${plain(count)}`);
  const at = Math.max(0, run.path.findIndex((event) => event.item === chart.chosen));
  const from = Math.max(0, Math.min(at - AROUND, run.path.length - 2 * AROUND - 1));
  const rows = run.path.slice(from, from + 2 * AROUND + 1).map((event, place) => rowOf(chart, event, from + place));
  const table = tableOf(["", "event", "from", "to", "waited for"], rows, { class: "left" });
  return element("div", { class: "scroll" }, element("h3", {}, `${run.name}: ${counted(run.path.length, "event")}`), element("p", { class: "hint" }, `What they waited for last: ${causes.join(", ")}`), table);
}

function rowOf(chart, { item, phase, index, cause }, place) {
  const { run } = chart;
  const button = element("button", { type: "button", onclick: () => chart.go(item) }, run.title(item));
  const what = [button, run.phases.length > 1 ? ` ${PHASES[phase]}` : ""];
  const need = run.needs(item).find((each) => each.last && each.phase === phase);
  return [String(place + 1), what, ...run.span(item, phase, index).map(plain), need ? `${need.words} ${run.title(need.item)}` : cause];
}
