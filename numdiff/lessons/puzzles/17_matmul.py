"""Puzzle 17, matmul: a thread for each output.

out[row, column] is the dot product of a row of a and a column of b. Each thread computes one output
in a loop along k. `cuda.grid(2)` gives the index of a thread in a grid with two dimensions: x
first, then y.

NumPy: out = a @ b
"""

import numpy as np
from numba import cuda


def specification(a, b):
    return a @ b


@cuda.jit
def kernel(a, b, out):  # a grid of blocks of (16, 8) threads
    column, row = cuda.grid(2)
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "The guard is that of puzzle 4.",
    "for k in range(a.shape[1]): total += a[row, k] * b[k, column]",
    "Begin with total = np.float32(0), and write out once, after the loop.",
)
LIMITS = {
    "requests": (300, "Keep the sum in a variable, and write out[row, column] once after the loop.")
}
TOLERANCE = 1e-5


def problems(rng):
    yield (
        (2, 2),
        (16, 8),
        (rng.standard_normal((12, 10), "f4"), rng.standard_normal((10, 20), "f4")),
    )
