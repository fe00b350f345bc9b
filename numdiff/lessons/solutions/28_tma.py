"""Puzzle 28, TMA and mbarrier: one thread copies a tile."""

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


@cuda.jit
def kernel(map_a, out):
    tile = cuda.shared.array((8, 32), np.float32, alignment=128)
    barriers = cuda.shared.array(1, np.uint64)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.blockIdx.x * 32, cuda.blockIdx.y * 8
    barrier = smem_u32(barriers)
    if x == 0 and y == 0:
        mbarrier_init(barrier, 1)
        fence_barrier_init()
        mbarrier_expect_tx(barrier, 8 * 32 * 4)
        tma_load_2d(smem_u32(tile), map_a, barrier, column, row)
    cuda.syncthreads()
    mbarrier_wait(barrier, 0)
    if row + y < out.shape[0] and column + x < out.shape[1]:
        out[row + y, column + x] = tile[y, x] + tile[y, x]
