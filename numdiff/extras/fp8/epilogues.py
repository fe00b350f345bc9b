"""Epilogues of matmul.py whose result the next product of E4M3 reads: bytes, and their
largest magnitude.

WHAT IS NEW, AND WHY IT PAYS
    Between the two layers of an MLP stands GELU(u), in the backward dy·W times GELU'(u); only
    products of E4M3 read either. Written as float16 and rounded by a separate pass
    (quantise.py) that is 2 + 3 bytes a number. Here the epilogue rounds: 1 byte. On an H200
    that saves 0.34 ms of DiT-B/2's step of 18.8 ms.
    The bits are those of the two kernels: what is rounded to E4M3 has been rounded to float16
    before, and the scale comes from earlier steps, so it is known before the tile is. What the next
    scale needs, the largest magnitude, each thread keeps over all its tiles; a warp's goes to
    memory once, by an integer maximum.
A THREAD has 16 words of two float16: of each eight columns, columns 2 · (lane % 4) and the next, of
    a row and of the row 8 below. As E4M3 these are one word; two neighbouring lanes exchange
    theirs, and then the even one has four columns of the row, the odd one of the row below: eight
    stores instead of sixteen.
IN SHARED MEMORY the bytes of a warp's 16 rows are 1 KiB, rows of 64 bytes with a swizzle of 64
    bytes: chunk j of row r at j ^ (r / 2 % 4). Backward they overwrite the first half of the 2 KiB
    of u that the same warp has read, so no other warp need be waited for, and TMA stores them in
    four boxes of 16 rows.
SOURCE
    PTX ISA, sections 9.7.9.21 (cvt) and 5.5.7 (swizzling modes).
READ NEXT
    matmul.py
"""

from ...device import cuda, float32, int32, uint32
from ...device.float8 import larger_halves, pack_e4m3x4
from ...device.limits import FULL_MASK
from ...device.rounded8 import MAGNITUDES, keep_largest, scaled
from ...device.tensor_core import (
    float_of,
    high_halves,
    low_halves,
    store_word,
    unpack_half2,
    word_of,
)
from ...device.tma import tma_store_2d
from ...kernels.matmul.hopper.epilogue import EpilogueParts, exchanging, prefetch_all_maps
from ...kernels.matmul.hopper.gelu_epilogues import gelu_gradient_words, gelu_words
from ...kernels.matmul.hopper.layout import BOX_BYTES, WARP_BYTES
from ...kernels.matmul.hopper.staging import (
    await_tiles,
    finish_stores,
    load_words,
    loaded_tile,
    return_tile,
    send_both,
    store_words,
)

BYTES_OF_WARP = 1024  # 16 rows of 64


@cuda.jit(device=True, forceinline=True)
def bytes_of_words(words, amax, factor, place, M):
    """A thread's 16 words of two float16 as words[0 … 7] of four E4M3; the larger of `amax`, two
    float16, and their magnitudes, of rows that there are."""
    even = place.lane & 1 == 0
    above = below = uint32(0)
    for j in range(8):
        above = larger_halves(above, words[2 * j] & MAGNITUDES)
        below = larger_halves(below, words[2 * j + 1] & MAGNITUDES)
        v0, v1 = unpack_half2(words[2 * j])
        w0, w1 = unpack_half2(words[2 * j + 1])
        own = pack_e4m3x4(
            scaled(v0, factor), scaled(v1, factor), scaled(w0, factor), scaled(w1, factor)
        )
        other = word_of(cuda.shfl_xor_sync(FULL_MASK, float_of(own), 1))
        words[j] = low_halves(own, other) if even else high_halves(other, own)
    row = int32(place.first_row + place.thread_row)
    if row < M:
        amax = larger_halves(amax, above)
    if row + 8 < M:
        amax = larger_halves(amax, below)
    return amax


@cuda.jit(device=True, forceinline=True)
def store_bytes(tiles, tile, pitch, words, place):
    """words[0 … 7] into the tile that begins at this byte; pitch: from one warp's bytes to the
    next's."""
    row = int32(place.thread_row % 16 + 8 * (place.lane & 1))
    at = int32(tile + place.thread_row // 16 * pitch + row * 64 + place.lane % 4 // 2 * 4)
    for j in range(8):
        store_word(tiles, at + (((j >> 1) ^ (row >> 1 & 3)) << 4) + (j & 1) * 8, words[j])


@cuda.jit(device=True, forceinline=True)
def write_gelu_eight(block, turn, amax, acc, gates, place, staging, target):
    """As `write_gelu`, with GELU(u) as bytes."""
    work, keeps_u = target.work, target.epilogue.has_residual
    column = int32(place.first_column + 64 * block)
    if column < work.N and place.first_row < work.M:
        words, activated = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        gelu_words(block, words, activated, acc, place, staging)
        amax = bytes_of_words(activated, amax, float32(1) / target.arrays.scale_c[0], place, work.M)
        await_tiles()
        if keeps_u:
            store_words(words, staging.at, place, staging)
        store_bytes(staging.tiles, int32(staging.at + BOX_BYTES), BYTES_OF_WARP, activated, place)
        send_both(keeps_u, column, place, staging, target.maps)
    return turn, amax


@cuda.jit(device=True, forceinline=True)
def write_gelu_gradient_eight(block, turn, amax, acc, gates, place, staging, target):
    """As `write_gelu_gradient`, with bytes in the tile that held u."""
    work = target.work
    if int32(place.first_column + 64 * block) < work.N and place.first_row < work.M:
        tile = loaded_tile(turn, 1, staging)
        words = cuda.local.array(16, "uint32")
        load_words(words, tile, place, staging)
        gelu_gradient_words(block, words, acc)
        amax = bytes_of_words(words, amax, float32(1) / target.arrays.scale_c[0], place, work.M)
        cuda.syncwarp()  # all lanes have read what is overwritten
        store_bytes(staging.tiles, tile, WARP_BYTES, words, place)
        turn = return_tile(turn, place, staging)
    return turn, amax


@cuda.jit(device=True, forceinline=True)
def finish_bytes(amax, arrays, lane, elected):
    """After the last tile: keep the largest magnitude of a warp."""
    keep_largest(arrays.amax, int32(cuda.blockIdx.x), amax, lane)


@cuda.jit(device=True, forceinline=True)
def finish_bytes_and_stores(amax, arrays, lane, elected):
    """`finish_bytes`, and wait until TMA has stored all."""
    finish_bytes(amax, arrays, lane, elected)
    finish_stores(amax, arrays, lane, elected)


@cuda.jit(device=True, forceinline=True)
def return_bytes(tile, maps, x, y):
    """As `return_one` of hopper/exchange.py, of results that are bytes."""
    for i in range(4):
        tma_store_2d(tile + uint32(i * WARP_BYTES), maps.c, uint32(x), uint32(y + 16 * i))


EPILOGUES = {
    "gelu": EpilogueParts(write_gelu_eight, prefetch_all_maps, finish=finish_bytes_and_stores),
    "gelu_gradient": exchanging(
        write_gelu_gradient_eight, give_back=return_bytes, finish=finish_bytes
    ),
}
