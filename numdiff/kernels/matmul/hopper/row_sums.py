"""Sums of A's rows from its tiles in shared memory: a bias's gradient, by two warps during the
products.

A bias's gradient is the sum of dy over its rows, and dW = dyᵀ·x has dy in shared memory already. If
these sums are requested, warps 1 and 2 of the producer's warpgroup, which have nothing else to do,
add up 64 rows of A each. Adding up a step takes about as long as multiplying it; so the tiles of a
row share the steps (with four tiles, each adds every fourth step), and the pipeline hides them. The
two warps release a stage as the consumers do. No separate pass over dy is left.

A lane has four loads in flight before it adds; one after the other they would take twice as long as
the products. (Sums as products with ones would not help: mma and wgmma compete for the same tensor
cores.)

SOURCE
    ../reference.py; PTX ISA, section 9.7.9, shfl.sync.
READ NEXT
    group_schedule.py
"""

from ....device import cuda, device_inline, float32, int32, load4, store4, uint32
from ....device.limits import FULL_MASK, WARP
from ....device.pipeline import advance, consumer_release, consumer_start, consumer_wait
from ....device.specialise import Field
from ....device.tensor_core import load_words4, unpack_half2
from .group_schedule import of_product
from .layout import BM, BOX, BOX_BYTES, ROW_SUMS
from .work import next_unit, tile_at

share_steps, write_sums = Field("EPILOGUE", "share_steps"), Field("EPILOGUE", "write_sums")

# what becomes of A's row sums: a tile's are written, those of all of K added
WRITE_ROW_SUMS, ADD_ROW_SUMS = 1, 2


# A lane's sums ------------------------------------------------------------------------------------


@device_inline
def add_eight(sums, w):
    v0, v1 = unpack_half2(w[0])
    v2, v3 = unpack_half2(w[1])
    v4, v5 = unpack_half2(w[2])
    v6, v7 = unpack_half2(w[3])
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    return s0 + v0, s1 + v1, s2 + v2, s3 + v3, s4 + v4, s5 + v5, s6 + v6, s7 + v7


@device_inline
def add_rows(tiles, box, lane, sums):
    """Add this lane's 16 rows of k of a box (64 k × 64 rows of A, swizzled) to its sums of eight
    rows of A."""
    chunk, first = lane & 7, lane >> 3
    for i in range(4):
        k = first + 16 * i
        at = box + k * 128
        v = load_words4(tiles, at + ((chunk ^ (k & 7)) << 4))
        w = load_words4(tiles, at + 512 + ((chunk ^ (k + 4 & 7)) << 4))
        x = load_words4(tiles, at + 1024 + ((chunk ^ (k & 7)) << 4))
        y = load_words4(tiles, at + 1536 + ((chunk ^ (k + 4 & 7)) << 4))
        sums = add_eight(add_eight(add_eight(add_eight(sums, v), w), x), y)
    return sums


@device_inline
def add_lanes(value):
    """The sum over the four lanes that have the same chunk; every lane gets it."""
    value += cuda.shfl_xor_sync(FULL_MASK, value, 8)
    return value + cuda.shfl_xor_sync(FULL_MASK, value, 16)


@device_inline
def write_rows(row_sums, start, row, M, lane, sums, add):
    """A warp's 64 sums, from `row` on, written or added: lanes 0 … 7 have four each, and so do
    lanes 8 … 15."""
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    s0, s1, s2, s3 = add_lanes(s0), add_lanes(s1), add_lanes(s2), add_lanes(s3)
    s4, s5, s6, s7 = add_lanes(s4), add_lanes(s5), add_lanes(s6), add_lanes(s7)
    if lane >= 8:
        s0, s1, s2, s3 = s4, s5, s6, s7
    row = int32(row + (lane & 7) * 8 + (lane >> 3) * 4)
    if lane < 16 and row < M:
        at = start + row
        if add:
            b0, b1, b2, b3 = load4(row_sums, at)
            s0, s1, s2, s3 = b0 + s0, b1 + s1, b2 + s2, b3 + s3
        store4(row_sums, at, s0, s1, s2, s3)


