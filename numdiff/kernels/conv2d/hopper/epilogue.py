"""The end of a Hopper convolution's tile: results out, residuals in, and statistics for the
GroupNorm that follows.

ROLES
    A consumer, 128 threads, adds bias, channel and residual to its accumulators, and writes them as
    float16 to its output buffer: `stage_results`. One warp for each consumer does the rest, so that
    nothing delays the products: `exchange`. It loads the addends of each channel, and the residual,
    into the place of the results; when these are written it lets TMA store them, and computes their
    statistics.
HANDSHAKE
    `ready`: the buffer is the consumer's, addends and residual are there. `written`: it is the
    warp's again.
STATISTICS
    of each two channels over each sub-block of 8 × 8 pixels: mean, and variance about it. They are
    those of the rounded results in the buffer, which the norm will read
    (../../groupnorm/normalise.py).
SOURCE
    joining variances: Chan, Golub, LeVeque 1983, Am. Stat. 37, 242.
READ NEXT
    plan.py, how tiles and stages are chosen.
"""

import numpy as np

from ....device import cuda, device_inline, float32, int32, uint32
from ....device.limits import FULL_MASK
from ....device.mbarrier import mbarrier_arrive, mbarrier_expect_tx, mbarrier_wait
from ....device.pipeline import barrier_at
from ....device.tensor_core import load_word, pack_half2, store_word, unpack_half2
from ....device.tma import (
    fence_proxy_async,
    tma_load_4d,
    tma_prefetch,
    tma_store_4d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
)
from .boxes import sub_block_at
from .layout import (
    B_BYTES,
    BN,
    COLS,
    OUT_BYTES,
    PHASED,
    SLAB_BYTES,
    SLABS,
    SUB,
    TRANSPOSED,
    place_of,
)

# A consumer ---------------------------------------------------------------------------------------


