"""Puzzle 8, pooling: read once, use three times."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, out):
    tile = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    tile[t] = a[t]
    cuda.syncthreads()
    total = tile[t]
    if t >= 1:
        total += tile[t - 1]
    if t >= 2:
        total += tile[t - 2]
    out[t] = total
