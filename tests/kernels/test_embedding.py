import math

import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels import embedding as E
from tests.conftest import versions


def test_timestep_is_per_image(engine):
    """A batch is its images' embeddings one under the other."""
    t = np.array([3, 700, 42], np.int32)
    whole = download(E.timestep_embedding_forward(engine(t), 16))
    for b in range(3):
        engine.check_equal(E.timestep_embedding_forward(engine(t[b : b + 1]), 16), whole[b : b + 1])


def test_angles_up_to_the_stated_size(engine, rng):
    """One frequency, 1: the angle is t itself."""
    t = np.concatenate([rng.uniform(-12_000, 12_000, 200), np.arange(-8, 9) * math.pi / 4]).astype(
        np.float32
    )
    wanted = np.stack([np.cos(t.astype(np.float64)), np.sin(t.astype(np.float64))], -1)
    engine.check(E.timestep_embedding_forward(engine(t), 2), wanted, 1e-6)


@versions(1, 2)
def test_a_label_that_does_not_exist(engine, version):
    labels, weight = np.array([0, 3, -1], np.int32), np.ones((3, 4))
    if engine.name == "cpu":
        with pytest.raises(IndexError):
            E.embedding_forward(np.array([3], np.int32), weight)
    else:
        y = download(E.embedding_forward(engine(labels), engine(weight), version=version))
        dweight = engine(np.zeros((3, 4)))
        E.embedding_backward(engine(np.ones((3, 4))), engine(labels), dweight, version=version)
        engine.check(dweight, np.array([[1.0] * 4, [0.0] * 4, [0.0] * 4]), 0)
        if engine.computes:
            assert np.all(y[0] == 1) and np.isnan(y[1:]).all()


def test_bad_input_says_so(engine):
    with pytest.raises(ValueError, match="labels must be int32"):
        E.embedding_forward(engine(np.zeros(3)), engine(np.zeros((2, 4))))
    with pytest.raises(ValueError, match="differ in channels"):
        E.embedding_backward(
            engine(np.zeros((1, 3))), engine(np.zeros(1, np.int32)), engine(np.zeros((2, 4)))
        )
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            E.embedding_forward(engine(np.zeros(3, np.int32)), engine(np.zeros((2, 5))), version=2)
