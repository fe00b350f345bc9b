"""Which tiles of Hopper's matmul a block takes, one after the other, and how a long sum is cut into
slices.

A UNIT is the number of a work tile: of a tile of C, or, where sums are long, of one slice of a
    tile's sum. There are as many blocks as multiprocessors, and each takes every gridDim-th unit.
    Producer, consumers and the epilogue warps walk over the same units, each by itself:

        while unit < walk.last:  tile = tile_at(unit, …);  …;  unit = next_unit(unit, tile, …)

    How it goes is the choice of a `GemmScheduler`: PLAIN, PAIRED, GROUPED (group_schedule.py), or
    one of another module.

SPLIT K
    A weight's gradient has few tiles and a long sum. K is cut into `slices`, each slice of a tile is a work tile of its
    own, which writes float32 partial results, and reduce/second_pass.py adds these in a fixed order. Slices need not
    be equal: with 96 tiles for 132 multiprocessors, 96 blocks sum three quarters of a tile each and the others the last
    quarter of two or three tiles. That is two slices instead of four equal ones, and half the partial results
    (`schedule`).

The matrices of a batch count as one tall matrix.

SOURCE
    Osama et al. 2023, "Stream-K", arXiv:2301.03598, section 3, on filling a GPU by splitting sums.
READ NEXT
    producer.py
"""

from typing import NamedTuple

from ....device import cuda, device_inline, int32, uint32
from ....device.cluster import cluster_sync
from ....device.limits import MULTIPROCESSORS
from ....device.specialise import Field
from .group_schedule import GemmGroupWalk, group_start, group_tile, unit_after
from .layout import Target, row_of_pair, tile_place
from .parts import complete_tile, target_of_product

PAIRS_AT_ONCE = 66  # of an H100 with 132 multiprocessors (cuOccupancyMaxActiveClusters)


class WorkTile(NamedTuple):
    """What a unit stands for: slice number `part`, steps first_k … end_k - 1, of the tile in this
    row and column."""

    part: int
    row: int
    column: int
    first_k: int
    end_k: int


class GemmScheduler(NamedTuple):
    """A tile scheduler: the device functions by which a block walks over its work tiles.

    start(work)                     all threads, before the first tile: (first unit,
    `GemmGroupWalk`)
    tile_at(unit, walk, work)       the `WorkTile`, or `GroupTile`, of a unit below walk.last
    next_unit(unit, tile, walk, work)
    place_of(tile, work)            (row, column) of a tile of C, in tiles
    complete(acc, tile, consumer, staging, target)
                                    a consumer, after the main loop: whether acc has a tile's whole sum, or a slice that
                                    is written by itself
    target_of(tile, target)         the `Target` of a tile's results
    paired: two blocks of a cluster share their tiles of B: PAIRS in producer.py
    """

    start: object
    tile_at: object
    next_unit: object
    place_of: object
    complete: object
    target_of: object
    paired: bool = False


tile_at, next_unit, place_of = (
    Field("SCHEDULER", name) for name in ("tile_at", "next_unit", "place_of")
)


# Plain: one tile after the other, or one slice of a tile ------------------------------------------


@device_inline
def plain_walk(unit, blocks, work):
    """The `GemmGroupWalk` of a block, or pair, by its number."""
    stride = int32(work.units if unit < work.alone else int32(blocks - work.alone))
    return GemmGroupWalk(stride, int32(0), work.units)


@device_inline
def plain_start(work):
    cuda.syncthreads()
    unit = int32(cuda.blockIdx.x)
    return unit, plain_walk(unit, int32(cuda.gridDim.x), work)


@device_inline
def plain_place(tile, work):
    return tile_place(tile, work.tiles_m, work.tiles_n)


@device_inline
def plain_tile(unit, walk, work):
    per_slice = int32(work.tiles_m * work.tiles_n)
    part = int32(uint32(unit) // uint32(per_slice))
    row, column = place_of(int32(unit - part * per_slice), work)
    return slice_of_tile(part, row, column, work)


@device_inline
def slice_of_tile(part, row, column, work):
    """The `WorkTile` of slice number `part` of a tile."""
    first_k = int32(part * work.slice_tiles)
    end_k = int32(min(int32(first_k + work.slice_tiles), int32(work.k_tiles)))
    return WorkTile(part, row, column, first_k, end_k)


@device_inline
def plain_next(unit, tile, walk, work):
    return int32(unit + walk.stride)


@device_inline
def always_complete(acc, tile, consumer, staging, target):
    return True


@device_inline
def same_target(tile, target):
    return Target(tile.part, target.maps, target.arrays, target.work, target.epilogue)


PLAIN = GemmScheduler(
    plain_start, plain_tile, plain_next, plain_place, always_complete, same_target
)


# Paired: a cluster of two blocks takes two tiles, one below the other -----------------------------


@device_inline
def paired_start(work):
    cluster_sync()
    unit = int32(cuda.blockIdx.x // 2)
    return unit, plain_walk(unit, int32(cuda.gridDim.x // 2), work)


@device_inline
def paired_place(tile, work):
    row, column = tile_place(tile, work.tiles_m, work.tiles_n)
    return row_of_pair(row), column


PAIRED = PLAIN._replace(start=paired_start, place_of=paired_place, paired=True)


# Grouped: the tiles of several products, of which the last are split (stream-K) -------------------

GROUPED = GemmScheduler(group_start, group_tile, unit_after, None, complete_tile, target_of_product)


# On the host --------------------------------------------------------------------------------------


def workers_of(multiprocessors, paired):
    """How many blocks, or pairs of blocks, a card runs at once. A pair more would run after the
    others."""
    return max(1, PAIRS_AT_ONCE * multiprocessors // MULTIPROCESSORS) if paired else multiprocessors


def schedule(tiles, slices, k_tiles, blocks):
    """How `blocks` blocks share the sums of `tiles` tiles: (steps of a slice, slices, units with a
    block of their own).

    If all slices but the last get one block each, these are made longer and the last shorter. Each
    of the remaining blocks then takes several last slices, in the time of one of the others.
    """
    alone, steps = (slices - 1) * tiles, -(-k_tiles // slices)
    if 0 < alone < blocks < slices * tiles:
        each = -(-tiles // (blocks - alone))  # short slices for a remaining block
        steps = -(-each * k_tiles // (1 + each * (slices - 1)))
        if steps * (slices - 1) < k_tiles:
            return steps, slices, alone
    return steps, -(-k_tiles // steps), 0
