"""Puzzle 28, TMA and mbarrier: one thread copies a tile.

On Hopper one thread starts the copy of a whole box of a matrix: `tma_load_2d(address, map, barrier,
column, row)`. The host has made the map: it describes the matrix and the size of a box, here 8 rows
of 32 float32. Elements outside of the matrix arrive as 0.

Threads wait at an mbarrier, 8 bytes in shared memory. `mbarrier_init(barrier, 1)` sets how many
arrivals a phase needs. `mbarrier_expect_tx(barrier, n)` arrives, and adds n bytes that must come.
The phase ends when all arrivals and all bytes have come. `mbarrier_wait(barrier, 0)` waits for the
end of the first phase (its parity is 0, that of the next is 1). Barriers are named by address:
`smem_u32(array)`. After the initialisation come fence_barrier_init() and a barrier of the block.

NumPy: out = a + a
"""

import numpy as np
from numba import cuda

from numdiff.device.mbarrier import (
    fence_barrier_init,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from numdiff.device.tma import tma_load_2d


def specification(a):
    return a + a


@cuda.jit
def kernel(map_a, out):  # blocks of (32, 8) threads, one for each box of 8 rows and 32 columns
    tile = cuda.shared.array((8, 32), np.float32, alignment=128)
    barriers = cuda.shared.array(1, np.uint64)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.blockIdx.x * 32, cuda.blockIdx.y * 8  # of the first element of the box
    barrier = smem_u32(barriers)
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "One thread, x == 0 and y == 0, initialises the barrier, expects 8 * 32 * 4 bytes, and starts the copy.",
    "Then a cuda.syncthreads(), so that no thread waits at a barrier that is not initialised; then the wait.",
    "Only the store needs a guard: outside of the matrix the tile holds zeros.",
)


def problems(rng):
    yield (2, 2), (32, 8), (rng.standard_normal((12, 48), "f4"),)


def launch(run, learner, grid, block, inputs, out):
    from numdiff.device.tensor_map import tensor_map

    run(learner.kernel, grid, block, tensor_map(inputs[0], (32, 8), 0), out)
