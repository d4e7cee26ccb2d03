// The lower canvas of a chart: bars, axes, marks.

const MARGIN = { left: 52, right: 10, top: 4, bottom: 22 };
const MOST_CRISP = 6000; // bars that are drawn one by one
const LANE = 0.84; // of the distance between lanes
const BAND = 0.36; // share of a lane for reduces that go on behind the computes
const LEAST_CRISP = 5; // pixels of a lane

/** What a chart shows, in pixels of the screen. */
function sceneOf(chart) {
  const ratio = chart.ratio;
  return {
    ratio,
    width: Math.max(1, Math.round(chart.plot.width * ratio)),
    height: Math.max(1, Math.round(chart.plot.height * ratio)),
    from: chart.view.from,
    to: chart.view.to,
    firstLane: chart.lanes.from,
    lastLane: chart.lanes.to,
  };
}

function drawChart(chart) {
  const { context, run, palette, theme, plot } = chart;
  const scene = sceneOf(chart);
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, context.canvas.width, context.canvas.height);
  chart.crisp = isCrisp(chart);
  if (!chart.crisp) {
    context.putImageData(averagedImage(run, palette, scene), Math.round(plot.left * chart.ratio), Math.round(plot.top * chart.ratio));
  }
  context.setTransform(chart.ratio, 0, 0, chart.ratio, 0, 0);
  context.save();
  context.beginPath();
  context.rect(plot.left, plot.top, plot.width, plot.height);
  context.clip();
  if (chart.crisp) drawBars(chart);
  drawMarks(chart);
  context.restore();
  drawAxes(context, chart, theme);
}

function isCrisp(chart) {
  if (chart.laneHeight < LEAST_CRISP) return false;
  let count = 0;
  for (const lane of chart.lanesInSight()) {
    const [first, end] = chart.run.bars.between(lane, chart.view.from * chart.run.ticks, chart.view.to * chart.run.ticks);
    count += end - first;
  }
  return count <= MOST_CRISP;
}

function drawBars(chart) {
  const { context, run, palette, theme, plot } = chart;
  const [from, to] = [chart.view.from * run.ticks, chart.view.to * run.ticks];
  context.fillStyle = theme.idle;
  context.fillRect(plot.left, plot.top, chart.x(run.makespan) - plot.left, plot.height);
  const tall = chart.laneHeight * LANE * (run.back ? 1 - BAND : 1);
  const hatch = hatching(context, theme);
  for (const lane of chart.lanesInSight()) {
    const top = chart.laneTop(lane);
    const [first, end] = run.bars.between(lane, from, to);
    for (let bar = first; bar < end; bar++) drawBar(chart, run.bars, bar, [top, tall], run.bars.phase[bar] === STALL ? hatch : palette.css[run.bars.colour[bar]]);
    if (run.back) drawBack(chart, lane, top + tall);
    if (run.byWorker && chart.laneHeight >= 10) outlineChains(chart, lane);
    if (run.perRank > 1 && lane % run.perRank === 0 && lane) separateRanks(chart, lane);
  }
}

/** Where a rank has several lanes. */
function separateRanks(chart, lane) {
  const { context, theme, plot } = chart;
  context.fillStyle = theme.muted;
  context.fillRect(plot.left, plot.top + (lane - chart.lanes.from) * chart.laneHeight - 0.5, plot.width, 1);
}

function drawBar(chart, bars, bar, [top, tall], fill) {
  const { context, run } = chart;
  const [left, right] = [chart.x(bars.start[bar] / run.ticks), chart.x(bars.end[bar] / run.ticks)];
  const gap = right - left > 4 ? 0.5 : 0;
  context.fillStyle = fill;
  context.fillRect(left, top, Math.max(0.5, right - left - gap), Math.max(1, tall));
  if (bars.phase[bar] !== COMPUTE || tall < 11) return;
  const label = run.label(bars.item[bar]);
  if (right - left < 7 * label.length + 4) return;
  context.fillStyle = chart.palette.text[bars.colour[bar]];
  context.font = `${Math.min(12, Math.round(tall * 0.7))}px system-ui, sans-serif`;
  [context.textAlign, context.textBaseline] = ["center", "middle"];
  context.fillText(label, (left + right) / 2, top + tall / 2 + 0.5);
}

