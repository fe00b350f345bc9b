"""Hopper, level 4: a persistent kernel, one block for each multiprocessor, and TMA stores the results.

WHAT IS NEW
    Persistence: there are as many blocks as multiprocessors, and each takes every gridDim-th work tile. The producer
        does not stop at a tile's end: while the consumers store one, it already fills the stages for the next.
    Order: 16 rows of tiles sweep over the columns together. The tiles that are computed at the same time then form a
        square rather than a stripe, share most of their operands, and find them in the L2 cache.
    TMA store: 64 × 64 results of a consumer, in float16, go into a swizzled tile of shared memory, from which TMA
        stores them: full lines instead of four bytes a thread, and no thread computes addresses.
    Pipeline words: what level 3 wrote out, a ring of stages with its barriers and parities, is in device/pipeline.py.
THE ORDER IN THE EPILOGUE
    1. one thread waits until TMA has read what the tile held before; bar_sync, a barrier of this warpgroup alone
    2. all write their results; fence_proxy_async, because TMA reads through another path; bar_sync
    3. one thread asks TMA to store the tile, and commits; all go on
WHAT REMAINS
    ../hopper.py adds tiles of other sizes for small products, split K where there are few tiles, transposed operands,
    edges, and bias, residual and GELU in the epilogue.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    matmul_level_forward, 8192×8192, 8192×8192, float16
        v4*    1,501 µs   733 TFLOP/s   74 % of arithmetic   1.15 × v3   101 % of cuBLAS
LAUNCH
    one block for each multiprocessor, 384 threads, 208 KiB of dynamic shared memory; M, N, K multiples of 128, 256, 64.
SOURCE
    PTX ISA, section 9.7.9.27 (cp.async.bulk.tensor).
READ NEXT
    ../hopper.py, the kernel that the models run.
"""
import numpy as np

from ....device import cuda, launch
from ....device.mbarrier import bar_sync, fence_barrier_init, smem_u32
from ....device.pipeline import (
    advance,
    consumer_release,
    consumer_start,
    consumer_wait,
    init_ring,
    make_ring,
    producer_acquire,
    producer_start,
    stage_at,
)
from ....device.requires import requires
from ....device.tensor_core import pack_half2, store_word
from ....device.tensor_map import tensor_map
from ....device.tma import (
    fence_proxy_async,
    tma_load_2d,
    tma_store_2d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
)
from ....device.wgmma import make_setmaxnreg, make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence, wgmma_wait_1

