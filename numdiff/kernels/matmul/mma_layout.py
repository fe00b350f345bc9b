"""Tiles, constants and arguments of rung 5, the matmul by `mma.sync`.

READ NEXT
    mma_epilogues.py
"""

from typing import NamedTuple

import numpy as np

from ...device.specialise import Constant

# what becomes of the accumulators
PLAIN, ADDING, GELU, GELU_GRADIENT, GELU_AGAIN_GRADIENT = range(5)
END_NAMES = "plain", "adding", "gelu", "gelu_gradient", "gelu_again_gradient"
ACTIVATIONS = {name: END_NAMES.index(name) for name in END_NAMES[GELU:]}
FIELDS = 8  # of a unit in a table
PRODUCTS = 4  # of a group, at most
# rows of tiles that share a sweep over the columns, so that operands stay in the L2 cache
GROUP = 8


class Tile(NamedTuple):
    """How a block works on its tile of C: warps along m and n, a step along K, stages, blocks of a
    multiprocessor."""

    warps_m: int
    warps_n: int
    k: int
    stages: int
    blocks: int


TILES = {
    (128, 256): Tile(2, 4, 32, 4, 1),
    (192, 128): Tile(4, 2, 32, 4, 1),
    (128, 128): Tile(2, 2, 32, 3, 2),
    (64, 64): Tile(2, 2, 32, 3, 4),
}

TURING_STAGES = 2
ACTIVATION_TILES = (128, 256), (192, 128), (128, 128)

# Of each kernel: the tile of C and its `Tile`, the case of transposes (across: contiguous along m or
# n), the epilogue
TILE_M, TILE_N, A_ACROSS, B_ACROSS, END = Constant(), Constant(), Constant(), Constant(), Constant()
LAYOUT = Constant()
GROUPED = Constant()  # whether units come from a table: mma_group.py
# device function (sums, first, a, b): sums[first … first + 3] += a · b, `add_product` or another
PRODUCT = Constant()
WRITE_ROWS = Constant()  # device function: the epilogue of 16 rows, `finish_rows` or another
THREADS = Constant(lambda LAYOUT: threads_of(LAYOUT))
PREFETCHES = Constant(lambda TILE_M, TILE_N, THREADS: prefetches(TILE_M * TILE_N // 64, THREADS))
WARPS_N = Constant(lambda LAYOUT: LAYOUT.warps_n)
BK = Constant(lambda LAYOUT: LAYOUT.k)
STAGES = Constant()  # stages_of(tile, shared memory of a block)
ROWS = Constant(lambda TILE_M, LAYOUT: TILE_M // LAYOUT.warps_m)  # of a warp
COLUMNS = Constant(lambda TILE_N, LAYOUT: TILE_N // LAYOUT.warps_n)
SUMS = Constant(lambda ROWS, COLUMNS: ROWS * COLUMNS // 32)  # accumulators of a thread
ROW_SUMS = Constant(lambda COLUMNS: COLUMNS // 2)  # … for 16 rows
# bytes of a row of A's tile
A_ROW = Constant(lambda TILE_M, BK, A_ACROSS: 2 * (TILE_M if A_ACROSS else BK))
B_ROW = Constant(lambda TILE_N, BK, B_ACROSS: 2 * (TILE_N if B_ACROSS else BK))
# rows copied at once
A_PASS = Constant(lambda THREADS, A_ROW: THREADS * 16 // A_ROW)
B_PASS = Constant(lambda THREADS, B_ROW: THREADS * 16 // B_ROW)
# of a thread
A_COPIES = Constant(lambda TILE_M, BK, THREADS: TILE_M * BK // 8 // THREADS)
B_COPIES = Constant(lambda TILE_N, BK, THREADS: TILE_N * BK // 8 // THREADS)
A_BYTES = Constant(lambda TILE_M, BK: TILE_M * BK * 2)
STAGE_BYTES = Constant(lambda TILE_M, TILE_N, BK: (TILE_M + TILE_N) * BK * 2)
LAST_STAGE = Constant(lambda STAGE_BYTES, STAGES: STAGE_BYTES * (STAGES - 1))
PENDING = Constant(lambda STAGES: STAGES - 2)  # groups in flight while a tile is multiplied


class MmaWork(NamedTuple):
    """The product and its units: tiles of C, for each slice of K and each matrix of a batch.

    parts: slices of all matrices; tiles: of one matrix; group: tiles of GROUP rows; inverse_…: 2³²
    / that, rounded down
    """

    M: int
    N: int
    K: int
    tiles_m: int
    tiles: int
    group: int
    slices: int
    parts: int
    slice_length: int
    units: int
    inverse_tiles: int
    inverse_group: int


class MmaGroup(NamedTuple):
    """Units in a table, `FIELDS` int32 each: those of a `Unit` (mma.py). K: of all products;
    row_sums: of each product, (M,) float32, and of the parts of tiles; summed: bit p is set where
    those of product p are asked for."""

    table: object
    K: int
    units: int
    row_sums: tuple
    summed: int


class MmaArrays(NamedTuple):
    """c: the result, or partial sums of slices; bias (N,) float32; other, like c: what is added (a
    residual, or c itself), GELU(c), or the u of GELU'(u). With GROUPED c are the products' results
    and the parts of tiles."""

    c: object
    bias: object
    other: object


class MmaEpilogue(NamedTuple):
    """alpha · sum + bias, if there is one. keeps_u: whether GELU's argument is written."""

    alpha: float
    has_bias: int
    keeps_u: int


class MmaPlace(NamedTuple):
    """The place of a lane's outputs: the start of C, the lane's first row and column in it; C's
    extents."""

    start: int
    row: int
    column: int
    M: int
    N: int


def work_of(batch, M, N, K, tile, slices):
    """The `MmaWork` of `batch` products in up to `slices` slices of K."""
    step = TILES[tile].k
    length = -(-K // (slices * step)) * step
    slices = -(-K // length)
    tiles_m, tiles_n = -(-M // tile[0]), -(-N // tile[1])
    tiles, group = tiles_m * tiles_n, GROUP * tiles_n
    return MmaWork(
        M,
        N,
        K,
        tiles_m,
        tiles,
        group,
        slices,
        batch * slices,
        length,
        batch * slices * tiles,
        inverse(tiles),
        inverse(group),
    )


def inverse(n):
    return np.uint32(min(2**32 // n, 2**32 - 1))


def threads_of(layout):
    """Threads of a block with this `Tile`, or with that of a key of TILES."""
    layout = TILES.get(layout, layout)
    return 32 * layout.warps_m * layout.warps_n


def prefetches(chunks, threads):
    """Of each thread, where a tile has this many chunks of 64 elements; none where that is fewer than threads."""
    return -(-chunks // threads) if chunks >= threads else 0


def takes(tile, across):
    """Whether a block's threads copy whole rows of this tile's A; across: contiguous along m."""
    return not across or threads_of(tile) * 8 % tile[0] == 0


def stage_bytes(tile):
    return (tile[0] + tile[1]) * TILES[tile].k * 2


def stages_of(tile, shared):
    """Stages of a tile on a card whose blocks have `shared` bytes of shared memory.

    Copies on Turing are not asynchronous, so that a third stage would not help.
    """
    return TILES[tile].stages if shared >= 99 << 10 else TURING_STAGES
