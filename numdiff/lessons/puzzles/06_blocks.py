"""Puzzle 6, blocks: an array that is longer than a block.

A block has at most 1024 threads, a grid has many blocks. Block number `cuda.blockIdx.x` has
`cuda.blockDim.x` threads. Each thread computes the index of its element from the number of its
block and its own number in it.

NumPy: out = a * b
"""

from numba import cuda


def specification(a, b):
    return a * b


@cuda.jit
def kernel(a, b, out):  # 4 blocks of 32 threads, at most 128 elements
    # fill in: three lines
    pass


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "Block 1 begins at element 32: before it is one block of 32 threads.",
    "i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x; cuda.grid(1) is short for it.",
    "The last block has threads past the end.",
)
LIMITS = {"requests": (12, "No loop is needed: each thread computes one element.")}


def problems(rng):
    yield 4, 32, (rng.standard_normal(100, "f4"), rng.standard_normal(100, "f4"))
    yield 4, 32, (rng.standard_normal(128, "f4"), rng.standard_normal(128, "f4"))
