"""Puzzle 3, guard: more threads than elements.

Threads come in warps of 32, so a block usually has a multiple of 32 threads. Here 64 threads run on
50 elements, then on 33. A thread past the end must do nothing: an access outside of an array
overwrites other data, or ends the program.

The number 2 in the source would make the product float64. `np.float32(2)` keeps it float32.

NumPy: out = np.float32(2) * a
"""

import numpy as np
from numba import cuda


def specification(a):
    return np.float32(2) * a


@cuda.jit
def kernel(a, out):  # 1 block of 64 threads, at most 50 elements
    i = cuda.threadIdx.x
    # fill in: two lines


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "out.size is the number of elements.",
    "Put the line that reads and writes under `if i < out.size:`.",
)
LIMITS = {"requests": (6, "No loop is needed: each thread computes one element.")}


def problems(rng):
    yield 1, 64, (rng.standard_normal(50, "f4"),)
    yield 1, 64, (rng.standard_normal(33, "f4"),)
