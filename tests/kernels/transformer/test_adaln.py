import numpy as np
import pytest

from numdiff.kernels.row_norm import NORMS, Norm
from numdiff.kernels.transformer import adaln as A
from tests.conftest import apart, numerical_gradient, quick, relative_error, shapes, versions, where

USABLE = where(lambda version, shape: version != 2 or shape[-1] % 4 == 0)


def make(rng, shape):
    B, _, C = shape
    return (3 + 2 * apart(rng, shape), *rng.standard_normal((2, B, C)), rng.standard_normal(shape))


def sizes(x, shift, scale, dy, rstd, weight=1.0):
    """Of y and dx, before what they add up may cancel, as it may in all of three channels."""
    factor = (1 + np.abs(scale[:, None])) * np.abs(weight) * np.ones_like(x)
    return (
        factor if shift is None else factor + np.abs(shift[:, None]),
        factor * np.abs(dy) * rstd.reshape(*x.shape[:-1], 1),
    )


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


def test_reference_against_the_definition(rng):
    x, shift, scale, _ = make(rng, (2, 3, 7))
    y, mean, rstd = A.adaln_forward_reference(x, shift, scale, eps=1e-3)
    for i, (b, t) in enumerate(np.ndindex(2, 3)):
        row = x[b, t]
        xhat = (row - row.mean()) / np.sqrt(row.var() + 1e-3)
        np.testing.assert_allclose(
            y[b, t], xhat * (1 + scale[b]) + shift[b], rtol=1e-10, atol=1e-12
        )
        np.testing.assert_allclose(
            [mean[i], rstd[i]], [row.mean(), 1 / np.sqrt(row.var() + 1e-3)], rtol=1e-12
        )


def test_gradient(rng):
    x, shift, scale, dy = make(rng, (2, 3, 5))
    f = A.adaln_forward_reference
    dx, dshift, dscale = A.adaln_backward_reference(dy, x, scale, *f(x, shift, scale)[1:])
    assert relative_error(dx, numerical_gradient(lambda a: f(a, shift, scale)[0], x, dy)) < 1e-7
    assert relative_error(dshift, numerical_gradient(lambda a: f(x, a, scale)[0], shift, dy)) < 1e-7
    assert relative_error(dscale, numerical_gradient(lambda a: f(x, shift, a)[0], scale, dy)) < 1e-7


@shapes(
    minimal=(1, 1, 3),
    odd=(2, 3, 12),
    not_aligned=(2, 5, 33),
    wide=(2, 7, 1152),
    large=(2, 700, 192),
)
@versions(1, 2)
@USABLE
@pytest.mark.parametrize("norm", NORMS[1:], ids=str)
# test_compile_logs.py has the others
@where(lambda engine, norm: engine != "ptx" or str(norm) == "rms weighted")
@quick(
    lambda engine, norm, shape, version: (
        engine != "emulator" or shape[-1] == 3 or version == 2 and (norm.rms == norm.weighted)
    )
)
@quick(lambda engine, norm, shape: engine != "launch" or norm.rms == norm.weighted)
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_other_norms(engine, rng, shape, version, norm):
    """RMSNorm, a weight and no shift, in all combinations, forward and backward."""
    x, shift, scale, dy = make(rng, shape)
    shift, weight = (
        shift if norm.shifted else None,
        1 + rng.standard_normal(shape[-1]) / 2 if norm.weighted else None,
    )
    options = {"norm": norm.kind}
    want = A.adaln_forward(x, shift, scale, weight=weight, **options)
    start = rng.standard_normal(shape[-1])
    dweight = start.copy() if norm.weighted else None
    want_back = A.adaln_backward(dy, x, scale, *want[1:], weight, dweight, norm.shifted)

    on_engine = [a if a is None else engine(a) for a in (x, shift, scale, weight)]
    runs = []
    for _ in range(engine.repeats):
        got = A.adaln_forward(*on_engine[:3], weight=on_engine[3], **options, version=version)
        sums = engine(start) if norm.weighted else None  # not zero: the weight's gradient is added
        back = A.adaln_backward(
            engine(dy),
            on_engine[0],
            on_engine[2],
            *(a if a is None else engine(a) for a in want[1:]),
            on_engine[3],
            sums,
            norm.shifted,
            version=version,
        )
        runs.append((*got, *back, sums))
    of_y, of_dx = sizes(x, shift, scale, dy, want[2], 1.0 if weight is None else weight)
    of_dweight = np.abs(start) + ((1 + np.abs(scale[:, None])) * np.abs(dy)).sum((0, 1))
    size = of_y, None, None, of_dx, None, None, of_dweight
    for got, again, expected, scale in zip(
        runs[0], runs[-1], (*want, *want_back, dweight), size, strict=True
    ):
        if expected is None:
            assert got is None
            continue
        engine.check(got, expected, 1e-5, scale)
        engine.check_equal(got, again)


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
