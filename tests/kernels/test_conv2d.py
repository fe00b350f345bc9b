import numpy as np
import pytest

from numdiff.kernels.conv2d import (
    conv2d_backward,
    conv2d_backward_reference,
    conv2d_forward,
    conv2d_forward_cost,
    conv2d_forward_reference,
)
from numdiff.kernels.conv2d_implicit import choose_parts
from tests.conftest import SIMULATED, numerical_gradient, relative_error, versions

CASES = {  # (B, H, W, C_in, C_out, kernel, stride)
    "minimal": (1, 3, 3, 1, 1, 3, 1), "odd": (2, 5, 3, 3, 5, 3, 2), "one_by_one": (2, 4, 5, 6, 7, 1, 1),
    "one_by_one_strided": (1, 5, 4, 4, 8, 1, 2), "five_by_five": (1, 6, 7, 4, 4, 5, 1),
    "input": (3, 16, 16, 3, 64, 3, 1), "output": (3, 16, 16, 64, 3, 3, 1), "aligned": (2, 16, 16, 64, 128, 3, 1),
    "not_aligned": (3, 7, 9, 20, 36, 3, 1), "tile_of_64": (2, 8, 8, 64, 192, 3, 1), "strided": (2, 9, 8, 32, 64, 3, 2),
    "long_sum": (2, 4, 4, 256, 64, 3, 1), "large": (5, 33, 31, 40, 100, 3, 1)}
SMALL = ("minimal", "odd", "one_by_one")
SHAPES = pytest.mark.parametrize("case", [c for n, c in CASES.items() if not SIMULATED or n in SMALL],
                                 ids=[n for n in CASES if not SIMULATED or n in SMALL])


def draw(rng, case):
    b, h, w, c, n, kernel, stride = case
    ho, wo = (h - 1) // stride + 1, (w - 1) // stride + 1
    return (rng.standard_normal((b, h, w, c)), rng.standard_normal((n, kernel, kernel, c)), rng.standard_normal(n),
            rng.standard_normal((b, ho, wo, n)))


def by_loops(x, weight, bias, stride):
    """The definition, written out."""
    n, kernel, pad = weight.shape[0], weight.shape[1], weight.shape[1] // 2
    b, h, w, _ = x.shape
    y = np.empty((b, (h - 1) // stride + 1, (w - 1) // stride + 1, n))
    for image, i, j, out in np.ndindex(*y.shape):
        y[image, i, j, out] = bias[out]
        for r, s in np.ndindex(kernel, kernel):
            row, column = i * stride + r - pad, j * stride + s - pad
            if 0 <= row < h and 0 <= column < w:
                y[image, i, j, out] += x[image, row, column] @ weight[out, r, s]
    return y


@pytest.mark.parametrize("case", [CASES[n] for n in ("minimal", "odd", "one_by_one", "one_by_one_strided", "five_by_five")])
def test_reference_against_loops_and_differences(rng, case):
    x, weight, bias, dy = draw(rng, case)
    stride = case[-1]
    assert relative_error(conv2d_forward_reference(x, weight, bias, stride), by_loops(x, weight, bias, stride)) < 1e-12
    dweight, dbias = np.ones_like(weight), np.ones_like(bias)
    dx = conv2d_backward_reference(dy, x, weight, dweight, dbias, stride)
    assert relative_error(dx, numerical_gradient(lambda v: conv2d_forward_reference(v, weight, bias, stride), x, dy)) < 1e-7
    numerical = numerical_gradient(lambda v: conv2d_forward_reference(x, v, bias, stride), weight, dy)
    assert relative_error(dweight - 1, numerical) < 1e-7
    assert relative_error(dbias - 1, dy.sum((0, 1, 2))) < 1e-12


@SHAPES
@versions(1, 2, 3)
def test_forward(engine, rng, case, version):
    x, weight, bias, _ = draw(rng, case)
    stride = case[-1]
    y = conv2d_forward(engine(x), engine(weight), engine(bias), stride, version=version)
    engine.check(y, conv2d_forward_reference(x, weight, bias, stride), 1e-5)
    engine.check_equal(y, conv2d_forward(engine(x), engine(weight), engine(bias), stride, version=version))
    engine.check(conv2d_forward(engine(x), engine(weight), None, stride, version=version),
                 conv2d_forward_reference(x, weight, None, stride), 1e-5)


@SHAPES
@versions(1, 2, 3)
def test_backward(engine, rng, case, version):
    x, weight, bias, dy = draw(rng, case)
    stride = case[-1]
    before_w, before_b = rng.standard_normal(weight.shape), rng.standard_normal(bias.shape)
    want_w, want_b = before_w.copy(), before_b.copy()
    want = conv2d_backward_reference(dy, x, weight, want_w, want_b, stride)

    def run():
        dweight, dbias = engine(before_w), engine(before_b)
        return conv2d_backward(engine(dy), engine(x), engine(weight), dweight, dbias, stride, version=version), dweight, dbias

    for got, again, expected in zip(run(), run(), (want, want_w, want_b), strict=True):
        engine.check(got, expected, 1e-5)
        engine.check_equal(got, again)
    assert conv2d_backward(engine(dy), engine(x), engine(weight), engine(before_w), None, stride, need_dx=False,
                           version=version) is None


def test_parts_cover_the_sum():
    for tiles, length in ((1, 1), (1, 1000), (7, 72), (300, 500), (3, 16384)):
        parts, part = choose_parts(tiles, 256, length, 8)
        assert (parts - 1) * part < length <= parts * part


def test_wrong_shapes_are_named(engine):
    x, weight = engine(np.zeros((1, 4, 4, 3))), engine(np.zeros((8, 3, 3, 4)))
    with pytest.raises(ValueError, match="3"):
        conv2d_forward(x, weight)


def test_cost():
    moved, flops = conv2d_forward_cost(32, 64, 64, 64, 64, 3)
    assert flops == 2 * 32 * 64 * 64 * 64 * 576
    assert moved == 4 * (2 * 32 * 64 * 64 * 64 + 64 * 576 + 64)
