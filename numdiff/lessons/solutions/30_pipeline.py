"""Puzzle 30, pipeline: warps that load and warps that multiply."""

import numpy as np
from numba import cuda

from numdiff.device.mbarrier import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from numdiff.device.tma import tma_load_2d
from numdiff.device.wgmma import make_multiply, make_wgmma_wait

multiply, wgmma_wait = make_multiply(16), make_wgmma_wait(16)
A_BYTES, STAGE = 64 * 128, (64 + 16) * 128
BYTES = 2 * STAGE


@cuda.jit
def kernel(map_a, map_b, out, steps):
    tiles = cuda.shared.array(BYTES, np.uint8, alignment=1024)
    barriers = cuda.shared.array(4, np.uint64)
    base, full, t = smem_u32(tiles), smem_u32(barriers), cuda.threadIdx.x
    empty = full + 16
    if t == 0:
        for stage in range(2):
            mbarrier_init(full + 8 * stage, 1)
            mbarrier_init(empty + 8 * stage, 128)
        fence_barrier_init()
    cuda.syncthreads()
    if t == 128:
        for step in range(steps):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(empty + 8 * stage, parity ^ 1)
            mbarrier_expect_tx(full + 8 * stage, STAGE)
            tma_load_2d(base + stage * STAGE, map_a, full + 8 * stage, step * 64, 0)
            tma_load_2d(base + stage * STAGE + A_BYTES, map_b, full + 8 * stage, step * 64, 0)
    if t < 128:
        acc = cuda.local.array(8, np.float32)
        mbarrier_wait(full, 0)
        multiply(acc, base, base + A_BYTES, 0)
        wgmma_wait(acc)
        mbarrier_arrive(empty)
        for step in range(1, steps):
            stage, parity = step % 2, step // 2 % 2
            mbarrier_wait(full + 8 * stage, parity)
            multiply(acc, base + stage * STAGE, base + stage * STAGE + A_BYTES, 1)
            wgmma_wait(acc)
            mbarrier_arrive(empty + 8 * stage)
        row, column = t // 32 * 16 + t % 32 // 4, t % 4 * 2
        for j in range(2):
            out[row, column + 8 * j] = acc[4 * j]
            out[row, column + 8 * j + 1] = acc[4 * j + 1]
            out[row + 8, column + 8 * j] = acc[4 * j + 2]
            out[row + 8, column + 8 * j + 1] = acc[4 * j + 3]
