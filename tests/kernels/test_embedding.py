import math

import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels import embedding as E
from tests.conftest import versions


@pytest.mark.parametrize("dim", [2, 5, 64, 129])
@pytest.mark.parametrize("max_period", [10000.0, 1000.0])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_timestep(engine, rng, dim, max_period, dtype):
    t = np.array([0, 1, 499, 999, 37, 250], dtype)
    if dtype == np.float32:
        t += np.float32(0.25)
    half = dim // 2
    wanted = np.zeros((len(t), dim))
    for b in range(len(t)):
        for i in range(half):
            frequency = math.exp(-math.log(max_period) * i / half)
            wanted[b, i], wanted[b, half + i] = (
                math.cos(t[b] * frequency),
                math.sin(t[b] * frequency),
            )
    got = E.timestep_embedding_forward(engine(t), dim, max_period)
    engine.check(got, wanted, 1e-5)
    engine.check_equal(got, E.timestep_embedding_forward(engine(t), dim, max_period))
    assert got.dtype == np.float32


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


def test_backward_is_the_adjoint(rng):
    """<dy, forward(w)> = <backward(dy), w> for every w: the gradient of a linear map."""
    labels = np.array([2, 0, 2, 2], np.int32)
    dy, weight, dweight = rng.standard_normal((4, 5)), rng.standard_normal((3, 5)), np.zeros((3, 5))
    E.embedding_backward(dy, labels, dweight)
    assert np.isclose(np.sum(dy * E.embedding_forward(labels, weight)), np.sum(dweight * weight))


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
