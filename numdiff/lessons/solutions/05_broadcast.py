"""Puzzle 5, broadcast: which index belongs to which array."""

from numba import cuda


@cuda.jit
def kernel(a, b, out):
    row, column = cuda.threadIdx.y, cuda.threadIdx.x
    if row < out.shape[0] and column < out.shape[1]:
        out[row, column] = a[row] + b[column]
