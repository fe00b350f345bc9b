"""Puzzle 11, prefix sum: every partial result is wanted.

out[i] is the sum of a[0] to a[i]. In the first step each thread adds the element one before its
own, then the one two before, then four, and so on: after six steps each of 64 threads has its sum.
A thread must read its neighbour's old value before the neighbour overwrites it: a step has a read,
a barrier, a write and another barrier.

NumPy: out = np.cumsum(a)
"""

import numpy as np
from numba import cuda


def specification(a):
    return np.cumsum(a)


@cuda.jit
def kernel(a, out):  # 1 block of 64 threads, 64 elements
    sums = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "Keep your own sum in a variable `total`, and a copy of it in sums[t] for the others.",
    "In a step: `if t >= step:` add sums[t - step]; barrier; sums[t] = total; barrier; step *= 2.",
)
LIMITS = {
    "requests": (
        4,
        "Each thread reads one element and writes one; the steps happen in shared memory.",
    ),
    "shared_requests": (40, "Double the step each time: six steps are enough."),
}
TOLERANCE = 1e-5


def problems(rng):
    yield 1, 64, (rng.random(64, "f4"),)
