"""Puzzle 23, split sums: many blocks, the same bits in each run.

One block cannot sum a long array quickly. So each block sums its part and stores a partial sum, and
a second kernel adds the partial sums. Blocks do not wait for each other; the second launch begins
when the first has ended. Atomic additions would need one launch only, but their order changes from
run to run, and with it the last bits of the sum.

NumPy: out[0] = a.sum()
"""

import numpy as np
from numba import cuda


def specification(a):
    return a.sum(keepdims=True)


@cuda.jit
# blocks of 64 threads, a multiple of 64 elements; partial[blockIdx.x] is the block's sum
def first_kernel(a, partial):
    sums = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    # fill in


@cuda.jit
def kernel(partial, out):  # 1 block of 32 threads, at most 32 partial sums
    lane = cuda.threadIdx.x
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "The first kernel is puzzle 9 for each block, and the second is puzzle 14.",
    "In the second kernel a lane without a partial sum begins with np.float32(0).",
)
LIMITS = {"requests": (20, "Read each element once, and write one partial sum for each block.")}
TOLERANCE = 1e-5


def problems(rng):
    yield 6, 64, (rng.random(6 * 64, "f4"),)


def launch(run, learner, grid, block, inputs, out):
    partial = run.empty(grid, "f4")
    run(learner.first_kernel, grid, block, *inputs, partial)
    run(learner.kernel, 1, 32, partial, out)
