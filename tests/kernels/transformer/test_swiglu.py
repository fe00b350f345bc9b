import math

import numpy as np
import pytest

from numdiff.kernels.transformer import swiglu as S
from tests.conftest import numerical_gradient, relative_error, shapes, versions, where

SHAPES = shapes(minimal=(1, 2), odd=(3, 48), not_aligned=(2, 9, 66), tokens=(2, 64, 4096), large=(3, 700, 128))
TYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16])

USABLE = where(lambda version, shape: version != 2 or shape[-1] % 16 == 0)


def make(rng, shape, dtype=np.float64):
    """x and dy, float64 numbers that the dtype holds."""
    x, dy = 2 * rng.standard_normal(shape), rng.standard_normal((*shape[:-1], shape[-1] // 2))
    return x.astype(dtype).astype(np.float64), dy.astype(dtype).astype(np.float64)


def tolerance(dtype):
    return 1e-3 if dtype == np.float16 else 2e-6


@SHAPES
@TYPES
@versions(1, 2)
@USABLE
def test_forward(engine, rng, shape, dtype, version):
    x, _ = make(rng, shape, dtype)
    runs = [S.swiglu_forward(engine(x, dtype), version=version) for _ in range(engine.repeats)]
    assert runs[0].dtype == dtype
    size = x[..., :shape[-1] // 2] * x[..., shape[-1] // 2:]  # a shut gate leaves nearly nothing
    engine.check(runs[0], S.swiglu_forward(x), tolerance(dtype), size)
    engine.check_equal(runs[0], runs[-1])


@SHAPES
@TYPES
@versions(1, 2)
@USABLE
def test_backward(engine, rng, shape, dtype, version):
    x, dy = make(rng, shape, dtype)
    runs = [S.swiglu_backward(engine(dy, dtype), engine(x, dtype), version=version) for _ in range(engine.repeats)]
    assert runs[0].dtype == dtype
    size = dy * x[..., shape[-1] // 2:], dy * x[..., :shape[-1] // 2]
    engine.check(runs[0], S.swiglu_backward(dy, x), tolerance(dtype), size)
    engine.check_equal(runs[0], runs[-1])


def test_gates_far_from_zero(engine):
    """e^-a is no float32 below -88: the gate is shut there, without a warning, and open on the other side."""
    x = np.array([[-1e4, -100, 100, 1e4, 2, 3, 4, 5]], np.float32)
    engine.check(S.swiglu_forward(engine(x)), [[0, 0, 400, 5e4]])
    engine.check(S.swiglu_backward(engine(np.ones((1, 4), np.float32)), engine(x)), [[0, 0, 4, 5, 0, 0, 100, 1e4]])


def test_reference_against_the_formula(rng):
    x, _ = make(rng, (3, 10))
    y = S.swiglu_forward_reference(x)
    for r, c in np.ndindex(y.shape):
        assert math.isclose(y[r, c], x[r, c] / (1 + math.exp(-x[r, c])) * x[r, 5 + c], rel_tol=1e-12)


def test_gradient(rng):
    x, dy = make(rng, (4, 6))
    assert relative_error(S.swiglu_backward(dy, x), numerical_gradient(S.swiglu_forward, x, dy)) < 1e-8


def test_what_does_not_fit_is_refused(engine):
    with pytest.raises(ValueError, match="even number of channels, not 3"):
        S.swiglu_forward(engine(np.ones((2, 3), np.float32)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="6 is not a multiple of 8"):
            S.swiglu_backward(engine(np.ones((2, 6), np.float32)), engine(np.ones((2, 12), np.float32)), version=2)
