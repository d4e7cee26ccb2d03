// A run of several ranks that share a sequence: units on ranks.

const ENDING = -1;

class UnitRun {
  constructor(data) {
    Object.assign(this, data);
    this.makespan = data.makespan / data.ticks;
    this.bound = null;
    this.u = unpackedAll(data.units);
    this.items = this.u.rank.length;
    this.readWaits(unpackedAll(data.waits));
    this.dealLanes();
    this.makeBars();
    const path = unpackedAll(data.path);
    this.path = Array.from(path.index, (index, place) => ({ item: index, phase: COMPUTE, index, cause: path.causes[path.cause[place]] }));
    this.pathSpans = spansOf(this);
    this.back = null;
    this.laneWord = "rank";
    this.itemWord = "unit";
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

  /** Units of a rank that overlap get lanes of their own. */
  dealLanes() {
    this.onRank = Array.from({ length: this.workers }, () => []);
    for (let unit = 0; unit < this.items; unit++) this.onRank[this.u.rank[unit]].push(unit);
    this.lane = new Int32Array(this.items);
    this.place = new Int32Array(this.items);
    let most = 1;
    for (const units of this.onRank) {
      units.sort((a, b) => this.u.start[a] - this.u.start[b] || a - b);
      units.forEach((unit, place) => (this.place[unit] = place));
      const free = [];
      for (const unit of units.filter((each) => this.u.end[each] > this.u.start[each])) {
        let lane = free.findIndex((until) => until <= this.u.start[unit]);
        if (lane < 0) lane = free.length;
        free[lane] = this.u.end[unit];
        this.lane[unit] = lane;
      }
      most = Math.max(most, free.length);
    }
    this.perRank = most;
    this.lanes = this.workers * most;
  }

  makeBars() {
    this.bars = new Bars(this.items, this.lanes);
    for (let lane = 0; lane < this.lanes; lane++) {
      this.bars.beginLane(lane);
      const [rank, sub] = [Math.floor(lane / this.perRank), lane % this.perRank];
      for (const unit of this.onRank[rank]) if (this.lane[unit] === sub) this.bars.add(this.u.start[unit], this.u.end[unit], unit, COMPUTE, this.colourOf(unit));
    }
    this.bars.endLanes();
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
    return this.u.rank[item] * this.perRank + this.lane[item];
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

  needs(item) {
    const [u, found] = [this.u, []];
    if (u.before[item] >= 0) found.push({ phase: COMPUTE, item: u.before[item], words: "states of", at: u.arrival[item] });
    const earlier = this.onRank[u.rank[item]][this.place[item] - 1];
    const ended = earlier !== undefined && u.end[earlier] <= u.start[item];
    if (ended) found.push({ phase: COMPUTE, item: earlier, words: "its rank, which ran", at: u.end[earlier] });
    for (const other of this.waitsFor[item]) found.push({ phase: COMPUTE, item: other, words: "turns of", at: u.end[other] });
    const inTime = found.filter((need) => need.at <= u.start[item] + 1); // overlapped units take turns over while they run
    const late = found.filter((need) => need.at > u.start[item] + 1).map((need) => ({ ...need, last: false }));
    return [...markLast(inTime), ...late].map((need) => ({ ...need, at: need.at / this.ticks }));
  }

  neededBy(item) {
    const [u, found] = [this.u, []];
    if (u.after[item] >= 0) found.push({ item: u.after[item], words: u.rank[u.after[item]] === u.rank[item] ? "its states" : `its states hop to rank ${u.rank[u.after[item]]}` });
    const later = this.onRank[u.rank[item]][this.place[item] + 1];
    if (later !== undefined) found.push({ item: later, words: "its rank, next" });
    for (const other of this.waitedBy[item]) found.push({ item: other, words: "its turns" });
    return found;
  }

  stallOf() {
    return "waits";
  }
}
