"""Hopper, level 5: TMA stores the results, from shared memory.

WHAT IS NEW
    TMA store: a consumer puts its results, rounded to float16, into a swizzled tile of shared
        memory, and one thread starts TMA to copy it to C. It closes a group of stores (commit) and
        waits for groups: until TMA has read their tiles, which may then be overwritten, or until
        all has arrived in C.
WHY IT PAYS
    TMA writes rows of 128 bytes, where a warp of level 4 writes 16 bytes of eight rows each; no
    thread computes an address in C; and while TMA copies, the consumers continue.
WHAT REMAINS
    kernels/matmul/hopper/ adds other tiles, split K, transposed operands, edges, and bias, residual and GELU in
    the epilogue.
LAUNCH
    as level 4, with 208 KiB of dynamic shared memory.
SOURCE
    PTX ISA, section 9.7.9.27 (cp.async.bulk.tensor).
READ NEXT
    kernels/matmul/hopper/, the kernel that the models run.
"""

from ....device import cuda, launch, pipeline
from ....device.mbarrier import bar_sync, smem_u32
from ....device.requires import requires
from ....device.tensor_core import pack_half2, store_word
from ....device.tensor_map import tensor_map
from ....device.tma import (
    fence_proxy_async,
    make_tma_store_wait,
    tma_load_2d,
    tma_store_2d,
    tma_store_commit,
)
from ....device.wgmma import make_multiply, make_setmaxnreg, make_wgmma_wait, wgmma_wait_1

BM, BN, BK, STAGES = 128, 256, 64, 4
THREADS, BARRIERS, ACCUMULATORS = 384, 2 * STAGES, BN // 2
GROUP = 16  # rows of tiles that sweep over the columns together
ROW = 2 * BK  # bytes
A_BYTES, STAGE_BYTES, BOX = BM * ROW, (BM + BN) * ROW, 64 * ROW  # BOX: of 64 × 64 results
multiply, wgmma_wait = make_multiply(BN), make_wgmma_wait(BN)
give_registers, take_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)
wait_read, wait_stored = make_tma_store_wait(0, read=True), make_tma_store_wait(0)


@cuda.jit(device=True, forceinline=True)
def tile_place(tile, rows, columns):
    """First row and column of work tile number `tile` of C, which is cut into `rows` × `columns`
    tiles."""
    group = tile // (GROUP * columns)
    height, inside = min(GROUP, rows - group * GROUP), tile % (GROUP * columns)
    return (group * GROUP + inside % height) * BM, inside // height * BN


@cuda.jit(device=True, forceinline=True)
def store_tile(acc, tiles, base, map_c, m, n, consumer):
    """64 × 256 results of a consumer, 64 columns at a time."""
    t = cuda.threadIdx.x % 128
    row, lane = t // 32 * 16 + t % 32 // 4, t % 32
    box = STAGES * STAGE_BYTES + consumer * BOX
    for block in range(BN // 64):
        if t == 0:
            wait_read()  # what the tile held before
        # a barrier of this consumer's threads: the other is elsewhere in its loop
        bar_sync(consumer + 1, 128)
        for j in range(8):  # row % 8 is lane // 4
            i, chunk = 32 * block + 4 * j, ((j ^ (lane // 4)) << 4) + lane % 4 * 4
            store_word(tiles, box + row * ROW + chunk, pack_half2(acc[i], acc[i + 1]))
            store_word(tiles, box + (row + 8) * ROW + chunk, pack_half2(acc[i + 2], acc[i + 3]))
        fence_proxy_async()  # TMA, too, sees what this thread has written
        bar_sync(consumer + 1, 128)
        if t == 0:
            tma_store_2d(base + box, map_c, n + 64 * block, m + 64 * consumer)
            tma_store_commit()


@requires("9.0a")
@cuda.jit(launch_bounds=(THREADS, 1))
def matmul_level_kernel_v5(map_a, map_b, map_c, rows, columns, steps):
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    base, t = smem_u32(tiles), cuda.threadIdx.x
    ring = pipeline.make_ring(base, STAGE_BYTES, STAGES, smem_u32(barriers))
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
            pipeline.warpgroup_release(ring, stage)
            stage, parity = pipeline.advance(ring, stage, parity)
            store_tile(acc, tiles, base, map_c, m, n, consumer)
        if t % 128 == 0:
            wait_stored()


def launch_tma_store(a, b, c):
    """c (M, N) = a (M, K) · b (N, K)ᵀ, all float16."""
    rows, columns, steps = len(a) // BM, len(b) // BN, a.shape[1] // BK
    blocks = min(rows * columns, a.backend.multiprocessors)
    launch(
        matmul_level_kernel_v5,
        blocks,
        THREADS,
        tensor_map(a, (BK, BM)),
        tensor_map(b, (BK, BN)),
        tensor_map(c, (64, 64)),
        rows,
        columns,
        steps,
        shared=STAGES * STAGE_BYTES + 2 * BOX,
    )
