import math

import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels.optimizer import grad_norm as G
from tests.conftest import shapes

SHAPES = shapes(
    minimal=(4,), odd=(1031,), not_aligned=(4097,), large=(512 * 256 * 4 + 1024,), one_pass=(1024,)
)


@SHAPES
def test_norm(engine, rng, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    got = G.global_norm(engine(x))
    engine.check(got, np.array([math.sqrt(math.fsum(float(v) ** 2 for v in x))]), 1e-6)
    engine.check_equal(got, G.global_norm(engine(x)))


def test_norm_of_pieces_does_not_depend_on_who_has_which(engine, rng):
    """Two ranks' partials, and those of one that has all."""
    x, pieces = (
        engine(rng.standard_normal(3000).astype(np.float32)),
        np.array([(0, 8), (8, 1024), (1024, 3000)]),
    )
    dtype = np.float64 if engine.name == "cpu" else np.float32
    alone, shared = engine.zeros(3, dtype), engine.zeros(3, dtype)
    G.squares_of_pieces(x, engine(pieces, np.int64), alone)
    for rows in slice(0, 2), slice(2, 3):
        G.squares_of_pieces(x, engine(pieces[rows], np.int64), shared[rows])
    engine.check_equal(alone, shared)
    engine.check(
        G.root_of_sum(shared),
        np.array([math.sqrt(math.fsum(float(v) ** 2 for v in download(x)))]),
        1e-6,
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30], ids=["nan", "inf", "overflow"])
def test_what_is_not_finite_shows(engine, bad):
    x = np.ones(8, np.float32)
    x[5] = bad
    norm = download(G.global_norm(engine(x)))
    assert not engine.computes or (bad == 1e30 and engine.name == "cpu") or not np.isfinite(norm[0])


def test_reference_keeps_its_dtype():
    assert (
        G.global_norm(np.ones(9)).dtype == np.float64
        and G.global_norm(np.ones(9, np.float32)).dtype == np.float32
    )
    assert G.global_norm(np.full(10, 3.0))[0] == math.sqrt(90)


def test_bad_input_says_so(engine):
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            G.global_norm(engine(np.ones(5)), version=2)
    with pytest.raises(ValueError, match="must be"):
        G.squares_of_pieces(
            engine(np.ones(8)), engine(np.zeros((2, 2)), np.int64), engine(np.zeros(3))
        )
