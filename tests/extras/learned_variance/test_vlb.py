import math

import numpy as np
import pytest

from numdiff.device import download
from numdiff.diffusion import Diffusion
from numdiff.extras.learned_variance import vlb as V
from tests.conftest import numerical_gradient, relative_error

WEIGHT = 1 / math.log(2)


def make(rng, shape, far=0.5):
    """A prediction some way off, pixels with many at the very edges, timesteps with the first among
    them."""
    tables = Diffusion(1000)._bound_tables()
    target, x_0 = rng.standard_normal(shape), np.clip(1.5 * rng.standard_normal(shape), -1, 1)
    prediction = np.concatenate(
        (target + far * rng.standard_normal(shape), rng.standard_normal(shape)), axis=-1
    )
    t = rng.integers(0, 1000, shape[0]).astype(np.int32)
    t[::2] = 0
    return prediction, target, x_0, t, *tables


def plain_term(error, v, x_0, t, k, low, width):
    """The bound's term of one number, from the definitions of a divergence and of a bin, with
    math's functions."""
    share, d = (v + 1) / 2, k[t] * error
    log_variance = share * (low[t] + width[t]) + (1 - share) * low[t]
    if t > 0:
        return 0.5 * (
            log_variance
            - low[t]
            - 1
            + math.exp(low[t] - log_variance)
            + d * d / math.exp(log_variance)
        )

    def cdf(z):
        return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    deviation = math.exp(log_variance / 2)
    below = 0.0 if x_0 < -0.999 else cdf((d - 1 / 255) / deviation)
    above = 1.0 if x_0 > 0.999 else cdf((d + 1 / 255) / deviation)
    return -math.log(max(above - below, 1e-12))


def test_reference_against_the_definition(rng):
    inputs = prediction, target, x_0, t, *tables = make(rng, (6, 2, 3), far=1.0)
    total = 0.0
    for b, p, c in np.ndindex(target.shape):
        error = prediction[b, p, c] - target[b, p, c]
        total += error**2 + WEIGHT * plain_term(
            error, prediction[b, p, 3 + c], x_0[b, p, c], t[b], *tables
        )
    got = V.hybrid_loss_forward_reference(*inputs, WEIGHT)
    assert got[0] == pytest.approx(total / target.size, rel=1e-6)


def test_gradient(rng):
    """Of v by differences; that of the means is the squared error's alone."""
    inputs = prediction, target, x_0, t, *tables = make(rng, (4, 2, 3))
    got = V.hybrid_loss_backward_reference(*inputs, WEIGHT)

    def loss(v):
        both = np.concatenate((prediction[..., :3], v), axis=-1)
        return V.hybrid_loss_forward_reference(both, target, x_0, t, *tables, WEIGHT)

    assert relative_error(got[..., 3:], numerical_gradient(loss, prediction[..., 3:], 1.0)) < 1e-6
    np.testing.assert_allclose(got[..., :3], 2 * (prediction[..., :3] - target) / target.size)


def test_the_true_posterior_costs_nothing():
    """No error and v = -1, the smallest variance: the divergence is zero and so is its gradient in
    the mean."""
    tables = Diffusion(100)._bound_tables()
    target = np.zeros((3, 4))
    prediction = np.concatenate((target, -np.ones((3, 4))), axis=-1)
    t = np.array([1, 50, 99], np.int32)
    loss = V.hybrid_loss_forward_reference(prediction, target, target, t, *tables, 1.0)
    assert loss[0] == pytest.approx(0, abs=1e-15)


def test_pixels_far_from_the_mean_stay_finite(engine, rng):
    inputs = make(rng, (4, 8), far=50.0)
    loss = V.hybrid_loss_forward(*map(engine, inputs), WEIGHT)
    gradient = V.hybrid_loss_backward(*map(engine, inputs), WEIGHT)
    assert np.isfinite(download(loss)).all() and np.isfinite(download(gradient)).all()


def test_wrong_arguments_say_so(engine):
    prediction, target, x_0, t, *tables = (
        engine(a) for a in make(np.random.default_rng(0), (2, 3, 3))
    )
    with pytest.raises(ValueError, match="twice its channels"):
        V.hybrid_loss_forward(target, target, x_0, t, *tables, 1.0)
    with pytest.raises(ValueError, match="t must be one int32"):
        V.hybrid_loss_forward(prediction, target, x_0, x_0, *tables, 1.0)
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            V.hybrid_loss_backward(prediction, target, x_0, t, *tables, 1.0, version=2)
