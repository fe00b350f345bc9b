import math

import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels.optimizer import step_state as S


def one(engine, value, dtype=np.float32):
    return engine(np.array([value], dtype))


@pytest.mark.parametrize("cosine", [False, True], ids=["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("step", [0, 4, 9, 10, 11, 55, 99, 100, 250])
def test_learning_rate(engine, step, warmup, cosine):
    if step < warmup:
        wanted = 2e-3 * (step + 1) / warmup
    elif cosine:
        wanted = 2e-3 * (1 + math.cos(math.pi * min(1, (step - warmup) / (100 - warmup)))) / 2
    else:
        wanted = 2e-3
    rate = one(engine, np.nan)
    S.learning_rate_forward(one(engine, step, np.uint32), rate, 2e-3, warmup, 100, cosine)
    engine.check(rate, np.array([wanted]), 1e-6)


def test_cosine_ends_in_zero_exactly(engine):
    rate = one(engine, 1)
    S.learning_rate_forward(one(engine, 100, np.uint32), rate, 1.0, 10, 100, True)
    assert not engine.computes or download(rate)[0] == 0


def test_advance(engine):
    step = one(engine, 41, np.uint32)
    S.step_advance(step)
    S.step_advance(step)
    engine.check_equal(step, np.array([43], np.uint32))


def test_next_row(engine, rng):
    table = rng.integers(0, 2**32, (3, 70)).astype(np.uint32)
    on_engine, step, row = engine(table), one(engine, 1, np.uint32), engine(np.zeros(70, np.uint32))
    for wanted in (1, 2):
        S.next_row(on_engine, step, row)
        engine.check_equal(row, table[wanted])
        engine.check_equal(step, np.array([wanted + 1], np.uint32))
    with pytest.raises(ValueError, match="must be uint32"):
        S.next_row(on_engine, step, engine(np.zeros(3, np.uint32)))


@pytest.mark.parametrize("loss, norm", [(np.nan, 1.0), (1.0, np.inf), (-np.inf, np.nan)])
def test_latch(engine, loss, norm):
    first = one(engine, -1, np.int32)

    def after(step, loss, norm):
        gradient_norm = one(engine, norm)
        S.latch_nonfinite(first, one(engine, loss), gradient_norm, one(engine, step, np.uint32))
        return download(gradient_norm)[0], download(first)[0]

    good, broken, later = after(4, 0.5, 2.0), after(5, loss, norm), after(6, 0.5, 2.0)
    if engine.computes:
        assert good == (2.0, -1)
        assert np.isnan(broken[0]) and broken[1] == 5
        assert np.isnan(later[0]) and later[1] == 5  # and stays, though all is finite again
