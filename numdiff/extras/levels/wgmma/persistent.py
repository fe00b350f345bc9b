"""Hopper, level 4: a persistent kernel, one block for each multiprocessor, which goes from tile to
tile.

WHAT IS NEW
    Persistence: there are as many blocks as multiprocessors, and each takes every gridDim-th work
        tile. The producer does not stop at a tile's end: while the consumers store one, it already
        fills the stages for the next.
    Order: a persistent kernel also chooses which tiles are computed at the same time. Here 16 rows
        of tiles sweep over the columns together: these tiles form a square rather than a stripe,
        share most of their operands, and find them in the L2 cache.
    Pipeline words: a stage is no longer step % STAGES, because a tile begins at the stage where the
        one before ended. From here on the ring of level 3, with its barriers and parities, is in
        the words of device/pipeline.py.
WHY IT PAYS
    No block but the first of a multiprocessor begins with empty stages, and each number of A and B
    is read from memory fewer times.
WHAT REMAINS
    While the consumers store a tile, four bytes a thread at a time, the tensor cores are idle.
LAUNCH
    one block for each multiprocessor, 384 threads, 192 KiB of dynamic shared memory; M, N, K
    multiples of 128, 256, 64.
SOURCE
    the order of tiles: Triton's tutorial "Matrix Multiplication", under "L2 Cache Optimizations".
READ NEXT
    tma_store.py, where TMA stores the results.
"""

from ....device import cuda, launch, pipeline
from ....device.mbarrier import smem_u32
from ....device.requires import requires
from ....device.tensor_core import pack_half2, store_word
from ....device.tensor_map import tensor_map
from ....device.tma import tma_load_2d
from ....device.wgmma import make_multiply, make_setmaxnreg, make_wgmma_wait, wgmma_wait_1

BM, BN, BK, STAGES = 128, 256, 64, 4
THREADS, BARRIERS, ACCUMULATORS = 384, 2 * STAGES, BN // 2
GROUP = 16  # rows of tiles that sweep over the columns together
ROW = 2 * BK  # bytes
A_BYTES, STAGE_BYTES = BM * ROW, (BM + BN) * ROW
multiply, wgmma_wait = make_multiply(BN), make_wgmma_wait(BN)
give_registers, take_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


@cuda.jit(device=True, forceinline=True)
def tile_place(tile, rows, columns):
    """First row and column of work tile number `tile` of C, which is cut into `rows` × `columns`
    tiles."""
    group = tile // (GROUP * columns)
    height = min(GROUP, rows - group * GROUP)  # the last group may have fewer rows
    inside = tile % (GROUP * columns)  # its number within the group, column by column
    return (group * GROUP + inside % height) * BM, inside // height * BN


@requires("9.0a")
@cuda.jit(launch_bounds=(THREADS, 1))
def matmul_level_kernel_v4(map_a, map_b, c, rows, columns, steps):
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    ring = pipeline.make_ring(smem_u32(tiles), STAGE_BYTES, STAGES, smem_u32(barriers))
    t = cuda.threadIdx.x
    # a stage is filled by one arrival, the producer's, and emptied by two
    pipeline.start_ring(ring, 1, 2)

    if t < 128:  # the producer's warpgroup
        give_registers()
        if t == 0:
            stage, parity = pipeline.producer_start()
            for tile in range(cuda.blockIdx.x, rows * columns, cuda.gridDim.x):
                m, n = tile_place(tile, rows, columns)
                for step in range(steps):
                    full = pipeline.producer_acquire(ring, stage, parity, STAGE_BYTES)
                    a = pipeline.stage_at(ring, stage)
                    tma_load_2d(a, map_a, full, step * BK, m)
                    tma_load_2d(a + A_BYTES, map_b, full, step * BK, n)
                    stage, parity = pipeline.advance(ring, stage, parity)
    else:  # the consumers
        take_registers()
        acc = cuda.local.array(ACCUMULATORS, "float32")
        consumer = t // 128 - 1
        stage, parity = pipeline.consumer_start()
        for tile in range(cuda.blockIdx.x, rows * columns, cuda.gridDim.x):
            m, n = tile_place(tile, rows, columns)
            pipeline.consumer_wait(ring, stage, parity)
            a = pipeline.stage_at(ring, stage)
            multiply(acc, a + consumer * 64 * ROW, a + A_BYTES, 0)
            for _ in range(1, steps):
                previous = stage
                stage, parity = pipeline.advance(ring, stage, parity)
                pipeline.consumer_wait(ring, stage, parity)
                a = pipeline.stage_at(ring, stage)
                multiply(acc, a + consumer * 64 * ROW, a + A_BYTES, 1)
                wgmma_wait_1()
                pipeline.warpgroup_release(ring, previous)
            wgmma_wait(acc)
            pipeline.warpgroup_release(ring, stage)  # the tile's last one
            stage, parity = pipeline.advance(ring, stage, parity)

            # the epilogue: accumulators have the layout of one_tile.py
            row, column = m + consumer * 64 + t % 128 // 32 * 16 + t % 32 // 4, n + t % 4 * 2
            N = columns * BN
            for j in range(BN // 8):
                store_word(c, row * N + column + 8 * j, pack_half2(acc[4 * j], acc[4 * j + 1]))
                store_word(
                    c, (row + 8) * N + column + 8 * j, pack_half2(acc[4 * j + 2], acc[4 * j + 3])
                )


def launch_persistent(a, b, c):
    """c (M, N) = a (M, K) · b (N, K)ᵀ, all float16."""
    rows, columns, steps = len(a) // BM, len(b) // BN, a.shape[1] // BK
    blocks = min(rows * columns, a.backend.multiprocessors)
    launch(
        matmul_level_kernel_v4,
        blocks,
        THREADS,
        tensor_map(a, (BK, BM)),
        tensor_map(b, (BK, BN)),
        c.reshape(-1),
        rows,
        columns,
        steps,
        shared=STAGES * STAGE_BYTES,
    )
