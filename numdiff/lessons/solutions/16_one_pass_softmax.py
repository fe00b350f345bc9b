"""Puzzle 16, one-pass softmax: maximum and sum together."""

import math

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, out):
    t = cuda.threadIdx.x
    lane, row = t % 32, cuda.blockIdx.x * 4 + t // 32
    if row < a.shape[0]:
        largest, total = a[row, lane], np.float32(1)
        for column in range(lane + 32, a.shape[1], 32):
            x = a[row, column]
            new = max(largest, x)
            total = total * math.exp(largest - new) + math.exp(x - new)
            largest = new
        step = 16
        while step > 0:
            other = cuda.shfl_xor_sync(0xFFFFFFFF, largest, step)
            other_total = cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
            new = max(largest, other)
            total = total * math.exp(largest - new) + other_total * math.exp(other - new)
            largest = new
            step //= 2
        for column in range(lane, a.shape[1], 32):
            out[row, column] = math.exp(a[row, column] - largest) / total
