import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels import random as R
from tests.conftest import shapes
from tests.device.test_philox import philox_by_hand

SEED = 0x123456789ABCDEF0  # uses both halves of the key
DISTRIBUTIONS = {"uniform": R.random_uniform, "normal": R.random_normal}


def counters(engine, shape, step=7):
    """step and samples on an engine; the samples are not in order, and one is the largest there is."""
    samples = np.arange(shape[0], dtype=np.uint32)[::-1].copy() * np.uint32(3)
    samples[0] = 2**32 - 1
    return engine(np.array([step], np.uint32)), engine(samples)


def words_by_hand(shape, seed, purpose, step, samples):
    """(B, elements) of words, from the contract's counter and key."""
    count = int(np.prod(shape[1:]))
    key = seed & 0xFFFFFFFF, purpose
    blocks = [
        [philox_by_hand((q, s, step, seed >> 32), key) for q in range(-(-count // 4))]
        for s in samples
    ]
    return np.array(blocks, np.uint32).reshape(len(samples), -1)


@shapes(minimal=(1, 4), odd=(3, 5, 7), not_aligned=(5, 2, 33))
def test_uniform_by_hand(engine, shape):
    step, samples = counters(engine, shape)
    wanted = words_by_hand(shape, SEED, R.PURPOSE_FLIP, 7, download(samples))[
        :, : int(np.prod(shape[1:]))
    ]
    wanted = (wanted.astype(np.float64) // 256 / 2**24).astype(np.float32).reshape(shape)
    got = R.random_uniform(shape, SEED, R.PURPOSE_FLIP, step, samples)
    engine.check_equal(got, wanted)


@shapes(minimal=(1, 4), odd=(3, 5, 7), not_aligned=(5, 2, 33))
def test_normal_by_hand(engine, shape):
    step, samples = counters(engine, shape)
    words = (
        words_by_hand(shape, SEED, R.PURPOSE_NOISE, 7, download(samples)).astype(np.float64) // 256
    )
    radius, angle = (
        np.sqrt(-2 * np.log((words[:, 0::2] + 1) / 2**24)),
        2 * np.pi * words[:, 1::2] / 2**24,
    )
    wanted = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(shape[0], -1)
    got = R.random_normal(shape, SEED, R.PURPOSE_NOISE, step, samples)
    engine.check(got, wanted[:, : int(np.prod(shape[1:]))].reshape(shape), 1e-6)


@pytest.mark.parametrize("high", [1, 2, 1000, 2**31 - 1])
def test_integers(engine, high):
    step, samples = counters(engine, (65,))
    got = R.random_integers(SEED, R.PURPOSE_TIMESTEP, step, samples, high)
    words = words_by_hand((65, 1), SEED, R.PURPOSE_TIMESTEP, 7, download(samples))[:, 0]
    engine.check_equal(got, np.array([int(w) * high >> 32 for w in words], np.int32))


def test_extreme_words_stay_in_range():
    words = np.array([[0, 0, 2**32 - 1, 2**32 - 1]], np.uint32)
    uniform, normal = R.uniform_from_words(words), R.normal_from_words(words)
    assert uniform.min() == 0 and uniform.max() == 1 - 2**-24
    # √(2 · 24 · ln 2) = 5.77: the longest tail of 24 bits
    assert np.isfinite(normal).all() and abs(normal).max() < 6


@pytest.mark.parametrize("draw", DISTRIBUTIONS.values(), ids=list(DISTRIBUTIONS))
def test_a_sample_does_not_depend_on_its_batch(engine, draw):
    step = engine(np.array([4], np.uint32))
    whole = draw((6, 5, 3), SEED, 1, step, engine(np.arange(6, dtype=np.uint32)))
    part = draw((2, 5, 3), SEED, 1, step, engine(np.array([3, 5], np.uint32)))
    engine.check_equal(part, download(whole)[[3, 5]])


def test_everything_in_the_counter_counts():
    def draw(seed=1, purpose=1, step=0, sample=0):
        return R.random_uniform(
            (1, 8), seed, purpose, np.array([step], np.uint32), np.array([sample], np.uint32)
        )

    streams = [
        draw(),
        draw(seed=2),
        draw(seed=1 + 2**32),
        draw(purpose=2),
        draw(step=1),
        draw(sample=1),
    ]
    assert len({s.tobytes() for s in streams}) == len(streams)
    purposes = [value for name, value in vars(R).items() if name.startswith("PURPOSE_")]
    assert len(set(purposes)) == len(purposes) == 6 and max(purposes) < 256


def test_bad_counters_say_so(engine):
    step, samples = counters(engine, (3, 4))
    with pytest.raises(ValueError, match="step must be one uint32"):
        R.random_uniform((3, 4), 1, 1, engine(np.zeros(1, np.int32)), samples)
    with pytest.raises(ValueError, match="sample numbers"):
        R.random_normal((2, 4), 1, 1, step, samples)
    with pytest.raises(ValueError, match="high"):
        R.random_integers(1, 1, step, samples, 0)
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            R.random_uniform((3, 5), 1, 1, step, samples, version=2)
