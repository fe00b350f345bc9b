"""`peer` by copy engines, if ranks share the update: gradients during the backward pass, weights
during AdamW.

    first stream   … backward of the last blocks | of those before … | join, the rest, sum | norm | AdamW: part 0 | 1 …
    second stream        group 0: signals, copies | group 1: … |                                    part 0: the same | …

A copy engine needs no multiprocessor. Neither does a stream that waits until a value has been
written to its GPU's memory. A kernel that runs concurrently with a DiT's GEMMs would wait for one
(overlap.py). So the gradients that this rank reduces are copied here from the other ranks, in the
groups of overlap.py. One kernel, which reads this GPU's memory alone, reduces them after the
backward pass. AdamW then updates this rank's weights in PARTS, and the 16-bit copy of each part is
sent while the next one is updated. Weights that are read in float32 follow at the end, by a kernel.

Weights are sent part by part if AdamW updates all of them and there is a 16-bit copy
(`Partition.weight_parts`). Muon's, those of a model with frozen parameters, and float32 are sent
all at once behind a barrier, as without this.

MEMORY. The other ranks' gradients of this rank's part: on N ranks (N - 1) / N of 4 bytes a
parameter. The shared update saves the same amount for each of the two moments.

THE SAME BITS. One rank reduces each element, in rank order; every 16-bit copy is the one that the
owner of the weight has rounded.

SIGNALS. A rank writes 1 into the memory of each rank that will read its gradients of a group, or
its weights of a part. The rank that waits for a signal resets it to 0. A signal is used once a
step. Between two uses all ranks pass the norm's barrier. So a signal is only set after its last use
has been seen, and no gradient or weight is overwritten that another rank still copies.

WHY IT CANNOT DEADLOCK. All ranks have the same groups, wait for their signals in the same order,
and each rank sets its own signal before it waits for the others'. The first stream waits for the
second only at the two joins, each after the last fork before it.

WITHOUT A SIGNAL a stream waits for ever: it has no limit as a barrier has (reduce.py). The
watchdog ends the job if a rank ends or is stuck (watchdog.py).

SOURCE
    CUDA driver API, "Stream Memory Operations" (cuStreamBatchMemOp).
"""

import contextlib
import itertools

import numpy as np

from ...device import copy_into, download, forked, join, lasting, synchronize, upload, zeros
from ...errors import NumdiffError
from ...kernels.peer_pieces import pieces_of
from . import overlap
from .pieces import peer_reduce_pieces

PARTS = 4  # of a rank's weights
EDGE = 64  # elements: parts but the last have a multiple


def made_for(exchange, parameters):
    """The watcher of backward passes for the model with these `FlatParameters`, as its
    `exchange_beside` says; None where the sum follows them, as it does where a rank has no memory
    for copies. Notes in `parameters.overlapped` which it is. Collective."""
    wanted, made = overlap.wanted(parameters, exchange.partition), None
    if wanted == overlap.KERNELS:
        made = overlap.Overlap(exchange, parameters)
    elif wanted == overlap.COPIES:
        with contextlib.suppress(NumdiffError):  # which all ranks have, or none
            made = GradientCopies(exchange, parameters)
        made = made if made and made.works() else None
    parameters.overlapped = made is not None
    return made


def parts_of(first, stop):
    """[(start, stop)] of elements first … stop - 1, in PARTS of nearly the same size."""
    edges = [first + (stop - first) * k // (PARTS * EDGE) * EDGE for k in range(PARTS)]
    return [*itertools.pairwise([*edges, stop])]


class GradientCopies(overlap.Overlap):
    """Watcher (buckets.py) of backward passes, for a `PeerExchange` with a partition; and the
    transport of the weights.

    Attributes signals: of every rank an int32 array; in rank q's, element number · ranks + r
    signals that rank r's gradients of the group of that number are complete, or, from number
    `weights_at` on, its weights of a part; arrived: of every rank its gradients of this rank's
    part, the own ones in place; parts: [(start, stop)] of this rank's
    weights; sent: how many of them have been sent in this step
    """

    def __init__(self, exchange, parameters):
        super().__init__(exchange, parameters)
        self.gpu, self.rank, self.ranks = exchange.gpu, exchange.rank, len(exchange.gradients)
        # each begins elsewhere
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        bounds = exchange.partition.bounds
        self.all_parts = [parts_of(*bounds[rank : rank + 2]) for rank in range(self.ranks)]
        self.parts, self.sent, self.first = self.all_parts[self.rank], 0, bounds[self.rank]
        own = exchange.communicator.build(
            self._allocate, exchange.gradient[self.first : bounds[self.rank + 1]]
        )
        self.signals = exchange.share(own)

    def _allocate(self, own):
        """This rank's signals; own: its part of the gradient."""
        with lasting(getattr(own, "backend", None)):
            self.arrived = [
                own if rank == self.rank else zeros(own.shape, np.float32, self.gpu)
                for rank in range(self.ranks)
            ]
            self.pieces = upload(pieces_of([(0, 0, 0, own.size)]), own)
            # the first part's number: there is at most one group more than `most`
            self.weights_at = 2 * self.most
            signals = zeros((self.weights_at + PARTS) * self.ranks, np.int32, self.gpu)
        synchronize(self.gpu)  # they are zero before anybody may write to them
        return signals

    def works(self):
        """Whether signals arrive: looked up without waiting for them, as they might not come.
        Collective."""
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

    # gradients ------------------------------------------------------------------------------------

    def finish(self):
        super().finish()
        peer_reduce_pieces(self.arrived, self.arrived[self.rank], self.pieces)

    def _add(self, group, blocks):
        """Copy the other ranks' gradients of a group, once they are complete, and tell the others
        that this rank's are. Each rank that reduces a part of a group waits for it, and all wait
        for the last: then the other ranks' mail is there, too.
        """
        waiting = range(self.ranks) if self.left == len(self.current) - 1 else group.runs
        self._signal(self.left, [rank for rank in waiting if rank != self.rank])
        if self.rank in waiting:
            self._await(self.left)
        for rank in self.others:
            for start, stop in group.runs.get(self.rank, ()):
                copy_into(
                    self.arrived[rank][start - self.first : stop - self.first],
                    self.exchange.gradients[rank][start:stop],
                )
        self.left += 1

    # weights --------------------------------------------------------------------------------------

    def send_weights(self):
        """Get the next part of every rank's copy of 16 bits, and tell the others that this rank has
        updated its own."""
        number, self.sent = self.sent, self.sent + 1
        halves = self.exchange.halves[0]
        with forked(self.gpu):
            self._signal(self.weights_at + number, self.others)
            self._await(self.weights_at + number)
            for rank in self.others:
                start, stop = self.all_parts[rank][number]
                if start < stop:
                    copy_into(
                        halves[self.rank][start // 2 : stop // 2],
                        halves[rank][start // 2 : stop // 2],
                    )

    def finish_weights(self, mixed):
        """Wait for the copies, and get the weights that are read in float32."""
        self.sent = 0
        join(self.gpu)
        mixed.take_single(self.exchange.weights)

    def _signal(self, number, ranks):
        self.gpu.signal([(self.signals[rank], number * self.ranks + self.rank) for rank in ranks])

    def _await(self, number):
        self.gpu.await_signals(
            self.signals[self.rank], [number * self.ranks + rank for rank in self.others]
        )
