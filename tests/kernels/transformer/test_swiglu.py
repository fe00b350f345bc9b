import math

import numpy as np
import pytest

from numdiff.kernels.transformer import swiglu as S
from tests.conftest import numerical_gradient, relative_error


def make(rng, shape):
    """x and dy."""
    return 2 * rng.standard_normal(shape), rng.standard_normal((*shape[:-1], shape[-1] // 2))


def test_gates_far_from_zero(engine):
    """e^-a is no float32 below -88: the gate is shut there, without a warning, and open on the
    other side."""
    x = np.array([[-1e4, -100, 100, 1e4, 2, 3, 4, 5]], np.float32)
    engine.check(S.swiglu_forward(engine(x)), [[0, 0, 400, 5e4]])
    engine.check(
        S.swiglu_backward(engine(np.ones((1, 4), np.float32)), engine(x)),
        [[0, 0, 4, 5, 0, 0, 100, 1e4]],
    )


def test_reference_against_the_formula(rng):
    x, _ = make(rng, (3, 10))
    y = S.swiglu_forward_reference(x)
    for r, c in np.ndindex(y.shape):
        assert math.isclose(
            y[r, c], x[r, c] / (1 + math.exp(-x[r, c])) * x[r, 5 + c], rel_tol=1e-12
        )


def test_gradient(rng):
    x, dy = make(rng, (4, 6))
    assert (
        relative_error(S.swiglu_backward(dy, x), numerical_gradient(S.swiglu_forward, x, dy)) < 1e-8
    )


def test_what_does_not_fit_is_refused(engine):
    with pytest.raises(ValueError, match="even number of channels, not 3"):
        S.swiglu_forward(engine(np.ones((2, 3), np.float32)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="6 is not a multiple of 8"):
            S.swiglu_backward(
                engine(np.ones((2, 6), np.float32)), engine(np.ones((2, 12), np.float32)), version=2
            )
