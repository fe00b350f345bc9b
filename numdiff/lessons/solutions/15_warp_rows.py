"""Puzzle 15, RMS norm: a warp for each row."""

import math

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, out):
    t = cuda.threadIdx.x
    lane, row = t % 32, cuda.blockIdx.x * 4 + t // 32
    if row < a.shape[0]:
        total = np.float32(0)
        for column in range(lane, a.shape[1], 32):
            x = a[row, column]
            total += x * x
        step = 16
        while step > 0:
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
            step //= 2
        scale = np.float32(1) / math.sqrt(total / np.float32(a.shape[1]))
        for column in range(lane, a.shape[1], 32):
            out[row, column] = a[row, column] * scale
