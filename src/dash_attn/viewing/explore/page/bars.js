// Bars: what fills the lanes of a chart. Those of a lane follow each other in time, lane by lane.

const PHASES = ["compute", "reduce", "add", "stall", "start-up"];
const [COMPUTE, REDUCE, ADD, STALL, STARTUP] = [0, 1, 2, 3, 4];

class Bars {
  constructor(most, lanes, atOnce = 1) {
    [this.start, this.end] = [new Float64Array(most), new Float64Array(most)];
    [this.item, this.phase, this.colour] = [new Int32Array(most), new Uint8Array(most), new Uint16Array(most)];
    this.columns = [this.start, this.end, this.item, this.phase, this.colour];
    this.first = new Int32Array(lanes + 1); // of each lane
    this.count = 0;
    this.atOnce = atOnce; // of one lane
  }

  /** `bar`: start, end, item, phase, colour. */
  add(...bar) {
    const [start, end] = bar;
    if (!(end > start)) return;
    // Reduces behind computes may pass each other by a few places.
    let at = this.count;
    while (at > this.first[this.lane] && this.start[at - 1] > start) at--;
    for (let place = 0; place < bar.length; place++) this.columns[place].copyWithin(at + 1, at, this.count)[at] = bar[place];
    this.first[this.lane + 1] = ++this.count;
  }

  beginLane(lane) {
    this.lane = lane;
    this.first.fill(this.count, lane);
  }

  /** The first bar of a lane that starts after a time. */
  after(lane, time) {
    return firstWhere(this.first[lane], this.first[lane + 1], (bar) => this.start[bar] > time);
  }

  /** [from, to) of a lane's bars that touch a stretch of time, and perhaps a few more in front. */
  between(lane, from, to) {
    return [Math.max(this.first[lane], this.after(lane, from) - this.atOnce), this.after(lane, to)];
  }

  /** The bar at a time, or -1. */
  at(lane, time) {
    const until = this.after(lane, time);
    for (let bar = until - 1; bar >= Math.max(this.first[lane], until - this.atOnce); bar--) if (this.end[bar] > time) return bar;
    return -1;
  }
}
