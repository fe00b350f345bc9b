"""Matmul in float16, rung 6: Hopper's wgmma, fed by TMA (sm_90a).

WHAT IS NEW, AND WHY IT PAYS
    wgmma: four warps issue one instruction that multiplies 64 × 16 by 16 × up to 256, both straight from shared memory.
        Rung 5 spends an instruction on every 16 × 8 × 16 and loads its operands into registers first.
    TMA: one thread asks the tensor memory accelerator for a whole tile. No thread computes an address, no register
        holds data on its way, and what lies outside a matrix arrives as zeros.
    Warp specialisation: warpgroup 0 only asks for tiles, warpgroups 1 and 2 only multiply. Between them are STAGES
        pairs of tiles in shared memory, with two mbarriers for each: `full`, on which TMA counts bytes, and `empty`,
        at which the two consumers arrive when they have read it.
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
    A weight's gradient has few tiles and a long sum. K is cut into `slices`, each slice of a tile is a work tile of its
    own, which writes float32 partial results, and ../second_pass.py adds these in a fixed order. Slices need not
    be equal: with 96 tiles for 132 multiprocessors, 96 blocks sum three quarters of a tile each and the others the last
    quarter of two or three tiles. That is two slices instead of four equal ones, and half the partial results
    (`schedule`).
ROW SUMS
    A bias's gradient is the sum of dy over its rows, and dW = dyᵀ·x has dy in shared memory already. If these sums are
    asked for, warps 1 and 2 of the producer's warpgroup, which have nothing else to do, add up 64 rows of A each.
    Adding up a step takes about as long as multiplying it; so the tiles of a row share the steps (with four tiles, each
    adds every fourth step), and the pipeline hides them. The two warps release a stage as the consumers do. No separate
    pass over dy is left.
TWO MATRICES AS ONE
    Where a layer's x is two arrays that are read side by side as one (`Pair`, concat.py), neither x nor dx is copied: a
    box or a tile of the epilogue is 64 columns wide, so if the first array has a multiple of 64 columns, each box is in
    one of the two arrays and uses its tensor map. In x·Wᵀ the Pair is A, along k; in dy·W the result; in dyᵀ·x, B.
PAIRS
    Two blocks of a cluster work on two tiles of one column, one below the other: with the same tile of B. Each asks for
    half of it, and TMA multicasts what it reads to both; so a step brings (128 + BN / 2) · 128 bytes from the L2 cache
    to a multiprocessor instead of (128 + BN) · 128. The price: both blocks' consumers must have read a stage before
    either producer may fill it again, so a consumer arrives at `empty` of both blocks, and a producer ends only when
    all have arrived. The products are the same ones, in the same order: the same bits.
BATCHES
    of float16 results, with M a multiple of 128 and K of 64: the matrices of C are one tall matrix, no tile has rows of
    two of them, and only the producer must know which matrix a tile belongs to, to fetch the right rows of A and B.
    Where C is known to be symmetric, only its tiles on and below the diagonal are work (symmetric_epilogue.py).
STACKS
    Layers of one input whose weights lie at equal distances in memory, as those of a model's blocks do, are one product
    with N or K as long as all together, or M of the weights' gradient (stack.py): the tensor map of the weights has the
    distance, and a gradient's tile adds it to its place.
GROUPS
    The gradients of up to four weights, sums over the same rows, are one launch: the tiles of all are counted through,
    and only those that do not fill a round of all blocks are cut into slices (group_schedule.py, group.py).
EPILOGUE
    float16: alpha · accumulator + bias + residual, rounded, goes into 64 × 64 tiles of shared memory (swizzled: a
    warp's words fall into 32 different banks), from which TMA stores it while the next tile is multiplied. Each
    consumer has two such tiles. Of the two products next to a GELU, one writes GELU(result) as well, the other
    multiplies by GELU' of another matrix, and may put that matrix's GELU in its place (epilogues.py); those next to a
    SwiGLU have epilogues of their own (swiglu_epilogues.py). A product whose result is gated and added to a residual,
    in a DiT that is not trained, writes that sum.
    float32: pairs of lanes exchange halves, so that each writes 16 bytes of one row.
MEASURED
    NVIDIA H200, 2026-11-26, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    matmul_forward, 8192×8192, 8192×8192, transpose_b, float16
        v6*    1,651 µs   666 TFLOP/s   67 % of arithmetic   2.34 × v5   100 % of cuBLAS
LAUNCH
    grid min(units, multiprocessors); 384 threads; STAGES · (128 + BN) · 128 + 32768 bytes of dynamic shared memory, or
    65536 beside TWO_TILES_STAGES stages. The kernel is compiled for 168 registers a thread; the producer gives back all
    but 40, the consumers take 232 (with row sums 56 and 224).
NEEDS
    sm_90a; all contiguous extents multiples of 8, because TMA needs rows that are multiples of 16 bytes; otherwise M, N
    and K are free, but for a batch.
DETERMINISM
    each output is summed in the order of k by one warpgroup; slices in their order.
SOURCE
    PTX ISA, sections 9.7.15 (wgmma) and 9.7.9.27 (cp.async.bulk.tensor); Osama et al. 2023, "Stream-K",
    arXiv:2301.03598, section 3, on filling a GPU by splitting sums.
READ NEXT
    epilogues.py, then ../conv2d/hopper/: the same pipeline, with a convolution's coordinates.
"""
import itertools
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, launch, load4, store4, uint32
from ...device.cluster import cluster_address, cluster_rank, cluster_sync, mbarrier_arrive_cluster
from ...device.eight import array_of, fence
from ...device.half import in_bfloat16
from ...device.limits import MULTIPROCESSORS, WARP, WARPGROUP
from ...device.mbarrier import bar_sync, fence_barrier_init, mbarrier_init, mbarrier_wait, smem_u32
from ...device.pipeline import (
    advance,
    barrier_at,
    consumer_release,
    consumer_start,
    consumer_wait,
    init_ring,
    make_ring,
    producer_acquire,
    producer_start,
    stage_at,
)
from ...device.requires import requires
from ...device.specialise import Constant, Variants, specialise
from ...device.tensor_map import tensor_map
from ...device.tma import tma_load_2d, tma_load_2d_multicast, tma_load_3d, tma_prefetch, tma_store_wait_0
from ...device.wgmma import make_setmaxnreg, make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence, wgmma_wait_1
from ...dtypes import is_half
from ..quantise import keep_largest
from ..second_pass import Sum, add_parts
from .epilogues import (
    BK,
    BM,
    BOX,
    BOX_BYTES,
    Gated,
    Place,
    Staging,
    add_rows,
    descriptor,
    epilogue_float,
    epilogue_gate,
    epilogue_gelu,
    epilogue_gelu_again_gradient,
    epilogue_gelu_gradient,
    epilogue_half,
    epilogue_layer_scale,
    exchange,
    prefetch_bias,
    prefetch_gates,
    row_of_pair,
    stage_bias,
    tile_place,
    write_rows,
)
from .fp8_epilogues import epilogue_gelu_eight, epilogue_gelu_gradient_eight
from .group_schedule import PRODUCTS, group_tile, of_product, parts_of, unit_after, walk_of
from .mma import add_partials, unused
from .swiglu_epilogues import epilogue_swiglu, epilogue_swiglu_gradient, prefetch_biases
from .symmetric_epilogue import epilogue_symmetric, symmetric_place, tiles_of

