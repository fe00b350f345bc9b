import math

import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels import random as R
from numdiff.kernels.diffusion import levels as L
from tests.conftest import quick, where

SEED = 0x123456789ABCDEF0
DRAWS = {
    "uniform": (L.draw_of(), L.aim_of(L.LINEAR, "flow")),
    "shifted": (L.draw_of(shift=3.0), L.aim_of(L.LINEAR, "flow", scale=1000.0)),
    "logit-normal": (L.draw_of(True, 0.8, 0.8), L.aim_of(L.LINEAR, "x_0", "flow")),
    "edm": (L.draw_of(True, -1.2, 1.2), L.aim_of(L.EDM, "edm")),
    "edm as eps": (L.draw_of(True), L.aim_of(L.EDM, "edm", "eps", sigma_data=1.5)),
    "min-snr": (L.draw_of(), L.aim_of(L.LINEAR, "eps", L.MIN_SNR, gamma=5.0)),
    "min-snr of x_0": (L.draw_of(True), L.aim_of(L.EDM, "x_0", L.MIN_SNR, gamma=0.5)),
    "v": (L.draw_of(), L.aim_of(L.LINEAR, "v", "x_0")),
}


def counters(engine, count, step=7):
    samples = np.arange(count, dtype=np.uint32)[::-1].copy() * np.uint32(3)
    return engine(np.array([step], np.uint32)), engine(samples)


@pytest.mark.parametrize("count", [1, 5, 301])
@pytest.mark.parametrize("name", DRAWS)
@quick(lambda engine, count: engine != "emulator" or count < 301)
def test_engine_is_the_reference(engine, count, name):
    step, samples = counters(engine, count)
    got, rows = L.levels_forward(SEED, R.PURPOSE_TIMESTEP, step, samples, *DRAWS[name])
    wanted, wanted_rows = L.levels_forward_reference(
        SEED, R.PURPOSE_TIMESTEP, download(step), download(samples), *DRAWS[name]
    )
    assert got.shape == (6, count) and got.dtype == np.float32 and rows.dtype == np.int32
    engine.check(got, wanted, 5e-6)
    engine.check_equal(rows, wanted_rows)
    engine.check_equal(
        got, L.levels_forward(SEED, R.PURPOSE_TIMESTEP, step, samples, *DRAWS[name])[0]
    )


def drawn(draw, aim):
    step, samples = np.array([3], np.uint32), np.arange(100_000, dtype=np.uint32)
    return L.levels_forward(SEED, R.PURPOSE_TIMESTEP, step, samples, draw, aim)[0].astype(
        np.float64
    )


def test_t_is_uniform_inside_0_and_1():
    a, t, seen = drawn(*DRAWS["uniform"])[:3]
    assert (
        0 < t.min() and t.max() < 1 and np.abs(a + t - 1).max() < 1e-7 and np.array_equal(seen, t)
    )
    # Kolmogorov, 0.1 %
    assert np.abs(np.sort(t) - (np.arange(len(t)) + 0.5) / len(t)).max() < 1.95 / math.sqrt(len(t))


def test_the_shift_is_its_formula_and_the_scale_is_of_what_the_model_sees():
    plain, (_, t, seen) = drawn(*DRAWS["uniform"])[1], drawn(*DRAWS["shifted"])[:3]
    np.testing.assert_allclose(t, 3 * plain / (1 + 2 * plain), rtol=1e-6)
    np.testing.assert_allclose(seen, 1000 * t, rtol=1e-6)


@pytest.mark.parametrize("name, mean, std", [("logit-normal", 0.8, 0.8), ("edm", -1.2, 1.2)])
def test_log_sigma_is_normal(name, mean, std):
    a, s = drawn(*DRAWS[name])[:2]
    u = np.log(s / a)
    assert abs(u.mean() - mean) < 4 * std / math.sqrt(len(u)) and u.std() == pytest.approx(
        std, rel=0.01
    )
    assert np.abs((np.abs(u - mean) < std).mean() - 0.6827) < 0.006


