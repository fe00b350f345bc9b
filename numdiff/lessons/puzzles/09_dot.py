"""Puzzle 9, dot product: a sum by a tree.

A sum of n elements by one thread takes n steps, a tree takes log2(n). In the first step, 64 threads
each add the element 64 further on to their own; then 32 threads add the element 32 further on, and
so on. Between two steps is a barrier, which all threads reach. At the end element 0 holds the sum.
The tree's order is fixed, so each run gives the same bits.

NumPy: out[0] = (a * b).sum()
"""

import numpy as np
from numba import cuda


def specification(a, b):
    return (a * b).sum(keepdims=True)


@cuda.jit
def kernel(a, b, out):  # 1 block of 128 threads, 128 elements
    sums = cuda.shared.array(128, np.float32)
    t = cuda.threadIdx.x
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "Store the product of your two elements in sums[t], then wait.",
    "step = 64; while step > 0: … step //= 2",
    "Within the loop: `if t < step:` add, and after the `if` a barrier for all threads.",
)
LIMITS = {
    "requests": (
        9,
        "Each thread reads one element of a and one of b, and the rest happens in shared memory.",
    ),
    "shared_requests": (
        40,
        "Let half of the threads add in each step, and half of those in the next.",
    ),
}
TOLERANCE = 1e-4


def problems(rng):
    yield 1, 128, (rng.random(128, "f4"), rng.random(128, "f4"))
