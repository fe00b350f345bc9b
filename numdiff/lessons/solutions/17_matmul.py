"""Puzzle 17, matmul: a thread for each output."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, b, out):
    column, row = cuda.grid(2)
    if row < out.shape[0] and column < out.shape[1]:
        total = np.float32(0)
        for k in range(a.shape[1]):
            total += a[row, k] * b[k, column]
        out[row, column] = total
