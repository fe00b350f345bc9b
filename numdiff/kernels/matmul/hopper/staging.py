"""A thread's results of Hopper's matmul, and the shared memory through which they go before their
store.

An epilogue works on a block of 64 × 64 outputs of a warpgroup at a time: 32 accumulators a thread,
which become 16 words of two float16. They are made in registers and stored in a tile of shared
memory, 8 KiB, which TMA writes to memory. Each consumer has two such tiles, or two pairs, so that
it fills one while TMA reads the other; `turn` counts them.

Chunk j, of 16 bytes, of row r of a tile is at j ^ (r % 8), the swizzle of 128 bytes that TMA
expects: a warp's words fall into 32 different banks.

A tile's bias goes through shared memory, too. Each thread loads two elements of it before the main
loop, so that they arrive meanwhile, and stores them there after it, for all threads of the
warpgroup.

SOURCE
    PTX ISA, section 5.5.7 (swizzling modes).
READ NEXT
    epilogues.py
"""

from typing import NamedTuple

from ....device import cuda, device_inline, float32, int32, uint32
from ....device.mbarrier import bar_sync, mbarrier_arrive, mbarrier_wait
from ....device.pipeline import barrier_at
from ....device.specialise import Field
from ....device.tensor_core import load_word, store_word
from ....device.tma import (
    fence_proxy_async,
    tma_store_2d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
    tma_store_wait_read_1,
)
from .layout import BN, BOX_BYTES, STAGE_COUNT

tiles_of_block = Field("EPILOGUE", "tiles")


class GemmPlace(NamedTuple):
    """The place of a thread's outputs: its warpgroup's first row and column, its own first row
    within those 64, its lane."""

    first_row: int
    first_column: int
    thread_row: int
    lane: int


class Staging(NamedTuple):
    """Shared memory of a warpgroup's epilogue. tiles: all bytes, base: their address; at: the first
    byte of its two tiles; biases (float32): its own from biases_at on; loaded, ready: barriers of
    its tiles, see `exchange`."""

    tiles: object
    base: int
    at: int
    biases: object
    biases_at: int
    loaded: int
    ready: int


@device_inline
def make_staging(consumer, shared):
    """The `Staging` of a consumer."""
    return Staging(
        shared.tiles,
        shared.base,
        int32(STAGE_COUNT * shared.ring.stage_bytes + consumer * 2 * tiles_of_block * BOX_BYTES),
        shared.biases,
        int32(consumer * BN),
        barrier_at(shared.loaded, 2 * consumer),
        barrier_at(shared.ready, 2 * consumer),
    )


@device_inline
def word_place(tile, thread_row, lane, j, half):
    """Byte in a tile of the columns 8 · j + 2 · (lane % 4) and the next, in the thread's row or the
    one 8 below."""
    return int32(tile + thread_row * 128 + 1024 * half + ((j ^ (lane >> 2)) << 4) + lane % 4 * 4)


@device_inline
def load_words(words, tile, place, staging):
    """A thread's 16 words of a tile: 64 × 64 numbers of a warpgroup, two in a word."""
    for j in range(8):
        for half in range(2):
            at = word_place(tile, place.thread_row, place.lane, j, half)
            words[2 * j + half] = load_word(staging.tiles, at)


@device_inline
def store_words(words, tile, place, staging):
    """The same words into a tile."""
    for j in range(8):
        for half in range(2):
            at = word_place(tile, place.thread_row, place.lane, j, half)
            store_word(staging.tiles, at, words[2 * j + half])


@device_inline
def store_two(first, second, keeps_first, tile, place, staging):
    """A thread's words into two tiles, one after the other in memory; the first, if it is kept."""
    for j in range(8):
        for half in range(2):
            at = word_place(tile, place.thread_row, place.lane, j, half)
            if keeps_first:
                store_word(staging.tiles, at, first[2 * j + half])
            store_word(staging.tiles, at + BOX_BYTES, second[2 * j + half])


# Tiles that the warpgroup hands to TMA: await_tiles(), store_words(), offer_tiles(), and a store by
# one thread


