// The form: fields have the names of the command line, and empty ones are not sent.

// By part of the form: name, label, and what is said where nothing is given. Fields that the server sends choices for are lists.
const FIELDS = {
  schedules: [["schedule", "First"], ["second", "Second", "none"]],
  tiles: [["q-tiles", "Q tiles", "8"], ["kv-tiles", "KV tiles", "as Q"]],
  tokens: [["seqlen", "Tokens", "4096"], ["kv-seqlen", "Key tokens", "as queries"]],
  "tile-sizes": [["tile-q", "Queries per tile", "64"], ["tile-kv", "Keys per tile", "128"]],
  counts: [["heads", "KV heads", "1"], ["group", "Query heads each", "1"], ["batch", "Sequences", "1"]],
  constants: [["machine", "Constants", "as given below"]],
  workers: [["workers", "Workers", "132"]],
  own: [["compute", "Compute", "1"], ["reduce", "Reduce", "0.3"], ["overlap", "Overlap", "0"], ["latency", "Latency", "0"], ["startup", "Start-up", "0"]],
  "head-dim": [["head-dim", "Head dim", "128"]],
  cluster: [
    ...[["ranks", "Ranks", "none"], ["sharding", "Sharding", "usual: zigzag"], ["hop-latency", "Hop latency, us", "10"], ["bandwidth", "Bandwidth, GB/s", "400"]],
    ...[["heads-together", "Heads together", "to fill"], ["execution", "Execution", "both"], ["model", "Model", "by size"]],
  ],
};
const DECIMAL = ["compute", "reduce", "latency", "startup", "hop-latency", "bandwidth"];
const COUNTS = ["q-tiles", "kv-tiles", "seqlen", "kv-seqlen", "heads", "group", "batch"];
const FIRST_WORD = /^(\w+)/;
const TOKENS_PER_TILE = 128;
const PATIENCE = 1000; // milliseconds of work, from which on it is said how far it has come

function fieldOf([name, label, empty], choices) {
  if (!choices[name]) return element("label", {}, `${label} `, element("input", { name, placeholder: empty, inputmode: DECIMAL.includes(name) ? "decimal" : "numeric" }));
  const options = choices[name].map((value) => element("option", { value }, value));
  return element("label", {}, `${label} `, element("select", { name }, ...(empty ? [element("option", { value: "" }, empty)] : []), ...options));
}

class Form {
  constructor(form, start, show) {
    Object.assign(this, { form, start, show, fields: form.elements, said: "" });
    form.hidden = byId("to-form").hidden = false;
    byId("layout").classList.add("asking");
    byId("mask-forms").textContent = start.masks;
    const choices = { ...start.choices, second: start.choices.schedule };
    for (const part of form.querySelectorAll("[data-fields]")) part.append(...FIELDS[part.dataset.fields].map((field) => fieldOf(field, choices)));
    for (const field of this.fields) if (start.help[field.name]) field.labels[0].title = start.help[field.name];
    // With every key: a part that came only when a field is left would move the button under the pointer that leaves it.
    form.addEventListener("input", ({ target }) => this.adapt(target.name));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("save").addEventListener("click", () => this.save());
    byId("cancel").addEventListener("click", () => this.stop?.abort());
  }

  set(options) {
    const [first, second = ""] = (options.schedule ?? "auto").split(",");
    const values = { ...options, schedule: first, second };
    this.form.reset();
    this.extra = {}; // what no field can have: --threads, or a machine of another page
    for (const [name, value] of Object.entries(values)) {
      const field = this.fields[name];
      if (field?.type === "checkbox") field.checked = value === true;
      else if (field) field.value = value;
      if (field?.type !== "checkbox" && field?.value !== value) this.extra[name] = value;
    }
    const tokens = ["seqlen", "kv-seqlen", "tile-q", "tile-kv"].some((name) => name in options);
    this.fields.lengths.value = tokens ? "tokens" : "tiles";
    byId("cluster").open = "ranks" in options;
    this.adapt();
  }

  /** Show only fields that count. Measurements and ranks are of tokens. */
  adapt(changed = "") {
    for (const name of Object.keys(this.extra)) if (name === changed || (changed && !(name in this.start.help))) delete this.extra[name];
    const { lengths, machine, measured, ranks, schedule, second } = this.fields;
    const [runs, shared] = [measured.checked, ranks.value.trim() !== ""];
    if (runs || shared) this.countTokens();
    const tokens = lengths.value === "tokens";
    const own = !machine.value && !runs;
    second.closest("label").hidden = shared; // ranks have one schedule
    const shown = { lengths: !runs && !shared, tiles: !tokens, tokens, "tile-sizes": tokens && !runs, workers: !runs, own, "head-dim": machine.value || runs || shared, measured: runs };
    for (const part of this.form.querySelectorAll("[data-when]")) part.hidden = !shown[part.dataset.when];
    machine.options[0].textContent = runs ? "read off the run" : "as given below";
    const usual = shared && FIELDS.own.every(([name]) => !this.fields[name].value.trim()); // ranks are those of an H200
    for (const [name, , empty] of FIELDS.own) this.fields[name].placeholder = usual ? "of h200" : empty;
    const names = [...new Set([schedule.value, shared ? "" : second.value])].filter(Boolean);
    byId("schedule-words").replaceChildren(...names.map((name) => element("p", {}, element("b", {}, name), `: ${this.start.schedules[name]}`)));
  }

