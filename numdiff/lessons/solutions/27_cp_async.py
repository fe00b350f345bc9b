"""Puzzle 27, cp.async: copy the next tile while you use this one."""

import numpy as np
from numba import cuda

from numdiff.device.async_copy import cp_async_16, cp_async_commit, cp_async_wait, shared_address


@cuda.jit
def kernel(a, out):
    tiles = cuda.shared.array(2 * 128, np.float32, alignment=16)
    base, t, steps = shared_address(tiles), cuda.threadIdx.x, a.size // 128
    total = np.float32(0)
    cp_async_16(np.uint32(base + 16 * t), a, 4 * t)
    cp_async_commit()
    for step in range(steps):
        if step + 1 < steps:
            cp_async_16(
                np.uint32(base + (step + 1) % 2 * 512 + 16 * t), a, (step + 1) * 128 + 4 * t
            )
        cp_async_commit()
        cp_async_wait(1)
        cuda.syncthreads()
        for j in range(4):
            total += tiles[step % 2 * 128 + j * 32 + t]
        cuda.syncthreads()
    out[t] = total
