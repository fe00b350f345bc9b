"""The two Hopper levels of the convolution; `numdiff kernels check` has their results."""

import pytest

from numdiff.extras.levels.conv2d import (
    conv2d_level_forward,
    conv2d_level_forward_cost,
)
from tests.extras.levels.test_matmul_levels import halves


def test_errors_say_what_to_do(engine, rng):
    if not engine.has_versions:
        return
    x, weight = engine(halves(rng, 1, 16, 8, 64)), engine(halves(rng, 128, 3, 3, 64))
    with pytest.raises(ValueError, match="takes H, W, C, N in multiples of"):
        conv2d_level_forward(x, engine(halves(rng, 64, 3, 3, 64)))
    with pytest.raises(ValueError, match=r"needs weight \(N, 3, 3, 64\)"):
        conv2d_level_forward(x, engine(halves(rng, 128, 1, 1, 64)))
    with pytest.raises(ValueError, match="no version 3 of conv2d_level: use shifted-boxes or halo"):
        conv2d_level_forward(x, weight, version=3)


def test_cost():
    moved, flops = conv2d_level_forward_cost(2, 16, 8, 64, 128)
    assert (
        moved == 2 * (2 * 128 * 64 + 9 * 64 * 128 + 2 * 128 * 128)
        and flops == 2 * 2 * 128 * 9 * 64 * 128
    )
