"""Tiles that an epilogue of Hopper's matmul reads, and what it leaves in their place, by a warp
that is idle.

They are the residual of a gated product, and u of GELU' and of SwiGLU's backward. A thread of the
producer's warpgroup, one for each consumer (CUTLASS: an epilogue load warp, which here stores,
too), loads them by TMA while the product is computed. It stores the results as soon as the consumer
has left them in the tile's place. Consumers never stall on epilogue loads or stores.

TWO BARRIERS A TILE: `loaded`, on which TMA counts bytes, and `ready`, at which the consumer's four
warps arrive.

SOURCE
    PTX ISA, sections 9.7.9.27 (cp.async.bulk.tensor) and 9.7.13.15 (mbarrier).
READ NEXT
    fast_gelu.py
"""

from ....device import cuda, int32, uint32
from ....device.mbarrier import mbarrier_expect_tx, mbarrier_wait
from ....device.pipeline import barrier_at
from ....device.tma import (
    tma_load_2d,
    tma_load_3d,
    tma_store_2d,
    tma_store_3d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
)
from .layout import BM, BOX_BYTES, WARP_BYTES, row_of_pair, tile_place


@cuda.jit(device=True, forceinline=True)
def fetch_tiles(count, again, tile, maps, barrier, x, y):
    """Load the tile of `maps.d` at column x and row y, or for those of both halves of its columns."""
    mbarrier_expect_tx(barrier, uint32(BOX_BYTES if again else count * BOX_BYTES))
    if again or count == 1:
        tma_load_2d(tile, maps.d, barrier, uint32(x), uint32(y))
    else:
        tma_load_3d(tile, maps.d, barrier, uint32(x), uint32(0), uint32(y))
        tma_load_3d(tile + uint32(BOX_BYTES), maps.d, barrier, uint32(x), uint32(1), uint32(y))


@cuda.jit(device=True, forceinline=True)
def return_tiles(count, again, eight, tile, maps, x, y):
    """Store the results in the tiles of `fetch_tiles` to `maps.c`; eight: they are bytes now, see
    fp8_epilogues.py; again: the next tile goes to where the first came from."""
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
    """One thread loads the tiles of `maps.d` that a consumer needs in its epilogue, and stores its
    results to `maps.c`: one for each block of 64 columns, or `count` (u1 and u2, du1 and du2).

    again: one tile comes, u, and two go; the second, GELU(u), goes to where u came from, which no
    other block reads

    A tile waits in one of two buffers while the product is made. The consumer overwrites it with
    its results, and once TMA has read those the tile after the next is fetched into the buffer.
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
