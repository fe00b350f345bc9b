"""The pages that run in the browser (docs/hooks/browser.py): their files suffice without Numba,
greenlet and timers, and the pages work in Chromium without network.

`python docs/hooks/browser.py` fetches what the tests of the pages need.
"""

import importlib.util
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

from tests.conftest import exhaustive, exhaustively
from tests.emulator.browser import Browser, find_chromium

from . import pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
import signal
import sys
from importlib.machinery import PathFinder

found = PathFinder.find_spec
MISSING = ("numba", "numba_cuda", "llvmlite", "greenlet", "threadpoolctl", "click", "ml_dtypes")
PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.partition(".")[0] in MISSING else found(name, path, target))
del signal.setitimer
sys.path.insert(0, sys.argv[1])
import pathlib
import in_browser
from numdiff import emulator
assert emulator.Emulator.generators and emulator.__file__.startswith(sys.argv[1])
print(getattr(in_browser, sys.argv[2])(int(sys.argv[3]), pathlib.Path(sys.argv[4]).read_text()))
"""


@pytest.fixture(scope="module")
def browser_hook():
    spec = importlib.util.spec_from_file_location("browser", ROOT / "docs" / "hooks" / "browser.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


@pytest.fixture(scope="module")
def files(tmp_path_factory, browser_hook):
    folder = tmp_path_factory.mktemp("browser")
    for path, data in browser_hook.sources().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "program.py").write_text(PROGRAM)
    return folder


def answered(files, action, number, file):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "program.py", files, action, str(number), file],
        capture_output=True,
        text=True,
        cwd=files,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def without_barrier(tmp_path):
    file = tmp_path / "07_shared.py"
    file.write_text(pages.solution(7).replace("cuda.syncthreads()", "pass", 1))
    return file


# The files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [9, *exhaustively(*range(1, 9), 10)])
def test_a_solution_has_three_stars(files, number):
    (file,) = pages.SOLUTIONS.glob(f"{number:02}_*.py")
    assert answered(files, "check", number, file)["stars"] == 3


def test_a_missing_barrier_is_named_and_filmed(files, tmp_path):
    file = without_barrier(tmp_path)
    assert "Put cuda.syncthreads() between" in answered(files, "check", 7, file)["message"]
    assert "<html" in answered(files, "film", 7, file)["page"]


def test_what_a_kernel_prints_is_shown(files, tmp_path):
    file = tmp_path / "01_map.py"
    file.write_text(pages.solution(1) + "    if i == 7:\n        print(i, 'seen')\n")
    found = answered(files, "check", 1, file)
    assert found["stars"] == 3 and found["printed"] == "7 seen\n" * 3  # in three thread orders


def test_a_cell_says_which_line_fails(files, tmp_path):
    cell = tmp_path / "cell.py"
    cell.write_text("print('before')\nnothing")
    found = answered(files, "cell", 3, cell)
    assert found["printed"] == "before\n"
    assert found["error"] == "Line 2: NameError: name 'nothing' is not defined"


def test_the_editor_has_the_puzzle_without_its_explanation(browser_hook):
    for number in browser_hook.PUZZLES:
        puzzle = browser_hook.catalogue.puzzle(number)
        text, title = browser_hook.stub(puzzle), puzzle.docstring.splitlines()[0]
        assert text.startswith(f'"""{title}"""\n\n')
        assert text.endswith(puzzle.text.partition('"""\n\n')[2])


# Fetching -----------------------------------------------------------------------------------------


