"""Weights in E4M3, in both orientations."""

import numpy as np
import pytest

from numdiff.extras.fp8 import weights as Q
from numdiff.float8 import LARGEST, bits_of


@pytest.mark.parametrize(
    "places", [[(0, 16, 16)], [(64, 80, 144), (64 + 80 * 144, 64, 64)]], ids=str
)
def test_weights_both_ways(rng, places):
    """The reference, with which `numdiff kernels check` compares the kernels."""
    size = places[-1][0] + places[-1][1] * places[-1][2]
    flat, scale = rng.standard_normal(size).astype(np.float16), np.zeros(len(places), np.float32)
    matrices = Q.matrices8(places, flat)
    rows, columns = np.zeros((2, matrices.total), np.uint8)
    Q.quantise_weights(flat, matrices, rows, columns, scale)
    at = 0
    for unit, (first, N, K) in zip(scale, places, strict=True):
        w = flat[first : first + N * K].reshape(N, K).astype(np.float32)
        assert LARGEST / 2 < np.abs(w).max() / unit <= LARGEST and np.log2(unit) % 1 == 0
        for found, matrix in ((rows, w), (columns, w.T)):
            np.testing.assert_array_equal(found[at : at + N * K], bits_of(matrix / unit).ravel())
        at += N * K
    assert matrices.total == at


def test_what_is_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        Q.matrices8([(0, 24, 16)], None)
