"""E4M3 in both orientations, with the sums of its columns."""

import numpy as np
import pytest

from numdiff.extras.fp8 import both as Q
from numdiff.extras.fp8.quantise import PARTIALS, quantise_forward
from numdiff.float8 import numbers_of


@pytest.mark.parametrize("shape", [(1, 16), (70, 80)])
def test_both_orientations(rng, shape):
    """The reference, with which `numdiff kernels check` compares the kernels: the rows and the
    maxima are those of `quantise_forward`; the sums are added."""
    x, scale = (30 * rng.standard_normal(shape)).astype(np.float16), np.float32([0.25])
    (R, C), before = shape, rng.standard_normal(shape[1]).astype(np.float32)
    sums, (amax, alone) = before.copy(), np.zeros((2, PARTIALS), np.uint32)
    rows, columns = Q.quantise_both(x, scale, amax, sums)
    np.testing.assert_array_equal(rows, quantise_forward(x, scale, alone))
    assert amax.max() == alone.max()
    np.testing.assert_array_equal(Q.columns_of(rows, scale), columns)
    assert columns.shape == (C, -(-R // 16) * 16) and not columns[:, R:].any()
    np.testing.assert_array_equal(columns[:, :R], rows.T)
    numbers = numbers_of(rows).astype(float) / 4
    error = np.abs(sums - before - numbers.sum(axis=0))
    assert (error <= 1e-6 * (1 + np.abs(numbers).sum(axis=0))).all()


def test_what_is_refused():
    with pytest.raises(ValueError, match="multiple of 16 columns"):
        Q.quantise_both(np.zeros((4, 24), np.float16), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="multiple of 16 columns"):
        Q.columns_of(np.zeros((4, 24), np.uint8), np.ones(1, np.float32))
