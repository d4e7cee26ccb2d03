// A run: tasks or units (units.js), in the lanes of workers or ranks. Here those of one rank: tasks on workers, simulated or measured.

class Run {
  constructor(data, words) {
    Object.assign(this, data, words);
    this.makespan = data.makespan / data.ticks;
    this.bound = data.lower_bound === null ? null : data.lower_bound / data.ticks;
    this.back = null; // bars behind the others
  }

  /** Lanes of a rank have its name together. */
  laneName(lane) {
    return lane % this.perRank ? "" : String(Math.floor(lane / this.perRank));
  }

  /** -1: there is none. */
  itemNamed(title) {
    for (let item = 0; item < this.items; item++) if (this.title(item) === title) return item;
    return -1;
  }

  /** The events that decide the makespan, and the start and end of each. */
  readPath() {
    this.path = this.path ? this.sentPath(decodedAll(this.path)) : this.pathByNeeds();
    this.pathSpans = Float64Array.from(this.path.flatMap(({ item, phase, index }) => this.span(item, phase, index)));
  }

  sentPath({ index, phase, cause, causes }) {
    return Array.from(index, (index, place) => ({ item: this.itemOf(index, phase[place]), phase: phase[place], index, cause: causes[cause[place]] }));
  }

  /** Back from what ended last: the latest of all that an event needs counts as its cause. Measurements and ranks have no exact ties. */
  pathByNeeds() {
    const [found, phase] = [[], this.phases.at(-1)];
    const ends = Float64Array.from({ length: this.items }, (_, item) => this.span(item, phase)[1]);
    let at = this.items ? { item: ends.indexOf(ends.reduce((most, end) => Math.max(most, end))), phase } : null;
    while (at) {
      const need = this.needs(at.item).find((each) => each.last && each.phase === at.phase);
      found.push({ ...at, index: at.item, cause: need?.cause ?? this.causeOfFirst?.(at.item) ?? "start" });
      at = need && { item: need.item, phase: need.of ?? COMPUTE };
    }
    return found.reverse();
  }
}

class TaskRun extends Run {
  constructor(data) {
    super(data, { laneWord: "worker", itemWord: "task", perRank: 1, phases: [COMPUTE, REDUCE] });
    this.inChain = needsInChain(this.drains);
    this.chains = decodedAll(data.chains);
    this.adds = decodedAll(data.adds);
    this.partialTiles = new Set(decoded(data.partial));
    this.readTimes(decodedAll(data.tasks));
    this.linkTurns();
    const chains = [...this.chains.worker.keys()].filter((chain) => this.chains.tasks[chain] || this.adds.count);
    [this.byWorker, this.chainBefore, this.chainAfter] = inQueues(chains, this.chains.worker, this.chains.start, this.lanes);
    this.makeBars();
    this.readPath();
  }

  readTimes(tasks) {
    this.offsets = offsetsOf(this.chains.tasks);
    this.chainOf = new Int32Array(tasks.q_tile.length);
    for (let chain = 0; chain < this.chains.tasks.length; chain++) this.chainOf.fill(chain, this.offsets[chain], this.offsets[chain + 1]);
    const later = (times, by) => times.map((time, i) => time + by[i]);
    this.computeStart = Float64Array.from(tasks.compute_start);
    this.computeEnd = later(this.computeStart, tasks.compute);
    this.reduceStart = later(this.computeEnd, tasks.delay);
    this.reduceEnd = later(this.reduceStart, tasks.reduce);
    this.lostEnd = later(this.computeEnd, tasks.lost);
    [this.qTile, this.turn, this.head, this.items] = [tasks.q_tile, tasks.turn, tasks.head, tasks.q_tile.length];
  }

  /** Who adds to a dQ tile before and after each task. */
  linkTurns() {
    const keys = Int32Array.from({ length: this.items }, (_, i) => this.headOf(i) * this.q_tiles + this.qTile[i]);
    const counts = new Int32Array(keys.reduce((most, key) => Math.max(most, key), -1) + 1);
    for (const key of keys) counts[key]++;
    const first = offsetsOf(counts);
    const inOrder = new Int32Array(this.items);
    for (let i = 0; i < this.items; i++) inOrder[first[keys[i]] + this.turn[i]] = i;
    this.turnBefore = (i) => (this.turn[i] > 0 ? inOrder[first[keys[i]] + this.turn[i] - 1] : -1);
    this.turnAfter = (i) => (this.turn[i] + 1 < counts[keys[i]] ? inOrder[first[keys[i]] + this.turn[i] + 1] : -1);
    this.turnsOf = (i) => counts[keys[i]];
    const firstOf = (head) => first[head * this.q_tiles] ?? this.items;
    this.tasksOf = (head) => inOrder.subarray(firstOf(head), firstOf(head + 1)); // Q tile by Q tile
  }

