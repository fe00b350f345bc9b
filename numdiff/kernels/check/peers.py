"""Cases of the reduction over peers.

Every rank's launches run one after the other on one device, so no launch waits for another: in the barrier's cases the
others' flags are set beforehand.
"""
import numpy as np

from .. import peer_pieces, peer_reduce
from .case import HALF_TOLERANCE, Case, in_place, normal


def peer_cases():
    def names(ranks):
        return [f"x{k}" for k in range(ranks)]

    def buffers(a, ranks):
        return [getattr(a, name) for name in names(ranks)]

    for ranks, n, versions in ((2, 40, (1, 2)), (3, 37, (1,)), (4, 1028, (1, 2)), (8, 64, (1, 2)), (8, 5, (1,))):
        shapes, label = dict.fromkeys(names(ranks), (n,)), f"{ranks} ranks, {n}"

        def scatter(a, v, ranks=ranks):
            for rank in range(ranks):
                peer_reduce.peer_reduce_scatter(buffers(a, ranks), rank, version=v)

        def everything(a, v, ranks=ranks, scatter=scatter):
            scatter(a, v)
            for rank in range(ranks):
                peer_reduce.peer_all_gather(buffers(a, ranks), rank, version=v)

        yield Case("peer_reduce_scatter", normal(**shapes), in_place(scatter, *names(ranks)), versions, label=label)
        yield Case("peer_all_gather", normal(**shapes), in_place(everything, *names(ranks)), versions, label=label)
    bounds = [0, 8, 8, 32, 44]  # as of parts of an update; one is empty

    def parts(a, v):
        for rank in range(4):
            peer_reduce.peer_reduce_scatter(buffers(a, 4), rank, version=v, bounds=bounds)
        for rank in range(4):
            peer_reduce.peer_all_gather(buffers(a, 4), rank, version=v, bounds=bounds)

    yield Case("peer_all_gather", normal(**dict.fromkeys(names(4), (44,))), in_place(parts, *names(4)), (1, 2),
               label="4 ranks, parts of their own")
    size = peer_pieces.PIECE + 24

    def some(rng):
        ranges = (2, 0, 0, 4), (0, 12, 8, peer_pieces.PIECE + 8)  # the second is cut
        return {**normal(**dict.fromkeys((*names(3), "y"), (size,)))(rng), "half": np.ones(size, np.float16),
                "pieces": peer_pieces.pieces_of(ranges)}

    yield Case("peer_copy_pieces", some, in_place(
        lambda a, v: peer_pieces.peer_copy_pieces(buffers(a, 3), a.y, a.pieces, blocks=2), "y"))
    for ranks in range(1, peer_reduce.MAX_RANKS + 1):
        n = size if ranks == 3 else 48

        def own(rng, ranks=ranks, n=n):
            return {**normal(**dict.fromkeys((*names(ranks), "y"), (n,)))(rng),
                    "pieces": peer_pieces.pieces_of([(0, 0, 0, 4), (0, 12, 8, n - 16)])}

        yield Case("peer_reduce_pieces", own, in_place(lambda a, v, ranks=ranks: peer_pieces.peer_reduce_pieces(
            buffers(a, ranks), a.y, a.pieces, blocks=2), "y"), label=f"{ranks} ranks")
    yield Case("peer_copy_pieces", some, in_place(
        lambda a, v: peer_pieces.peer_copy_pieces(buffers(a, 3), a.y, a.pieces, a.half), "y", "half"),
        tolerance=HALF_TOLERANCE, label="with a copy of 16 bits")
    for n in 1, 300:
        yield Case("peer_sum", normal(x0=(n,), x1=(n,), x2=(n,), total=(n,)),
                   in_place(lambda a, v: peer_reduce.peer_sum(buffers(a, 3), a.total), "total"), label=f"3 ranks, {n}")

    def flags(here):  # of three ranks, seen by rank 1 that comes for the sixth time
        def make(rng):
            size = peer_reduce.MAX_RANKS * peer_reduce.STRIDE
            own = np.zeros(size, np.int32)
            own[[0, peer_reduce.STRIDE, 2 * peer_reduce.STRIDE]] = here
            return {"x0": np.zeros(size, np.int32), "x1": own, "x2": np.zeros(size, np.int32),
                    "counter": np.array([5], np.int32), "status": np.zeros(1, np.int32)}
        return make

    def wait(a, v):
        peer_reduce.peer_barrier(buffers(a, 3), a.counter, a.status, 1, 1)

    results = (*names(3), "counter", "status")
    yield Case("peer_barrier", flags((7, 5, 6)), in_place(wait, *results), label="all are there")
    yield Case("peer_barrier", flags((6, 5, 3)), in_place(wait, *results), label="rank 2 never comes")
