"""Tiles of float16 for wgmma: how TMA loads them, and how descriptors describe them.

A TILE
    has a row of HS numbers for each token. The first 64 of them (32 for HS 32) are a row of 128
    (64) bytes in shared memory, with a swizzle of the same width; the last 8 of HS 72, its ninth
    chunk, are in a separate part after all rows, 16 bytes a token, without a swizzle. TMA sees qkv
    as (B, T, channels): tokens beyond an image's last one arrive as zeros, and are not written.
EITHER WAY ROUND
    One descriptor serves both kinds of products, those that sum over HS (q·kᵀ) and those with HS columns (P·v):
        along HS    16 numbers further are 32 bytes further
        along rows  16 rows further are 16 rows' bytes further; `transposed` in `make_wgmma`
    A sum over HS 72 ends with the ninth chunk and a tenth one of zeros, which is stored once for
    all tiles of a block.
SOURCE
    PTX ISA, section 9.7.15.5 (matrices in shared memory); ../../emulator/wgmma_layouts.py.
READ NEXT
    forward_hopper.py
"""

import numpy as np

from ...device import cuda, device_inline, int32, opaque, uint32
from ...device.tensor_core import pack_half2, store_word
from ...device.tensor_map import tensor_map
from ...device.tma import tma_load_3d, tma_store_3d

u64 = np.uint64
CHUNK = 16  # bytes: eight numbers, for each row of a ninth part
NINTH_AT = 64  # its column
ADDRESS, UNIT = uint32(0x3FFFF), uint32(4)  # of a descriptor: 16 bytes count 1
WIDE = u64(1 << 62 | 1024 // 16 << 32)  # rows of 128 bytes, swizzled over 128
NARROW = u64(2 << 62 | 512 // 16 << 32)  # rows of 64 bytes, swizzled over 64
GROUP = u64(128 // 16)  # eight rows of a ninth part


def row_bytes(HS):
    """Bytes of a row of the first part."""
    return 2 * min(HS, 64)


def tile_bytes(HS, rows):
    return rows * (row_bytes(HS) + (CHUNK if HS == 72 else 0))


def maps_of(x, HS, rows):
    """Tensor maps of x (B, T, channels) for the two parts of a tile of `rows` tokens."""
    first = tensor_map(x, (min(HS, 64), rows, 1), swizzle=row_bytes(HS))
    return first, tensor_map(x, (CHUNK // 2, rows, 1), swizzle=0) if HS == 72 else first


@device_inline
def fetch_tile(HS, rows, tile, map_x, map_ninth, barrier, column, token, image):
    """Load the rows from `token` on, and the columns from `column` on, of an image; they count
    `tile_bytes`."""
    tma_load_3d(tile, map_x, barrier, uint32(column), uint32(token), uint32(image))
    if HS == 72:
        tma_load_3d(
            tile + uint32(rows * 128),
            map_ninth,
            barrier,
            uint32(column + NINTH_AT),
            uint32(token),
            uint32(image),
        )


@device_inline
def write_tile(HS, tile, ninth, map_y, map_ninth, column, token, image):
    """Start the TMA stores of a tile: of the part at `tile`, and of the one at `ninth`."""
    tma_store_3d(tile, map_y, uint32(column), uint32(token), uint32(image))
    if HS == 72:
        tma_store_3d(ninth, map_ninth, uint32(column + NINTH_AT), uint32(token), uint32(image))


@device_inline
def place_in_tile(HS, tile, row, chunk):
    """Byte of a chunk of a row in a tile's first part; tile: a multiple of 1024, row: from there
    on."""
    if HS == 32:
        return int32(tile + row * 64 + ((chunk ^ (row >> 1 & 3)) << 4))
    return int32(tile + row * 128 + ((chunk ^ (row & 7)) << 4))


@device_inline
def stash(HS, shared, tile, ninth, accumulators, accumulators_ninth, f_0, f_1):
    """A warpgroup's 64 rows as float16 into a tile: a thread's first row times f_0, the one eight
    below times f_1."""
    thread = int32(opaque(int32(cuda.threadIdx.x)) & 127)
    lane = thread & 31
    row = int32((thread >> 5) * 16 + (lane >> 2))
    column = int32((lane & 3) * 4)
    for j in range(min(HS, 64) // 8):
        store_word(
            shared,
            place_in_tile(HS, tile, row, j) + column,
            pack_half2(accumulators[4 * j] * f_0, accumulators[4 * j + 1] * f_0),
        )
        store_word(
            shared,
            place_in_tile(HS, tile, row + 8, j) + column,
            pack_half2(accumulators[4 * j + 2] * f_1, accumulators[4 * j + 3] * f_1),
        )
    if HS == 72:
        at = int32(ninth + row * CHUNK + column)
        store_word(shared, at, pack_half2(accumulators_ninth[0] * f_0, accumulators_ninth[1] * f_0))
        store_word(
            shared,
            at + 8 * CHUNK,
            pack_half2(accumulators_ninth[2] * f_1, accumulators_ninth[3] * f_1),
        )


# Descriptors --------------------------------------------------------------------------------------


@device_inline
def matrix_at(HS, tile):
    """The matrix descriptor of the first part of a tile at a shared address."""
    if HS == 32:
        return NARROW | u64((tile & ADDRESS) >> UNIT)
    return WIDE | u64((tile & ADDRESS) >> UNIT)


@device_inline
def ninth_along(ninth, zeros):
    """The descriptor of 16 columns to sum over: the ninth chunk, and the one of zeros behind it."""
    return (
        u64((ninth & ADDRESS) >> UNIT) | u64((zeros - ninth) >> UNIT) << u64(16) | GROUP << u64(32)
    )


@device_inline
def ninth_across(ninth):
    """The descriptor of a ninth part whose rows are summed over: eight columns across."""
    return u64((ninth & ADDRESS) >> UNIT) | GROUP << u64(16)
