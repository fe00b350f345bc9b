import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels.diffusion import mse as M
from tests.conftest import numerical_gradient, relative_error, shapes, versions, where

SHAPES = shapes(minimal=(1, 4), odd=(3, 5, 7), not_aligned=(2, 3, 3, 3), large=(5, 64, 65, 4))
USABLE = where(lambda version, shape, extra: version != 2 or not extra and np.prod(shape) % 4 == 0)


@SHAPES
@versions(1, 2)
@pytest.mark.parametrize("extra", [0, 3], ids=["same_channels", "more_channels"])
@USABLE
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_mse(engine, rng, shape, version, extra):
    prediction, target = rng.standard_normal((*shape[:-1], shape[-1] + extra)), rng.standard_normal(shape)
    p, x = engine(prediction), engine(target)
    loss, dp = M.mse_forward(p, x, version=version), M.mse_backward(p, x, 0.25, version=version)
    if shape[-1] < 8:  # by the plainest of loops
        total, gradient = 0.0, np.zeros_like(prediction)
        for c in range(shape[-1]):
            difference = prediction[..., c] - target[..., c]
            total += np.sum(difference ** 2)
            gradient[..., c] = 0.25 * 2 * difference / target.size
    size = np.abs(prediction[..., :shape[-1]]) + np.abs(target)
    engine.check(loss, np.array([total / target.size]), 1e-6, np.mean(size ** 2))
    engine.check(dp, gradient, 1e-6, 0.25 * 2 * size / target.size)
    engine.check_equal(loss, M.mse_forward(p, x, version=version))
    engine.check_equal(dp, M.mse_backward(p, x, 0.25, version=version))
    if engine.computes:
        assert not download(dp)[..., shape[-1]:].any()


def test_gradient(rng):
    prediction, target = rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 3, 3))
    numerical = numerical_gradient(lambda p: M.mse_forward_reference(p, target), prediction, 1.0)
    assert relative_error(M.mse_backward_reference(prediction, target), numerical) < 1e-7


def test_reference_leaves_its_inputs_alone(rng):
    prediction, target = rng.standard_normal((2, 3)).astype(np.float32), np.zeros((2, 3), np.float32)
    before = prediction.copy()
    loss = M.mse_forward(prediction, target)
    assert np.array_equal(prediction, before) and loss.dtype == np.float32 and loss.shape == (1,)


def test_bad_input_says_so(engine):
    with pytest.raises(ValueError, match="more channels"):
        M.mse_forward(engine(np.zeros((2, 3))), engine(np.zeros((2, 4))))
    with pytest.raises(ValueError, match="use version=1"):
        M.mse_backward(engine(np.zeros((2, 4))), engine(np.zeros((2, 3))), version=2)


def test_cost():
    assert M.mse_forward_cost(10) == (80, 30) and M.mse_backward_cost(10) == (120, 20)