/** Reduces that go on behind the computes, each in the band of its drain. */
function drawBack(chart, lane, top) {
  const { run } = chart;
  const [first, end] = run.back.between(lane, chart.view.from * run.ticks, chart.view.to * run.ticks);
  for (let bar = first; bar < end; bar++) drawBar(chart, run.back, bar, bandOf(chart, run.back.item[bar], top), chart.palette.css[run.back.colour[bar]]);
}

/** Top and height of the band in which a task's reduce is drawn. */
function bandOf(chart, item, top) {
  const band = (chart.laneHeight * LANE * BAND) / chart.run.drains;
  return [top + band * (chart.run.placeOf(item) % chart.run.drains), band];
}

function outlineChains(chart, lane) {
  const { context, run, theme } = chart;
  context.strokeStyle = theme.chain;
  context.lineWidth = 0.9;
  for (const chain of run.byWorker[lane]) {
    const [left, right] = [chart.x(run.chains.start[chain] / run.ticks), chart.x(run.chains.end[chain] / run.ticks)];
    if (right > chart.plot.left && left < chart.plot.left + chart.plot.width) context.strokeRect(left, chart.laneTop(lane), right - left, chart.laneHeight * LANE);
  }
}

function hatching(context, theme) {
  const tile = document.createElement("canvas");
  [tile.width, tile.height] = [6, 6];
  const brush = tile.getContext("2d");
  brush.fillStyle = theme["stall-pale"];
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = theme.stall;
  brush.lineWidth = 1.3;
  for (const shift of [-6, 0, 6]) {
    brush.moveTo(shift - 1, 7);
    brush.lineTo(shift + 7, -1);
  }
  brush.stroke();
  return context.createPattern(tile, "repeat");
}

/** The end of the run, and the bound that it cannot beat. */
function drawMarks(chart) {
  const { context, run, theme, plot } = chart;
  const line = (time, colour, dashes) => {
    context.strokeStyle = colour;
    context.lineWidth = 1.6;
    context.setLineDash(dashes);
    context.beginPath();
    context.moveTo(chart.x(time), plot.top);
    context.lineTo(chart.x(time), plot.top + plot.height);
    context.stroke();
    context.setLineDash([]);
  };
  line(run.makespan, theme.ink, []);
  if (run.bound !== null) line(run.bound, theme.bound, [5, 3]);
}

function drawAxes(context, chart, theme) {
  const { plot, view } = chart;
  const floor = plot.top + plot.height;
  [context.fillStyle, context.strokeStyle, context.lineWidth] = [theme.muted, theme.line, 1];
  context.font = "11px system-ui, sans-serif";
  [context.textAlign, context.textBaseline] = ["center", "top"];
  const step = niceStep((view.to - view.from) / Math.max(2, plot.width / 90));
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
    context.fillRect(chart.x(time), floor, 1, 4);
    context.fillText(plain(Number(time.toPrecision(12))), chart.x(time), floor + 6);
  }
  [context.textAlign, context.textBaseline] = ["right", "middle"];
  const skip = Math.max(1, niceStep(14 / chart.laneHeight));
  for (const lane of chart.lanesInSight()) {
    const name = chart.run.laneName(lane);
    const middle = chart.laneTop(lane) + (chart.laneHeight * LANE) / 2;
    if (name !== "" && Number(name) % skip === 0 && middle >= plot.top && middle <= floor) context.fillText(name, plot.left - 6, middle);
  }
  context.save();
  context.translate(10, plot.top + plot.height / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText(chart.run.laneWord, 0, 0);
  context.restore();
}

/** 1, 2 or 5 times a power of ten, at least as large. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999);
}
