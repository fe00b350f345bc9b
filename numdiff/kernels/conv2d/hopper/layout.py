"""A Hopper convolution's constants, its kernel's arguments, and its layout of shared memory.

A and B are the operands of the product, pixels × channels by channels × BN: x (or dy) and the
weight.
SHARED MEMORY of a block, in this order:
    b_stages stages of the weight    one tap, or a column of three: 64 input by BN output channels each
    two output buffers               one for each consumer: its results before their store, before that its residual
    a_stages stages of pixels        a box of 64 input channels (boxes.py)
    addends, float32                 what is added to each channel of each sub-block: bias and channel
AN OUTPUT BUFFER has SLABS pieces of COLS channels for each sub-block, so that a row of 64 or 32
    channels is as long as the swizzle reaches. The weight of an input gradient, which is read
    across, has such slabs, too.

SOURCE
    convolution.py; the swizzle: boxes.py.
READ NEXT
    products.py, the main loop over these stages.
"""

from typing import NamedTuple

from ....device import device_inline, int32
from ....device.common import divide
from ....device.specialise import Constant
from .boxes import ROW

BK = 64  # input channels in a stage: a pixel's row in a box
MAX_A, MAX_B = 4, 12  # stages of pixels and of the weight
BARRIERS = 2 * MAX_A + 2 * MAX_B + 6
# (BN, SUB) of the kernels
VARIANTS = tuple((bn, sub) for sub in (1, 2) for bn in (32, 64, 96, 128))
RESAMPLED_VARIANTS = (64, 1), (128, 2)  # of resampled.py

BN = Constant()  # output channels of a tile
SUB = Constant()  # sub-blocks of 64 pixels that a consumer multiplies: 1 or 2
# taps in a stage of the weight: 1, or the 3 of a column. It is a constant, because a branch among
# the products of a round would end their group
TAPS_PER_STAGE = Constant()
# whether it is the input gradient, for which the weight's tile is read across: its 64 rows are the
# inner dimension, and output channels are next to each other
TRANSPOSED = Constant()
# of resampled.py. PHASED: one phase of an upsampled result, with 2 × 2 taps; STRIDED: the stride is
# 2: each block of channels has four boxes, of even and odd rows and columns
PHASED, STRIDED = Constant(), Constant()
# channels in a row of an output buffer, of a transposed weight
COLS = Constant(lambda BN: 64 if BN % 64 == 0 else 32)
SLABS = Constant(lambda BN, COLS: BN // COLS)
SLAB_BYTES = Constant(lambda COLS: 128 * COLS)  # of 64 such rows
TAP_BYTES = Constant(lambda BN: BN * ROW)  # of the weight
B_BYTES = Constant(lambda TAP_BYTES, TAPS_PER_STAGE: TAPS_PER_STAGE * TAP_BYTES)  # of a stage of it
# of a consumer's output buffer
OUT_BYTES = Constant(lambda SUB, SLABS, SLAB_BYTES: SUB * SLABS * SLAB_BYTES)


# Arguments ----------------------------------------------------------------------------------------


class ConvMaps(NamedTuple):
    """Tensor maps of x (or dy), of the weight, of y and of the residual."""

    x: object
    weight: object
    y: object
    residual: object


class ConvVectors(NamedTuple):
    """The addends of each channel: bias (N,), channel (B · N,) of each image."""

    bias: object
    channel: object


class ConvShape(NamedTuple):
    """The shape of y: images, height, width, N channels; channel_blocks: of 64 input channels;
    size: of the kernel."""

    images: int
    height: int
    width: int
    N: int
    channel_blocks: int
    size: int


class PhaseShape(NamedTuple):
    """`ConvShape` of a phase's pixels, and its rows and columns of padding at the top and the
    left."""

    images: int
    height: int
    width: int
    N: int
    channel_blocks: int
    size: int
    top: int
    left: int


class ConvTiling(NamedTuple):
    """How the work is cut, as `Plan` says (plan.py)."""

    whole_halo: int
    tile_w: int
    tile_h: int
    tile_images: int
    a_stages: int
    a_bytes: int
    b_stages: int
    resident: int
    ping_pong: int


class ConvEpilogue(NamedTuple):
    """The epilogue of the accumulators; statistics: flat."""

    has_bias: int
    has_channel: int
    has_residual: int
    statistics: object
    has_statistics: int


class PhaseEpilogue(NamedTuple):
    """`ConvEpilogue` of a phase: a sample has `chunks` of statistics, of which the phase's begin at
    `first_chunk`."""

    has_bias: int
    has_channel: int
    has_residual: int
    statistics: object
    has_statistics: int
    chunks: int
    first_chunk: int


# Tiles --------------------------------------------------------------------------------------------


class ConvBoxes(NamedTuple):
    """A box of pixels: its padding, pixels in a row (pitch), rows (height); loads: boxes for a
    block of channels.

    The tiles of the result: columns (of BN output channels), across and down an image, tiles: all
    of them.
    """

    pad: int
    pitch: int
    height: int
    loads: int
    columns: int
    across: int
    down: int
    tiles: int


class Buffers(NamedTuple):
    """Shared memory of the results. tiles: all bytes, address: of the first consumer's output
    buffer, at: its first byte; addends (float32): what is added to each channel of each sub-block,
    from addends_at on.

    Barriers of the two consumers: ready: it may write (and the residual is there); written: it has
    written; turn: it may multiply, with ping-pong.
    """

    tiles: object
    address: int
    at: int
    addends: object
    addends_at: int
    ready: int
    written: int
    turn: int


@device_inline
def boxes_of(shape, tiling):
    """The `ConvBoxes` of a convolution."""
    pad = int32(shape.size >> 1)
    halo = int32(2 * pad)
    if PHASED or STRIDED:
        halo = int32(1)
    columns = divide(shape.N + BN - 1, BN)[0]
    across = divide(shape.width + tiling.tile_w - 1, tiling.tile_w)[0]
    down = divide(shape.height + tiling.tile_h - 1, tiling.tile_h)[0]
    groups = divide(shape.images + tiling.tile_images - 1, tiling.tile_images)[0]
    return ConvBoxes(
        pad,
        int32(tiling.tile_w + halo if tiling.whole_halo else tiling.tile_w),
        int32(tiling.tile_h + halo),
        int32(4 if STRIDED else 1 if tiling.whole_halo else shape.size),
        columns,
        across,
        down,
        int32(columns * across * down * groups),
    )


@device_inline
def place_of(tile, boxes):
    """(column of tiles, tile across, tile down, group of images) of a tile; consecutive tiles share
    pixels."""
    rest, column = divide(tile, boxes.columns)
    rest, i = divide(rest, boxes.across)
    image, j = divide(rest, boxes.down)
    return column, i, j, image