BM, BN, BK, STAGES = 128, 256, 64, 4
THREADS, BARRIERS, ACCUMULATORS = 384, 2 * STAGES, BN // 2
GROUP = 16  # rows of tiles that sweep over the columns together
ROW = 2 * BK  # bytes
A_BYTES, STAGE_BYTES, BOX = BM * ROW, (BM + BN) * ROW, 64 * ROW  # BOX: of 64 × 64 results
DESCRIPTOR = np.uint64(1 << 62 | 8 * ROW // 16 << 32 | 1 << 16)  # as in one_tile.py
K16, K32, K48 = np.uint64(2), np.uint64(4), np.uint64(6)
wgmma, wgmma_wait = make_wgmma(BN), make_wgmma_wait(BN)
give_registers, take_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


@cuda.jit(device=True, forceinline=True)
def multiply(acc, a, b, adds):
    """A step's products, of the tiles at two addresses; adds: to the accumulators (1), or instead of them (0)."""
    da, db = DESCRIPTOR | np.uint64((a & 0x3FFFF) >> 4), DESCRIPTOR | np.uint64((b & 0x3FFFF) >> 4)
    wgmma_fence()
    wgmma(acc, da, db, adds)
    wgmma(acc, da + K16, db + K16, 1)
    wgmma(acc, da + K32, db + K32, 1)
    wgmma(acc, da + K48, db + K48, 1)
    wgmma_commit()


@cuda.jit(device=True, forceinline=True)
def tile_place(tile, rows, columns):
    """First row and column of work tile number `tile` of C, which is cut into `rows` × `columns` tiles."""
    group = tile // (GROUP * columns)
    height = min(GROUP, rows - group * GROUP)  # of the last group
    inside = tile % (GROUP * columns)
    return (group * GROUP + inside % height) * BM, inside // height * BN


@cuda.jit(device=True, forceinline=True)
def store_tile(acc, tiles, base, map_c, m, n, consumer):
    """64 × 256 results of a consumer, 64 columns at a time."""
    t = cuda.threadIdx.x % 128
    row, lane = t // 32 * 16 + t % 32 // 4, t % 32
    box = STAGES * STAGE_BYTES + consumer * BOX
    for block in range(BN // 64):
        if t == 0:
            tma_store_wait_read_0()
        bar_sync(consumer + 1, 128)
        for j in range(8):  # row % 8 is lane // 4
            i, chunk = 32 * block + 4 * j, ((j ^ (lane // 4)) << 4) + lane % 4 * 4
            store_word(tiles, box + row * ROW + chunk, pack_half2(acc[i], acc[i + 1]))
            store_word(tiles, box + (row + 8) * ROW + chunk, pack_half2(acc[i + 2], acc[i + 3]))
        fence_proxy_async()
        bar_sync(consumer + 1, 128)
        if t == 0:
            tma_store_2d(base + box, map_c, n + 64 * block, m + 64 * consumer)
            tma_store_commit()


@requires("9.0a")
@cuda.jit(launch_bounds=(THREADS, 1))
def matmul_level_kernel_v4(map_a, map_b, map_c, rows, columns, steps):
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    base, t = smem_u32(tiles), cuda.threadIdx.x
    ring = make_ring(base, STAGE_BYTES, STAGES, smem_u32(barriers))
    if t == 0:
        init_ring(ring, 1, 2)
        fence_barrier_init()
    cuda.syncthreads()

    if t < 128:
        give_registers()
        if t == 0:
            stage, parity = producer_start()
            for tile in range(cuda.blockIdx.x, rows * columns, cuda.gridDim.x):
                m, n = tile_place(tile, rows, columns)
                for step in range(steps):
                    full = producer_acquire(ring, stage, parity, STAGE_BYTES)
                    tma_load_2d(stage_at(ring, stage), map_a, full, step * BK, m)
                    tma_load_2d(stage_at(ring, stage) + A_BYTES, map_b, full, step * BK, n)
                    stage, parity = advance(ring, stage, parity)
    else:
        take_registers()
        acc = cuda.local.array(ACCUMULATORS, "float32")
        consumer = t // 128 - 1
        stage, parity = consumer_start()
        for tile in range(cuda.blockIdx.x, rows * columns, cuda.gridDim.x):
            m, n = tile_place(tile, rows, columns)
            consumer_wait(ring, stage, parity)
            a = stage_at(ring, stage)
            multiply(acc, a + consumer * 64 * ROW, a + A_BYTES, 0)
            for _ in range(1, steps):
                previous = stage
                stage, parity = advance(ring, stage, parity)
                consumer_wait(ring, stage, parity)
                a = stage_at(ring, stage)
                multiply(acc, a + consumer * 64 * ROW, a + A_BYTES, 1)
                wgmma_wait_1()
                if t % 128 == 0:
                    consumer_release(ring, previous)
            wgmma_wait(acc)
            if t % 128 == 0:
                consumer_release(ring, stage)
            stage, parity = advance(ring, stage, parity)
            store_tile(acc, tiles, base, map_c, m, n, consumer)
        if t % 128 == 0:
            tma_store_wait_0()


def launch_persistent(a, b, c):
    """c (M, N) = a (M, K) · b (N, K)ᵀ, all float16."""
    (M, K), N = a.shape, len(b)
    rows, columns = M // BM, N // BN
    launch(matmul_level_kernel_v4, min(rows * columns, a.backend.multiprocessors), THREADS, tensor_map(a, (BK, BM)),
           tensor_map(b, (BK, BN)), tensor_map(c, (64, 64)), rows, columns, K // BK,
           shared=STAGES * STAGE_BYTES + 2 * BOX)
