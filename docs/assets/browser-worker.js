// Runs Python in WebAssembly for a page. A message {action, given, packages} is answered by {result}, that of the
// function `action` of docs/hooks/in_browser.py, or by {error}. {ready: seconds} comes once, after Python has started.
const FOLDER = new URL("../browser/", import.meta.url).href;
let python;

async function start() {
  const begun = performance.now();
  const {loadPyodide} = await import(`${FOLDER}pyodide.mjs`);
  const numdiff = fetch(`${FOLDER}numdiff.zip`);
  const pyodide = await loadPyodide({indexURL: FOLDER, packages: ["numpy"]});
  const answer = await numdiff;
  if (!answer.ok) throw new Error(`this site has no ${answer.url}`);
  pyodide.unpackArchive(await answer.arrayBuffer(), "zip", {extractDir: "/home/numdiff"});
  pyodide.runPython('import sys; sys.path.insert(0, "/home/numdiff")');
  const module = pyodide.pyimport("in_browser");
  postMessage({ready: (performance.now() - begun) / 1000});
  return {pyodide, module};
}

onmessage = async ({data: {action, given, packages}}) => {
  try {
    const {pyodide, module} = await (python ??= start());
    if (!action) return;
    if (packages) await pyodide.loadPackage(packages);
    postMessage({begun: true});
    postMessage({result: JSON.parse(module[action](...given))});
  } catch (error) {
    postMessage({error: String(error.message ?? error)});
  }
};
