"""Puzzle 15, RMS norm: a warp for each row.

A row of some hundred elements does not need a block: a warp reads it in steps of 32 elements and
adds by shuffles. A block has four warps here, so it computes four rows. A warp without a row does
nothing; all its lanes take the same branch.

NumPy: out = a / np.sqrt((a * a).mean(axis=1, keepdims=True))
"""

import math

import numpy as np
from numba import cuda


def specification(a):
    return a / np.sqrt((a * a).mean(axis=1, keepdims=True))


@cuda.jit
def kernel(a, out):  # blocks of 128 threads, a warp for each row
    t = cuda.threadIdx.x
    lane, row = t % 32, cuda.blockIdx.x * 4 + t // 32
    # fill in: math.sqrt is the square root of one number


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "The guard is `if row < a.shape[0]:` around everything.",
    "for column in range(lane, a.shape[1], 32): sum the squares; then the shuffles of puzzle 14.",
    "The number of columns is an integer: divide by np.float32(a.shape[1]).",
)
LIMITS = {
    "requests": (96, "Two passes over the row are enough."),
    "shared_requests": (0, "Add the sums of the lanes by shuffles."),
}
TOLERANCE = 1e-5


def problems(rng):
    yield 2, 128, (rng.standard_normal((6, 100), "f4"),)
    yield 1, 128, (rng.standard_normal((3, 33), "f4"),)
