import numpy as np
import pytest

from numdiff.kernels import scale_shift as S
from tests.conftest import numerical_gradient, relative_error


def make(rng, shape):
    B, C = shape[0], shape[-1]
    return (
        rng.standard_normal(shape),
        rng.standard_normal((B, C)),
        rng.standard_normal((B, C)),
        1 + rng.standard_normal(shape),
    )


def test_reference_against_loops(rng):
    x, scale, shift, _ = make(rng, (2, 3, 2, 4))
    y = S.scale_shift_forward_reference(x, scale, shift)
    for b, h, w, c in np.ndindex(x.shape):
        assert abs(y[b, h, w, c] - (x[b, h, w, c] * (1 + scale[b, c]) + shift[b, c])) < 1e-14


def test_gradient(rng):
    x, scale, shift, dy = make(rng, (2, 3, 4))
    dx, dscale, dshift = S.scale_shift_backward_reference(dy, x, scale)
    f = S.scale_shift_forward_reference
    assert relative_error(dx, numerical_gradient(lambda a: f(a, scale, shift), x, dy)) < 1e-7
    assert relative_error(dscale, numerical_gradient(lambda a: f(x, a, shift), scale, dy)) < 1e-7
    assert relative_error(dshift, numerical_gradient(lambda a: f(x, scale, a), shift, dy)) < 1e-7


def test_wrong_arguments_say_so(engine):
    x, s = engine(np.ones((2, 3, 6), np.float32)), engine(np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        S.scale_shift_forward(x, s, engine(np.ones((6,), np.float32)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            S.scale_shift_forward(x, s, s, version=2)
