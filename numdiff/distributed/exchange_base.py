"""The common base of exchanges: the exchange of one rank, the data sent with the gradients, and the
trial of a transport.

exchange.py describes the interface and the transports.
"""

import contextlib
import os
import time

import numpy as np

from ..device import copy_into, download, fill_zero, with_dtype, zeros
from ..errors import NumdiffError
from ..progress import waiting

EAGER = 1e-3  # seconds for which a waiting CPU rank only yields its core, before it begins to sleep
NAP = 2e-4  # seconds of such a sleep


class NoExchange:
    """For a single process: the sum over one rank is already there."""

    name, why, largest, weight_parts = "none", "", None, None
    trial_rounds = 1  # sums in its trial

    def watch(self):
        return contextlib.nullcontext()

    def finish(self, loss):
        pass

    def check(self, status=None):
        pass

    def gather_partials(self):
        pass

    def gather_weights(self):
        pass

    def gather_mixed(self, mixed):
        mixed.pack()
        self._gather_packed(mixed)
        mixed.unpack()

    def _gather_packed(self, mixed):
        pass

    def suffices(self, seconds):
        """Whether no other transport can be faster than a sum in this time."""
        return False

    def abandon(self):
        """Its trial has failed: from now on nothing is asked of it."""

    def close(self):
        pass


class Mail:
    """What ranks reduce in addition to their gradients: the loss, whose own array may move, and of
    a model in FP8 the largest magnitudes of its tensors in this step
    (extras/fp8/quantise.py). Those have a column for each rank, so that a sum, in whatever
    order, brings every rank's to all.

    Attributes numbers: float32 (1 + tensors · ranks,)
    """

    def __init__(self, parameters, rank, ranks, like=None):
        self.float8, self.rank, self.ranks = getattr(parameters, "float8", None), rank, ranks
        tensors = len(self.float8.scale) if self.float8 else 0
        self.numbers = zeros(1 + tensors * ranks, np.float32, like)

    def write(self, loss):
        copy_into(self.numbers[:1], loss)
        if self.float8:
            self.float8.share_largest(self.largest(), self.rank)

    def largest(self, numbers=None):
        """uint32 (tensors, ranks): the magnitudes' bits in this mail, or in such a sum; None of a
        model not in FP8."""
        numbers = self.numbers if numbers is None else numbers
        return with_dtype(numbers[1:], np.uint32).reshape(-1, self.ranks) if self.float8 else None


def shared_part(partition):
    """The `Partition` where the update is shared, else None."""
    return partition if partition and partition.sharded else None


def try_sums(exchange, communicator, gradient, partition):
    """Add up numbers whose sum is known, by the same launches as in a step. Gather known partials
    and largest magnitudes, too; a `NumdiffError` if another result arrives. partition: where the update is shared."""
    size, rank = communicator.size, communicator.rank
    pattern = np.resize(np.arange(251, dtype=np.float32), gradient.size)  # whose sums are exact
    own = slice(*partition.bounds[rank : rank + 2]) if partition else slice(None)
    loss = zeros(1, np.float32, gradient.backend)
    for round in range(exchange.trial_rounds):
        copy_into(gradient, pattern + np.float32(rank + round))
        copy_into(loss, np.array([rank], np.float32))
        if float8 := exchange.mail.float8:
            copy_into(
                float8.amax,
                np.full(float8.amax.shape, 1 + rank + round, np.uint32) << np.uint32(23),
            )
        exchange.finish(loss)
        expected = pattern[own] * np.float32(size) + np.float32(
            size * round + size * (size - 1) // 2
        )
        wrong = np.count_nonzero(download(gradient)[own] != expected)
        if float8:
            found = download(exchange.largest) >> np.uint32(23)
            wrong += np.count_nonzero(
                found != np.arange(1 + round, 1 + round + size, dtype=np.uint32)
            )
        if partition:
            low, high = partition.piece_bounds[rank : rank + 2]
            copy_into(
                partition.partials[low:high],
                np.arange(low + round, high + round).astype(np.float32),
            )
            exchange.gather_partials()
            exchange.gather_weights()  # which all ranks have
            arrived = download(partition.partials)
            wrong += np.count_nonzero(arrived != np.arange(round, arrived.size + round))
        exchange.check()
        if wrong or download(loss)[0] != size * (size - 1) / 2:
            raise NumdiffError(
                f"in the trial {wrong} of {expected.size} sums by {exchange.name} were wrong."
            )
    fill_zero(gradient)
    gradient.backend.synchronize()


def wait(done, patient=True):
    """Call `done()`, which waits for all ranks, until it is true. MPI waits by spinning; here
    others may use the core meanwhile.

    patient: after a short while, sleep between calls, as there may be more ranks than cores.
    """
    start = time.perf_counter()
    with waiting():
        while not done():
            if patient and time.perf_counter() - start > EAGER:
                time.sleep(NAP)
            elif hasattr(os, "sched_yield"):
                os.sched_yield()
            else:
                time.sleep(0)
