import numpy as np

from numdiff.kernels import linear as L
from tests.conftest import numerical_gradient, relative_error, shapes

# (leading axes of x), N, K
SHAPES = shapes(minimal=((1,), 4, 4), odd=((2, 3), 5, 7), one_group=((64,), 64, 64), not_aligned=((3, 43), 27, 66),
                large=((2, 16, 16), 192, 128))


def make(rng, shape):
    leading, N, K = shape
    return (rng.standard_normal((*leading, K)), rng.standard_normal((N, K)), rng.standard_normal(N),
            rng.standard_normal((*leading, N)))


def test_reference_against_loops(rng):
    x, w, bias, _ = make(rng, ((2, 3), 4, 5))
    y = L.linear_forward_reference(x, w, bias)
    for i, j, n in np.ndindex(2, 3, 4):
        assert abs(y[i, j, n] - (sum(x[i, j, k] * w[n, k] for k in range(5)) + bias[n])) < 1e-12


def test_gradient(rng):
    x, w, bias, dy = make(rng, ((2, 3), 4, 5))
    dw, db = np.ones_like(w), np.ones_like(bias)
    dx = L.linear_backward(dy, x, w, dw, db)
    assert relative_error(dx, numerical_gradient(lambda v: L.linear_forward(v, w, bias), x, dy)) < 1e-7
    assert relative_error(dw - 1, numerical_gradient(lambda v: L.linear_forward(x, v, bias), w, dy)) < 1e-7
    assert relative_error(db - 1, numerical_gradient(lambda v: L.linear_forward(x, w, v), bias, dy)) < 1e-7


@SHAPES
def test_linear(engine, rng, shape):
    x, w, bias, dy = make(rng, shape)
    engine.check(L.linear_forward(engine(x), engine(w), engine(bias)), L.linear_forward(x, w, bias), 2e-6)
    engine.check(L.linear_forward(engine(x), engine(w)), L.linear_forward(x, w), 2e-6)
    start_w, start_b = rng.standard_normal(w.shape), rng.standard_normal(bias.shape)
    want_w, want_b = start_w.copy(), start_b.copy()
    want_x = L.linear_backward(dy, x, w, want_w, want_b)
    runs = []
    for _ in range(2):
        dw, db = engine(start_w), engine(start_b)
        runs.append((L.linear_backward(engine(dy), engine(x), engine(w), dw, db), dw, db))
    for first, second, want in zip(*runs, (want_x, want_w, want_b), strict=True):
        engine.check(first, want, 3e-6)  # the parameters' gradients are added to what was there
        engine.check_equal(first, second)


def test_dx_and_bias_are_optional(engine, rng):
    x, w, _, dy = make(rng, ((3,), 4, 8))
    dw = engine.zeros(w.shape)
    assert L.linear_backward(engine(dy), engine(x), engine(w), dw, None, need_dx=False) is None
    engine.check(dw, dy.T @ x, 2e-6)
