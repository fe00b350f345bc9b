import numpy as np
import pytest

from numdiff.kernels.norms.row_norm import Norm
from numdiff.kernels.transformer import adaln as A
from tests.conftest import apart, numerical_gradient, relative_error, versions


def make(rng, shape):
    B, _, C = shape
    return (3 + 2 * apart(rng, shape), *rng.standard_normal((2, B, C)), rng.standard_normal(shape))


@versions(1, 2)
def test_eps_counts_where_hardly_anything_varies(engine, rng, version):
    """A variance of eps, which stands within the root."""
    x, (shift, scale) = 1e-3 * rng.standard_normal((2, 3, 12)), rng.standard_normal((2, 2, 12))
    got = A.adaln_forward(engine(x), engine(shift), engine(scale), version=version)
    for one, expected in zip(got, A.adaln_forward(x, shift, scale), strict=True):
        engine.check(one, expected, 1e-5)


@pytest.mark.large
@versions(1, 2)
def test_large_mean_keeps_its_digits(engine, rng, version):
    x, zero = (
        (1000 + rng.standard_normal((2, 25, 256))).astype(np.float32),
        np.zeros((2, 256), np.float32),
    )
    y, _, rstd = A.adaln_forward(engine(x), engine(zero), engine(zero), version=version)
    want, _, want_rstd = A.adaln_forward(x.astype(np.float64), zero, zero)
    engine.check(y, want, 2e-4)  # the mean itself is known to 1000 · 6e-8 only
    engine.check(rstd, want_rstd, 1e-5)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_definition_and_gradient_of_each_norm(rng, norm, weighted, shifted):
    """LightningDiT: RMSNorm(x) · weight · (1 + scale) + shift, and all that may be otherwise or
    absent."""
    x, shift, scale, dy = make(rng, (2, 3, 5))
    weight, shift = 1 + rng.standard_normal(5) / 2 if weighted else None, shift if shifted else None

    def f(x=x, shift=shift, scale=scale, weight=weight):
        return A.adaln_forward_reference(x, shift, scale, 1e-3, weight, norm)

    y, mean, rstd = f()
    centred = x - x.mean(2, keepdims=True) if norm == "layer" else x
    want = centred / np.sqrt((centred**2).mean(2, keepdims=True) + 1e-3) * (1 + scale[:, None])
    want = want * (weight if weighted else 1) + (shift[:, None] if shifted else 0)
    np.testing.assert_allclose(y, want, rtol=1e-10, atol=1e-12)
    assert (mean is None) == (norm == "rms")

    before = rng.standard_normal(5)
    dweight = before.copy() if weighted else None  # not zero: the weight's gradient is added
    dx, dshift, dscale = A.adaln_backward_reference(
        dy, x, scale, mean, rstd, weight, dweight, shifted
    )
    assert relative_error(dx, numerical_gradient(lambda a: f(x=a)[0], x, dy)) < 1e-7
    assert relative_error(dscale, numerical_gradient(lambda a: f(scale=a)[0], scale, dy)) < 1e-7
    if shifted:
        assert relative_error(dshift, numerical_gradient(lambda a: f(shift=a)[0], shift, dy)) < 1e-7
    else:
        assert dshift is None
    if weighted:
        assert (
            relative_error(
                dweight - before, numerical_gradient(lambda a: f(weight=a)[0], weight, dy)
            )
            < 1e-7
        )


def test_wrong_arguments_say_so(engine):
    x, v = engine(np.ones((2, 3, 6), np.float32)), engine(np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        A.adaln_forward(x, v, engine(np.ones(6, np.float32)))
    with pytest.raises(ValueError, match="reshape an image"):
        A.adaln_forward(engine(np.ones((2, 3, 3, 6), np.float32)), v, v)
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            A.adaln_forward(x, v, v, version=2)
    with pytest.raises(ValueError, match="norm must be layer or rms, not 'batch'"):
        A.adaln_forward(x, v, v, norm="batch")
    with pytest.raises(ValueError, match=r"weight must be \(6,\)"):
        A.adaln_forward(x, v, v, weight=v)


@pytest.mark.parametrize("norm", [Norm(True, True, True), Norm(True, True, False)], ids=str)
def test_sums_of_a_weighted_norm_in_two_passes(engine, rng, monkeypatch, norm):
    """Two chunks of an image's tokens, which else takes a thousand of them."""
    cut = A.cut
    monkeypatch.setattr(A, "cut", lambda B, T, C, width: (*cut(B, T, C, width)[:2], -(-T // 2), 2))
    x, _, scale, dy = make(rng, (2, 5, 8))
    weight, start = 1 + rng.standard_normal((2, 8)) / 2
    _, _, rstd = A.adaln_forward(x, None, scale, weight=weight, norm="rms")
    dweight, got = start.copy(), engine(start)
    want = A.adaln_backward(dy, x, scale, None, rstd, weight, dweight, norm.shifted)
    found = A.adaln_backward(
        *map(engine, (dy, x, scale)), None, engine(rstd), engine(weight), got, norm.shifted
    )
    for one, expected in zip((*found, got), (*want, dweight), strict=True):
        if expected is None:
            assert one is None
        else:
            engine.check(one, expected)
