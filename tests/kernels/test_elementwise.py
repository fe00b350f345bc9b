import numpy as np
import pytest

from numdiff.kernels import elementwise as E
from tests.conftest import shapes, versions, where

SHAPES = shapes(minimal=(4,), odd=(3, 5, 7), aligned=(2, 8, 8, 64), large=(4, 33, 31, 64))
USABLE = where(lambda version, shape: version != 2 or np.prod(shape) % 4 == 0)


@SHAPES
@versions(1, 2)
@USABLE
def test_add(engine, rng, shape, version):
    a, b = rng.standard_normal(shape), rng.standard_normal(shape)
    engine.check(
        E.add_forward(engine(a), engine(b), version=version), a + b, 1e-6, np.abs(a) + np.abs(b)
    )


def test_version_that_does_not_fit_says_so(engine):
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            E.silu_forward(engine(np.ones(5, np.float32)), version=2)
