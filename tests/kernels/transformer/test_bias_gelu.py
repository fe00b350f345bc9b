import numpy as np
import pytest

from numdiff.kernels.transformer import bias_gelu as BG


def test_wrong_arguments_say_so(engine):
    x, b = engine(np.ones((2, 6), np.float32)), engine(np.ones(6, np.float32))
    with pytest.raises(ValueError, match="must have shape"):
        BG.bias_gelu_forward(x, engine(np.ones(3, np.float32)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            BG.bias_gelu_backward(x, x, b, b, version=2)
