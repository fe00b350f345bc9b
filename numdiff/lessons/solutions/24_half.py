"""Puzzle 24, float16: half the bytes, sums in float32."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, b, out):
    t = cuda.threadIdx.x
    lane, row = t % 32, cuda.blockIdx.x * 4 + t // 32
    if row < a.shape[0]:
        total = np.float32(0)
        for column in range(lane, a.shape[1], 32):
            total += np.float32(a[row, column]) * np.float32(b[row, column])
        step = 16
        while step > 0:
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
            step //= 2
        if lane == 0:
            out[row] = total
