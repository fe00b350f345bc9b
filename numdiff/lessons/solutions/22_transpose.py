"""Puzzle 22, bank conflicts: a transpose through shared memory."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, out):
    tile = cuda.shared.array((32, 33), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * 32, cuda.blockIdx.x * 32
    for i in range(y, 32, 8):
        tile[i, x] = a[row + i, column + x]
    cuda.syncthreads()
    for i in range(y, 32, 8):
        out[column + i, row + x] = tile[x, i]
