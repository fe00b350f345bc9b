"""Philox4x32-10: random words by counting, without a state.

A keyed bijection turns a 128-bit counter into 128 random bits. The counter determines the number:
on any thread, any rank and any device, in any order. That is why noise here does not depend on how
a batch was split, and why a resumed run needs no saved generator.

MATHEMATICS
    one round on the counter (c0, c1, c2, c3) with the round key (k0, k1):
        hi0:lo0 = M0 · c0      hi1:lo1 = M1 · c2        (32 × 32 → 64 bits)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0,  lo1,  hi0 ^ c3 ^ k1,  lo0
    ten rounds; between rounds k0 += W0, k1 += W1 (modulo 2³²).
SOURCE
    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section
    3.3.
"""

import numpy as np

from .gpu import cuda

uint32, uint64 = np.uint32, np.uint64

ROUNDS = 10  # the paper's choice; seven already pass its tests
MULTIPLIER_0, MULTIPLIER_1 = uint64(0xD2511F53), uint64(0xCD9E8D57)  # found by search in the paper
WEYL_0, WEYL_1 = uint64(0x9E3779B9), uint64(0xBB67AE85)  # 2³² · (golden ratio - 1), 2³² · (√3 - 1)
LOW_WORD, WORD_BITS = uint64(0xFFFFFFFF), uint64(32)


def philox_columns_reference(c0, c1, c2, c3, k0, k1):
    """Four uint64 arrays of words below 2³² (c0 … c3, one shape, overwritten) → four such arrays of
    random words."""
    p0, p1 = np.empty_like(c0), np.empty_like(c0)
    for _ in range(ROUNDS):
        np.multiply(c0, MULTIPLIER_0, out=p0)
        np.multiply(c2, MULTIPLIER_1, out=p1)
        np.right_shift(p1, WORD_BITS, out=c0)
        c0 ^= c1
        c0 ^= k0
        np.right_shift(p0, WORD_BITS, out=c2)
        c2 ^= c3
        c2 ^= k1
        np.bitwise_and(p1, LOW_WORD, out=c1)
        np.bitwise_and(p0, LOW_WORD, out=c3)
        k0, k1 = (k0 + WEYL_0) & LOW_WORD, (k1 + WEYL_1) & LOW_WORD
    return c0, c1, c2, c3


def philox4x32_reference(counter, key):
    """uint32 counters (..., 4) and keys (..., 2), broadcast against each other → uint32 words (...,
    4)."""
    counter, key = np.asarray(counter, uint32), np.asarray(key, uint32)
    shape = np.broadcast_shapes(counter.shape[:-1], key.shape[:-1])
    columns = [np.broadcast_to(counter[..., i], shape).astype(uint64) for i in range(4)]
    words = philox_columns_reference(
        *columns, key[..., 0].astype(uint64), key[..., 1].astype(uint64)
    )
    return np.stack(words, axis=-1).astype(uint32)


@cuda.jit(device=True)
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Six uint32 → four uint32. Products are widened to uint64 by hand: Numba mixes uint64 and
    int64 into float64."""
    for _ in range(ROUNDS):
        p0 = uint64(c0) * MULTIPLIER_0
        p1 = uint64(c2) * MULTIPLIER_1
        c0 = uint32((p1 >> WORD_BITS) ^ uint64(c1) ^ uint64(k0))
        c1 = uint32(p1 & LOW_WORD)
        c2 = uint32((p0 >> WORD_BITS) ^ uint64(c3) ^ uint64(k1))
        c3 = uint32(p0 & LOW_WORD)
        k0 = uint32((uint64(k0) + WEYL_0) & LOW_WORD)
        k1 = uint32((uint64(k1) + WEYL_1) & LOW_WORD)
    return c0, c1, c2, c3
