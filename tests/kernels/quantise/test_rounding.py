"""Rounding to E4M3 with delayed scales, and weights in both orientations."""

import numpy as np
import pytest

from numdiff.device import download
from numdiff.float8 import LARGEST, bits_of, numbers_of
from numdiff.kernels.quantise import rounding as Q
from tests.conftest import on, quick, shapes


@shapes(minimal=(1, 16), odd=(7, 3, 48), large=(512, 1152))
def test_rounding(engine, rng, shape):
    x = (rng.standard_normal(shape) * 100).astype(np.float16)
    x.reshape(-1)[:4] = np.inf, -np.inf, np.nan, 6e-8
    scale, amax = np.float32([0.125]), np.zeros(Q.PARTIALS, np.uint32)
    amax = engine(amax)
    results = [Q.quantise_forward(engine(x), engine(scale), amax) for _ in range(engine.repeats)]
    with np.errstate(invalid="ignore"):
        want = np.where(np.isfinite(x), bits_of(x.astype(np.float32) / scale), 0x7F)
    if engine.computes:
        got = download(results[0])
        np.testing.assert_array_equal(got, want)
        assert np.isnan(download(amax).max().view(np.float32))  # whose lower bits a card sets, too
        assert np.isnan(numbers_of(got).reshape(-1)[:3]).all()
    engine.check_equal(results[0], results[-1])


def test_scales_follow_the_largest_of_some_steps(engine):
    """A scale leaves room for twice the largest; a step of zeros, or with an overflow, gives no
    information."""
    amax, history = (
        engine(np.zeros((2, Q.PARTIALS), np.uint32)),
        engine(np.zeros((2, Q.HISTORY), np.float32)),
    )
    scale, one = engine(np.ones(2, np.float32)), engine(np.ones(1, np.float32))
    if not engine.computes:
        Q.scale_update(amax, history, scale)
        return
    steps = [0, 30, np.inf, *[7] * Q.HISTORY]
    for step, largest in enumerate(steps[:4] if engine.name == "emulator" else steps):
        x = np.zeros((1, 16), np.float16)
        x[0, 3] = -largest
        Q.quantise_forward(engine(x), one, amax.reshape(-1)[: Q.PARTIALS])
        Q.scale_update(amax, history, scale)
        want = 1 if step == 0 else 0.25 if step < 1 + Q.HISTORY else 2.0**-5
        assert download(scale).tolist() == [want, 1], step
        assert not download(amax).any()
        assert largest * Q.MARGIN / want <= LARGEST or largest == np.inf
    assert download(history)[0, :2].tolist() == [7, 0 if engine.name == "emulator" else 7]
    assert not download(history)[1].any()


@pytest.mark.parametrize(
    "places", [[(0, 16, 16)], [(64, 80, 144), (64 + 80 * 144, 64, 64)]], ids=str
)
@quick(lambda engine, places: engine != "emulator" or len(places) == 1)
def test_weights_both_ways(engine, rng, places):
    size = places[-1][0] + places[-1][1] * places[-1][2]
    flat = rng.standard_normal(size).astype(np.float16)
    flat_on, scale = engine(flat), engine(np.zeros(len(places), np.float32))
    matrices, at = Q.matrices8(places, flat_on), 0
    rows, columns = (
        engine(np.zeros(matrices.total, np.uint8)),
        engine(np.zeros(matrices.total, np.uint8)),
    )
    assert matrices.total == sum(N * K for _, N, K in places)
    Q.quantise_weights(flat_on, matrices, rows, columns, scale)
    if not engine.computes:
        return
    for i, (first, N, K) in enumerate(places):
        w, unit = flat[first : first + N * K].reshape(N, K).astype(np.float32), download(scale)[i]
        assert LARGEST / 2 < np.abs(w).max() / unit <= LARGEST and np.log2(unit) % 1 == 0
        np.testing.assert_array_equal(
            download(rows)[at : at + N * K], bits_of(w / unit).reshape(-1)
        )
        np.testing.assert_array_equal(
            download(columns)[at : at + N * K], bits_of(w.T / unit).reshape(-1)
        )
        at += N * K


@on("cpu")
def test_what_is_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        Q.matrices8([(0, 24, 16)], None)


@on("cpu")
def test_powers_of_two():
    x = np.float32([1, 1.0000001, 0.75, 2.0**-20, 3e-9])
    np.testing.assert_array_equal(Q.power_of_two(x), [1, 2, 1, 2.0**-20, 2.0**-28])
