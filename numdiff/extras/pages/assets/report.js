"use strict";
// Texts of a run are written by textContent alone.
const report = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);

function make(name, text, properties = {}) {
  const element = Object.assign(document.createElement(name), properties);
  if (text !== undefined) element.textContent = text;
  return element;
}

function showRuns() {
  at("runs").replaceChildren(...report.runs.map(run => {
    const item = make("li"), mark = make("i");
    mark.style.background = run.colour;
    const state = run.finished ? `${run.steps.toLocaleString("en")} steps`
      : `step ${run.step.toLocaleString("en")} of ${run.steps.toLocaleString("en")}`;
    item.append(mark, make("b", run.label), make("span", ` ${state}`, {className: "pale"}));
    return item;
  }));
  at("notes").replaceChildren(...report.runs.flatMap(run =>
    run.notes.map(note => make("p", `${run.label}: ${note}`, {className: "note"}))));
}

// Samples

let steps = [];  // of the slider's positions

function showSamples() {
  const last = steps.length === 0 || +at("slider").value === steps.length - 1;
  steps = [...new Set(report.runs.flatMap(run => run.grids.map(grid => grid[0])))].sort((a, b) => a - b);
  at("samples").hidden = steps.length === 0;
  at("slider").max = Math.max(0, steps.length - 1);
  at("slider").disabled = steps.length < 2;
  if (last) at("slider").value = steps.length - 1;
  showGrids();
}

function showGrids() {
  if (!steps.length) return;
  const step = steps[at("slider").value];
  at("when").textContent = `After step ${step.toLocaleString("en")}`;
  const figures = report.runs.filter(run => run.grids.length).map((run, k) => {
    const before = run.grids.filter(grid => grid[0] <= step), grid = before[before.length - 1];
    const figure = at("grids").children[k] || make("figure");
    if (!figure.firstChild) figure.append(make("figcaption"), make("img"));
    const [caption, image] = figure.children;
    caption.textContent = `${run.label}: ${grid ? `step ${grid[0].toLocaleString("en")}` : "no samples yet"}`;
    image.hidden = !grid;
    image.alt = grid ? `Samples of ${run.label} after step ${grid[0]}` : "";
    if (grid && image.getAttribute("src") !== grid[1]) image.src = grid[1];
    return figure;
  });
  at("grids").replaceChildren(...figures);
}

at("slider").addEventListener("input", showGrids);
document.addEventListener("keydown", event => {
  const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!move || event.ctrlKey || event.altKey || event.metaKey || document.activeElement === at("slider")) return;
  at("slider").value = +at("slider").value + move;
  showGrids();
  event.preventDefault();
});

// Settings

function showSettings() {
  const names = [...new Set(report.runs.flatMap(run => Object.keys(run.settings)))];
  const head = make("tr");
  head.append(make("th", "setting"), ...report.runs.map(run => make("th", run.label)));
  document.querySelector("thead").replaceChildren(head);
  const rows = names.map(name => {
    const values = report.runs.map(run => name in run.settings ? run.settings[name] : "–");
    const row = make("tr");
    row.append(make("td", name), ...values.map(value => make("td", value)));
    if (new Set(values).size > 1) row.className = "differs";
    return row;
  });
  document.querySelector("tbody").replaceChildren(...rows);
  document.querySelector("table").className = report.runs.length < 2 ? "one" : "";
  at("only").closest("p").hidden = report.runs.length < 2;
  choose();
}

function choose() {
  document.querySelectorAll("tbody tr").forEach(row => {
    row.hidden = at("only").checked && row.className !== "differs";
  });
}
at("only").addEventListener("change", choose);

// A server's page: what is new comes every two seconds

const columns = ["x", "y", "low", "high", "smooth"];

async function update() {
  try {
    const answer = await fetch("data", {cache: "no-store", signal: AbortSignal.timeout(30000)});
    if (!answer.ok) throw new Error(await answer.text());
    const found = await answer.json();
    found.runs.forEach((run, k) => {
      for (const [name, curve] of Object.entries(run.curves)) {
        const source = Bokeh.documents[0] && Bokeh.documents[0].get_model_by_name(`${name}/${k}`);
        if (source && (source.data.x.length !== curve.x.length || run.step !== report.runs[k].step))
          source.data = Object.fromEntries(columns.map(key => [key, curve[key]]));
        else if (!source && !report.charts.includes(name)) location.reload();
      }
      delete run.curves;
    });
    report.runs = found.runs;
    at("lost").hidden = true;
    showRuns();
    showSamples();
  } catch (error) {
    at("lost").hidden = false;
  }
  document.body.dataset.updates = +(document.body.dataset.updates || 0) + 1;
  setTimeout(update, 2000);
}

showRuns();
showSamples();
showSettings();
if (report.live) {
  at("notes").after(make("p", "The server does not answer: start numdiff report --serve again.",
                         {id: "lost", className: "fault", hidden: true}));
  setTimeout(update, 2000);
}
document.body.dataset.ready = "yes";
