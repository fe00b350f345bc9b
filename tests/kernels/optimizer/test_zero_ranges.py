import numpy as np
import pytest

from numdiff.kernels.optimizer.zero_ranges import PIECE, pieces, zero_ranges
from tests.conftest import large


def test_pieces_join_neighbours_and_cut_long_ranges():
    got = pieces([(64, 70), (0, 10), (70, 80), (128, 128 + 2 * PIECE + 1)])
    assert got.tolist() == [
        [0, 10],
        [64, 80],
        [128, 128 + PIECE],
        [128 + PIECE, 128 + 2 * PIECE],
        [128 + 2 * PIECE, 128 + 2 * PIECE + 1],
    ]
    assert pieces([]).shape == (0, 2)


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, 1)],
        [(8, 13), (16, 20), (64, 64 + 1030)],
        pytest.param([(4, 9), (64, 64 + 3 * PIECE + 2)], marks=large),
    ],
)
def test_only_the_ranges_become_zero(engine, rng, ranges):
    start = rng.standard_normal(max((stop for _, stop in ranges), default=3) + 7).astype(np.float32)
    flat, want = engine(start), start.copy()
    for first, stop in ranges:
        want[first:stop] = 0
    zero_ranges(flat, engine(pieces(ranges)))
    engine.check_equal(flat, want)
