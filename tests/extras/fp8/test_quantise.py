"""Rounding to E4M3 with delayed scales."""

import numpy as np

from numdiff.extras.fp8 import quantise as Q
from numdiff.float8 import LARGEST, bits_of, numbers_of


def test_rounding(rng):
    """The reference, with which `numdiff kernels check` compares the kernels."""
    x = (rng.standard_normal((7, 3, 48)) * 100).astype(np.float16)
    x.reshape(-1)[:4] = np.inf, -np.inf, np.nan, 6e-8
    scale, amax = np.float32([0.125]), np.zeros(Q.PARTIALS, np.uint32)
    got = Q.quantise_forward(x, scale, amax)
    with np.errstate(invalid="ignore"):
        want = np.where(np.isfinite(x), bits_of(x.astype(np.float32) / scale), 0x7F)
    np.testing.assert_array_equal(got, want)
    assert np.isnan(amax.max().view(np.float32)) and np.isnan(numbers_of(got).ravel()[:3]).all()


def test_scales_follow_the_largest_of_some_steps():
    """A scale leaves room for twice the largest; a step of zeros, or with an overflow, gives no
    information."""
    amax, history = np.zeros((2, Q.PARTIALS), np.uint32), np.zeros((2, Q.HISTORY), np.float32)
    scale, one = np.ones(2, np.float32), np.ones(1, np.float32)
    for step, largest in enumerate([0, 30, np.inf, *[7] * Q.HISTORY]):
        x = np.zeros((1, 16), np.float16)
        x[0, 3] = -largest
        Q.quantise_forward(x, one, amax[0])
        Q.scale_update(amax, history, scale)
        want = 1 if step == 0 else 0.25 if step < 1 + Q.HISTORY else 2.0**-5
        assert scale.tolist() == [want, 1] and not amax.any(), step
        assert largest * Q.MARGIN / want <= LARGEST or largest == np.inf
    assert history[0, :2].tolist() == [7, 7] and not history[1].any()


def test_powers_of_two():
    x = np.float32([1, 1.0000001, 0.75, 2.0**-20, 3e-9])
    np.testing.assert_array_equal(Q.power_of_two(x), [1, 2, 1, 2.0**-20, 2.0**-28])
