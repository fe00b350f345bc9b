"""Puzzle 1, map: one thread for each element.

A kernel is a function that many threads execute at the same time. Each thread knows its number in
its block, `cuda.threadIdx.x`. Here one block of 32 threads runs on arrays of 32 elements: thread i
computes element i.

NumPy: out = a * a
"""

from numba import cuda


def specification(a):
    return a * a


@cuda.jit
def kernel(a, out):  # 1 block of 32 threads
    i = cuda.threadIdx.x
    # fill in: one line


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "There is no loop: the 32 threads take the place of the loop over the elements.",
    "Thread i reads a[i] and writes out[i].",
)
LIMITS = {"requests": (3, "No loop is needed: each thread computes one element.")}


def problems(rng):
    yield 1, 32, (rng.standard_normal(32, "f4"),)
