import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels import dropout as D
from numdiff.kernels.random import PURPOSE_DROPOUT, random_uniform_reference
from tests.conftest import quick, shapes

SHAPES = shapes(minimal=(1, 4), odd=(3, 5, 7), not_aligned=(5, 33), large=(4, 33, 32, 8))
STEP = np.array([11], np.uint32)


@SHAPES
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5])
@quick(lambda engine, shape: engine != "emulator" or len(shape) != 3)
def test_dropout(engine, rng, shape, probability):
    x, dy = (
        rng.standard_normal(shape).astype(np.float32),
        rng.standard_normal(shape).astype(np.float32),
    )
    numbers = np.arange(shape[0], dtype=np.uint32) + np.uint32(5)
    where = probability, 2**40 + 3, 6, engine(STEP), engine(numbers)
    uniform = random_uniform_reference(shape, 2**40 + 3, PURPOSE_DROPOUT + 256 * 6, STEP, numbers)
    kept = uniform >= round(probability * 2**24) / 2**24
    for forward, given in ((D.dropout_forward, x), (D.dropout_backward, dy)):
        got = forward(engine(given), *where)
        engine.check(got, np.where(kept, given.astype(np.float64) / (1 - probability), 0), 1e-6)
        if engine.computes:
            # the same mask, bit by bit
            assert np.array_equal(download(got) != 0, kept & (given != 0))
        engine.check_equal(got, forward(engine(given), *where))


def test_float64_stays_float64():
    assert (
        D.dropout_forward(np.ones((1, 4)), 0.5, 1, 0, STEP, np.zeros(1, np.uint32)).dtype
        == np.float64
    )


def test_bad_input_says_so(engine):
    x, samples = engine(np.zeros((2, 5))), engine(np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="probability is in"):
        D.dropout_forward(x, 1.0, 1, 0, engine(STEP), samples)
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            D.dropout_forward(x, 0.1, 1, 0, engine(STEP), samples, version=2)
