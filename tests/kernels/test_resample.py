import numpy as np
import pytest

from numdiff.kernels import resample as R
from tests.conftest import numerical_gradient, relative_error, shapes, versions, where

SHAPES = shapes(minimal=(1, 2, 2, 4), odd=(2, 6, 10, 3), aligned=(2, 8, 8, 64), large=(4, 34, 30, 128))
USABLE = where(lambda version, shape: shape[-1] % (1, 1, 4, 8)[version or 0] == 0)
OPERATIONS = pytest.mark.parametrize("name", ["avgpool", "upsample"])


@SHAPES
@versions(1, 2, 3)
@OPERATIONS
@USABLE
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_forward(engine, rng, shape, version, name):
    forward = getattr(R, f"{name}_forward")
    x = rng.standard_normal(shape)
    y = forward(engine(x), version=version)
    engine.check(y, forward(x), 1e-6)
    engine.check_equal(y, forward(engine(x), version=version))


@SHAPES
@versions(1, 2, 3)
@OPERATIONS
@USABLE
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_backward(engine, rng, shape, version, name):
    backward = getattr(R, f"{name}_backward")
    dy = rng.standard_normal(shape)  # even in height and width, as upsample's backward needs
    dx = backward(engine(dy), version=version)
    engine.check(dx, backward(dy), 1e-6)
    engine.check_equal(dx, backward(engine(dy), version=version))


@SHAPES
@versions(1, 2, 3)
@USABLE
def test_avgpools_backward_adds_a_residual(engine, rng, shape, version):
    B, H, W, C = shape
    dy, residual = rng.standard_normal(shape), rng.standard_normal((B, 2 * H, 2 * W, C))
    dx = R.avgpool_backward(engine(dy), version=version, residual=engine(residual))
    engine.check(dx, R.avgpool_backward(dy) + residual, 1e-6)
    engine.check_equal(dx, R.avgpool_backward(engine(dy), version=version, residual=engine(residual)))


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
