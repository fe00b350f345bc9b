import numpy as np
import pytest

from numdiff.kernels.optimizer import ema as E
from tests.conftest import versions


def scalars(engine, step, norm=1.0):
    return engine(np.array([step], np.uint32)), engine(np.array([norm]))


@pytest.mark.parametrize("step", [0, 80, 1_000_000])
@pytest.mark.parametrize("warmup", [True, False])
def test_reference_by_hand(rng, step, warmup):
    ema, weight = rng.standard_normal((2, 37))
    decay = min(0.99, (1 + step) / (10 + step)) if warmup else 0.99
    wanted = decay * ema + (1 - decay) * weight
    E.ema_update(ema, weight, np.array([step], np.uint32), np.ones(1), 0.99, warmup)
    np.testing.assert_allclose(ema, wanted, rtol=1e-12)


def test_a_slow_average_still_moves(engine):
    """1 - 0.9999 is made in float64: in float32 it would be off by 2e-4 of itself."""
    ema = engine(np.zeros(4))
    E.ema_update(ema, engine(np.ones(4)), *scalars(engine, 10**6), 0.9999)
    engine.check(ema, np.full(4, 1e-4), 1e-6)


@versions(1, 2)
@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_nothing_changes_when_the_norm_is_not_finite(engine, rng, version, norm):
    old = rng.standard_normal(8).astype(np.float32)
    ema = engine(old)
    E.ema_update(ema, engine(np.ones(8)), *scalars(engine, 0, norm), 0.9, version=version)
    engine.check_equal(ema, old)


def test_bad_input_says_so(engine):
    with pytest.raises(ValueError, match="one length"):
        E.ema_update(engine(np.zeros(4)), engine(np.zeros(5)), *scalars(engine, 0), 0.9)
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            E.ema_update(
                engine(np.zeros(5)), engine(np.zeros(5)), *scalars(engine, 0), 0.9, version=2
            )
