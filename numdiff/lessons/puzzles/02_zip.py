"""Puzzle 2, zip: two inputs, one thread for each element.

A kernel may read several arrays. Arrays go in and out as arguments; a kernel returns nothing.
Thread i reads an element of each input.

NumPy: out = a + b
"""

from numba import cuda


def specification(a, b):
    return a + b


@cuda.jit
def kernel(a, b, out):  # 1 block of 32 threads
    i = cuda.threadIdx.x
    # fill in: one line


# For the judge ------------------------------------------------------------------------------------

HINTS = ("As in puzzle 1, with a second array.",)
LIMITS = {"requests": (3, "No loop is needed: each thread computes one element.")}


def problems(rng):
    yield 1, 32, (rng.standard_normal(32, "f4"), rng.standard_normal(32, "f4"))
