"""Puzzle 12, axis sum: a block for each row."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, out):
    sums = cuda.shared.array(64, np.float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    total = np.float32(0)
    for column in range(t, a.shape[1], 64):
        total += a[row, column]
    sums[t] = total
    cuda.syncthreads()
    step = 32
    while step > 0:
        if t < step:
            sums[t] += sums[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        out[row] = sums[0]
