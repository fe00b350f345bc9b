import numpy as np
import pytest

from numdiff.kernels.diffusion import mse as M
from tests.conftest import relative_error


@pytest.mark.parametrize("extra", [0, 3], ids=["same_channels", "more_channels"])
def test_reference_against_loops(rng, extra):
    prediction, target = rng.standard_normal((3, 5, 7 + extra)), rng.standard_normal((3, 5, 7))
    total, gradient = 0.0, np.zeros_like(prediction)
    for c in range(7):
        difference = prediction[..., c] - target[..., c]
        total += np.sum(difference**2)
        gradient[..., c] = 0.25 * 2 * difference / target.size
    assert relative_error(M.mse_forward(prediction, target), [total / target.size]) < 1e-14
    assert relative_error(M.mse_backward(prediction, target, 0.25), gradient) < 1e-14


def test_reference_leaves_its_inputs_alone(rng):
    prediction, target = (
        rng.standard_normal((2, 3)).astype(np.float32),
        np.zeros((2, 3), np.float32),
    )
    before = prediction.copy()
    loss = M.mse_forward(prediction, target)
    assert np.array_equal(prediction, before) and loss.dtype == np.float32 and loss.shape == (1,)


def test_bad_input_says_so(engine):
    with pytest.raises(ValueError, match="more channels"):
        M.mse_forward(engine(np.zeros((2, 3))), engine(np.zeros((2, 4))))
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            M.mse_backward(engine(np.zeros((2, 4))), engine(np.zeros((2, 3))), version=2)
