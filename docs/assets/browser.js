// The pages that run in the browser: a puzzle's editor, which is judged and filmed, and the cells of a chapter. Python
// runs in a worker, which is started when the reader first turns to an editor.
const LIMIT = 30; // seconds, after which a run counts as endless
const PLOTS = /\b(bars|drawing|matplotlib)\b/; // what in a cell needs matplotlib
let worker, asked;

function start() {
  if (worker) return;
  worker = new Worker(new URL("browser-worker.js", import.meta.url), {type: "module"});
  worker.onmessage = ({data}) => {
    if (data.ready) document.body.dataset.python = data.ready;
    else if (data.begun) asked?.begin();
    else asked?.end(data);
  };
  worker.onerror = event => asked?.end({error: event.message ?? "the worker cannot be loaded"});
  worker.postMessage({});
}

function stop() {
  worker?.terminate();
  worker = undefined;
  delete document.body.dataset.python;
}

// The result of a function of in_browser.py; `say` gets a sentence about what is going on.
async function ask(say, doing, action, given, packages) {
  if (asked) throw new Error("Another run has not ended yet: wait for it.");
  start();
  say(document.body.dataset.python ? doing : "Loading Python, 17 MB at the first time …");
  let timer;
  try {
    return await new Promise((resolve, reject) => {
      asked = {
        begin() {
          say(doing);
          timer = setTimeout(() => {
            stop();
            reject(new Error(`Stopped after ${LIMIT} seconds: a loop does not end. Check what ends it.`));
          }, 1000 * LIMIT);
        },
        end({result, error}) {
          if (error === undefined) return resolve(result);
          stop();
          reject(new Error(`Python cannot run here: ${error}`));
        },
      };
      worker.postMessage({action, given, packages});
    });
  } finally {
    clearTimeout(timer);
    asked = undefined;
  }
}

// A textarea with the numbers of its lines, in which Tab and Enter indent.
function edit(area) {
  const frame = document.createElement("div"), numbers = document.createElement("pre");
  frame.className = "editor";
  area.replaceWith(frame);
  frame.append(numbers, area);
  area.spellcheck = false;
  area.wrap = "off";
  const count = () => {
    area.rows = area.value.split("\n").length + 1;
    numbers.textContent = Array.from({length: area.rows - 1}, (_, i) => i + 1).join("\n");
  };
  area.addEventListener("input", count);
  area.addEventListener("focus", start);
  area.addEventListener("keydown", event => {
    const before = area.value.slice(0, area.selectionStart), line = before.slice(before.lastIndexOf("\n") + 1);
    let text;
    if (event.key === "Tab" && !event.shiftKey) text = " ".repeat(4 - line.length % 4);
    else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
      text = "\n" + line.match(/^ */)[0] + (/:\s*(#.*)?$/.test(line) ? "    " : "");
    } else return;
    event.preventDefault();
    document.execCommand("insertText", false, text); // the way that Ctrl+Z knows
  });
  count();
  return count;
}

function onRun(area, run) {
  area.addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      run();
    }
  });
}

function button(text, action, first) {
  const made = document.createElement("button");
  made.className = `md-button${first ? " md-button--primary" : ""}`;
  made.textContent = text;
  made.addEventListener("click", action);
  return made;
}

function page(html, height) {
  const frame = document.createElement("iframe");
  Object.assign(frame, {srcdoc: html, title: "Film of this run", className: "film"});
  frame.style.height = `${height}px`;
  return frame;
}

// A puzzle -------------------------------------------------------------------------------------------------------------

