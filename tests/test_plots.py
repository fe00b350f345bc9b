"""The plots: whole files, round ticks, odd values, one style and nothing global; no step waits for
matplotlib."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from numdiff import plots
from numdiff.benchmark import plots as measured
from numdiff.errors import NumdiffError, UsageError
from tests.conftest import exhaustive
from tests.forked import forked


def picture(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), np.int32)


IMPORTED = """
import signal, sys
from numdiff import plots

class MissingFinder:
    def find_spec(name, *_):
        if name == "matplotlib._path":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, MissingFinder)
try:
    plots.matplotlib()
except KeyboardInterrupt:
    sys.exit(f"interrupted, {'matplotlib.ticker' in sys.modules}")
"""


def test_an_interrupt_waits_for_the_import():
    done = subprocess.run(forked("-c", IMPORTED), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "interrupted, True\n")


def test_running_mean():
    values = np.array([4.0, 1.0, 1.0, 7.0, 2.0])
    assert np.allclose(plots.running_mean(values, 3), [2.5, 2, 3, 10 / 3, 4.5])
    assert np.array_equal(plots.running_mean(values, 1), values)


def test_a_million_values_keep_their_peaks():
    x, y = np.arange(1e6), np.zeros(10**6)
    y[[3, 777_777, 999_999]] = 1, -1, 2
    kept, values = plots.thin(x, y)
    assert len(kept) <= 2.01 * plots.SIZE[0] * plots.DPI + 2000 and (np.diff(kept) > 0).all()
    assert {3.0, 777_777.0, 999_999.0} <= set(kept[values != 0])


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (0.03, 0.9, [0.05, 0.1, 0.2, 0.5]),
        (0.5, 4e4, [1, 10, 100, 1000, 10000]),
        (0.31, 0.33, []),
        (2.0, 6.5, [2, 3, 4, 5, 6]),
    ],
)
def test_ticks_of_a_logarithmic_axis(low, high, expected):
    assert plots.log_ticks(low, high) == pytest.approx(expected)
    assert len(plots.log_ticks(1e-9, 1e9)) <= 20


@exhaustive
@pytest.mark.parametrize(
    "losses",
    [[], [0.5], [0.5, 0.5], [1.0, float("nan"), 0.1], [0.0, -1.0, 2.0], [1e-9, 1e9]],
    ids=["none", "one", "flat", "nan", "negative", "wide"],
)
@pytest.mark.parametrize("log_y", [True, False])
def test_a_loss_curve_of_odd_losses(tmp_path, losses, log_y):
    plots.loss_curve(tmp_path / "loss.png", range(1, len(losses) + 1), losses, log_y=log_y)
    assert picture(tmp_path / "loss.png").shape == (540, 960, 3)


def test_a_loss_curve_goes_down_and_to_the_right(tmp_path):
    steps = np.arange(1, 5001)
    plots.loss_curve(tmp_path / "loss.png", steps, 1 / steps)
    red, green, blue = np.moveaxis(picture(tmp_path / "loss.png"), 2, 0)
    rows, columns = np.nonzero((blue - red > 80) & (np.arange(540)[:, None] > 90))
    assert rows[columns < 150].mean() < rows[columns > 800].mean() - 100
    before = (tmp_path / "loss.png").read_bytes()
    plots.loss_curve(tmp_path / "loss.png", steps, 1 / steps)
    assert (tmp_path / "loss.png").read_bytes() == before  # no date in it


def drawn():
    return {
        "ladder": lambda p: measured.ladder(
            p,
            {"v1 naive": 0.9, "v2 tiled": 6.1},
            "TFLOP/s",
            "Matmul",
            {"matmul": [(9, 9e11, "v1")]},
        ),
        "curves": lambda p: measured.curves(
            p,
            {"a": ([1, 2, 3], [3, np.nan, 1]), "b": ([0, 1], [1, 2])},
            "time (s)",
            "d",
            log_x=True,
            log_y=True,
        ),
        "roofline": lambda p: measured.roofline(
            p,
            {"matmul": [(300, 4e14, "v5")], "bias": [(0.1, 1e11), (0, 0)]},
            4e12,
            {"fp16": 989e12, "fp32": 67e12},
        ),
        "no roof": lambda p: measured.roofline(p, {"matmul": [(300, 4e9)]}),
        "nothing": lambda p: measured.roofline(p, {}),
    }


@pytest.mark.parametrize("name", drawn())
def test_every_plot_is_written_whole(tmp_path, name):
    path = tmp_path / f"{name}.png"
    drawn()[name](path)
    assert picture(path).shape[1] == 960 and (picture(path) < 200).any()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    drawn()[name](tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(UsageError, match=r"a.jpg must end in .png, .svg or .pdf"):
        drawn()[name](tmp_path / "a.jpg")
    with pytest.raises(NumdiffError, match="cannot write the picture .* the folder does not exist"):
        drawn()[name](tmp_path / "none" / "a.png")


def test_plots_leave_matplotlibs_settings_and_threads_draw(tmp_path):
    import matplotlib

    before, faults = matplotlib.rcParams.copy(), []

    def draw(i):
        try:
            plots.loss_curve(tmp_path / f"{i}.png", [1, 2, 3], [3.0, 2.0, 1.0])
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=draw, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and matplotlib.rcParams.copy() == before
    assert len({(tmp_path / f"{i}.png").read_bytes() for i in range(4)}) == 1
    assert "matplotlib.pyplot" not in sys.modules


@exhaustive
def test_training_does_not_import_matplotlib_before_it_draws():
    script = (
        "import sys\nimport numdiff.training.run, numdiff_cli.train, numdiff.extras.measure.bench\n"
        "assert 'matplotlib' not in sys.modules"
    )
    assert subprocess.run(forked("-c", script), capture_output=True, timeout=60).returncode == 0


def test_a_process_that_ends_while_matplotlib_is_imported_waits_for_it(tmp_path):
    """Left half imported, it would end one process in fifty with a segmentation fault."""
    (tmp_path / "matplotlib.py").write_text("import time\ntime.sleep(0.3)\nprint('imported')\n")
    script = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "from numdiff import plots\nplots.import_ahead()\nprint('end')"
    )
    done = subprocess.run(forked("-c", script), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["end", "imported"])


def test_without_matplotlib_there_is_a_sentence(tmp_path, monkeypatch):
    plots.matplotlib.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        NumdiffError,
        match="plots need matplotlib, which cannot be imported .*; pip install matplotl",
    ):
        plots.loss_curve(tmp_path / "loss.png", [1], [1.0])
    plots.matplotlib.cache_clear()


def test_labels_of_points_that_nearly_coincide_stand_together():
    points = [
        (50, 10, "3"),
        (65, 16, "4"),
        (66, 17, "5"),
        (500, 300, "9"),
        (500, 301, "10"),
        (66, 400, "7"),
    ]
    groups = measured.close_ones(points, 200, 10000)
    assert [[label for *_, label in group] for group in groups] == [
        ["3"],
        ["4", "5"],
        ["9", "10"],
        ["7"],
    ]
    # one between two others joins them
    assert len(measured.close_ones([(1, 1, "a"), (1.3, 1, "b"), (1.15, 1, "c")], 1000, 10)) == 1


@pytest.mark.parametrize("backend, kept", [("nosuch", False), ("svg", True)])
def test_a_backend_that_is_not_there_is_no_hindrance(tmp_path, backend, kept):
    script = (
        f"from numdiff import plots\nplots.loss_curve({str(tmp_path / 'loss.png')!r}, [1, 2], [2.0, 1.0])\n"
        "import os, matplotlib\n"
        "print(os.environ['MPLBACKEND'], matplotlib.rcParams._get('backend') == os.environ['MPLBACKEND'])"
    )
    done = subprocess.run(
        forked("-c", script),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "MPLBACKEND": backend},
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [backend, str(kept)], "")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_users_settings_of_matplotlib_do_not_count(tmp_path, monkeypatch):
    """LaTeX, which may be missing, or other sizes, from a matplotlibrc in the current folder or at
    home."""
    import matplotlib

    plots.loss_curve(tmp_path / "a.png", [1, 2], [1.0, 0.5])
    for key, value in (("text.usetex", True), ("axes.titleweight", "bold"), ("lines.linewidth", 9)):
        monkeypatch.setitem(matplotlib.rcParams, key, value)
    plots.loss_curve(tmp_path / "b.png", [1, 2], [1.0, 0.5])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
