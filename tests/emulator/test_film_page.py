"""The page of a film in a browser: slider, keys, lanes, and a race that is found by looking."""

import numpy as np
import pytest
from numba import cuda

from numdiff import emulator
from numdiff.extras.kernel_check import run as check
from tests.emulator.browser import Browser
from tests.emulator.test_film import gemm, line_of, long, no_barrier, replay  # noqa: F401 (gemm is a fixture)

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs("chromium")]
float32 = np.float32


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    film = emulator.trace(no_barrier, 1, 64, np.ones(64, float32), np.zeros(64, float32))
    path = tmp_path_factory.mktemp("film") / "race.html"
    film.save(path)
    return film, path


def state(browser):
    return tuple(
        browser.evaluate("['step', 'row', 'lane'].map(name => +document.body.dataset[name])")
    )


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r}).innerText")


def current_line(browser):
    return int(browser.evaluate("document.querySelector('.code.here u').textContent"))


def test_slider_keys_and_clicks(browser, race):
    film, path = race
    browser.open(path)
    last = replay(film).length - 1
    assert state(browser) == (0, 0, 0) and text(browser, "h1") == "no_barrier"
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert state(browser)[0] == 2 and current_line(browser) == line_of(no_barrier, "tile[t] =")
    browser.press("ArrowLeft")
    assert state(browser)[0] == 1
    browser.press("End")
    assert state(browser)[0] == last and f"step {last} of {last}" in text(browser, "#step")
    browser.press("Home")
    browser.press("ArrowRight", shift=True)
    assert state(browser)[0] == min(10, last)
    browser.evaluate("slider.value = 2; slider.oninput()")
    assert state(browser)[0] == 2
    browser.press("ArrowDown")
    browser.press("]")
    assert state(browser) == (2, 1, 1) and "Thread (33, 0, 0)" in text(browser, "#thread")
    values = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#variables p')].map("
        "p => [p.firstChild.textContent, p.lastChild.textContent]))"
    )
    assert values == {"t": "33"}
    box = browser.evaluate(
        "(box => [box.x, box.y])("
        "document.querySelectorAll('#lanes button')[7].getBoundingClientRect())"
    )
    browser.click(box[0] + 5, box[1] + 5)
    assert state(browser) == (2, 1, 7)
    assert browser.problems() == []


def test_a_race_is_found_by_looking(browser, race):
    film, path = race
    browser.open(path)
    assert "2 faults" in text(browser, "#fault") or "3 faults" in text(browser, "#fault")
    lines = {line_of(no_barrier, "tile[t] ="), line_of(no_barrier, "63 - t")}
    wrong = browser.evaluate(
        "[...document.querySelectorAll('.code.wrong u')].map(u => +u.textContent)"
    )
    assert lines <= set(wrong)
    # from one line to the other
    assert browser.evaluate("document.querySelectorAll('.arrows path').length") >= 1
    while "race" not in text(browser, "#caption"):
        browser.press("f")
    assert all(f"line {line}" in text(browser, "#caption") for line in lines)
    assert browser.evaluate("document.querySelectorAll('.arrows path.chosen').length") == 1
    # the arrow between the two accesses: pixels in the colour of faults that the timeline has not
    # without it
    red = """(() => {const c = document.getElementById('timeline'), d = c.getContext('2d').getImageData(0, 0, c.width,
             c.height).data; let n = 0; for (let k = 0; k < d.length; k += 4)
             n += d[k] > 180 && d[k + 1] < 60 && d[k + 2] < 70; return n})()"""
    with_arrows = browser.evaluate(red)
    browser.evaluate(
        "film.launch.faults.forEach(f => { f.other = null }); film.views[1].key = ''; film.draw()"
    )
    assert with_arrows > browser.evaluate(red) + 50
    assert browser.problems() == []