@device_inline
def stage_results(tiles, at, acc, addends, addends_at, epilogue):
    """Write a warpgroup's 64 × BN results to its buffer, as rows of COLS channels, swizzled as TMA
    expects them.

    The residual is already where they go; all of it is loaded before any of it is used. The lanes
    of eight neighbouring pixels write the same 16-byte chunk of their rows: the swizzle puts these
    in eight places, so that a warp's store touches each bank once.
    """
    residual_words = cuda.local.array(32, np.uint32)
    thread = int32(cuda.threadIdx.x & 127)
    lane = thread & 31
    row = int32((thread >> 5) * 16 + (lane >> 2))
    swizzle = row & 7 if COLS == 64 else (row >> 1) & 3
    row_at = int32(at + row * 2 * COLS + (lane & 3) * 4)
    if epilogue.has_bias or epilogue.has_channel:
        for j in range(BN // 8):
            n = int32(addends_at + j * 8 + (lane & 3) * 2)
            low, high = addends[n], addends[n + 1]
            acc[4 * j] += low
            acc[4 * j + 1] += high
            acc[4 * j + 2] += low
            acc[4 * j + 3] += high
    if epilogue.has_residual:
        for j in range(BN // 8):
            place = int32(row_at + j * 8 // COLS * 128 * COLS + (j % (COLS // 8) ^ swizzle) * 16)
            residual_words[2 * j] = load_word(tiles, place)
            residual_words[2 * j + 1] = load_word(tiles, int32(place + 16 * COLS))
        for j in range(BN // 4):
            low, high = unpack_half2(residual_words[j])
            acc[2 * j] += low
            acc[2 * j + 1] += high
    for j in range(BN // 8):
        place = int32(row_at + j * 8 // COLS * 128 * COLS + (j % (COLS // 8) ^ swizzle) * 16)
        store_word(tiles, place, pack_half2(acc[4 * j], acc[4 * j + 1]))
        store_word(tiles, int32(place + 16 * COLS), pack_half2(acc[4 * j + 2], acc[4 * j + 3]))


# Its exchange warp --------------------------------------------------------------------------------


@device_inline
def stage_addends(addends, at, first, N, vectors, channel_at, epilogue):
    """addends[at … at + BN - 1] = what is added to each channel of a sub-block from `first` on, by
    a warp."""
    for k in range(BN // 32):
        n = int32(32 * k + (cuda.threadIdx.x & 31))
        total = float32(0)
        if first + n < N:
            if epilogue.has_bias:
                total += vectors.bias[first + n]
            if epilogue.has_channel:
                total += vectors.channel[channel_at + first + n]
        addends[at + n] = total


@device_inline
def write_statistics(tiles, at, statistics, to, left, columns):
    """Statistics of a sub-block in its buffer, by a warp; left: pairs of channels that exist.

    Of each two channels the mean goes to statistics[to …], the variance to `columns` later.
    A lane has two channels, of every second pixel where rows are short, so that a warp's loads
    touch each bank once. It subtracts the first of its numbers from all, so that q - s² / n cancels
    no more than groupnorm/chunks.py says.
    """
    LANES, PIXELS = COLS // 2, COLS  # of a pixel; of a lane
    words = cuda.local.array(8, np.uint32)
    lane = int32(cuda.threadIdx.x & 31)
    own, half, share = (
        int32(lane & (LANES - 1)),
        int32(lane // LANES),
        float32(1) / float32(2 * PIXELS),
    )
    for slab in range(BN // COLS):
        own_at = int32(at + slab * 128 * COLS + half * 2 * COLS + (own & 3) * 4)
        first = unpack_half2(load_word(tiles, int32(own_at + (own >> 2) * 16)))[0]
        s = q = float32(0)
        # eight loads in flight at once, as each has a long latency
        for eight in range(PIXELS // 8):
            for k in range(8):
                place = int32(own_at + k * 128 + ((own >> 2) ^ (k & (COLS // 8 - 1))) * 16)
                words[k] = load_word(tiles, int32(place + eight * 1024))
            for k in range(8):
                low, high = unpack_half2(words[k])
                low -= first
                high -= first
                s += low + high
                q += low * low + high * high
        mean, squares = first + s * share, max(q - s * s * share, float32(0))
        if COLS == 32:
            mean_2 = cuda.shfl_xor_sync(FULL_MASK, mean, 16)
            squares += cuda.shfl_xor_sync(FULL_MASK, squares, 16) + float32(PIXELS) * (
                mean - mean_2
            ) * (mean - mean_2)
            mean = float32(0.5) * (mean + mean_2)
        pair = int32(slab * LANES + own)
        if pair < left and half == 0:
            statistics[to + pair], statistics[to + columns + pair] = (
                mean,
                squares * float32(1 / 128),
            )


@device_inline
def load_residual(buffer, ready, map_residual, first, w, h, image, consumer, tiling):
    """Load the residual of a consumer's sub-blocks by TMA, to the place of its results."""
    mbarrier_expect_tx(ready, uint32(OUT_BYTES))
    for slab in range(SUB * SLABS):
        di, dj, more = sub_block_at(consumer * SUB + slab // SLABS, tiling.tile_w, tiling.tile_h)
        tma_load_4d(
            buffer + uint32(slab * SLAB_BYTES),
            map_residual,
            ready,
            uint32(first + slab % SLABS * COLS),
            uint32(w + di),
            uint32(h + dj),
            uint32(image + more),
        )


@device_inline
def store_results(buffer, map_y, first, w, h, image, consumer, tiling):
    """Store a consumer's results by TMA."""
    for slab in range(SUB * SLABS):
        di, dj, more = sub_block_at(consumer * SUB + slab // SLABS, tiling.tile_w, tiling.tile_h)
        tma_store_4d(
            buffer + uint32(slab * SLAB_BYTES),
            map_y,
            uint32(first + slab % SLABS * COLS),
            uint32(w + di),
            uint32(h + dj),
            uint32(image + more),
        )
    tma_store_commit()


@device_inline
def stage_all_addends(buffers, vectors, consumer, first, image, shape, tiling, epilogue):
    """`stage_addends` of each of a consumer's sub-blocks. One beyond the last image takes that
    image's."""
    for sub in range(SUB):
        more = sub_block_at(consumer * SUB + sub, tiling.tile_w, tiling.tile_h)[2]
        mine = min(int32(image + more), int32(shape.images - 1))
        stage_addends(
            buffers.addends,
            int32(buffers.addends_at + (consumer * SUB + sub) * BN),
            first,
            shape.N,
            vectors,
            mine * shape.N,
            epilogue,
        )


@device_inline
def write_all_statistics(buffers, consumer, first, w, h, image, shape, tiling, epilogue):
    """`write_statistics` of each of a consumer's sub-blocks that is in an image."""
    for sub in range(SUB):
        di, dj, more = sub_block_at(consumer * SUB + sub, tiling.tile_w, tiling.tile_h)
        x, y, b = int32(w + di), int32(h + dj), int32(image + more)
        if x < shape.width and y < shape.height and b < shape.images:
            chunk = int32(((b * shape.height + y) >> 3) * (shape.width >> 3) + (x >> 3))
            if PHASED:
                chunk = int32((y >> 3) * (shape.width >> 3) + (x >> 3))
                chunk += int32(b * epilogue.chunks + epilogue.first_chunk)
            # buffers.at, from what it is made of: with few registers better computed again than
            # kept
            at = int32(tiling.b_stages * B_BYTES + consumer * OUT_BYTES + sub * SLABS * SLAB_BYTES)
            write_statistics(
                buffers.tiles,
                at,
                epilogue.statistics,
                int32(chunk * shape.N + (first >> 1)),
                int32((shape.N - first) >> 1),
                shape.N >> 1,
            )


@device_inline
def exchange(buffers, consumer, maps, vectors, boxes, shape, tiling, epilogue):
    """A warp brings what a consumer's epilogue needs, for all tiles of the block, and takes away
    what it has written.
    """
    elected = (cuda.threadIdx.x & 31) == 0
    if elected:
        tma_prefetch(maps.y)
    buffer = buffers.address + uint32(consumer * OUT_BYTES)
    ready, written = barrier_at(buffers.ready, consumer), barrier_at(buffers.written, consumer)
    parity = uint32(0)
    for tile in range(cuda.blockIdx.x, boxes.tiles, cuda.gridDim.x):
        column, i, j, group = place_of(tile, boxes)
        first = int32(column * BN)
        w, h, image = (
            int32(i * tiling.tile_w),
            int32(j * tiling.tile_h),
            int32(group * tiling.tile_images),
        )
        if epilogue.has_bias or epilogue.has_channel:
            stage_all_addends(buffers, vectors, consumer, first, image, shape, tiling, epilogue)
        cuda.syncwarp()
        if elected and epilogue.has_residual:
            load_residual(buffer, ready, maps.residual, first, w, h, image, consumer, tiling)
        else:
            mbarrier_arrive(ready)  # every lane, for what it has written and read
        mbarrier_wait(written, parity)
        parity ^= uint32(1)
        if elected:
            store_results(buffer, maps.y, first, w, h, image, consumer, tiling)
        if not TRANSPOSED and epilogue.has_statistics:
            write_all_statistics(buffers, consumer, first, w, h, image, shape, tiling, epilogue)
            fence_proxy_async()  # the next residual comes to where was read
        if elected:
            tma_store_wait_read_0()
        cuda.syncwarp()
    if elected:
        tma_store_wait_0()
