"""Puzzle 2, zip: two inputs, one thread for each element."""

from numba import cuda


@cuda.jit
def kernel(a, b, out):
    i = cuda.threadIdx.x
    out[i] = a[i] + b[i]
