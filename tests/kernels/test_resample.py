import numpy as np
import pytest

from numdiff.kernels import resample as R
from tests.conftest import numerical_gradient, relative_error

OPERATIONS = pytest.mark.parametrize("name", ["avgpool", "upsample"])


def test_a_residual_of_another_shape_says_so(engine):
    with pytest.raises(ValueError, match="like the result"):
        R.avgpool_backward(engine(np.ones((1, 2, 2, 4))), residual=engine(np.ones((1, 2, 2, 4))))


def test_closed_form():
    x = np.arange(16.0).reshape(1, 4, 4, 1)
    assert R.avgpool_forward(x).ravel().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert R.upsample_forward(x[:, :1, :2])[0, :, :, 0].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]


@OPERATIONS
def test_gradient(rng, name):
    forward, backward = getattr(R, f"{name}_forward"), getattr(R, f"{name}_backward")
    x = rng.standard_normal((2, 4, 2, 3))
    dy = rng.standard_normal(forward(x).shape)
    assert relative_error(backward(dy), numerical_gradient(forward, x, dy)) < 1e-8


def test_an_image_that_cannot_be_halved_says_so(engine):
    with pytest.raises(ValueError, match="even"):
        R.avgpool_forward(engine(np.ones((1, 3, 4, 4))))


def test_version_that_does_not_fit_says_so(engine):
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            R.upsample_forward(engine(np.ones((1, 2, 2, 3))), version=2)