  makeBars() {
    const adds = this.chains.worker.length * this.adds.count;
    this.bars = new Bars(this.items * 3 + this.chains.worker.length * 2 + 2 * adds, this.lanes);
    if (this.drains) this.back = new Bars(this.items + adds, this.lanes, this.drains);
    const colour = { stall: 2 * this.q_tiles, startup: 2 * this.q_tiles + 1, add: 2 * this.q_tiles + 2 };
    for (let lane = 0; lane < this.lanes; lane++) {
      this.bars.beginLane(lane);
      this.back?.beginLane(lane);
      for (const chain of this.byWorker[lane]) this.addChain(chain, colour);
    }
  }

  addChain(chain, colour) {
    const [first, end] = [this.offsets[chain], this.offsets[chain + 1]];
    const reduces = this.back ?? this.bars;
    if (end > first) this.bars.add(this.chains.start[chain], this.computeStart[first], first, STARTUP, colour.startup);
    for (let i = first; i < end; i++) {
      this.bars.add(this.computeStart[i], this.computeEnd[i], i, COMPUTE, this.qTile[i]);
      this.bars.add(this.computeEnd[i], this.lostEnd[i], i, STALL, colour.stall);
      reduces.add(this.reduceStart[i], this.reduceEnd[i], i, REDUCE, this.q_tiles + this.qTile[i]);
    }
    if (this.adds.count) this.addSums(chain, first, end, reduces, colour);
  }

  /** Behind its tasks a chain of a part adds dK and dV to a sum; its worker waits until that is done. */
  addSums(chain, first, end, reduces, colour) {
    const owner = Math.max(first, end - 1);
    let until = end > first ? Math.max(this.lostEnd[end - 1], this.back ? 0 : this.reduceEnd[end - 1]) : this.chains.start[chain];
    for (let add = 0; add < this.adds.count; add++) {
      const start = this.adds.start[chain * this.adds.count + add];
      if (!this.back) this.bars.add(until, start, owner, STALL, colour.stall);
      reduces.add(start, start + this.adds.reduce, owner, ADD, colour.add);
      if (!this.back) until = Math.max(until, start + this.adds.reduce);
    }
    if (this.back) this.bars.add(until, this.chains.end[chain], owner, STALL, colour.stall);
  }

  itemOf(index, phase) {
    return phase === ADD ? Math.max(0, this.offsets[Math.floor(index / this.adds.count) + 1] - 1) : index;
  }

  colours() {
    return tileColours(this.q_tiles);
  }

  laneOf(item) {
    return this.chains.worker[this.chainOf[item]];
  }

  placeOf(item) {
    return item - this.offsets[this.chainOf[item]];
  }

  label(item) {
    return String(this.qTile[item]);
  }

  /** The number of its query head among those of all sequences. */
  headOf(item) {
    return this.chains.sequence[this.chainOf[item]] * this.heads + this.head[item];
  }

  headName(head) {
    const sequence = Math.floor(head / this.heads);
    return `${sequence ? `b${sequence}.` : ""}h${head % this.heads}`;
  }

  /** The place of its tile among Q x KV tiles, row by row. */
  tileOf(item) {
    return this.qTile[item] * this.kv_tiles + this.chains.kv_tile[this.chainOf[item]];
  }

  title(item) {
    return `${this.headName(this.headOf(item))}.q${this.qTile[item]}.kv${this.chains.kv_tile[this.chainOf[item]]}`;
  }

  /** [start, end] in units of time. */
  span(item, phase, index = item) {
    let [start, end] = [this.computeStart[item], this.computeEnd[item]];
    if (phase === REDUCE) [start, end] = [this.reduceStart[item], this.reduceEnd[item]];
    if (phase === ADD) start = this.adds.start[index] ?? this.reduceEnd[item];
    if (phase === ADD) end = start + this.adds.reduce;
    return [start / this.ticks, end / this.ticks];
  }

  facts(item) {
    const [chain, time] = [this.chainOf[item], (phase) => this.span(item, phase).map(plain).join(" to ")];
    const lost = (this.lostEnd[item] - this.computeEnd[item]) / this.ticks;
    return [
      ["worker", this.laneName(this.laneOf(item))],
      ["turn", `${this.turn[item]} of 0 to ${this.turnsOf(item) - 1}`],
      ["step", `${this.placeOf(item) + 1} of ${this.chains.tasks[chain]} of its chain`],
      ["ticket", String(chain)],
      ["compute", time(COMPUTE)],
      ["stall", lost > 0 ? plain(lost) : "none"],
      ["reduce", time(REDUCE)],
    ];
  }

