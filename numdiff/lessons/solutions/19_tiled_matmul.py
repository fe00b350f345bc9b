"""Puzzle 19, tiled matmul: shared memory for both operands."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, b, out):
    tile_a = cuda.shared.array((8, 8), np.float32)
    tile_b = cuda.shared.array((8, 8), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.grid(2)
    total = np.float32(0)
    for start in range(0, a.shape[1], 8):
        tile_a[y, x] = tile_b[y, x] = np.float32(0)
        if row < a.shape[0] and start + x < a.shape[1]:
            tile_a[y, x] = a[row, start + x]
        if start + y < b.shape[0] and column < b.shape[1]:
            tile_b[y, x] = b[start + y, column]
        cuda.syncthreads()
        for k in range(8):
            total += tile_a[y, k] * tile_b[k, x]
        cuda.syncthreads()
    if row < out.shape[0] and column < out.shape[1]:
        out[row, column] = total
