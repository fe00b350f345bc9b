import numpy as np
import pytest

from numdiff.kernels import dropout as D
from numdiff.kernels.random import PURPOSE_DROPOUT, random_uniform_reference

STEP = np.array([11], np.uint32)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5])
def test_reference_by_hand(rng, probability):
    x, numbers = rng.standard_normal((3, 5, 7)), np.arange(3, dtype=np.uint32) + np.uint32(5)
    uniform = random_uniform_reference(x.shape, 2**40 + 3, PURPOSE_DROPOUT + 256 * 6, STEP, numbers)
    kept = uniform >= round(probability * 2**24) / 2**24
    for function in (D.dropout_forward, D.dropout_backward):
        got = function(x, probability, 2**40 + 3, 6, STEP, numbers)
        np.testing.assert_allclose(got, np.where(kept, x / (1 - probability), 0), rtol=1e-12)


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
