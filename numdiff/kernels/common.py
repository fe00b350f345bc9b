"""What kernels of every kind share: the quotient and remainder of an index.

READ NEXT
    bias.py
"""
from ..device import cuda, int32, uint32


@cuda.jit(device=True)
def divide(a, b):
    """(a // b, a % b) of two numbers ≥ 0, in 32 bits: Python's own signed // becomes a 64-bit division, several times
    slower on a GPU, and convolutions divide wherever a running number becomes row, column and channel."""
    quotient = int32(uint32(a) // uint32(b))
    return quotient, int32(a - quotient * b)
