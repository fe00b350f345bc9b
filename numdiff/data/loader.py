"""Batches for training: which images are in step s; read ahead by a thread.

THE ORDER
    The images of an epoch form a sequence, epochs follow each other without a gap, and step s takes
    places [s·batch, (s+1)·batch) of that endless sequence. So every batch is full, and what a step
    sees depends on (seed, step) only: a run resumes from one integer, in the middle of an epoch,
    and N ranks see what one rank would.

    Within an epoch the order is chunk-aligned and quasi-random: the chunks of 64 images are put in
    random order, and the images are shuffled within windows of many chunks. A set of less than 256
    MB is one window, so the shuffle is perfect; of a larger one every chunk is read from disk only
    once per epoch.

WHAT IT DOES NOT DO
    flip and normalise: kernels do both on the device (kernels/diffusion/images.py), so a batch
    travels as uint8.
"""

import atexit
import functools
import queue
import threading

import numpy as np

from ..errors import UsageError
from .chunks import CHUNK

POLL = 0.1  # seconds after which a waiting thread looks whether it should stop


def epoch_order(length, seed, epoch, window, chunk=CHUNK):
    """(rows int64 (length,) in the order of this epoch, chunks in the order in which they are
    needed).

    Philox's raw words, sorted, are the permutation: unlike `Generator.shuffle` they never change
    with NumPy's version.
    """
    bits = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64))
    chunks = np.argsort(bits.random_raw(-(-length // chunk)), kind="stable")
    place = np.empty_like(chunks)
    place[chunks] = np.arange(len(chunks))
    window_of_row = place[np.arange(length) // chunk] // window
    return np.lexsort((bits.random_raw(length), window_of_row)), chunks


class Loader:
    """Iterator over host batches (images (b, H, W, C) of the dataset's dtype, labels int32 (b,) or
    None) for each step.

    batch: images of a step over all ranks; rank r of `ranks` gets rows [r·b, (r+1)·b) of it, b =
    batch / ranks.
    start_step: the step of the first batch. prefetch: batches made ahead by a thread; 0 makes them
    on demand.
    backend: a device with a method `pinned(shape, dtype)`: batches are then in page-locked buffers,
        used in turn, and the arrays of step s are overwritten when step s + 2 is requested. Without
        it every batch is a new array.
    """

    def __init__(
        self, dataset, batch, seed, start_step=0, rank=0, ranks=1, prefetch=2, backend=None
    ):
        if batch < 1 or batch % ranks:
            raise UsageError(
                f"a batch of {batch} images cannot be shared evenly by {ranks} ranks: "
                f"use a multiple of {ranks}."
            )
        self.dataset, self.batch, self.seed = dataset, batch, seed
        self.rows_per_rank, self.rank = batch // ranks, rank
        self.step = start_step  # of the batch that `next` gives
        self._order = functools.lru_cache(maxsize=3)(self._make_order)
        pinned = getattr(backend, "pinned", None)
        self._free = None
        # those in the queue, the one being filled, and the two that the caller may still use
        if pinned:
            self._free = queue.Queue()
            for _ in range(prefetch + 3):
                self._free.put(
                    (
                        pinned(
                            (self.rows_per_rank, *dataset.shape[1:]),
                            getattr(dataset, "dtype", np.uint8),
                        ),
                        None if dataset.labels is None else pinned((self.rows_per_rank,), np.int32),
                    )
                )
        self._handed_out = []
        self._stop = threading.Event()
        self._error = None
        self._thread = None
        if prefetch:
            self._ready = queue.Queue(prefetch)
            self._thread = threading.Thread(target=self._produce, args=(start_step,), daemon=True)
            self._thread.start()
            # for a script that exits without closing: the thread would fill freed memory
            atexit.register(self.close)

    def __iter__(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __next__(self):
        """The batch of the next step; an error of the reading thread is raised here."""
        if self._error:
            raise self._error
        if self._stop.is_set():
            raise StopIteration
        if len(self._handed_out) == 2:
            self._free.put(self._handed_out.pop(0))
        result = self._take() if self._thread else self._fill(self.step, self._buffers())
        if isinstance(result, BaseException):
            self._error = result
            self.close()
            raise result
        if self._free is not None:
            self._handed_out.append(result)
        self.step += 1
        return result

    def close(self):
        """Stop the thread and wait for its end; the loader gives no more batches."""
        self._stop.set()
        if self._thread:
            # which may collect garbage, such as this loader's owner
            if self._thread is not threading.current_thread():
                self._thread.join()
            atexit.unregister(self.close)

    def rows(self, step):
        """Rows of the dataset that this rank gets in a step."""
        first = step * self.batch + self.rank * self.rows_per_rank
        places = np.arange(first, first + self.rows_per_rank)
        epochs, places = places // len(self.dataset), places % len(self.dataset)
        return np.concatenate(
            [self._order(int(e))[0][places[epochs == e]] for e in np.unique(epochs)]
        )

    def epoch(self, step):
        """How many times the dataset has been seen when `step` begins, as a fraction."""
        return step * self.batch / len(self.dataset)

    def read(self, step):
        """The batch of any step, as new arrays, whatever was read before."""
        return self._fill(step, None)

    def _make_order(self, epoch):
        return epoch_order(len(self.dataset), self.seed, epoch, self.dataset.window)

    def _fill(self, step, buffers):
        rows = self.rows(step)
        if buffers is None:
            labels = None if self.dataset.labels is None else self.dataset.labels[rows]
            return self.dataset.read(rows), labels
        images, labels = buffers
        self.dataset.read(rows, out=images)
        if labels is not None:
            np.take(self.dataset.labels, rows, out=labels, mode="clip")
        return images, labels

    def _take(self):
        while not self._stop.is_set():
            try:
                return self._ready.get(timeout=POLL)
            except queue.Empty:
                pass
        raise StopIteration

    def _buffers(self):
        """Buffers to fill next, or None for new arrays; waits until the caller is done with the
        oldest."""
        while self._free is not None and not self._stop.is_set():
            try:
                return self._free.get(timeout=POLL)
            except queue.Empty:
                pass
        return None

    def _produce(self, step):
        """The thread: batch after batch into the queue; an error goes the same way."""
        while not self._stop.is_set():
            try:
                buffers = self._buffers()
                if self._stop.is_set():
                    return
                result = self._fill(step, buffers)
                self._read_ahead(step)
            except BaseException as error:  # pass every error on to the caller
                result = error
            while not self._stop.is_set():
                try:
                    self._ready.put(result, timeout=POLL)
                    break
                except queue.Full:
                    pass
            if isinstance(result, BaseException):
                return
            step += 1

    def _read_ahead(self, step):
        """Begin to read the next window's chunks one by one while this window is in use, instead of
        all at once. The dataset's threads read them while this one fills batches."""
        if self.dataset.in_memory:
            return
        chunks = -(-len(self.dataset) // CHUNK)
        for place in range(step * self.batch // CHUNK, (step + 1) * self.batch // CHUNK):
            epoch, place = divmod(place + self.dataset.window, chunks)
            self.dataset.prefetch(int(self._order(epoch)[1][place]))
