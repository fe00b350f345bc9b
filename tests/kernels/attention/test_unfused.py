import numpy as np
import pytest

from numdiff.kernels.attention import unfused as A


def test_errors_say_what_to_do(engine):
    with pytest.raises(ValueError, match="multiple of heads"):
        A.attention_forward(engine(np.ones((1, 4, 12))), 3)
    with pytest.raises(ValueError, match="use 'legacy' or 'new'"):
        A.attention_forward(engine(np.ones((1, 4, 12))), 2, "old")
