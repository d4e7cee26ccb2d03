// A run of several ranks that share a sequence: units on ranks.

const ENDING = -1;

class UnitRun extends Run {
  constructor(data) {
    super(data, { laneWord: "rank", itemWord: "unit", phases: [COMPUTE] });
    this.u = decodedAll(data.units);
    this.items = this.u.rank.length;
    this.perRank = 1 + this.u.lane.reduce((most, lane) => Math.max(most, lane), 0);
    this.lanes = this.workers * this.perRank;
    this.readWaits(decodedAll(data.waits));
    [this.onRank, this.rankBefore, this.rankAfter] = inQueues(this.u.rank.keys(), this.u.rank, this.u.start, this.workers);
    this.makeBars();
    this.readPath();
  }

  readWaits(waits) {
    this.waitsFor = Array.from({ length: this.items }, () => []);
    this.waitedBy = Array.from({ length: this.items }, () => []);
    const offsets = offsetsOf(waits.count);
    for (let unit = 0; unit < this.items; unit++) {
      for (const other of waits.unit.subarray(offsets[unit], offsets[unit + 1])) {
        this.waitsFor[unit].push(other);
        this.waitedBy[other].push(unit);
      }
    }
  }

  makeBars() {
    this.bars = new Bars(this.items, this.lanes);
    for (let lane = 0; lane < this.lanes; lane++) {
      this.bars.beginLane(lane);
      for (const unit of this.onRank[Math.floor(lane / this.perRank)]) {
        if (this.laneOf(unit) === lane) this.bars.add(this.u.start[unit], this.u.end[unit], unit, COMPUTE, this.colourOf(unit));
      }
    }
  }

  itemOf(index) {
    return index;
  }

  /** By kind and heads: shades tell the heads of one kind apart. */
  colourOf(unit) {
    return this.u.queries[unit] === ENDING ? this.colours().length + 2 : 4 * (this.u.kind[unit] % 2) + (this.u.heads[unit] % 4);
  }

  colours() {
    return [...BLUES, ...ORANGES].map(rgbOf);
  }

  laneName(lane) {
    return lane % this.perRank ? "" : String(Math.floor(lane / this.perRank));
  }

  laneOf(item) {
    return this.u.rank[item] * this.perRank + this.u.lane[item];
  }

  label(item) {
    return String(this.u.keys[item]);
  }

  title(item) {
    return `unit ${item}`;
  }

  span(item) {
    return [this.u.start[item] / this.ticks, this.u.end[item] / this.ticks];
  }

  facts(item) {
    const arrival = this.u.before[item] < 0 ? "begin here" : `there at ${plain(this.u.arrival[item] / this.ticks)}`;
    return [
      ["rank", String(this.u.rank[item])],
      ["does", this.u.names[this.u.name[item]]],
      ["heads", this.u.heads_of[this.u.heads[item]]],
      ["tasks", plain(this.u.tasks[item])],
      ["runs", this.span(item).map(plain).join(" to ")],
      ["states", arrival],
    ];
  }

  legend({ css }) {
    return [["units, by heads; a number is the chunk of their keys", css.slice(0, 8)]];
  }

  needsInTicks(item) {
    const [u, found] = [this.u, []];
    if (u.before[item] >= 0) found.push({ phase: COMPUTE, item: u.before[item], words: "states of", at: u.arrival[item] });
    const earlier = this.rankBefore[item];
    if (earlier >= 0 && u.end[earlier] <= u.start[item]) found.push({ phase: COMPUTE, item: earlier, words: "its rank, which ran", at: u.end[earlier] });
    for (const other of this.waitsFor[item]) found.push({ phase: COMPUTE, item: other, words: "turns of", at: u.end[other] });
    const inTime = found.filter((need) => need.at <= u.start[item] + 1); // overlapped units take turns over while they run
    const late = found.filter((need) => need.at > u.start[item] + 1).map((need) => ({ ...need, last: false }));
    return [...markLast(inTime), ...late];
  }

  neededBy(item) {
    const [u, found] = [this.u, []];
    if (u.after[item] >= 0) found.push({ item: u.after[item], words: u.rank[u.after[item]] === u.rank[item] ? "its states" : `its states hop to rank ${u.rank[u.after[item]]}` });
    if (this.rankAfter[item] >= 0) found.push({ item: this.rankAfter[item], words: "its rank, next" });
    for (const other of this.waitedBy[item]) found.push({ item: other, words: "its turns" });
    return found;
  }
}
