import numpy as np
import pytest

from numdiff.kernels.transformer import chunk as C
from tests.conftest import shapes

SHAPES = shapes(minimal=(1, 1, 1), odd=(3, 6, 5), two=(4, 2, 33), large=(16, 6, 384))  # B, parts, C


@SHAPES
def test_chunks_and_their_gradient(engine, rng, shape):
    B, count, width = shape
    x = rng.standard_normal((B, count * width)).astype(np.float32)
    parts = C.chunk_forward(engine(x), count)
    assert len(parts) == count
    for k, part in enumerate(parts):
        engine.check_equal(part, x[:, k * width : (k + 1) * width].copy())
    gradients = rng.standard_normal((count, B, width)).astype(np.float32)
    engine.check_equal(
        C.chunk_backward([engine(g) for g in gradients]), np.concatenate(gradients, axis=1)
    )


def test_a_part_that_is_not_used_has_a_gradient_of_zero(engine, rng):
    g = rng.standard_normal((2, 3)).astype(np.float32)
    zero = np.zeros_like(g)
    engine.check_equal(
        C.chunk_backward([None, engine(g), None]), np.concatenate((zero, g, zero), axis=1)
    )


def test_wrong_arguments_say_so(engine):
    with pytest.raises(ValueError, match="into 7"):
        C.chunk_forward(engine(np.ones((2, 15), np.float32)), 7)
    with pytest.raises(ValueError, match="into 4"):
        C.chunk_forward(engine(np.ones((2, 6), np.float32)), 4)
    with pytest.raises(ValueError, match="one shape"):
        C.chunk_backward([engine(np.ones((2, 3), np.float32)), engine(np.ones((2, 4), np.float32))])
