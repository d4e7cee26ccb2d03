// The lower canvas of a chart: bars, axes, marks.

const MARGIN = { left: 52, right: 10, top: 4, bottom: 22 };
const MOST_CRISP = 6000; // bars that are drawn one by one
const LANE = 0.84; // of the distance between lanes
const BAND = 0.36; // share of a lane for reduces that go on behind the computes
const LEAST_CRISP = 5; // pixels of a lane

function drawChart(chart) {
  const { context, run, theme, plot, ratio } = chart;
  chart.clear(context);
  chart.crisp = isCrisp(chart);
  if (!chart.crisp) context.putImageData(averagedImage(chart), Math.round(plot.left * ratio), Math.round(plot.top * ratio));
  drawClipped(context, plot, () => {
    if (chart.crisp) drawBars(chart);
    drawTime(chart, context, run.makespan, theme.ink, 1.6);
    if (run.bound !== null) drawTime(chart, context, run.bound, theme.bound, 1.6, [5, 3]); // what no run can beat
  });
  drawAxes(chart);
}

function isCrisp(chart) {
  if (chart.laneHeight < LEAST_CRISP) return false;
  const inSight = [...chart.lanesInSight()].map((lane) => chart.barsInSight(chart.run.bars, lane));
  return inSight.reduce((count, [first, end]) => count + end - first, 0) <= MOST_CRISP;
}

function drawBars(chart) {
  const { context, run, palette, theme, plot } = chart;
  context.fillStyle = theme.idle;
  context.fillRect(plot.left, plot.top, chart.x(run.makespan) - plot.left, plot.height);
  const tall = chart.laneHeight * LANE * (run.back ? 1 - BAND : 1);
  const hatch = hatching(context, theme);
  for (const lane of chart.lanesInSight()) {
    const top = chart.laneTop(lane);
    for (const bars of run.back ? [run.bars, run.back] : [run.bars]) {
      const [first, end] = chart.barsInSight(bars, lane);
      for (let bar = first; bar < end; bar++) {
        const place = bars === run.back ? bandOf(chart, bars.item[bar], top + tall) : [top, tall];
        drawBar(chart, bars, bar, place, bars.phase[bar] === STALL ? hatch : palette.css[bars.colour[bar]]);
      }
    }
    if (run.byWorker && chart.laneHeight >= 10) outlineChains(chart, lane);
    if (run.perRank > 1 && lane % run.perRank === 0 && lane) {
      context.fillStyle = theme.muted;
      context.fillRect(plot.left, plot.top + (lane - chart.lanes.from) * chart.laneHeight - 0.5, plot.width, 1);
    }
  }
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
  const tile = element("canvas", { width: "6", height: "6" });
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

function drawTime(chart, context, time, ...look) {
  const { top, height } = chart.plot;
  strokeLine(context, [chart.x(time), top], [chart.x(time), top + height], ...look);
}

function drawAxes(chart) {
  const { context, theme, plot, view } = chart;
  const floor = plot.top + plot.height;
  [context.fillStyle, context.strokeStyle, context.lineWidth] = [theme.muted, theme.line, 1];
  context.font = "11px system-ui, sans-serif";
  [context.textAlign, context.textBaseline] = ["center", "top"];
  const step = niceStep(view.span / Math.max(2, plot.width / 90));
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

// Many bars: every pixel has the average colour of what its lane did meanwhile, in one pass over the bars in sight.

/** An image of a chart's plot, in pixels of the screen: a row shows one lane or several, and rows of the same lanes are copies. */
function averagedImage(chart) {
  const { run, palette, view, lanes } = chart;
  const [width, height] = [chart.plot.width, chart.plot.height].map((length) => Math.max(1, Math.round(length * chart.ratio)));
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const rowsPerLane = height / lanes.span;
  const laneAt = (row) => Math.min(Math.ceil(lanes.to) - 1, Math.floor(lanes.from + (row + 0.001) / rowsPerLane));
  const inside = Math.min(width, Math.max(0, Math.ceil(((run.makespan - view.from) / view.span) * width)));
  for (let row = 0; row < height; row++) {
    const [first, next] = [laneAt(row), laneAt(row + 1)];
    if (rowsPerLane >= 4 && next > first) continue; // a gap between lanes
    if (row && first === laneAt(row - 1)) pixels.copyWithin(row * width, (row - 1) * width, row * width);
    else writeRow(averageOf(chart, width, first, Math.max(first + 1, next)), palette.idle, pixels, row * width, inside);
  }
  return image;
}

/** By how much the colours of lanes [first, end) differ from that of idle time, on average, pixel by pixel. */
function averageOf(chart, width, first, end) {
  const sums = new Float32Array(3 * width);
  for (let lane = first; lane < end; lane++) addLane(chart, width, lane, sums, 1 / (end - first));
  return sums;
}

function addLane(chart, width, lane, sums, weight) {
  const { bars, ticks } = chart.run;
  const [scale, colours, [r0, g0, b0]] = [width / chart.view.span, chart.palette.flat, chart.palette.idle];
  const [perTick, shift] = [scale / ticks, chart.view.from * scale];
  const [first, end] = chart.barsInSight(bars, lane);
  for (let bar = first; bar < end; bar++) {
    const left = Math.max(0, bars.start[bar] * perTick - shift);
    const right = Math.min(width, bars.end[bar] * perTick - shift);
    if (right <= left) continue;
    const colour = 3 * bars.colour[bar];
    const [r, g, b] = [weight * (colours[colour] - r0), weight * (colours[colour + 1] - g0), weight * (colours[colour + 2] - b0)];
    const last = Math.ceil(right) - 1;
    for (let x = Math.floor(left); x <= last; x++) {
      const share = Math.min(right, x + 1) - Math.max(left, x);
      sums[3 * x] += share * r;
      sums[3 * x + 1] += share * g;
      sums[3 * x + 2] += share * b;
    }
  }
}

const clamped = (value) => (value < 0 ? 0 : value > 255 ? 255 : value + 0.5) | 0;

function writeRow(sums, [r, g, b], pixels, first, inside) {
  for (let x = 0; x < inside; x++) {
    pixels[first + x] = 0xff000000 | (clamped(b + sums[3 * x + 2]) << 16) | (clamped(g + sums[3 * x + 1]) << 8) | clamped(r + sums[3 * x]);
  }
}
