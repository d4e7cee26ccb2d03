// Many bars: every pixel has the average colour of what its lane did meanwhile, in one pass over the bars in sight.

/** An image of a chart's plot, in pixels of the screen. `scene`: what is in sight (see sceneOf in drawing.js). */
function averagedImage(run, palette, scene) {
  const { width, height, from, to, firstLane, lastLane } = scene;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const sums = new Float32Array(3 * width);
  const rowsPerLane = height / (lastLane - firstLane);
  const inside = Math.min(width, Math.max(0, Math.ceil(((run.makespan - from) / (to - from)) * width)));
  for (const [lanes, rows] of groups(scene, rowsPerLane)) {
    sums.fill(0);
    for (let lane = lanes[0]; lane < lanes[1]; lane++) addLane(run, palette, scene, lane, sums, 1 / (lanes[1] - lanes[0]));
    const first = rows[0] * width;
    writeRow(sums, palette.idle, pixels, first, inside);
    const gap = rowsPerLane >= 4 ? 1 : 0;
    for (let row = rows[0] + 1; row < rows[1] - gap; row++) pixels.copyWithin(row * width, first, first + width);
  }
  return image;
}

/** Lanes that share rows of pixels, and these rows. */
function* groups({ height, firstLane, lastLane }, rowsPerLane) {
  if (rowsPerLane >= 1) {
    for (let lane = Math.floor(firstLane); lane < Math.ceil(lastLane); lane++) {
      const rows = [lane, lane + 1].map((edge) => Math.min(height, Math.max(0, Math.round((edge - firstLane) * rowsPerLane))));
      if (rows[1] > rows[0]) yield [[lane, lane + 1], rows];
    }
    return;
  }
  for (let row = 0; row < height; row++) {
    const lane = Math.floor(firstLane + row / rowsPerLane);
    yield [[lane, Math.min(Math.ceil(lastLane), Math.max(lane + 1, Math.floor(firstLane + (row + 1) / rowsPerLane)))], [row, row + 1]];
  }
}

function addLane(run, palette, { width, from, to }, lane, sums, weight) {
  const { bars, ticks } = run;
  const [scale, colours, [r0, g0, b0]] = [width / (to - from), palette.flat, palette.idle];
  const [perTick, shift] = [scale / ticks, from * scale];
  const [first, end] = bars.between(lane, from * ticks, to * ticks);
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
