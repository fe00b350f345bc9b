"""Puzzle 10, convolution: a tile with its halo."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, w, out):
    tile = cuda.shared.array(64 + 4, np.float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    tile[t] = a[i] if i < a.size else np.float32(0)
    if t < 4:
        tile[64 + t] = a[i + 64] if i + 64 < a.size else np.float32(0)
    cuda.syncthreads()
    if i < out.size:
        total = np.float32(0)
        for k in range(5):
            total += w[k] * tile[t + k]
        out[i] = total
