"""Helpers of kernels of every kind: the quotient and remainder of an index; a guarded load; a sum
over a warp; a placeholder for an absent array.

SOURCE
    shuffles: PTX ISA, section 9.7.9, shfl.sync.
READ NEXT
    bias.py
"""

import numpy as np

from ..device import cuda, float32, int32, load4, uint32, upload
from .limits import FULL_MASK
from .threads import kept


@cuda.jit(device=True)
def divide(a, b):
    """(a // b, a % b) of two numbers ≥ 0, in 32 bits. Python's own signed // becomes a 64-bit
    division, several times slower on a GPU, and convolutions divide for each flat index that
    becomes row, column and channel."""
    quotient = int32(uint32(a) // uint32(b))
    return quotient, int32(a - quotient * b)


@cuda.jit(device=True, forceinline=True)
def load4_or_zeros(array, at, exists):
    """Four neighbours from array[at] on where they exist, else zeros."""
    a0 = a1 = a2 = a3 = float32(0)
    if exists:
        a0, a1, a2, a3 = load4(array, at)
    return a0, a1, a2, a3


@cuda.jit(device=True)
def warp_sum(value):
    """The sum over the warp's 32 lanes, in every lane (a + b = b + a, so all hold the same bits)."""
    value += cuda.shfl_xor_sync(FULL_MASK, value, 16)
    value += cuda.shfl_xor_sync(FULL_MASK, value, 8)
    value += cuda.shfl_xor_sync(FULL_MASK, value, 4)
    value += cuda.shfl_xor_sync(FULL_MASK, value, 2)
    value += cuda.shfl_xor_sync(FULL_MASK, value, 1)
    return value


@kept
def no_numbers(backend):
    """The array that a kernel is given in place of one that it will not read."""
    return upload(np.zeros(4, np.float32), backend)
