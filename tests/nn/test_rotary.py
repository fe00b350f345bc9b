import math

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.errors import UsageError
from numdiff.nn import functional as F
from numdiff.nn.parameter import Parameter
from numdiff.nn.rotary import rotation_table
from numdiff.nn.tensor import Tape, Tensor
from tests.conftest import numerical_gradient, relative_error


@pytest.mark.parametrize("head_size, grid", [(8, 3), (72, 2), (12, 4)])
def test_angles_of_rows_then_columns_in_pairs(head_size, grid):
    table, half = rotation_table(head_size, grid), head_size // 2
    assert table.shape == (2, grid * grid, head_size) and table.dtype == np.float32
    for token, c in np.ndindex(table.shape[1:]):
        place = (token // grid, token % grid)[c // half]
        angle = place * 10000.0 ** (-(c % half // 2 * 2) / half)
        assert abs(table[0, token, c] - math.cos(angle)) < 1e-7
        assert abs(table[1, token, c] - math.sin(angle)) < 1e-7


def test_products_depend_on_the_distance_alone(rng):
    """What a rotary embedding is for: q·k of two tokens one row and two columns apart is the same
    wherever they are."""
    q, k = rng.standard_normal((2, 8))
    tokens = np.concatenate([np.tile(a, (16, 1)) for a in (q, k, q)], 1)[None]  # of a 4 × 4 grid
    y = F.qk_norm_rope(Tensor(tokens), 1, rotation=rotation_table(8, 4).astype(np.float64)).data[0]
    products = y[:, :8] @ y[:, 8:16].T
    found = [products[4 * r + c, 4 * r + 4 + c + 2] for r in range(3) for c in range(2)]
    np.testing.assert_allclose(found, found[0], rtol=1e-5)
    assert abs(found[0] - q @ k) > 1e-3


@pytest.mark.parametrize("head_size", [2, 6, 70])
def test_a_head_that_does_not_divide_is_refused(head_size):
    with pytest.raises(UsageError, match="multiple of 4"):
        rotation_table(head_size, 4)


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_of_a_swiglu_mlp(rng, monkeypatch, biases, fused):
    """fused: as where SwiGLU is part of the products, on Hopper in float16."""
    monkeypatch.setattr(K, "linear_swiglu_supports", lambda *_: fused)
    shapes = {"x": (2, 3, 4), "w12": (10, 4), "b12": (10,), "w3": (6, 5), "b3": (6,)}
    given = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    dy = rng.standard_normal((2, 3, 6))

    def by_hand(x, w12, b12, w3, b3):
        a, b = np.split(x @ w12.T + b12 * biases, 2, axis=-1)
        return (a / (1 + np.exp(-a)) * b) @ w3.T + b3 * biases

    leaf, parameters = Tensor(given["x"], requires_grad=True), {}
    for name in list(shapes)[1:]:
        p = parameters[name] = Parameter(shapes[name], None)
        p.data, p.grad = given[name], np.zeros(shapes[name])
        if name[0] == "b" and not biases:
            parameters[name] = None
    with Tape() as tape:
        y = F.swiglu_mlp(leaf, **parameters)
    np.testing.assert_allclose(y.data, by_hand(**given), rtol=1e-12)
    tape.backward(y, dy)
    for name, found in (
        ("x", leaf.grad),
        *((name, p.grad) for name, p in parameters.items() if p is not None),
    ):
        want = numerical_gradient(
            lambda a, name=name: by_hand(**{**given, name: a}), given[name], dy
        )
        assert relative_error(found, want) < 1e-7, name
