import numpy as np
import pytest

from numdiff.kernels.transformer import adaln as A
from tests.conftest import numerical_gradient, relative_error, shapes, versions, where

SHAPES = shapes(minimal=(1, 1, 3), odd=(2, 3, 12), not_aligned=(2, 5, 33), one_vector=(3, 9, 4), tokens=(4, 64, 384),
                wide=(2, 7, 1152), large=(2, 700, 192))
USABLE = where(lambda version, shape: version != 2 or shape[-1] % 4 == 0)


def make(rng, shape):
    B, _, C = shape
    return (3 + 2 * rng.standard_normal(shape), *rng.standard_normal((2, B, C)), rng.standard_normal(shape))


@SHAPES
@versions(1, 2)
@USABLE
def test_forward(engine, rng, shape, version):
    x, shift, scale, _ = make(rng, shape)
    want = A.adaln_forward(x, shift, scale)
    runs = [A.adaln_forward(engine(x), engine(shift), engine(scale), version=version) for _ in range(2)]
    for got, again, expected in zip(*runs, want, strict=True):
        engine.check(got, expected, 3e-6)
        engine.check_equal(got, again)


@versions(1, 2)
def test_eps_counts_where_hardly_anything_varies(engine, rng, version):
    """A variance of eps, which stands within the root."""
    x, (shift, scale) = 1e-3 * rng.standard_normal((2, 3, 12)), rng.standard_normal((2, 2, 12))
    got = A.adaln_forward(engine(x), engine(shift), engine(scale), version=version)
    for one, expected in zip(got, A.adaln_forward(x, shift, scale), strict=True):
        engine.check(one, expected, 1e-5)


@SHAPES
@versions(1, 2)
@USABLE
def test_backward(engine, rng, shape, version):
    x, shift, scale, dy = make(rng, shape)
    _, mean, rstd = A.adaln_forward(x, shift, scale)
    want = A.adaln_backward(dy, x, scale, mean, rstd)
    runs = [A.adaln_backward(*map(engine, (dy, x, scale, mean, rstd)), version=version) for _ in range(2)]
    for got, again, expected in zip(*runs, want, strict=True):
        engine.check(got, expected, 1e-5)
        engine.check_equal(got, again)


@pytest.mark.large
@versions(1, 2)
def test_large_mean_keeps_its_digits(engine, rng, version):
    x, zero = (1000 + rng.standard_normal((2, 25, 256))).astype(np.float32), np.zeros((2, 256), np.float32)
    y, _, rstd = A.adaln_forward(engine(x), engine(zero), engine(zero), version=version)
    want, _, want_rstd = A.adaln_forward(x.astype(np.float64), zero, zero)
    engine.check(y, want, 2e-4)  # the mean itself is known to 1000 · 6e-8 only
    engine.check(rstd, want_rstd, 1e-5)


def test_reference_against_the_definition(rng):
    x, shift, scale, _ = make(rng, (2, 3, 7))
    y, mean, rstd = A.adaln_forward_reference(x, shift, scale, eps=1e-3)
    for i, (b, t) in enumerate(np.ndindex(2, 3)):
        row = x[b, t]
        xhat = (row - row.mean()) / np.sqrt(row.var() + 1e-3)
        np.testing.assert_allclose(y[b, t], xhat * (1 + scale[b]) + shift[b], rtol=1e-10)
        np.testing.assert_allclose([mean[i], rstd[i]], [row.mean(), 1 / np.sqrt(row.var() + 1e-3)], rtol=1e-12)


def test_gradient(rng):
    x, shift, scale, dy = make(rng, (2, 3, 5))
    f = A.adaln_forward_reference
    dx, dshift, dscale = A.adaln_backward_reference(dy, x, scale, *f(x, shift, scale)[1:])
    assert relative_error(dx, numerical_gradient(lambda a: f(a, shift, scale)[0], x, dy)) < 1e-7
    assert relative_error(dshift, numerical_gradient(lambda a: f(x, a, scale)[0], shift, dy)) < 1e-7
    assert relative_error(dscale, numerical_gradient(lambda a: f(x, shift, a)[0], scale, dy)) < 1e-7


def test_wrong_arguments_say_so(engine):
    x, v = engine(np.ones((2, 3, 6), np.float32)), engine(np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        A.adaln_forward(x, v, engine(np.ones(6, np.float32)))
    with pytest.raises(ValueError, match="reshape an image"):
        A.adaln_forward(engine(np.ones((2, 3, 3, 6), np.float32)), v, v)
    with pytest.raises(ValueError, match="multiple of 4"):
        A.adaln_forward(x, v, v, version=2)
