"""Puzzle 14, warp shuffle: a sum without shared memory.

The 32 threads of a warp, its lanes, can read each other's variables. `cuda.shfl_xor_sync(mask,
value, step)` gives the value of the lane whose number differs in that bit: with step 16, lanes 0
and 16 exchange their values. The mask 0xFFFFFFFF says that all 32 lanes take part. After the steps
16, 8, 4, 2, 1 each lane has the sum. No barrier is needed.

NumPy: out = a.reshape(-1, 32).sum(axis=1)
"""

import numpy as np
from numba import cuda


def specification(a):
    return a.reshape(-1, 32).sum(axis=1)


@cuda.jit
def kernel(a, out):  # 1 block of 128 threads: 4 warps, each sums 32 elements
    t = cuda.threadIdx.x
    lane, warp = t % 32, t // 32
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "Each lane begins with total = a[t].",
    "total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)",
    "All lanes have the sum; one of them writes it to out[warp].",
)
LIMITS = {
    "requests": (8, "Each warp reads its 32 elements once."),
    "shared_requests": (0, "Lanes exchange values by cuda.shfl_xor_sync, without shared memory."),
}
TOLERANCE = 1e-5


def problems(rng):
    yield 1, 128, (rng.random(128, "f4"),)
