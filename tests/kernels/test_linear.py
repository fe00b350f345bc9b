import numpy as np
import pytest

from numdiff.kernels.elementwise import gelu_backward, gelu_forward
from numdiff.kernels.linear import layer as L
from numdiff.kernels.matmul import choice
from numdiff.kernels.transformer.swiglu import swiglu_backward_reference, swiglu_forward_reference
from numdiff.nn import functional as F
from numdiff.nn.parameter import Parameter
from numdiff.nn.tensor import Tape, Tensor
from tests.conftest import where


def make(rng, shape):
    leading, N, K = shape
    return (
        rng.standard_normal((*leading, K)),
        rng.standard_normal((N, K)),
        rng.standard_normal(N),
        rng.standard_normal((*leading, N)),
    )


def test_dx_is_added_to_what_came_before(engine, rng):
    x, w, _, dy = make(rng, ((2, 3), 4, 8))
    before = rng.standard_normal(x.shape)
    for dtype, tolerance in ((np.float32, 2e-6), (np.float16, 2e-3)):
        if engine.name == "ptx" and dtype == np.float16:
            continue  # compiled in tests/kernels/matmul/test_half.py
        arrays = [engine(v, dtype) for v in (dy, x, w, before)]
        dx = L.linear_backward(*arrays[:3], engine.zeros(w.shape), None, residual=arrays[3])
        assert dx.dtype == dtype
        engine.check(dx, dy @ w + before, tolerance)


def kept_shapes(tape):
    """The shapes of the activations that the records of a tape hold."""
    held = {
        id(a): a
        for record in tape.records
        for cell in record.backward.__closure__
        if hasattr(a := cell.cell_contents, "nbytes")
    }
    return [tuple(a.shape) for a in held.values()]


@pytest.mark.parametrize("name, keeps", [("gelu", True), ("gelu", False), ("swiglu", True)])
@where(lambda engine, keeps: keeps or engine != "cpu")
def test_mlp(engine, rng, name, keeps, monkeypatch):
    """Two layers and the activation between them, in float16: on rung 6 it is part of both
    products; GELU's result is kept, or made again."""
    monkeypatch.setattr("numdiff.nn.functional.feed_forward.GELU_KEPT", 768 if keeps else 8)
    if engine.name == "ptx":
        return  # compiled in tests/kernels/matmul/test_half.py
    if engine.name == "emulator":
        monkeypatch.setattr(choice, "choose_half", lambda *_, **more: ((128, 64), 1, 0.0))
    fused, parts, function, width, activation, gradient = {
        "gelu": ("mlp", "bias_gelu", F.mlp, 24, gelu_forward, gelu_backward),
        "swiglu": (
            "swiglu_mlp",
            "swiglu",
            F.swiglu_mlp,
            48,
            swiglu_forward_reference,
            swiglu_backward_reference,
        ),
    }[name]
    x, dy, before = (rng.standard_normal((2, 5, n)).astype(np.float16) for n in (16, 8, 16))
    arrays = [rng.standard_normal(shape) / 4 for shape in ((width, 16), (width,), (8, 24), (8,))]
    parameters = []
    for array in arrays:
        p = Parameter(array.shape, None)
        p.data, p.grad, p.half = engine(array), engine.zeros(array.shape), engine(array, np.float16)
        parameters.append(p)
    leaf = Tensor(engine(x), requires_grad=True)
    with Tape() as tape:
        y = function(leaf, *parameters)
    leaf.slot.gradient = engine(before)  # what another consumer has left there
    names = [record.name for record in tape.records]
    hopper = engine.name != "cpu" and engine.backend.capability[0] == 9
    assert names == ([fused] if hopper else ["linear", parts, "linear"])
    # what the tape keeps: x, and of the hidden layer what comes before GELU, and after it
    if names == ["mlp"]:
        assert sorted(kept_shapes(tape)) == [(2, 5, 16), *[(2, 5, 24)] * (1 + keeps)]
    tape.backward(y, engine(dy))

    w, b, w2, b2 = (a.astype(np.float16).astype(np.float64) if a.ndim > 1 else a for a in arrays)
    rows, dy = x.reshape(-1, 16).astype(np.float64), dy.reshape(-1, 8).astype(np.float64)
    u = rows @ w.T + b
    h, du = activation(u), gradient(dy @ w2, u)
    engine.check(y.data, (h @ w2.T + b2).reshape(2, 5, 8), 2e-3)
    engine.check(leaf.grad, (du @ w).reshape(x.shape) + before, 2e-3)
    for p, want in zip(parameters, (du.T @ rows, du.sum(0), dy.T @ h, dy.sum(0)), strict=True):
        engine.check(p.grad, want, 2e-3)


@pytest.mark.parametrize(
    "given", [("residual", "gelu_of"), ("residual", "swiglu_of"), ("gelu_of", "swiglu_of")]
)
def test_one_thing_is_done_with_dx(given):
    x = np.ones((2, 2))
    with pytest.raises(ValueError, match="one can be given"):
        L.linear_backward(x, x, x, x, **dict.fromkeys(given, x))


def test_dx_and_bias_are_optional(engine, rng):
    x, w, _, dy = make(rng, ((3,), 4, 8))
    dw = engine.zeros(w.shape)
    assert L.linear_backward(engine(dy), engine(x), engine(w), dw, None, need_dx=False) is None
    engine.check(dw, dy.T @ x, 2e-6)
