"""The Hopper ladder, one change a level; `numdiff kernels check` has its results."""

import ast
import inspect

import numpy as np
import pytest

from numdiff.extras.levels.conv2d import halo, shifted_boxes
from numdiff.extras.levels.wgmma import (
    double_buffer,
    matmul_level_forward,
    matmul_level_forward_cost,
    one_tile,
    persistent,
    producer_consumer,
    tma_store,
)
from numdiff.kernels.matmul import matmul_forward


def halves(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


def test_the_levels_are_the_models_product(engine, rng):
    """What a level computes is matmul_forward's, to the last bit: both sum by wgmma, in one order."""
    a, b = engine(halves(rng, 128, 64)), engine(halves(rng, 256, 64))
    if engine.name in ("emulator", "cuda"):
        engine.check_equal(
            matmul_level_forward(a, b, version=5), matmul_forward(a, b, False, True, version=6)
        )


def test_errors_say_what_to_do(engine, rng):
    if not engine.has_versions:
        return
    a = engine(halves(rng, 128, 64))
    with pytest.raises(ValueError, match="takes multiples of"):
        matmul_level_forward(a, a)  # 128 columns
    with pytest.raises(ValueError, match=r"needs b \(N, 64\)"):
        matmul_level_forward(a, engine(halves(rng, 256, 32)))
    with pytest.raises(ValueError, match="use one-tile, double-buffered"):
        matmul_level_forward(a, engine(halves(rng, 256, 64)), version=9)


def test_cost():
    assert matmul_level_forward_cost(3, 4, 5) == (2 * (15 + 20 + 12), 2 * 3 * 4 * 5)


@pytest.mark.parametrize(
    "module",
    [one_tile, double_buffer, producer_consumer, persistent, tma_store, shifted_boxes, halo],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_a_level_is_one_short_file(module):
    """Two screens, the docstring among them, that take nothing from other levels."""
    text = inspect.getsource(module)
    taken = [node.module for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    assert len(text.splitlines()) <= 140 and "READ NEXT" in module.__doc__
    assert all("device" in name for name in taken)
