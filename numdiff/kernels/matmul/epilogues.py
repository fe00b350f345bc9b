"""Parts of hopper.py: where its tiles lie, and its epilogues: what becomes of the accumulators.

AN EPILOGUE runs on the consumers while the tensor cores are idle. The products of a 128 × 256 tile take them about
16,000 cycles for K = 768, so every thousand cycles of an epilogue cost 6 %, and it is kept short:

    float16         alpha · accumulator + bias + residual; 16 words of two results are made in registers, then stored in
                    a tile of shared memory, which TMA writes while the next is made. The bias is in shared memory by
                    then: each thread loads two numbers of it before the main loop (`prefetch_bias`)
    GELU            u = accumulator + bias and GELU(u), two such tiles at once: about 2,600 cycles, of them 2,048 for
                    tanh
    gate            residual + gate · (accumulator + bias), the gate a row for each image: what stands between a DiT's
                    branches, where nobody will ask for the branch itself. The residual arrives as u does for GELU', and
                    the gate in registers before the main loop
    layer scale     z = accumulator + bias and residual + scale · z, two such tiles as well
    GELU'           accumulator · GELU'(u): about 4,300 cycles, of them 4,096 for an exponential and a reciprocal. u has
                    already been loaded into the tile of shared memory by an idle warp of the producer's warpgroup, and
                    the same warp stores the results (`exchange`). Where GELU(u) is wanted, too, for the weight's
                    gradient (fc2's dyᵀ·GELU(u)), it is one multiplication more and a second tile, which is stored where
                    u was: nobody need keep it from the forward on
    float32         pairs of lanes exchange halves, so that each writes 16 bytes of one row
    sums of A's rows, by two more of the idle warps, beside the products

    E4M3 where the next product is one, of GELU and GELU' (fp8_epilogues.py)

READ NEXT
    fast_gelu.py; swiglu_epilogues.py; launcher.py, which asks for all this.
"""
from typing import NamedTuple

import numpy as np

from ...device import cuda, float32, int32, load4, store4, uint32
from ...device.cluster import cluster_rank
from ...device.limits import FULL_MASK
from ...device.mbarrier import bar_sync, mbarrier_arrive, mbarrier_expect_tx, mbarrier_wait
from ...device.pipeline import barrier_at
from ...device.tensor_core import load_word, load_words4, pack_half2, store_word, unpack_half2
from ...device.tma import (
    fence_proxy_async,
    tma_load_2d,
    tma_load_3d,
    tma_store_2d,
    tma_store_3d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
    tma_store_wait_read_1,
)
from .fast_gelu import fast_gelu, fast_gelu_gradient, gelu_and_gradient
from .mma import write_fragment

BM, BK = 128, 64  # rows of a block's tile; a step along K: 128 bytes of float16, the widest swizzle
BOX = 64  # side of a box of an operand that is contiguous along m or n, and of a tile of the epilogue
BOX_BYTES = BOX * BOX * 2
WARP_BYTES = BOX_BYTES // 4  # of a tile, the rows of one warp
GROUP = 16  # rows of tiles that share a sweep over the columns, so that both operands of a round stay in the L2 cache


# Descriptors and places -----------------------------------------------------------------------------------------------

# a swizzle of 128 bytes, 1024 bytes from one group of eight rows to the next, BOX_BYTES from one box to the next
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


# Epilogues ------------------------------------------------------------------------------------------------------------

# They work on 64 × 64 outputs of a warpgroup, 32 accumulators a thread, which become 16 words of two float16. First all
# loads, then the arithmetic, last all stores: the compilers move no load past a store, and nothing would overlap. What
# is beyond the edges is computed from the last row or columns that there are, and never written.
# Chunk j of row r of a tile in shared memory lies at j ^ (r % 8), as TMA expects it.

class Place(NamedTuple):
    """Where a thread's outputs lie: its warpgroup's first row and column, its own first row within those 64, its
    lane."""

    first_row: int
    first_column: int
    thread_row: int
    lane: int


class Staging(NamedTuple):
    """Shared memory of a warpgroup's epilogue. tiles: all bytes, base: their address; at: the first byte of its two
    tiles; biases (float32): its own from biases_at on; loaded, ready: barriers of its tiles, see `exchange`."""

    tiles: object
    base: int
    at: int
    biases: object
    biases_at: int
    loaded: int
    ready: int


