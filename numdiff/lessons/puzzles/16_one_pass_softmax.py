"""Puzzle 16, one-pass softmax: maximum and sum together.

Puzzle 13 reads each row three times. Maximum and sum can come from one pass: keep the largest
element so far and the sum of exp(x - largest). When a larger element comes, multiply the sum by
exp(old - new) first. Two lanes combine their pairs (largest, sum) in the same way. The second pass
writes the result. This is the core of flash attention.

NumPy: e = np.exp(a - a.max(axis=1, keepdims=True)); out = e / e.sum(axis=1, keepdims=True)
"""

import math

import numpy as np
from numba import cuda


def specification(a):
    e = np.exp(a - a.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@cuda.jit
def kernel(a, out):  # blocks of 128 threads, a warp for each row of at least 32 elements
    t = cuda.threadIdx.x
    lane, row = t % 32, cuda.blockIdx.x * 4 + t // 32
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "A lane begins with largest = a[row, lane] and total = np.float32(1), as exp(0) is 1.",
    "new = max(largest, x); total = total * math.exp(largest - new) + math.exp(x - new); largest = new",
    "Between lanes: shuffle both numbers, then scale both sums by exp(old - new) and add them.",
)
LIMITS = {
    "requests": (3 * 12, "Two passes are enough: one for maximum and sum, one for the result."),
    "shared_requests": (0, "Combine the lanes by shuffles."),
}
TOLERANCE = 1e-5


def problems(rng):
    yield 1, 128, (rng.standard_normal((3, 100), "f4"),)
    yield 1, 128, (rng.standard_normal((1, 40), "f4") + 200,)
