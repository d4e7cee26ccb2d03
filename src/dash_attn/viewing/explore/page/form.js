// The form: fields have the names of the command line, and empty ones are not sent.

class Form {
  constructor(form, start, show) {
    [this.form, this.show] = [form, show];
    form.hidden = false;
    byId("layout").classList.add("asking");
    byId("mask-forms").textContent = start.masks;
    const { choices } = start;
    this.fill("schedule", choices.schedule.map((name) => [name, name]));
    this.fill("second", [["", "none"], ...choices.schedule.map((name) => [name, name])]);
    this.fill("machine", [["", "as given below"], ...choices.machine.map((name) => [name, name])]);
    for (const name of ["sharding", "execution", "model"]) this.fill(name, [["", "default"], ...choices[name].map((value) => [value, value])]);
    this.set(start.options);
    form.addEventListener("change", () => this.adapt());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("save").addEventListener("click", () => this.save());
  }

  fill(name, choices) {
    this.form.elements[name].replaceChildren(...choices.map(([value, text]) => element("option", { value }, text)));
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
