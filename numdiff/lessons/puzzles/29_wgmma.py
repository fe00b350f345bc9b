"""Puzzle 29, wgmma: a warpgroup multiplies from shared memory.

wgmma is executed by 128 threads, a warpgroup, and reads both matrices from shared memory. A
descriptor names the address and the layout of a tile. TMA writes tiles with a swizzle, which avoids
bank conflicts; the descriptor says so. `wgmma(acc, da, db, scale)` adds 16 of k: acc = scale * acc
+ a @ b. The next 16 of k are 32 bytes further on, which adds 2 to each descriptor. The product is
asynchronous:

    wgmma_fence()      before the first wgmma
    wgmma(…)           four of them for 64 of k; the first has scale 0, the others 1
    wgmma_commit()     closes the group
    wgmma_wait(acc)    from here on acc may be read

acc[4 * j + 0 … 3] of thread t are the sums at row t // 32 * 16 + t % 32 // 4 and columns 8 * j + t
% 4 * 2 and the next, then the same columns eight rows further down.

NumPy: out = a.astype("f4") @ b.astype("f4").T
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
from numdiff.device.wgmma import make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence


def specification(a, b):
    return a.astype("f4") @ b.astype("f4").T


wgmma, wgmma_wait = make_wgmma(16), make_wgmma_wait(16)
DESCRIPTOR = np.uint64(1 << 62 | 64 << 32 | 1 << 16)
# of the tile of a, and of both: 64 and 16 rows of 64 float16
A_BYTES, BYTES = 64 * 128, (64 + 16) * 128


@cuda.jit(device=True)
def descriptor(address):
    """Of a tile with rows of 64 float16 that TMA has written with the swizzle of 128 bytes."""
    return DESCRIPTOR | np.uint64((address & 0x3FFFF) >> 4)


@cuda.jit
# 128 threads; a (64, 64) and b (16, 64) are float16, out (64, 16) is float32
def kernel(map_a, map_b, out):
    tiles = cuda.shared.array(BYTES, np.uint8, alignment=1024)
    barriers = cuda.shared.array(1, np.uint64)
    acc = cuda.local.array(8, np.float32)
    base, barrier, t = smem_u32(tiles), smem_u32(barriers), cuda.threadIdx.x
    row, column = t // 32 * 16 + t % 32 // 4, t % 4 * 2
    # fill in: load both tiles by TMA, the one of b to base + A_BYTES; wait; multiply; store


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "The loads are those of puzzle 28: one expect_tx of BYTES, two tma_load_2d.",
    "da, db = descriptor(base), descriptor(base + A_BYTES)",
    "The second product: wgmma(acc, da + np.uint64(2), db + np.uint64(2), 1).",
)
TOLERANCE = 1e-5


def problems(rng):
    yield (
        1,
        128,
        (
            rng.standard_normal((64, 64), "f4").astype("f2"),
            rng.standard_normal((16, 64), "f4").astype("f2"),
        ),
    )


def launch(run, learner, grid, block, inputs, out):
    from numdiff.device.tensor_map import tensor_map

    a, b = inputs
    run(learner.kernel, grid, block, tensor_map(a, (64, 64)), tensor_map(b, (64, 16)), out)
