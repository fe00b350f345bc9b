"""Puzzle 13, softmax: a row in three passes.

A softmax needs the maximum of its row, then the sum of the exponentials, then writes the quotients.
Maximum and sum are trees, as in puzzle 12. Between the two trees is one more barrier: all threads
must have read the maximum in values[0] before the array is used again.

NumPy: e = np.exp(a - a.max(axis=1, keepdims=True)); out = e / e.sum(axis=1, keepdims=True)
"""

import math

import numpy as np
from numba import cuda


def specification(a):
    e = np.exp(a - a.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@cuda.jit
def kernel(a, out):  # a block of 64 threads for each row of at least 64 elements
    values = cuda.shared.array(64, np.float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    # fill in: math.exp(x) is an exponential, max(x, y) the larger of two numbers


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "The first pass starts with largest = a[row, t] and continues with every 64th column.",
    "After the first tree: largest = values[0], then a barrier, then the second pass.",
    "Each thread writes the same columns that it has read.",
)
LIMITS = {
    "requests": (32, "Three passes that read and one that writes (within the third) are enough.")
}
TOLERANCE = 1e-5


def problems(rng):
    yield 2, 64, (rng.standard_normal((2, 100), "f4"),)
    yield 1, 64, (rng.standard_normal((1, 64), "f4") + 200,)
