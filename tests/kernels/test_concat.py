import numpy as np
import pytest

from numdiff.kernels import concat as C
from tests.conftest import shapes, versions, where

SHAPES = shapes(minimal=(1, 4, 4), odd=(15, 3, 5), not_aligned=(64, 8, 6), uneven=(100, 128, 64),
                large=(4096, 192, 128))  # pixels, channels of a and of b
USABLE = where(lambda version, dtype, shape: not any(
    channels % {2: 4, 3: 16 // np.dtype(dtype).itemsize}.get(version, 1) for channels in shape[1:]))


@SHAPES
@versions(1, 2, 3)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@USABLE
def test_forward_and_backward(engine, rng, shape, version, dtype):
    pixels, channels_a, channels_b = shape
    a = rng.standard_normal((pixels, 1, channels_a)).astype(dtype)
    b = rng.standard_normal((pixels, 1, channels_b)).astype(dtype)
    y = C.concat_forward(engine(a, dtype), engine(b, dtype), version=version)
    engine.check(y, np.dstack((a, b)), 0)
    da, db = C.concat_backward(y, channels_a, version=version)
    engine.check(da, a, 0)
    engine.check(db, b, 0)


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
