"""The loss curve of a run, and the style of every plot of the project.

    loss_curve("loss.png", steps, losses)
    with Plot("a.svg", "Title", "x", "y") as axes:
        …

A picture is PNG, SVG or PDF, by its path's suffix; like every file it is written whole or not at
all. matplotlib is used without pyplot, whose figures and settings are global: the style is set only
while a plot is drawn, one at a time. Importing it takes as long as the rest of numdiff; the first
plot does so, or `import_ahead` during other work.
"""

import contextlib
import functools
import json
import logging
import math
import os
import pathlib
import sys
import threading

import numpy as np

from .errors import NumdiffError, UsageError
from .files import atomic_file
from .signals import deferred_signals

SIZE, DPI = (9.6, 5.4), 100  # inches, pixels an inch: 960 × 540
# the program's
OTHERS_SETTINGS = (
    "backend",
    "interactive",
    "toolbar",
    "webagg",
    "tk.",
    "docstring",
    "figure.max_open",
)
ENDINGS = (".png", ".svg", ".pdf")
# of the loss curve, drawn again and again
MARGINS = {"left": 0.085, "right": 0.975, "bottom": 0.105, "top": 0.92}
INK, GREY, GRID = "#282c34", "#6e747e", "#e5e8ec"
COLOURS = (
    "#165ea6",
    "#d9622b",
    "#2c8c4d",
    "#8d5ab5",
    "#b8383d",
    "#7a6a4f",
    "#d277b4",
    "#4f9fbf",
    "#a09a1c",
    "#5f6b7a",
)
MARKERS = ("o", "s", "^", "D", "v", "P")
# same plot, same bytes
UNDATED = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
DRAWING = threading.RLock()
RAW = "#b0cce8"  # a light version of the first colour: values before smoothing
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "svg.fonttype": "none",
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "agg.path.chunksize": 10000,
}


# Pictures -----------------------------------------------------------------------------------------


