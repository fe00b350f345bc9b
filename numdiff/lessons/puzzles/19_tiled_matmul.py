"""Puzzle 19, tiled matmul: shared memory for both operands.

In puzzle 17 each element of a is read by every thread of its row. Here a block loads a tile of a
and a tile of b, 8 x 8 elements each, multiplies them, and continues with the next tiles along k.
Each element is then loaded once for eight threads. Elements outside of the matrices count as 0. The
barriers: one after the loads, one before the next loads.

NumPy: out = a @ b
"""

import numpy as np
from numba import cuda


def specification(a, b):
    return a @ b


@cuda.jit
def kernel(a, b, out):  # blocks of (8, 8) threads
    tile_a = cuda.shared.array((8, 8), np.float32)
    tile_b = cuda.shared.array((8, 8), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.grid(2)
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "for start in range(0, a.shape[1], 8): load two tiles, barrier, multiply, barrier.",
    "Thread (x, y) loads a[row, start + x] and b[start + y, column], each with a guard and 0 otherwise.",
    "The inner loop: total += tile_a[y, k] * tile_b[k, x] for 8 values of k.",
)
LIMITS = {
    "requests": (
        4 * (8 + 2),
        "Load each element of a tile once for the block, and multiply from the tiles.",
    )
}
TOLERANCE = 1e-5


def problems(rng):
    yield (2, 2), (8, 8), (rng.standard_normal((13, 12), "f4"), rng.standard_normal((12, 14), "f4"))
