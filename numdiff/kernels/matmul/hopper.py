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
    float32 partial results; `add_partials_kernel` adds them in the order of k. 96 tiles for 132 multiprocessors: 96
    blocks sum three quarters of a tile each, the others the last quarter of two or three tiles: two slices where equal
    ones would be four, so half the partial results (`schedule`).
ROW SUMS
    A bias's gradient is the sum of dy over its rows, and dW = dyᵀ·x has dy in shared memory already. Where they are
    asked for, warps 1 and 2 of the producer's warpgroup, idle else, add up 64 rows of A each. To add a step takes about
    as long as to multiply it; so the tiles of a row share the steps (of four, each does every fourth), and the pipeline
    hides them. They hand a stage back as the consumers do. No pass over dy is left.
TWO MATRICES AS ONE
    Of a layer whose x lies in two arrays, side by side as one (`Pair`, concat.py), neither x nor dx is copied: a box or
    a tile of the epilogue is 64 columns wide, so if the first array's are a multiple of 64 each belongs to one array,
    whose tensor map it takes. In x·Wᵀ that is A's, along k, in dy·W the result's, in dyᵀ·x B's.
EPILOGUE
    float16: alpha · sum + bias + residual, rounded, goes into 64 × 64 tiles of shared memory (swizzled: a warp's
    words fall into 32 different banks), from where the copy engine writes it while the next tile is multiplied. Each
    consumer has two such tiles. Of the two products beside a GELU one writes GELU(result) as well, the other multiplies
    by GELU' of another matrix (epilogues.py). float32: pairs of lanes exchange halves, so that each writes 16
    bytes of one row.
LAUNCH
    grid min(units, multiprocessors); 384 threads; STAGES · (128 + BN) · 128 + 32768 bytes of dynamic shared memory. The
    kernel is compiled for 168 registers a thread; the producer gives back all but 40, the consumers take 232 (with row
    sums 56 and 224).
NEEDS
    sm_90a; all contiguous extents multiples of 8, as the copy engine counts rows in 16 bytes; any M, N, K else.
DETERMINISM
    each output is summed in the order of k by one warpgroup; slices in their order.
SOURCE
    PTX ISA, sections 9.7.15 (wgmma) and 9.7.9.27 (cp.async.bulk.tensor); Osama et al. 2023, "Stream-K",
    arXiv:2301.03598, section 3, on filling a GPU by splitting sums.
READ NEXT
    epilogues.py, then ../conv2d/hopper.py: the same pipeline, with a convolution's coordinates.
