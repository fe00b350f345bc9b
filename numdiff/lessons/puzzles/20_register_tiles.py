"""Puzzle 20, register tiles: four outputs for a thread.

In puzzle 19 each multiply-add reads two elements of shared memory. A thread with 2 x 2 outputs
reads two elements of a and two of b for four multiply-adds: half as many reads. Thread (x, y) has
the rows y and y + 8 and the columns x and x + 8 of a tile of 16 x 16 outputs. Keep the four sums
and the four elements in variables: these are registers.

NumPy: out = a @ b
"""

import numpy as np
from numba import cuda


def specification(a, b):
    return a @ b


@cuda.jit
def kernel(a, b, out):  # blocks of (8, 8) threads; rows and columns are multiples of 16, k of 8
    tile_a = cuda.shared.array((16, 8), np.float32)
    tile_b = cuda.shared.array((8, 16), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * 16, cuda.blockIdx.x * 16  # of the first output of the tile
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "Each thread loads two elements of each tile.",
    "In the inner loop: a0, a1 = tile_a[y, k], tile_a[y + 8, k]; likewise b0, b1; then four multiply-adds.",
    "Four sums: s00 += a0 * b0, s01 += a0 * b1, s10 += a1 * b0, s11 += a1 * b1.",
)
CONFLICTS = 64  # two rows of 8 floats in one store: banks that only wider rows avoid
LIMITS = {
    "requests": (32, "Load each element of a tile once for the block."),
    "shared_requests": (2 * (2 * 4 + 16 * 4), "Read a0, a1, b0 and b1 once for each k."),
}
TOLERANCE = 1e-5


def problems(rng):
    yield 1, (8, 8), (rng.standard_normal((16, 16), "f4"), rng.standard_normal((16, 16), "f4"))
