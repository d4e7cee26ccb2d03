// Two runs, by their ledgers: a tree of modules over steps. A cell says how many tensors were compared and how many differ.

const MOST_OPEN = 40; // rows that are shown at first

class ModuleTree {
  constructor(answer) {
    Object.assign(this, answer);
    this.steps = unpacked(answer.steps);
    [this.compared, this.differing] = [answer.compared.map(unpacked), answer.differing.map(unpacked)];
    this.number = new Map(this.modules.map((module, place) => [module, place]));
    this.parent = this.modules.map((module) => (module ? this.number.get(module.split(".").slice(0, -1).join(".")) : -1));
    this.depth = this.parent.map(() => 0);
    this.parent.forEach((parent, place) => (this.depth[place] = parent < 0 ? 0 : this.depth[parent] + 1)); // parents come first
    this.children = this.modules.map(() => 0);
    for (const parent of this.parent) if (parent >= 0) this.children[parent]++;
    this.open = this.openedAtFirst();
  }

  /** As many levels as have room, and the way to the module that is to blame. */
  openedAtFirst() {
    let depth = 0;
    while (depth < 8 && this.depth.filter((level) => level <= depth + 1).length <= MOST_OPEN) depth++;
    const open = new Set([...this.modules.keys()].filter((place) => this.depth[place] < depth && this.children[place]));
    const blamed = this.comparison.first?.module;
    for (let place = this.number.get(blamed) ?? -1; place >= 0; place = this.parent[place]) if (this.parent[place] >= 0) open.add(this.parent[place]);
    return open;
  }

  /** Numbers of the modules whose parents are all open. */
  shownModules() {
    const shown = [];
    const visible = new Set();
    this.modules.forEach((_, place) => {
      const parent = this.parent[place];
      if (parent >= 0 && !(visible.has(parent) && this.open.has(parent))) return;
      visible.add(place);
      shown.push(place);
    });
    return shown;
  }

  name(place) {
    return this.modules[place] || "the model";
  }

  shortName(place) {
    return this.modules[place].split(".").at(-1) || "the model";
  }

  cell(direction, module, step) {
    const at = module * this.steps.length + step;
    return [this.compared[direction][at], this.differing[direction][at]];
  }

  /** Tensors that were compared and that differ in some steps, of all directions or of one. */
  counts(module, first, end, direction = -1) {
    let [compared, differing] = [0, 0];
    for (let each = 0; each < this.directions.length; each++) {
      if (direction >= 0 && each !== direction) continue;
      for (let step = first; step < end; step++) {
        const [all, other] = this.cell(each, module, step);
        compared += all;
        differing += other;
      }
    }
    return [compared, differing];
  }

  words(module, step) {
    const parts = this.directions.map((direction, place) => {
      const [compared, differing] = this.cell(place, module, step);
      return [direction, compared ? (differing ? `${plain(differing)} of ${plain(compared)} tensors differ` : `all ${plain(compared)} tensors agree`) : "not recorded"];
    });
    return parts;
  }
}
