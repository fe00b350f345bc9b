"""The producer of Hopper's matmul: one thread loads the tiles of A and B by TMA, stage after stage.

FOUR TRANSPOSES, NO COPY
    An operand whose neighbours in memory run along k (CUTLASS: K-major) is fetched as rows of 64 k, 128 bytes each. One
    whose neighbours run along m or n (MN-major) is fetched as boxes of 64 k × 64 m, a row for each k, one box next to
    the other. The instruction says so, and wgmma reads it transposed. Either way rows of 128 bytes with a swizzle of
    128 bytes.

        y  = x·Wᵀ   both along k             dx = dy·W    B along n              dW = dyᵀ·x   A along m, B along n
TWO MATRICES AS ONE
    Where a layer's x is two arrays that are read side by side as one (`Pair`, concat.py), neither x nor dx is copied: a
    box or a tile of the epilogue is 64 columns wide, so if the first array has a multiple of 64 columns, each box is in
    one of the two arrays and uses its tensor map. In x·Wᵀ the Pair is A, along k; in dy·W the result; in dyᵀ·x, B.
PAIRS
    Two blocks of a cluster work on two tiles of one column, one below the other: with the same tile of B. Each loads
    half of it, and TMA multicasts what it reads to both; so a step brings (128 + BN / 2) · 128 bytes from the L2 cache
    to a multiprocessor instead of (128 + BN) · 128. The price: both blocks' consumers must have read a stage before
    either producer may fill it again, so a consumer arrives at `empty` of both blocks, and a producer ends only when
    all have arrived. The products are the same ones, in the same order: the same bits.
BATCHES
    of 16-bit results, with M a multiple of 128 and K of 64: the matrices of C are one tall matrix, no tile has rows of
    two of them, and only the producer must know which matrix a tile belongs to, to fetch the right rows of A and B.
STACKS
    of weights at equal distances (../stack.py): the tensor map of B knows the distance, and a box has the weight's
    number as its third coordinate.

SOURCE
    PTX ISA, section 9.7.9.27 (cp.async.bulk.tensor, also with .multicast::cluster).
READ NEXT
    consumer.py, which reads what has arrived.
"""

from ....device import cuda, int32, uint32
from ....device.cluster import cluster_rank
from ....device.eight import array_of
from ....device.mbarrier import mbarrier_wait
from ....device.pipeline import advance, barrier_at, producer_acquire, producer_start, stage_at
from ....device.tma import tma_load_2d, tma_load_2d_multicast, tma_load_3d
from .layout import (
    A_ALONG_M,
    A_BYTES,
    B_ALONG_N,
    BATCHED,
    BK,
    BLOCKS,
    BM,
    BN,
    BOX,
    BOX_BYTES,
    COLUMNS,
    GROUPED,
    PAIRED,
    STACKED,
    STAGE_BYTES,
    STAGE_COUNT,
    STEP,
    SWIGLU,
    Maps,
)
from .work import is_work, next_unit, tile_at

# One operand of a stage ---------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def load_a(address, full, m, k, maps, seam):
    """Load a stage's tile of A, from row m and column k on."""
    if A_ALONG_M:
        for i in range(2):
            tma_load_2d(
                address + uint32(i * BOX_BYTES), maps.a, full, uint32(m + i * BOX), uint32(k)
            )
    elif not BATCHED and not STACKED and not B_ALONG_N and k >= seam:
        tma_load_2d(address, maps.second, full, uint32(k - seam), uint32(m))
    else:
        tma_load_2d(address, maps.a, full, uint32(k), uint32(m))


@cuda.jit(device=True, forceinline=True)
def load_box(i, address, box_map, full, x, y, rows):
    """Load box number i of B at column x and row y; of a pair of blocks each loads every other box,
    and both receive it. rows: of one matrix of a stack."""
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
    """Load a stage's tile of B, from column n and row k on."""
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
    """`load_b` of a weight along k with 2 · H rows: those of u1's columns from n on, then those of
    u2's."""
    for half in range(2):
        load_box(half, address + uint32(half * COLUMNS * BK * 2), maps.b, full, k, n + half * H, H)


@cuda.jit(device=True, forceinline=True)
def load_of_batch(address, full, m, n, k, maps, work):
    """Both tiles: an operand along k is one tall matrix, in which A's row m is right already; of
    one along m or n the batch is stacked along k."""
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


# All stages ---------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def produce(ring, unit, stride, maps, work):
    """One thread loads the tiles of A and B by TMA, stage after stage, of all work tiles of the
    block."""
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
