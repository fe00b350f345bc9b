"""Puzzle 12, axis sum: a block for each row.

A row is longer than a block here. Each thread first adds several elements of the row, 64 apart: t,
t + 64, t + 128 and so on, so that in each step neighbouring threads read neighbouring elements.
Then the tree of puzzle 9 adds the sums of the threads.

NumPy: out = a.sum(axis=1)
"""

import numpy as np
from numba import cuda


def specification(a):
    return a.sum(axis=1)


@cuda.jit
def kernel(a, out):  # a block of 64 threads for each row
    sums = cuda.shared.array(64, np.float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "for column in range(t, a.shape[1], 64): visits every 64th element.",
    "A sum begins with np.float32(0): a bare 0.0 is float64.",
    "The tree begins with step = 32.",
)
LIMITS = {"requests": (18, "Read each element once.")}
TOLERANCE = 1e-5


def problems(rng):
    yield 3, 64, (rng.random((3, 150), "f4"),)
    yield 2, 64, (rng.random((2, 40), "f4"),)
