"""Every sampler against its own paper's formulas, in that paper's coordinates
(tests/reference/make_samplers.py)."""

import numpy as np
import pytest

from numdiff.diffusion import samplers
from tests.reference import stored
from tests.reference import stored_samplers as reference


class StoredEstimate:
    """A denoiser, with an answer that has a learned variance."""

    def __call__(self, x, sigma):
        return reference.estimate(x, sigma)

    def with_prediction(self, x, sigma):
        seen = x / np.sqrt(1 + sigma**2)
        return self(x, sigma), np.concatenate([seen, reference.fraction(seen)], -1)


@pytest.mark.parametrize("name", list(reference.CASES))
def test_six_steps(name):
    function, settings = reference.CASES[name]
    sample = getattr(samplers, function)
    got = sample(
        StoredEstimate(), reference.start(), list(reference.SIGMAS), reference.noise, **settings
    )
    with np.load(stored.FOLDER / "samplers.npz") as values:
        np.testing.assert_allclose(got, values[name], rtol=1e-9, atol=1e-10)


def test_no_sampler_is_left_out():
    assert {function.__name__ for function in samplers.SAMPLERS.values()} <= {
        f for f, _ in reference.CASES.values()
    }
