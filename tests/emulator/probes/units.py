"""Kernels of a few lines, one for each group of Hopper's intrinsics, for the emulator and for a GPU
alike.

Numbers in them are small integers, so that sums of products are exact in whatever order and
precision they are added: the emulator and a GPU must give the same bits
(tests/emulator/test_hopper.py runs them on both).
"""

import functools

import numpy as np
from numba.cuda import types

from numdiff.device import cuda
from numdiff.device.mbarrier import (
    bar_arrive,
    bar_sync,
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_arrive_count,
    mbarrier_expect_tx,
    mbarrier_expect_tx_only,
    mbarrier_init,
    mbarrier_inval,
    mbarrier_test_wait,
    mbarrier_try_wait,
    mbarrier_wait,
    smem_u32,
)
from numdiff.device.tma import (
    fence_proxy_async,
    fence_proxy_async_global,
    tma_load_1d,
    tma_load_2d,
    tma_load_3d,
    tma_load_4d,
    tma_load_5d,
    tma_prefetch,
    tma_store_1d,
    tma_store_2d,
    tma_store_3d,
    tma_store_4d,
    tma_store_5d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
    tma_store_wait_read_1,
)
from numdiff.device.wgmma import (
    make_wgmma,
    make_wgmma_a_registers,
    make_wgmma_wait,
    wgmma_commit,
    wgmma_fence,
)

u32, u64, i32 = np.uint32, np.uint64, np.int32


@functools.cache
def make_copy(rank, nbytes):
    """A box of one tensor into shared memory, its bytes to `raw` as stored there, and the tile into
    another tensor.

    nbytes: of the box; at: int32[10], where the box is taken from, and from at[5] on where it is
    put
    """

    @cuda.jit
    def copy(map_in, map_out, at, raw):
        tile = cuda.shared.array(0, types.uint32, alignment=1024)
        barrier = cuda.shared.array(1, types.uint64)
        base, full = smem_u32(tile), smem_u32(barrier)
        t = cuda.threadIdx.x
        if t == 0:
            tma_prefetch(map_in)
            mbarrier_init(full, u32(1))
            fence_barrier_init()
        for i in range(t, raw.size, 32):
            tile[i] = u32(0)  # in the gaps between short rows it stays so
        fence_proxy_async()
        cuda.syncthreads()
        if t == 0:
            mbarrier_expect_tx(full, u32(nbytes))
            if rank == 1:
                tma_load_1d(base, map_in, full, at[0])
            elif rank == 2:
                tma_load_2d(base, map_in, full, at[0], at[1])
            elif rank == 3:
                tma_load_3d(base, map_in, full, at[0], at[1], at[2])
            elif rank == 4:
                tma_load_4d(base, map_in, full, at[0], at[1], at[2], at[3])
            else:
                tma_load_5d(base, map_in, full, at[0], at[1], at[2], at[3], at[4])
        mbarrier_wait(full, u32(0))
        for i in range(t, raw.size, 32):
            raw[i] = tile[i]
        if t == 0:
            if rank == 1:
                tma_store_1d(base, map_out, at[5])
            elif rank == 2:
                tma_store_2d(base, map_out, at[5], at[6])
            elif rank == 3:
                tma_store_3d(base, map_out, at[5], at[6], at[7])
            elif rank == 4:
                tma_store_4d(base, map_out, at[5], at[6], at[7], at[8])
            else:
                tma_store_5d(base, map_out, at[5], at[6], at[7], at[8], at[9])
            tma_store_commit()
            tma_store_wait_0()

    return copy


@functools.cache
def make_product(n, transpose_a=False, transpose_b=False, registers=False, kind="f16"):
    """One wgmma with scale_d = 0 and, if `twice`, the same once more: the accumulators of thread t
    to out[t].

    image: uint32, the bytes of shared memory; descriptors: uint64[2] of A and B for an image at
    address 0
    fragments: uint32 (128, 4), A's registers
    """
    wgmma = (
        make_wgmma_a_registers(n, transpose_b)
        if registers
        else make_wgmma(n, transpose_a, transpose_b, kind)
    )
    wgmma_wait_all, count = make_wgmma_wait(n), n // 2

    @cuda.jit
    def product(image, descriptors, fragments, twice, out):
        tile = cuda.shared.array(0, types.uint32, alignment=1024)
        t = cuda.threadIdx.x
        for i in range(t, image.size, 128):
            tile[i] = image[i]
        fence_proxy_async()
        cuda.syncthreads()
        start = u64(smem_u32(tile) >> u32(4))
        da, db = descriptors[0] + start, descriptors[1] + start
        acc = cuda.local.array(count, types.float32)
        if registers:
            a = (fragments[t, 0], fragments[t, 1], fragments[t, 2], fragments[t, 3])
            wgmma_fence()
            wgmma(acc, a, db, i32(0))
            wgmma(acc, a, db, i32(twice))
        else:
            wgmma_fence()
            wgmma(acc, da, db, i32(0))
            wgmma(acc, da, db, i32(twice))
        wgmma_commit()
        wgmma_wait_all(acc)
        for i in range(count):
            out[t, i] = acc[i]

    return product


wgmma_8, wait_1_of_8, wait_0_of_8 = make_wgmma(8), make_wgmma_wait(8, 1), make_wgmma_wait(8, 0)


