"""The 3 × 3 weight gradient's arguments, the layout of a stage of its shared memory, and a block's
work.

A STAGE has a chunk of pixels: dy's box, 64 channels of 64, 128 or 256 pixels, and behind it x's, CW
    channels of the same pixels with a halo of one on each side (or three boxes of them, each
    shifted by a pixel: `whole_halo` 0).
A TILE of results is 64 channels of dy by CW of x, for all nine taps. Its chunks are shared among
    the blocks along the grid's z axis, whose neighbours are a cluster.

SOURCE
    weight_gradient_3x3.py.
READ NEXT
    weight_gradient_3x3.py
"""

from typing import NamedTuple

from ....device import cuda, device_inline, int32, uint32
from ....device.common import divide
from .boxes import ROW
from .cluster_sums import SIZE

# Arguments ----------------------------------------------------------------------------------------


class Gradient3x3Maps(NamedTuple):
    """Tensor maps of dy and x."""

    dy: object
    x: object


class Gradient3x3Arrays(NamedTuple):
    """All flat. out (clusters, N, taps, C), bias_out (clusters, N): the clusters' sums, or dweight
    and dbias themselves; channel_out (places of a chunk in an image, B, N)."""

    dweight: object
    dbias: object
    out: object
    bias_out: object
    channel_out: object


class Gradient3x3Shape(NamedTuple):
    """across, down: tiles of pixels in an image."""

    images: int
    across: int
    down: int
    C: int
    N: int


class Gradient3x3Tiling(NamedTuple):
    """How a chunk is cut, as in `Plan`; x_bytes: of x's boxes in a stage."""

    whole_halo: int
    tile_w: int
    tile_h: int
    tile_images: int
    stages: int
    x_bytes: int


class Gradient3x3Parts(NamedTuple):
    """How the chunks are shared. part_chunks: of a part, one more of the first `more`; blocks: of a
    cluster; share: vectors of four sums that one of them adds up in each thread; adds: whether to
    what dweight holds."""

    part_chunks: int
    more: int
    blocks: int
    share: int
    adds: int


# Layout -------------------------------------------------------------------------------------------


class Gradient3x3Boxes(NamedTuple):
    """The layout of a stage. pitch: pixels in a row of x's box, height: its rows; copies: boxes of
    x, copy_rows: pixels of each; dy_bytes: of dy's box, which is the first."""

    pitch: int
    height: int
    copies: int
    copy_rows: int
    dy_bytes: int


class Gradient3x3Own(NamedTuple):
    """A block's work: column and line of its tile, its part of the pixels; group: its cluster of
    those of the tile, and its rank there; its chunks; sums_dy: whether it sums dy's pixels, too."""

    column: int
    line: int
    part: int
    group: int
    rank: int
    first_chunk: int
    last_chunk: int
    sums_dy: bool


@device_inline
def boxes_of(tiling):
    """The `Gradient3x3Boxes` of a stage."""
    pitch = int32(tiling.tile_w + 2 if tiling.whole_halo else tiling.tile_w)
    height = int32(tiling.tile_h + 2)
    pixels = int32(tiling.tile_w * tiling.tile_h * tiling.tile_images)
    return Gradient3x3Boxes(
        pitch,
        height,
        int32(1 if tiling.whole_halo else SIZE),
        int32(pitch * height * tiling.tile_images),
        uint32(pixels * ROW),
    )


@device_inline
def own_work(parts, has_bias, has_channel):
    """The block's `Gradient3x3Own`."""
    column, line, part = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
    first_chunk = int32(part * parts.part_chunks + min(part, parts.more))
    group, rank = divide(part, parts.blocks)
    return Gradient3x3Own(
        column,
        line,
        part,
        group,
        rank,
        first_chunk,
        int32(first_chunk + parts.part_chunks + (1 if part < parts.more else 0)),
        (has_bias != 0 or has_channel != 0) and column == 0,
    )


@device_inline
def place_of(sub, tile_w, tile_h, pitch, lines):
    """Pixels from a box's first to those of its sub-block number `sub`; pitch: of a line, lines: of
    an image."""
    line, i = divide(int32(sub), tile_w >> 3)
    image, j = divide(line, tile_h >> 3)
    return uint32((image * lines + 8 * j) * pitch + 8 * i)
