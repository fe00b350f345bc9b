import math

import numpy as np
import pytest

from numdiff.kernels import softmax as S
from tests.conftest import numerical_gradient, relative_error, versions


def test_reference_against_loops(rng):
    x = rng.standard_normal((2, 5))
    y = S.softmax_forward_reference(x, 0.7)
    for row, want in zip(x, y, strict=True):
        e = [math.exp(0.7 * v) for v in row]
        assert np.allclose(np.array(e) / sum(e), want, rtol=1e-14)


def test_gradient(rng):
    x, dy = rng.standard_normal((3, 5)), rng.standard_normal((3, 5))
    got = S.softmax_backward_reference(dy, S.softmax_forward_reference(x, 0.7), 0.7)
    assert (
        relative_error(
            got, numerical_gradient(lambda v: S.softmax_forward_reference(v, 0.7), x, dy)
        )
        < 1e-7
    )


@versions(1, 2, 3)
def test_in_place(engine, rng, version):
    x, dy = rng.standard_normal((4, 8)), rng.standard_normal((4, 8))
    want = S.softmax_forward(x)
    y = engine(x)
    assert S.softmax_forward(y, out=y, version=version) is y
    engine.check(y, want, 1e-6)
    dx = engine(dy)
    assert S.softmax_backward(dx, engine(want), 0.5, out=dx, version=version) is dx
    engine.check(dx, S.softmax_backward(dy, want, 0.5), 2e-6)


@versions(1, 2, 3)
def test_large_numbers_do_not_overflow(engine, version):
    x = np.array([[1000.0, 999.0, -1000.0, 1000.0]])
    engine.check(S.softmax_forward(engine(x), version=version), S.softmax_forward(x), 1e-6)


def test_version_that_does_not_fit_says_so(engine):
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=2"):
            S.softmax_forward(engine(np.ones((2, 5))), version=3)
