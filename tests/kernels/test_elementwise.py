import numpy as np
import pytest

from numdiff.kernels import elementwise as E
from tests.conftest import shapes, versions, where

SHAPES = shapes(minimal=(4,), odd=(3, 5, 7), aligned=(2, 8, 8, 64), large=(4, 33, 31, 64))
USABLE = where(lambda version, shape: version != 2 or np.prod(shape) % 4 == 0)
ACTIVATIONS = pytest.mark.parametrize("name", ["silu", "gelu"])


@SHAPES
@versions(1, 2)
@USABLE
def test_add(engine, rng, shape, version):
    a, b = rng.standard_normal(shape), rng.standard_normal(shape)
    engine.check(
        E.add_forward(engine(a), engine(b), version=version), a + b, 1e-6, np.abs(a) + np.abs(b)
    )


@SHAPES
@versions(1, 2)
@ACTIVATIONS
@USABLE
def test_activation(engine, rng, shape, version, name):
    forward, backward = getattr(E, f"{name}_forward"), getattr(E, f"{name}_backward")
    x, dy = 3 * rng.standard_normal(shape), rng.standard_normal(shape)
    y = forward(engine(x), version=version)
    engine.check(y, forward(x), 1e-6, x)  # of numbers far below 0 nearly nothing is left
    dx = backward(engine(dy), engine(x), version=version)
    engine.check(dx, backward(dy, x), 1e-6, dy)
    engine.check_equal(dx, backward(engine(dy), engine(x), version=version))


@SHAPES
def test_cast(engine, rng, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    half = E.cast_forward(engine(x), np.float16)
    engine.check(half, x.astype(np.float16), 0)
    engine.check(E.cast_forward(half, np.float32), x.astype(np.float16), 0)


def test_version_that_does_not_fit_says_so(engine):
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            E.silu_forward(engine(np.ones(5, np.float32)), version=2)