def test_without_npm_the_pages_say_so(browser_hook, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    browser_hook.why_not.cache_clear()
    try:
        assert "There is no npm on this machine. Install numdiff" in browser_hook.puzzle(1)
        assert "There is no npm on this machine." in browser_hook.chapter_note()
        assert browser_hook.cell(["code", "shown"]) == ["code", "shown"]
        assert not browser_hook.is_fetched()
    finally:
        browser_hook.why_not.cache_clear()


def test_an_archive_with_another_digest_is_refused(browser_hook, tmp_path, monkeypatch):
    def packed(command, scratch, failure):
        with tarfile.open(scratch / "pyodide-0.tgz", "w:gz") as files:
            files.addfile(tarfile.TarInfo("package/pyodide.mjs"), io.BytesIO())

    monkeypatch.setattr(browser_hook, "called", packed)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    with pytest.raises(browser_hook.MissingDownload, match="another one than expected"):
        browser_hook.interpreter(tmp_path)


def test_a_wheel_comes_from_the_server_and_has_the_listed_digest(
    browser_hook, tmp_path, monkeypatch
):
    def gone(command, scratch, failure):
        raise browser_hook.MissingDownload(failure)

    monkeypatch.setattr(browser_hook, "called", gone)
    monkeypatch.setattr(browser_hook, "SERVER", f"{tmp_path.as_uri()}/")
    (tmp_path / "numpy.whl").write_bytes(b"numpy")
    digest = browser_hook.hashlib.sha256(b"numpy").hexdigest()
    listed = [{"file_name": "numpy.whl", "sha256": digest}]
    assert browser_hook.packages(listed, tmp_path) == {"numpy.whl": b"numpy"}
    listed[0]["sha256"] = digest[::-1]
    with pytest.raises(browser_hook.MissingDownload, match="another file"):
        browser_hook.packages(listed, tmp_path)
    listed[0]["file_name"] = "missing.whl"
    with pytest.raises(browser_hook.MissingDownload, match="cannot be fetched"):
        browser_hook.packages(listed, tmp_path)


# The pages ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory, browser_hook):
    """(a browser, the address of the pages)"""
    if not find_chromium():
        pytest.skip("There is no Chromium.")
    if not browser_hook.is_fetched():
        pytest.skip("Pyodide is not fetched: run python docs/hooks/browser.py.")
    site = tmp_path_factory.mktemp("site")
    browser_hook.write(site)
    with pages.served(site) as address, Browser() as browser:
        yield browser, address


@exhaustive
def test_a_puzzle_is_judged_and_filmed_in_its_page(page, tmp_path):
    browser, address = page
    browser.visit(f"{address}/learn/07_shared.html")
    pages.started(browser)
    pages.write_into(browser, without_barrier(tmp_path).read_text())
    assert "Put cuda.syncthreads() between" in pages.press(browser, "check")[1]
    assert browser.evaluate("document.querySelector('.puzzle').dataset.stars") == "0"
    pages.press(browser, "film")
    browser.wait(
        "document.querySelector('iframe.film').contentDocument.body.dataset.ready === 'yes'"
    )
    pages.write_into(browser, pages.solution(7))
    assert pages.press(browser, "check")[1].startswith("★★★ Right")
    assert browser.evaluate("document.querySelector('iframe.film')") is None
    browser.visit(f"{address}/learn/07_shared.html")  # what was written is kept
    assert browser.evaluate("document.querySelector('textarea').value") == pages.solution(7)


@exhaustive
def test_a_page_from_the_disk_says_what_it_needs(page, browser_hook, tmp_path):
    browser, _ = page
    file = tmp_path / "page.html"
    file.write_text(browser_hook.puzzle(1))
    browser.visit(file.as_uri())
    assert "python -m http.server" in browser.evaluate("document.body.innerText")


@exhaustive
def test_an_endless_loop_is_stopped(page):
    browser, address = page
    browser.visit(f"{address}/learn/01_map.html")
    pages.write_into(
        browser, pages.solution(1).replace("    i = ", "    while True:\n        pass\n    i = ")
    )
    assert "Check the loop's condition" in pages.press(browser, "check")[1]


@exhaustive
@pytest.mark.parametrize(
    "name, last, text, figures",
    [
        ("01_threads_and_memory", 11, "copy4: 16 requests", 6),  # a film and five pictures
        ("02_reductions_and_softmax", 6, "'shuffles': 18", 3),  # the last with matplotlib
    ],
)
def test_a_chapter_runs_up_to_a_cell(page, name, last, text, figures):
    browser, address = page
    browser.seen.clear()
    browser.visit(f"{address}/chapters/{name}.html")
    _, texts, shown = pages.run_cell(browser, last)
    assert text in texts[-1] and shown == figures
    assert [p for p in browser.problems() if not p.startswith(f"requests {address}")] in (
        [],
        ["Failed to load resource: the server responded with a status of 404 (File not found)"],
    )  # there is no favicon
