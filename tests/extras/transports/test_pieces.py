"""Sums of pieces of the ranks' buffers, all of them on one device."""

import numpy as np
import pytest

from numdiff.extras.transports.pieces import peer_reduce_pieces
from numdiff.kernels import peer_pieces as P


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_sums_are_those_of_the_whole_buffer(engine, rng, ranks, blocks):
    """The same bits as where each rank adds up one slice."""
    x = rng.standard_normal((ranks, P.PIECE + 256)).astype(np.float32)
    ranges, y = (
        [(0, 4, 4, 36), (1, 64, 64, P.PIECE + 4), (0, P.PIECE + 128, 0, 4)],
        engine(np.zeros(P.PIECE + 256)),
    )
    peer_reduce_pieces([engine(row) for row in x], y, engine(P.pieces_of(ranges)), blocks)
    want, total = np.zeros(P.PIECE + 256, np.float32), sum(x[1:], x[0])  # in rank order, in float32
    for _, first, to, count in ranges:
        want[to : to + count] = total[first : first + count]
    engine.check_equal(y, engine(want))
