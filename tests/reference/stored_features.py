"""What `make_features.py` and the tests that read its values must agree on. The counterpart of
stored.py, for networks of many weights: all are drawn from one row of 65,537 numbers, each tensor
from its own start."""

import zlib

import numpy as np

from . import stored

LENGTH = 65_537  # a prime: rows of a tensor do not repeat each other
PIXELS = 107  # side of the images; InceptionV3 leaves 2 × 2 of them
POOL = stored.uniform("features", LENGTH, 0)  # from -0.5 to 0.5
KEPT = stored.KEPT


def drawn(name, shape):
    """float32 numbers with variance one."""
    start = zlib.crc32(name.encode()) % LENGTH
    values = np.resize(np.roll(POOL, -start), int(np.prod(shape))) * np.float32(12**0.5)
    return values.reshape(shape)


def weight(name, shape):
    """A tensor of a state dict: activations keep their size, and no bias or statistic is 0."""
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    values = drawn(name, shape)
    if len(shape) > 1:
        return values * np.float32(np.sqrt(2 / np.prod(shape[1:])))
    if name.endswith(("running_var", "bn.weight")):
        return 1 + values * np.float32(0.25)
    return values * np.float32(0.1)


def pictures(name, count=2, size=PIXELS):
    """uint8 (count, size, size, 3)"""
    return ((drawn(name, (count, size, size, 3)) / 12**0.5 + 0.5) * 255).astype(np.uint8)


def samples(name, count, dimensions):
    """float32 features of two sets, (count, dimensions) each, of different means and covariances."""
    a, b = drawn(f"{name}/a", (count, dimensions)), drawn(f"{name}/b", (count, dimensions))
    mixed = drawn(f"{name}/mix", (dimensions, dimensions)) / np.float32(dimensions**0.5)
    return a, b @ mixed + np.float32(0.3)


# of sets of features: (images, dimensions); in the second the covariances are singular
DISTANCES = {"many": (256, 24), "few": (12, 40)}
