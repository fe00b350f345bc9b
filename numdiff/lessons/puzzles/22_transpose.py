"""Puzzle 22, bank conflicts: a transpose through shared memory.

A warp that reads a row of a and writes a column of out is not coalesced. So the block stores a tile
of 32 x 32 elements in shared memory, and writes rows of out from columns of the tile. Shared memory
has 32 banks: word w is in bank w % 32, and a bank serves one word at a time. A column of a tile
with rows of 32 words is in one bank: 32 accesses, one after another. With rows of 33 words each
element of a column is in another bank.

NumPy: out = a.T
"""

import numpy as np
from numba import cuda


def specification(a):
    return np.ascontiguousarray(a.T)


@cuda.jit
def kernel(a, out):  # blocks of (32, 8) threads for tiles of 32 x 32; the shape is a multiple of 32
    tile = cuda.shared.array((32, 32), np.float32)  # change this line for three stars
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    # of the first element of the tile in a
    row, column = cuda.blockIdx.y * 32, cuda.blockIdx.x * 32
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "A block has 8 rows of threads for 32 rows: for i in range(y, 32, 8).",
    "out[column + i, row + x] = tile[x, i]: in both arrays of global memory, x belongs to the last index.",
    "Make the rows of the tile one word longer: (32, 33).",
)


def problems(rng):
    yield (2, 1), (32, 8), (rng.standard_normal((32, 64), "f4"),)
