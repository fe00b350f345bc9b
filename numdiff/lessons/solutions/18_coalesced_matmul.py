"""Puzzle 18, coalesced matmul: which thread has which output."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, b, out):
    t = cuda.threadIdx.x
    row, column = cuda.blockIdx.y * 16, cuda.blockIdx.x * 16
    row += t // 16
    column += t % 16
    total = np.float32(0)
    for k in range(a.shape[1]):
        total += a[row, k] * b[k, column]
    out[row, column] = total
