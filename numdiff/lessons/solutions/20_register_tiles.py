"""Puzzle 20, register tiles: four outputs for a thread."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, b, out):
    tile_a = cuda.shared.array((16, 8), np.float32)
    tile_b = cuda.shared.array((8, 16), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * 16, cuda.blockIdx.x * 16
    s00 = s01 = s10 = s11 = np.float32(0)
    for start in range(0, a.shape[1], 8):
        tile_a[y, x] = a[row + y, start + x]
        tile_a[y + 8, x] = a[row + y + 8, start + x]
        tile_b[y, x] = b[start + y, column + x]
        tile_b[y, x + 8] = b[start + y, column + x + 8]
        cuda.syncthreads()
        for k in range(8):
            a0, a1 = tile_a[y, k], tile_a[y + 8, k]
            b0, b1 = tile_b[k, x], tile_b[k, x + 8]
            s00 += a0 * b0
            s01 += a0 * b1
            s10 += a1 * b0
            s11 += a1 * b1
        cuda.syncthreads()
    out[row + y, column + x] = s00
    out[row + y, column + x + 8] = s01
    out[row + y + 8, column + x] = s10
    out[row + y + 8, column + x + 8] = s11