THREADS = 384  # a producer and two consumer warpgroups
STAGES = {256: 4, 192: 4, 128: 6, 64: 8}  # by BN: what fits into 227 KiB beside the tiles of the epilogue
# … and where a consumer has four of these instead of two: u1 and u2 of two blocks, which become du1 and du2; or u,
# which becomes du, and GELU(u)
TWO_TILES_STAGES = {256: 3, 192: 4, 128: 5, 64: 6}
TWO_TILES = "gelu_again_gradient", "swiglu_gradient"
SWIGLU_WIDTHS = 256, 128  # of a tile that has two blocks of 64 columns, or four, in pairs
PAIR_WIDTHS, PAIR_ACTIVATIONS = (256, 192), ("gelu", "gelu_gradient", "gelu_again_gradient")
PAIRS_AT_ONCE = 66  # of an H100 with 132 multiprocessors (cuOccupancyMaxActiveClusters)
WRITE_ROW_SUMS, ADD_ROW_SUMS = 1, 2  # what becomes of A's row sums: a tile's are written, those of all of K added
A_BYTES = BM * BK * 2  # of A in a stage
ACTIVATIONS = {"gate": STAGES, "gelu": STAGES, "gelu_gradient": STAGES, "swiglu": SWIGLU_WIDTHS,
               "swiglu_gradient": STAGES, "layer_scale": (256, 128, 64), "gelu_again_gradient": STAGES}  # widths
SYMMETRIC_WIDTHS = 128, 256  # 192 takes as many tiles of a symmetric matrix as 256, or more
REGISTERS = {False: (40, 232), True: (56, 224)}  # of a producer's and a consumer's thread, without and with row sums


def stages_of(width, two_tiles):
    """Stages of the pipeline of a kernel."""
    return (TWO_TILES_STAGES if two_tiles else STAGES)[width]


# Constants of a kernel ------------------------------------------------------------------------------------------------

BN = Constant()  # columns of a block's tile: 64, 128, 192 or 256
A_ALONG_M, B_ALONG_N = Constant(), Constant()  # how the operands lie: along k, or along m or n
HALF = Constant()  # whether the result is float16
FP8 = Constant()  # whether the operands are E4M3, both along k: see hopper_fp8.py
PROMOTED = Constant()  # … and each stage's products are added up apart
EIGHT = Constant()  # … and so is what GELU, or its derivative, makes of the result
PAIRED = Constant()  # two blocks of a cluster share their tiles of B: see PAIRS
BATCHED = Constant()  # more than one product: see BATCHES
SYMMETRIC = Constant()  # … of a symmetric result, of which only one half is multiplied
STACKED = Constant()  # B, or C where A lies along m, are several matrices at equal distances: see STACKS
GROUPED = Constant()  # several products with the same K: see GROUPS
GATE = Constant()  # the result is gated and added to another matrix
GELU = Constant()  # GELU of the result as a second one
GELU_GRADIENT = Constant()  # the result times GELU' of another matrix
GELU_AGAIN_GRADIENT = Constant()  # … and GELU of that matrix in its place
SWIGLU = Constant()  # SwiGLU of the result as a second one
SWIGLU_GRADIENT = Constant()  # SwiGLU's backward with the result as dy: twice as many columns
LAYER_SCALE = Constant()  # the result times a vector, plus the residual, as a second one
TILES_OF_BLOCK = Constant(lambda GELU_AGAIN_GRADIENT, SWIGLU_GRADIENT:
                          2 if GELU_AGAIN_GRADIENT or SWIGLU_GRADIENT else 1)  # that leave shared memory together
