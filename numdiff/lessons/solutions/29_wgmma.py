"""Puzzle 29, wgmma: a warpgroup multiplies from shared memory."""

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
from numdiff.device.wgmma import make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence

wgmma, wgmma_wait = make_wgmma(16), make_wgmma_wait(16)
DESCRIPTOR = np.uint64(1 << 62 | 64 << 32 | 1 << 16)
A_BYTES, BYTES = 64 * 128, (64 + 16) * 128


@cuda.jit(device=True)
def descriptor(address):
    """Of a tile with rows of 64 float16 that TMA has written with the swizzle of 128 bytes."""
    return DESCRIPTOR | np.uint64((address & 0x3FFFF) >> 4)


@cuda.jit
def kernel(map_a, map_b, out):
    tiles = cuda.shared.array(BYTES, np.uint8, alignment=1024)
    barriers = cuda.shared.array(1, np.uint64)
    acc = cuda.local.array(8, np.float32)
    base, barrier, t = smem_u32(tiles), smem_u32(barriers), cuda.threadIdx.x
    row, column = t // 32 * 16 + t % 32 // 4, t % 4 * 2
    if t == 0:
        mbarrier_init(barrier, 1)
        fence_barrier_init()
        mbarrier_expect_tx(barrier, BYTES)
        tma_load_2d(base, map_a, barrier, 0, 0)
        tma_load_2d(base + A_BYTES, map_b, barrier, 0, 0)
    cuda.syncthreads()
    mbarrier_wait(barrier, 0)
    da, db = descriptor(base), descriptor(base + A_BYTES)
    wgmma_fence()
    wgmma(acc, da, db, 0)
    wgmma(acc, da + np.uint64(2), db + np.uint64(2), 1)
    wgmma(acc, da + np.uint64(4), db + np.uint64(4), 1)
    wgmma(acc, da + np.uint64(6), db + np.uint64(6), 1)
    wgmma_commit()
    wgmma_wait(acc)
    for j in range(2):
        out[row, column + 8 * j] = acc[4 * j]
        out[row, column + 8 * j + 1] = acc[4 * j + 1]
        out[row + 8, column + 8 * j] = acc[4 * j + 2]
        out[row + 8, column + 8 * j + 1] = acc[4 * j + 3]