for (const place of document.querySelectorAll(".puzzle")) {
  const area = place.querySelector("textarea"), verdict = place.querySelector("output");
  const {number, name} = place.dataset, stub = area.value, kept = `numdiff/${name}`;
  area.value = localStorage.getItem(kept) ?? stub;
  const count = edit(area), buttons = place.querySelectorAll("button");
  const say = text => { verdict.textContent = text; };
  const run = async (action, doing, show) => {
    localStorage.setItem(kept, area.value);
    delete place.dataset.done;
    for (const old of place.querySelectorAll("iframe.film, pre.shown")) old.remove();
    for (const each of buttons) each.disabled = true;
    try {
      show(await ask(say, doing, action, [Number(number), area.value]));
    } catch (error) {
      say(error.message);
    }
    for (const each of buttons) each.disabled = false;
    place.dataset.done = action;
  };
  const check = () => run("check", "Judging in three thread orders …", ({stars, message, seconds, printed}) => {
    place.dataset.stars = stars;
    if (printed) verdict.after(...shown({printed, figures: []}));
    say(`${"★".repeat(stars)}${"☆".repeat(3 - stars)} ${message} (${seconds.toFixed(1)} s)`);
  });
  place.querySelector(".check").addEventListener("click", check);
  onRun(area, check);
  place.querySelector(".film").addEventListener("click", () => run("film", "Filming the run …", found => {
    say(found.message);
    if (found.page) verdict.after(page(found.page, 760));
  }));
  place.querySelector(".again").addEventListener("click", () => {
    if (area.value !== stub && !confirm("Replace your kernel by the puzzle's text?")) return;
    area.value = stub;
    localStorage.removeItem(kept);
    count();
    say("");
  });
}

// The cells of a chapter -----------------------------------------------------------------------------------------------

const cells = [];
for (const [number, place] of [...document.querySelectorAll(".cell")].entries()) {
  const block = place.nextElementSibling, code = block.querySelector("code"), bar = document.createElement("p");
  const cell = {place, bar, ran: false, number: number + 1, text: () => cell.area?.value ?? code.textContent.trimEnd()};
  cell.clear = () => {
    while (!bar.nextElementSibling.classList.contains("end")) bar.nextElementSibling.remove();
  };
  cell.edit = () => {
    if (cell.area) return;
    cell.area = document.createElement("textarea");
    cell.area.setAttribute("aria-label", `Cell ${cell.number}`);
    cell.area.value = code.textContent.trimEnd();
    block.replaceWith(cell.area);
    edit(cell.area);
    onRun(cell.area, () => runTo(cell));
    cell.area.focus();
  };
  bar.className = "run";
  bar.append(button("Run", () => runTo(cell), true), button("Edit", cell.edit), document.createElement("output"));
  block.after(bar);
  cells.push(cell);
}

function shown({printed, figures, error}) {
  const found = [];
  if (printed || error) {
    const text = document.createElement("pre");
    text.textContent = [printed.trimEnd(), error].filter(Boolean).join("\n");
    found.push(text);
  }
  for (const [kind, figure] of figures) {
    if (kind === "html") found.push(page(figure, 760));
    else {
      const picture = new Image();
      picture.src = URL.createObjectURL(new Blob([figure], {type: "image/svg+xml"}));
      picture.alt = "Drawn by the cell above";
      found.push(picture);
    }
  }
  return found.map(each => {
    each.classList.add("shown");
    return each;
  });
}

// Run the cells up to one: those above it that have not run, and the cell itself.
async function runTo(last) {
  for (const cell of cells.slice(0, last.number)) {
    if (cell.ran && cell !== last) continue;
    const text = cell.text(), say = sentence => { cell.bar.querySelector("output").textContent = sentence; };
    delete cell.place.dataset.done;
    try {
      if (!document.body.dataset.python) for (const each of cells) each.ran = false;
      const packages = PLOTS.test(text) ? ["matplotlib"] : undefined;
      const result = await ask(say, "Running …", "cell", [cell.number, text], packages);
      cell.clear();
      cell.bar.after(...shown(result));
      cell.ran = !result.error;
      say(result.error ? "Stopped by an error." : "");
      cell.place.dataset.done = result.error ? "error" : "yes";
      if (result.error) return;
    } catch (error) {
      say(error.message);
      if (!worker) for (const each of cells) each.ran = false;
      cell.place.dataset.done = "error";
      return;
    }
  }
}
