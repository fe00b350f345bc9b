import numpy as np
import pytest

from numdiff.kernels.diffusion import images as I
from tests.conftest import shapes

SHAPES = shapes(
    minimal=(1, 1, 4, 1),
    odd=(2, 3, 5, 3),
    grey=(3, 4, 4, 1),
    not_aligned=(2, 3, 7, 3),
    large=(5, 32, 32, 3),
    four_channels=(2, 5, 3, 4),
)


@SHAPES
def test_images(engine, rng, shape):
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    flip = (np.arange(shape[0]) % 2).astype(np.int32) if shape[0] > 1 else np.ones(1, np.int32)
    values = np.array(
        [np.float32(np.float32(i) / np.float32(127.5)) - np.float32(1) for i in range(256)]
    )
    wanted = values[images]
    engine.check_equal(I.images_forward(engine(images)), wanted)
    for b in range(shape[0]):
        for w in range(shape[2]):
            wanted[b, :, w] = values[images[b, :, shape[2] - 1 - w if flip[b] else w]]
    got = I.images_forward(engine(images), engine(flip))
    engine.check_equal(got, wanted)


@SHAPES
def test_pixels(engine, rng, shape):
    x = 1.2 * rng.uniform(-1, 1, shape).astype(np.float32)
    wanted = np.clip(np.rint((x + np.float32(1)) * np.float32(127.5)), 0, 255).astype(np.uint8)
    engine.check_equal(I.pixels_forward(engine(x)), wanted)


def test_pixels_are_the_way_back(engine):
    images = np.arange(256, dtype=np.uint8).reshape(1, 8, 8, 4)
    engine.check_equal(I.pixels_forward(I.images_forward(engine(images))), images)
    # near a tie either neighbour is right, but the same
    halves = (np.arange(0.5, 255) / 127.5 - 1).astype(np.float32)
    engine.check_equal(I.pixels_forward(engine(halves)), I.pixels_forward(halves))
    if engine.has_versions:
        with pytest.raises(ValueError, match="must be float32"):
            I.pixels_forward(engine(images))


def test_range():
    y = I.images_forward(np.array([0, 255], np.uint8).reshape(1, 1, 2, 1))
    assert y.min() == -1 and y.max() == 1 and y.dtype == np.float32


def test_bad_input_says_so(engine):
    with pytest.raises(ValueError, match="uint8"):
        I.images_forward(engine(np.zeros((1, 2, 2, 3), np.float32)))
    with pytest.raises(ValueError, match="flip must be int32"):
        I.images_forward(engine(np.zeros((1, 2, 2, 3), np.uint8)), engine(np.zeros(2, np.int32)))
