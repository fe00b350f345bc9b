"""`peer` reduces the gradients during the backward pass, on a second stream.

    first stream     … backward of the last blocks | of those before …  … | join, the rest of the sum | update
    second stream          group 0: barrier, sum, barrier, gather | group 1: … |

The parameters form groups by the moment at which their gradients are complete, and a group is sent
at that moment. It is not a contiguous range of the flat buffer, as a bucket of `mpi` is. A UNet's
embedding layers are spread over the buffer, and their gradients are complete last, so every range
would wait for them. The remaining groups follow after the backward pass. (If ranks share the
update, each needs the sums of its own part only: no second barrier, no gather.)

A kernel that adds needs registers, and a DiT's GEMMs leave none on any multiprocessor: each waits
for the other. A DiT's gradients are therefore copied, and reduced later (copies.py).
`Model.exchange_beside` selects the way for a model.

THE SAME BITS. One rank reduces each element, in rank order, as without this. Partial sums of a
weight's gradient are reduced (kernels/reduce/second_pass.py) before its group is sent. If gradients of
small layers are computed on a side stream (device/side_stream.py), a group waits for that stream,
and the first stream does not.

WHY IT CANNOT DEADLOCK. A barrier's kernel spins on one multiprocessor until all ranks have reached
that barrier. Kernels of the backward pass may need that multiprocessor, even all of them at once.
All ranks have the same groups, and pass the same barriers in the same order. The first stream waits
for the second only at the join, after the last fork. In between it waits for the side stream of
small layers' gradients (device/side_stream.py), which waits for the first alone. Take the first barrier
that not all ranks have reached. A rank that has not reached it has passed all barriers before it,
so nothing spins there: its backward pass continues, forks, and the rank arrives.

WHAT A GROUP MAY TOUCH. Its gradients, which are complete: their memory is reclaimed
(nn/aliasing.py), and is not aliased again in this step. Its kernels write nothing else, and the
join precedes the next writer of gradients.
"""

import numpy as np

from ...device import forked, join, lasting, upload
from ...device.side_stream import follow
from ...distributed.buckets import NEVER, last_records, touched_by
from ...kernels.peer_pieces import peer_copy_pieces, pieces_of
from ...kernels.reduce.second_pass import flush_on_side_stream
from ...nn.partition import joined
from .pieces import peer_reduce_pieces

BLOCKS = 64  # of 256 threads, that add up during the backward pass; 0: the sum follows it
# about, of nearly the same size: little more than one of them is left for after the backward pass
GROUPS = 32
KERNELS, COPIES = "kernels", "copies"  # of `Model.exchange_beside`


class GradientGroup:
    """Parameters whose gradients are all complete after record number `ready`.

    own, others: tables of the pieces that this rank adds up, and of those that it gets from the
    others, as kernels/peer_pieces.py takes them; runs: {rank: [(start, stop)]} of what each adds
    up, where the update is shared
    """

    def __init__(self, members, ready, parameters, rank, ranks, bounds):
        self.parameters, self.ready = [parameter for parameter, *_ in members], ready
        spans = sorted((first, end) for _, first, _, end in members)
        rows, self.runs = rows_of(spans, bounds), {}
        for owner, start, _, count in rows:
            self.runs.setdefault(owner, []).append((start, start + count))
        pieces = pieces_of(rows)
        if bounds is None:
            pieces[:, 0] = np.arange(len(pieces)) * ranks // max(1, len(pieces))
        with lasting(getattr(parameters.grad, "backend", None)):
            self.own, self.others = (
                upload(pieces[which], parameters.grad)
                for which in (pieces[:, 0] == rank, pieces[:, 0] != rank)
            )

    @property
    def complete(self):
        """False where an operation was left out, whose gradients `end_gradients` will zero."""
        return not any(parameter.stale or parameter.loan for parameter in self.parameters)


def rows_of(spans, bounds):
    """[(rank, first, first, count)] of spans [(start, stop)], in elements; bounds: of the ranks'
    parts, or None: rank 0 stands for all."""
    last = max((stop for _, stop in spans), default=0)
    return [
        (rank, start, start, stop - start)
        for rank, (low, high) in enumerate(
            [(0, last)] if bounds is None else zip(bounds, bounds[1:], strict=False)
        )
        for start, stop in joined(spans, low, high)
    ]


def groups_of(parameters, touched, rank, ranks, bounds, most):
    """[`GradientGroup`] in the order in which they are complete, `most` or one more; touched: for each
    record, in the order of playing back, the parameters that it adds to; bounds: of the ranks'
    parts of the update, or None."""
    last, groups, members, size = last_records(touched), [], [], 0
    wanted = parameters.total / most
    spans = sorted(
        parameters.spans().values(), key=lambda span: (last.get(id(span[0]), NEVER), span[1])
    )
    for span, after in zip(spans, [*spans[1:], None], strict=True):
        ready = last.get(id(span[0]), NEVER)
        members, size = [*members, span], size + span[3] - span[1]
        if after is None or size >= wanted and ready < last.get(id(after[0]), NEVER):
            groups.append(GradientGroup(members, ready, parameters, rank, ranks, bounds))
            members, size = [], 0
    return groups


def wanted(parameters, partition):
    """How the gradients are summed during the backward pass: "kernels", "copies" (of a shared
    update), or None."""
    how = getattr(parameters, "exchange_beside", None) if BLOCKS > 0 else None
    return None if how == COPIES and not partition else how


def plan(like, size):
    """Launch the kernels of an `Overlap` among `size` ranks on a stand-in for a GPU."""
    table = upload(pieces_of([(0, 0, 0, 4)]), like)
    peer_reduce_pieces([like] * size, like, table)
    peer_copy_pieces([like] * size, like, table)


class Overlap:
    """Watcher (buckets.py) of a backward pass, for a `PeerExchange`. Attribute most: groups, about"""

    def __init__(self, exchange, parameters):
        self.exchange, self.parameters, self.most = exchange, parameters, GROUPS
        # length of a tape -> [Group]; all are kept, as a captured step reads their tables
        self.groups = {}
        # the groups of this step, once it has begun, and how many of them have left
        self.current, self.left = None, 0

    def begin(self, records):
        if len(records) not in self.groups:
            exchange = self.exchange
            self.groups[len(records)] = groups_of(
                self.parameters,
                touched_by(records),
                exchange.rank,
                len(exchange.gradients),
                exchange.partition and exchange.partition.bounds,
                self.most,
            )
        self.current, self.left = self.groups[len(records)], 0

    def played(self, number):
        while (
            self.left < len(self.current) - 1
            and self.current[self.left].ready <= number
            and self.current[self.left].complete
        ):
            flush_on_side_stream()
            with forked(self.exchange.gpu):
                follow()
                self._add(self.current[self.left], BLOCKS)

    def finish(self):
        """Wait for the second stream, then sum what has not left."""
        join(self.exchange.gpu)
        while self.left < len(self.current):
            self._add(self.current[self.left], None)
        self.current = None

    def _add(self, group, blocks):
        exchange = self.exchange
        own = exchange.gradient
        exchange.barrier()  # every rank's gradients of the group are ready
        peer_reduce_pieces(exchange.gradients, own, group.own, blocks=blocks)
        if not exchange.partition:
            exchange.barrier()  # every rank's sums are there
            peer_copy_pieces(exchange.gradients, own, group.others, blocks=blocks)
        self.left += 1
