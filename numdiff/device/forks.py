"""Processes beside this one for functions that are many small NumPy operations, as a model's evaluation is.

Threads hand Python's lock to each other at every operation. On two cores of an EPYC the UNet of the preset `tiny` takes
0.16 s for 12 images in one thread, 0.27 s for 12 in each of two threads, and 0.16 s for 12 in each of two processes.

A process that is forked has all of this one's memory without a copy, so it needs to be given nothing but the arguments,
and it is of use for as long as what the function reads, the weights, stays as it is.
"""
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings

from .cpu import WORKER, as_worker
from .gpu import is_open

_open = set()  # this process's ends of the connections to all that it has forked, by whichever `Forks`


def can_fork():
    """Whether a fork is safe: on Linux, in a process that has set up neither a GPU nor MPI, whose drivers forbid it,
    and in which no other thread is at work: a lock that it held would never be given back in the copy."""
    return (sys.platform == "linux" and "mpi4py.MPI" not in sys.modules and not is_open()
            and all(thread is threading.current_thread() or sleeps(thread) for thread in threading.enumerate()))


def sleeps(thread):
    return thread.name.startswith(WORKER) or type(thread).__name__ == "TMonitor"  # tqdm's


class Forks:
    """`count` processes that call `function` as it is now; `close` ends them, and so does the end of this process."""

    def __init__(self, function, count):
        self.function, self.processes = function, []
        for _ in range(count):
            ours, theirs = multiprocessing.Pipe()
            with warnings.catch_warnings():  # of threads, which a fork has not: none of theirs is waited for there
                warnings.simplefilter("ignore", DeprecationWarning)
                try:
                    process = os.fork()
                except OSError:  # no more processes, or no memory: this one does what is left
                    break
            if not process:
                try:
                    for connection in _open:  # else it would keep others from seeing that they are let go
                        connection.close()
                    ours.close()
                    _answer(theirs, function)
                finally:
                    os._exit(0)
            theirs.close()
            self.processes.append((ours, process))
            _open.add(ours)

    def __len__(self):
        return len(self.processes)

    def results(self, shares):
        """[function(*share) for share in shares]: the first here, each other in a process. What a process cannot do,
        because it was killed or the function failed in it, is done here."""
        asked = [_sent(connection, share) for (connection, _), share in zip(self.processes, shares[1:], strict=False)]
        with as_worker():  # the other cores have the other shares
            found = [self.function(*shares[0])]
        for k, share in enumerate(shares[1:]):
            answer = None
            if k < len(asked) and asked[k]:
                with contextlib.suppress(EOFError, OSError):
                    answer = self.processes[k][0].recv()
            found.append(self.function(*share) if answer is None else answer)
        return found

    def close(self):
        for connection, process in self.processes:
            connection.close()
            _open.discard(connection)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        self.processes = []


def _sent(connection, share):
    try:
        connection.send(share)
    except OSError:  # its process is gone
        return False
    return True


def _answer(connection, function):
    """The life of a forked process."""
    gc.freeze()  # what was there belongs to the other process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all: the other process decides
        signal.signal(number, signal.SIG_IGN)
    with as_worker():
        while True:
            try:
                share = connection.recv()
            except (EOFError, OSError):
                return
            try:
                answer = function(*share)
            except BaseException:
                answer = None
            connection.send(answer)
