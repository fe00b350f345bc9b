// Runs Python in WebAssembly: a message {program, files} gives {code, text}. The files of numdiff, and what Python
// caches of them, stay between runs. docs/hooks/browser.py makes the folder `browser`.
import {WASI, File, Directory, OpenFile, PreopenDirectory, ConsoleStdout} from "../browser/shim/index.js";

const FOLDER = new URL("../browser/", import.meta.url);
const encoder = new TextEncoder();
let ready;

function insert(root, path, bytes) {
  const parts = path.split("/");
  let at = root;
  for (const part of parts.slice(0, -1)) {
    if (!at.has(part)) at.set(part, new Directory(new Map()));
    at = at.get(part).contents;
  }
  at.set(parts.at(-1), new File(bytes));
}

async function prepare() {
  const get = async name => {
    const answer = await fetch(new URL(name, FOLDER));
    if (!answer.ok) throw new Error(`this site was built without ${name}`);
    return answer;
  };
  const unpacked = (await get("python.wasm.gz")).body.pipeThrough(new DecompressionStream("gzip"));
  const module = WebAssembly.compileStreaming(
    new Response(unpacked, {headers: {"Content-Type": "application/wasm"}}));
  const root = new Map([["tmp", new Directory(new Map())]]);
  insert(root, "usr/local/lib/python315.zip", new Uint8Array(await (await get("python.zip")).arrayBuffer()));
  for (const [path, text] of Object.entries(await (await get("files.json")).json())) {
    insert(root, `lib/${path}`, encoder.encode(text));
  }
  return {module: await module, root};
}

onmessage = async ({data: {program, files}}) => {
  try {
    const {module, root} = await (ready ??= prepare());
    postMessage({ready: true});
    for (const [path, text] of Object.entries(files)) insert(root, path, encoder.encode(text));
    insert(root, "home/program.py", encoder.encode(program));
    let text = "";
    const output = ConsoleStdout.lineBuffered(line => { text += line + "\n"; });
    const wasi = new WASI(["/usr/local/bin/python.wasm", "/home/program.py"], ["NO_COLOR=1"],
      [new OpenFile(new File([])), output, output, new PreopenDirectory("/", root)]);
    wasi.inst = await WebAssembly.instantiate(module, {wasi_snapshot_preview1: wasi.wasiImport, host: {call: () => -1}});
    let code;
    try {
      wasi.inst.exports._initialize?.();
      code = wasi.inst.exports.run();
    } catch (error) {
      code = error.code ?? String(error);
    }
    postMessage({code, text});
  } catch (error) {
    ready = undefined;
    postMessage({code: String(error), text: ""});
  }
};
