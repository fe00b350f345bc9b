"""Copies of pieces between the ranks' buffers, all of them on one device."""

import numpy as np
import pytest

from numdiff.device import download
from numdiff.device.array import as_words
from numdiff.dtypes import HALVES
from numdiff.kernels import peer_pieces as P


def test_ranges_are_cut():
    assert P.pieces_of([(1, 0, 8, 12), (0, 64, 128, P.PIECE + 4)]).tolist() == [
        [1, 0, 8, 12],
        [0, 64, 128, P.PIECE],
        [0, 64 + P.PIECE, 128 + P.PIECE, 4],
    ]
    assert P.pieces_of([]).shape == (0, 4)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_each_piece_comes_from_its_buffer(engine, rng, ranks):
    x = rng.standard_normal((ranks, 96)).astype(np.float32)
    y, ranges = engine(np.zeros(128)), [(rank, 4 * rank, 64 + 8 * rank, 8) for rank in range(ranks)]
    P.peer_copy_pieces([engine(row) for row in x], y, engine(P.pieces_of(ranges)))
    want = np.zeros(128, np.float32)
    for rank, first, to, count in ranges:
        want[to : to + count] = x[rank, first : first + count]
    engine.check_equal(y, engine(want))
    P.peer_copy_pieces([y], y, engine(P.pieces_of([])))  # of nothing


@pytest.mark.parametrize("kind", sorted(HALVES))
def test_the_copy_of_16_bits_is_rounded_on_the_way_or_copied(engine, rng, kind):
    """The bits of each: a number that is sent and rounded, and one that was rounded and is sent."""
    x = rng.standard_normal(64).astype(np.float32)
    there, y, half = (
        engine(x.astype(HALVES[kind])),
        engine(np.zeros(64)),
        engine(np.zeros(64, HALVES[kind])),
    )
    P.peer_copy_pieces([engine(x)], y, engine(P.pieces_of([(0, 0, 0, 32)])), half)
    P.peer_copy_pieces([as_words(there)], as_words(half), engine(P.pieces_of([(0, 16, 16, 16)])))
    if engine.computes:
        np.testing.assert_array_equal(download(half), x.astype(HALVES[kind]))
        np.testing.assert_array_equal(download(y)[:32], x[:32])


def test_bad_input_says_so(engine):
    x, table = engine(np.ones(8)), engine(P.pieces_of([(0, 0, 0, 8)]))
    with pytest.raises(ValueError, match="1 to 8 buffers, not 9"):
        P.peer_copy_pieces([x] * 9, x, table)
    with pytest.raises(ValueError, match="has shape"):
        P.peer_copy_pieces([x], x, table, engine(np.ones(4)))