class Gated(NamedTuple):
    """What a product is multiplied by before a residual is added: column c of row r by the gate number r // tokens ·
    pitch + first + c. tokens: of an image, a multiple of 16; first, pitch: even."""

    gate: object
    first: int
    pitch: int
    tokens: int


@cuda.jit(device=True, forceinline=True)
def prefetch_bias(BN, bias, first_column, N, has_bias):
    """The two numbers of a tile's bias that this thread fetches for its warpgroup; zeros without a bias."""
    b0 = b1 = float32(0)
    n = int32(first_column + int32(cuda.threadIdx.x & 127))
    if has_bias:
        if n < N:
            b0 = bias[n]
        if BN > 128 and n + 128 < N:
            b1 = bias[n + 128]
    return b0, b1


@cuda.jit(device=True, forceinline=True)
def stage_bias(BN, staging, b0, b1):
    """The tile's bias in shared memory, by a warpgroup, for all of it."""
    thread = int32(cuda.threadIdx.x & 127)
    if thread < BN:
        staging.biases[staging.biases_at + thread] = b0
    if thread + 128 < BN:
        staging.biases[staging.biases_at + thread + 128] = b1
    bar_sync(uint32(cuda.threadIdx.x // 128), uint32(128))


@cuda.jit(device=True, forceinline=True)
def word_place(tile, thread_row, lane, j, half):
    """Byte in a tile of the columns 8 · j + 2 · (lane % 4) and the next, in the thread's row or the one 8 below."""
    return int32(tile + thread_row * 128 + 1024 * half + ((j ^ (lane >> 2)) << 4) + lane % 4 * 4)


@cuda.jit(device=True, forceinline=True)
def epilogue_half(block, turn, acc, place, staging, seam, maps, residual, work, epilogue):
    """alpha · accumulator + bias + residual by way of a tile in shared memory; the next turn.

    turn: counts the tiles, which use the two buffers alternately
    seam: the result's columns from here on belong to the matrix of `maps.second`
    """
    first_row, first_column, thread_row, lane = place
    M, N, tiles, base = work.M, work.N, staging.tiles, staging.base
    column = int32(first_column + 64 * block)
    if column < N and first_row < M:  # the same for the whole warpgroup
        warpgroup = cuda.threadIdx.x // 128
        elected = cuda.threadIdx.x % 128 == 0
        words = cuda.local.array(16, "uint32")
        if epilogue.has_residual:
            for j in range(8):
                n = min(int32(column + 8 * j + lane % 4 * 2), int32(N - 2))
                for half in range(2):
                    row = min(int32(first_row + thread_row + 8 * half), int32(M - 1))
                    words[2 * j + half] = load_word(residual, row * N + n)
        for j in range(8):
            n = int32(staging.biases_at + 64 * block + 8 * j + lane % 4 * 2)
            b0, b1 = staging.biases[n], staging.biases[n + 1]
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                v0, v1 = epilogue.alpha * acc[i] + b0, epilogue.alpha * acc[i + 1] + b1
                if epilogue.has_residual:
                    r0, r1 = unpack_half2(words[2 * j + half])
                    v0, v1 = v0 + r0, v1 + r1
                words[2 * j + half] = pack_half2(v0, v1)
        if elected:
            tma_store_wait_read_1()  # the tile that this buffer held two blocks ago has been read
        bar_sync(uint32(warpgroup), uint32(128))
        tile = int32(staging.at + (turn & 1) * BOX_BYTES)
        for j in range(8):
            for half in range(2):
                store_word(tiles, word_place(tile, thread_row, lane, j, half), words[2 * j + half])
        fence_proxy_async()
        bar_sync(uint32(warpgroup), uint32(128))
        if elected:
            if column < seam:
                tma_store_2d(base + uint32(tile), maps.c, uint32(column), uint32(first_row))
            else:
                tma_store_2d(base + uint32(tile), maps.second, uint32(column - seam), uint32(first_row))
            tma_store_commit()
        turn = int32(turn + 1)
    return turn


@cuda.jit(device=True, forceinline=True)
def prefetch_gates(gates, groups, gated, place, work):
    """A thread's gates of a tile, which arrive while it is multiplied: a word for each group of eight columns.

    Its two rows, eight apart, are of one image, as images have a multiple of 16.
    """
    row = min(int32(place.first_row + place.thread_row), int32(work.M - 1))
    at = int32(uint32(row) // uint32(gated.tokens)) * gated.pitch + gated.first
    for j in range(groups):
        gates[j] = load_word(gated.gate, at + min(int32(place.first_column + 8 * j + place.lane % 4 * 2),
                                                  int32(work.N - 2)))


@cuda.jit(device=True, forceinline=True)
def epilogue_gate(block, turn, acc, gates, place, staging, work):
    """residual + gate · (accumulator + bias), in the tile that holds the residual; the next turn.

    The sum in brackets is rounded first, as it is where another kernel reads it, gates it and adds: the same bits.
    """
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
            n = int32(staging.biases_at + 64 * block + 8 * j + lane % 4 * 2)
            b0, b1 = staging.biases[n], staging.biases[n + 1]
            g0, g1 = unpack_half2(gates[8 * block + j])
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                h0, h1 = unpack_half2(pack_half2(acc[i] + b0, acc[i + 1] + b1))
                r0, r1 = unpack_half2(words[2 * j + half])
                words[2 * j + half] = pack_half2(r0 + g0 * h0, r1 + g1 * h1)
        return return_words(words, turn, tile, place, staging)
    return turn


@cuda.jit(device=True, forceinline=True)
def return_words(words, turn, tile, place, staging):
    """A thread's words, back in the tile that `exchange` brought and will store; the next turn."""
    for j in range(8):
        for half in range(2):
            store_word(staging.tiles, word_place(tile, place.thread_row, place.lane, j, half), words[2 * j + half])
    fence_proxy_async()
    cuda.syncwarp()
    if place.lane == 0:
        mbarrier_arrive(barrier_at(staging.ready, turn & 1))
    return int32(turn + 1)


@cuda.jit(device=True, forceinline=True)
def epilogue_gelu(block, acc, place, staging, maps, work, keeps_u):
    """u = accumulator + bias, if it is kept, and GELU(u), by way of a tile in shared memory for each.

    The arithmetic comes before the wait: meanwhile TMA reads the tiles of the block before.
    """
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
            tma_store_2d(base + uint32(staging.at + BOX_BYTES), maps.d, uint32(column), uint32(first_row))
            tma_store_commit()


@cuda.jit(device=True, forceinline=True)
def epilogue_layer_scale(block, acc, place, staging, maps, residual, scale, work, keeps_z):
    """z = accumulator + bias, if it is kept, and residual + scale · z, as `epilogue_gelu` writes its two."""
    first_row, first_column, thread_row, lane = place
    tiles, base = staging.tiles, staging.base
    column = int32(first_column + 64 * block)
    if column < work.N and first_row < work.M:
        warpgroup = cuda.threadIdx.x // 128
        elected = cuda.threadIdx.x % 128 == 0
        words, scaled = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        for j in range(8):
            n = min(int32(column + 8 * j + lane % 4 * 2), int32(work.N - 2))
            for half in range(2):
                row = min(int32(first_row + thread_row + 8 * half), int32(work.M - 1))
                scaled[2 * j + half] = load_word(residual, row * work.N + n)
        for j in range(8):
            n = int32(staging.biases_at + 64 * block + 8 * j + lane % 4 * 2)
            b0, b1 = staging.biases[n], staging.biases[n + 1]
            n = min(int32(column + 8 * j + lane % 4 * 2), int32(work.N - 2))
            s0, s1 = scale[uint32(n)], scale[uint32(n + 1)]
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                z0, z1 = acc[i] + b0, acc[i + 1] + b1
                r0, r1 = unpack_half2(scaled[2 * j + half])
                words[2 * j + half] = pack_half2(z0, z1)
                scaled[2 * j + half] = pack_half2(r0 + s0 * z0, r1 + s1 * z1)
        if elected:
            tma_store_wait_read_0()
        bar_sync(uint32(warpgroup), uint32(128))
        for j in range(8):
            for half in range(2):
                at = word_place(staging.at, thread_row, lane, j, half)
                if keeps_z:
                    store_word(tiles, at, words[2 * j + half])
                store_word(tiles, at + BOX_BYTES, scaled[2 * j + half])
        fence_proxy_async()
        bar_sync(uint32(warpgroup), uint32(128))
        if elected:
            if keeps_z:
                tma_store_2d(base + uint32(staging.at), maps.c, uint32(column), uint32(first_row))
            tma_store_2d(base + uint32(staging.at + BOX_BYTES), maps.d, uint32(column), uint32(first_row))
            tma_store_commit()


@cuda.jit(device=True, forceinline=True)
def epilogue_gelu_gradient(block, turn, acc, place, staging, work):
    """accumulator · GELU'(u), in the tile that holds u; the next turn."""
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
                words[2 * j + half] = pack_half2(acc[i] * fast_gelu_gradient(u0), acc[i + 1] * fast_gelu_gradient(u1))
        for j in range(8):
            for half in range(2):
                store_word(tiles, word_place(tile, thread_row, lane, j, half), words[2 * j + half])
        fence_proxy_async()
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(barrier_at(staging.ready, buffer))
        turn = int32(turn + 1)
    return turn


@cuda.jit(device=True, forceinline=True)
def epilogue_gelu_again_gradient(block, turn, acc, place, staging, work):
    """As `epilogue_gelu_gradient`, and GELU(u) in the tile beside; the next turn."""
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
                words[2 * j + half], activated[2 * j + half] = (pack_half2(acc[i] * slope0, acc[i + 1] * slope1),
                                                                pack_half2(y0, y1))
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
    return turn


@cuda.jit(device=True, forceinline=True)
def fetch_tiles(count, again, tile, maps, barrier, x, y):
    """Ask for the tile of `maps.d` at column x and row y, or for those of both halves of its columns."""
    mbarrier_expect_tx(barrier, uint32(BOX_BYTES if again else count * BOX_BYTES))
    if again or count == 1:
        tma_load_2d(tile, maps.d, barrier, uint32(x), uint32(y))
    else:
        tma_load_3d(tile, maps.d, barrier, uint32(x), uint32(0), uint32(y))
        tma_load_3d(tile + uint32(BOX_BYTES), maps.d, barrier, uint32(x), uint32(1), uint32(y))


@cuda.jit(device=True, forceinline=True)
def return_tiles(count, again, eight, tile, maps, x, y):
    """Store what `fetch_tiles` has brought, in `maps.c`; eight: it has become bytes, see fp8_epilogues.py; again: the
    tile beside goes to where it came from."""
    if eight:
        for i in range(4):
            tma_store_2d(tile + uint32(i * WARP_BYTES), maps.c, uint32(x), uint32(y + 16 * i))
    elif again or count == 1:
        tma_store_2d(tile, maps.c, uint32(x), uint32(y))
        if again:
            tma_store_2d(tile + uint32(BOX_BYTES), maps.d, uint32(x), uint32(y))
    else:
        tma_store_3d(tile, maps.c, uint32(x), uint32(0), uint32(y))
        tma_store_3d(tile + uint32(BOX_BYTES), maps.c, uint32(x), uint32(1), uint32(y))


@cuda.jit(device=True, forceinline=True)
def exchange(paired, count, again, eight, consumer, blocks, unit, stride, staging, maps, work):
    """One thread brings the tiles of `maps.d` that a consumer needs in its epilogue, and takes its results to
    `maps.c`: one for each block of 64 columns, or `count`. again: of two results the second belongs where the one tile
    has come from; as no other block reads that, it may be overwritten.

    A tile waits in one of two buffers while the product is made; the consumer overwrites it, and as soon as it has been
    written to memory from there the next but one follows. No consumer waits for a store.
    """
    turn = int32(0)
    x_1 = y_1 = x_2 = y_2 = int32(0)  # where the last tile and the one before it belong
    while unit < work.units:
        row, column = tile_place(unit, work.tiles_m, work.tiles_n)
        if paired:
            row = row_of_pair(row)
        y = int32(row * BM + consumer * 64)
        for i in range(blocks):
            x = int32(column * (64 * blocks) + 64 * i)
            if y < work.M and x < work.N:
                buffer = uint32(turn & 1)
                tile = staging.base + uint32(staging.at) + buffer * uint32(count * BOX_BYTES)
                if turn >= 2:
                    mbarrier_wait(barrier_at(staging.ready, buffer), uint32((turn >> 1) + 1 & 1))
                    return_tiles(count, again, eight, tile, maps, x_2, y_2)
                    tma_store_commit()
                    tma_store_wait_read_0()
                fetch_tiles(count, again, tile, maps, barrier_at(staging.loaded, buffer), x, y)
                x_2, y_2, x_1, y_1 = x_1, y_1, x, y
                turn = int32(turn + 1)
        unit = int32(unit + stride)
    for last in range(2):
        if turn + last >= 2:
            buffer = uint32(turn + last & 1)
            mbarrier_wait(barrier_at(staging.ready, buffer), uint32((turn + last >> 1) + 1 & 1))
            tile = staging.base + uint32(staging.at) + buffer * uint32(count * BOX_BYTES)
            return_tiles(count, again, eight, tile, maps, x_2, y_2)
        x_2, y_2 = x_1, y_1
    tma_store_commit()
    tma_store_wait_0()


@cuda.jit(device=True, forceinline=True)
def epilogue_float(block, acc, place, c, start, bias, work, epilogue):
    """64 × 64 outputs of a warpgroup as float32, 16 bytes a lane; c from `start` on."""
    first_row, first_column, thread_row, lane = place
    column = int32(first_column + 64 * block)
    if column < work.N and first_row < work.M:
        for j in range(8):
            i = 32 * block + 4 * j
            write_fragment(c, start, acc[i], acc[i + 1], acc[i + 2], acc[i + 3], int32(first_row + thread_row),
                           int32(column + 8 * j), lane, work, bias, epilogue)


# Row sums of A --------------------------------------------------------------------------------------------------------
# Two idle warps add while the tensor cores multiply the same stage. A lane has four loads in flight before it adds; one
# after the other they would take twice as long as the products. (Sums as products with ones would not help: mma and
# wgmma compete for the same tensor cores.)

@cuda.jit(device=True, forceinline=True)
def add_eight(sums, w):
    v0, v1 = unpack_half2(w[0])
    v2, v3 = unpack_half2(w[1])
    v4, v5 = unpack_half2(w[2])
    v6, v7 = unpack_half2(w[3])
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    return s0 + v0, s1 + v1, s2 + v2, s3 + v3, s4 + v4, s5 + v5, s6 + v6, s7 + v7


@cuda.jit(device=True, forceinline=True)
def add_rows(tiles, box, lane, sums):
    """Add this lane's 16 rows of k of a box (64 k × 64 rows of A, swizzled) to its sums of eight rows of A."""
    chunk, first = lane & 7, lane >> 3
    for i in range(4):
        k = first + 16 * i
        at = box + k * 128
        v = load_words4(tiles, at + ((chunk ^ (k & 7)) << 4))
        w = load_words4(tiles, at + 512 + ((chunk ^ (k + 4 & 7)) << 4))
        x = load_words4(tiles, at + 1024 + ((chunk ^ (k & 7)) << 4))
        y = load_words4(tiles, at + 1536 + ((chunk ^ (k + 4 & 7)) << 4))
        sums = add_eight(add_eight(add_eight(add_eight(sums, v), w), x), y)
    return sums


@cuda.jit(device=True, forceinline=True)
def add_lanes(value):
    """The sum over the four lanes that have the same chunk; every lane gets it."""
    value += cuda.shfl_xor_sync(FULL_MASK, value, 8)
    return value + cuda.shfl_xor_sync(FULL_MASK, value, 16)


@cuda.jit(device=True, forceinline=True)
def write_rows(row_sums, start, row, M, lane, sums, add):
    """A warp's 64 sums, from `row` on: lanes 0 … 7 write four each, and so do lanes 8 … 15."""
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    s0, s1, s2, s3 = add_lanes(s0), add_lanes(s1), add_lanes(s2), add_lanes(s3)
    s4, s5, s6, s7 = add_lanes(s4), add_lanes(s5), add_lanes(s6), add_lanes(s7)
    if lane >= 8:
        s0, s1, s2, s3 = s4, s5, s6, s7
    row = int32(row + (lane & 7) * 8 + (lane >> 3) * 4)
    if lane < 16 and row < M:
        at = start + row
        if add:
            b0, b1, b2, b3 = load4(row_sums, at)
            s0, s1, s2, s3 = b0 + s0, b1 + s1, b2 + s2, b3 + s3
        store4(row_sums, at, s0, s1, s2, s3)