def test_edm_is_its_table():
    """Karras et al. 2022, table 1: c_skip, c_out, c_in, c_noise; λ(σ) = 1 / c_out² makes the loss a
    plain one of F."""
    a, s, seen, p, q, k = drawn(*DRAWS["edm"])
    sigma, data = s / a, 0.5
    np.testing.assert_allclose(a, 1 / np.sqrt(sigma**2 + data**2), rtol=1e-5)
    np.testing.assert_allclose(seen, np.log(sigma) / 4, atol=1e-6)
    c_skip, c_out = data**2 / (sigma**2 + data**2), sigma * data / np.sqrt(sigma**2 + data**2)
    x_0, eps = 0.3, -1.7
    np.testing.assert_allclose(
        p * x_0 + q * eps, (x_0 - c_skip * (x_0 + sigma * eps)) / c_out, rtol=2e-5, atol=2e-5
    )
    assert (k == 1).all()


SIGMAS = np.geomspace(0.01, 100, 25)


@pytest.mark.parametrize("path", [L.LINEAR, L.EDM])
@pytest.mark.parametrize("prediction", L.PREDICTIONS)
@pytest.mark.parametrize("loss", L.PREDICTIONS)
@where(lambda path, prediction, loss: path == L.EDM or "edm" not in (prediction, loss))
def test_weights_are_those_of_the_errors(path, prediction, loss):
    """An answer that is off by 1 is an x_0 that is off, and with x_t as it is another answer of the
    loss's kind."""
    a, s, _, p, q, k = L.numbers_reference(np.log(SIGMAS), L.aim_of(path, prediction, loss))
    p, q = L.target_reference(prediction, a, s)
    of_loss = L.target_reference(loss, a, s)
    # δx_0 from a · δx_0 + s · δeps = 0 and p · δx_0 + q · δeps = 1
    d_x_0, d_eps = np.linalg.solve(
        np.stack([np.stack([a, s], -1), np.stack([p, q], -1)], 1),
        np.broadcast_to([[0.0], [1.0]], (len(a), 2, 1)),
    )[..., 0].T
    wanted = np.abs(of_loss[0] * d_x_0 + of_loss[1] * d_eps)
    turn = np.abs(L.turn_reference(prediction, a, s))
    # float32 has another 0.05
    np.testing.assert_allclose(k, wanted * turn / np.maximum(turn, 0.05), rtol=1e-6)


def test_jit_is_a_pair():
    """x_0 under the flow's loss: 1 / t, t from below at 0.05 (JiT)."""
    _, t, *_, k = L.numbers_reference(np.log(SIGMAS), L.aim_of(L.LINEAR, "x_0", "flow"))
    np.testing.assert_allclose(k, 1 / np.maximum(t, 0.05), rtol=1e-6)


@pytest.mark.parametrize(
    "prediction, weight",
    [
        ("eps", lambda snr, g: np.minimum(snr, g) / snr),
        ("x_0", np.minimum),
        ("v", lambda snr, g: np.minimum(snr, g) / (snr + 1)),
    ],
)
def test_min_snr_weights_are_the_papers(prediction, weight):
    """Hang et al. 2023, section 3.4, for a path that keeps the variance."""
    a, s = 1 / np.sqrt(1 + SIGMAS**2), SIGMAS / np.sqrt(1 + SIGMAS**2)
    k = L.weight_reference(L.aim_of(L.LINEAR, prediction, L.MIN_SNR, gamma=5.0), a, s)
    np.testing.assert_allclose(k**2, weight(1 / SIGMAS**2, 5.0), rtol=1e-12)


def test_levels_far_out_are_finite():
    for path in L.PATHS:
        for prediction in L.PREDICTIONS:
            for loss in (*L.PREDICTIONS, L.PLAIN, L.MIN_SNR):
                numbers = L.numbers_reference(
                    np.array([-32.0, 32.0]), L.aim_of(path, prediction, loss, gamma=5.0)
                )
                assert np.isfinite(numbers.astype(np.float32)).all()


def test_bad_input_says_so(engine):
    step, samples = counters(engine, 3)
    with pytest.raises(ValueError, match="step must be one uint32"):
        L.levels_forward(SEED, 2, samples, samples, *DRAWS["uniform"])


def test_cost():
    assert L.levels_forward_cost(10)[0] == 320