EXCHANGES = Constant(lambda GATE, GELU_GRADIENT, TILES_OF_BLOCK: GATE or GELU_GRADIENT or TILES_OF_BLOCK == 2)
BIASED = Constant(lambda HALF, GATE, EXCHANGES, SYMMETRIC: HALF and (GATE or not EXCHANGES and not SYMMETRIC))  # maybe
GROUPS = Constant(lambda BN: BN // 8)  # of eight columns in a tile
BLOCKS = Constant(lambda BN, SWIGLU: BN // 64 // (2 if SWIGLU else 1))  # of 64 columns in a tile, or pairs of such
COLUMNS = Constant(lambda BLOCKS: BLOCKS * 64)  # of a tile, or of each half in it
ACCUMULATORS = Constant(lambda BN: BN // 2)  # of a thread
BIASES = Constant(lambda BN: 2 * BN)  # numbers of a bias in shared memory: a tile's for each consumer
RELEASES = Constant(lambda PAIRED: 4 if PAIRED else 2)  # of a stage, by the warpgroups that read it
STAGE_COUNT = Constant(lambda BN, TILES_OF_BLOCK: stages_of(BN, TILES_OF_BLOCK == 2))  # of the pipeline
STAGE_BYTES = Constant(lambda BN: A_BYTES + BN * BK * 2)  # of A and B
BARRIERS = Constant(lambda STAGE_COUNT, EXCHANGES: 2 * STAGE_COUNT + 8 * EXCHANGES)
ROW_SUMS = Constant(lambda A_ALONG_M, HALF: A_ALONG_M and not HALF)  # whether the kernel can make them
# from 16 of k to the next 16 in units of 16 bytes: 32 bytes along a row, or 16 rows
A_STEP = Constant(lambda A_ALONG_M: np.uint64(128 if A_ALONG_M else 2))
B_STEP = Constant(lambda B_ALONG_N: np.uint64(128 if B_ALONG_N else 2))
STEP = Constant(lambda FP8: 2 * BK if FP8 else BK)  # of k in a stage
wgmma = Constant(lambda BN, A_ALONG_M, B_ALONG_N, FP8: make_wgmma(BN, A_ALONG_M, B_ALONG_N, "e4m3" if FP8 else "f16"))
wgmma_wait = Constant(lambda BN: make_wgmma_wait(BN, pin=False))
give_registers = Constant(lambda ROW_SUMS: make_setmaxnreg(REGISTERS[ROW_SUMS][0], False))
take_registers = Constant(lambda ROW_SUMS: make_setmaxnreg(REGISTERS[ROW_SUMS][1], True))


# Arguments ------------------------------------------------------------------------------------------------------------

class Maps(NamedTuple):
    """Tensor maps: of the operands; of a float16 result; of the activation's, or of the matrix whose derivative is a
    factor, or of a gated product's residual; of the second part of the matrix that comes in two."""

    a: object
    b: object
    c: object
    d: object
    second: object


class Arrays(NamedTuple):
    """c: a float32 result (or partial ones); bias (N,) float32; residual (M, N) float16, or a `Gated`, whose residual
    has a tensor map, or a `Stack`; row_sums (M,) float32, with LAYER_SCALE the scale (N,). Of a group c are the
    products' results, bias the parts of tiles that are cut, residual how many of them there are, row_sums all sums."""

    c: object
    bias: object
    residual: object
    row_sums: object


class Extent(NamedTuple):
    """Rows and columns of a product of a group."""

    M: int
    N: int


class Stack(NamedTuple):
    """What lies between one weight's, or gradient's, last element and the next one's first, and between biases."""

    gap: int
    bias_gap: int


class Work(NamedTuple):
    """The product's size, and how it is cut into units: the tiles of C, for each slice of K.

    tiles_n: of a row; of a symmetric C the tiles of one matrix, tiles_m: how many matrices; of a paired kernel tiles_m
        and units count pairs of tiles
    M: of all matrices of a batch; seam: the first column of the matrix in two parts that is the second part's, or M of
        one matrix of a batch, or the rows of one weight of a stack
    k_tiles: steps along K, slice_tiles: of one slice; alone: units with a block of their own (`schedule`)
    """

    M: int
    N: int
    seam: int
    k_tiles: int
    slice_tiles: int
    tiles_m: int
    tiles_n: int
    units: int
    alone: int


class Epilogue(NamedTuple):
    """What becomes of the accumulators. has_residual: with an activation, whether u is written, too;
    has_row_sums: 0, or WRITE_ROW_SUMS, ADD_ROW_SUMS; diagonal: what a symmetric C has added where row == column."""

    alpha: float
    has_bias: int
    has_residual: int
    accumulate: int
    has_row_sums: int
    diagonal: float


class WorkTile(NamedTuple):
    """A unit of work: the tile in this row and column of tiles, of slice number `part`: steps first_k … end_k - 1."""

    part: int
    row: int
    column: int
    first_k: int
    end_k: int


@cuda.jit(device=True, forceinline=True)
def work_tile(unit, work):
    """The `WorkTile` that is unit number `unit`."""
    per_slice = int32(work.tiles_m * work.tiles_n)
    part = int32(uint32(unit) // uint32(per_slice))
    if SYMMETRIC:
        matrix = int32(uint32(unit) // uint32(work.tiles_n))
        row, column = symmetric_place(int32(unit - matrix * work.tiles_n), BN)
        row = int32(row + matrix * (work.seam // BM))
    else:
        row, column = tile_place(int32(unit - part * per_slice), work.tiles_m, work.tiles_n)
        if PAIRED:
            row = row_of_pair(row)
    first_k = int32(part * work.slice_tiles)
    return WorkTile(part, row, column, first_k, int32(min(int32(first_k + work.slice_tiles), int32(work.k_tiles))))


@cuda.jit(device=True, forceinline=True)
def is_work(unit, stride, work):
    """Whether there is a unit number `unit`, or with `GROUPED` whether the block has it; stride: there a `Walk`."""
    if GROUPED:
        return unit < stride.last
    return unit < work.units


@cuda.jit(device=True, forceinline=True)
def tile_at(unit, stride, work):
    """The `WorkTile`, or `GroupTile`, that is a unit of the block."""
    if GROUPED:
        return group_tile(unit, stride, work)
    return work_tile(unit, work)


@cuda.jit(device=True, forceinline=True)
def next_unit(unit, tile, stride, work):
    """The block's unit after this tile."""
    if GROUPED:
        return unit_after(unit, tile, stride, work)
    return int32(unit + stride)


# The producer's warpgroup ---------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def load_a(address, full, m, k, maps, seam):
    """Ask for a stage's tile of A, from row m and column k on."""
    if A_ALONG_M:
        for i in range(2):
            tma_load_2d(address + uint32(i * BOX_BYTES), maps.a, full, uint32(m + i * BOX), uint32(k))
    elif not BATCHED and not STACKED and not B_ALONG_N and k >= seam:
        tma_load_2d(address, maps.second, full, uint32(k - seam), uint32(m))
    else:
        tma_load_2d(address, maps.a, full, uint32(k), uint32(m))


@cuda.jit(device=True, forceinline=True)
def load_box(i, address, box_map, full, x, y, rows):
    """Ask for box number i of B at column x and row y; of a pair of blocks each asks for every other, for both. rows:
    of one matrix of a stack."""
    if STACKED and not A_ALONG_M:
        matrix = uint32(y) // uint32(rows)
        tma_load_3d(address, box_map, full, uint32(x), uint32(y) - matrix * uint32(rows), matrix)
    elif PAIRED:
        if cluster_rank() == uint32(i & 1):
            tma_load_2d_multicast(address, box_map, full, uint32(3), uint32(x), uint32(y))
    else:
        tma_load_2d(address, box_map, full, uint32(x), uint32(y))


@cuda.jit(device=True, forceinline=True)
def load_b(address, full, n, k, maps, seam):
    """Ask for a stage's tile of B, from column n and row k on."""
    if B_ALONG_N:
        for i in range(BLOCKS):
            box, column = address + uint32(i * BOX_BYTES), int32(n + i * BOX)
            if not BATCHED and not STACKED and not GROUPED and A_ALONG_M and column >= seam:
                load_box(i, box, maps.second, full, column - seam, k, seam)
            else:
                load_box(i, box, maps.b, full, column, k, seam)
    elif PAIRED:  # boxes of half as many rows
        for i in range(2):
            load_box(i, address + uint32(i * BN * BK), maps.b, full, k, n + i * (BN // 2), seam)
    else:
        load_box(0, address, maps.b, full, k, n, seam)


@cuda.jit(device=True, forceinline=True)
def load_halves(address, full, n, k, maps, H):
    """`load_b` of a weight along k with 2 · H rows: those of u1's columns from n on, then those of u2's."""
    for half in range(2):
        load_box(half, address + uint32(half * COLUMNS * BK * 2), maps.b, full, k, n + half * H, H)


@cuda.jit(device=True, forceinline=True)
def load_of_batch(address, full, m, n, k, maps, work):
    """Both tiles: an operand along k is one tall matrix, in which A's row m is right already; of one along m or n the
    batch is stacked along k."""
    matrix = int32(uint32(m) // uint32(work.seam))
    below = int32(k + matrix * work.k_tiles * BK)
    if A_ALONG_M:
        load_a(address, full, int32(m - matrix * work.seam), below, maps, work.seam)
    else:
        load_a(address, full, m, k, maps, work.seam)
    if B_ALONG_N:
        load_b(address + uint32(A_BYTES), full, n, below, maps, work.seam)
    else:
        load_b(address + uint32(A_BYTES), full, int32(n + matrix * work.N), k, maps, work.seam)


@cuda.jit(device=True, forceinline=True)
def produce(ring, unit, stride, maps, work):
    """One thread asks TMA for the tiles of A and B, stage after stage, of all work tiles of the block."""
    stage, parity = producer_start()
    while is_work(unit, stride, work):
        tile = tile_at(unit, stride, work)
        m, n, k = int32(tile.row * BM), int32(tile.column * COLUMNS), tile.first_k
        if GROUPED:
            map_a, map_b = array_of(tile.product, maps.a), array_of(tile.product, maps.b)
        while k < tile.end_k:
            full = producer_acquire(ring, stage, parity, STAGE_BYTES)
            address = stage_at(ring, stage)
            if BATCHED:
                load_of_batch(address, full, m, n, int32(k * BK), maps, work)
            elif GROUPED:
                mine = Maps(map_a, map_b, map_a, map_a, map_a)
                load_a(address, full, m, int32(k * BK), mine, int32(0))
                load_b(address + uint32(A_BYTES), full, n, int32(k * BK), mine, int32(0))
            else:
                load_a(address, full, m, int32(k * STEP), maps, work.seam)
                if SWIGLU:
                    load_halves(address + uint32(A_BYTES), full, n, int32(k * STEP), maps, work.N)
                else:
                    load_b(address + uint32(A_BYTES), full, n, int32(k * STEP), maps, work.seam)
            k = int32(k + 1)
            stage, parity = advance(ring, stage, parity)
        unit = next_unit(unit, tile, stride, work)
    if PAIRED:  # the other block's consumers arrive here, too: the block must not end before
        for _ in range(STAGE_COUNT):
            mbarrier_wait(barrier_at(ring.empty, stage), parity)
            stage, parity = advance(ring, stage, parity)


@cuda.jit(device=True, forceinline=True)
def sum_rows(ring, tiles, unit, stride, arrays, work, summing):
    """Two warps add up 64 rows of A each, of every stage that falls to their tile."""
    box, lane = int32(cuda.threadIdx.x // WARP - 1), int32(cuda.threadIdx.x % WARP)
    zero = float32(0)
    sharing = int32(1)  # tiles of a row share the steps; of a stack's the first has all
    if not STACKED and not GROUPED:
        sharing = work.tiles_n
    stage, parity = consumer_start()
    while is_work(unit, stride, work):
        tile = tile_at(unit, stride, work)
        steps = int32(tile.end_k - tile.first_k)
        sums = zero, zero, zero, zero, zero, zero, zero, zero
        step, due = int32(0), int32(steps if STACKED and tile.column > 0 else tile.column)
        if GROUPED:  # by their numbers, as its slices begin anywhere
            sharing = of_product(tile.product, work.tiles_n)
            due = int32(uint32(tile.column + tile.first_k * (sharing - 1)) % uint32(sharing))
        while step < steps:
            consumer_wait(ring, stage, parity)
            if due == 0:
                sums = add_rows(tiles, int32(stage * STAGE_BYTES + box * BOX_BYTES), lane, sums)
                due = sharing
            due = int32(due - 1)
            cuda.syncwarp()
            if lane == 0:
                consumer_release(ring, stage)
            stage, parity = advance(ring, stage, parity)
            step = int32(step + 1)
        row = int32(tile.row * BM + box * BOX)
        if STACKED:
            if tile.column == 0:
                matrix = int32(uint32(row) // uint32(work.seam))
                write_rows(arrays.row_sums, matrix * arrays.residual.bias_gap, row, work.M, lane, sums, True)
        elif GROUPED:
            M, part = of_product(tile.product, work.M), tile.part
            last = int32(work.parts if tile.end_k == work.k_tiles else int32(part + 1))
            while part < last:  # and zeros in place of the parts that others have
                write_rows(arrays.row_sums, of_product(tile.product, work.sums) + (part * sharing + tile.column) * M,
                           row, M, lane, sums, False)
                sums = zero, zero, zero, zero, zero, zero, zero, zero
                part = int32(part + 1)
        else:
            write_rows(arrays.row_sums, (tile.part * work.tiles_n + tile.column) * work.M, row, work.M, lane, sums,
                       summing == ADD_ROW_SUMS)
        unit = next_unit(unit, tile, stride, work)


# The consumers' warpgroups --------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def release(ring, stage):
    """A warpgroup has read a stage: both producers of a pair may fill it."""
    consumer_release(ring, stage)
    if PAIRED:
        mbarrier_arrive_cluster(cluster_address(barrier_at(ring.empty, stage), cluster_rank() ^ uint32(1)))


@cuda.jit(device=True, forceinline=True)
def multiply_rest(acc, a, b):
    """acc += the products of a stage, except those of its first 16 of k; a, b: descriptors."""
    wgmma(acc, a + A_STEP, b + B_STEP, int32(1))
    wgmma(acc, a + A_STEP + A_STEP, b + B_STEP + B_STEP, int32(1))
    wgmma(acc, a + A_STEP + A_STEP + A_STEP, b + B_STEP + B_STEP + B_STEP, int32(1))


@cuda.jit(device=True, forceinline=True)
def main_loop(acc, ring, stage, parity, steps, a_offset, elected):
    """acc = the products of `steps` stages; returns the ring's stage and parity after them.

    The first stage overwrites the accumulators; it stands before the loop so that ptxas sees it. A stage is released
    when the products of the next are under way.
    """
    consumer_wait(ring, stage, parity)
    address = stage_at(ring, stage)
    a, b = descriptor(address + a_offset), descriptor(address + uint32(A_BYTES))
    wgmma_fence()
    wgmma(acc, a, b, int32(0))
    multiply_rest(acc, a, b)
    wgmma_commit()
    previous = stage
    stage, parity = advance(ring, stage, parity)
    step = int32(1)
    while step < steps:
        consumer_wait(ring, stage, parity)
        address = stage_at(ring, stage)
        a, b = descriptor(address + a_offset), descriptor(address + uint32(A_BYTES))
        wgmma_fence()
        wgmma(acc, a, b, int32(1))
        multiply_rest(acc, a, b)
        wgmma_commit()
        wgmma_wait_1()
        if elected:
            release(ring, previous)
        previous = stage
        stage, parity = advance(ring, stage, parity)
        step = int32(step + 1)
    wgmma_wait(acc)
    if elected:
        release(ring, previous)
    return stage, parity


@cuda.jit(device=True, forceinline=True)
def promoted_loop(sums, ring, stage, parity, steps, a_offset, elected):
    """As `main_loop`, with each stage's products in accumulators of their own, which float32 additions then add to
    `sums`: the tensor cores keep fewer bits of a sum. Meanwhile they multiply for the other consumer."""
    acc = cuda.local.array(ACCUMULATORS, "float32")
    for i in range(ACCUMULATORS):
        sums[i] = float32(0)
    step = int32(0)
    while step < steps:
        consumer_wait(ring, stage, parity)
        address = stage_at(ring, stage)
        a, b = descriptor(address + a_offset), descriptor(address + uint32(A_BYTES))
        wgmma_fence()
        wgmma(acc, a, b, int32(0))
        multiply_rest(acc, a, b)
        wgmma_commit()
        wgmma_wait(acc)
        if elected:
            release(ring, stage)
        for i in range(ACCUMULATORS):
            sums[i] += acc[i]
        stage, parity = advance(ring, stage, parity)
        step = int32(step + 1)
    return stage, parity


@cuda.jit(device=True, forceinline=True)
def write_block(block, turn, amax, acc, gates, place, staging, part, maps, arrays, work, epilogue):
    """The epilogue of a warpgroup's block of 64 columns (of SwiGLU: of a pair of blocks); returns the next turn of its
    two tiles in shared memory, and with `EIGHT` the largest magnitudes so far, two float16: amax."""
    if EIGHT:
        if GELU_GRADIENT:
            turn, amax = epilogue_gelu_gradient_eight(block, turn, amax, acc, place, staging, arrays.scale_c, work)
        else:
            amax = epilogue_gelu_eight(block, amax, acc, place, staging, maps, arrays.scale_c, work,
                                       epilogue.has_residual)
    elif GELU_GRADIENT:
        turn = epilogue_gelu_gradient(block, turn, acc, place, staging, work)
    elif GELU_AGAIN_GRADIENT:
        turn = epilogue_gelu_again_gradient(block, turn, acc, place, staging, work)
    elif GATE:
        turn = epilogue_gate(block, turn, acc, gates, place, staging, work)
    elif GELU:
        epilogue_gelu(block, acc, place, staging, maps, work, epilogue.has_residual)
    elif LAYER_SCALE:
        epilogue_layer_scale(block, acc, place, staging, maps, arrays.residual, arrays.row_sums, work,
                             epilogue.has_residual)
    elif SWIGLU_GRADIENT:
        turn = epilogue_swiglu_gradient(block, turn, acc, place, staging, work)
    elif SWIGLU:
        turn = epilogue_swiglu(block, BLOCKS, turn, acc, place, staging, maps, work, epilogue.has_residual)
    elif SYMMETRIC:
        epilogue_symmetric(block, acc, place, staging, maps, arrays.residual, work, epilogue)
    elif HALF:
        seam = int32(work.seam if B_ALONG_N and not A_ALONG_M and not BATCHED and not STACKED else work.N)
        if STACKED:
            turn = epilogue_half(block, turn, acc, place, staging, seam, maps, arrays.c, work, epilogue)
        else:
            turn = epilogue_half(block, turn, acc, place, staging, seam, maps, arrays.residual, work, epilogue)
    else:
        start = part if GROUPED else part * (work.M * work.N)
        if STACKED and A_ALONG_M:
            start = int32(uint32(place.first_row) // uint32(work.seam)) * arrays.residual.gap
        epilogue_float(block, acc, place, arrays.c, start, arrays.bias, work, epilogue)
    return turn, amax


@cuda.jit(device=True, forceinline=True)
def add_part(acc, parts, at):
    """acc += a warpgroup's part of a tile, of which this thread's numbers begin at `at`: all loads may be under way."""
    for i in range(ACCUMULATORS // 4):
        v0, v1, v2, v3 = load4(parts, at + 4 * WARPGROUP * i)
        acc[4 * i] += v0
        acc[4 * i + 1] += v1
        acc[4 * i + 2] += v2
        acc[4 * i + 3] += v3


@cuda.jit(device=True, forceinline=True)
def join_parts(acc, tile, consumer, parts, counters, staging, group):
    """Leave a warpgroup's part of a tile that was cut, and count it; whether it is the last one, which then has the
    sum of all parts in its accumulators, added up in their order."""
    thread, barrier = int32(cuda.threadIdx.x % WARPGROUP), uint32(consumer + 1)
    number, count = int32(tile.number - group.whole), parts_of(tile.number, group)
    size = int32(BM * BN // 2)  # of a warpgroup's part
    first = int32((2 * number + consumer) * group.parts * size + 4 * thread)
    at = int32(first + tile.part * size)
    for i in range(ACCUMULATORS // 4):
        store4(parts, at + 4 * WARPGROUP * i, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3])
    bar_sync(barrier, uint32(WARPGROUP))
    if thread == 0:
        fence()  # a warpgroup that sees this count also sees what this one has written
        before = cuda.atomic.inc(counters, int32(2 * number + consumer), uint32(count - 1))
        fence()  # nothing that is read from here on is older than the count
        staging.biases[staging.biases_at] = float32(1) if int32(before) == count - 1 else float32(0)
    bar_sync(barrier, uint32(WARPGROUP))
    last = staging.biases[staging.biases_at] == float32(1)
    if last:
        part, step = int32(1 - tile.part), int32(2)
        if count > 2:  # of two the sum is the same in either order
            for i in range(ACCUMULATORS):
                acc[i] = float32(0)
            part, step = int32(0), int32(1)
        while part < count:
            add_part(acc, parts, int32(first + part * size))
            part = int32(part + step)
    return last


@cuda.jit(device=True, forceinline=True)
def consume(ring, staging, unit, stride, maps, arrays, work, epilogue):
    """A warpgroup multiplies its 64 rows of all work tiles of the block, and writes the results."""
    acc, gates = cuda.local.array(ACCUMULATORS, "float32"), cuda.local.array(GROUPS, "uint32")
    t = int32(cuda.threadIdx.x)
    consumer, elected, lane = int32(t // WARPGROUP - 1), t % WARPGROUP == 0, int32(t % WARP)
    thread_row = int32(t % WARPGROUP // WARP * 16 + lane // 4)  # of its first output, within the warpgroup's 64
    a_offset = uint32(consumer) * uint32(BOX_BYTES)  # 64 rows of 64 k, or a box of 64 k × 64 rows: as many bytes
    turn, amax = int32(0), uint32(0)
    if FP8:
        scale = arrays.scale_a[0] * arrays.scale_b[0]
    stage, parity = consumer_start()
    while is_work(unit, stride, work):
        tile = tile_at(unit, stride, work)
        place = Place(int32(tile.row * BM + consumer * 64), int32(tile.column * COLUMNS), thread_row, lane)
        if SWIGLU:
            b0, b1 = prefetch_biases(BN, arrays.bias, place.first_column, work.N, epilogue.has_bias)
        elif BIASED:  # it comes while the tile is multiplied
            gap = int32(0)
            if STACKED:
                gap = int32(uint32(place.first_column) // uint32(work.seam)) * arrays.residual.bias_gap
            b0, b1 = prefetch_bias(BN, arrays.bias, place.first_column + gap, work.N + gap, epilogue.has_bias)
        if GATE:
            prefetch_gates(gates, GROUPS, arrays.residual, place, work)
        steps = int32(tile.end_k - tile.first_k)
        if PROMOTED:
            stage, parity = promoted_loop(acc, ring, stage, parity, steps, a_offset, elected)
        else:
            stage, parity = main_loop(acc, ring, stage, parity, steps, a_offset, elected)
        if FP8:
            for i in range(ACCUMULATORS):
                acc[i] *= scale
        if GATE:
            bar_sync(uint32(consumer + 1), uint32(WARPGROUP))  # all have read the bias before
        if BIASED:
            stage_bias(BN, staging, b0, b1)
        part, target, extent = tile.part, arrays, work
        if GROUPED:
            if tile.number >= work.whole and not join_parts(acc, tile, consumer, arrays.bias, arrays.residual, staging,
                                                            work):
                unit = next_unit(unit, tile, stride, work)
                continue
            c = array_of(tile.product, arrays.c)
            part, target = int32(0), Arrays(c, c, c, c)
            extent = Extent(of_product(tile.product, work.M), of_product(tile.product, work.N))
        # block by block of 64 columns, not in a loop: accumulators stay in registers only under constant indices
        turn, amax = write_block(0, turn, amax, acc, gates, place, staging, part, maps, target, extent, epilogue)
        if BLOCKS > 1:
            turn, amax = write_block(1, turn, amax, acc, gates, place, staging, part, maps, target, extent, epilogue)
        if BLOCKS > 2:
            turn, amax = write_block(2, turn, amax, acc, gates, place, staging, part, maps, target, extent, epilogue)
        if BLOCKS > 3:
            turn, amax = write_block(3, turn, amax, acc, gates, place, staging, part, maps, target, extent, epilogue)
        unit = next_unit(unit, tile, stride, work)
    if EIGHT:
        keep_largest(arrays.amax, int32(cuda.blockIdx.x), amax, lane)
    if HALF and not EXCHANGES and elected:
        tma_store_wait_0()


# The kernel -----------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def set_up(ring, loaded, ready, maps, epilogue):
    """Make all barriers, and bring the tensor maps to TMA's cache; by one thread."""
    init_ring(ring, 1, RELEASES + 2 if ROW_SUMS and epilogue.has_row_sums else RELEASES)
    if EXCHANGES:
        for tile in range(4):
            mbarrier_init(barrier_at(loaded, tile), uint32(1))
            mbarrier_init(barrier_at(ready, tile), uint32(4))  # a lane of each warp
    fence_barrier_init()
    if GROUPED:
        for product in range(PRODUCTS):
            tma_prefetch(array_of(int32(product), maps.a))
            tma_prefetch(array_of(int32(product), maps.b))
        return
    tma_prefetch(maps.a)
    tma_prefetch(maps.b)
    if HALF:
        tma_prefetch(maps.c)
    if GELU or LAYER_SCALE or SWIGLU or EXCHANGES:
        tma_prefetch(maps.d)
    tma_prefetch(maps.second)


@requires("9.0a")
def gemm(maps, arrays, work, epilogue):
    """maps: `Maps`, arrays: `Arrays`, work: `Work`, epilogue: `Epilogue`."""
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    biases = cuda.shared.array(BIASES, "float32")
    base = smem_u32(tiles)
    ring = make_ring(base, STAGE_BYTES, STAGE_COUNT, smem_u32(barriers))
    loaded, ready = barrier_at(ring.full, 2 * STAGE_COUNT), barrier_at(ring.full, 2 * STAGE_COUNT + 4)
    t = int32(cuda.threadIdx.x)
    if t == 0:
        set_up(ring, loaded, ready, maps, epilogue)
    if PAIRED:
        cluster_sync()
        unit, blocks = int32(cuda.blockIdx.x // 2), int32(cuda.gridDim.x // 2)
    else:
        cuda.syncthreads()
        unit, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
    if GROUPED:
        unit, stride = walk_of(unit, blocks, work)
    else:
        stride = int32(work.units if unit < work.alone else int32(blocks - work.alone))
    warpgroup = int32(t // WARPGROUP)
    if warpgroup == 0:
        give_registers()
        if t == 0:
            produce(ring, unit, stride, maps, work)
        elif EXCHANGES:
            if t == 32:
                exchange(PAIRED, TILES_OF_BLOCK, GELU_AGAIN_GRADIENT, EIGHT, 0, BLOCKS, unit, stride,
                         make_staging(0, tiles, base, biases, loaded, ready), maps, work)
            elif t == 64:
                exchange(PAIRED, TILES_OF_BLOCK, GELU_AGAIN_GRADIENT, EIGHT, 1, BLOCKS, unit, stride,
                         make_staging(1, tiles, base, biases, loaded, ready), maps, work)
        elif ROW_SUMS:
            if epilogue.has_row_sums and t >= 32 and t < 96:
                sum_rows(ring, tiles, unit, stride, arrays, work, epilogue.has_row_sums)
    else:
        take_registers()
        staging = make_staging(int32(warpgroup - 1), tiles, base, biases, loaded, ready)
        consume(ring, staging, unit, stride, maps, arrays, work, epilogue)


@cuda.jit(device=True, forceinline=True)
def make_staging(consumer, tiles, base, biases, loaded, ready):
    """The `Staging` of a consumer."""
    return Staging(tiles, base, int32(STAGE_COUNT * STAGE_BYTES + consumer * 2 * TILES_OF_BLOCK * BOX_BYTES),
                   biases, int32(consumer * BN), barrier_at(loaded, 2 * consumer), barrier_at(ready, 2 * consumer))


def kernel_for(BN, a_along_m, b_along_n, half, activation="", batched=False, symmetric=False, fp8=False, promoted=False,
               eight=False, module=None, paired=False, stacked=False, grouped=False):
    """The kernel for one width of tile, one case of transposes and one kind of result.

    activation: "", or a key of `ACTIVATIONS`: what happens in its epilogue
    batched: for several products; symmetric: for several that are; paired: for pairs of blocks; stacked: for weights at
        equal distances; grouped: for several products of different sizes
    fp8, promoted, eight, module: of hopper_fp8.py
    """
    case = f"{'t' if a_along_m else 'n'}{'n' if b_along_n else 't'}{'_fp8' * fp8}{'_promoted' * promoted}"
    kind = activation or ("symmetric" if symmetric else "batch" if batched else "half" if half else "float")
    kind += "_eight" * eight + "_pair" * paired + "_stack" * stacked + "_group" * grouped
    return specialise(gemm, name=f"gemm_hopper_{BN}_{case}_{kind}", module=module, PAIRED=paired, BATCHED=batched,
                      SYMMETRIC=symmetric, STACKED=stacked, GROUPED=grouped, FP8=fp8, PROMOTED=promoted, EIGHT=eight,
                      launch_bounds=(THREADS, 1),  # setmaxnreg needs both numbers
                      BN=BN, A_ALONG_M=a_along_m, B_ALONG_N=b_along_n, HALF=half,
                      **{name.upper(): activation == name for name in ACTIVATIONS})


BOTH = (False, True)
KERNELS = Variants(itertools.product(STAGES, BOTH, BOTH, BOTH), lambda key: kernel_for(*key))
BATCH_KERNELS = Variants(itertools.product(STAGES, BOTH, BOTH), lambda key: kernel_for(*key, True, batched=True))
SYMMETRIC_KERNELS = Variants([(BN, across, across) for BN in SYMMETRIC_WIDTHS for across in BOTH],
                             lambda key: kernel_for(*key, True, batched=True, symmetric=True))
ACTIVATION_KERNELS = Variants([(BN, name) for name, widths in ACTIVATIONS.items() for BN in widths],
                              lambda key: kernel_for(key[0], False, key[1].endswith("_gradient"), True, key[1]))
# of pairs those that were measured to be faster somewhere (NOTES.md), with the widths that are
PAIR_KERNELS = Variants([(BN, False, across, True) for BN in PAIR_WIDTHS for across in BOTH],
                        lambda key: kernel_for(*key, paired=True))
PAIR_ACTIVATION_KERNELS = Variants(itertools.product(PAIR_WIDTHS, PAIR_ACTIVATIONS), lambda key: kernel_for(
    key[0], False, key[1].endswith("_gradient"), True, key[1], paired=True))


# Launcher -------------------------------------------------------------------------------------------------------------

def takes_batch(M, K, dtype):
    """Whether one launch takes several products with a result of this type."""
    return M % BM == 0 and K % BK == 0 and is_half(dtype)


def shared_bytes(width, two_tiles=False):
    """Stages, and two tiles for each consumer, or two pairs."""
    return stages_of(width, two_tiles) * (BM + width) * BK * 2 + (8 if two_tiles else 4) * BOX_BYTES


def workers_of(multiprocessors, paired):
    """How many blocks, or pairs of blocks, a card runs at once. A pair more would run after the others."""
    return max(1, PAIRS_AT_ONCE * multiprocessors // MULTIPROCESSORS) if paired else multiprocessors


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


def map_of_halves(x):
    """The tensor map of rows of two halves of H columns: (M, 2, H), boxes of 64 rows and 64 columns of one half."""
    M, H = len(x), x.shape[1] // 2
    return tensor_map(x, (BOX, 1, BOX), dims=(H, 2, M), strides=(2 * H, 4 * H))


def launch_hopper(a, b, c, M, N, K, transpose_a, transpose_b, bias, residual, alpha, accumulate, width, slices,
                  row_sums=None, activation="", other=None, second=None, keeps_u=True, batch=1, scale=None,
                  symmetric=False, diagonal=0.0, paired=False):
    """c = alpha · A·B + bias + residual for matrices of float16 or bfloat16; c like them, or float32 and then without
    residual.

    second: the columns of the matrix named in TWO MATRICES AS ONE that follow those of a, b or c; M, N, K are those of
        the whole product
    row_sums: (M,), to which the sums of A's rows are added; for a float32 c and an A along m (transpose_a)
    activation, other: with a c of 16 bits
        gate: for A·Bᵀ; residual is a `Gated`, other what is added
        gelu: for A·Bᵀ; other is like c, and is given GELU(c); c itself is written only if keeps_u
        gelu_gradient: for A·B without bias and residual; a factor GELU'(other)
        gelu_again_gradient: the same, and other becomes GELU(other)
        layer_scale: for A·Bᵀ; other is like c, and is given residual + scale · c, scale (N,) float32; keeps_u as above
        swiglu: for A·Bᵀ; b and bias have 2 · N rows, c is (M, 2 · N), and other, (M, N), is given SwiGLU(c); keeps_u as
            above. Without keeps_u c may be anything
        swiglu_gradient: for A·B without bias and residual; c becomes SwiGLU's dx (M, 2 · N) at x = other, like c, with
            A·B as dy
    batch: so many products, where `takes_batch`; a, b, c hold the matrices one below the other; M, N, K are of one
    paired: by pairs of blocks, where there is such a kernel; batch is 1 and C not symmetric
    symmetric: where `takes_batch`, also for one product; M == N; one half of each is computed, `diagonal` is added to
        the numbers on its diagonal
    """
    seam, M = M if batch > 1 or symmetric else max(N, K) + width, batch * M
    half = is_half(c.dtype)
    columns = width // 2 if activation == "swiglu" else width  # of a tile, or of each half in it
    key = (width, activation) if activation else (width, transpose_a, not transpose_b, half)
    paired = paired and key in (PAIR_ACTIVATION_KERNELS if activation else PAIR_KERNELS)
    map_a, map_b = map_of(a, not transpose_a, BM), map_of(b, transpose_b, width // 2 if paired else columns)
    map_c = tensor_map(c, (BOX, BOX)) if half else map_a
    map_d = map_a if other is None else tensor_map(other, (BOX, BOX))
    if activation == "swiglu_gradient":
        map_c, map_d = map_of_halves(c), map_of_halves(other)
    elif activation == "swiglu" and keeps_u:
        map_c = map_of_halves(c)
    map_2 = map_a
    if second is not None:
        split = b if transpose_a else a if transpose_b else c
        seam = split.shape[1]
        map_2 = (map_of(second, False, width) if split is b else map_of(second, True, BM) if split is a else
                 tensor_map(second, (BOX, BOX)))
    k_tiles, tiles_m, tiles_n = -(-K // BK), -(-M // BM), -(-N // columns)
    if symmetric:
        tiles_m, tiles_n = batch, tiles_of(N, width)
    cluster = 2 if paired else 1
    tiles_m, workers = -(-tiles_m // cluster), workers_of(a.backend.multiprocessors, paired)
    slice_tiles, slices, alone = schedule(tiles_m * tiles_n, slices, k_tiles, workers)
    units = slices * tiles_m * tiles_n
    nothing = unused(a)
    biases = nothing if bias is None else bias
    arrays = biases, a if residual is None else residual if isinstance(residual, Gated) else residual.reshape(M, N)
    end = float(alpha), int(bias is not None)
    target = nothing if half else c.reshape(-1)
    sums, summing = nothing if row_sums is None else row_sums, 0 if row_sums is None else ADD_ROW_SUMS
    if scale is not None:
        sums = scale
    if slices > 1:
        target = empty((slices * (M * N + (0 if row_sums is None else tiles_n * M)),), np.float32, like=a)
    if row_sums is not None and slices * tiles_n > 1:
        sums = target[slices * M * N:] if slices > 1 else empty((tiles_n * M,), np.float32, like=a)
        summing = WRITE_ROW_SUMS
    kernel = None if activation else (PAIR_KERNELS if paired else KERNELS)[key]
    if batch > 1:
        kernel = BATCH_KERNELS[width, transpose_a, not transpose_b]
    if symmetric:
        kernel = SYMMETRIC_KERNELS[width, transpose_a, not transpose_b]
    if activation:
        kernel = (PAIR_ACTIVATION_KERNELS if paired else ACTIVATION_KERNELS)[key]
    kernel = in_bfloat16(kernel, a.dtype)
    written = int(keeps_u and not activation.endswith("gradient") if activation else residual is not None)
    launch(kernel, cluster * min(units, workers), THREADS, Maps(map_a, map_b, map_c, map_d, map_2),
           Arrays(target, *arrays, sums),
           Work(M, N, seam, k_tiles, slice_tiles, tiles_m, tiles_n, units, alone),
           Epilogue(*(end if slices == 1 else (1.0, 0)), written, int(accumulate and slices == 1), summing,
                    float(diagonal)),
           shared=shared_bytes(width, activation in TWO_TILES), cluster=cluster)
    if slices > 1:
        add_partials(target, c, slices, biases, *end, accumulate, row_sums, slices * tiles_n)
    elif summing == WRITE_ROW_SUMS:
        add_parts([Sum(sums, tiles_n, row_sums, True)])
