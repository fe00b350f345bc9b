import numpy as np
import pytest

from numdiff.kernels import resample as R


def test_a_residual_of_another_shape_says_so(engine):
    with pytest.raises(ValueError, match="like the result"):
        R.avgpool_backward(engine(np.ones((1, 2, 2, 4))), residual=engine(np.ones((1, 2, 2, 4))))


def test_an_image_that_cannot_be_halved_says_so(engine):
    with pytest.raises(ValueError, match="even"):
        R.avgpool_forward(engine(np.ones((1, 3, 4, 4))))


def test_version_that_does_not_fit_says_so(engine):
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            R.upsample_forward(engine(np.ones((1, 2, 2, 3))), version=2)
