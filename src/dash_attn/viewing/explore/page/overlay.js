// The upper canvas of a chart: what changes often. The chosen task and its links, the critical path, the moment.

function drawOverlay(chart) {
  const { over: context, plot, theme, state } = chart;
  context.setTransform(chart.ratio, 0, 0, chart.ratio, 0, 0);
  context.clearRect(0, 0, chart.width, chart.height);
  context.save();
  context.beginPath();
  context.rect(plot.left, plot.top, plot.width, plot.height);
  context.clip();
  if (state.showPath) drawPath(chart);
  const shown = chart.shown();
  if (shown !== null) drawLinks(chart, shown);
  if (state.moment !== null) drawMoment(chart);
  context.restore();
  if (chart.focused) {
    [context.strokeStyle, context.lineWidth] = [theme.bound, 2];
    context.strokeRect(plot.left, plot.top, plot.width, plot.height);
  }
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

function middleOf([left, top, width, height], side) {
  return [left + (side === "end" ? width : 0), top + height / 2];
}

function drawLinks(chart, item) {
  const { over: context, run, theme } = chart;
  for (const need of run.needs(item)) {
    if (need.item === item && need.of !== undefined) continue;
    link(chart, boxOf(chart, need.item, need.of ?? COMPUTE), boxOf(chart, item, need.phase), need.last ? [] : [4, 3]);
  }
  for (const other of run.neededBy(item)) {
    link(chart, boxOf(chart, item, other.of === COMPUTE && !run.drains ? COMPUTE : REDUCE), boxOf(chart, other.item, other.of ?? COMPUTE), [1, 3]);
  }
  [context.strokeStyle, context.lineWidth] = [theme.chosen, 2.2];
  for (const phase of run.itemWord === "task" ? [COMPUTE, REDUCE] : [COMPUTE]) context.strokeRect(...boxOf(chart, item, phase));
}

function link(chart, from, to, dashes) {
  const { over: context, theme } = chart;
  const [a, b] = [middleOf(from, "end"), middleOf(to, "start")];
  [context.strokeStyle, context.fillStyle, context.lineWidth] = [theme.chosen, theme.chosen, 1.3];
  context.setLineDash(dashes);
  context.beginPath();
  context.moveTo(...a);
  context.lineTo(...b);
  context.stroke();
  context.setLineDash([]);
  context.beginPath();
  context.arc(...b, 2.2, 0, 2 * Math.PI);
  context.fill();
}

/** A line through all events that decide the makespan; those in sight also get a border. */
function drawPath(chart) {
  const { over: context, run, theme, plot } = chart;
  const boxes = run.path.map(({ item, phase, index }) => boxOf(chart, item, phase, index));
  const inSight = boxes.filter(([left, , width]) => left + width >= plot.left && left <= plot.left + plot.width);
  for (const [colour, thickness] of [[theme.paper, 4], [theme.ink, 1.8]]) {
    [context.strokeStyle, context.lineWidth, context.lineJoin] = [colour, thickness, "round"];
    context.beginPath();
    for (const box of boxes) {
      context.lineTo(...middleOf(box, "start"));
      context.lineTo(...middleOf(box, "end"));
    }
    context.stroke();
  }
  if (inSight.length > 400) return;
  [context.strokeStyle, context.lineWidth] = [theme.ink, 1.4];
  for (const box of inSight) context.strokeRect(...box);
}

function drawMoment(chart) {
  const { over: context, plot, theme, state } = chart;
  [context.strokeStyle, context.lineWidth] = [theme.chosen, 1.2];
  context.beginPath();
  context.moveTo(chart.x(state.moment), plot.top);
  context.lineTo(chart.x(state.moment), plot.top + plot.height);
  context.stroke();
}
