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

from ....device import cuda, int32, uint32
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
TWO_TILES = "gelu_again_gradient", "swiglu_gradient"
SWIGLU_WIDTHS = 256, 128  # of a tile that has two blocks of 64 columns, or four, in pairs
SYMMETRIC_WIDTHS = 128, 256  # 192 takes as many tiles of a symmetric matrix as 256, or more
# what follows a product in its kernel, and the widths of tile that there are for it
ACTIVATIONS = {
    "gate": STAGES,
    "gelu": STAGES,
    "gelu_gradient": STAGES,
    "swiglu": SWIGLU_WIDTHS,
    "swiglu_gradient": STAGES,
    "layer_scale": (256, 128, 64),
    "gelu_again_gradient": STAGES,
}
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

BN = Constant()  # columns of a block's tile: 64, 128, 192 or 256
# operands contiguous along m or n (MN-major), not k (K-major)
A_ALONG_M, B_ALONG_N = Constant(), Constant()
HALF = Constant()  # whether the result has 16 bits
FP8 = Constant()  # whether the operands are E4M3, both along k: see ../hopper_fp8.py
PROMOTED = Constant()  # … and each stage's products have separate accumulators
EIGHT = Constant()  # … and what GELU, or its derivative, makes of the result is E4M3, too
PAIRED = Constant()  # two blocks of a cluster share their tiles of B: PAIRS in producer.py
BATCHED = Constant()  # more than one product: BATCHES in producer.py
SYMMETRIC = Constant()  # … and their results are symmetric, so that one half of each is multiplied
# B, or C where A is contiguous along m, are several matrices at equal distances: ../stack.py
STACKED = Constant()
GROUPED = Constant()  # several products with the same K (a grouped GEMM): group_schedule.py
GATE = Constant()  # the result is gated and added to another matrix
GELU = Constant()  # GELU of the result is a second result
GELU_GRADIENT = Constant()  # the result is multiplied by GELU' of another matrix
GELU_AGAIN_GRADIENT = Constant()  # … and GELU of that matrix is written in its place
SWIGLU = Constant()  # SwiGLU of the result is a second result
SWIGLU_GRADIENT = Constant()  # SwiGLU's backward with the result as dy: twice as many columns
LAYER_SCALE = Constant()  # the result times a vector, plus the residual, is a second result
TILES_OF_BLOCK = Constant(
    lambda GELU_AGAIN_GRADIENT, SWIGLU_GRADIENT: (
        # that leave shared memory together
        2 if GELU_AGAIN_GRADIENT or SWIGLU_GRADIENT else 1
    )
)
EXCHANGES = Constant(
    lambda GATE, GELU_GRADIENT, TILES_OF_BLOCK: GATE or GELU_GRADIENT or TILES_OF_BLOCK == 2
)
# can be
BIASED = Constant(
    lambda HALF, GATE, EXCHANGES, SYMMETRIC: HALF and (GATE or not EXCHANGES and not SYMMETRIC)
)
GROUPS = Constant(lambda BN: BN // 8)  # of eight columns in a tile
# of 64 columns in a tile, or pairs of such
BLOCKS = Constant(lambda BN, SWIGLU: BN // 64 // (2 if SWIGLU else 1))
COLUMNS = Constant(lambda BLOCKS: BLOCKS * 64)  # of a tile, or of each half in it
ACCUMULATORS = Constant(lambda BN: BN // 2)  # of a thread
# numbers of a bias in shared memory: a tile's for each consumer
BIASES = Constant(lambda BN: 2 * BN)
RELEASES = Constant(lambda PAIRED: 4 if PAIRED else 2)  # of a stage, by the warpgroups that read it
# of the pipeline
STAGE_COUNT = Constant(lambda BN, TILES_OF_BLOCK: stages_of(BN, TILES_OF_BLOCK == 2))
STAGE_BYTES = Constant(lambda BN: A_BYTES + BN * BK * 2)  # of A and B
BARRIERS = Constant(lambda STAGE_COUNT, EXCHANGES: 2 * STAGE_COUNT + 8 * EXCHANGES)
# whether the kernel can make them
ROW_SUMS = Constant(lambda A_ALONG_M, HALF: A_ALONG_M and not HALF)
STEP = Constant(lambda FP8: 2 * BK if FP8 else BK)  # of k in a stage


# Arguments ----------------------------------------------------------------------------------------


class Maps(NamedTuple):
    """Tensor maps: of the operands; of a float16 result; of the activation's, or of the matrix
    whose derivative is a factor, or of a gated product's residual; of the second part of the matrix
    that comes in two."""

    a: object
    b: object
    c: object
    d: object
    second: object


class Arrays(NamedTuple):
    """c: a float32 result (or partial ones); bias (N,) float32; residual (M, N) float16, or a
    `Gated`, whose residual has a tensor map, or a `Stack`; row_sums (M,) float32, with LAYER_SCALE
    the scale (N,). Of a group c are the products' results, bias the parts of tiles that are cut,
    residual the counters of these parts, row_sums all sums."""

    c: object
    bias: object
    residual: object
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


class Stack(NamedTuple):
    """The gap between one weight's, or gradient's, last element and the next one's first, and
    between biases."""

    gap: int
    bias_gap: int


class Work(NamedTuple):
    """The product's size, and how it is cut into units: the tiles of C, for each slice of K.

    tiles_n: of a row; of a symmetric C the tiles of one matrix, tiles_m: how many matrices; of a
        paired kernel tiles_m and units count pairs of tiles
    M: of all matrices of a batch; seam: the first column of the matrix in two parts that is the
        second part's, or M of one matrix of a batch, or the rows of one weight of a stack
    k_tiles: steps along K, slice_tiles: of one slice; alone: units with a block of their own
    (`schedule`, work.py)
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
    """What becomes of the accumulators. has_residual: with an activation, whether u is written,
    too; has_row_sums: 0, or WRITE_ROW_SUMS, ADD_ROW_SUMS of row_sums.py; diagonal: what is added to
    a symmetric C where row == column."""

    alpha: float
    has_bias: int
    has_residual: int
    accumulate: int
    has_row_sums: int
    diagonal: float


# Where tiles are ----------------------------------------------------------------------------------

# a swizzle of 128 bytes, 1024 bytes from one group of eight rows to the next, BOX_BYTES from one
# box to the next
DESCRIPTOR = np.uint64(1 << 62 | 1024 // 16 << 32 | BOX_BYTES // 16 << 16)
LOW_ADDRESS, ADDRESS_UNIT = uint32(0x3FFFF), uint32(4)


@cuda.jit(device=True, forceinline=True)
def descriptor(address):
    """wgmma's descriptor of the matrix that starts at a shared address."""
    return DESCRIPTOR | np.uint64((address & LOW_ADDRESS) >> ADDRESS_UNIT)


@cuda.jit(device=True, forceinline=True)
def tile_place(tile, tiles_m, tiles_n):
    """(row, column) of a tile, in tiles: GROUP rows sweep over the columns together."""
    group = uint32(tile) // uint32(GROUP * tiles_n)
    first = int32(group * GROUP)
    rows = int32(min(int32(GROUP), int32(tiles_m - first)))
    inside = uint32(tile - first * tiles_n)
    return int32(first + int32(inside % uint32(rows))), int32(inside // uint32(rows))


@cuda.jit(device=True, forceinline=True)
def row_of_pair(pair):
    """The row of tiles that is this block's of a pair of rows, in a cluster of two."""
    return int32(2 * pair + int32(cluster_rank()))
