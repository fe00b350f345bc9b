// A puzzle's page: an editor, and buttons that judge what is in it, by Python in a worker.
const LIMIT = 60; // seconds, after which a kernel counts as endless
const program = (number, file) => `
import json, pathlib, sys
sys.path.insert(0, "/lib")
from numdiff import emulator
with emulator.device():
    from numdiff.lessons import catalogue, judge
    verdict = judge.judge(catalogue.puzzles()[${number}], pathlib.Path("${file}"))
print("\\x1f" + json.dumps([verdict.stars, verdict.message, round(verdict.seconds, 1)]))
`;
let worker, timer;

function run(number, name, text, show) {
  const file = `/home/${name}.py`;
  worker ??= new Worker(new URL("browser-worker.js", import.meta.url), {type: "module"});
  show("Loading Python: 28 MB at the first time …");
  worker.onmessage = ({data}) => {
    if (data.ready) {
      show("Judging in three thread orders …");
      timer = setTimeout(() => {
        worker.terminate();
        worker = undefined;
        show(`Stopped after ${LIMIT} seconds: a loop does not end. Check what ends it.`, 0);
      }, 1000 * LIMIT);
      return;
    }
    clearTimeout(timer);
    const found = data.text.split("\x1f")[1];
    if (found === undefined) {
      show(`Python has ended without a verdict (${data.code}). ${data.text}`, 0);
      return;
    }
    const [stars, message, seconds] = JSON.parse(found);
    show(message, stars, seconds);
  };
  worker.postMessage({program: program(number, file), files: {[file.slice(1)]: text}});
}

for (const place of document.querySelectorAll(".puzzle")) {
  const editor = place.querySelector("textarea"), verdict = place.querySelector("output");
  const {number, name} = place.dataset, stub = editor.value;
  editor.value = localStorage.getItem(name) ?? stub;
  editor.addEventListener("keydown", event => {
    if (event.key === "Tab" && !event.shiftKey) {
      event.preventDefault();
      editor.setRangeText("    ", editor.selectionStart, editor.selectionEnd, "end");
    }
  });
  const show = (text, stars, seconds) => {
    verdict.textContent = stars === undefined ? text : `${"★".repeat(stars)}${"☆".repeat(3 - stars)} ${text}` +
      (seconds === undefined ? "" : ` (${seconds} s)`);
    if (stars !== undefined) place.dataset.stars = stars;
  };
  place.querySelector(".check").addEventListener("click", () => {
    localStorage.setItem(name, editor.value);
    delete place.dataset.stars;
    run(number, name, editor.value, show);
  });
  place.querySelector(".again").addEventListener("click", () => { editor.value = stub; });
}
