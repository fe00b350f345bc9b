"""The bar that all long work shows on a terminal, in one line on stderr; without a terminal, a line
every 30 s.

    sampling  ██████████████▌               124/250 steps  41.2 ms/step  0:05 < 0:05
    sampling  124/250 steps  412 ms/step  ETA 0:52

What is being done, how far it has got, the time of one (or how many a second), the time so far <
the time left.

    with progress_bar(count, "evaluating", "image") as bar:
        …
        bar.update(len(images))
"""

import contextlib
import math
import os
import sys
import threading
import time

from tqdm import tqdm

LINE = "{desc}  {bar}  {tail}"
EVERY = 30  # seconds to the first line without a terminal, and from one to the next


def progress_bar(total, what, unit, initial=0, keep=False, shown=None):
    """A `ProgressBar` of `total` units (None: unknown), of which `initial` are already done.

    what: what is done, in a word; unit: in the singular
    keep: leave the bar in place at the end, instead of clearing it
    shown: True or False; None: where stderr is a terminal, and elsewhere `update` prints `Lines`
    """
    lines = None
    if shown is None:
        shown = bool(sys.stderr and sys.stderr.isatty()) and os.environ.get("TERM") != "dumb"
        lines = None if shown else Lines(total, what, unit, initial)
    bar = ProgressBar(
        total=total,
        desc=what,
        unit=unit,
        initial=initial,
        leave=keep,
        disable=not shown,
        dynamic_ncols=True,
        miniters=1,
        file=sys.stderr,
        bar_format=LINE,
    )
    bar.lines = lines
    return bar


def tracked(items, total, what, unit):
    """Yields the items of an iterable while a bar counts them."""
    with progress_bar(total, what, unit) as bar:
        for item in items:
            yield item
            bar.update()


class ProgressBar(tqdm):
    """tqdm's bar with numdiff's line. The loss of the terminal does not end the work.

    note: words before the speed; seconds: of a unit, where the caller knows better than the time
    between updates
    lines: the `Lines` that stand for the bar; a caller of `to` prints separate lines
    """

    note, seconds, lines, _widest = "", None, None, 0
    monitor_interval = 0  # no thread looks after it
    # tqdm's own is shared with processes: where those do not begin as forks (macOS, Python 3.14),
    # making it starts `python -c …`, which imports from the current folder
    _lock = threading.RLock()

    def update(self, n=1):
        if self.lines:
            self.lines.update(n)
        return super().update(n)

    def to(self, n, note="", seconds=None):
        """`n` units are done; note, seconds: as the attributes."""
        if not self.disable:
            self.n, self.note, self.seconds = n, note, seconds
            self.refresh()

    def message(self, text):
        """A line above the bar."""
        with contextlib.suppress(OSError):
            self.write(text, file=self.fp)

    @property
    def format_dict(self):
        values = super().format_dict
        elapsed, done = values["elapsed"], self.n - self.initial
        seconds = self.seconds or (
            1 / values["rate"] if values["rate"] else elapsed / done if done else math.nan
        )
        left = "" if self.total is None else f" < {duration((self.total - self.n) * seconds)}"
        tail = "  ".join(
            filter(
                None,
                [
                    count_of(self.n, self.total, self.unit),
                    self.note,
                    speed(seconds, self.unit),
                    duration(elapsed) + left,
                ],
            )
        )
        self._widest = max(self._widest, len(tail))  # so that the bar never shifts
        return {**values, "tail": tail.rjust(self._widest)}

    def display(self, *args, **kwargs):
        with contextlib.suppress(OSError):
            return super().display(*args, **kwargs)

    def close(self):
        with contextlib.suppress(OSError):
            super().close()


class Lines:
    """Plain lines on stderr, one every `EVERY` seconds while the work continues; arguments as of
    `progress_bar`."""

    def __init__(self, total, what, unit, initial=0):
        self.total, self.what, self.unit, self.initial, self.n = total, what, unit, initial, initial
        self._started = self._said = time.perf_counter()

    def update(self, n=1):
        """`n` more units are done."""
        self.n += n
        now = time.perf_counter()
        if now - self._said >= EVERY and (self.total is None or self.n < self.total) and sys.stderr:
            self._said = now
            with contextlib.suppress(OSError, ValueError):  # the reader is gone, or it is closed
                print(self.line(now - self._started), file=sys.stderr, flush=True)

    def line(self, elapsed):
        """The line after `elapsed` seconds."""
        seconds = elapsed / (self.n - self.initial)
        left = "" if self.total is None else f"ETA {duration((self.total - self.n) * seconds)}"
        return "  ".join(
            filter(
                None,
                [
                    self.what,
                    count_of(self.n, self.total, self.unit),
                    speed(seconds, self.unit),
                    left,
                ],
            )
        )


def count_of(done, total, unit):
    """124/250 steps, or 124 steps of an unknown number."""
    return f"{done:,}{'' if total is None else f'/{total:,}'} {unit}s"


def speed(seconds, unit):
    """How long a step takes, or how many of another unit are done in a second."""
    if not 0 < seconds < math.inf:
        return ""
    if unit != "step":
        return f"{three_digits(1 / seconds)} {unit}s/s"
    return (
        f"{three_digits(seconds * 1e3)} ms/step"
        if seconds < 10
        else f"{three_digits(seconds)} s/step"
    )


def three_digits(value):
    """12.3, 123, 1,234: a number above ten with about three digits."""
    return f"{value:,.{1 if value < 100 else 0}f}"


def duration(seconds):
    """A time span as 1:02:03, or 2:03 below an hour."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
