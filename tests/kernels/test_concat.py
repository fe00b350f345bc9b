import numpy as np
import pytest

from numdiff.kernels import concat as C


def test_results_are_new_arrays(rng):
    dy = rng.standard_normal((2, 3, 5))
    for part in C.concat_backward(dy, 2):
        assert part.flags.c_contiguous and not np.shares_memory(part, dy)


def test_shapes_that_do_not_fit_say_so(engine):
    with pytest.raises(ValueError, match="only the channels"):
        C.concat_forward(engine(np.ones((2, 4))), engine(np.ones((3, 4))))
    with pytest.raises(ValueError, match="both sides"):
        C.concat_backward(engine(np.ones((2, 4))), 4)
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiples of 4"):
            C.concat_forward(engine(np.ones((2, 4))), engine(np.ones((2, 3))), version=2)
