import math

import numpy as np
import pytest

from numdiff.extras.learned_variance import step as S

SHAPE = (3, 5, 7)


def test_learned_step(rng):
    x, x_0, noise = (rng.standard_normal(SHAPE) for _ in range(3))
    prediction = rng.uniform(-1, 1, (*SHAPE[:-1], 2 * SHAPE[-1]))
    low, high = math.log(0.01), math.log(0.3)
    fraction = (prediction[..., SHAPE[-1] :] + 1) / 2
    deviation = np.sqrt(0.3**fraction * 0.01 ** (1 - fraction))  # eq. 15, without the logarithms
    wanted = 0.4 * x + 0.6 * x_0 + deviation * noise
    assert np.allclose(
        S.learned_step(x, x_0, prediction, noise, (0.4, 0.6, low, high)), wanted, atol=1e-13
    )


def test_bad_input_says_so(engine):
    x = engine(np.zeros((2, 5)))
    with pytest.raises(ValueError, match="at least 2 × 5 channels"):
        S.learned_step(x, x, x, x, (1.0, 1.0, 0.0, 0.0))