# A warp's way through the stages ------------------------------------------------------------------


@device_inline
def sum_rows(shared, unit, walk, target):
    """Two warps add up 64 rows of A each, of every stage that falls to their tile."""
    box, lane = int32(cuda.threadIdx.x // WARP - 1), int32(cuda.threadIdx.x % WARP)
    ring, work, zero = shared.ring, target.work, float32(0)
    stage, parity = consumer_start()
    while unit < walk.last:
        tile = tile_at(unit, walk, work)
        steps = int32(tile.end_k - tile.first_k)
        sums = zero, zero, zero, zero, zero, zero, zero, zero
        step = int32(0)
        due, sharing = share_steps(tile, steps, work)
        while step < steps:
            consumer_wait(ring, stage, parity)
            if due == 0:
                at = int32(stage * ring.stage_bytes + box * BOX_BYTES)
                sums = add_rows(shared.tiles, at, lane, sums)
                due = sharing
            due = int32(due - 1)
            cuda.syncwarp()
            if lane == 0:
                consumer_release(ring, stage)
            stage, parity = advance(ring, stage, parity)
            step = int32(step + 1)
        write_sums(int32(tile.row * BM + box * BOX), lane, sums, sharing, tile, target)
        unit = next_unit(unit, tile, walk, work)


@device_inline
def assist_sum_rows(t, shared, unit, walk, target):
    """`sum_rows` by warps 1 and 2."""
    if ROW_SUMS:
        if target.epilogue.has_row_sums and t >= 32 and t < 96:
            sum_rows(shared, unit, walk, target)


# What an epilogue's `share_steps` and `write_sums` can be -----------------------------------------


@device_inline
def share_row(tile, steps, work):
    """(steps before the first that this tile adds up, the distance between such steps)."""
    return int32(tile.column), work.tiles_n


@device_inline
def write_sums_of_matrix(row, lane, sums, sharing, tile, target):
    """Of one matrix, written or added."""
    work = target.work
    write_rows(
        target.arrays.row_sums,
        (tile.part * work.tiles_n + tile.column) * work.M,
        row,
        work.M,
        lane,
        sums,
        target.epilogue.has_row_sums == ADD_ROW_SUMS,
    )


@device_inline
def share_row_of_stack(tile, steps, work):
    """Of a stack's the first tile of a row adds up all."""
    return int32(steps if tile.column > 0 else tile.column), int32(1)


@device_inline
def write_sums_of_stack(row, lane, sums, sharing, tile, target):
    """Added to those of the weight that the rows belong to."""
    if tile.column == 0:
        matrix = int32(uint32(row) // uint32(target.work.matrices.rows))
        write_rows(
            target.arrays.row_sums,
            matrix * target.arrays.gaps.bias_gap,
            row,
            target.work.M,
            lane,
            sums,
            True,
        )


@device_inline
def share_row_of_group(tile, steps, group):
    """Of a group: steps by their numbers, as its slices begin anywhere."""
    sharing = of_product(tile.product, group.tiles_n)
    due = int32(uint32(tile.column + tile.first_k * (sharing - 1)) % uint32(sharing))
    return due, sharing


@device_inline
def write_sums_of_group(row, lane, sums, sharing, tile, target):
    """Of a product of a group: a part's, and zeros in place of the parts that others have."""
    zero, group = float32(0), target.work
    M, part = of_product(tile.product, group.M), tile.part
    last = int32(group.parts if tile.end_k == group.k_tiles else int32(part + 1))
    while part < last:
        write_rows(
            target.arrays.row_sums,
            of_product(tile.product, group.sums) + (part * sharing + tile.column) * M,
            row,
            M,
            lane,
            sums,
            False,
        )
        sums = zero, zero, zero, zero, zero, zero, zero, zero
        part = int32(part + 1)
