"""Puzzle 9, dot product: a sum by a tree."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, b, out):
    sums = cuda.shared.array(128, np.float32)
    t = cuda.threadIdx.x
    sums[t] = a[t] * b[t]
    cuda.syncthreads()
    step = 64
    while step > 0:
        if t < step:
            sums[t] += sums[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        out[0] = sums[0]
