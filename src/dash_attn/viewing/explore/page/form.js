// The form: fields have the names of the command line, and empty ones are not sent.

// By part of the form: name, label, and what is said where nothing is given. Fields that the server sends choices for are lists.
const FIELDS = {
  schedules: [["schedule", "First"], ["second", "Second", "none"]],
  tiles: [["q-tiles", "Q tiles", "8"], ["kv-tiles", "KV tiles", "as Q"]],
  tokens: [["seqlen", "Tokens", "4096"], ["kv-seqlen", "Key tokens", "as queries"], ["tile-q", "Queries per tile", "64"], ["tile-kv", "Keys per tile", "128"]],
  counts: [["heads", "KV heads", "1"], ["group", "Query heads each", "1"], ["batch", "Sequences", "1"]],
  machine: [["workers", "Workers", "132"], ["machine", "Constants", "as given below"]],
  own: [["compute", "Compute", "1"], ["reduce", "Reduce", "0.3"], ["overlap", "Overlap", "0"], ["latency", "Latency", "0"], ["startup", "Start-up", "0"]],
  calibrated: [["head-dim", "Head dim", "128"]],
  cluster: [
    ...[["ranks", "Ranks", "none"], ["sharding", "Sharding", "default"], ["hop-latency", "Hop latency, us", "10"], ["bandwidth", "Bandwidth, GB/s", "400"]],
    ...[["heads-together", "Heads together", "to fill"], ["execution", "Execution", "default"], ["model", "Model", "default"]],
  ],
};
const DECIMAL = ["compute", "reduce", "latency", "startup", "hop-latency", "bandwidth"];

function fieldOf([name, label, empty], choices) {
  if (!choices[name]) return element("label", {}, `${label} `, element("input", { name, placeholder: empty, inputmode: DECIMAL.includes(name) ? "decimal" : "numeric" }));
  const options = choices[name].map((value) => element("option", { value }, value));
  return element("label", {}, `${label} `, element("select", { name }, ...(empty ? [element("option", { value: "" }, empty)] : []), ...options));
}

class Form {
  constructor(form, start, show) {
    [this.form, this.show] = [form, show];
    form.hidden = false;
    byId("layout").classList.add("asking");
    byId("mask-forms").textContent = start.masks;
    const choices = { ...start.choices, second: start.choices.schedule };
    for (const part of form.querySelectorAll("[data-fields]")) part.append(...FIELDS[part.dataset.fields].map((field) => fieldOf(field, choices)));
    this.set(start.options);
    form.addEventListener("change", () => this.adapt());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("save").addEventListener("click", () => this.save());
  }

  set(options) {
    const [first, second = ""] = (options.schedule ?? "auto").split(",");
    const values = { ...options, schedule: first, second };
    this.form.reset();
    for (const [name, value] of Object.entries(values)) {
      const field = this.form.elements[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = value === true;
      else field.value = value;
    }
    const tokens = ["seqlen", "kv-seqlen", "tile-q", "tile-kv"].some((name) => name in options);
    this.form.elements.lengths.value = tokens ? "tokens" : "tiles";
    byId("cluster").open = "ranks" in options;
    this.extra = Object.fromEntries(Object.entries(options).filter(([name]) => !this.form.elements[name])); // has no field: --threads, --device
    this.adapt();
  }

  /** Show only fields that count. */
  adapt() {
    const chosen = { lengths: this.form.elements.lengths.value, machine: this.form.elements.machine.value ? "calibrated" : "own" };
    for (const [name, value] of Object.entries(chosen)) {
      for (const part of this.form.querySelectorAll(`[data-${name}]`)) part.hidden = part.dataset[name] !== value;
    }
    const headDim = this.form.querySelector('[data-machine="calibrated"]');
    if (this.form.elements.measured.checked || this.form.elements.ranks.value) headDim.hidden = false;
  }

  options() {
    const found = { ...this.extra };
    for (const field of this.form.elements) {
      if (!field.name || ["lengths", "second"].includes(field.name) || field.closest("[hidden]")) continue;
      if (field.type === "checkbox" ? field.checked : field.value.trim()) found[field.name] = field.type === "checkbox" ? true : field.value.trim();
    }
    const second = this.form.elements.second.value;
    if (second && second !== found.schedule && !found.ranks) found.schedule += `,${second}`;
    return found;
  }

  async ask() {
    await this.busy(async () => this.show(await (await asked("/runs", this.options())).json()));
  }

  async save() {
    await this.busy(async () => {
      const url = URL.createObjectURL(await (await asked("/page", this.options())).blob());
      element("a", { href: url, download: "dash-attn-explore.html" }).click();
      URL.revokeObjectURL(url);
    });
  }

  /** What goes wrong is said below the form; the charts stay as they were. */
  async busy(work) {
    const [error, buttons] = [byId("error"), this.form.querySelectorAll("button")];
    for (const button of buttons) button.disabled = true;
    this.form.setAttribute("aria-busy", "true");
    try {
      await work();
      error.textContent = "";
    } catch (problem) {
      error.textContent = problem.message;
    } finally {
      for (const button of buttons) button.disabled = false;
      this.form.removeAttribute("aria-busy");
    }
  }
}
