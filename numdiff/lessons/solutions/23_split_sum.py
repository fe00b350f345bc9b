"""Puzzle 23, split sums: many blocks, the same bits in each run."""

import numpy as np
from numba import cuda


@cuda.jit
def first_kernel(a, partial):
    sums = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    sums[t] = a[cuda.grid(1)]
    cuda.syncthreads()
    step = 32
    while step > 0:
        if t < step:
            sums[t] += sums[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        partial[cuda.blockIdx.x] = sums[0]


@cuda.jit
def kernel(partial, out):
    lane = cuda.threadIdx.x
    total = partial[lane] if lane < partial.size else np.float32(0)
    step = 16
    while step > 0:
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        step //= 2
    if lane == 0:
        out[0] = total
