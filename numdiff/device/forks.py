"""Worker processes for functions that are many small NumPy operations, such as a model's
evaluation.

Threads hand Python's lock to each other at every operation. On two cores of an EPYC the UNet of the
preset `tiny` takes 0.16 s for 12 images in one thread, 0.27 s for 12 in each of two threads, and
0.16 s for 12 in each of two processes.

A forked process shares all of this one's memory without a copy, so it needs only the arguments. It
is useful as long as the data that the function reads, the weights, stays unchanged.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
import warnings

from .cpu import WORKER, as_worker
from .gpu import is_open

STOPPED = 2.0  # seconds that a process may be stopped, as by kill -STOP, before it is given up
# seconds, and times the time of the share here, that another share may take longer
PATIENCE, TIMES = 30.0, 10
TRANSFER = 5  # seconds for which an argument or a result may stay where it is

# this process's ends of the connections to all that it has forked, by whichever `Forks`
_open = set()


def can_fork():
    """Whether a fork is safe: on Linux, without a GPU or MPI, whose drivers forbid it, and without
    another working thread. A lock that such a thread held would never be released in the copy."""
    return (
        sys.platform == "linux"
        and "mpi4py.MPI" not in sys.modules
        and not is_open()
        and all(
            thread is threading.current_thread() or sleeps(thread)
            for thread in threading.enumerate()
        )
    )


def sleeps(thread):
    # tqdm's, of another program's bars
    return thread.name.startswith(WORKER) or type(thread).__name__ == "TMonitor"


class Forks:
    """`count` processes that call `function` as it is now; `close` ends them, and so does the end
    of this process."""

    def __init__(self, function, count):
        self.function, self.processes = function, []
        for _ in range(count):
            ours, theirs = multiprocessing.Pipe()
            # of threads, which a fork has not: none of theirs is waited for there
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                try:
                    process = os.fork()
                except OSError:  # no more processes, or no memory: this one does what is left
                    break
            if not process:
                try:
                    # else it would keep others from seeing that they are let go
                    for connection in _open:
                        connection.close()
                    ours.close()
                    _answer(theirs, function)
                finally:
                    os._exit(0)
            theirs.close()
            limit_transfers(ours)
            self.processes.append((ours, process))
            _open.add(ours)

    def __len__(self):
        return len(self.processes)

    def results(self, shares):
        """[function(*share) for share in shares]: the first here, each other in a process. What a
        process cannot do, because it was killed or stopped or the function failed in it, is done
        here."""
        asked = [
            self._send(*process, share)
            for process, share in zip(self.processes, shares[1:], strict=False)
        ]
        started = time.monotonic()
        with as_worker():  # the other cores have the other shares
            found = [self.function(*shares[0])]
        limit = time.monotonic() + PATIENCE + TIMES * (time.monotonic() - started)
        for k, share in enumerate(shares[1:]):
            answer = (
                self._answer_of(*self.processes[k], limit) if k < len(asked) and asked[k] else None
            )
            found.append(self.function(*share) if answer is None else answer)
        return found

    def _send(self, connection, process, share):
        """Whether the process has received a share; one that does not is killed."""
        try:
            connection.send(share)
        except OSError:  # it is gone, or stopped
            kill(process)
            return False
        return True

    def _answer_of(self, connection, process, limit):
        """A process's result; None if it is gone, or was stopped or stuck and is killed."""
        stopped_since = None
        try:
            while not connection.poll(0.2):
                now = time.monotonic()
                stopped_since = (stopped_since or now) if is_stopped(process) else None
                if now > limit or stopped_since and now - stopped_since > STOPPED:
                    raise TimeoutError
            return connection.recv()
        except (EOFError, OSError):
            kill(process)
            return None

    def close(self):
        for connection, process in self.processes:
            connection.close()
            _open.discard(connection)
            kill(process)  # it has nothing to save, and may be stopped
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        self.processes = []


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def is_stopped(process):
    """Whether a signal or a debugger has stopped a process."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    return False


def limit_transfers(connection):
    """Let sending and receiving fail where nothing has moved for TRANSFER seconds, as a stopped
    process moves nothing.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", TRANSFER, 0))


def _answer(connection, function):
    """The life of a forked process."""
    gc.freeze()  # what was there belongs to the other process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # a terminal sends them to all: the other process decides
    for number in (signal.SIGINT, signal.SIGHUP):
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
