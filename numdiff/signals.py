"""Signals at moments at which nothing may be interrupted."""

import contextlib
import signal
import threading

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # those whose handlers may raise: Windows has no SIGHUP


@contextlib.contextmanager
def deferred_signals(names=NAMES):
    """Context: what Ctrl-C, SIGTERM and SIGHUP do, where Python handles them, they do at its end.

    For the start of MPI, and for HDF5 while it writes to a file object. A `KeyboardInterrupt` in a
    method of that object leaves HDF5 with a file that it can neither close nor drop, and the
    process ends with a segmentation fault.
    """
    came, old = [], {}
    if threading.current_thread() is threading.main_thread():  # Python handles signals in no other
        for number in (getattr(signal, name) for name in names if hasattr(signal, name)):
            if callable(signal.getsignal(number)):
                old[number] = signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            old[number](number, None)
