"""The chunks of a dataset on disk that were read last, or are about to be needed; read by threads.

    cache = ChunkCache(slots, (N, H, W, C), dtype, load)       load(index, out) fills `out` with chunk `index`
    cache.prefetch(12)                                         begins to read it, and returns
    cache.read(rows, out)                                      waits for the chunks that these rows need

Threads suffice: reading, unpacking (zlib) and copying by NumPy all happen outside Python's lock.
The chunks are in one array whose places are used again: memory that is new for every chunk would
cost as much as reading it, as the system clears it first.
"""

import contextlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

# images that are stored, read and cached together: about a megabyte at 64×64, a good size for one
# disk read
CHUNK = 64
MAX_THREADS = 8


def threads():
    """How many threads read: one for each core of this process, but two at least, as a disk likes
    two requests."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(2, min(MAX_THREADS, cores))


@contextlib.contextmanager
def in_threads(function):
    """Context: a function that calls `function` in a thread and returns a `Future` at once; calls
    that have not begun when the block ends are cancelled."""
    pool = ThreadPoolExecutor(threads(), "numdiff-data")
    try:
        yield lambda *arguments: pool.submit(function, *arguments)
    finally:
        pool.shutdown(cancel_futures=True)


class ChunkCache:
    """As many chunks of 64 images as there are `slots`; the one unused for longest makes way. Safe
    in threads."""

    def __init__(self, slots, shape, dtype, load):
        self._length, self._load = shape[0], load
        self._slots = min(slots, -(-shape[0] // CHUNK))
        self._images = np.empty((self._slots * CHUNK, *shape[1:]), dtype)
        self._free = list(range(self._slots))
        # chunk: (slot, Future of its loading or, once it is there, None); last used last
        self._held = OrderedDict()
        self._lock, self._closed = threading.Lock(), False
        self._pool = ThreadPoolExecutor(threads(), "numdiff-data")

    def read(self, rows, out):
        """Images of the rows int64 (n,), written to `out` (n, H, W, C), which is returned. An error
        of `load` is raised here; the chunk is tried again at its next use."""
        chunks = rows // CHUNK
        needed = np.unique(chunks)
        with self._lock:
            for first in range(0, len(needed), self._slots):  # more chunks than places: in portions
                part = needed[first : first + self._slots]
                places = self._places(part.tolist())[
                    np.searchsorted(part, chunks).clip(max=len(part) - 1)
                ]
                if len(part) == len(needed):  # "raise" would write to a copy of `out`
                    return np.take(
                        self._images, places * CHUNK + rows % CHUNK, axis=0, out=out, mode="clip"
                    )
                chosen = np.isin(chunks, part)
                out[chosen] = self._images[(places * CHUNK + rows % CHUNK)[chosen]]
        return out

    def prefetch(self, index):
        """Begin to read a chunk; an error is raised when it is needed."""
        with self._lock:
            if not self._closed:
                self._begin(index)

    def close(self):
        """End the threads; what they have begun they finish."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(cancel_futures=True)

    def _places(self, chunks):
        """The slots (n,) of chunks, at most as many as there are slots, once they are all read."""
        for index in chunks:
            if index in self._held:
                self._held.move_to_end(index)  # all of them, before the first evicts another one
        futures = [self._begin(index) for index in chunks]
        errors = [error for error in (future and future.exception() for future in futures) if error]
        if errors:
            for index, future in zip(chunks, futures, strict=True):
                if future and future.exception():
                    self._free.append(self._held.pop(index)[0])
            raise errors[0]
        places = [self._held[index][0] for index in chunks]
        for index, slot, future in zip(chunks, places, futures, strict=True):
            if future:
                self._held[index] = slot, None
        return np.array(places)

    def _begin(self, index):
        """The `Future` of a chunk, which is read now unless it is in flight; None if it is there."""
        if index in self._held:
            self._held.move_to_end(index)
            return self._held[index][1]
        if self._free:
            slot = self._free.pop()
        else:
            slot, before = self._held.popitem(last=False)[1]
            if before:
                before.exception()  # waits: the slot must not be written any more
        start = slot * CHUNK
        out = self._images[start : start + min(CHUNK, self._length - index * CHUNK)]
        self._held[index] = slot, self._pool.submit(self._load, index, out)
        return self._held[index][1]
