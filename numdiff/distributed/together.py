"""Work that several ranks share and that may be stopped at any moment: making samples."""

import contextlib
import math
import signal
import time

from ..progress import tick

# what ranks tell each other at each evaluation, until all are done or one leaves
DONE, WORKING, LEAVE = 0, 1, 2
# seconds in which a Ctrl-C counts once: MPICH's mpiexec sends it to each rank and to its process
# group
ONCE = 0.5


class Interrupted(Exception):
    """A rank was asked to stop."""


def make_together(communicator, make, asked=lambda: 0):
    """([every rank's make(look)], number): number is what `asked()` gave on one of them, or 0 when
    all the work is done.

    make: calls `look()` at least every second or so, which interrupts it if a rank was asked to
        stop; its result is then None. An error on one rank is raised on all. Collective.
    """

    def look(_=None):
        tick()
        if communicator.largest(LEAVE if asked() else WORKING) == LEAVE:
            raise Interrupted

    def make_and_wait():
        """Ranks have different amounts of work: one that is done keeps answering the others."""
        try:
            part = make(look)
            while communicator.largest(LEAVE if asked() else DONE) == WORKING:
                pass
            return part
        except Interrupted:
            return None
        except Exception:
            communicator.largest(LEAVE)  # the others then come to where this error is shared
            raise

    parts = communicator.everywhere(make_and_wait)
    return parts, communicator.largest(asked())


@contextlib.contextmanager
def stop_signals():
    """Within the context, Ctrl-C, SIGTERM and SIGHUP only set `.number` of what this yields; a
    second Ctrl-C interrupts. The other signals may arrive twice, from a launcher or a closing
    terminal, and must not interrupt the saving. SIGHUP is left alone where `nohup` has turned it
    off."""

    class StopRequest:
        number = None
        time = -math.inf

    old = {}

    def ask(number, frame):
        if (
            StopRequest.number is not None
            and number == signal.SIGINT
            and time.monotonic() - StopRequest.time > ONCE
        ):
            raise KeyboardInterrupt
        if StopRequest.number is None:
            StopRequest.number, StopRequest.time = number, time.monotonic()

    hangup = getattr(signal, "SIGHUP", None)
    # signals belong to the main thread; elsewhere there is nothing to catch
    with contextlib.suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM, hangup):
            if number is not None and not (
                number == hangup and signal.getsignal(number) == signal.SIG_IGN
            ):
                old[number] = signal.signal(number, ask)
    try:
        yield StopRequest
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def one_interrupt():
    """Within the context, a Ctrl-C that comes twice within ONCE seconds interrupts once, so that
    what the first one ends is not interrupted itself."""

    def interrupt(number, frame):
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > ONCE:
            raise KeyboardInterrupt

    last, old = -math.inf, signal.getsignal(signal.SIGINT)
    try:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, interrupt)
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, old)
