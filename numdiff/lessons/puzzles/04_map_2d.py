"""Puzzle 4, map in 2D: a thread for each element of a matrix.

A block can have two dimensions. The threads of this block are numbered by `cuda.threadIdx.x` (0 to
31) and `cuda.threadIdx.y` (0 to 7). Threads with neighbouring x belong to one warp. NumPy stores
the elements of a row next to each other: let x be the column, so that a warp reads neighbours.

NumPy: out = a + a
"""

from numba import cuda


def specification(a):
    return a + a


@cuda.jit
def kernel(a, out):  # 1 block of (32, 8) threads, at most 8 rows of at most 32 columns
    row, column = cuda.threadIdx.y, cuda.threadIdx.x
    # fill in: two lines


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "An element is a[row, column]: the row is the first index, as in NumPy.",
    "The guard has two conditions: row < out.shape[0] and column < out.shape[1].",
)
LIMITS = {"requests": (18, "No loop is needed: each thread computes one element.")}


def problems(rng):
    yield 1, (32, 8), (rng.standard_normal((6, 30), "f4"),)
    yield 1, (32, 8), (rng.standard_normal((8, 17), "f4"),)
