"""Puzzle 3, guard: more threads than elements."""

import numpy as np
from numba import cuda


@cuda.jit
def kernel(a, out):
    i = cuda.threadIdx.x
    if i < out.size:
        out[i] = np.float32(2) * a[i]
