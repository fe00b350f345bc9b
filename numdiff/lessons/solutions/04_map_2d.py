"""Puzzle 4, map in 2D: a thread for each element of a matrix."""

from numba import cuda


@cuda.jit
def kernel(a, out):
    row, column = cuda.threadIdx.y, cuda.threadIdx.x
    if row < out.shape[0] and column < out.shape[1]:
        out[row, column] = a[row, column] + a[row, column]
