"""Matmul in float16, rung 6: Hopper's wgmma, fed by the copy engine (sm_90a).

WHAT IS NEW, AND WHY IT PAYS
    wgmma: four warps give one instruction that multiplies 64 × 16 by 16 × up to 256, both straight from shared memory.
        Rung 5 spends an instruction on every 16 × 8 × 16 and loads its operands into registers first.
    TMA: one thread asks the copy engine for a whole tile; no thread computes an address, no register holds data on
        its way, and what lies outside of a matrix comes as zeros.
    Warp specialisation: warpgroup 0 only asks for tiles, warpgroups 1 and 2 only multiply. Between them stand
        STAGES pairs of tiles in shared memory and two mbarriers for each: `full`, on which the copy engine counts
        bytes, and `empty`, on which the two consumers say that they have read it.
    Persistence: there are as many blocks as multiprocessors, and each takes every gridDim-th tile of C. While the
        consumers write one tile, the producer already fetches the first stages of the next.
A BLOCK'S TILE is 128 × BN, one half of the rows for each consumer, which holds them as BN / 2 float32 a thread.
    BN is 256, 192, 128 or 64. A step of 64 along K brings (128 + BN) · 128 bytes for 128 · BN · 64 multiply-adds: the
    wider the tile, the fewer bytes from the L2 cache, which is what limits this kernel; the narrower, the better a
    small product fills the GPU. launcher.py chooses.
FOUR TRANSPOSES, NO COPY
    An operand whose neighbours in memory run along k is fetched as rows of 64 k, 128 bytes each. One whose neighbours
    run along m or n is fetched as boxes of 64 k × 64 m, a row for each k, one box beside the other; its
    descriptor says so, and wgmma reads it transposed. Either way rows of 128 bytes with a swizzle of 128 bytes.

        y  = x·Wᵀ   both along k             dx = dy·W    B along n              dW = dyᵀ·x   A along m, B along n
SPLIT K
    A weight's gradient has few tiles and a long sum. `slices` parts of K are units of work of their own, which write
    float32 partial results; `add_partials_kernel` adds them in the order of k.
EPILOGUE
    float16: alpha · sum + bias + residual, rounded, goes into 64 × 64 tiles of shared memory (swizzled: a warp's
    words fall into 32 different banks), from where the copy engine writes it while the next tile is multiplied. Each
    consumer has two such tiles. float32: pairs of lanes exchange halves, so that each writes 16 bytes of one row.
LAUNCH
    grid min(units, multiprocessors); 384 threads; STAGES · (128 + BN) · 128 + 32768 bytes of dynamic shared memory. The
    kernel is compiled for 168 registers a thread; the producer gives back all but 40, the consumers take 232.
NEEDS
    sm_90a; all contiguous extents multiples of 8, as the copy engine counts rows in 16 bytes; any M, N, K else.
DETERMINISM
    each output is summed in the order of k by one warpgroup; slices in their order.
SOURCE
    PTX ISA, sections 9.7.15 (wgmma) and 9.7.9.27 (cp.async.bulk.tensor); Osama et al. 2023, "Stream-K",
    arXiv:2301.03598, section 3, on filling a GPU by splitting sums.
READ NEXT
    conv2d.py: the same pipeline, with a convolution's coordinates.
"""
import types

import numpy as np

from ...device import cuda, empty, float32, int32, launch, uint32
from ...device.hopper import (
    bar_sync,
    fence_barrier_init,
    fence_proxy_async,
    make_wgmma,
    make_wgmma_wait,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec_40,
    setmaxnreg_inc_232,
    smem_u32,
    tma_load_2d,
    tma_prefetch,
    tma_store_2d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_1,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait_1,
)
from ...device.tensor_core import load_word, pack_half2, store_word, unpack_half2
from ...device.tensor_map import tensor_map
from .mma import add_partials, unused, write_sums

