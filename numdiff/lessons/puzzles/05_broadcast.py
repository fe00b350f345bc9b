"""Puzzle 5, broadcast: which index belongs to which array.

NumPy repeats the shorter array along the missing axis. A kernel repeats nothing: each thread picks
the element that it needs. Threads of a warp that read the same element share one access.

NumPy: out = a[:, None] + b[None, :]
"""

from numba import cuda


def specification(a, b):
    return a[:, None] + b[None, :]


@cuda.jit
def kernel(a, b, out):  # 1 block of (32, 8) threads
    row, column = cuda.threadIdx.y, cuda.threadIdx.x
    # fill in: two lines


# For the judge ------------------------------------------------------------------------------------

HINTS = ("a has an element for each row, b one for each column.", "The guard is that of puzzle 4.")
LIMITS = {"requests": (21, "No loop is needed: each thread computes one element.")}


def problems(rng):
    yield 1, (32, 8), (rng.standard_normal(7, "f4"), rng.standard_normal(29, "f4"))
    yield 1, (32, 8), (rng.standard_normal(5, "f4"), rng.standard_normal(32, "f4"))
