"""Puzzle 21, 16-byte loads: four elements for each thread."""

from numba import cuda

from numdiff.device import load4, store4


@cuda.jit
def kernel(a, b, out):
    i = 4 * cuda.grid(1)
    if i < out.size:
        a0, a1, a2, a3 = load4(a, i)
        b0, b1, b2, b3 = load4(b, i)
        store4(out, i, a0 + b0, a1 + b1, a2 + b2, a3 + b3)
