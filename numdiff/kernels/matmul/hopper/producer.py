"""The producer of Hopper's matmul: one thread loads the tiles of A and B by TMA, stage after stage.

FOUR TRANSPOSES, NO COPY
    An operand whose neighbours in memory run along k (CUTLASS: K-major) is fetched as rows of 64 k,
    128 bytes each. One whose neighbours run along m or n (MN-major) is fetched as boxes of 64 k ×
    64 m, a row for each k, one box next to the other. The instruction says so, and wgmma reads it
    transposed. Either way rows of 128 bytes with a swizzle of 128 bytes.

        y  = x·Wᵀ   both along k             dx = dy·W    B along n              dW = dyᵀ·x   A along m, B along n
TWO MATRICES AS ONE
    Where a layer's x is two arrays that are read side by side as one (`Pair`, concat.py), neither x
    nor dx is copied: a box or a tile of the epilogue is 64 columns wide, so if the first array has
    a multiple of 64 columns, each box is in one of the two arrays and uses its tensor map. In x·Wᵀ
    the Pair is A, along k; in dy·W the result; in dyᵀ·x, B.
PAIRS
    Two blocks of a cluster work on two tiles of one column, one below the other: with the same tile
    of B. Each loads half of it, and TMA multicasts what it reads to both; so a step brings (128 +
    BN / 2) · 128 bytes from the L2 cache to a multiprocessor instead of (128 + BN) · 128. The
    price: both blocks' consumers must have read a stage before either producer may fill it again,
    so a consumer arrives at `empty` of both blocks, and a producer ends only when all have arrived.
    The products are the same ones, in the same order: the same bits.
BATCHES
    of 16-bit results, with M a multiple of 128 and K of 64: the matrices of C are one tall matrix,
    no tile has rows of two of them, and only the producer must know which matrix a tile belongs to,
    to fetch the right rows of A and B.
STACKS
    of weights at equal distances (../products.py): the tensor map of B knows the distance, and a box
    has the weight's number as its third coordinate.

SOURCE
    PTX ISA, section 9.7.9.27 (cp.async.bulk.tensor, also with .multicast::cluster).
READ NEXT
    consumer.py, which reads what has arrived.
"""

from typing import NamedTuple

from ....device import device_inline, int32, uint32
from ....device.cluster import cluster_rank
from ....device.eight import array_of
from ....device.mbarrier import mbarrier_wait
from ....device.pipeline import advance, barrier_at, producer_acquire, producer_start, stage_at
from ....device.specialise import Field
from ....device.tma import tma_load_2d, tma_load_2d_multicast, tma_load_3d
from .layout import A_ALONG_M, A_BYTES, B_ALONG_N, BK, BLOCKS, BM, BN, BOX, BOX_BYTES, FP8, GemmMaps
from .work import next_unit, tile_at

paired = Field("SCHEDULER", "paired")

# Boxes --------------------------------------------------------------------------------------------


@device_inline
def load_box(i, address, box_map, full, x, y):
    """Load box number i of B at column x and row y; of a pair of blocks each loads every other box,
    and both receive it."""
    if paired:
        if cluster_rank() == uint32(i & 1):
            tma_load_2d_multicast(address, box_map, full, uint32(3), uint32(x), uint32(y))
    else:
        tma_load_2d(address, box_map, full, uint32(x), uint32(y))


@device_inline
def load_box_of_stack(address, box_map, full, x, y, rows):
    """Load a box of B at column x and row y; rows: of one matrix."""
    matrix = uint32(y) // uint32(rows)
    tma_load_3d(address, box_map, full, uint32(x), uint32(y) - matrix * uint32(rows), matrix)


# Tiles of one matrix ------------------------------------------------------------------------------


@device_inline
def load_a(address, full, m, k, maps):
    """Load a stage's tile of A, from row m and column k on."""
    if A_ALONG_M:
        for i in range(2):
            tma_load_2d(
                address + uint32(i * BOX_BYTES), maps.a, full, uint32(m + i * BOX), uint32(k)
            )
    else:
        tma_load_2d(address, maps.a, full, uint32(k), uint32(m))


