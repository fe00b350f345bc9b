import numpy as np
import pytest

from numdiff.kernels.conv2d import im2col as M
from tests.conftest import quick, shapes, versions, where

SHAPES = shapes(
    minimal=(1, 1, 1, 4, 3, 1),
    odd=(2, 3, 5, 3, 3, 1),
    strided=(2, 5, 4, 8, 3, 2),
    pointwise=(2, 4, 4, 4, 1, 2),
    wide=(1, 7, 6, 5, 5, 3),
    large=(4, 32, 32, 64, 3, 1),
)  # B, H, W, C, kernel, stride
USABLE = where(lambda version, shape: version != 2 or shape[3] % 4 == 0)


def loops(x, kernel, stride):
    """The definition, written as loops: what is outside the image is zero."""
    b, h, w, c = x.shape
    ho, wo = (h - 1) // stride + 1, (w - 1) // stride + 1
    col = np.zeros((b, ho, wo, kernel, kernel, c))
    for i, j, r, s in np.ndindex(ho, wo, kernel, kernel):
        row, column = i * stride + r - kernel // 2, j * stride + s - kernel // 2
        if 0 <= row < h and 0 <= column < w:
            col[:, i, j, r, s] = x[:, row, column]
    return col


@SHAPES
@versions(1, 2)
@USABLE
@quick(lambda engine, version: engine != "emulator" or version)
def test_forward(engine, rng, shape, version):
    *size, kernel, stride = shape
    x = rng.standard_normal(size).astype(np.float32)
    engine.check(
        M.im2col_forward(engine(x), kernel, stride, version=version),
        M.im2col_forward(x, kernel, stride),
        0,
    )


@SHAPES
@versions(1, 2)
@USABLE
@quick(
    lambda engine, version, shape: engine != "emulator" or version == 2 or version and shape[3] > 3
)
def test_backward(engine, rng, shape, version):
    *size, kernel, stride = shape
    dcol = rng.standard_normal(M.im2col_forward(np.zeros(size), kernel, stride).shape)
    dx = M.im2col_backward(engine(dcol), size, kernel, stride, version=version)
    engine.check(dx, M.im2col_backward(dcol, size, kernel, stride), 1e-6)
    engine.check_equal(dx, M.im2col_backward(engine(dcol), size, kernel, stride, version=version))


def test_version_that_does_not_fit_says_so(engine):
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            M.im2col_forward(engine(np.ones((1, 2, 2, 3))), 3, version=2)
