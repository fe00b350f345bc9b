import numpy as np
import pytest

from numdiff.kernels import bias as Bias
from tests.conftest import numerical_gradient, relative_error, shapes

SHAPES = shapes(
    minimal=(1, 1),
    odd=(3, 5, 3, 12),
    not_aligned=(4, 9, 33),
    no_pixels=(6, 20),
    large=(3, 37, 41, 64),
)


@SHAPES
def test_backward(engine, rng, shape):
    dy, start = 1 + rng.standard_normal(shape), rng.standard_normal(shape[-1])
    dbias = engine(start)
    Bias.bias_add_backward(engine(dy), dbias)
    by_channel, by_image = dy.reshape(-1, shape[-1]), dy.reshape(shape[0], -1, shape[-1])
    engine.check(dbias, start + by_channel.sum(0), 1e-6, np.abs(start) + np.abs(by_channel).sum(0))
    engine.check(
        Bias.channel_add_backward(engine(dy)), by_image.sum(1), 1e-6, np.abs(by_image).sum(1)
    )


def test_gradient(rng):
    x, bias, e, dy = (rng.standard_normal(s) for s in ((2, 3, 4), (4,), (2, 4), (2, 3, 4)))
    dbias = np.zeros(4)
    Bias.bias_add_backward(dy, dbias)
    assert (
        relative_error(dbias, numerical_gradient(lambda a: Bias.bias_add_forward(x, a), bias, dy))
        < 1e-7
    )
    de = Bias.channel_add_backward(dy)
    assert (
        relative_error(de, numerical_gradient(lambda a: Bias.channel_add_forward(x, a), e, dy))
        < 1e-7
    )


def test_wrong_arguments_say_so(engine):
    x = engine(np.ones((2, 3, 6), np.float32))
    with pytest.raises(ValueError, match=r"shape \(6,\)"):
        Bias.bias_add_forward(x, engine(np.ones(3, np.float32)))
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        Bias.channel_add_forward(x, engine(np.ones((3, 6), np.float32)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            Bias.bias_add_forward(x, engine(np.ones(6, np.float32)), version=2)
