"""Which tiles of Hopper's matmul a block takes, one after the other, and how a long sum is cut into
slices.

A UNIT is the number of a work tile: of a tile of C, or, where sums are long, of one slice of a
    tile's sum. There are as many blocks as multiprocessors, and each takes every gridDim-th unit.
    Producer, consumers and the epilogue warps walk over the same units, each by itself:

        while is_work(unit, …):  tile = tile_at(unit, …);  …;  unit = next_unit(unit, tile, …)

SPLIT K
    A weight's gradient has few tiles and a long sum. K is cut into `slices`, each slice of a tile is a work tile of its
    own, which writes float32 partial results, and ../../second_pass.py adds these in a fixed order. Slices need not
    be equal: with 96 tiles for 132 multiprocessors, 96 blocks sum three quarters of a tile each and the others the last
    quarter of two or three tiles. That is two slices instead of four equal ones, and half the partial results
    (`schedule`).

The matrices of a batch count as one tall matrix; of a symmetric result only the tiles on and below
the diagonal are units. Several products in one launch have a walk of their own (group_schedule.py).

SOURCE
    Osama et al. 2023, "Stream-K", arXiv:2301.03598, section 3, on filling a GPU by splitting sums.
READ NEXT
    producer.py
"""

from typing import NamedTuple

from ....device import cuda, int32, uint32
from ....device.limits import MULTIPROCESSORS
from .group_schedule import group_tile, unit_after
from .layout import BM, BN, GROUPED, PAIRED, SYMMETRIC, row_of_pair, tile_place
from .symmetric_epilogue import symmetric_place

PAIRS_AT_ONCE = 66  # of an H100 with 132 multiprocessors (cuOccupancyMaxActiveClusters)


class WorkTile(NamedTuple):
    """What a unit stands for: slice number `part`, steps first_k … end_k - 1, of the tile in this
    row and column."""

    part: int
    row: int
    column: int
    first_k: int
    end_k: int


@cuda.jit(device=True, forceinline=True)
def work_tile(unit, work):
    """The `WorkTile` of a unit."""
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
    return WorkTile(
        part,
        row,
        column,
        first_k,
        int32(min(int32(first_k + work.slice_tiles), int32(work.k_tiles))),
    )


@cuda.jit(device=True, forceinline=True)
def is_work(unit, stride, work):
    """Whether there is such a unit, or with `GROUPED` whether the block has it; stride is then a
    `Walk`."""
    if GROUPED:
        return unit < stride.last
    return unit < work.units


@cuda.jit(device=True, forceinline=True)
def tile_at(unit, stride, work):
    """The `WorkTile`, or `GroupTile`, of a unit of this block."""
    if GROUPED:
        return group_tile(unit, stride, work)
    return work_tile(unit, work)


@cuda.jit(device=True, forceinline=True)
def next_unit(unit, tile, stride, work):
    """The block's unit after this tile."""
    if GROUPED:
        return unit_after(unit, tile, stride, work)
    return int32(unit + stride)


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
