// A run of several ranks that share a sequence: units on ranks.

const ENDING = -1;
const TOLERANCE = 20; // ticks: the tile model rounds what links deliver up to one of its own
const MOST_BESIDE = 64; // units that can have held the workers of another

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

  readWaits({ count, unit }) {
    const offsets = offsetsOf(count);
    this.waitsFor = Array.from(count, (_, item) => [...unit.subarray(offsets[item], offsets[item + 1])]);
    this.waitedBy = this.waitsFor.map(() => []);
    this.waitsFor.forEach((others, item) => others.forEach((other) => this.waitedBy[other].push(item)));
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

  /** By kind and heads: shades tell the heads of one kind apart. */
  colourOf(unit) {
    return this.u.queries[unit] === ENDING ? this.colours().length + 2 : 4 * (this.u.kind[unit] % 2) + (this.u.heads[unit] % 4);
  }

  colours() {
    return [...BLUES, ...ORANGES].map(rgbOf);
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
      ["does", this.u.does[item]],
      ["heads", this.u.heads_of[item]],
      ["tasks", plain(this.u.tasks[item])],
      ["runs", this.span(item).map(plain).join(" to ")],
      ["states", arrival],
    ];
  }

  legend({ css }) {
    return [["units, by heads; a number is the chunk of their keys", css.slice(0, 8)]];
  }

  needs(item) {
    const [{ u }, start, earlier] = [this, this.u.start[item], this.earlierOnRank(item)];
    const need = (cause, words, other, at = u.end[other]) => ({ phase: COMPUTE, item: other, cause, words, at, last: false });
    const found = this.waitsFor[item].map((other) => need("turns", "turns of", other));
    if (u.before[item] >= 0) found.push(need("states", "states of", u.before[item], u.arrival[item]));
    const ended = earlier.filter((other) => u.end[other] <= start + TOLERANCE);
    if (ended.length) found.push(need("rank", "its rank, which ran", ended.reduce((a, b) => (u.end[b] >= u.end[a] ? b : a))));
    const decides = ({ at }) => Math.abs(at - start) <= TOLERANCE; // overlapped units take turns over while they run
    const beside = Math.max(...earlier.filter((other) => u.end[other] > start)); // its workers became free one by one
    if (beside >= 0 && !found.some(decides)) found.push(need("rank", "its rank, which ran", beside, start));
    return [...markLast(found.filter(decides)), ...found.filter((each) => !decides(each))].map((each) => ({ ...each, at: each.at / this.ticks }));
  }

  /** The latest first. They have lower numbers, as all that a unit may wait for, so a path back ends. */
  earlierOnRank(item) {
    const found = [];
    let other = this.rankBefore[item];
    for (let count = 0; other >= 0 && count < MOST_BESIDE; count++, other = this.rankBefore[other]) if (other < item) found.push(other);
    return found;
  }

  causeOfFirst(item) {
    return this.u.start[item] > TOLERANCE ? "keys" : "start";
  }

  neededBy(item) {
    const [u, found] = [this.u, []];
    if (u.after[item] >= 0) found.push({ item: u.after[item], words: u.rank[u.after[item]] === u.rank[item] ? "its states" : `its states hop to rank ${u.rank[u.after[item]]}` });
    if (this.rankAfter[item] >= 0) found.push({ item: this.rankAfter[item], words: "its rank, next" });
    for (const other of this.waitedBy[item]) found.push({ item: other, words: "its turns" });
    return found;
  }
}