@device_inline
def load_b_along_k(address, full, n, k, maps):
    """Load a stage's tile of B, which is contiguous along k, from column n and row k on."""
    if paired:  # boxes of half as many rows
        for i in range(2):
            load_box(i, address + uint32(i * BN * BK), maps.b, full, k, n + i * (BN // 2))
    else:
        load_box(0, address, maps.b, full, k, n)


@device_inline
def load_b(address, full, n, k, maps):
    """Load a stage's tile of B, from column n and row k on."""
    if B_ALONG_N:
        for i in range(BLOCKS):
            load_box(i, address + uint32(i * BOX_BYTES), maps.b, full, int32(n + i * BOX), k)
    else:
        load_b_along_k(address, full, n, k, maps)


# Both tiles of a stage: what `Operands` can be ----------------------------------------------------


@device_inline
def load_pair(address, full, m, n, step, maps, work):
    """Of one matrix each, or of two side by side as A or B, of which the second begins at the seam."""
    seam, k = work.matrices.seam, int32(step * (2 * BK if FP8 else BK))
    if not A_ALONG_M and not B_ALONG_N and k >= seam:
        tma_load_2d(address, maps.second, full, uint32(k - seam), uint32(m))
    else:
        load_a(address, full, m, k, maps)
    address = address + uint32(A_BYTES)
    if A_ALONG_M and B_ALONG_N:
        for i in range(BLOCKS):
            box, column = address + uint32(i * BOX_BYTES), int32(n + i * BOX)
            if column >= seam:
                load_box(i, box, maps.second, full, column - seam, k)
            else:
                load_box(i, box, maps.b, full, column, k)
    else:
        load_b(address, full, n, k, maps)


@device_inline
def load_halves(address, full, m, n, step, maps, work):
    """B is a weight along k with 2 · H rows: those of u1's columns from n on, then those of u2's."""
    seam, k = work.matrices.seam, int32(step * (2 * BK if FP8 else BK))
    if k >= seam:
        tma_load_2d(address, maps.second, full, uint32(k - seam), uint32(m))
    else:
        load_a(address, full, m, k, maps)
    address = address + uint32(A_BYTES)
    for half in range(2):
        load_box(
            half,
            address + uint32(half * (BLOCKS * 64) * BK * 2),
            maps.b,
            full,
            k,
            n + half * work.N,
        )


@device_inline
def load_batch(address, full, m, n, step, maps, work):
    """Of a batch: an operand along k is one tall matrix, in which A's row m is right already; of
    one along m or n the batch is stacked along k."""
    rows, k = work.matrices.rows, int32(step * BK)
    matrix = int32(uint32(m) // uint32(rows))
    below = int32(k + matrix * work.k_tiles * BK)
    if A_ALONG_M:
        load_a(address, full, int32(m - matrix * rows), below, maps)
    else:
        load_a(address, full, m, k, maps)
    if B_ALONG_N:
        load_b(address + uint32(A_BYTES), full, n, below, maps)
    else:
        load_b(address + uint32(A_BYTES), full, int32(n + matrix * work.N), k, maps)


@device_inline
def load_stack(address, full, m, n, step, maps, work):
    """B is a stack, unless C is one, where A is along m."""
    rows, k = work.matrices.rows, int32(step * BK)
    load_a(address, full, m, k, maps)
    address = address + uint32(A_BYTES)
    if A_ALONG_M:
        load_b(address, full, n, k, maps)
    elif B_ALONG_N:
        for i in range(BLOCKS):
            load_box_of_stack(
                address + uint32(i * BOX_BYTES), maps.b, full, int32(n + i * BOX), k, rows
            )
    else:
        load_box_of_stack(address, maps.b, full, k, n, rows)


@device_inline
def load_product(address, full, m, n, step, maps, work):
    """Of a product of a group, whose maps these are."""
    load_a(address, full, m, int32(step * BK), maps)
    load_b(address + uint32(A_BYTES), full, n, int32(step * BK), maps)


@device_inline
def same_maps(tile, maps):
    """Of all tiles."""
    return maps


@device_inline
def maps_of_product(tile, maps):
    """The maps of a tile's product."""
    map_a, map_b = array_of(tile.product, maps.a), array_of(tile.product, maps.b)
    return GemmMaps(map_a, map_b, map_a, map_a, map_a)


class Operands(NamedTuple):
    """A and B of a kernel. load(address, full, m, n, step, maps, work): both tiles of a stage, from
    row m of A, column n of B and this step of k on; maps_of(tile, maps): the tensor maps of a tile."""

    load: object
    maps_of: object = same_maps


MATRICES, HALVES, BATCH = Operands(load_pair), Operands(load_halves), Operands(load_batch)
STACK, GROUP = Operands(load_stack), Operands(load_product, maps_of_product)
load, maps_of = Field("OPERANDS", "load"), Field("OPERANDS", "maps_of")


# All stages ---------------------------------------------------------------------------------------


@device_inline
def produce(ring, unit, walk, maps, work):
    """One thread loads the tiles of A and B by TMA, stage after stage, of all work tiles of the
    block."""
    stage, parity = producer_start()
    while unit < walk.last:
        tile = tile_at(unit, walk, work)
        m, n, k = int32(tile.row * BM), int32(tile.column * (BLOCKS * 64)), tile.first_k
        source = maps_of(tile, maps)
        while k < tile.end_k:
            full = producer_acquire(ring, stage, parity, ring.stage_bytes)
            load(stage_at(ring, stage), full, m, n, k, source, work)
            k = int32(k + 1)
            stage, parity = advance(ring, stage, parity)
        unit = next_unit(unit, tile, walk, work)
    if paired:  # the other block's consumers arrive here, too: the block must not end before
        for _ in range(ring.stages):
            mbarrier_wait(barrier_at(ring.empty, stage), parity)
            stage, parity = advance(ring, stage, parity)
