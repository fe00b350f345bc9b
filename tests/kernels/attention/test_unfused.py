import numpy as np
import pytest

from numdiff.kernels.attention import unfused as A
from tests.conftest import numerical_gradient, relative_error, shapes

# (B, T, heads, HS)
SHAPES = shapes(
    minimal=(1, 4, 1, 4),
    odd=(1, 3, 2, 5),
    one_group=(2, 64, 1, 32),
    not_aligned=(2, 49, 3, 20),
    large=(2, 256, 3, 64),
)
ORDERS = pytest.mark.parametrize("order", ["legacy", "new"])


def make(rng, shape):
    B, T, heads, HS = shape
    return (
        rng.standard_normal((B, T, 3 * heads * HS)),
        rng.standard_normal((B, T, heads * HS)),
        heads,
    )


def head_by_head(qkv, heads, order):
    """Attention with every head's channels picked out one by one."""
    B, T, width = qkv.shape
    C, HS = width // 3, width // 3 // heads
    y, p = np.empty((B, T, C)), np.empty((B, heads, T, T))
    for b, h in np.ndindex(B, heads):
        first = [(3 * h + i) * HS if order == "legacy" else i * C + h * HS for i in range(3)]
        q, k, v = (qkv[b][:, f : f + HS] for f in first)
        e = np.exp(q @ k.T / np.sqrt(HS))
        p[b, h] = e / e.sum(axis=1, keepdims=True)
        y[b][:, h * HS : (h + 1) * HS] = p[b, h] @ v
    return y, p


@ORDERS
def test_reference_head_by_head(rng, order):
    qkv, _, heads = make(rng, (2, 5, 3, 4))
    for got, want in zip(
        A.attention_forward(qkv, heads, order), head_by_head(qkv, heads, order), strict=True
    ):
        assert relative_error(got, want) < 1e-13


@ORDERS
def test_gradient(rng, order):
    qkv, dy, heads = make(rng, (2, 3, 2, 4))
    _, p = A.attention_forward(qkv, heads, order)
    got = A.attention_backward(dy, qkv, p, heads, order)
    want = numerical_gradient(lambda v: A.attention_forward(v, heads, order)[0], qkv, dy)
    assert relative_error(got, want) < 1e-7


def test_errors_say_what_to_do(engine):
    with pytest.raises(ValueError, match="multiple of heads"):
        A.attention_forward(engine(np.ones((1, 4, 12))), 3)
    with pytest.raises(ValueError, match="use 'legacy' or 'new'"):
        A.attention_forward(engine(np.ones((1, 4, 12))), 2, "old")
