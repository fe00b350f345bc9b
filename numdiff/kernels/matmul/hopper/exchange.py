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

from ....device import device_inline, int32, uint32
from ....device.mbarrier import mbarrier_expect_tx, mbarrier_wait
from ....device.pipeline import barrier_at
from ....device.specialise import Field
from ....device.tma import (
    tma_load_2d,
    tma_load_3d,
    tma_store_2d,
    tma_store_3d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
)
from .layout import BLOCKS, BM, BOX_BYTES
from .staging import make_staging
from .work import place_of

tiles_of_block = Field("EPILOGUE", "tiles")
fetch, give_back = Field("EPILOGUE", "fetch"), Field("EPILOGUE", "give_back")


# What an epilogue's `fetch` and `give_back` can be ---------------------------------------------------


@device_inline
def fetch_one(tile, maps, barrier, x, y):
    """Load the tile of `maps.d` at column x and row y."""
    mbarrier_expect_tx(barrier, uint32(BOX_BYTES))
    tma_load_2d(tile, maps.d, barrier, uint32(x), uint32(y))


@device_inline
def fetch_halves(tile, maps, barrier, x, y):
    """As `fetch_one`, of both halves of the columns of `maps.d`."""
    mbarrier_expect_tx(barrier, uint32(2 * BOX_BYTES))
    tma_load_3d(tile, maps.d, barrier, uint32(x), uint32(0), uint32(y))
    tma_load_3d(tile + uint32(BOX_BYTES), maps.d, barrier, uint32(x), uint32(1), uint32(y))


@device_inline
def return_one(tile, maps, x, y):
    """Store the result in the tile of `fetch_one` to `maps.c`."""
    tma_store_2d(tile, maps.c, uint32(x), uint32(y))


@device_inline
def return_both(tile, maps, x, y):
    """As `return_one`; the next tile, GELU(u), goes to where u came from, which no other block
    reads."""
    tma_store_2d(tile, maps.c, uint32(x), uint32(y))
    tma_store_2d(tile + uint32(BOX_BYTES), maps.d, uint32(x), uint32(y))


@device_inline
def return_halves(tile, maps, x, y):
    """As `return_one`, of both halves of the columns of `maps.c`."""
    tma_store_3d(tile, maps.c, uint32(x), uint32(0), uint32(y))
    tma_store_3d(tile + uint32(BOX_BYTES), maps.c, uint32(x), uint32(1), uint32(y))


# The exchange -------------------------------------------------------------------------------------


@device_inline
def assist_exchange(t, shared, unit, walk, target):
    """One thread of an idle warp for each consumer."""
    if t == 32:
        exchange(0, unit, walk.stride, make_staging(0, shared), target.maps, target.work)
    elif t == 64:
        exchange(1, unit, walk.stride, make_staging(1, shared), target.maps, target.work)


@device_inline
def assist_nothing(t, shared, unit, walk, target):
    """Of an epilogue without exchange and row sums."""


@device_inline
def exchange(consumer, unit, stride, staging, maps, work):
    """One thread loads the tiles of `maps.d` that a consumer needs in its epilogue (`fetch`), and
    stores its results (`give_back`), for each block of 64 columns.

    A tile waits in one of two buffers while the product is made. The consumer overwrites it with
    its results, and once TMA has read those the tile after the next is fetched into the buffer.
    """
    turn = int32(0)
    x_1 = y_1 = x_2 = y_2 = int32(0)  # where the last tile and the one before it belong
    while unit < work.units:
        row, column = place_of(unit, work)
        y = int32(row * BM + consumer * 64)
        for i in range(BLOCKS):
            x = int32(column * (64 * BLOCKS) + 64 * i)
            if y < work.M and x < work.N:
                buffer = uint32(turn & 1)
                tile = (
                    staging.base + uint32(staging.at) + buffer * uint32(tiles_of_block * BOX_BYTES)
                )
                if turn >= 2:
                    mbarrier_wait(barrier_at(staging.ready, buffer), uint32((turn >> 1) + 1 & 1))
                    give_back(tile, maps, x_2, y_2)
                    tma_store_commit()
                    tma_store_wait_read_0()
                fetch(tile, maps, barrier_at(staging.loaded, buffer), x, y)
                x_2, y_2, x_1, y_1 = x_1, y_1, x, y
                turn = int32(turn + 1)
        unit = int32(unit + stride)
    for last in range(2):
        if turn + last >= 2:
            buffer = uint32(turn + last & 1)
            mbarrier_wait(barrier_at(staging.ready, buffer), uint32((turn + last >> 1) + 1 & 1))
            tile = staging.base + uint32(staging.at) + buffer * uint32(tiles_of_block * BOX_BYTES)
            give_back(tile, maps, x_2, y_2)
        x_2, y_2 = x_1, y_1
    tma_store_commit()
    tma_store_wait_0()
