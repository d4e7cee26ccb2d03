// The upper canvas of a chart: what changes often. The chosen task and its links, the critical path, the moment.

const LEAST_BORDERED = 8; // pixels of an event of the path, on average

function drawOverlay(chart) {
  const { over: context, plot, theme, state } = chart;
  chart.clear(context);
  drawClipped(context, plot, () => {
    if (state.showPath) drawPath(chart);
    const shown = state.chosen === null ? chart.hovered : chart.chosen;
    if (shown !== null) drawLinks(chart, shown);
    if (chart.hovered !== null) drawBorders(chart, chart.hovered, 1.2);
    if (state.moment !== null) drawTime(chart, context, state.moment, theme.chosen, 1.2);
  });
}

/** Left, top, width and height of a phase of a task. */
function boxOf(chart, item, phase, index = item) {
  const [start, end] = chart.run.span(item, phase, index);
  const tall = chart.laneHeight * LANE;
  let [top, height] = [chart.laneTop(chart.run.laneOf(item)), tall];
  if (chart.run.back && phase === COMPUTE) height = tall * (1 - BAND);
  if (chart.run.back && phase !== COMPUTE) [top, height] = bandOf(chart, item, top + tall * (1 - BAND));
  return [chart.x(start), top, Math.max(1.5, chart.x(end) - chart.x(start)), Math.max(2, height)];
}

/** Where links begin and end. */
const startOf = ([left, top, , height]) => [left, top + height / 2];
const endOf = ([left, top, width, height]) => [left + width, top + height / 2];

function drawLinks(chart, item) {
  const { run } = chart;
  for (const need of run.needs(item)) {
    if (need.item === item && need.of !== undefined) continue;
    link(chart, boxOf(chart, need.item, need.of ?? COMPUTE), boxOf(chart, item, need.phase), need.last ? [] : [4, 3]);
  }
  for (const other of run.neededBy(item)) {
    link(chart, boxOf(chart, item, other.of === COMPUTE && !run.drains ? COMPUTE : REDUCE), boxOf(chart, other.item, other.of ?? COMPUTE), [1, 3]);
  }
  drawBorders(chart, item, 2.2);
}

function drawBorders(chart, item, width) {
  const { over: context, run, theme } = chart;
  [context.strokeStyle, context.lineWidth] = [theme.chosen, width];
  for (const phase of run.phases) context.strokeRect(...boxOf(chart, item, phase));
}

function link(chart, from, to, dashes) {
  const { over: context, theme } = chart;
  strokeLine(context, endOf(from), startOf(to), theme.chosen, 1.3, dashes);
  context.fillStyle = theme.chosen;
  context.beginPath();
  context.arc(...startOf(to), 2.2, 0, 2 * Math.PI);
  context.fill();
}

/** The events that decide the makespan: a line through them, which goes no way twice; where there is room, also their borders. */
function drawPath(chart) {
  const { over: context, theme, run, plot } = chart;
  const [first, end] = pathInSight(chart);
  const bordered = (end - first) * LEAST_BORDERED <= chart.x(Math.min(run.makespan, chart.view.to)) - plot.left && chart.crisp;
  const path = new Path2D();
  let before = [NaN, NaN];
  const lineTo = (point) => {
    if (point.every((place, axis) => Math.abs(place - before[axis]) < 1)) return;
    path.lineTo(...point);
    before = point;
  };
  for (const { item, phase, index } of run.path.slice(first, end)) {
    const box = boxOf(chart, item, phase, index);
    lineTo(startOf(box));
    if (bordered) path.rect(...box);
    if (bordered) path.moveTo(...endOf(box));
    lineTo(endOf(box));
  }
  for (const [colour, thickness] of [[theme.paper, 4.5], [theme.ink, 2]]) {
    [context.strokeStyle, context.lineWidth] = [colour, thickness];
    context.stroke(path);
  }
}

/** [first, end) of the events of the path that touch what is in sight, and one more at each end. They follow each other in time. */
function pathInSight({ run: { path, pathSpans }, view }) {
  const first = firstWhere(0, path.length, (place) => pathSpans[2 * place + 1] >= view.from);
  return [Math.max(0, first - 1), Math.min(path.length, firstWhere(0, path.length, (place) => pathSpans[2 * place] > view.to) + 1)];
}
