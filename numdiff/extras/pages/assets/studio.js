"use strict";
// Texts of a model are written by textContent alone.
const model = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);
const form = at("form"), field = form.elements;
const KEPT = 60;  // pictures of the history
let current = null;  // the AbortController of the request that is running

function option(text, value) {
  return Object.assign(document.createElement("option"), {textContent: text, value});
}

at("about").textContent = model.about;
at("classes").hidden = model.classes.length === 0;
field.class.append(option("chosen by the seed", ""), ...model.classes.map((name, k) => option(name, k)));
at("guided").hidden = !model.guided;
field.guidance.placeholder = model.guidance === null ? "none" : model.guidance;
field.steps.max = model.mostSteps;
field.steps.placeholder = model.steps;
field.sampler.append(option(`as in training (${model.sampler})`, ""), ...model.samplers.map(name => option(name, name)));

const number = text => text === "" ? null : +text;

function settings() {
  return {
    class: number(field.class.value), seed: +field.seed.value, steps: number(field.steps.value),
    guidance: model.guided ? number(field.guidance.value) : null, sampler: field.sampler.value || null,
  };
}

function say(text, fault = false) {
  at("state").textContent = text;
  at("state").className = fault ? "fault" : "pale";
}

function show(url, forming) {
  at("picture").src = url;
  at("picture").hidden = false;
  at("save").hidden = true;
  at("picture").alt = forming ? "The picture while it forms" : "The picture";
}

const handlers = {
  queued: value => say(value.before ? `${value.before} before this one` : "begins"),
  preview: value => {
    show(`data:image/png;base64,${value.png}`, true);
    say(`evaluation ${value.step + 1} of ${value.of}`);
  },
  picture: (value, asked) => {
    const bytes = Uint8Array.from(atob(value.png), c => c.charCodeAt(0));
    keep({url: URL.createObjectURL(new Blob([bytes], {type: "image/png"})), asked, ...value, png: null});
  },
  fault: value => say(value, true),
};

// The history

const past = [];

function keep(made) {
  const button = document.createElement("button"), image = document.createElement("img");
  button.type = "button";
  button.title = made.caption;
  image.src = made.url;
  image.alt = made.caption;
  button.append(image);
  button.onclick = () => {
    choose(made);
    for (const [name, value] of Object.entries(made.asked)) field[name].value = value === null ? "" : value;
  };
  made.button = button;
  past.unshift(made);
  at("history").prepend(button);
  for (const old of past.splice(KEPT)) {
    old.button.remove();
    URL.revokeObjectURL(old.url);
  }
  at("past").hidden = false;
  choose(made);
}

function choose(made) {
  show(made.url, false);
  say(made.caption);
  Object.assign(at("save"), {href: made.url, download: made.name, hidden: false});
  past.forEach(other => { other.button.className = other === made ? "here" : ""; });
}

// One request: its answer is a stream of server-sent events

async function make() {
  const asked = settings();
  current = new AbortController();
  at("make").disabled = true;
  at("stop").disabled = false;
  let ended = false;
  say("waits for the server");
  try {
    const answer = await fetch("sample", {
      method: "POST", body: JSON.stringify(asked), signal: current.signal,
    });
    if (!answer.ok) {
      say(await answer.text(), true);
      return;
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const each of events) {
        const found = /^event: (\w+)\ndata: (.*)$/.exec(each);
        if (!found) continue;  // a sign of life
        ended = ended || ["picture", "fault"].includes(found[1]);
        handlers[found[1]](JSON.parse(found[2]), asked);
      }
    }
    if (!ended) say("The server has ended.", true);
  } catch (error) {
    if (error.name === "AbortError") say("stopped");
    else say("The server does not answer: start numdiff serve again.", true);
  } finally {
    at("make").disabled = false;
    at("stop").disabled = true;
    current = null;
  }
}

form.onsubmit = event => {
  event.preventDefault();
  if (!current) make();
};
at("stop").onclick = () => current && current.abort();
at("other").onclick = () => {
  field.seed.value = Math.min(+field.seed.value + 1, 4294967295);
  if (!current) make();
};
document.body.dataset.ready = "yes";
