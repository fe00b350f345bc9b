"""Puzzle 11, prefix sum: every partial result is wanted."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, out):
    sums = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    total = a[t]
    sums[t] = total
    cuda.syncthreads()
    step = 1
    while step < 64:
        if t >= step:
            total += sums[t - step]
        cuda.syncthreads()
        sums[t] = total
        cuda.syncthreads()
        step *= 2
    out[t] = total
