"""The layout of pixels in shared memory for wgmma: boxes with a halo, sub-blocks of 8 × 8,
descriptors.

A PIXEL in shared memory is a row of 64 channels, 128 bytes, as TMA brings it and as far as the
swizzle reaches.
A BOX is what one TMA instruction loads: some columns and rows of one or several images, row after
    row of the image, with zeros outside the image. For taps around a tile of pixels it has a HALO
    of kernel // 2 pixels on each side.
A SUB-BLOCK is 8 × 8 pixels, one matrix of a wgmma. Eight neighbouring pixels of an image row are a
    group of eight rows of that matrix, and eight image rows below each other are its eight groups,
    so from one group to the next it is one row of the box: the stride in the descriptor. A tile is
    several sub-blocks side by side, below each other, or in several images, numbered in that order.
A TAP shifts all pixels by the same rows and columns. In a box with the whole halo its matrix begins
    that much further on: nothing is copied. It may begin at any row of 128 bytes, because TMA and
    wgmma both swizzle by the bits of the address. Without a halo to the left and right
    (`whole_halo` 0) there is a box for each column of taps, in which every matrix begins where the
    swizzle's pattern of eight rows begins.

SOURCE
    PTX ISA, section 9.7.15.5.1 (matrix descriptors).
READ NEXT
    layout.py, what else the convolution keeps in shared memory.
"""

import itertools

import numpy as np

from ....device import device_inline, int32, uint32
from ....device.common import divide
from ....device.limits import HOPPER_SHARED

u64 = np.uint64

ROW = 128  # bytes of a pixel
SIDE = 8  # pixels of a sub-block in each direction
SUB_BLOCK = SIDE * SIDE
SWIZZLE_BYTES = 1024  # the pattern of a swizzle of 128 bytes, with which each stage begins
MAX_BOX = 256  # pixels of a box in each direction
# bytes of dynamic shared memory; barriers and alignment take less than the rest
SHARED = HOPPER_SHARED - 1024


@device_inline
def sub_block_at(sub_block, tile_w, tile_h):
    """(columns, rows, images) from a tile's first pixel to a sub-block's."""
    rest, i = divide(sub_block, tile_w >> 3)
    image, j = divide(rest, tile_h >> 3)
    return int32(i * 8), int32(j * 8), image


@device_inline
def row_of(sub_block, tile_w, tile_h, pitch, box_h):
    """The row of a box at which a sub-block begins: pixels before it, in a box `pitch` wide and
    `box_h` high."""
    i, j, image = sub_block_at(sub_block, tile_w, tile_h)
    return int32((image * box_h + j) * pitch + i)


@device_inline
def descriptor(address, leading, stride, swizzle):
    """A wgmma's matrix descriptor (emulator/wgmma_layouts.py); leading, stride: bytes; swizzle: 1:
    128 bytes, 2: 64."""
    return (
        u64((address & uint32(0x3FFFF)) >> uint32(4))
        | (u64(leading >> uint32(4)) << u64(16))
        | (u64(stride >> uint32(4)) << u64(32))
        | (u64(swizzle) << u64(62))
    )


def tiles_of(*sizes):
    """Every (width, height, images) of a tile of whole sub-blocks that has one of these numbers of
    pixels."""
    for width, height, pixels in itertools.product((8, 16, 32), (8, 16, 32), sizes):
        images, rest = divmod(pixels, width * height)
        if images and not rest:
            yield width, height, images


def whole_patterns(nbytes):
    """Bytes rounded up to whole patterns of the swizzle."""
    return -(-nbytes // SWIZZLE_BYTES) * SWIZZLE_BYTES
