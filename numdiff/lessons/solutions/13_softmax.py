"""Puzzle 13, softmax: a row in three passes."""

import math

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, out):
    values = cuda.shared.array(64, np.float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    largest = a[row, t]
    for column in range(t + 64, a.shape[1], 64):
        largest = max(largest, a[row, column])
    values[t] = largest
    cuda.syncthreads()
    step = 32
    while step > 0:
        if t < step:
            values[t] = max(values[t], values[t + step])
        cuda.syncthreads()
        step //= 2
    largest = values[0]
    cuda.syncthreads()
    total = np.float32(0)
    for column in range(t, a.shape[1], 64):
        total += math.exp(a[row, column] - largest)
    values[t] = total
    cuda.syncthreads()
    step = 32
    while step > 0:
        if t < step:
            values[t] += values[t + step]
        cuda.syncthreads()
        step //= 2
    for column in range(t, a.shape[1], 64):
        out[row, column] = math.exp(a[row, column] - largest) / values[0]
