"""The CPU engine's machinery: threads over the samples of a batch, and memory that stays in the
process.

NumPy runs an elementwise operation on one core, and BLAS's own threads wait for each other by
spinning, which on a busy machine can cost a hundred times the product itself. So numdiff gives BLAS
one thread and splits the batch instead: each worker takes some of the samples through a whole
operation, its arrays staying in the cache of its own core.
"""

import collections
import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numba
import threadpoolctl

from .loop_cache import LoopCache
from .threads import ThreadStack

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_HEAP_ARRAY = 32 << 20  # bytes; glibc's own upper limit for M_MMAP_THRESHOLD
MAX_WORKERS = 16
WORKER = "numdiff worker"  # how their threads' names begin
LEAST_SHARE = 1 << 15  # elements: to hand over a smaller share costs more than it saves


# of the threads below: two threads that need them at the same time share them
_making = threading.Lock()
_orders = ThreadStack()  # of `one_after_another`
_share = None  # number of cores set for this process; None: all that it may use


def cores():
    """Numbers of the cores this process may use."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def share_cores(count):
    """Use `count` cores from now on: several ranks on one host must not each take all cores. None:
    all again."""
    global _share
    _share = count
    workers.cache_clear()
    if _crew.cache_info().currsize:
        _crew().dismiss()
        _crew.cache_clear()
    if _pool.cache_info().currsize:
        _pool().shutdown()
        _pool.cache_clear()


@functools.cache
def workers():
    """How many threads share a batch: the cores this process may use, at most 16."""
    return max(1, min(_share or len(cores()), MAX_WORKERS))


class Crew:
    """`count` threads that take shares of the calling thread's work, which does one itself.

    For work of some 100 µs: to hand over a share and take its result back costs half of what a
    future does.
    """

    def __init__(self, count):
        self._count, self._asked = count, SimpleQueue()
        for k in range(count):
            threading.Thread(target=self._serve, name=f"{WORKER} {k}", daemon=True).start()

    def run(self, function, shares):
        """[function(share) for share in shares], side by side; all have ended when it returns or
        raises."""
        answers = SimpleQueue()
        for asked in enumerate(shares[1:], 1):
            self._asked.put((answers, function, *asked))
        with as_worker():
            outcomes = {0: outcome_of(function, shares[0])}
        for _ in shares[1:]:
            place, outcome = answers.get()
            outcomes[place] = outcome
        for _, error in outcomes.values():
            if error is not None:
                raise error
        return [outcomes[place][0] for place in range(len(shares))]

    def dismiss(self):
        """Let the threads end, after what they were asked."""
        for _ in range(self._count):
            self._asked.put(None)

    def _serve(self):
        while self._answer(self._asked.get()):
            pass  # and keep nothing of it

    def _answer(self, asked):
        if asked:
            answers, function, place, share = asked
            answers.put((place, outcome_of(function, share)))
        return asked


def outcome_of(function, share):
    """(result, error), one of which is None."""
    try:
        return function(share), None
    except BaseException as error:
        return None, error


@functools.cache
def _crew():
    return Crew(workers() - 1)


@functools.cache
def _pool():
    return ThreadPoolExecutor(workers(), thread_name_prefix=WORKER)


def _without_threads():
    """A process that was forked has none of them."""
    _crew.cache_clear()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_without_threads)


def over_batch(function, count, elements):
    """Call `function(slice)` for contiguous parts of range(count), side by side; returns the
    results in order.

    elements: how many array elements the work touches in all; a little work has few parts, or is
        done in one call. The parts depend only on `count`, `elements` and the number of cores, so
        on one machine the bits repeat.
    """
    parts = min(workers(), count, elements // LEAST_SHARE)
    if parts < 2 or threading.current_thread().name.startswith(WORKER):
        # a worker that waited for the others would wait for itself
        return [function(slice(0, count))]
    with _making:
        crew = _crew()
    return crew.run(function, shares(count, parts))


@contextlib.contextmanager
def as_worker():
    """Within the context this thread shares nothing further, as one of `over_batch`: its work is a
    share already."""
    thread = threading.current_thread()
    name, thread.name = thread.name, WORKER
    try:
        yield
    finally:
        thread.name = name


def shares(count, parts):
    """Slices that divide range(count) into `parts` parts of nearly the same length."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@contextlib.contextmanager
def one_after_another():
    """Context: this thread's `side_by_side` computes each item when it is requested, for timing."""
    _orders.append(None)
    try:
        yield
    finally:
        _orders.pop()


def side_by_side(function, items):
    """Yields function(item) for each item, in order; some are computed in advance."""
    if _orders:
        yield from map(function, items)
        return
    waiting = collections.deque()
    for item in items:
        waiting.append(_pool().submit(function, item))
        if len(waiting) > 2 * workers():
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def on_host(function, reorders=False):
    """Decorator: a loop over arrays, compiled for the host's cores by Numba, without Python's lock
    and kept on disk.

    For many small NumPy operations in a row. Each of them goes through memory and takes the
    interpreter lock when it ends. Threads that share a batch wait for that lock longer than the
    operation takes. A division by zero gives what it does in NumPy: a loop that could raise an
    error would take one number at a time.
    reorders: a sum may be taken as several, which a core's vectors add up at once; on one machine
    always the same
    """
    options = {"nogil": True, "error_model": "numpy"} | (
        {"fastmath": {"reassoc"}} if reorders else {}
    )
    compiled = numba.njit(function, **options)
    compiled._cache = LoopCache(function)
    return compiled


@functools.cache
def prepare_cpu():
    """Set this process up for the CPU engine, once: one BLAS thread, and freed arrays kept for the
    next request.

    By default glibc maps each large array again, and the page faults of touching fresh pages cost
    more than many of the operations themselves. So glibc is set to serve arrays up to 32 MiB from a
    heap that is never trimmed.
    """
    threadpoolctl.threadpool_limits(1, user_api="blas")
    if sys.platform.startswith("linux"):
        try:
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(M_MMAP_THRESHOLD, LARGEST_HEAP_ARRAY)
            libc.mallopt(M_TRIM_THRESHOLD, -1)
        except (OSError, AttributeError):  # another C library: only speed is lost
            pass
