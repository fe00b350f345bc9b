import numpy as np
import pytest

from numdiff.kernels.transformer import gate as G
from tests.conftest import numerical_gradient, relative_error, shapes, versions, where

SHAPES = shapes(minimal=(1, 1), odd=(2, 5, 12), not_aligned=(4, 9, 33), image=(3, 7, 9, 64), large=(2, 1100, 64),
                wide=(2, 25, 516))
USABLE = where(lambda version, shape: version != 2 or shape[-1] % 4 == 0)


def make(rng, shape):
    return (*rng.standard_normal((3, *shape)), rng.standard_normal((shape[0], shape[-1])))


@SHAPES
@versions(1, 2)
@USABLE
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_forward(engine, rng, shape, version):
    x, h, _, gate = make(rng, shape)
    runs = [G.gate_forward(engine(x), engine(h), engine(gate), version=version) for _ in range(engine.repeats)]
    engine.check(runs[0], G.gate_forward(x, h, gate), 1e-6, G.gate_forward(*map(np.abs, (x, h, gate))))
    engine.check_equal(runs[0], runs[-1])


@SHAPES
@versions(1, 2)
@USABLE
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_backward(engine, rng, shape, version):
    _, h, dy, gate = make(rng, shape)
    runs = [G.gate_backward(engine(dy), engine(h), engine(gate), version=version) for _ in range(engine.repeats)]
    for got, again, want in zip(runs[0], runs[-1], G.gate_backward(dy, h, gate), strict=True):
        engine.check(got, want, 2e-6)
        engine.check_equal(got, again)


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
