// The address behind #: what was asked, and what of it is in sight. So a view can be sent, and Back returns to the one before.

const VIEW = ["chart", "task", "from", "to", "lanes", "order", "path", "moment", "module", "step"];
const PAUSE = 250; // milliseconds without a change until the address follows

/** What the address says: options for the server, and of the view. */
function readAddress() {
  const all = [...new URLSearchParams(location.hash.slice(1))];
  const isView = ([name]) => VIEW.includes(name);
  const options = all.filter((pair) => !isView(pair)).map(([name, value]) => [name, value === "true" ? true : value]);
  return { options: Object.fromEntries(options), view: Object.fromEntries(all.filter(isView)) };
}

const address = {
  options: {}, // of what is shown; none on a page without a form

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), PAUSE);
  },

  /** `isNew`: as a place of its own, to which Back returns. */
  write(isNew = false) {
    clearTimeout(this.timer);
    const words = String(new URLSearchParams({ ...this.options, ...(state.ledger ?? state).inSight() }));
    if (location.hash.slice(1) !== words) history[isNew ? "pushState" : "replaceState"](null, "", `#${words}`);
  },

  /** Back, forth, or another address: what it asks for, if that is not shown already. */
  follow(form) {
    const { options, view } = readAddress();
    if (!form || !Object.keys(options).length || String(new URLSearchParams(options)) === String(new URLSearchParams(this.options))) return (state.ledger ?? state).bringInSight(view);
    form.set(options);
    return form.ask(view);
  },
};
