import numpy as np
import pytest

from numdiff.device import upload, zeros
from numdiff.device.planned import CARDS, collect
from numdiff.extras.layer_norm import layernorm as LN
from numdiff.kernels.operation.versions import at_most
from tests.conftest import apart, large, on, versions


def make(rng, shape, affine):
    C = shape[-1]
    x, dy, weight, bias = (
        3 + 2 * apart(rng, shape),
        rng.standard_normal(shape),
        *rng.standard_normal((2, C)),
    )
    return (x, dy, 1 + 0.5 * weight, bias) if affine else (x, dy, None, None)


@versions(1, 2)
def test_eps_counts_where_hardly_anything_varies(engine, rng, version):
    """A variance of a tenth of eps, which stands within the root."""
    x = 1e-3 * rng.standard_normal((3, 12))
    for got, expected in zip(
        LN.layernorm_forward(engine(x), version=version), LN.layernorm_forward(x), strict=True
    ):
        engine.check(got, expected, 1e-5)


@on("emulator", "cuda")
def test_many_rows_a_warp(engine, rng, monkeypatch):
    """Version 3's sums continue from row to row."""
    monkeypatch.setattr(LN, "GRID", 1)
    x, dy, weight, _ = make(rng, (2, 20, 8), True)
    _, mean, rstd = LN.layernorm_forward(x, weight, weight)
    want, got = [np.zeros(8), np.zeros(8)], [engine(np.zeros(8)), engine(np.zeros(8))]
    want += LN.layernorm_backward(dy, x, weight, mean, rstd, *want, images=2)
    got += LN.layernorm_backward(
        *map(engine, (dy, x, weight, mean, rstd)), *got, version="one-pass", images=2
    )
    size = np.abs(dy * weight * rstd.reshape(2, 20, 1))
    for a, b, scale in zip(
        got,
        want,
        (np.abs(dy * x).sum((0, 1)), np.abs(dy).sum((0, 1)), size, size.sum(1)),
        strict=True,
    ):
        engine.check(a, b, 1e-5, scale)


def test_the_choice_stays_below_a_ceiling():
    """…whatever the columns, and whether or not there is anything to add up."""

    def launched(C, ceiling, *sums):
        def run(device):
            x = upload(np.zeros((2, C), np.float32), device)
            rows, weight = zeros((2,), like=x), zeros((C,), like=x)
            with at_most({"layernorm_backward": ceiling}):
                LN.layernorm_backward(
                    x, x, weight, rows, rows, *(zeros((C,), like=x) for _ in sums)
                )

        (name,) = (
            key.name for key in collect(run, CARDS[1]) if key.name.startswith("layernorm_backward")
        )
        return name.removeprefix("layernorm_backward_kernel_")

    assert [
        launched(C, ceiling, *sums)
        for C, ceiling, sums in (
            (36, 3, "ab"),
            (36, 2, "ab"),
            (36, 1, "ab"),
            (36, 3, ""),
            (516, 3, "ab"),
            (516, 1, "ab"),
            (5, 3, "ab"),
        )
    ] == ["v3_1", "v2", "v1", "v2", "v2", "v1", "v1"]


def test_a_row_too_long_for_registers_says_so(engine):
    x, rows = engine(np.ones((2, 516))), engine(np.ones(2))
    if engine.has_versions:
        with pytest.raises(
            ValueError,
            match=r"version 3 \(one-pass\) of layernorm_backward takes a multiple of 4 "
            "columns up to 512, not 516; use version=2",
        ):
            LN.layernorm_backward(x, x, None, rows, rows, version=3)


@pytest.mark.parametrize(
    "wanted", [(False, False), (True, False), (False, True)], ids=["none", "weight", "bias"]
)
def test_only_the_wanted_gradients(engine, rng, wanted):
    x, dy, weight, bias = make(rng, (5, 12), True)
    _, mean, rstd = LN.layernorm_forward(x, weight, bias)
    want = [np.zeros(12), np.zeros(12)]
    dx = LN.layernorm_backward(dy, x, weight, mean, rstd, *want)
    sums = [engine.zeros(12) if w else None for w in wanted]
    got = LN.layernorm_backward(
        engine(dy), engine(x), engine(weight), engine(mean), engine(rstd), *sums
    )
    engine.check(got, dx, 1e-5)
    for a, b in zip(sums, want, strict=True):
        if a is not None:
            engine.check(a, b, 1e-5)


@large
@versions(1, 2)
def test_large_mean_keeps_its_digits(engine, rng, version):
    x = (1000 + rng.standard_normal((50, 256))).astype(np.float32)
    y, _, rstd = LN.layernorm_forward(engine(x), version=version)
    want, _, want_rstd = LN.layernorm_forward(x.astype(np.float64))
    engine.check(y, want, 2e-4)  # the mean itself is known to 1000 · 6e-8 only
    engine.check(rstd, want_rstd, 1e-5)


def test_wrong_arguments_say_so(engine):
    x, w = engine(np.ones((2, 6), np.float32)), engine(np.ones(6, np.float32))
    with pytest.raises(ValueError, match="together or neither"):
        LN.layernorm_forward(x, w)
    with pytest.raises(ValueError, match="must have shape"):
        LN.layernorm_forward(x, engine(np.ones(3, np.float32)), w)
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            LN.layernorm_forward(x, w, w, version=2)
