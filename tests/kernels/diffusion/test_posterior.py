import math

import numpy as np
import pytest

from numdiff.kernels.diffusion import posterior as P
from tests.conftest import numerical_gradient, relative_error


def test_references_against_loops(rng):
    moments, noise = rng.standard_normal((3, 5, 8)), rng.standard_normal((3, 5, 4))
    z, kl = np.empty_like(noise), 0.0
    for b, t, c in np.ndindex(noise.shape):
        mean, logvar = moments[b, t, c], moments[b, t, 4 + c]
        z[b, t, c] = mean + math.exp(logvar / 2) * noise[b, t, c]
        kl += 0.5 * (mean**2 + math.exp(logvar) - 1 - logvar)
    assert relative_error(P.posterior_sample_forward(moments, noise), z) < 1e-14
    assert relative_error(P.posterior_kl_forward(moments, 0.5), [kl / 2]) < 1e-14


def test_gradients(rng):
    moments, noise = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3, 2))
    dz = rng.standard_normal(noise.shape)
    numerical = numerical_gradient(
        lambda m: P.posterior_sample_forward_reference(m, noise), moments, dz
    )
    assert relative_error(P.posterior_sample_backward(dz, moments, noise), numerical) < 1e-7
    numerical = numerical_gradient(lambda m: P.posterior_kl_forward_reference(m, 0.5), moments, 1.0)
    assert relative_error(P.posterior_kl_backward(moments, 0.5), numerical) < 1e-7


def test_the_log_variance_is_limited(engine):
    """Beyond the limits the value is that of the limit, and no gradient arrives."""
    moments = np.array([[1.0, 1.0, -40.0, 30.0]], np.float32)
    noise = np.ones((1, 2), np.float32)
    sample = P.posterior_sample_forward(engine(moments), engine(noise))
    engine.check(sample, 1 + np.exp(np.array([[-15.0, 10.0]], np.float32)), 1e-6)
    gradient = P.posterior_sample_backward(engine(noise), engine(moments), engine(noise))
    engine.check(gradient, np.array([[1, 1, 0, 0]], np.float32), 0)
    engine.check(P.posterior_kl_backward(engine(moments)), np.array([[1, 1, 0, 0]], np.float32), 0)


def test_other_shapes_are_refused(engine):
    with pytest.raises(
        ValueError, match="a mean and a log variance for each channel of the latents"
    ):
        P.posterior_sample_forward(engine(np.zeros((2, 4))), engine(np.zeros((2, 4))))
    with pytest.raises(ValueError, match="a mean and a log variance"):
        P.posterior_kl_forward(engine(np.zeros((2, 3))))
