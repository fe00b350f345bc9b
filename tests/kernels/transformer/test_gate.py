import numpy as np
import pytest

from numdiff.kernels.transformer import gate as G


def test_wrong_arguments_say_so(engine):
    x, g = engine(np.ones((2, 3, 6), np.float32)), engine(np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        G.gate_forward(x, x, engine(np.ones(6, np.float32)))
    with pytest.raises(ValueError, match=r"h must have shape \(2, 4, 6\)"):
        G.gate_forward(engine(np.ones((2, 4, 6), np.float32)), x, g)
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            G.gate_backward(x, x, g, version=2)