@cuda.jit
def groups(image, descriptors, out):
    """Two groups under way at once, with accumulators of their own; the wait for the older one
    comes first."""
    tile = cuda.shared.array(0, types.uint32, alignment=1024)
    t = cuda.threadIdx.x
    for i in range(t, image.size, 128):
        tile[i] = image[i]
    fence_proxy_async()
    cuda.syncthreads()
    start = u64(smem_u32(tile) >> u32(4))
    da, db = descriptors[0] + start, descriptors[1] + start
    first, second = cuda.local.array(4, types.float32), cuda.local.array(4, types.float32)
    wgmma_fence()
    wgmma_8(first, da, db, i32(0))
    wgmma_commit()
    wgmma_8(second, da, db, i32(0))
    wgmma_8(second, da, db, i32(1))
    wgmma_commit()
    wait_1_of_8(first)
    for i in range(4):
        out[t, i] = first[i]
    wait_0_of_8(second)
    for i in range(4):
        out[t, 4 + i] = second[i]


@cuda.jit
def phases(map_x, log):
    """What an mbarrier says before, during and after its phases: log (int32), one thread."""
    tile = cuda.shared.array(16, types.uint32, alignment=128)
    barrier = cuda.shared.array(1, types.uint64)
    b = smem_u32(barrier)
    mbarrier_init(b, u32(2))
    fence_barrier_init()
    log[0] = mbarrier_test_wait(b, u32(1))  # fresh: as if a phase of parity 1 had just ended
    log[1] = mbarrier_test_wait(b, u32(0))
    mbarrier_arrive(b)
    log[2] = mbarrier_test_wait(b, u32(0))
    mbarrier_arrive(b)
    log[3] = mbarrier_test_wait(b, u32(0))  # phase 0 is over
    log[4] = mbarrier_test_wait(b, u32(1))
    mbarrier_expect_tx_only(b, u32(64))
    mbarrier_arrive_count(b, u32(2))
    log[5] = mbarrier_test_wait(b, u32(1))  # all have come, but not the bytes
    tma_load_1d(smem_u32(tile), map_x, b, 0)
    while not mbarrier_try_wait(b, u32(1)):
        pass
    log[6] = mbarrier_test_wait(b, u32(1))
    log[7] = mbarrier_test_wait(b, u32(0))
    log[8] = tile[15]
    mbarrier_arrive(b)
    mbarrier_expect_tx(b, u32(0))  # arrives too
    mbarrier_wait(b, u32(0))
    log[9] = mbarrier_test_wait(b, u32(0))
    mbarrier_inval(b)
    mbarrier_init(b, u32(1))  # as fresh as at first
    log[10] = mbarrier_test_wait(b, u32(1))
    log[11] = mbarrier_test_wait(b, u32(0))


@cuda.jit
def relay(x, y):
    """Two warps hand what they store to two others, who alone wait, and get it back: 128 threads,
    named barriers."""
    tile = cuda.shared.array(64, types.int32)
    t = cuda.threadIdx.x
    if t < 64:
        tile[t] = x[t]
        bar_arrive(u32(1), u32(128))  # handed over
        bar_sync(u32(2), u32(128))  # given back
        y[t] = tile[t]
    else:
        bar_sync(u32(1), u32(128))
        value = tile[127 - t]
        bar_sync(u32(3), u32(64))  # the two warps that read: all have read before one writes
        tile[t - 64] = i32(2) * value
        bar_arrive(u32(2), u32(128))


@cuda.jit
def double_rows(map_x, map_y, rows):
    """y = 2 x, 32 float32 a row: loaded and stored by TMA, doubled by one warp, in two alternating
    tiles."""
    tiles = cuda.shared.array((2, 32), types.float32, alignment=128)
    barrier = cuda.shared.array(1, types.uint64)
    base, full = smem_u32(tiles), smem_u32(barrier)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, u32(1))
        fence_barrier_init()
    cuda.syncwarp()
    for row in range(rows):
        tile = row % 2
        if t == 0:
            tma_store_wait_read_1()  # the tile's last store, two rows ago
            mbarrier_expect_tx(full, u32(128))
            tma_load_2d(base + u32(128 * tile), map_x, full, 0, row)
        mbarrier_wait(full, u32(row % 2))
        tiles[tile, t] = tiles[tile, t] * types.float32(2)
        fence_proxy_async()
        cuda.syncwarp()
        if t == 0:
            tma_store_2d(base + u32(128 * tile), map_y, 0, row)
            tma_store_commit()
    if t == 0:
        tma_store_wait_read_0()


@cuda.jit
def through_global(x, map_x, y):
    """Threads store to global memory, TMA loads it: 32 float32."""
    tile = cuda.shared.array(32, types.float32, alignment=128)
    barrier = cuda.shared.array(1, types.uint64)
    full = smem_u32(barrier)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, u32(1))
        fence_barrier_init()
    x[t] = types.float32(t)
    fence_proxy_async_global()
    cuda.syncthreads()
    if t == 0:
        mbarrier_expect_tx(full, u32(128))
        tma_load_1d(smem_u32(tile), map_x, full, 0)
    mbarrier_wait(full, u32(0))
    y[t] = tile[31 - t]
