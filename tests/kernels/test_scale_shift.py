import numpy as np
import pytest

from numdiff.kernels import scale_shift as S


def test_wrong_arguments_say_so(engine):
    x, s = engine(np.ones((2, 3, 6), np.float32)), engine(np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        S.scale_shift_forward(x, s, engine(np.ones((6,), np.float32)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            S.scale_shift_forward(x, s, s, version=2)