  countTokens() {
    const tiles = ["q-tiles", "kv-tiles"].map((name) => Number(this.fields[name].value) || 0);
    if (this.fields.lengths.value === "tiles" && !this.fields.seqlen.value) this.fields.seqlen.value = TOKENS_PER_TILE * (Math.max(...tiles) || 8);
    this.fields.lengths.value = "tokens";
  }

  options() {
    const found = { ...this.extra };
    if (!this.fields.measured.checked) for (const name of ["device", "threads"]) delete found[name];
    for (const field of this.fields) {
      if (!field.name || ["lengths", "second"].includes(field.name) || field.closest("[hidden]")) continue;
      if (field.type === "checkbox" ? field.checked : field.value.trim()) found[field.name] = field.type === "checkbox" ? true : field.value.trim();
    }
    const second = this.fields.second.value;
    if (second && second !== found.schedule && !found.ranks) found.schedule = [found.schedule, second].filter(Boolean).join();
    return found;
  }

  /** `view`: of a link, else all is shown. */
  async ask(view = null) {
    await this.busy("/runs", (answer) => this.show(answer, view));
  }

  async save() {
    await this.busy("/page", ({ page }) => {
      const url = URL.createObjectURL(new Blob([page], { type: "text/html" }));
      element("a", { href: url, download: "dash-attn-explore.html" }).click();
      URL.revokeObjectURL(url);
    });
  }

  /** What goes wrong is said in the form; the charts stay as they were, as they do when it is cancelled. */
  async busy(path, show) {
    this.stop?.abort();
    const stop = (this.stop = new AbortController());
    const [began, progress] = [performance.now(), { doing: this.fields.measured.checked ? "measuring" : "working" }];
    const timer = setInterval(() => this.showProgress(performance.now() - began, progress), 250);
    this.complain("");
    this.form.setAttribute("aria-busy", "true");
    try {
      show(await asked(path, this.options(), stop.signal, (told) => Object.assign(progress, told)));
    } catch (problem) {
      if (!stop.signal.aborted) this.complain(problem.message);
    } finally {
      clearInterval(timer);
      if (stop === this.stop) {
        this.form.removeAttribute("aria-busy");
        byId("progress").hidden = true;
      }
    }
  }

  showProgress(lasted, { doing, share }) {
    if (lasted < PATIENCE) return;
    byId("progress").hidden = false;
    const bar = byId("progress").querySelector("progress");
    if (share === undefined) bar.removeAttribute("value");
    else bar.value = share;
    byId("doing").textContent = `${doing}, ${Math.floor(lasted / 1000)} s`;
  }

  /** Beside the field that it is about. */
  complain(message) {
    this.said = message;
    byId("complaint")?.remove();
    for (const field of this.form.querySelectorAll("[aria-invalid]")) for (const name of ["aria-invalid", "aria-describedby"]) field.removeAttribute(name);
    const field = message && this.blamed(message);
    byId("error").textContent = field ? "" : this.inWords(message);
    if (!field) return;
    field.closest("details")?.setAttribute("open", "");
    for (const [name, value] of [["aria-invalid", "true"], ["aria-describedby", "complaint"]]) field.setAttribute(name, value);
    field.closest("label").after(element("p", { id: "complaint", class: "error", role: "alert" }, this.inWords(message, field.name)));
    field.focus();
    byId("complaint").scrollIntoView({ block: "nearest" });
  }

  /** The field that a message is about: what it says is missing, the first that it names, or the one it begins with. Null if it shows none. */
  blamed(message) {
    if (message.startsWith("options are")) return null; // an address can name any
    const [missing, flag, begins] = [/needs --([a-z-]+)/, /(?<!['"])--([a-z-]+)/, FIRST_WORD].map((pattern) => message.match(pattern)?.[1]);
    const [most, longest] = [COUNTS, [...FIELDS.own.map(([name]) => name), "hop-latency"]].map((names) => this.largest(names));
    const about = {
      ...{ measured: /measurement/, "kv-seqlen": /queries and keys/, ranks: /shard|chunk|ranks/, "head-dim": /head dim/, mask: /mask|document|window|prefix/ },
      ...{ [most]: /tile|task|token/, [longest]: /unit of time/, schedule: /schedule/ },
    };
    const served = ["schedule", "second"].filter((name) => this.fields[name].value === begins);
    const guessed = Object.keys(about).filter((name) => about[name].test(message));
    const found = [missing, flag, begins?.replace("_", "-"), ...served, ...guessed].map((name) => this.fields[name]);
    return found.find((field) => field?.name && !field.closest("[hidden]")) ?? null;
  }

  /** Of fields of numbers that are shown. */
  largest(names) {
    const shown = names.filter((name) => !this.fields[name].closest("[hidden]"));
    return shown.reduce((most, name) => (Number(this.fields[name].value) > Number(this.fields[most].value) ? name : most));
  }

  /** A message of the command line in the words of the page: fields have labels here. */
  inWords(message, name = "") {
    const labelOf = (field) => [...field.labels[0].childNodes].filter(({ nodeType }) => nodeType === Node.TEXT_NODE).map(({ data }) => data).join("").trim();
    const words = message
      .replace(/(\. A|; pad to that, or give a) Sharding with.*/, "")
      .replace(/(?<!['"])--([a-z-]+)/g, (flag, other) => (this.fields[other]?.labels ? `“${labelOf(this.fields[other])}”` : flag));
    return name && words.match(FIRST_WORD)?.[1].replace("_", "-") === name ? words.replace(FIRST_WORD, `“${labelOf(this.fields[name])}”`) : words;
  }
}
