"""The constants and arguments of Hopper's matmul, and where tiles are: in shared memory, and in C.

SHARED MEMORY of a block, in this order:
    STAGE_COUNT stages    a tile of A, 128 × 64, and one of B, 64 × BN, both as rows of 128 bytes (producer.py)
    tiles of 64 × 64      two for each consumer's epilogue, or two pairs (staging.py)
A DESCRIPTOR gives wgmma the start of a matrix, and the distances from eight rows to the next eight,
    and from one box of 64 columns to the next.
THE ORDER OF TILES (CUTLASS: rasterisation): GROUP rows of them sweep over the columns of C
together.

SOURCE
    PTX ISA, section 9.7.15.5.1 (matrix descriptors).
READ NEXT
    work.py (the constants and arguments can be looked up as they occur)
"""

from typing import NamedTuple

import numpy as np

from ....device import device_inline, int32, uint32
from ....device.cluster import cluster_rank
from ....device.specialise import Constant

THREADS = 384  # a producer and two consumer warpgroups
BM, BK = 128, 64  # rows of a block's tile; a step along K: 128 bytes of float16, the widest swizzle
# side of a box of an operand that is contiguous along m or n, and of a tile of the epilogue
BOX = 64
BOX_BYTES = BOX * BOX * 2
WARP_BYTES = BOX_BYTES // 4  # of a tile, the rows of one warp
A_BYTES = BM * BK * 2  # of A in a stage
# by BN: what fits into 227 KiB with the tiles of the epilogue
STAGES = {256: 4, 192: 4, 128: 6, 64: 8}
# … and where a consumer has four of these instead of two: u1 and u2 of two blocks, which become du1
# and du2; or u, which becomes du, and GELU(u)
TWO_TILES_STAGES = {256: 3, 192: 4, 128: 5, 64: 6}
# rows of tiles that share a sweep over the columns, so that both operands of a round stay in the L2
# cache
GROUP = 16


def stages_of(width, two_tiles):
    """Stages of the pipeline of a kernel."""
    return (TWO_TILES_STAGES if two_tiles else STAGES)[width]


def shared_bytes(width, two_tiles=False):
    """Stages, and two tiles for each consumer, or two pairs."""
    return stages_of(width, two_tiles) * (BM + width) * BK * 2 + (8 if two_tiles else 4) * BOX_BYTES


# Constants of a kernel ----------------------------------------------------------------------------

