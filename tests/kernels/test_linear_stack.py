"""Layers at equal distances as one product; the kernels themselves are among the cases of `numdiff
kernels check`."""

import numpy as np
import pytest

from numdiff.device import get_backend, upload, zeros
from numdiff.kernels import matmul
from numdiff.kernels.linear import stack as S
from numdiff.kernels.matmul.product import Stacked, distance
from numdiff.kernels.operation.versions import at_most
from tests.conftest import needs

DEVICES = ["emulator", pytest.param("cuda", marks=needs("gpu"))]


def laid_out(backend, starts, shape, dtype):
    """Views of one array of zeros that start there."""
    size = int(np.prod(shape))
    flat = zeros(max(starts) + size, dtype, backend)
    return [flat[at : at + size].reshape(*shape) for at in starts]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_a_stack(device):
    backend = get_backend(device)
    x = zeros((2, 64), np.float16, backend)
    weights = laid_out(backend, (0, 8320, 16640), (128, 64), np.float16)
    biases = laid_out(backend, (64, 320, 576), (128,), np.float32)
    assert S.linear_stack_supports(x, weights, biases)
    assert distance(weights) == 16640 and Stacked(weights).gap == 128 and Stacked(biases).gap == 128
    assert not S.linear_stack_supports(x, weights[:1], biases[:1])  # one is a layer
    assert not S.linear_stack_supports(x, [weights[0], weights[2], weights[1]], biases)
    apart = laid_out(backend, (0, 8320, 16768), (128, 64), np.float16)
    assert not S.linear_stack_supports(x, apart, biases)
    assert not S.linear_stack_supports(x, weights[:2] + apart[2:], biases)
    assert not S.linear_stack_supports(
        x, laid_out(backend, (0, 8196, 16392), (128, 64), np.float16), biases
    )
    for shape in ((64, 64), (128, 32)):  # which tiles do not divide
        assert not S.linear_stack_supports(
            x, laid_out(backend, (0, 8320), shape, np.float16), biases[:2]
        )
    assert not S.linear_stack_supports(zeros((2, 64), np.float32, backend), weights, biases)
    assert not S.linear_stack_supports(np.zeros((2, 64), np.float16), weights, biases)
    with at_most({"matmul": "mma"}):
        assert not S.linear_stack_supports(x, weights, biases)


def test_against_single_layers(rng):
    """NumPy: three layers, of which the second adds to what its gradients hold."""
    x, dy = rng.standard_normal((5, 6)), rng.standard_normal((5, 12))
    weights, biases = [*rng.standard_normal((3, 4, 6))], [*rng.standard_normal((3, 4))]
    y = S.linear_stack_forward(x, [*zip(weights, biases, strict=True)])
    np.testing.assert_allclose(y, x @ np.concatenate(weights).T + np.concatenate(biases))
    gradients = [(np.ones((4, 6)), np.ones(4)) for _ in weights]
    dx = S.linear_stack_backward(dy, x, weights, gradients)
    np.testing.assert_allclose(dx, dy @ np.concatenate(weights))
    for part, (dweight, dbias) in zip(np.split(dy, 3, 1), gradients, strict=True):
        np.testing.assert_allclose(dweight, 1 + part.T @ x)
        np.testing.assert_allclose(dbias, 1 + part.sum(0))
    assert S.linear_stack_backward(dy, x, weights, gradients, False, need_dx=False) is None
    np.testing.assert_allclose(gradients[1][0], dy[:, 4:8].T @ x)


@pytest.mark.parametrize("device", DEVICES)
def test_the_bits_of_single_products(device, rng):
    """y and the weights' gradients; dx is rounded once, after the sum over the layers."""
    backend = get_backend(device)
    x, dy = (
        upload(rng.standard_normal(shape).astype(np.float16), backend)
        for shape in ((8, 64), (8, 256))
    )
    weights = laid_out(backend, (0, 8256), (128, 64), np.float16)
    biases = laid_out(backend, (0, 192), (128,), np.float32)
    for array in (*weights, *biases):
        backend.copy(upload(rng.standard_normal(array.shape).astype(array.dtype), backend), array)
    y = backend.download(S.linear_stack_forward(x, [*zip(weights, biases, strict=True)]))
    for part, weight, bias in zip(np.split(y, 2, 1), weights, biases, strict=True):
        one = matmul.matmul_forward(x, weight, transpose_b=True, bias=bias)
        np.testing.assert_array_equal(part, backend.download(one))


def test_costs():
    assert S.linear_stack_forward_cost(2, 3, 5) == (2 * (6 + 15 + 10) + 20, 60)
    assert S.linear_stack_backward_cost(2, 3, 5) == (4 * 16 + 30 + 24 + 120 + 40, 120)
    assert S.linear_stack_backward_cost(2, 3, 5, gradients=False) == (2 * 16 + 30 + 24, 60)
