"""Power-function averages: one update, and the whole profile in closed form."""

import math

import numpy as np
import pytest

from numdiff.device import download
from numdiff.errors import UsageError
from numdiff.extras.post_hoc_ema import power_ema as E
from tests.conftest import shapes, versions

SHAPES = shapes(minimal=(4,), odd=(37,), not_aligned=(1021,), large=(100_000,))
WIDTHS = (0.05, 0.1, 0.25)


def scalars(engine, t, norm=1.0):
    return engine(np.array([t], np.uint32)), engine(np.array([norm]))


def update(engine, ema, weight, t, norm=1.0, version=None):
    E.power_ema_update(
        ema,
        weight,
        *scalars(engine, t, norm),
        engine(E.exponents_of(WIDTHS[: len(ema)])),
        version=version,
    )


@SHAPES
@pytest.mark.parametrize("t", [1, 2, 80, 1_000_000])
def test_update(engine, rng, shape, t):
    """In float64, where (1 - 1/t)^(γ + 1) may be taken at its word."""
    old, weight = (
        rng.standard_normal((3, *shape)).astype(np.float32),
        rng.standard_normal(shape).astype(np.float32),
    )
    beta = np.array([(1 - 1 / t) ** (E.gamma_of(std) + 1) for std in WIDTHS]).reshape(3, 1)
    wanted = old + (1 - beta) * (weight - old.astype(np.float64))
    results = []
    for _ in range(2):
        ema = engine(old)
        update(engine, ema, engine(weight), t)
        engine.check(ema, wanted, 1e-6)
        results.append(ema)
    engine.check_equal(*results)


def test_late_in_training_it_still_moves(engine):
    """1 - β of update 10⁶ is 1e-5 or less: as 1 minus a float32 power it would be off by a
    hundredth."""
    ema = engine(np.zeros((3, 4)))
    update(engine, ema, engine(np.ones(4)), 10**6)
    wanted = [[-math.expm1((E.gamma_of(std) + 1) * math.log1p(-1e-6))] * 4 for std in WIDTHS]
    engine.check(ema, np.array(wanted), 1e-6)


def test_many_updates_give_the_profile_in_closed_form(engine, rng):
    """Σ_s (s^(γ+1) - (s - 1)^(γ+1)) / t^(γ+1) · weight_s; a step function's integral under the
    profile is exact."""
    steps = 12
    weights = rng.standard_normal((steps, 8)).astype(np.float32)
    ema = engine(rng.standard_normal((3, 8)))  # whatever it held: the first update replaces it
    for t in range(1, steps + 1):
        update(engine, ema, engine(weights[t - 1]), t)
    s = np.arange(steps + 1.0)
    for k, std in enumerate(WIDTHS):
        shares = np.diff(s ** (E.gamma_of(std) + 1)) / steps ** (E.gamma_of(std) + 1)
        assert shares.sum() == pytest.approx(1, abs=1e-12)
        if engine.computes:
            engine.check(download(ema)[k], shares @ weights, 2e-6)


@versions(1, 2)
@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_nothing_changes_when_the_norm_is_not_finite(engine, rng, version, norm):
    old = rng.standard_normal((2, 8)).astype(np.float32)
    ema = engine(old)
    update(engine, ema, engine(np.ones(8)), 3, norm, version)
    engine.check_equal(ema, old)


def test_widths_and_exponents():
    """σ_rel of a profile (γ + 1)·t^γ on [0, 1] by quadrature, and back; the paper's 0.05 and 0.10
    (its section 3.1)."""
    t = (np.arange(200_000) + 0.5) / 200_000
    for std in (0.005, 0.05, 0.1, 0.28):
        gamma = E.gamma_of(std)
        p = (gamma + 1) * t**gamma / len(t)
        mean = (p * t).sum()
        assert math.sqrt((p * (t - mean) ** 2).sum()) == pytest.approx(std, rel=1e-4)
        assert E.std_of(gamma) == pytest.approx(std, rel=1e-9)
    assert E.gamma_of(0.05) == pytest.approx(16.97, abs=0.01) and E.gamma_of(0.1) == pytest.approx(
        6.94, abs=0.01
    )
    assert E.exponents_of((0.1, 0.05)).dtype == np.float32 and len(E.exponents_of(())) == 0


@pytest.mark.parametrize(
    "stds, message",
    [
        ((0.3,), "from 0.005 to 0.28, and not 0.3"),
        ((0.0,), "and not 0"),
        ((0.1, float("nan")), "and not nan"),
        ((0.1, 0.05, 0.1), "ema_std 0.1,0.05,0.1 has the width 0.1 twice"),
    ],
)
def test_what_is_no_width_is_refused(stds, message):
    with pytest.raises(UsageError, match=message):
        E.exponents_of(stds)


def test_bad_input_says_so(engine):
    with pytest.raises(ValueError, match="a row like weight"):
        update(engine, engine(np.zeros((2, 4))), engine(np.zeros(5)), 1)
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            update(engine, engine(np.zeros((2, 5))), engine(np.zeros(5)), 1, version=2)


def test_cost():
    assert E.power_ema_update_cost(20, 2) == (200, 60)