# given: numbers, and what the kernel is made of
BN = Constant()  # columns of a block's tile: 64, 128, 192 or 256
# operands contiguous along m or n (MN-major), not k (K-major)
A_ALONG_M, B_ALONG_N = Constant(), Constant()
FP8 = Constant()  # whether the operands are E4M3, both along k: see extras/fp8/matmul.py
MAIN_LOOP = Constant()  # the device function of main_loop.py
OPERANDS = Constant()  # the `Operands` of producer.py
SCHEDULER = Constant()  # the `Scheduler` of work.py
EPILOGUE = Constant()  # the `EpilogueParts` of epilogue.py
# follow from these
# of 64 columns in a tile, or pairs of such
BLOCKS = Constant(lambda BN, EPILOGUE: BN // 64 // EPILOGUE.halves)
ACCUMULATORS = Constant(lambda BN: BN // 2)  # of a thread
# elements of a bias in shared memory: a tile's for each consumer
BIASES = Constant(lambda BN: 2 * BN)
STAGE_COUNT = Constant(lambda BN, EPILOGUE: stages_of(BN, EPILOGUE.tiles == 2))
BARRIERS = Constant(lambda STAGE_COUNT, EPILOGUE: 2 * STAGE_COUNT + 8 * EPILOGUE.exchanges)
# whether the kernel can make them
ROW_SUMS = Constant(lambda A_ALONG_M, EPILOGUE: A_ALONG_M and EPILOGUE.sums_rows)


# Arguments ----------------------------------------------------------------------------------------


class GemmMaps(NamedTuple):
    """Tensor maps: of the operands; of a float16 result; of the activation's, or of the matrix
    whose derivative is a factor, or of a gated product's residual; of the second part of the matrix
    that comes in two."""

    a: object
    b: object
    c: object
    d: object
    second: object


class GemmArrays(NamedTuple):
    """c: a float32 result (or partial ones); bias (N,) float32; residual (M, N) float16; row_sums
    (M,) float32."""

    c: object
    bias: object
    residual: object
    row_sums: object


class GatedArrays(NamedTuple):
    """`GemmArrays` of the gate's epilogue; gated: a `Gated`, whose residual has a tensor map."""

    c: object
    bias: object
    gated: object
    row_sums: object


class ScaledArrays(NamedTuple):
    """`GemmArrays` of the layer scale's epilogue; scale (N,) float32."""

    c: object
    bias: object
    residual: object
    scale: object


class StackArrays(NamedTuple):
    """`GemmArrays` of a stack; gaps: `Gaps`."""

    c: object
    bias: object
    gaps: object
    row_sums: object


class GroupArrays(NamedTuple):
    """`GemmArrays` of a group. c: its products' results; partials, counters: of tiles that are
    split; row_sums: of all products."""

    c: object
    partials: object
    counters: object
    row_sums: object


class Gated(NamedTuple):
    """What a product is multiplied by before a residual is added: column c of row r by the gate
    number r // tokens · pitch + first + c. tokens: of an image, a multiple of 16; first, pitch:
    even."""

    gate: object
    first: int
    pitch: int
    tokens: int


class Extent(NamedTuple):
    """Rows and columns of a product of a group."""

    M: int
    N: int


class Gaps(NamedTuple):
    """Of a stack: the gap between one weight's, or gradient's, last element and the next one's
    first, and between biases."""

    gap: int
    bias_gap: int


class GemmPair(NamedTuple):
    """An operand or result in two parts; seam: the first column of the second part (of one matrix:
    beyond its last)."""

    seam: int


class Batch(NamedTuple):
    """Operands of several products, one below the other; rows: M of one."""

    rows: int


class GemmStack(NamedTuple):
    """Weights at equal distances in memory; rows: of one."""

    rows: int


class GemmWork(NamedTuple):
    """The product's size, and how it is cut into units: the tiles of C, for each slice of K.

    tiles_n: of a row; of a symmetric C the tiles of one matrix, tiles_m: how many matrices; of a
        paired kernel tiles_m and units count pairs of tiles
    M: of all matrices of a batch; matrices: a `GemmPair` (also of one matrix), `Batch` or
    `GemmStack`
    k_tiles: steps along K, slice_tiles: of one slice; alone: units with a block of their own
    (`schedule`, work.py)
    """

    M: int
    N: int
    matrices: object
    k_tiles: int
    slice_tiles: int
    tiles_m: int
    tiles_n: int
    units: int
    alone: int


class GemmEpilogue(NamedTuple):
    """What becomes of the accumulators. has_residual: with an activation, whether u is written,
    too;
    has_row_sums: 0, or WRITE_ROW_SUMS, ADD_ROW_SUMS of row_sums.py; diagonal: what is added to a
    symmetric C where row == column."""

    alpha: float
    has_bias: int
    has_residual: int
    accumulate: int
    has_row_sums: int
    diagonal: float


class Target(NamedTuple):
    """What the results of a tile are written to, and with what: the kernel's arguments, and the
    slice of K that the tile has."""

    part: int
    maps: object
    arrays: object
    work: object
    epilogue: object


class GemmShared(NamedTuple):
    """A block's shared memory: its ring of stages; all bytes, from the address `base` on; its
    biases; the barriers of an epilogue's tiles, see exchange.py."""

    ring: object
    tiles: object
    base: int
    biases: object
    loaded: int
    ready: int


# Where tiles are ----------------------------------------------------------------------------------

# a swizzle of 128 bytes, 1024 bytes from one group of eight rows to the next, BOX_BYTES from one
# box to the next
DESCRIPTOR = np.uint64(1 << 62 | 1024 // 16 << 32 | BOX_BYTES // 16 << 16)
LOW_ADDRESS, ADDRESS_UNIT = uint32(0x3FFFF), uint32(4)


@device_inline
def descriptor(address):
    """wgmma's descriptor of the matrix that starts at a shared address."""
    return DESCRIPTOR | np.uint64((address & LOW_ADDRESS) >> ADDRESS_UNIT)


@device_inline
def tile_place(tile, tiles_m, tiles_n):
    """(row, column) of a tile, in tiles: GROUP rows sweep over the columns together."""
    group = uint32(tile) // uint32(GROUP * tiles_n)
    first = int32(group * GROUP)
    rows = int32(min(int32(GROUP), int32(tiles_m - first)))
    inside = uint32(tile - first * tiles_n)
    return int32(first + int32(inside % uint32(rows))), int32(inside // uint32(rows))


@device_inline
def row_of_pair(pair):
    """The row of tiles that is this block's of a pair of rows, in a cluster of two."""
    return int32(2 * pair + int32(cluster_rank()))
