// The panel beside the charts: one task, what it waits for and who waits for it.

function showDetails(panel, chart, item) {
  if (chart === null || item === null) {
    panel.replaceChildren(element("p", { class: "hint" }, "Point at a task, or choose one with the arrow keys."));
    return;
  }
  const { run } = chart;
  const needs = run.needs(item).filter((need) => need.item !== item);
  panel.replaceChildren(
    element("h2", {}, run.title(item)),
    element("p", { class: "hint" }, `${run.name} (${run.unit})`),
    listOf(run.facts(item)),
    element("h3", {}, "Waits for"),
    needs.length ? linksOf(chart, needs, (need) => `until ${plain(need.at)}${need.last ? ", the last to come" : ""}`) : nothing(),
    element("h3", {}, "Waited for by"),
    run.neededBy(item).length ? linksOf(chart, run.neededBy(item), () => "") : nothing(),
  );
}

const nothing = () => element("p", { class: "hint" }, "nothing");

function listOf(rows) {
  return element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function linksOf(chart, links, note) {
  const phases = { [COMPUTE]: "to compute: ", [REDUCE]: "to reduce: " };
  const rows = links.slice(0, 40).map((found) => {
    const button = element("button", { type: "button", onclick: () => chart.go(found.item) }, chart.run.title(found.item));
    const to = chart.run.itemWord === "task" && found.phase !== undefined ? phases[found.phase] : "";
    return element("li", found.last ? { class: "last" } : {}, `${to}${found.words} `, button, ` ${note(found)}`);
  });
  if (links.length > rows.length) rows.push(element("li", {}, `and ${links.length - rows.length} more`));
  return element("ul", {}, ...rows);
}

/** One sentence for screen readers. */
function spoken(chart, item) {
  const { run } = chart;
  const facts = run.facts(item).map(([name, value]) => `${name} ${value}`).join(", ");
  const last = run.needs(item).filter((need) => need.last && need.item !== item).map((need) => `${need.words} ${run.title(need.item)}`);
  const waited = last.length ? `Waited last for ${last.join(" and ")}.` : "Waited for nothing.";
  const others = run.neededBy(item).map((found) => run.title(found.item));
  return `${run.title(item)}: ${facts}. ${waited} ${others.length ? `Waited for by ${others.slice(0, 6).join(", ")}.` : "Nobody waits for it."}`;
}
