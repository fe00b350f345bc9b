"""The kernels that are there to be read: rung 0 of the matmul, the Hopper levels of matmul and convolution.

Multi-tile problems, persistence and both thread orders are the check's (numdiff/kernels/check/levels.py).
"""
import inspect

import numpy as np
import pytest

from numdiff.kernels.conv2d import conv2d_forward
from numdiff.kernels.conv2d.levels import conv2d_level_forward, conv2d_level_forward_cost, halo, shifted_boxes
from numdiff.kernels.matmul import matmul_forward
from numdiff.kernels.matmul.first import matmul_first_forward, matmul_first_forward_cost
from numdiff.kernels.matmul.levels import (
    double_buffer,
    matmul_level_forward,
    matmul_level_forward_cost,
    one_tile,
    persistent,
    producer_consumer,
)
from tests.conftest import shapes, versions

TOLERANCE = 2e-3


def halves(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


@shapes(minimal=(1, 1, 1), odd=(33, 9, 5), large=(500, 700, 300))
@versions(1, 2)
def test_first(engine, rng, shape, version):
    M, N, K = shape
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    engine.check(matmul_first_forward(engine(a), engine(b), version=version), a @ b, 2e-6)


def test_both_orders_give_the_same_bits(engine, rng):
    a, b = engine(rng.standard_normal((9, 7))), engine(rng.standard_normal((7, 10)))
    if engine.has_versions:
        engine.check_equal(matmul_first_forward(a, b, version=1), matmul_first_forward(a, b, version=2))


@shapes(minimal=(128, 256, 64), large=(640, 768, 1024))
@versions(1, 2, 3, 4)
def test_matmul_level(engine, rng, shape, version):
    M, N, K = shape
    a, b = halves(rng, M, K), halves(rng, N, K)
    results = [matmul_level_forward(engine(a), engine(b), version=version) for _ in range(engine.repeats)]
    assert results[0].dtype == np.float16
    engine.check(results[0], a.astype(np.float64) @ b.astype(np.float64).T, TOLERANCE)
    engine.check_equal(results[0], results[-1])


@shapes(minimal=(1, 16, 8, 64, 128), large=(3, 32, 40, 192, 256))
@versions(1, 2)
def test_conv2d_level(engine, rng, shape, version):
    *x_shape, N = shape
    x, weight = halves(rng, *x_shape), halves(rng, N, 3, 3, x_shape[3])
    results = [conv2d_level_forward(engine(x), engine(weight), version=version) for _ in range(engine.repeats)]
    engine.check(results[0], conv2d_forward(x.astype(np.float64), weight.astype(np.float64)), TOLERANCE)
    engine.check_equal(results[0], results[-1])


def test_errors_say_what_to_do(engine, rng):
    if not engine.has_versions:
        return
    a, x, weight = (engine(halves(rng, *shape)) for shape in ((128, 64), (1, 16, 8, 64), (128, 3, 3, 64)))
    with pytest.raises(ValueError, match="use matmul_forward"):
        matmul_level_forward(a, a)  # 128 columns
    with pytest.raises(ValueError, match=r"needs b \(N, 64\)"):
        matmul_level_forward(a, engine(halves(rng, 256, 32)))
    with pytest.raises(ValueError, match="use one of 1, 2, 3, 4"):
        matmul_level_forward(a, engine(halves(rng, 256, 64)), version=9)
    with pytest.raises(ValueError, match="use conv2d_forward"):
        conv2d_level_forward(x, engine(halves(rng, 64, 3, 3, 64)))
    with pytest.raises(ValueError, match=r"needs weight \(N, 3, 3, 64\)"):
        conv2d_level_forward(x, engine(halves(rng, 128, 1, 1, 64)))
    with pytest.raises(ValueError, match="use one of 1, 2"):
        conv2d_level_forward(x, weight, version=3)
    with pytest.raises(ValueError, match=r"needs b \(64, N\)"):
        matmul_first_forward(engine(np.ones((4, 64))), engine(np.ones((4, 64))))
    with pytest.raises(ValueError, match="use 1 or 2"):
        matmul_first_forward(engine(np.ones((4, 6))), engine(np.ones((6, 4))), version=3)


def test_cost():
    assert matmul_first_forward_cost(3, 4, 5) == (4 * (15 + 20 + 12), 2 * 3 * 4 * 5)
    assert matmul_level_forward_cost(3, 4, 5) == (2 * (15 + 20 + 12), 2 * 3 * 4 * 5)
    moved, flops = conv2d_level_forward_cost(2, 16, 8, 64, 128)
    assert moved == 2 * (2 * 128 * 64 + 9 * 64 * 128 + 2 * 128 * 128) and flops == 2 * 2 * 128 * 9 * 64 * 128


@pytest.mark.parametrize("module", [one_tile, double_buffer, producer_consumer, persistent, shifted_boxes, halo],
                         ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_level_is_one_file_of_a_lecture(module):
    """Complete, and short: about 120 lines."""
    text = inspect.getsource(module)
    assert len(text.splitlines()) <= 170 and "READ NEXT" in module.__doc__
    assert "levels" not in "".join(line for line in text.splitlines() if line.startswith("from"))


def test_the_levels_are_the_ladders_own_product(engine, rng):
    """What a level computes is matmul_forward's, to the last bit where both sum by wgmma in one order."""
    a, b = engine(halves(rng, 128, 64)), engine(halves(rng, 256, 64))
    if engine.name in ("emulator", "cuda"):
        engine.check_equal(matmul_level_forward(a, b, version=3), matmul_forward(a, b, False, True, version=6))
