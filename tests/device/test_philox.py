import numpy as np
import pytest

from numdiff.device import cuda, launch, uint32
from numdiff.device.philox import philox4x32, philox4x32_reference

# Random123's kat_vectors, the three lines "philox4x32 10": counter, key, expected words
KNOWN_ANSWERS = [
    ((0x00000000,) * 4, (0x00000000,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_hand(counter, key):
    """The paper's rounds in Python's own integers, one counter at a time."""
    (a, b, c, d), (k0, k1) = (int(x) for x in counter), (int(x) for x in key)
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = right >> 32 ^ b ^ k0, right % 2**32, left >> 32 ^ d ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


@cuda.jit
def philox_kernel(counter, key, words):
    i = cuda.grid(1)
    if i < words.shape[0]:
        w0, w1, w2, w3 = philox4x32(
            counter[i, 0], counter[i, 1], counter[i, 2], counter[i, 3], key[i, 0], key[i, 1]
        )
        words[i, 0] = w0
        words[i, 1] = w1
        words[i, 2] = w2
        words[i, 3] = w3


def words_on(engine, counter, key):
    """The same words by the engine's own way: the NumPy twin, or the device function in a kernel."""
    if engine.name == "cpu":
        return philox4x32_reference(counter, key)
    words = engine.zeros(counter.shape, np.uint32)
    launch(philox_kernel, 1, 64, engine(counter), engine(key), words)
    return words


def test_known_answers(engine):
    counters, keys, words = (
        np.array(column, uint32) for column in zip(*KNOWN_ANSWERS, strict=True)
    )
    engine.check_equal(words_on(engine, counters, keys), words)


@pytest.mark.parametrize("known", KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_by_hand_knows_them_too(known):
    assert philox_by_hand(*known[:2]) == known[2]


def test_random_counters(engine, rng):
    counters = rng.integers(0, 2**32, (20, 4), dtype=uint32)
    keys = rng.integers(0, 2**32, (20, 2), dtype=uint32)
    wanted = np.array([philox_by_hand(c, k) for c, k in zip(counters, keys, strict=True)], uint32)
    engine.check_equal(words_on(engine, counters, keys), wanted)


def test_counters_and_keys_broadcast(rng):
    counters, keys = (
        rng.integers(0, 2**32, (3, 1, 4), dtype=uint32),
        rng.integers(0, 2**32, (5, 2), dtype=uint32),
    )
    words = philox4x32_reference(counters, keys)
    assert words.shape == (3, 5, 4) and words.dtype == uint32
    assert tuple(words[2, 4]) == philox_by_hand(counters[2, 0], keys[4])
