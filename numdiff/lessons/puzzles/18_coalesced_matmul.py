"""Puzzle 18, coalesced matmul: which thread has which output.

A warp's load takes one transaction for each group of 32 bytes that it touches. If 32 lanes read 32
neighbouring floats, these are 4 transactions; if they read a column of a matrix, these are 32. Here
a block has one dimension: 256 threads for a tile of 16 x 16 outputs. Compute the row and the column
of a thread, so that neighbouring threads have neighbouring columns.

NumPy: out = a @ b
"""

import numpy as np
from numba import cuda


def specification(a, b):
    return a @ b


@cuda.jit
def kernel(a, b, out):  # blocks of 256 threads; rows and columns are multiples of 16
    t = cuda.threadIdx.x
    row, column = cuda.blockIdx.y * 16, cuda.blockIdx.x * 16  # of the first output of the tile
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "t % 16 changes with each thread, t // 16 with every 16th.",
    "row += t // 16, column += t % 16",
    "The loop is that of puzzle 17; no guard is needed.",
)
LIMITS = {
    "sectors": (2 * 8 * (8 * 4 + 8 * 2 + 4), "Let neighbouring threads have neighbouring columns.")
}
TOLERANCE = 1e-5


def problems(rng):
    yield (2, 1), 256, (rng.standard_normal((16, 8), "f4"), rng.standard_normal((8, 32), "f4"))