"""
import types

import numpy as np

from ...device import cuda, empty, float32, int32, launch, uint32
from ...device.hopper import (
    fence_barrier_init,
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_wait,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
    tma_load_2d,
    tma_prefetch,
    tma_store_wait_0,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait_1,
)
from ...device.tensor_map import tensor_map
from ..reduce import column_sum
from .epilogues import (
    BK,
    BM,
    BOX,
    BOX_BYTES,
    add_rows,
    ask_for_bias,
    descriptor,
    exchange,
    finish_float,
    finish_gelu,
    finish_gelu_gradient,
    finish_half,
    keep_bias,
    tile_place,
    write_rows,
)
from .mma import add_partials, unused

MINIMUM_CAPABILITY = (9, 0)  # these kernels exist for no other architecture
THREADS = 384  # a producer and two consumer warpgroups
STAGES = {256: 4, 192: 4, 128: 6, 64: 8}  # by BN: what fits into 227 KiB beside the tiles of the epilogue
STAGING = 4 * BOX_BYTES  # two tiles for each consumer
WRITE_ROW_SUMS, ADD_ROW_SUMS = 1, 2  # what becomes of A's row sums: a tile's are written, those of all of K added


# The kernel -----------------------------------------------------------------------------------------------------------
# One text for all kernels. These names are constants in each of them, and have other values: `kernel_for` sets them.

BN, BLOCKS, ACCUMULATORS = 256, 4, 128  # columns of a block's tile, the same in 64s, accumulators of a thread
BIASES = 512  # numbers of a bias in shared memory: a tile's for each consumer
HALF, A_ALONG_M, B_ALONG_N = True, False, False  # the kind of result; how the operands lie
GELU, GELU_GRADIENT = False, False  # GELU of the result as a second one; the result times GELU' of another matrix
STAGE_COUNT, BARRIERS, A_BYTES, STAGE_BYTES = 4, 8, 16384, 49152  # of the pipeline; of A in a stage, of A and B
A_STEP = B_STEP = np.uint64(2)  # from 16 of k to the next 16 in units of 16 bytes: 32 bytes along a row, or 16 rows
wgmma, wgmma_wait = make_wgmma(BN), make_wgmma_wait(BN, pin=False)
REGISTERS = {False: (40, 232), True: (56, 224)}  # of a producer's and a consumer's thread, without and with row sums
give_registers, take_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


def gemm(map_a, map_b, map_c, map_d, map_2, c, bias, residual, row_sums, M, N, seam, k_tiles, slice_tiles, tiles_m,
         tiles_n, units, alone, alpha, has_bias, has_residual, accumulate, has_row_sums):
    """map_c: of a float16 result; map_d: of GELU's, or of the matrix whose GELU' is a factor; c: a float32 result.

    map_2: of the second part of the matrix that comes in two, whose columns are those from `seam` on
    """
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    biases = cuda.shared.array(BIASES, "float32")
    base, full_0 = smem_u32(tiles), smem_u32(barriers)
    empty_0 = full_0 + uint32(8 * STAGE_COUNT)
    loaded_0, ready_0 = full_0 + uint32(16 * STAGE_COUNT), full_0 + uint32(16 * STAGE_COUNT + 32)
    t = int32(cuda.threadIdx.x)
    warpgroup = int32(t // 128)
    if t == 0:
        for s in range(STAGE_COUNT):
            mbarrier_init(full_0 + uint32(8 * s), uint32(1))
            mbarrier_init(empty_0 + uint32(8 * s), uint32(4) if A_ALONG_M and not HALF and has_row_sums else uint32(2))
        if GELU_GRADIENT:
            for s in range(4):
                mbarrier_init(loaded_0 + uint32(8 * s), uint32(1))
                mbarrier_init(ready_0 + uint32(8 * s), uint32(4))  # a lane of each warp
        fence_barrier_init()
        tma_prefetch(map_a)
        tma_prefetch(map_b)
        if HALF:
            tma_prefetch(map_c)
        if GELU or GELU_GRADIENT:
            tma_prefetch(map_d)
        tma_prefetch(map_2)
    cuda.syncthreads()
    stage, unit = int32(0), int32(cuda.blockIdx.x)
    stride = int32(units if unit < alone else int32(cuda.gridDim.x - alone))
    per_slice = int32(tiles_m * tiles_n)
    if warpgroup == 0:
        give_registers()
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
                    elif not B_ALONG_N and int32(k * BK) >= seam:
                        tma_load_2d(a, map_2, full, uint32(k * BK - seam), uint32(m))
                    else:
                        tma_load_2d(a, map_a, full, uint32(k * BK), uint32(m))
                    if B_ALONG_N:
                        for i in range(BLOCKS):
                            box, column = a + uint32(A_BYTES + i * BOX_BYTES), int32(n + i * BOX)
                            if A_ALONG_M and column >= seam:
                                tma_load_2d(box, map_2, full, uint32(column - seam), uint32(k * BK))
                            else:
                                tma_load_2d(box, map_b, full, uint32(column), uint32(k * BK))
                    else:
                        tma_load_2d(a + uint32(A_BYTES), map_b, full, uint32(k * BK), uint32(n))
                    k = int32(k + 1)
                    stage = int32(stage + 1)
                    if stage == STAGE_COUNT:
                        stage, parity = int32(0), int32(parity ^ 1)
                unit = int32(unit + stride)
        elif GELU_GRADIENT:
            staging = int32(STAGE_COUNT * STAGE_BYTES)
            if t == 32:
                exchange(0, BLOCKS, unit, units, stride, tiles_m, tiles_n, base, staging, loaded_0, ready_0, map_d,
                         map_c, M, N)
            elif t == 64:
                exchange(1, BLOCKS, unit, units, stride, tiles_m, tiles_n, base, int32(staging + 2 * BOX_BYTES),
                         loaded_0 + uint32(16), ready_0 + uint32(16), map_d, map_c, M, N)
        elif A_ALONG_M and not HALF:
            if has_row_sums and t >= 32 and t < 96:
                box, lane, parity = int32(t // 32 - 1), int32(t % 32), int32(0)
                zero = float32(0)
                while unit < units:
                    part = int32(uint32(unit) // uint32(per_slice))
                    tile_m, tile_n = tile_place(int32(unit - part * per_slice), tiles_m, tiles_n)
                    steps = int32(min(int32(slice_tiles), int32(k_tiles - part * slice_tiles)))
                    sums = zero, zero, zero, zero, zero, zero, zero, zero
                    step, due = int32(0), int32(tile_n)
                    while step < steps:
                        mbarrier_wait(full_0 + uint32(8) * uint32(stage), uint32(parity))
                        if due == 0:
                            sums = add_rows(tiles, int32(stage * STAGE_BYTES + box * BOX_BYTES), lane, sums)
                            due = tiles_n
                        due = int32(due - 1)
                        cuda.syncwarp()
                        if lane == 0:
                            mbarrier_arrive(empty_0 + uint32(8) * uint32(stage))
                        stage = int32(stage + 1)
                        if stage == STAGE_COUNT:
                            stage, parity = int32(0), int32(parity ^ 1)
                        step = int32(step + 1)
                    write_rows(row_sums, (part * tiles_n + tile_n) * M, int32(tile_m * BM + box * BOX), M, lane, sums,
                               has_row_sums == ADD_ROW_SUMS)
                    unit = int32(unit + stride)
    else:
        take_registers()
        acc = cuda.local.array(ACCUMULATORS, "float32")
        consumer = int32(warpgroup - 1)
        elected, lane = t % 128 == 0, int32(t % 32)
        thread_row = int32(t % 128 // 32 * 16 + lane // 4)  # of its first output, within the warpgroup's 64
        a_offset = uint32(consumer) * uint32(BOX_BYTES)  # 64 rows of 64 k, or a box of 64 k × 64 rows: as many bytes
        staging = int32(STAGE_COUNT * STAGE_BYTES + consumer * 2 * BOX_BYTES)
        biases_at = int32(consumer * BN)
        turn, parity = int32(0), int32(0)
        c_seam = int32(seam if B_ALONG_N and not A_ALONG_M else N)
        loaded, ready = loaded_0 + uint32(consumer) * uint32(16), ready_0 + uint32(consumer) * uint32(16)
        while unit < units:
            part = int32(uint32(unit) // uint32(per_slice))
            tile_m, tile_n = tile_place(int32(unit - part * per_slice), tiles_m, tiles_n)
            steps = int32(min(int32(slice_tiles), int32(k_tiles - part * slice_tiles)))
            first_row, first_column = int32(tile_m * BM + consumer * 64), int32(tile_n * BN)
            if HALF and not GELU_GRADIENT:
                b0, b1 = ask_for_bias(BN, bias, first_column, N, has_bias)  # they come while the sums are made

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

            if HALF and not GELU_GRADIENT:
                keep_bias(BN, biases, biases_at, b0, b1)
            # block by block of 64 columns, not in a loop: accumulators stay in registers only under constant indices
            place = (first_row, first_column, thread_row, lane)
            if GELU_GRADIENT:
                turn = finish_gelu_gradient(0, turn, staging, tiles, loaded, ready, acc, place, M, N)
                if BLOCKS > 1:
                    turn = finish_gelu_gradient(1, turn, staging, tiles, loaded, ready, acc, place, M, N)
                if BLOCKS > 2:
                    turn = finish_gelu_gradient(2, turn, staging, tiles, loaded, ready, acc, place, M, N)
                if BLOCKS > 3:
                    turn = finish_gelu_gradient(3, turn, staging, tiles, loaded, ready, acc, place, M, N)
            elif GELU:
                finish_gelu(0, staging, tiles, base, map_c, map_d, acc, place, M, N, biases, biases_at,
                            has_residual)
                if BLOCKS > 1:
                    finish_gelu(1, staging, tiles, base, map_c, map_d, acc, place, M, N, biases, biases_at,
                                has_residual)
                if BLOCKS > 2:
                    finish_gelu(2, staging, tiles, base, map_c, map_d, acc, place, M, N, biases, biases_at,
                                has_residual)
                if BLOCKS > 3:
                    finish_gelu(3, staging, tiles, base, map_c, map_d, acc, place, M, N, biases, biases_at,
                                has_residual)
            elif HALF:
                turn = finish_half(0, turn, staging, tiles, base, map_c, map_2, c_seam, acc, place, M, N, biases,
                                   biases_at, residual, alpha, has_residual)
                if BLOCKS > 1:
                    turn = finish_half(1, turn, staging, tiles, base, map_c, map_2, c_seam, acc, place, M, N, biases,
                                       biases_at, residual, alpha, has_residual)
                if BLOCKS > 2:
                    turn = finish_half(2, turn, staging, tiles, base, map_c, map_2, c_seam, acc, place, M, N, biases,
                                       biases_at, residual, alpha, has_residual)
                if BLOCKS > 3:
                    turn = finish_half(3, turn, staging, tiles, base, map_c, map_2, c_seam, acc, place, M, N, biases,
                                       biases_at, residual, alpha, has_residual)
            else:
                start = part * (M * N)
                finish_float(0, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate)
                if BLOCKS > 1:
                    finish_float(1, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate)
                if BLOCKS > 2:
                    finish_float(2, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate)
                if BLOCKS > 3:
                    finish_float(3, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate)
            unit = int32(unit + stride)
        if HALF and not GELU_GRADIENT and elected:
            tma_store_wait_0()


def kernel_for(BN, a_along_m, b_along_n, half, gelu=""):
    """The kernel for one width of tile, one case of transposes and one kind of result.

    gelu: "", "gelu" or "gelu_gradient": what happens at its end

    Its constants are globals of a copy of `gemm`, not a closure: Numba's cache on disk hashes what a closure holds, and
    an intrinsic is never the same twice.
    """
    case = f"{'t' if a_along_m else 'n'}{'n' if b_along_n else 't'}"
    name = f"gemm_hopper_{BN}_{case}_{gelu or ('half' if half else 'float')}"
    stages, a_bytes = STAGES[BN], BM * BK * 2
    fewer, more = REGISTERS[a_along_m and not half]
    constants = {
        "BN": BN, "BLOCKS": BN // 64, "ACCUMULATORS": BN // 2, "BIASES": 2 * BN, "HALF": half, "A_ALONG_M": a_along_m,
        "B_ALONG_N": b_along_n, "GELU": gelu == "gelu", "GELU_GRADIENT": gelu == "gelu_gradient",
        "STAGE_COUNT": stages, "BARRIERS": 2 * stages + (8 if gelu == "gelu_gradient" else 0), "A_BYTES": a_bytes,
        "STAGE_BYTES": a_bytes + BN * BK * 2,
        "A_STEP": np.uint64(128 if a_along_m else 2), "B_STEP": np.uint64(128 if b_along_n else 2),
        "wgmma": make_wgmma(BN, a_along_m, b_along_n), "wgmma_wait": make_wgmma_wait(BN, pin=False),
        "give_registers": make_setmaxnreg(fewer, False), "take_registers": make_setmaxnreg(more, True)}
    function = types.FunctionType(gemm.__code__, {**globals(), **constants}, name)
    function.__qualname__ = name
    return cuda.jit(function, launch_bounds=(THREADS, 1))  # setmaxnreg needs both numbers


KERNELS = {(BN, a, b, half): kernel_for(BN, a, b, half)
           for BN in STAGES for a in (False, True) for b in (False, True) for half in (False, True)}
GELU_KERNELS = {(BN, gelu): kernel_for(BN, False, gelu == "gelu_gradient", True, gelu)
                for BN in STAGES for gelu in ("gelu", "gelu_gradient")}


# Launcher -------------------------------------------------------------------------------------------------------------

def shared_bytes(width):
    return STAGES[width] * (BM + width) * BK * 2 + STAGING


def schedule(tiles, slices, k_tiles, blocks):
    """How `blocks` blocks share the sums of `tiles` tiles: (steps of a slice, slices, units with a block of their own).

    Where all slices but the last find a block each, they are made longer and the last shorter: each of the remaining
    blocks takes several of those, in the time of one of the others.
    """
    alone, steps = (slices - 1) * tiles, -(-k_tiles // slices)
    if 0 < alone < blocks < slices * tiles:
        each = -(-tiles // (blocks - alone))  # short slices for a remaining block
        steps = -(-each * k_tiles // (1 + each * (slices - 1)))
        if steps * (slices - 1) < k_tiles:
            return steps, slices, alone
    return steps, -(-k_tiles // steps), 0


def map_of(x, along_k, rows):
    """The tensor map of an operand: boxes of `rows` rows of 64 k, or of 64 k with a row of 64 for each."""
    return tensor_map(x, (BK, rows) if along_k else (BOX, BK))


def launch_hopper(a, b, c, M, N, K, transpose_a, transpose_b, bias, residual, alpha, accumulate, width, slices,
                  row_sums=None, gelu=None, gelu_of=None, second=None, keeps_u=True):
    """c = alpha · A·B + bias + residual for matrices of float16; c float16, or float32 and then without residual.

    second: the columns of the matrix named in TWO MATRICES AS ONE that follow those of a, b or c; M, N, K are those of
        the whole product
    row_sums: (M,), to which the sums of A's rows are added; for a float32 c and an A along m (transpose_a)
    gelu: like a float16 c, for A·Bᵀ: is given GELU(c), and c itself is written only if keeps_u
    gelu_of: like it, for A·B without bias and residual: a factor GELU'(gelu_of)
    """
    half = c.dtype == np.float16
    map_a, map_b = map_of(a, not transpose_a, BM), map_of(b, transpose_b, width)
    map_c = tensor_map(c, (BOX, BOX)) if half else map_a
    other = gelu if gelu is not None else gelu_of
    map_d = map_a if other is None else tensor_map(other.reshape(M, N), (BOX, BOX))
    map_2, seam = map_a, max(N, K) + width
    if second is not None:
        split = b if transpose_a else a if transpose_b else c
        seam = split.shape[1]
        map_2 = (map_of(second, False, width) if split is b else map_of(second, True, BM) if split is a else
                 tensor_map(second, (BOX, BOX)))
    k_tiles, tiles_m, tiles_n = -(-K // BK), -(-M // BM), -(-N // width)
    slice_tiles, slices, alone = schedule(tiles_m * tiles_n, slices, k_tiles, a.backend.multiprocessors)
    units = slices * tiles_m * tiles_n
    nothing = unused(a)
    biases, residuals = nothing if bias is None else bias, a if residual is None else residual.reshape(M, N)
    end = float(alpha), int(bias is not None)
    target = nothing if half else c.reshape(-1)
    sums, summing = nothing if row_sums is None else row_sums, 0 if row_sums is None else ADD_ROW_SUMS
    if slices > 1:
        target = empty((slices * (M * N + (0 if row_sums is None else tiles_n * M)),), np.float32, like=a)
    if row_sums is not None and slices * tiles_n > 1:
        sums = target[slices * M * N:] if slices > 1 else empty((tiles_n * M,), np.float32, like=a)
        summing = WRITE_ROW_SUMS
    kernel = KERNELS[width, transpose_a, not transpose_b, half]
    if other is not None:
        kernel = GELU_KERNELS[width, "gelu_gradient" if gelu is None else "gelu"]
    launch(kernel, min(units, a.backend.multiprocessors), THREADS, map_a, map_b, map_c, map_d, map_2, target,
           biases, residuals, sums, M, N, seam, k_tiles, slice_tiles, tiles_m, tiles_n, units, alone,
           *(end if slices == 1 else (1.0, 0)), int(residual is not None or gelu is not None and keeps_u),
           int(accumulate and slices == 1), summing, shared=shared_bytes(width))
    if slices > 1:
        add_partials(target, c, slices, biases, *end, accumulate, row_sums, slices * tiles_n)
    elif summing == WRITE_ROW_SUMS:
        column_sum(sums.reshape(tiles_n, M), row_sums)
