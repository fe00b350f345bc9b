"""Puzzle 10, convolution: a tile with its halo.

out[i] is the sum of w[k] * a[i + k] for k from 0 to 4. It needs five inputs, and blocks of 64
threads share theirs. The last threads of a block need four elements of the next block: the halo.
The tile has 64 + 4 elements, so four of the threads load a second element. Past the end of `a` the
tile holds zeros.

NumPy: out = np.convolve(a, w[::-1])[4:]
"""

import numpy as np
from numba import cuda


def specification(a, w):
    return np.convolve(a, w[::-1])[4:]


@cuda.jit
def kernel(a, w, out):  # 3 blocks of 64 threads; w has 5 elements
    tile = cuda.shared.array(64 + 4, np.float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "tile[t] = a[i] if i < a.size else np.float32(0)",
    "Threads 0 to 3 also load tile[64 + t], from a[i + 64].",
    "The barrier comes before the guard of the output.",
)
LIMITS = {"requests": (48, "Read the five inputs from the tile, not from `a`.")}
TOLERANCE = 1e-5


def problems(rng):
    yield 3, 64, (rng.standard_normal(150, "f4"), rng.standard_normal(5, "f4"))
    yield 3, 64, (rng.standard_normal(192, "f4"), rng.standard_normal(5, "f4"))
