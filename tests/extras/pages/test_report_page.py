"""The report in a browser: charts, slider, keys, a narrow window, hostile names, a run watched live."""

import threading

import pytest

from numdiff.extras.pages.live import LiveReport
from numdiff.extras.pages.report import save_report
from numdiff.extras.pages.server import Server
from tests.emulator.browser import Browser
from tests.extras.pages.folders import make_run, report_steps
from tests.extras.pages.test_report import HOSTILE

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs("chromium")]
SIZES = (
    "[...document.querySelectorAll('.chart .bk-Figure')].map(d => d.getBoundingClientRect().width)"
)
SHOWN = "[...document.querySelectorAll('#grids figcaption')].map(c => c.textContent)"
LENGTH = "Bokeh.documents[0].get_model_by_name('loss/0').data.x.length"


@pytest.fixture
def browser():
    with Browser(timeout=20) as found:
        yield found


def show(browser, path):
    seconds = browser.open(path)
    browser.wait(
        "window.Bokeh && Bokeh.documents.length > 0 && document.querySelector('.bk-Figure') !== null"
    )
    return seconds


def test_a_run_of_100_000_steps(tmp_path):
    """At most 3 MB, open within 2 s: the quickest of three times, as others may use the cores."""
    run_dir = make_run(tmp_path, steps=100_000, every=20, grids=range(2000, 100_001, 2000))
    path = tmp_path / "report.html"
    save_report(path, [run_dir])
    assert path.stat().st_size <= 3_000_000
    times = []
    while len(times) < 3 and min(times, default=9) > 2:
        with Browser(timeout=20) as browser:
            times.append(show(browser, path))
            assert browser.evaluate(LENGTH) == 2000 and browser.problems() == []
    assert min(times) <= 2


def test_slider_and_keys(browser, tmp_path):
    runs = [make_run(tmp_path, grids=(10, 20, 40)), make_run(tmp_path, grids=(20, 30), batch=2)]
    save_report(tmp_path / "report.html", runs)
    show(browser, tmp_path / "report.html")
    names = [run.name for run in runs]
    assert browser.evaluate(SHOWN) == [f"{names[0]}: step 40", f"{names[1]}: step 30"]
    browser.press("ArrowLeft")
    assert browser.evaluate(SHOWN) == [f"{names[0]}: step 20", f"{names[1]}: step 30"]
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert browser.evaluate(SHOWN) == [f"{names[0]}: step 10", f"{names[1]}: no samples yet"]
    browser.evaluate("slider.value = 1; slider.dispatchEvent(new Event('input'))")
    assert browser.evaluate(SHOWN) == [f"{names[0]}: step 20", f"{names[1]}: step 20"]
    assert browser.evaluate("document.querySelector('#grids img').naturalWidth") == 60
    rows = "[...document.querySelectorAll('tbody tr')].filter(r => !r.hidden).length"
    everything = browser.evaluate(rows)
    browser.evaluate("only.click()")
    assert 1 <= browser.evaluate(rows) < everything
    assert browser.problems() == []


def test_a_drag_zooms_all_charts(browser, tmp_path):
    save_report(tmp_path / "report.html", [make_run(tmp_path, steps=200)])
    show(browser, tmp_path / "report.html")
    span = "(r => r.end - r.start)(Bokeh.documents[0].roots()[0].x_range)"
    browser.wait(f"isFinite({span}) && {span} > 100")
    before = browser.evaluate(span)
    x, y, width = browser.evaluate(
        "(b => [b.x, b.y, b.width])(document.querySelector('.chart .bk-Figure').getBoundingClientRect())"
    )
    for kind, at in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseReleased", 0.6)):
        browser.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x + at * width,
            y=y + 60 + 150 * (at - 0.4),
            button="left",
            clickCount=1,
            buttons=int(kind != "mouseReleased"),
        )
    browser.wait(f"{span} < {before} / 2")
    other = "(r => r.end - r.start)(Bokeh.documents[0].roots()[1].x_range)"
    assert browser.evaluate(other) == browser.evaluate(span)
    assert browser.problems() == []


def test_a_narrow_window(tmp_path):
    runs = [make_run(tmp_path), make_run(tmp_path, name="00001-" + "a" * 100)]
    save_report(tmp_path / "report.html", runs)
    with Browser(400, 800, timeout=20) as narrow:
        show(narrow, tmp_path / "report.html")
        narrow.wait(f"{SIZES}.every(w => w > 250 && w <= 400)")
        assert narrow.evaluate("document.documentElement.scrollWidth <= 400")
        assert narrow.problems() == []


def test_hostile_names_run_nothing(browser, tmp_path):
    run_dir = make_run(tmp_path, name=HOSTILE.replace("/", "∕"), data=None)
    save_report(tmp_path / "report.html", [run_dir])
    show(browser, tmp_path / "report.html")
    assert browser.evaluate("document.querySelector('#runs b').textContent") == run_dir.name
    assert browser.evaluate("document.querySelector('h1').textContent") == run_dir.name
    assert browser.evaluate("window.pwned === undefined") and browser.problems() == []


def test_a_run_is_watched_live(tmp_path):
    run_dir = make_run(tmp_path, steps=0, planned=40, grids=())
    with Server(LiveReport([run_dir]).routes) as server, Browser(timeout=20) as browser:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            browser.call("Page.navigate", url=server.url)
            browser.wait("document.body && document.body.dataset.ready === 'yes'")
            assert "no report yet" in browser.evaluate("notes.textContent")
            report_steps(run_dir, 0, 20, 10)
            browser.wait(f"{LENGTH} === 20")
            report_steps(run_dir, 20, 40, 10)
            make_grid(run_dir, 40)
            browser.wait(f"{LENGTH} === 40 && runs.textContent.includes('40 steps')")
            browser.wait(f"{SHOWN}.length === 1")
            assert browser.evaluate("notes.textContent") == ""
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
        browser.wait("!lost.hidden")  # the server has ended, and the page says so
        found = [p for p in browser.problems() if not p.startswith(f"requests {server.url}")]
        assert all("Failed to load resource" in p or "CONNECTION" in p for p in found)


def make_grid(run_dir, step):
    import numpy as np

    from numdiff.training.report import save_png
    from numdiff.training.run_folder import sample_path

    save_png(sample_path(run_dir, step), np.zeros((8, 8, 3), np.uint8))