  legend({ css }, theme) {
    const computes = [`compute, by Q tile (0 to ${this.q_tiles - 1})`, css.slice(0, this.q_tiles)];
    const reduces = ["reduce", css.slice(this.q_tiles, 2 * this.q_tiles)];
    return [computes, reduces, ["stall", [theme.stall]], ["start of a chain", [theme.startup]], ...(this.adds.count ? [["add dK and dV", [theme.add]]] : [])];
  }

  /** What each phase of a task waits for, with the time from which on that is no hindrance; `last`: the one that came last. */
  needs(item) {
    const [place, before, rival] = [this.placeOf(item), this.chainBefore[this.chainOf[item]], this.turnBefore(item)];
    const need = (phase, other, of, cause, words) => ({ phase, item: other, of, cause, words, at: this.span(other, of)[1] });
    const found = [need(REDUCE, item, COMPUTE, "compute", "its own compute")];
    if (rival >= 0) found.push({ ...need(REDUCE, rival, REDUCE, "turn", `turn ${this.turn[rival]}`), at: this.hand_over === null ? this.span(rival, REDUCE)[1] : (this.reduceStart[rival] + this.hand_over) / this.ticks });
    if (place === 0 && before >= 0 && this.chains.tasks[before]) found.push(need(COMPUTE, this.lastOf(before), REDUCE, "worker", "its worker, which ran"));
    for (const { phase, of, back, cause, needs } of this.inChain) if (place >= back) found.push(need(phase, item - back, of, cause, needs));
    return this.phases.flatMap((phase) => markLast(found.filter((each) => each.phase === phase)));
  }

  /** The task of a chain whose reduce ended last. */
  lastOf(chain) {
    let last = this.offsets[chain];
    for (let i = last; i < this.offsets[chain + 1]; i++) if (this.reduceEnd[i] >= this.reduceEnd[last]) last = i;
    return last;
  }

  neededBy(item) {
    const chain = this.chainOf[item];
    const [rival, next, left] = [this.turnAfter(item), this.chainAfter[chain], this.chains.tasks[chain] - 1 - this.placeOf(item)];
    const found = rival >= 0 ? [{ item: rival, of: REDUCE, words: `turn ${this.turn[rival]}` }] : [];
    for (const { phase, back, neededBy } of this.inChain) if (left >= back) found.push({ item: item + back, of: phase, words: neededBy });
    if (item === this.lastOf(chain) && next >= 0 && this.chains.tasks[next]) found.push({ item: this.offsets[next], of: COMPUTE, words: "its worker, the chain of" });
    return found;
  }

  /** Why a worker stalls after a task: its reduce, or one that holds the buffer of the next compute, waits for a turn. */
  stallOf(item) {
    const more = this.placeOf(item) + 1 < this.chains.tasks[this.chainOf[item]];
    const held = this.drains && more ? Math.max(item - this.drains, this.offsets[this.chainOf[item]]) : item;
    const need = this.needs(held).find((found) => found.phase === REDUCE && found.last);
    const buffer = held === item ? "" : `needs the buffer of ${this.title(held)}, which `;
    return `${buffer}${need.item === held ? "reduces" : `waits for ${need.words} (${this.title(need.item)})`}`;
  }
}

/** Which phase of a task needs which one of the task some places back in its chain, and words for both ends. */
function needsInChain(drains) {
  if (!drains) return [{ phase: COMPUTE, of: REDUCE, back: 1, cause: "buffer", needs: "the reduce before", neededBy: "the next compute" }];
  return [
    { phase: COMPUTE, of: COMPUTE, back: 1, cause: "compute", needs: "the compute before", neededBy: "the next compute" },
    { phase: REDUCE, of: REDUCE, back: drains, cause: "drain", needs: "a free drain, the reduce of", neededBy: "its drain, the reduce of" },
    { phase: COMPUTE, of: REDUCE, back: 1 + drains, cause: "buffer", needs: "a free buffer, the reduce of", neededBy: "its buffer, the compute of" },
  ];
}

/** What each worker or rank ran, as it started; and what its owner ran before and after each, or -1. */
function inQueues(items, owner, start, owners) {
  const queues = Array.from({ length: owners }, () => []);
  const [before, after] = [new Int32Array(owner.length).fill(-1), new Int32Array(owner.length).fill(-1)];
  for (const item of items) queues[owner[item]].push(item);
  for (const queue of queues) {
    queue.sort((a, b) => start[a] - start[b] || a - b);
    for (let place = 1; place < queue.length; place++) [before[queue[place]], after[queue[place - 1]]] = [queue[place - 1], queue[place]];
  }
  return [queues, before, after];
}

function markLast(needs) {
  const latest = Math.max(...needs.map((need) => need.at));
  const last = needs.findLastIndex((need) => need.at === latest);
  return needs.map((need, place) => ({ ...need, last: place === last }));
}
