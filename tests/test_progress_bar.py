"""The bar in a terminal: a pty of a given width, and what comes out of it, frame by frame."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import unicodedata

import pytest

from numdiff import progress_bar as progress_bar_module
from numdiff.progress_bar import duration, progress_bar, speed, tracked
from numdiff.training.report import Reporter


class Terminal:
    """Context: a pty stands for stderr. Its `frames` are the texts written over each other in one
    line."""

    def __init__(self, columns=80):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.file = os.fdopen(slave, "w", encoding="utf-8")

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()  # pytest sets stderr itself after the fixtures
        self.patch.setattr(sys, "stderr", self.file)
        self.patch.setenv("TERM", "xterm")
        return self

    def __exit__(self, *_):
        self.patch.undo()
        with contextlib.suppress(OSError):
            self.file.close()
        if self.master is not None:
            os.close(self.master)

    def text(self):
        """All that was written so far."""
        self.file.write("END")
        self.file.flush()
        text = b""
        while not text.endswith(b"END"):
            text += os.read(self.master, 1 << 16)
        return text.decode()[: -len("END")]

    def frames(self):
        return [frame for frame in re.split(r"[\r\n]+", self.text()) if frame.strip()]

    def go_away(self):
        os.close(self.master)
        self.master = None


def width(text):
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def test_what_a_user_sees():
    with Terminal() as terminal, progress_bar(1200, "sampling", "step") as bar:
        for _ in range(3):
            bar.update(400)
            bar.refresh()
        frames = terminal.frames()
    assert re.fullmatch(
        r"sampling  [█▏▎▍▌▋▊▉ ]{20,}  +400/1,200 steps  [\d.,]+ ms/step  0:00 < 0:00", frames[1]
    )
    assert "1,200/1,200 steps" in frames[-1] and "█" * 20 in frames[-1]
    assert {width(frame) for frame in frames[1:]} == {width(frames[-1])} and width(frames[-1]) <= 80
    assert len({frame.index("steps") for frame in frames}) <= 2  # the numbers keep their place


def test_it_is_taken_away():
    """What is printed next stands where the bar was; training's stays."""
    for keep in (False, True):
        with Terminal() as terminal:
            progress_bar(3, "sampling", "step", 3, keep).close()
            assert terminal.text().endswith("\n" if keep else " \r")


def test_a_narrow_terminal():
    with Terminal(40) as terminal:
        for _ in tracked(range(5), 5, "importing", "image"):
            pass
        assert all(width(frame) <= 40 for frame in terminal.frames())


def test_a_bar_of_unknown_length():
    with Terminal() as terminal:
        assert list(tracked(iter("abc"), None, "importing", "image")) == list("abc")
        assert any(
            re.search(r"importing +\d images", frame) and "<" not in frame
            for frame in terminal.frames()
        )


def test_training(tmp_path, capsys):
    with Terminal() as terminal:
        with Reporter(tmp_path, steps=400, batch=16, flops_per_step=1e9) as reporter:
            reporter.report(100, 0.28, 1.0, 1e-3)
            with reporter.pause("drawing samples"):
                reporter.message("a line above the bar")
            reporter.report(200, 0.0917, 1.0, 1e-3, skipped=2, loss_scale=2.0**15)
        frames = terminal.frames()
    assert any(
        re.search(r"100/400 steps  loss 0\.2800  [\d.]+ ms/step  0:00 < 0:00$", frame)
        for frame in frames
    )
    assert "200/400 steps  loss 0.0917  2 skipped" in frames[-1] and width(frames[-1]) <= 80
    assert "a line above the bar" in frames and any(
        "100/400 steps  drawing samples" in frame for frame in frames
    )
    assert capsys.readouterr().out == ""


def test_no_terminal(monkeypatch, capsys):
    """No bar is shown in a file, without a stderr, or in a terminal that cannot go back to the
    start of a line."""
    for stderr in (sys.stderr, None):
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress_bar(3, "sampling", "step") as bar:
            bar.update()
            bar.to(3, "done")
    monkeypatch.undo()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "total, unit, lines",
    [
        (
            250,
            "step",
            [
                "at work  2/250 steps  20.0 s/step  ETA 1:22:40",
                "at work  4/250 steps  20.0 s/step  ETA 1:22:00",
            ],
        ),
        (
            5,
            "image",
            [
                "at work  2/5 images  0.1 images/s  ETA 1:00",
                "at work  4/5 images  0.1 images/s  ETA 0:20",
            ],
        ),
        (None, "image", ["at work  2 images  0.1 images/s", "at work  4 images  0.1 images/s"]),
    ],
)
def test_lines_where_there_is_no_terminal(monkeypatch, capsys, total, unit, lines):
    """Every 30 s, the first after 30 s; none where no bar is wanted, nor at the end."""
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress_bar_module.time, "perf_counter", lambda: next(clock))
    with progress_bar(total, "at work", unit) as bar:
        for _ in range(5):
            bar.update()
    with progress_bar(total, "at work", unit, shown=False) as bar:
        bar.update()
    output = capsys.readouterr()
    assert output.out == "" and output.err.splitlines() == lines


def test_a_dumb_terminal():
    with Terminal() as terminal:
        terminal.patch.setenv("TERM", "dumb")
        assert progress_bar(3, "sampling", "step").disable


def test_a_terminal_that_goes_away():
    """The work continues."""
    with Terminal() as terminal, progress_bar(3, "sampling", "step") as bar:
        bar.update()
        terminal.go_away()
        bar.to(2, "more")
        bar.message("and more")


def test_speed():
    assert [speed(s, "step") for s in (0.0412, 0.389, 12.5, float("nan"))] == [
        "41.2 ms/step",
        "389 ms/step",
        "12.5 s/step",
        "",
    ]
    assert speed(1 / 1234, "image") == "1,234 images/s" and speed(0, "image") == ""


def test_duration():
    assert [duration(s) for s in (0, 59.6, 3723, float("inf"))] == ["0:00", "1:00", "1:02:03", "?"]
