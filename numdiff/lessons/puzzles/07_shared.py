"""Puzzle 7, shared memory: threads that exchange elements.

The threads of a block have fast memory in common: `cuda.shared.array(size, dtype)`. A thread that
reads what another thread wrote there must wait for it. `cuda.syncthreads()` is a barrier: no thread
of the block passes it before all have reached it. Here each block reverses its 64 elements: store
yours, wait, read another thread's. `cuda.grid(1)` is short for the index of puzzle 6.

NumPy: out = a.reshape(-1, 64)[:, ::-1].reshape(-1)
"""

import numpy as np
from numba import cuda


def specification(a):
    return a.reshape(-1, 64)[:, ::-1].reshape(-1)


@cuda.jit
def kernel(a, out):  # blocks of 64 threads; the arrays have a multiple of 64 elements
    tile = cuda.shared.array(64, np.float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    # fill in: three lines


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "First line: thread t stores a[i] in tile[t]. Second line: the barrier.",
    "Thread 0 needs tile[63].",
)
USES = {
    "syncthreads": "Pass the elements through the tile, with a barrier between its writes and its reads."
}


def problems(rng):
    yield 2, 64, (rng.standard_normal(128, "f4"),)
