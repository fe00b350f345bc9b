"""Puzzle 24, float16: half the bytes, sums in float32.

A float16 has 2 bytes, 11 bits of precision and a largest value of 65504. Data in float16 moves
twice as fast. A sum in float16 soon loses its small terms, so convert each element to float32
before you multiply and add.

NumPy: out = (a.astype("f4") * b.astype("f4")).sum(axis=1)
"""

import numpy as np
from numba import cuda


def specification(a, b):
    return (a.astype("f4") * b.astype("f4")).sum(axis=1)


@cuda.jit
# blocks of 128 threads, a warp for each row; a and b are float16, out is float32
def kernel(a, b, out):
    t = cuda.threadIdx.x
    lane, row = t % 32, cuda.blockIdx.x * 4 + t // 32
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "The kernel is that of puzzle 15 without the second loop.",
    "np.float32(a[row, column]) converts; do it before the multiplication.",
)
LIMITS = {
    "requests": (90, "Read each element once."),
    "shared_requests": (0, "Add the sums of the lanes by shuffles."),
}
TOLERANCE = 1e-5


def problems(rng):
    yield 2, 128, (rng.random((6, 200), "f4").astype("f2"), rng.random((6, 200), "f4").astype("f2"))
