"""The pages that run in the browser, in a headless Chromium that reaches this machine alone.

python docs/hooks/browser.py --check FOLDER      prints what `measure` finds
"""

import contextlib
import functools
import http.server
import json
import pathlib
import threading
import time

from numdiff.lessons import catalogue

from ..emulator.browser import Browser

SOLUTIONS = pathlib.Path(catalogue.FOLDER) / "solutions"
SECONDS = 120  # that a page may take on a busy machine


class Quiet(http.server.SimpleHTTPRequestHandler):
    extensions_map = {
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".html": "text/html",
        ".css": "text/css",
        ".wasm": "application/wasm",
        "": "application/octet-stream",
    }

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def served(site):
    """Context: the address under which a folder is served."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def write_into(browser, text):
    """Replace the text of the puzzle's editor."""
    browser.evaluate(
        "(() => { const area = document.querySelector('textarea'); area.focus(); area.select();"
        f"document.execCommand('insertText', false, {json.dumps(text)}); }})()"
    )


def press(browser, name):
    """Press one of a puzzle's buttons and wait for its end; returns the seconds, and what the page says."""
    begun = time.perf_counter()
    browser.evaluate(f"document.querySelector('.puzzle button.{name}').click()")
    browser.wait(f"document.querySelector('.puzzle').dataset.done === '{name}'", SECONDS)
    said = browser.evaluate("document.querySelector('.puzzle output').textContent")
    return time.perf_counter() - begun, said


def started(browser):
    """Start Python in the page; returns the seconds that the page has measured."""
    browser.evaluate("document.querySelector('textarea').focus()")
    browser.wait("document.body.dataset.python", SECONDS)
    return float(browser.evaluate("document.body.dataset.python"))


def run_cell(browser, number):
    """Run a cell of a chapter and those above it; returns the seconds, and the texts that have been
    printed and the number of figures since the page was opened."""
    begun = time.perf_counter()
    browser.evaluate(
        f"document.querySelectorAll('.run button.md-button--primary')[{number - 1}].click()"
    )
    browser.wait(
        f"document.querySelectorAll('.cell')[{number - 1}].dataset.done"
        " || document.querySelector('.cell[data-done=error]') !== null",
        SECONDS,
    )
    texts = browser.evaluate(
        "[...document.querySelectorAll('pre.shown')].map(each => each.textContent)"
    )
    figures = browser.evaluate("document.querySelectorAll('img.shown, iframe.film').length")
    return time.perf_counter() - begun, texts, figures


def solution(number):
    (file,) = SOLUTIONS.glob(f"{number:02}_*.py")
    return file.read_text(encoding="utf-8")


def measure(site):
    """Print the times of each page, and save pictures of two of them in the folder."""
    with served(site) as address, Browser() as browser:
        for number in range(1, 11):
            browser.visit(f"{address}/learn/{catalogue.puzzle(number).name}.html")
            ready = started(browser)
            write_into(browser, solution(number))
            verdict, said = press(browser, "check")
            film, _ = press(browser, "film")
            print(
                f"puzzle {number}: Python {ready:.1f} s, verdict {verdict:.1f} s, film {film:.1f} s: {said}"
            )
        browser.screenshot(site / "puzzle.png")
        for name in ("01_threads_and_memory", "02_reductions_and_softmax"):
            browser.visit(f"{address}/chapters/{name}.html")
            count = browser.evaluate("document.querySelectorAll('.cell').length")
            for number in range(1, count + 1):
                seconds, texts, figures = run_cell(browser, number)
                print(
                    f"{name}, cell {number}: {seconds:.1f} s, {len(texts)} texts, {figures} figures"
                )
            browser.screenshot(site / f"{name}.png")
            print(*texts, sep="\n---\n")
        print(browser.problems())
