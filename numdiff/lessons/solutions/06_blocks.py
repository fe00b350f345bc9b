"""Puzzle 6, blocks: an array that is longer than a block."""

from numba import cuda


@cuda.jit
def kernel(a, b, out):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < out.size:
        out[i] = a[i] * b[i]
