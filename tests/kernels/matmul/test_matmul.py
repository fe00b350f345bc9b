import numpy as np
import pytest

from numdiff.kernels import matmul as P
from numdiff.kernels.matmul import choice
from tests.conftest import numerical_gradient, relative_error

TRANSPOSES = pytest.mark.parametrize(
    "transposes",
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["nn", "nt", "tn", "tt"],
)


def operands(rng, shape, transposes=(False, False)):
    batch, M, N, K = shape
    a = rng.standard_normal((batch, K, M) if transposes[0] else (batch, M, K))
    b = rng.standard_normal((batch, N, K) if transposes[1] else (batch, K, N))
    return a, b


@TRANSPOSES
def test_reference_is_the_sum_of_products(rng, transposes):
    a, b = operands(rng, (2, 3, 4, 5), transposes)
    bias = rng.standard_normal(4)
    c = P.matmul_forward_reference(a, b, *transposes, bias=bias, alpha=0.5)
    for z, m, n in np.ndindex(c.shape):
        total = sum(
            (a[z, k, m] if transposes[0] else a[z, m, k])
            * (b[z, n, k] if transposes[1] else b[z, k, n])
            for k in range(5)
        )
        assert abs(c[z, m, n] - (0.5 * total + bias[n])) < 1e-12


@TRANSPOSES
def test_gradient(rng, transposes):
    a, b = operands(rng, (2, 3, 4, 5), transposes)
    dc = rng.standard_normal((2, 3, 4))
    da, db = P.matmul_backward(dc, a, b, *transposes, alpha=0.5)
    want_a = numerical_gradient(lambda v: P.matmul_forward(v, b, *transposes, alpha=0.5), a, dc)
    want_b = numerical_gradient(lambda v: P.matmul_forward(a, v, *transposes, alpha=0.5), b, dc)
    assert relative_error(da, want_a) < 1e-7
    assert relative_error(db, want_b) < 1e-7


def test_a_small_result_of_a_long_sum_is_split():
    tile, slices = choice.choose_tile(1, 64, 64, 131072, 132)
    assert slices >= 64
    assert choice.choose_tile(1, 4096, 4096, 4096, 132) == ((128, 128), 1)
    # the batch fills the GPU, and only one batch is summed
    assert choice.choose_tile(64, 64, 64, 4096, 132)[1] == 1
    length = choice.slice_of(131071, slices)
    assert (slices - 1) * length < 131071 <= slices * length


def test_errors_say_what_to_do(engine, rng):
    a, b = engine(np.ones((4, 5))), engine(np.ones((4, 6)))
    with pytest.raises(ValueError, match="check transpose_a"):
        P.matmul_forward(a, b)
    with pytest.raises(ValueError, match="pass out="):
        P.matmul_forward(a, b, transpose_a=True, accumulate=True)
    with pytest.raises(ValueError, match=r"bias has shape \(5,\)"):
        P.matmul_forward(a, b, transpose_a=True, bias=engine(np.ones(5)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=3"):
            P.matmul_forward(a, b, transpose_a=True, version=4)
        with pytest.raises(ValueError, match="no version 9"):
            P.matmul_forward(a, b, transpose_a=True, version=9)


def test_what_goes_with_an_activation_has_its_shape():
    a, b, bias = np.zeros((4, 8)), np.zeros((6, 8)), np.zeros(6)
    with pytest.raises(ValueError, match=r"a \(4, 8\) needs b \(8, 8\), not \(6, 8\) and u"):
        P.matmul_gelu_backward(a, b, np.zeros((4, 6)))
    with pytest.raises(ValueError, match=r"bias \(6,\), not \(5,\)"):
        P.matmul_swiglu_forward(a, b, bias[:5])
    P.matmul_swiglu_forward(a, b)  # without a bias
