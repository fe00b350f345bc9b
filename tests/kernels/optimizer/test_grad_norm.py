import math

import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels.optimizer import grad_norm as G
from tests.conftest import shapes, versions, where

SHAPES = shapes(minimal=(4,), odd=(1031,), not_aligned=(4097,), large=(512 * 256 * 4 + 1024,), one_pass=(1024,))


@SHAPES
@versions(1, 2)
@where(lambda version, shape: version != 2 or shape[0] % 4 == 0)
def test_norm(engine, rng, shape, version):
    x = rng.standard_normal(shape).astype(np.float32)
    got = G.global_norm(engine(x), version=version)
    engine.check(got, np.array([math.sqrt(math.fsum(float(v) ** 2 for v in x))]), 1e-6)
    engine.check_equal(got, G.global_norm(engine(x), version=version))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30], ids=["nan", "inf", "overflow"])
def test_what_is_not_finite_shows(engine, bad):
    x = np.ones(8, np.float32)
    x[5] = bad
    norm = download(G.global_norm(engine(x)))
    assert not engine.computes or (bad == 1e30 and engine.name == "cpu") or not np.isfinite(norm[0])


def test_reference_keeps_its_dtype():
    assert G.global_norm(np.ones(9)).dtype == np.float64 and G.global_norm(np.ones(9, np.float32)).dtype == np.float32
    assert G.global_norm(np.full(10, 3.0))[0] == math.sqrt(90)


def test_bad_input_says_so(engine):
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            G.global_norm(engine(np.ones(5)), version=2)


def test_cost():
    assert G.global_norm_cost(10) == (40, 20)
