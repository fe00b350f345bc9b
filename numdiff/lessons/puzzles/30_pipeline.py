"""Puzzle 30, pipeline: warps that load and warps that multiply.

The fast kernels on Hopper divide the work: a producer warp loads tiles by TMA, a consumer warpgroup
multiplies them. Between them are stages in shared memory, here two, with two mbarriers each.
`full[s]` ends a phase when the tiles of stage s have arrived: one arrival, and the bytes.
`empty[s]` ends a phase when all 128 consumers have read the stage: 128 arrivals by
`mbarrier_arrive(barrier)`. Each stage is used in every second step, and each use is one phase, so
in step s of the loop the consumers wait for parity s // 2 % 2 of `full`.

The producer waits at `empty` for the opposite parity: a wait for parity 1 of a new barrier returns
at once, as every stage is empty in the beginning. Producer and consumers never meet at a block-wide
barrier after the initialisation.

`multiply(acc, a, b, scale)` has the fence, the four wgmma and the commit of puzzle 29, for tiles at
the addresses a and b.

NumPy: out = a.astype("f4") @ b.astype("f4").T
"""

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


def specification(a, b):
    return a.astype("f4") @ b.astype("f4").T


multiply, wgmma_wait = make_multiply(16), make_wgmma_wait(16)
# bytes of a tile of a, and of a stage: the tile of b comes after that of a
A_BYTES, STAGE = 64 * 128, (64 + 16) * 128
BYTES = 2 * STAGE


@cuda.jit
# 160 threads; a (64, 64 steps), b (16, 64 steps) float16; out (64, 16) float32
def kernel(map_a, map_b, out, steps):
    tiles = cuda.shared.array(BYTES, np.uint8, alignment=1024)
    barriers = cuda.shared.array(4, np.uint64)
    base, full, t = smem_u32(tiles), smem_u32(barriers), cuda.threadIdx.x
    empty = full + 16  # barriers have 8 bytes each: full[0], full[1], empty[0], empty[1]
    if t == 0:
        for stage in range(2):
            mbarrier_init(full + 8 * stage, 1)
            mbarrier_init(empty + 8 * stage, 128)
        fence_barrier_init()
    cuda.syncthreads()
    # fill in: thread 128 is the producer, threads 0 to 127 are the consumers


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "The producer: for each step wait at empty for parity step // 2 % 2 ^ 1, expect STAGE bytes, start two loads.",
    "A consumer: wait at full for parity step // 2 % 2, multiply, wgmma_wait(acc), mbarrier_arrive at empty.",
    "Step 0 has scale 0 and stands before the loop; the stores are those of puzzle 29.",
)
TOLERANCE = 1e-5


def problems(rng):
    yield (
        1,
        160,
        (
            rng.standard_normal((64, 256), "f4").astype("f2"),
            rng.standard_normal((16, 256), "f4").astype("f2"),
        ),
    )


def launch(run, learner, grid, block, inputs, out):
    from numdiff.device.tensor_map import tensor_map

    a, b = inputs
    run(
        learner.kernel,
        grid,
        block,
        tensor_map(a, (64, 64)),
        tensor_map(b, (64, 16)),
        out,
        a.shape[1] // 64,
    )