def loss_curve(path, steps, losses, title="Training loss", log_y=True, smooth=None):
    """Losses over steps: every value in a light colour, their running mean over `smooth` steps
    (default: a fiftieth of all) in a strong one.

    steps, losses: (N,), N ≥ 0; values that are not finite are left out
    log_y: logarithmic axis (linear if there are losses of zero or less)
    """
    steps, losses = np.asarray(steps, np.float64), np.asarray(losses, np.float64)
    finite = np.isfinite(losses)
    steps, losses = steps[finite], losses[finite]
    log_y = log_y and losses.size > 0 and losses.min() > 0
    smooth = (smooth or len(losses) // 50) // 2 * 2 + 1  # odd: as many values before as after
    smoothed = running_mean(losses, smooth)
    with Plot(path, title, "step", "loss (log scale)" if log_y else "loss", MARGINS) as axes:
        if losses.size:
            last = f"last {min(50, len(losses))} steps: {losses[-50:].mean():.4g}"
            every = {"marker": "o", "markersize": 4} if len(losses) == 1 else {}
            if smooth > 1:
                axes.plot(*thin(steps, losses), color=RAW, linewidth=0.8, label="each step")
                every = {"label": f"mean over {smooth:,} steps"}
            axes.plot(*thin(steps, smoothed), color=COLOURS[0], linewidth=1.8, **every)
            axes.set_title(last, loc="right", fontsize=10, color=COLOURS[0])
            axes.set_ylim(*y_range(losses, smoothed, log_y))
            if smooth > 1:
                axes.legend(loc="upper right")
        if log_y:
            log_axis(axes, "y")
        axes.set_xlim(
            *((steps.min(), max(steps.max(), steps.min() + 1)) if losses.size else (0, 1))
        )
        whole_numbers(axes.xaxis)


def draw_bars(axes, values):
    """One horizontal bar a name, from the top down, each with its value. values: {name: number}"""
    names, numbers = list(values), [float(v) for v in values.values()]
    places = np.arange(len(names))[::-1]
    axes.barh(places, numbers, height=0.66, color=COLOURS[0])
    axes.set_yticks(places, names, color=INK)
    axes.grid(False, axis="y")
    for place, number in zip(places, numbers, strict=True):
        axes.annotate(
            f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}",
            (number, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    axes.set_xlim(0, 1.14 * max([*numbers, 1e-30]))


# The style ----------------------------------------------------------------------------------------


class Plot:
    """Context: the axes of a picture in the project's style, which is written to `path` if all goes
    well.

    x, y: names of the axes, with their units; height: inches
    panels: how many axes, one above the other; of several the words are the first's
    margins: dict of left, right, bottom, top, shares of the picture; None measures the labels,
        which takes as long as drawing them
    """

    def __init__(
        self, path, title="", x="", y="", margins=None, height=SIZE[1], panels=1, about=None
    ):
        self.path, self.words, self.height, self.margins = (
            check_ending(path),
            (title, x, y),
            height,
            margins,
        )
        self.panels = panels
        self.about = {} if about is None else {"numdiff": json.dumps(about)}

    def __enter__(self):
        library = matplotlib()
        with contextlib.ExitStack() as held:
            held.enter_context(DRAWING)
            held.enter_context(library.rc_context(library.defaults | STYLE))
            self.figure = library.Figure(
                figsize=(SIZE[0], self.height),
                dpi=DPI,
                facecolor="white",
                layout=None if self.margins else "constrained",
            )
            axes, *others = (
                self.figure.add_subplot(self.panels, 1, 1 + i) for i in range(self.panels)
            )
            if self.margins:
                self.figure.subplots_adjust(**self.margins)
            title, x, y = self.words
            axes.set_title(title)
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            self.held = held.pop_all()
        return (axes, *others) if others else axes

    def __exit__(self, kind, *error):
        with self.held:
            if kind is None:
                ending = pathlib.Path(self.path).suffix.lower()[1:]
                about = {**UNDATED[ending], **(self.about if ending == "png" else {})}
                with atomic_file(self.path, "the picture") as file, deferred_signals():
                    self.figure.savefig(file, format=ending, metadata=about)


def check_ending(path):
    """The path of a picture; a `UsageError` for one that no plot can be written to."""
    if pathlib.Path(path).suffix.lower() not in ENDINGS:
        raise UsageError(
            f"{path} must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]} to be a plot."
        )
    return path


class NoPlotsError(NumdiffError):
    """matplotlib is missing or broken."""


@contextlib.contextmanager
def without_backend():
    """Context: import matplotlib without MPLBACKEND, which may name a missing backend (a notebook's
    `!numdiff` inherits one). The variable is restored afterwards: nothing here draws to a screen,
    but others in the process may."""
    named = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
    try:
        yield
        if named:
            with contextlib.suppress(ValueError):
                sys.modules["matplotlib"].rcParams["backend"] = named
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named


class _Matplotlib:
    """The parts of matplotlib that are used here."""

    def __init__(self):
        try:
            # a font cache that it cannot write is no news
            logging.getLogger("matplotlib").setLevel(logging.ERROR)
            # interrupted, it says something else, or crashes the process
            with deferred_signals(), without_backend():
                from matplotlib import rc_context, rcParamsDefault
                from matplotlib.backends import backend_agg  # noqa: F401  savefig would import it
                from matplotlib.figure import Figure
                from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
        except ImportError as error:
            raise NoPlotsError(
                f"plots need matplotlib, which cannot be imported ({error}); pip install "
                "matplotlib."
            ) from error
        except UnicodeDecodeError as error:
            raise NoPlotsError(
                f"matplotlib cannot read its settings ({error}): look for a file matplotlibrc in the "
                "current folder or in ~/.config/matplotlib."
            ) from error
        self.rc_context, self.Figure = rc_context, Figure
        # not those of a matplotlibrc, such as LaTeX for all words
        self.defaults = {
            key: value
            for key, value in rcParamsDefault.items()
            if not key.startswith(OTHERS_SETTINGS)
        }
        self.FixedLocator, self.FuncFormatter = FixedLocator, FuncFormatter
        self.MaxNLocator, self.NullLocator = MaxNLocator, NullLocator


matplotlib = functools.cache(_Matplotlib)


def import_ahead():
    """Start importing matplotlib during work that waits for a device; the first plot reports any
    failure.

    A process that ends meanwhile waits for it: half imported, its C++ parts free Python's objects
    after Python's end.
    """

    def work():
        with contextlib.suppress(NumdiffError):
            matplotlib()

    if "matplotlib.figure" not in sys.modules:
        threading.Thread(target=work, name="numdiff plots").start()


def looks():
    """(colour, marker) of the first, second, … series; the first sixty are all different."""
    return (
        (COLOURS[i % len(COLOURS)], MARKERS[i // len(COLOURS) % len(MARKERS)]) for i in range(10000)
    )


# Axes ---------------------------------------------------------------------------------------------


def log_axis(axes, way):
    """Make the axis "x" or "y" logarithmic within its current limits, with ticks at round numbers
    written out."""
    axis, limits = (axes.xaxis, axes.get_xlim()) if way == "x" else (axes.yaxis, axes.get_ylim())
    (axes.set_xscale if way == "x" else axes.set_yscale)("log")
    (axes.set_xlim if way == "x" else axes.set_ylim)(*limits)
    ticks = log_ticks(*axis.get_view_interval())
    axis.set_major_locator(
        matplotlib().FixedLocator(ticks) if ticks else matplotlib().MaxNLocator(6)
    )
    axis.set_minor_locator(matplotlib().NullLocator())
    axis.set_major_formatter(matplotlib().FuncFormatter(lambda value, _: f"{value:,.6g}"))


def log_ticks(low, high):
    """Round numbers from low to high: powers of ten (only some, if there are very many), else 1, 2,
    5 or all digits of each; [] for a range without four of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    apart = max(1, (last - first) // 10)
    for digits in ((1,), (1, 2, 5), range(1, 10)):
        ticks = [
            d * 10.0**e
            for e in range(first, last + 1, apart)
            for d in digits
            if low <= d * 10.0**e <= high
        ]
        if len(ticks) >= 4:
            return ticks
    return []


def whole_numbers(axis):
    """Ticks of a linear axis at whole numbers, with thousands separators."""
    axis.set_major_locator(matplotlib().MaxNLocator(8, integer=True))
    axis.set_major_formatter(matplotlib().FuncFormatter(lambda value, _: f"{value:,.0f}"))


def y_range(losses, smoothed, log_y):
    """(lowest, highest) of the axis of losses."""
    low, high = float(losses.min()), float(losses.max())
    if log_y:
        return low / 1.15, high * 1.15
    # a few wild values must not flatten the curve: the axis ends above nearly all of them, and the
    # line is cut off there
    high = max(float(np.quantile(losses, 0.998)), float(smoothed.max()))
    low = min(0.0, low) if low < 0.25 * high else low
    room = 0.05 * (high - low) or 0.5
    return low - room * (low != 0), high + room


# Values -------------------------------------------------------------------------------------------


def running_mean(values, width):
    """Mean over the `width` values around each, or over fewer near the ends."""
    at = np.arange(len(values))
    start, stop = np.maximum(at - width // 2, 0), np.minimum(at + width // 2 + 1, len(values))
    total = np.concatenate([[0.0], np.cumsum(values)])
    return (total[stop] - total[start]) / (stop - start)


def thin(x, y, columns=int(SIZE[0] * DPI)):
    """At most two points a column: its smallest and largest value, in their order, so that a
    million draw as one."""
    if len(x) <= 2 * columns:
        return x, y
    width = len(x) // columns
    whole = y[: len(y) // width * width].reshape(-1, width)
    kept = (np.arange(len(whole)) * width)[:, None] + np.stack(
        [whole.argmin(1), whole.argmax(1)], 1
    )
    kept = np.unique(np.concatenate([kept.ravel(), np.arange(whole.size, len(x))]))
    return x[kept], y[kept]
