import numpy as np
import pytest

from numdiff.kernels.transformer import gate as G
from tests.conftest import numerical_gradient, relative_error


def make(rng, shape):
    return (*rng.standard_normal((3, *shape)), rng.standard_normal((shape[0], shape[-1])))


def test_reference_against_loops(rng):
    x, h, _, gate = make(rng, (2, 3, 4))
    y = G.gate_forward_reference(x, h, gate)
    for b, t, c in np.ndindex(x.shape):
        assert abs(y[b, t, c] - (x[b, t, c] + gate[b, c] * h[b, t, c])) < 1e-14


def test_gradient(rng):
    x, h, dy, gate = make(rng, (2, 3, 4))
    dh, dgate = G.gate_backward_reference(dy, h, gate)
    f = G.gate_forward_reference
    assert relative_error(dh, numerical_gradient(lambda a: f(x, a, gate), h, dy)) < 1e-7
    assert relative_error(dgate, numerical_gradient(lambda a: f(x, h, a), gate, dy)) < 1e-7


def test_wrong_arguments_say_so(engine):
    x, g = engine(np.ones((2, 3, 6), np.float32)), engine(np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        G.gate_forward(x, x, engine(np.ones(6, np.float32)))
    with pytest.raises(ValueError, match=r"h must have shape \(2, 4, 6\)"):
        G.gate_forward(engine(np.ones((2, 4, 6), np.float32)), x, g)
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            G.gate_backward(x, x, g, version=2)
