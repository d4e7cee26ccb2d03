// A moment: what every worker does then, and the times at which something begins or ends.

const DOING = ["computing", "reducing", "adding dK and dV", "stalled", "starting a chain"];
const PLAY_SECONDS = 20; // for a whole run
const MOST_STALLED = 6;

function doingAt(run, moment) {
  const counts = new Array(DOING.length).fill(0);
  const stalled = [];
  for (let lane = 0; lane < run.lanes; lane++) {
    const bar = run.bars.at(lane, moment * run.ticks);
    if (bar < 0) continue;
    counts[run.bars.phase[bar]]++;
    if (run.bars.phase[bar] === STALL) stalled.push([lane, run.bars.item[bar]]);
  }
  return { counts, stalled };
}

function withUnit(run, time) {
  return `${plain(Number(time.toPrecision(7)))}${run.unit === "microseconds" ? " us" : ""}`;
}

function showMoment(section, charts, moment) {
  section.hidden = moment === null;
  if (moment === null) return;
  const parts = charts.map(({ run }) => momentOf(run, moment));
  section.replaceChildren(element("h3", {}, `At ${withUnit(charts[0].run, moment)}`), ...parts);
}

function momentOf(run, moment) {
  const { counts, stalled } = doingAt(run, moment);
  const busy = counts.reduce((sum, count) => sum + count, 0);
  const units = run.itemWord === "unit";
  const words = counts.map((count, phase) => (count ? `${count} ${units ? "units running" : DOING[phase]}` : "")).filter(Boolean);
  if (!units) words.push(`${run.workers - busy} idle`);
  const rows = stalled.slice(0, MOST_STALLED).map(([lane, item]) => element("li", {}, `worker ${lane}: ${run.title(item)} ${run.stallOf(item)}`));
  if (stalled.length > rows.length) rows.push(element("li", {}, `and ${stalled.length - rows.length} more stalled workers`));
  return element("div", {}, element("b", {}, `${run.name}: `), words.join(", "), element("ul", {}, ...rows));
}

/** The next time after (by = 1) or before (by = -1) a moment at which anything begins or ends; the moment itself if there is none. */
function nextEvent(charts, moment, by) {
  let best = by > 0 ? Infinity : -Infinity;
  const offer = (time) => {
    if (by > 0 ? time > moment && time < best : time < moment && time > best) best = time;
  };
  for (const { run } of charts) {
    for (const bars of [run.bars, run.back]) {
      if (!bars) continue;
      for (let lane = 0; lane < run.lanes; lane++) {
        const after = bars.after(lane, moment * run.ticks);
        const [first, end] = [Math.max(bars.first[lane], after - bars.atOnce - 1), Math.min(bars.first[lane + 1], after + 1)];
        for (let bar = first; bar < end; bar++) {
          offer(bars.start[bar] / run.ticks);
          offer(bars.end[bar] / run.ticks);
        }
      }
    }
  }
  return Number.isFinite(best) ? best : moment;
}
