import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels.diffusion import l1 as L
from tests.conftest import numerical_gradient, relative_error


def test_reference_against_loops(rng):
    prediction, target = rng.standard_normal((3, 5, 7)), rng.standard_normal((3, 5, 7))
    prediction[0, 0, 0] = target[0, 0, 0]
    total = sum(abs(p - t) for p, t in zip(prediction.flat, target.flat, strict=True))
    gradient = [
        0.25 / target.size * (int(p > t) - int(p < t))
        for p, t in zip(prediction.flat, target.flat, strict=True)
    ]
    assert relative_error(L.l1_forward(prediction, target), [total / target.size]) < 1e-14
    assert (L.l1_backward(prediction, target, 0.25).ravel() == gradient).all()


def test_gradient(rng):
    prediction, target = rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 3, 5))
    numerical = numerical_gradient(lambda p: L.l1_forward_reference(p, target), prediction, 1.0)
    assert relative_error(L.l1_backward_reference(prediction, target), numerical) < 1e-7


def test_other_shapes_are_refused(engine):
    with pytest.raises(ValueError, match="must have the target's shape"):
        L.l1_forward(engine(np.zeros((2, 3))), engine(np.zeros((2, 4))))


def test_equal_values_and_nans(engine):
    prediction, target = (
        np.array([[1.0, 2.0, np.nan, 0.5]], np.float32),
        np.array([[1.0, 1.0, 1.0, 1.0]], np.float32),
    )
    dprediction = L.l1_backward(engine(prediction), engine(target))
    if engine.computes:
        assert np.array_equal(download(dprediction), [[0, 0.25, np.nan, -0.25]], equal_nan=True)
