import numpy as np
import pytest

from numdiff.kernels.transformer import bias_gelu as BG
from tests.conftest import relative_error


def make(rng, shape):
    # not where the gradient is all rounding
    x, bias = rng.uniform(-2, 4, shape), rng.uniform(-0.5, 0.5, shape[-1])
    return x, bias, rng.standard_normal(shape)


@pytest.mark.parametrize("spread", [2, 30])  # the second: where the sigmoid is 0 or 1
def test_the_cpu_engines_loops(rng, spread):
    x, bias, dy = (a.astype(np.float32) for a in make(rng, (3, 5, 33)))
    x *= spread
    wide, dbias, want = (
        [a.astype(np.float64) for a in (dy, x, bias)],
        np.ones(33, np.float32),
        np.ones(33),
    )
    assert (
        relative_error(BG.bias_gelu_forward(x, bias), BG.bias_gelu_forward_reference(*wide[1:]))
        < 1e-6
    )
    dx = BG.bias_gelu_backward(dy, x, bias, dbias)
    assert relative_error(dx, BG.bias_gelu_backward_reference(*wide, want)) < 1e-6
    assert relative_error(dbias, want) < 1e-6 and dx.dtype == dbias.dtype == np.float32


def test_wrong_arguments_say_so(engine):
    x, b = engine(np.ones((2, 6), np.float32)), engine(np.ones(6, np.float32))
    with pytest.raises(ValueError, match="must have shape"):
        BG.bias_gelu_forward(x, engine(np.ones(3, np.float32)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            BG.bias_gelu_backward(x, x, b, b, version=2)
