"""What this process is doing, for the other ranks of its job, which may have to wait for it
(distributed/watchdog.py).

    tick()                      work continues: a chunk was read, a part of a file written, the model evaluated
    with compiling():           kernels are compiled, which may take minutes
    with waiting():             this process only waits for the other ranks
    with doing("drawing"):      in words, for a message; or for good: progress.doing = "after step 12"
    progress.resume = "numdiff train …"     by which command its work continues, should it end

The main thread writes, the watchdog's thread reads; each value is one assignment, so no lock is
needed.
"""

import contextlib
import time


class Progress:
    """Attributes: waits, how many waits for all the ranks have begun; waiting, whether the last one
    is still in progress; ticks; compiling, how deep in `compiling()`; compiled, seconds that it has
    taken; doing, in words; resume, the
    command by which the work continues after a failure, None if it has to be started again; trains,
    whether the command has the options of training."""

    def __init__(self):
        self.waits = self.ticks = self.compiling = 0
        self.compiled = 0.0
        self.waiting, self.doing = False, "at the start"
        self.resume, self.trains = None, False

    def ends(self, repeats=False):
        """The end of a last message; repeats: the transport between the ranks may be at fault."""
        if not self.resume:
            return "so the job ends; start it again."
        other = (
            ", on GPUs with another --transport if this repeats," if repeats and self.trains else ""
        )
        return f"so the job ends; continue from its last checkpoint{other} with: {self.resume}"

    @property
    def if_slow(self):
        """What to do where a rank was only slow."""
        return "; raise --rank-timeout if it was only slow" if self.trains else ""


progress = Progress()


def tick():
    """Say that work continues."""
    progress.ticks += 1


@contextlib.contextmanager
def compiling():
    """Context: kernels are compiled."""
    progress.compiling += 1
    began = time.perf_counter()
    try:
        yield
    finally:
        progress.compiling -= 1
        if not progress.compiling:
            progress.compiled += time.perf_counter() - began
        tick()


@contextlib.contextmanager
def doing(text):
    """Context: some work, in words."""
    before, progress.doing = progress.doing, text
    try:
        yield
    finally:
        progress.doing = before


@contextlib.contextmanager
def waiting():
    """Context: a wait for all the other ranks; all begin the same waits in the same order."""
    progress.waits += 1
    progress.waiting = True
    try:
        yield
    finally:
        progress.waiting = False
