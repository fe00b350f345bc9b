"""GELU and its derivative at the end of Hopper's products, so that neither is a separate pass.

    GELU            u = accumulator + bias and GELU(u), two tiles at once
    GELU'           accumulator · GELU'(u), in the tile of shared memory into which `exchange` has loaded u, and from
                    which it stores the results (exchange.py)
    GELU' and GELU  where GELU(u) is wanted, too, for the weight's gradient (fc2's dyᵀ·GELU(u)): one multiplication
                    more, and a second tile, which is stored where u was. So it is not kept from the forward on

A tile of 128 × 256 takes GELU about 2,600 cycles, of them 2,048 for tanh, and GELU' about 4,300, of
them 4,096 for an exponential and a reciprocal.

SOURCE
    fast_gelu.py.
READ NEXT
    swiglu_epilogues.py
"""

from ....device import cuda, int32, uint32
from ....device.mbarrier import bar_sync, mbarrier_arrive, mbarrier_wait
from ....device.pipeline import barrier_at
from ....device.tensor_core import load_word, pack_half2, store_word, unpack_half2
from ....device.tma import fence_proxy_async, tma_store_2d, tma_store_commit, tma_store_wait_read_0
from .fast_gelu import fast_gelu, fast_gelu_gradient, gelu_and_gradient
from .layout import BOX_BYTES
from .staging import word_place

# Forward ------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def write_gelu(block, turn, amax, acc, gates, place, staging, target):
    """u = accumulator + bias, if it is kept, and GELU(u), by way of a tile in shared memory for
    each.

    The arithmetic comes before the wait: meanwhile TMA reads the tiles of the block before.
    """
    maps, work, keeps_u = target.maps, target.work, target.epilogue.has_residual
    first_row, first_column, thread_row, lane = place
    tiles, base = staging.tiles, staging.base
    column = int32(first_column + 64 * block)
    if column < work.N and first_row < work.M:
        warpgroup = cuda.threadIdx.x // 128
        elected = cuda.threadIdx.x % 128 == 0
        words, activated = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        for j in range(8):
            n = int32(staging.biases_at + 64 * block + 8 * j + lane % 4 * 2)
            b0, b1 = staging.biases[n], staging.biases[n + 1]
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                u0, u1 = acc[i] + b0, acc[i + 1] + b1
                words[2 * j + half] = pack_half2(u0, u1)
                activated[2 * j + half] = pack_half2(fast_gelu(u0), fast_gelu(u1))
        if elected:
            tma_store_wait_read_0()
        bar_sync(uint32(warpgroup), uint32(128))
        for j in range(8):
            for half in range(2):
                at = word_place(staging.at, thread_row, lane, j, half)
                if keeps_u:
                    store_word(tiles, at, words[2 * j + half])
                store_word(tiles, at + BOX_BYTES, activated[2 * j + half])
        fence_proxy_async()
        bar_sync(uint32(warpgroup), uint32(128))
        if elected:
            if keeps_u:
                tma_store_2d(base + uint32(staging.at), maps.c, uint32(column), uint32(first_row))
            tma_store_2d(
                base + uint32(staging.at + BOX_BYTES), maps.d, uint32(column), uint32(first_row)
            )
            tma_store_commit()
    return turn, amax


# Backward -----------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def write_gelu_gradient(block, turn, amax, acc, gates, place, staging, target):
    """accumulator · GELU'(u), in the tile that holds u."""
    work = target.work
    first_row, first_column, thread_row, lane = place
    tiles = staging.tiles
    if int32(first_column + 64 * block) < work.N and first_row < work.M:
        buffer = int32(turn & 1)
        tile = int32(staging.at + buffer * BOX_BYTES)
        mbarrier_wait(barrier_at(staging.loaded, buffer), uint32(turn >> 1 & 1))
        words = cuda.local.array(16, "uint32")
        for j in range(8):
            for half in range(2):
                words[2 * j + half] = load_word(tiles, word_place(tile, thread_row, lane, j, half))
        for j in range(8):
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                u0, u1 = unpack_half2(words[2 * j + half])
                words[2 * j + half] = pack_half2(
                    acc[i] * fast_gelu_gradient(u0), acc[i + 1] * fast_gelu_gradient(u1)
                )
        for j in range(8):
            for half in range(2):
                store_word(tiles, word_place(tile, thread_row, lane, j, half), words[2 * j + half])
        fence_proxy_async()
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(barrier_at(staging.ready, buffer))
        turn = int32(turn + 1)
    return turn, amax


@cuda.jit(device=True, forceinline=True)
def write_gelu_again_gradient(block, turn, amax, acc, gates, place, staging, target):
    """As `write_gelu_gradient`, and GELU(u) in the next tile."""
    work = target.work
    first_row, first_column, thread_row, lane = place
    tiles = staging.tiles
    if int32(first_column + 64 * block) < work.N and first_row < work.M:
        buffer = int32(turn & 1)
        tile = int32(staging.at + buffer * (2 * BOX_BYTES))
        mbarrier_wait(barrier_at(staging.loaded, buffer), uint32(turn >> 1 & 1))
        words, activated = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        for j in range(8):
            for half in range(2):
                words[2 * j + half] = load_word(tiles, word_place(tile, thread_row, lane, j, half))
        for j in range(8):
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                u0, u1 = unpack_half2(words[2 * j + half])
                y0, slope0 = gelu_and_gradient(u0)
                y1, slope1 = gelu_and_gradient(u1)
                words[2 * j + half], activated[2 * j + half] = (
                    pack_half2(acc[i] * slope0, acc[i + 1] * slope1),
                    pack_half2(y0, y1),
                )
        for j in range(8):
            for half in range(2):
                at = word_place(tile, thread_row, lane, j, half)
                store_word(tiles, at, words[2 * j + half])
                store_word(tiles, at + BOX_BYTES, activated[2 * j + half])
        fence_proxy_async()
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(barrier_at(staging.ready, buffer))
        turn = int32(turn + 1)
    return turn, amax
