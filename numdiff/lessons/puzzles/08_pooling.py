"""Puzzle 8, pooling: read once, use three times.

Each output is the sum of three inputs, out[i] = a[i] + a[i - 1] + a[i - 2], and each input is
needed by three threads. Global memory is slow and shared memory is fast: load each element once
into shared memory, wait, then read its neighbours there. The first two outputs have fewer inputs.

NumPy: out = np.convolve(a, np.ones(3, "f4"))[:a.size]
"""

import numpy as np
from numba import cuda


def specification(a):
    return np.convolve(a, np.ones(3, "f4"))[: a.size]


@cuda.jit
def kernel(a, out):  # 1 block of 64 threads, 64 elements
    tile = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "Begin as in puzzle 7: store, then wait.",
    "Start with total = tile[t], then add tile[t - 1] if t >= 1.",
    "The barrier stands outside of every `if`: all threads must reach it.",
)
LIMITS = {
    "requests": (4, "Load each element once into shared memory, and read the neighbours there.")
}


def problems(rng):
    yield 1, 64, (rng.standard_normal(64, "f4"),)