@device_inline
def await_tiles():
    """A warpgroup's tiles may be written: TMA has read what they held."""
    if cuda.threadIdx.x % 128 == 0:
        tma_store_wait_read_0()
    bar_sync(uint32(cuda.threadIdx.x // 128), uint32(128))


@device_inline
def await_tile():
    """As `await_tiles`, of the one of two whose turn it is."""
    if cuda.threadIdx.x % 128 == 0:
        tma_store_wait_read_1()  # the tile that this buffer held two turns ago has been read
    bar_sync(uint32(cuda.threadIdx.x // 128), uint32(128))


@device_inline
def offer_tiles():
    """What the warpgroup has written is there for TMA."""
    fence_proxy_async()
    bar_sync(uint32(cuda.threadIdx.x // 128), uint32(128))


@device_inline
def send_both(keeps_first, column, place, staging, maps):
    """Store a warpgroup's two tiles: the first, if it is kept, to maps.c, the second to maps.d."""
    offer_tiles()
    if cuda.threadIdx.x % 128 == 0:
        first, second = uint32(staging.at), uint32(staging.at + BOX_BYTES)
        row = uint32(place.first_row)
        if keeps_first:
            tma_store_2d(staging.base + first, maps.c, uint32(column), row)
        tma_store_2d(staging.base + second, maps.d, uint32(column), row)
        tma_store_commit()


# Tiles that `exchange` brings and stores


@device_inline
def loaded_tile(turn, tiles, staging):
    """The first byte of the tile, or of the `tiles` tiles, whose turn it is; once `exchange` has
    brought them."""
    buffer = int32(turn & 1)
    tile = int32(staging.at + buffer * (tiles * BOX_BYTES))
    mbarrier_wait(barrier_at(staging.loaded, buffer), uint32(turn >> 1 & 1))
    return tile


@device_inline
def return_tile(turn, place, staging):
    """A warp has written its part of the tile; the next turn."""
    fence_proxy_async()
    cuda.syncwarp()
    if place.lane == 0:
        mbarrier_arrive(barrier_at(staging.ready, turn & 1))
    return int32(turn + 1)


@device_inline
def return_words(words, turn, tile, place, staging):
    """A thread's words, back in the tile that `exchange` brought and will store; the next turn."""
    store_words(words, tile, place, staging)
    return return_tile(turn, place, staging)


# The bias -----------------------------------------------------------------------------------------


@device_inline
def bias_elements(bias, first_column, N, has_bias):
    """The two elements of a tile's bias that this thread fetches for its warpgroup; zeros without a
    bias."""
    b0 = b1 = float32(0)
    n = int32(first_column + int32(cuda.threadIdx.x & 127))
    if has_bias:
        if n < N:
            b0 = bias[n]
        if BN > 128 and n + 128 < N:
            b1 = bias[n + 128]
    return b0, b1


@device_inline
def prefetch_bias(gates, place, target):
    """Before the main loop: this thread's two elements of the tile's bias."""
    return bias_elements(
        target.arrays.bias, place.first_column, target.work.N, target.epilogue.has_bias
    )


@device_inline
def prefetch_nothing(gates, place, target):
    """Of an epilogue without a bias."""
    return float32(0), float32(0)


@device_inline
def stage_bias(staging, b0, b1):
    """After the main loop: the tile's bias in shared memory, by a warpgroup, for all of it."""
    thread = int32(cuda.threadIdx.x & 127)
    if thread < BN:
        staging.biases[staging.biases_at + thread] = b0
    if thread + 128 < BN:
        staging.biases[staging.biases_at + thread + 128] = b1
    bar_sync(uint32(cuda.threadIdx.x // 128), uint32(128))


@device_inline
def bias_of(block, j, place, staging):
    """The bias of a thread's two neighbours in columns 8 · j … of a block."""
    n = int32(staging.biases_at + 64 * block + 8 * j + place.lane % 4 * 2)
    return staging.biases[n], staging.biases[n + 1]


@device_inline
def stage_nothing(staging, b0, b1):
    """Of an epilogue without a bias."""


# The end ------------------------------------------------------------------------------------------


@device_inline
def finish_stores(amax, arrays, lane, elected):
    """After the last tile: wait until TMA has stored all."""
    if elected:
        tma_store_wait_0()


@device_inline
def finish_nothing(amax, arrays, lane, elected):
    """Of an epilogue whose stores another thread makes, or whose threads store by themselves."""