MINIMUM_CAPABILITY = (9, 0)  # these kernels exist for no other architecture
THREADS = 384  # a producer and two consumer warpgroups
BM, BK = 128, 64  # rows of a block's tile; a step along K: 128 bytes of float16, the widest swizzle
STAGES = {256: 4, 192: 4, 128: 6, 64: 8}  # by BN: what fits into 227 KiB beside the tiles of the epilogue
BOX = 64  # side of a box of an operand that is contiguous along m or n, and of a tile of the epilogue
BOX_BYTES = BOX * BOX * 2
STAGING = 4 * BOX_BYTES  # two tiles for each consumer
GROUP = 16  # rows of tiles that share a sweep over the columns, so that both operands of a round stay in the L2 cache


# Descriptors and places -----------------------------------------------------------------------------------------------

# a swizzle of 128 bytes, 1024 bytes from one group of eight rows to the next, BOX_BYTES from one box to the next
DESCRIPTOR = np.uint64(1 << 62 | 1024 // 16 << 32 | BOX_BYTES // 16 << 16)
LOW_ADDRESS, ADDRESS_UNIT = uint32(0x3FFFF), uint32(4)


@cuda.jit(device=True, forceinline=True)
def descriptor(address):
    """wgmma's name for the matrix that starts at a shared address."""
    return DESCRIPTOR | np.uint64((address & LOW_ADDRESS) >> ADDRESS_UNIT)


@cuda.jit(device=True, forceinline=True)
def tile_place(tile, tiles_m, tiles_n):
    """(row, column) of a tile, in tiles: GROUP rows sweep over the columns together."""
    group = uint32(tile) // uint32(GROUP * tiles_n)
    first = int32(group * GROUP)
    rows = int32(min(int32(GROUP), int32(tiles_m - first)))
    inside = uint32(tile - first * tiles_n)
    return int32(first + int32(inside % uint32(rows))), int32(inside // uint32(rows))


# Epilogues ------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def finish_half(block, buffer, staging, tiles, base, map_c, acc, place, M, N, bias, residual, alpha, has_bias,
                has_residual):
    """64 × 64 outputs of a warpgroup, 32 accumulators a thread, by way of a tile in shared memory; the next buffer.

    place: the warpgroup's first row and column, the thread's first row within those 64, its lane
    Chunk j of row r of that tile lies at j ^ (r % 8), as the copy engine expects it.
    """
    first_row, first_column, thread_row, lane = place
    column = int32(first_column + 64 * block)
    if column < N and first_row < M:  # the same for the whole warpgroup
        warpgroup = cuda.threadIdx.x // 128
        elected = cuda.threadIdx.x % 128 == 0
        if elected:
            tma_store_wait_read_1()  # the tile that this buffer held two blocks ago has been read
        bar_sync(uint32(warpgroup), uint32(128))
        tile = int32(staging + buffer * BOX_BYTES)
        at = int32(tile + thread_row * 128 + lane % 4 * 4)
        row = int32(first_row + thread_row)
        for j in range(8):
            n = int32(column + 8 * j + lane % 4 * 2)
            b0 = b1 = float32(0)
            if has_bias and n < N:
                b0, b1 = bias[uint32(n)], bias[uint32(n + 1)]
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                v0, v1 = alpha * acc[i] + b0, alpha * acc[i + 1] + b1
                if has_residual and row + 8 * half < M and n < N:
                    r0, r1 = unpack_half2(load_word(residual, (row + 8 * half) * N + n))
                    v0, v1 = v0 + r0, v1 + r1
                store_word(tiles, at + 1024 * half + ((j ^ (lane >> 2)) << 4), pack_half2(v0, v1))
        fence_proxy_async()
        bar_sync(uint32(warpgroup), uint32(128))
        if elected:
            tma_store_2d(base + uint32(tile), map_c, uint32(column), uint32(first_row))
            tma_store_commit()
        buffer = int32(buffer ^ 1)
    return buffer


@cuda.jit(device=True, forceinline=True)
def finish_float(block, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate):
    """64 × 64 outputs of a warpgroup as float32, 16 bytes a lane; c from `start` on."""
    first_row, first_column, thread_row, lane = place
    column = int32(first_column + 64 * block)
    if column < N and first_row < M:
        for j in range(8):
            i = 32 * block + 4 * j
            write_sums(c, start, acc[i], acc[i + 1], acc[i + 2], acc[i + 3], int32(first_row + thread_row),
                       int32(column + 8 * j), lane, M, N, bias, alpha, has_bias, accumulate)


# The kernel -----------------------------------------------------------------------------------------------------------
# One text for all kernels. These names are constants in each of them, and have other values: `kernel_for` sets them.

BN, BLOCKS, ACCUMULATORS = 256, 4, 128  # columns of a block's tile, the same in 64s, accumulators of a thread
HALF, A_ALONG_M, B_ALONG_N = True, False, False  # the kind of result; how the operands lie
STAGE_COUNT, BARRIERS, A_BYTES, STAGE_BYTES = 4, 8, 16384, 49152  # of the pipeline; of A in a stage, of A and B
A_STEP = B_STEP = np.uint64(2)  # from 16 of k to the next 16 in units of 16 bytes: 32 bytes along a row, or 16 rows
wgmma, wgmma_wait = make_wgmma(BN), make_wgmma_wait(BN, pin=False)


def gemm(map_a, map_b, map_c, c, bias, residual, M, N, k_tiles, slice_tiles, tiles_m, tiles_n, units, alpha, has_bias,
         has_residual, accumulate):
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    base, full_0 = smem_u32(tiles), smem_u32(barriers)
    empty_0 = full_0 + uint32(8 * STAGE_COUNT)
    t = int32(cuda.threadIdx.x)
    warpgroup = int32(t // 128)
    if t == 0:
        for s in range(STAGE_COUNT):
            mbarrier_init(full_0 + uint32(8 * s), uint32(1))
            mbarrier_init(empty_0 + uint32(8 * s), uint32(2))
        fence_barrier_init()
        tma_prefetch(map_a)
        tma_prefetch(map_b)
        if HALF:
            tma_prefetch(map_c)
    cuda.syncthreads()
    stage, unit = int32(0), int32(cuda.blockIdx.x)
    per_slice = int32(tiles_m * tiles_n)
    if warpgroup == 0:
        setmaxnreg_dec_40()
        if t == 0:
            parity = int32(1)  # a fresh `empty` lets the first round through
            while unit < units:
                part = int32(uint32(unit) // uint32(per_slice))
                tile_m, tile_n = tile_place(int32(unit - part * per_slice), tiles_m, tiles_n)
                m, n, k = int32(tile_m * BM), int32(tile_n * BN), int32(part * slice_tiles)
                k_end = int32(min(int32(k + slice_tiles), int32(k_tiles)))
                while k < k_end:
                    full = full_0 + uint32(8) * uint32(stage)
                    mbarrier_wait(empty_0 + uint32(8) * uint32(stage), uint32(parity))
                    mbarrier_expect_tx(full, uint32(STAGE_BYTES))
                    a = base + uint32(stage) * uint32(STAGE_BYTES)
                    if A_ALONG_M:
                        for i in range(2):
                            tma_load_2d(a + uint32(i * BOX_BYTES), map_a, full, uint32(m + i * BOX), uint32(k * BK))
                    else:
                        tma_load_2d(a, map_a, full, uint32(k * BK), uint32(m))
                    if B_ALONG_N:
                        for i in range(BLOCKS):
                            tma_load_2d(a + uint32(A_BYTES + i * BOX_BYTES), map_b, full, uint32(n + i * BOX),
                                        uint32(k * BK))
                    else:
                        tma_load_2d(a + uint32(A_BYTES), map_b, full, uint32(k * BK), uint32(n))
                    k = int32(k + 1)
                    stage = int32(stage + 1)
                    if stage == STAGE_COUNT:
                        stage, parity = int32(0), int32(parity ^ 1)
                unit = int32(unit + cuda.gridDim.x)
    else:
        setmaxnreg_inc_232()
        acc = cuda.local.array(ACCUMULATORS, "float32")
        consumer = int32(warpgroup - 1)
        elected, lane = t % 128 == 0, int32(t % 32)
        thread_row = int32(t % 128 // 32 * 16 + lane // 4)  # of its first output, within the warpgroup's 64
        a_offset = uint32(consumer) * uint32(BOX_BYTES)  # 64 rows of 64 k, or a box of 64 k × 64 rows: as many bytes
        staging = int32(STAGE_COUNT * STAGE_BYTES + consumer * 2 * BOX_BYTES)
        buffer, parity = int32(0), int32(0)
        while unit < units:
            part = int32(uint32(unit) // uint32(per_slice))
            tile_m, tile_n = tile_place(int32(unit - part * per_slice), tiles_m, tiles_n)
            steps = int32(min(int32(slice_tiles), int32(k_tiles - part * slice_tiles)))

            # the first step overwrites the accumulators; it stands before the loop so that ptxas sees it
            mbarrier_wait(full_0 + uint32(8) * uint32(stage), uint32(parity))
            a = base + uint32(stage) * uint32(STAGE_BYTES)
            da, db = descriptor(a + a_offset), descriptor(a + uint32(A_BYTES))
            wgmma_fence()
            wgmma(acc, da, db, int32(0))
            wgmma(acc, da + A_STEP, db + B_STEP, int32(1))
            wgmma(acc, da + A_STEP + A_STEP, db + B_STEP + B_STEP, int32(1))
            wgmma(acc, da + A_STEP + A_STEP + A_STEP, db + B_STEP + B_STEP + B_STEP, int32(1))
            wgmma_commit()
            previous = stage
            stage = int32(stage + 1)
            if stage == STAGE_COUNT:
                stage, parity = int32(0), int32(parity ^ 1)
            step = int32(1)
            while step < steps:
                mbarrier_wait(full_0 + uint32(8) * uint32(stage), uint32(parity))
                a = base + uint32(stage) * uint32(STAGE_BYTES)
                da, db = descriptor(a + a_offset), descriptor(a + uint32(A_BYTES))
                wgmma_fence()
                wgmma(acc, da, db, int32(1))
                wgmma(acc, da + A_STEP, db + B_STEP, int32(1))
                wgmma(acc, da + A_STEP + A_STEP, db + B_STEP + B_STEP, int32(1))
                wgmma(acc, da + A_STEP + A_STEP + A_STEP, db + B_STEP + B_STEP + B_STEP, int32(1))
                wgmma_commit()
                wgmma_wait_1()  # the stage before has been read: hand it back
                if elected:
                    mbarrier_arrive(empty_0 + uint32(8) * uint32(previous))
                previous = stage
                stage = int32(stage + 1)
                if stage == STAGE_COUNT:
                    stage, parity = int32(0), int32(parity ^ 1)
                step = int32(step + 1)
            wgmma_wait(acc)
            if elected:
                mbarrier_arrive(empty_0 + uint32(8) * uint32(previous))

            first_row, first_column = int32(tile_m * BM + consumer * 64), int32(tile_n * BN)
            # block by block of 64 columns, not in a loop: accumulators stay in registers only under constant indices
            place = (first_row, first_column, thread_row, lane)
            if HALF:
                buffer = finish_half(0, buffer, staging, tiles, base, map_c, acc, place, M, N, bias, residual,
                                     alpha, has_bias, has_residual)
                if BLOCKS > 1:
                    buffer = finish_half(1, buffer, staging, tiles, base, map_c, acc, place, M, N, bias, residual,
                                         alpha, has_bias, has_residual)
                if BLOCKS > 2:
                    buffer = finish_half(2, buffer, staging, tiles, base, map_c, acc, place, M, N, bias, residual,
                                         alpha, has_bias, has_residual)
                if BLOCKS > 3:
                    buffer = finish_half(3, buffer, staging, tiles, base, map_c, acc, place, M, N, bias, residual,
                                         alpha, has_bias, has_residual)
            else:
                start = part * (M * N)
                finish_float(0, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate)
                if BLOCKS > 1:
                    finish_float(1, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate)
                if BLOCKS > 2:
                    finish_float(2, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate)
                if BLOCKS > 3:
                    finish_float(3, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate)
            unit = int32(unit + cuda.gridDim.x)
        if HALF and elected:
            tma_store_wait_0()


def kernel_for(BN, a_along_m, b_along_n, half):
    """The kernel for one width of tile, one case of transposes and one kind of result.

    Its constants are globals of a copy of `gemm`, not a closure: Numba's cache on disk hashes what a closure holds, and
    an intrinsic is never the same twice.
    """
    name = f"gemm_hopper_{BN}_{'t' if a_along_m else 'n'}{'n' if b_along_n else 't'}_{'half' if half else 'float'}"
    stages, a_bytes = STAGES[BN], BM * BK * 2
    constants = {
        "BN": BN, "BLOCKS": BN // 64, "ACCUMULATORS": BN // 2, "HALF": half, "A_ALONG_M": a_along_m,
        "B_ALONG_N": b_along_n, "STAGE_COUNT": stages, "BARRIERS": 2 * stages, "A_BYTES": a_bytes,
        "STAGE_BYTES": a_bytes + BN * BK * 2,
        "A_STEP": np.uint64(128 if a_along_m else 2), "B_STEP": np.uint64(128 if b_along_n else 2),
        "wgmma": make_wgmma(BN, a_along_m, b_along_n), "wgmma_wait": make_wgmma_wait(BN, pin=False)}
    function = types.FunctionType(gemm.__code__, {**globals(), **constants}, name)
    function.__qualname__ = name
    return cuda.jit(function, launch_bounds=(THREADS, 1))  # setmaxnreg needs both numbers


KERNELS = {(BN, a, b, half): kernel_for(BN, a, b, half)
           for BN in STAGES for a in (False, True) for b in (False, True) for half in (False, True)}


# Launcher -------------------------------------------------------------------------------------------------------------

def shared_bytes(width):
    return STAGES[width] * (BM + width) * BK * 2 + STAGING


def map_of(x, along_k, rows):
    """The tensor map of an operand: boxes of `rows` rows of 64 k, or of 64 k with a row of 64 for each."""
    return tensor_map(x, (BK, rows) if along_k else (BOX, BK))


def launch_hopper(a, b, c, M, N, K, transpose_a, transpose_b, bias, residual, alpha, accumulate, width, slices):
    """c = alpha · A·B + bias + residual for matrices of float16; c float16, or float32 and then without residual."""
    half = c.dtype == np.float16
    map_a, map_b = map_of(a, not transpose_a, BM), map_of(b, transpose_b, width)
    map_c = tensor_map(c, (BOX, BOX)) if half else map_a
    k_tiles, tiles_m, tiles_n = -(-K // BK), -(-M // BM), -(-N // width)
    slice_tiles = -(-k_tiles // slices)
    slices = -(-k_tiles // slice_tiles)
    units = slices * tiles_m * tiles_n
    nothing = unused(a)
    biases, residuals = nothing if bias is None else bias, a if residual is None else residual.reshape(M, N)
    end = float(alpha), int(bias is not None)
    target = nothing if half else c.reshape(-1)
    if slices > 1:
        target = empty((slices * M * N,), np.float32, like=a)
    launch(KERNELS[width, transpose_a, not transpose_b, half], min(units, a.backend.multiprocessors), THREADS,
           map_a, map_b, map_c, target, biases, residuals, M, N, k_tiles, slice_tiles, tiles_m, tiles_n, units,
           *(end if slices == 1 else (1.0, 0)), int(residual is not None), int(accumulate and slices == 1),
           shared=shared_bytes(width))
    if slices > 1:
        add_partials(target, c, slices, biases, *end, accumulate)
