"""`peer` by the copy engines, where ranks share the update: gradients during the backward pass, weights during AdamW.

    first stream   … backward of the last blocks | of those before … | join, the rest, sum | norm | AdamW: part 0 | 1 …
    second stream        group 0: signals, copies | group 1: … |                                    part 0: the same | …

A GPU's copy engines, and a stream that waits for a number to be written to this GPU's memory, need no multiprocessor,
where a kernel beside a DiT's GEMMs waits for one (overlap.py). So the gradients that are this rank's to add up are
copied here from the other ranks, group by group as overlap.py forms them, and added up when the backward pass is over,
by one kernel that reads this GPU's memory alone. AdamW then updates this rank's weights in PARTS, and of each the copy
of 16 bits leaves while the next one is updated; weights that are read in float32 follow, by a kernel.

MEMORY. The gradients of this rank's part of every other rank: on N ranks (N - 1) / N of 4 bytes a parameter, where the
sharing saves more.

THE SAME BITS. Each element is added up by one rank, in rank order; and all of the 16 bits are what their owner rounds.

SIGNALS. A rank writes 1 into the memory of those who will read its gradients of a group, or its weights of a part. Who
waits for it then writes 0. Between two steps every rank has waited for every other in the norm's barrier, so no signal
comes before the one of the step before was seen.

WHY IT CANNOT DEADLOCK. All ranks have the same groups, whose signals are waited for in the same order, and each rank
gives its own before it waits. The first stream waits for the second only at the joins, after the last fork.

WHEN NOBODY WRITES. A rank that ends takes the others along (watchdog.py); a stream that waits ends with its process.

SOURCE
    CUDA driver API, "Stream Memory Operations" (cuStreamBatchMemOp).
"""
import itertools

import numpy as np

from ..device import copy_into, download, forked, join, lasting, synchronize, upload, zeros
from ..errors import NumdiffError
from ..kernels.peer_pieces import peer_reduce_pieces, pieces_of
from . import overlap

GROUPS = 32  # of gradients, about
PARTS = 4  # of a rank's weights
EDGE = 64  # elements: parts end at multiples


def made_for(exchange, parameters):
    """The watcher of the backward pass of the model with these `FlatParameters`, as its `exchange_beside` says; None
    where the sum follows it. Collective."""
    wanted = overlap.wanted(parameters, exchange.partition)
    made = {overlap.KERNELS: overlap.Overlap, overlap.COPIES: Copies}.get(wanted)
    made = made and made(exchange, parameters)
    if wanted == overlap.COPIES and not made.works():
        made = None
    parameters.overlapped = made is not None
    return made


def parts_of(first, stop):
    """[(start, stop)] of elements first … stop - 1, in PARTS of nearly the same size."""
    edges = [first + (stop - first) * k // (PARTS * EDGE) * EDGE for k in range(PARTS)]
    return [*itertools.pairwise([*edges, stop])]


class Copies(overlap.Overlap):
    """Watcher (buckets.py) of a backward pass, for a `PeerExchange` with a partition; and the weights' way afterwards.

    signals: every rank's int32: at number · ranks + r rank r writes that it has its gradients of that group, or, behind
    those, its weights of a part; arrived: of every rank its gradients of this rank's part, the own ones where they lie
    Attributes parts: [(start, stop)] of this rank's weights; sent: how many of them have left in this step
    """

    def __init__(self, exchange, parameters):
        super().__init__(exchange, parameters, GROUPS)
        self.gpu, self.rank, self.ranks = exchange.gpu, exchange.rank, len(exchange.gradients)
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]  # each begins with another one
        bounds = exchange.partition.bounds
        self.all_parts = [parts_of(*bounds[rank:rank + 2]) for rank in range(self.ranks)]
        self.parts, self.sent, self.first = self.all_parts[self.rank], 0, bounds[self.rank]
        own = exchange.communicator.build(self._take, exchange.gradient[self.first:bounds[self.rank + 1]])
        self.signals = exchange.share(own)

    def _take(self, own):
        with lasting(getattr(own, "backend", None)):
            self.arrived = [own if rank == self.rank else zeros(own.shape, np.float32, self.gpu)
                            for rank in range(self.ranks)]
            self.pieces = upload(pieces_of([(0, 0, 0, own.size)]), own)
            self.weights_at = 2 * self.most  # the number of the first part's signals
            signals = zeros((self.weights_at + PARTS) * self.ranks, np.int32, self.gpu)
        synchronize(self.gpu)  # they are zero before anybody may write to them
        return signals

    def works(self):
        """Whether signals arrive; they are not waited for, as they might not. Collective."""
        gather, own = self.exchange.communicator.gather, self.signals[self.rank]
        try:
            self._signal(0, self.others)
            synchronize(self.gpu)
            given = True
        except NumdiffError:
            given = False
        given = all(gather(given))
        arrived = download(own)[self.others].all()
        copy_into(own, np.zeros(own.shape, np.int32))
        return all(gather(bool(given and arrived)))

    # gradients -------------------------------------------------------------------------------------------------------

    def finish(self):
        super().finish()
        peer_reduce_pieces(self.arrived, self.arrived[self.rank], self.pieces)

    def _add(self, group, blocks):
        """The last group is waited for by all, so that the other ranks' mail is there, too."""
        waiting = range(self.ranks) if self.left == len(self.current) - 1 else group.runs
        self._signal(self.left, [rank for rank in waiting if rank != self.rank])
        if self.rank in waiting:
            self._await(self.left)
        for rank in self.others:
            for start, stop in group.runs.get(self.rank, ()):
                copy_into(self.arrived[rank][start - self.first:stop - self.first],
                          self.exchange.gradients[rank][start:stop])
        self.left += 1

    # weights ---------------------------------------------------------------------------------------------------------

    def send_weights(self):
        """The next part of every rank's copy of 16 bits, once this rank has updated its own."""
        number, self.sent = self.sent, self.sent + 1
        halves = self.exchange.halves[0]
        with forked(self.gpu):
            self._signal(self.weights_at + number, self.others)
            self._await(self.weights_at + number)
            for rank in self.others:
                start, stop = self.all_parts[rank][number]
                if start < stop:
                    copy_into(halves[self.rank][start // 2:stop // 2], halves[rank][start // 2:stop // 2])

    def finish_weights(self, mixed):
        """Those that are read in float32."""
        self.sent = 0
        join(self.gpu)
        mixed.take_single(self.exchange.weights)

    def _signal(self, number, ranks):
        self.gpu.signal([(self.signals[rank], number * self.ranks + self.rank) for rank in ranks])

    def _await(self, number):
        self.gpu.await_signals(self.signals[self.rank], [number * self.ranks + rank for rank in self.others])
