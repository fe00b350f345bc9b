"""The CPU engine's machinery: threads over the samples of a batch, and memory that stays in the process.

NumPy runs an elementwise operation on one core, and BLAS's own threads wait for each other by spinning, which on a busy
machine can cost a hundred times the product itself. So numdiff gives BLAS one thread and splits the batch instead: each
worker takes some of the samples through a whole operation, its arrays staying in the cache of its own core.
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

import numba
import threadpoolctl

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_HEAP_ARRAY = 32 << 20  # bytes; glibc's own upper limit for M_MMAP_THRESHOLD
MAX_WORKERS = 16
WORKER = "numdiff worker"  # how their threads' names begin
WORTH_SHARING = 1 << 16  # elements below which handing work to a thread costs more than it saves


_share = None  # cores that this process was told to use; None: all that it may use


def cores():
    """Numbers of the cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def share_cores(count):
    """Use `count` cores from now on: several ranks on one host must not each take all cores. None: all again."""
    global _share
    _share = count
    workers.cache_clear()
    if _pool.cache_info().currsize:
        _pool().shutdown()
        _pool.cache_clear()


@functools.cache
def workers():
    """How many threads share a batch: the cores this process may use, at most 16."""
    return max(1, min(_share or len(cores()), MAX_WORKERS))


@functools.cache
def _pool():
    return ThreadPoolExecutor(workers(), thread_name_prefix=WORKER)


def over_batch(function, count, elements):
    """Call `function(slice)` for contiguous parts of range(count), side by side; returns the results in order.

    elements: how many array elements the work touches in all; a little work is done in one call. The parts depend only
        on `count`, `elements` and the number of cores, so on one machine the bits repeat.
    """
    parts = min(workers(), count)
    if parts < 2 or elements < WORTH_SHARING or threading.current_thread().name.startswith(WORKER):
        return [function(slice(0, count))]  # a worker that waited for the others would wait for itself
    return list(_pool().map(function, shares(count, parts)))


@contextlib.contextmanager
def as_worker():
    """Within the context this thread shares nothing further, as one of `over_batch`: its work is a share already."""
    thread = threading.current_thread()
    name, thread.name = thread.name, WORKER
    try:
        yield
    finally:
        thread.name = name


def shares(count, parts):
    """Slices that cut range(count) into so many parts of nearly the same length."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def side_by_side(function, items):
    """Yields function(item) for each item, in order; some are computed in advance."""
    waiting = collections.deque()
    for item in items:
        waiting.append(_pool().submit(function, item))
        if len(waiting) > 2 * workers():
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def on_host(function):
    """Decorator: a loop over arrays, compiled for the host's cores by Numba, without Python's lock and kept on disk.

    For what NumPy does in many small steps: each of those goes through memory, and asks for the lock when it ends, for
    which threads that share a batch wait longer than the step takes.
    """
    try:
        return numba.njit(function, nogil=True, cache=True)
    except RuntimeError:  # there is no folder that may be written to
        return numba.njit(function, nogil=True)


@functools.cache
def prepare_cpu():
    """Set this process up for the CPU engine, once: one BLAS thread, and freed arrays kept for the next request.

    By default glibc maps each large array again, and the page faults of touching fresh pages cost more than many of the
    operations themselves; so it is asked to serve arrays up to 32 MiB from a heap that is never trimmed.
    """
    threadpoolctl.threadpool_limits(1, user_api="blas")
    if sys.platform.startswith("linux"):
        try:
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(M_MMAP_THRESHOLD, LARGEST_HEAP_ARRAY)
            libc.mallopt(M_TRIM_THRESHOLD, -1)
        except (OSError, AttributeError):  # another C library: only speed is lost
            pass
