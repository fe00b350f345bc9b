import numpy as np
import pytest

from numdiff.kernels.transformer import swiglu as S


def test_gates_far_from_zero(engine):
    """e^-a is no float32 below -88: the gate is shut there, without a warning, and open on the
    other side."""
    x = np.array([[-1e4, -100, 100, 1e4, 2, 3, 4, 5]], np.float32)
    engine.check(S.swiglu_forward(engine(x)), [[0, 0, 400, 5e4]])
    engine.check(
        S.swiglu_backward(engine(np.ones((1, 4), np.float32)), engine(x)),
        [[0, 0, 4, 5, 0, 0, 100, 1e4]],
    )


def test_what_does_not_fit_is_refused(engine):
    with pytest.raises(ValueError, match="even number of channels, not 3"):
        S.swiglu_forward(engine(np.ones((2, 3), np.float32)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="6 is not a multiple of 8"):
            S.swiglu_backward(
                engine(np.ones((2, 6), np.float32)), engine(np.ones((2, 12), np.float32)), version=2
            )
