"""Compiles kernels in parallel, in separate processes, before they are needed one after another.

    compilation = CompileAhead(keys, cache)       begins; keys as a `Planned` device has noted them
    …                                             something else meanwhile
    compilation.finish(progress)                  waits until all are in the cache, or have failed

One process a core, as far as memory allows; the slowest kernels first, since the last to finish
decides. A kernel that fails to compile here is no error: it is compiled when it is launched, and
reports then what is wrong with it.
"""

import collections
import json
import os
import pathlib
import queue
import subprocess
import threading

from ..children import python_command
from .cpu import cores
from .forks import is_stopped
from .kernel_cache import remove_unfinished

MEMORY = 1 << 30  # bytes allowed for a process; it takes 0.6 GiB after all of numdiff's kernels
START = "from numdiff.device.compile_worker import main; main(*sys.argv[1:])"
ATTEMPTS = 2  # attempts at a kernel: a process may be killed for reasons of its own
# Seconds of the slowest on one core of 2024, by parts of their modules' names: all others take less
# than one
SLOW = {
    "conv2d.hopper": 5.0,
    "attention.backward": 4.5,
    "tf32.conv2d": 4.0,
    "attention.": 3.0,
    "sla.kernels": 3.0,
    "gate_adaln": 3.0,
    "groupnorm": 3.0,
    "hopper": 2.5,
    "conv2d": 2.0,
    "im2win": 2.0,
    "matmul": 2.0,
    "linear_group": 1.5,
}


def expected_seconds(key):
    """How long a kernel may take to compile, which decides the order."""
    return next((seconds for part, seconds in SLOW.items() if part in key.module), 0.3)


def available_memory():
    """Bytes that this machine, or the container's limit, still has; None if it is unknown."""
    found = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        found.append(int(fields["MemAvailable"].split()[0]) << 10)
    except (OSError, KeyError, ValueError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            found.append(int(pathlib.Path(limit).read_text()) - int(pathlib.Path(used).read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            pass
    return min(found, default=None)


def worker_count(kernels, available=None):
    """How many processes compile `kernels` kernels on these cores (numbers; default: this
    process's)."""
    memory = available_memory()
    most = (
        len(available or cores())
        if memory is None
        else min(len(available or cores()), memory // MEMORY)
    )
    return max(1, min(most, kernels))


class CompileAhead:
    """Starts compiling, in other processes, those of some kernels that a cache does not have.

    keys: of kernels (`Key`); cache: a `KernelCache`; workers: processes (default: by cores and
    memory)
    on: numbers of the cores for them (default: this process's); complain: called once if the cache
    cannot be written
    Attributes: wanted, the missing keys; faults, {key: why} of those that could not be compiled;
    workers.
    """

    def __init__(self, keys, cache, workers=None, on=None, complain=None):
        self.wanted = sorted(
            (key for key in dict.fromkeys(keys) if not cache.has(key)),
            key=expected_seconds,
            reverse=True,
        )
        self.faults, self._attempts = {}, collections.Counter()
        self._waiting, self._lock = collections.deque(self.wanted), threading.Lock()
        self._answers, self._processes, self._ended = queue.SimpleQueue(), set(), False
        self._stopped = set()  # processes, as of the last call of `_kill_stopped`
        # _barren: processes that were lost since the last answer of any
        self.workers = self._barren = 0
        if not self.wanted:
            return
        try:
            self._folder = cache.writable(complain)
        except OSError as error:  # nowhere at all
            self._waiting.clear()
            self.faults = dict.fromkeys(
                self.wanted, f"no folder for it can be written ({error.strerror})"
            )
            return
        self._command = python_command(
            START, self._folder, json.dumps(cache.capability), json.dumps(sorted(on or ()))
        )
        self.workers = workers or worker_count(len(self.wanted), on)
        for _ in range(self.workers):
            threading.Thread(target=self._drive, name="numdiff compiling", daemon=True).start()

    def finish(self, progress=lambda left: None, every=None):
        """Wait for all. progress(left): called with the number of kernels left, after each and
        every `every` seconds.

        A process that is stopped is killed, and its kernel compiled by another. An exception, such
        as Ctrl-C, ends the processes at once; nothing is left half-written.
        """
        left = len(self.wanted) - len(self.faults)
        try:
            while left:
                try:
                    key, fault = self._answers.get(timeout=every or 1.0)
                    left -= 1
                    if fault:
                        self.faults[key] = fault
                except queue.Empty:
                    self._kill_stopped()
                    if not every:
                        continue
                progress(left)
        finally:
            self.close()
        return self.faults

    def _kill_stopped(self):
        """Called every second or so: kill the processes that were stopped at two calls, which would
        never answer."""
        with self._lock:
            stopped = {process for process in self._processes if is_stopped(process.pid)}
        for process in stopped & self._stopped:
            process.kill()
        self._stopped = stopped

    def close(self):
        """End the processes, whatever they are doing."""
        with self._lock:
            self._ended = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            remove_unfinished(self._folder, process.pid)

    # In a separate thread for each process

    def _drive(self):
        process = None
        while (key := self._next()) is not None:
            answer = None
            try:
                process = process or self._start()
                process.stdin.write((json.dumps(key) + "\n").encode())
                process.stdin.flush()
                answer = process.stdout.readline()
                answer = json.loads(answer) if answer.endswith(b"\n") else None
            except (OSError, ValueError):  # ended, or never begun
                pass
            if answer is None:
                process = self._lost(process, key)
            else:
                self._barren = 0
                self._answers.put((key, answer.get("fault")))
        self._close(process)

    def _next(self):
        with self._lock:
            return self._waiting.popleft() if self._waiting and not self._ended else None

    def _start(self):
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is this one's to explain
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        with self._lock:
            self._processes.add(process)
            if self._ended:
                process.kill()
        return process

    def _lost(self, process, key):
        """A process ended before it answered: try again in a new one, whatever the reason."""
        code = process.wait() if process else "none could be started"
        how = (
            f"killed by signal {-code}" if isinstance(code, int) and code < 0 else f"ended: {code}"
        )
        with self._lock:
            self._attempts[key] += 1
            self._barren += 1
            given_up = [] if self._attempts[key] < ATTEMPTS else [key]
            if not given_up:
                self._waiting.appendleft(key)
            if self._barren > ATTEMPTS * (self.workers + 1):  # none ever answers, nor would others
                given_up += self._waiting
                self._waiting.clear()
        for each in given_up:
            self._answers.put((each, f"its process was {how}, {ATTEMPTS} times"))
        self._close(process)

    def _close(self, process):
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()  # the process ends with its input
            except OSError:
                pass
        process.wait()
        remove_unfinished(self._folder, process.pid)
        with self._lock:
            self._processes.discard(process)
