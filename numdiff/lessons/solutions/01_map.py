"""Puzzle 1, map: one thread for each element."""

from numba import cuda


@cuda.jit
def kernel(a, out):
    i = cuda.threadIdx.x
    out[i] = a[i] * a[i]
