"""The transport `peer`: the GPUs of one host read each other's memory, and add up what they find
there."""

import atexit
import contextlib

import numpy as np

from ...device import copy_into, download, zeros
from ...device.array import as_words
from ...distributed.buckets import WatchBackward
from ...distributed.exchange_base import Mail, NoExchange, shared_part, try_sums
from ...errors import NumdiffError
from ...kernels.peer_pieces import MAX_RANKS
from . import copies, overlap
from .reduce import (
    STRIDE,
    peer_all_gather,
    peer_barrier,
    peer_reduce_scatter,
    peer_sum,
)

# milliseconds that a rank may be late in the trial of `peer`: it may have to compile kernels
TEST_LIMIT = 60_000
STEP_LIMIT = 600_000  # and in a step
# Seconds of six launches, and bytes a second: a sum that takes no longer goes over NVLink (150 to
# 310 GB/s between H200s; PCIe gives 40), where no other transport was faster. Starting NCCL and
# testing MPI then takes eight seconds for nothing.
LAUNCHES, NVLINK = 5e-5, 1e11


class PeerExchange(NoExchange):
    """The GPUs of one host read each other's memory: reduce.py, between barriers on the
    device. During the backward pass overlap.py or copies.py does it.

    Collective; raises `NumdiffError` on every rank where one of them cannot.
    """

    name, trial_rounds = "peer", 2  # as its barriers count

    def __init__(self, communicator, parameters, partition=None):
        self.communicator, self.rank = communicator, communicator.rank
        self.numbers = range(communicator.size)  # of these ranks among all
        self.gpu, self.gradient = parameters.grad.backend, parameters.grad
        self.partition, self.overlap = shared_part(partition), None
        self._make_mail(parameters, communicator.size)
        self.flags = zeros(MAX_RANKS * STRIDE, np.int32, self.gpu)
        self.counter, self.status = (zeros(1, np.int32, self.gpu) for _ in range(2))
        self.limit, self.mapped = TEST_LIMIT, []  # the arrays of other ranks
        self.gpu.synchronize()  # the flags are zero before anybody may write to them
        try:
            arrays = [self.gradient, self.mail.numbers, self.flags]
            if self.partition:
                arrays += [parameters.data, partition.partials]
                arrays += [] if parameters.half is None else [as_words(parameters.half)]
            shared = communicator.everywhere(lambda: [self.gpu.share(array) for array in arrays])
            self.gradients, self.mails, self.all_flags, *more = communicator.build(
                self._open, shared, arrays
            )
            if self.partition:
                self.weights, self.partials, *self.halves = more
            self.overlap = copies.made_for(self, parameters)
            communicator.build(try_sums, self, communicator, self.gradient, self.partition)
        except NumdiffError:
            self.close()
            raise
        self.limit = STEP_LIMIT
        atexit.register(self.close)

    @classmethod
    def planned(cls, parameters, size, partition=None):
        """Launch the kernels of an exchange between `size` ranks on the stand-in for a GPU that
        holds the parameters; partition: of a shared update."""
        self, like = cls.__new__(cls), parameters.grad
        self.rank, self.gpu, self.limit = 0, like.backend, STEP_LIMIT
        self._make_mail(parameters, size)
        self.counter, self.status = (zeros(1, np.int32, like) for _ in range(2))
        self.gradients, self.mails, self.partition = (
            [like] * size,
            [self.mail.numbers] * size,
            partition,
        )
        self.all_flags = [zeros(MAX_RANKS * STRIDE, np.int32, like)] * size
        self.add(zeros(1, np.float32, like))
        self.gather(partition and partition.bounds)
        if overlap.wanted(parameters, partition):
            overlap.plan(like, size)
        if partition:
            self.weights, self.partials = [parameters.data] * size, [partition.partials] * size
            self.gather_partials()
            self.gather_weights()

    def _make_mail(self, parameters, size):
        self.mail = Mail(parameters, self.rank, size, self.gpu)
        self.total = zeros(self.mail.numbers.size, np.float32, self.gpu)
        self.largest = self.mail.largest(self.total)

    def _open(self, shared, own):
        """The arrays of every rank: its own as they are, the others' mapped."""
        ranks = [
            [self._map(s) for s in arrays] if rank != self.rank else own
            for rank, arrays in enumerate(shared)
        ]
        return [list(column) for column in zip(*ranks, strict=True)]

    def share(self, array):
        """The arrays of every rank, of which this is the own one. Collective."""
        shared = self.communicator.everywhere(lambda: [self.gpu.share(array)])
        return self.communicator.build(self._open, shared, [array])[0]

    def _map(self, shared):
        self.mapped.append(self.gpu.open_shared(shared))
        return self.mapped[-1]

    def suffices(self, seconds):
        return seconds <= LAUNCHES + self.gradient.nbytes / NVLINK

    def watch(self):
        return WatchBackward(self.overlap) if self.overlap else super().watch()

    def finish(self, loss):
        if self.overlap and self.overlap.current is not None:
            self._finish_overlapped(loss)
            return
        self.add(loss)
        if not self.partition:
            self.gather()

    def _finish_overlapped(self, loss):
        """Finish after groups of gradients were sent earlier (overlap.py, copies.py)."""
        self.mail.write(loss)
        # with a barrier, or signals of all ranks: so every rank's mail is ready
        self.overlap.finish()
        peer_sum(self.mails, self.total)
        copy_into(loss, self.total[:1])
        if not self.partition:
            self.barrier()  # this rank's memory is no longer read

    def add(self, loss):
        """Add up the own slice, and the mail."""
        self.mail.write(loss)
        self.barrier()  # every rank's gradient and mail are ready
        peer_reduce_scatter(
            self.gradients, self.rank, bounds=self.partition and self.partition.bounds
        )
        peer_sum(self.mails, self.total)
        copy_into(loss, self.total[:1])

    def gather(self, bounds=None):
        """Bring every rank's slice of the gradient here."""
        self.barrier()  # every slice is there
        peer_all_gather(self.gradients, self.rank, bounds=bounds)
        self.barrier()  # this rank's memory is no longer read

    def gather_partials(self):
        """Without a barrier after it: no partial is written before the next step, and until then
        every rank waits for every other to take its weights."""
        self.barrier()
        peer_all_gather(self.partials, self.rank, bounds=self.partition.piece_bounds)

    def gather_weights(self):
        """Nor is there a barrier after this: before a rank writes a weight again it meets the
        others in the next step's norm. Reading the weights in between is allowed."""
        self.barrier()
        peer_all_gather(self.weights, self.rank, bounds=self.partition.bounds)

    @property
    def weight_parts(self):
        return getattr(self.overlap, "parts", None)

    def send_weights(self):
        self.overlap.send_weights()

    def gather_mixed(self, mixed):
        """Nor after this. Where parts of the weights have left (`send_weights`), the others'
        signals stand for the barrier before it."""
        if getattr(self.overlap, "sent", 0):
            self.overlap.finish_weights(mixed)
        else:
            self.barrier()
            mixed.take(self.weights, *self.halves)

    def barrier(self):
        peer_barrier(self.all_flags, self.counter, self.status, self.rank, self.limit)

    def check(self, status=None):
        late = int((download(self.status) if status is None else status)[0])
        if late:
            raise NumdiffError(
                f"the GPU of rank {self.numbers[self.rank]} waited {self.limit // 1000} s for that of "
                f"rank {self.numbers[late - 1]} in vain; if it repeats, use --transport mpi."
            )

    def close(self):
        atexit.unregister(self.close)
        if self.overlap:
            self.overlap.parameters.overlapped = False
        # a GPU that has failed: the driver cleans up after the process
        with contextlib.suppress(NumdiffError):
            mapped, self.mapped = self.mapped, []
            self.gpu.close_shared(mapped)