def test_cells_have_the_colour_of_their_last_writer(browser, race):
    film, path = race
    browser.open(path)
    at = (
        "(cell => { const {canvas, wide, tall} = film.views[3].parts[0], context = canvas.getContext('2d'); return "
        "context.getImageData(cell % 32 * wide + 3, Math.floor(cell / 32) * tall + 3, 1, 1).data.join() })"
    )
    empty = [browser.evaluate(f"{at}({cell})") for cell in (0, 40)]
    assert empty[0] == empty[1]
    browser.evaluate("film.go(film.launch.length - 1)")
    first, other_lane, other_warp = (browser.evaluate(f"{at}({cell})") for cell in (0, 31, 40))
    assert len({empty[0], first, other_lane, other_warp}) == 4
    browser.evaluate("film.go(0)")
    assert browser.evaluate(f"{at}(0)") == empty[0]


def test_play(browser, tmp_path):
    film = emulator.trace(long, 1, 256, np.ones(256, float32))
    film.save(tmp_path / "long.html")
    browser.open(tmp_path / "long.html")
    browser.press(" ")
    browser.wait("+document.body.dataset.step > 3")
    browser.press(" ")
    stopped = state(browser)[0]
    assert "Play" in text(browser, "#play")
    browser.evaluate("new Promise(done => setTimeout(done, 300))")
    assert state(browser)[0] == stopped and browser.problems() == []


def test_the_hopper_gemm(browser, gemm, tmp_path):  # noqa: F811
    gemm.save(tmp_path / "gemm.html")
    browser.open(tmp_path / "gemm.html")
    found = replay(gemm)
    load = gemm.launches[0].flights[0]
    browser.evaluate(f"film.go({load.start + 1}); film.select({{row: 4}})")
    assert "bytes to come" in text(browser, "#engines") and "TMA loads of map_a" in text(
        browser, "#engines"
    )
    product = next(f for f in gemm.launches[0].flights if f.kind == "wgmma")
    browser.evaluate(f"film.go({product.start})")
    assert "in flight: m64n64k16" in text(browser, "#engines")
    for step in range(0, found.length, max(1, found.length // 40)):
        browser.evaluate(f"film.go({step})")
    assert browser.problems() == []


@pytest.mark.parametrize(
    "name, version", [("softmax", "1"), ("matmul", "2"), ("matmul_mma_level", "1")]
)
def test_films_of_operations(browser, tmp_path, name, version):
    outcome, film = check.run_version(name, version, filmed=True)
    assert outcome.passed
    film.save(tmp_path / "film.html")
    browser.open(tmp_path / "film.html")
    browser.evaluate(
        "(async () => { for (let k = 0; k < film.launch.length; k += 7) film.go(k) })()"
    )
    assert browser.problems() == []


def test_hostile_names_run_nothing(browser, tmp_path):
    def kernel(x):  # <img src=x onerror="window.pwned = 1">
        x[0] = 1

    kernel.__name__ = "</title></script><script>window.pwned = 1</script>"
    emulator.trace(cuda.jit(kernel), 1, 1, np.zeros(1, float32)).save(tmp_path / "film.html")
    browser.open(tmp_path / "film.html")
    assert text(browser, "h1") == kernel.__name__ and "onerror" in text(browser, "#source")
    assert browser.evaluate("window.pwned === undefined") and browser.problems() == []


def test_a_narrow_window_and_the_dark(race, tmp_path):
    with Browser(420, 800, dark=True) as narrow:
        narrow.open(race[1], "#step=2&fault=0")
        assert state(narrow)[0] == 2
        assert narrow.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert (
            narrow.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
        )
        assert narrow.problems() == []


def test_a_notebook_shows_the_page_in_a_frame(browser, race, tmp_path):
    (tmp_path / "book.html").write_text(
        f"<body data-ready=yes>{race[0]._repr_html_()}", encoding="utf-8"
    )
    browser.open(tmp_path / "book.html")
    assert browser.evaluate("document.querySelector('iframe').srcdoc.includes('id=\"timeline\"')")
    assert browser.problems() == []
