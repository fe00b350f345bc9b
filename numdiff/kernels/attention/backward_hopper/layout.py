"""Flash attention backward on Hopper: constants, the layout of shared memory, and the pipelines
between warps.

SHARED MEMORY of a block, in this order:
    two buffers of k and v       tiles of 256 keys; dk and dv take their place before their store
    dSᵀ                          of 256 keys, 64 queries each: rows of 128 bytes, swizzled as TMA does it
    two or three stages          q and dy of 64 queries, then L and D of each query, float32
    y                            of 64 queries: only D is made of it
    zeros                        HS 72 alone: the tenth chunk of ../hopper_tiles.py, behind all ninth ones
FOUR PIPELINES
    keys         TMA fills a buffer; both consumers empty it, by storing what took its place
    queries      TMA fills a stage; both consumers empty it when their dq is made
    y            TMA fills it; the two warps that make D empty it
    statistics   those warps fill L and D of a stage, which goes back with its q and dy
A PLACE is an address in shared memory in units of 16 bytes, as descriptors count. So half of a
    descriptor is a constant, and there are no registers to spare for the other half. What ends in
    _at counts bytes from the start.

SOURCE
    kernel.py; swizzled rows, and places as descriptors count them: PTX ISA, section 9.7.15.5; the
    pipelines: section 9.7.13.15 (mbarrier).
READ NEXT
    products.py
"""

from typing import NamedTuple

from ....device import cuda, device_inline, float32, int32, uint32
from ....device.common import divide
from ....device.limits import WARP
from ....device.mbarrier import fence_barrier_init
from ....device.pipeline import barrier_at, init_barriers, init_ring, make_ring
from ....device.specialise import Constant
from ....device.tensor_core import store_word
from ....device.tma import fence_proxy_async, tma_prefetch
from ..fragments import CHUNK
from ..heads import LOG2_E
from ..hopper_tiles import ADDRESS, UNIT, row_bytes, tile_bytes

QUERIES = 64  # of a tile
ROWS = 64  # keys of a product
CONSUMER_KEYS = 2 * ROWS
KEYS = 2 * CONSUMER_KEYS  # of a tile
DS_ROW = 2 * QUERIES  # bytes: a key's dS
BUFFERS = 2  # of k and v
MAX_STAGES = 3
BARRIERS = 2 * BUFFERS + 3 * MAX_STAGES + 2


def stages_of(HS):
    return 2 if HS == 72 else 3


def stage_bytes(HS):
    """Bytes of a stage of q and dy, then L and D: a multiple of 1024."""
    return 2 * tile_bytes(HS, QUERIES) + 1024


def shared_bytes(HS):
    """Buffers of k and v; dSᵀ; stages of q, dy, L and D; y; the zeros behind a ninth part."""
    return (
        BUFFERS * 2 * tile_bytes(HS, KEYS)
        + KEYS * DS_ROW
        + (CHUNK * ROWS if HS == 72 else 0)
        + stages_of(HS) * stage_bytes(HS)
        + tile_bytes(HS, QUERIES)
    )


HS = Constant()  # the head size
# bytes and columns of a tile's first part
ROW, COLUMNS = Constant(row_bytes), Constant(lambda HS: min(HS, 64))
N = Constant(lambda HS: 32 if HS == 72 else 64)  # queries of a product
TILE, Q_TILE = (
    Constant(lambda HS: tile_bytes(HS, KEYS)),
    Constant(lambda HS: tile_bytes(HS, QUERIES)),
)
# k, v; q, dy
BUFFER, STAGE, STAGES = Constant(lambda TILE: 2 * TILE), Constant(stage_bytes), Constant(stages_of)
STATISTICS = Constant(lambda Q_TILE: 2 * Q_TILE)  # within a stage: L, then D
NINTH = Constant(lambda ROW: KEYS * ROW)  # within a tile
DS_AT = Constant(lambda BUFFER: BUFFERS * BUFFER)
STAGES_AT = Constant(lambda DS_AT: DS_AT + KEYS * DS_ROW)
Y_AT = Constant(lambda STAGES_AT, STAGES, STAGE: STAGES_AT + STAGES * STAGE)
ZEROS = Constant(lambda Y_AT, Q_TILE: Y_AT + Q_TILE)  # behind all ninth parts
ZERO_WORDS = CHUNK * ROWS // 4


# Arguments and work -------------------------------------------------------------------------------


class AttentionBackwardMaps(NamedTuple):
    """q, k: of qkv, in boxes of 64 and 256 tokens; dy, y: of 64; out: of dqkv, of 128; with those
    of ninth parts."""

    q: object
    q_ninth: object
    k: object
    k_ninth: object
    dy: object
    dy_ninth: object
    y: object
    y_ninth: object
    out: object
    out_ninth: object


class AttentionBackwardProblem(NamedTuple):
    """dq of (image, token, head) is at image · T · dq_row + token · dq_row + head · dq_head, and
    each further chunk's behind all images. head_step: columns of qkv from a head to the next; part:
    from q's to k's and v's."""

    images: int
    T: int
    heads: int
    head_step: int
    part: int
    dq_row: int
    dq_head: int
    chunks: int
    chunk_tiles: int
    units: int
    scale: float


@device_inline
def work_tile(unit, p):
    """(image, head, first key, end of the keys, chunk of keys) of a unit."""
    rest, chunk = divide(unit, p.chunks)
    image, head = divide(rest, p.heads)
    first_key = int32(chunk * p.chunk_tiles * KEYS)
    return (
        image,
        head,
        first_key,
        int32(min(int32(p.T), int32(first_key + p.chunk_tiles * KEYS))),
        chunk,
    )


# Pipelines ----------------------------------------------------------------------------------------


class Rings(NamedTuple):
    """keys: buffers of k and v; queries: stages of q and dy; statistics: the first stage's barrier
    of L and D; y."""

    keys: object
    queries: object
    y: object
    statistics: int


@device_inline
def make_rings(base, barriers):
    return Rings(
        make_ring(base, BUFFER, BUFFERS, barrier_at(barriers, 3 * STAGES)),
        make_ring(base + uint32(STAGES_AT), STAGE, STAGES, barriers),
        make_ring(base + uint32(Y_AT), Q_TILE, 1, barrier_at(barriers, 3 * STAGES + 2 * BUFFERS)),
        barrier_at(barriers, 2 * STAGES),
    )


@device_inline
def set_up(shared, rings, maps):
    """All threads: barriers, and the zeros behind ninth parts.

    Two consumers read keys and queries; the two warps that make D read y, and fill L and D.
    """
    t = int32(cuda.threadIdx.x)
    if t == 0:
        init_ring(rings.queries, 1, 2)
        init_barriers(rings.statistics, STAGES, 2 * WARP)
        init_ring(rings.keys, 1, 2)
        init_ring(rings.y, 1, 2 * WARP)
        fence_barrier_init()
        tma_prefetch(maps.q)
        tma_prefetch(maps.k)
        tma_prefetch(maps.dy)
        tma_prefetch(maps.y)
        tma_prefetch(maps.out)
    if HS == 72:
        if t < ZERO_WORDS:
            store_word(shared, int32(ZEROS + t * 4), uint32(0))
        fence_proxy_async()
    cuda.syncthreads()


# A consumer's thread ------------------------------------------------------------------------------


class Consumer(NamedTuple):
    """A consumer thread's constants. Places are in 16 bytes, what ends in _at in bytes from shared
    memory's start.

    c: the scores' factor, 1 / √HS in units of ln 2; own_at, own_ninth_at: from a tile's start to
    this consumer's keys;
    side: from a row's start to its columns of dq, a place; ds_at: dS of the thread's key in the
    first 64, of its first
    query; query: whose dq it writes, of a tile
    """

    number: int
    lane: int
    elected: bool
    c: float
    base_place: int
    ds_place: int
    zeros: int
    own_at: int
    own_ninth_at: int
    side: int
    ds_at: int
    query: int


@device_inline
def this_consumer(base, scale):
    t = int32(cuda.threadIdx.x)
    number, thread, lane = int32((t >> 7) - 1), int32(t & 127), int32(t & 31)
    base_place = int32((base & ADDRESS) >> UNIT)
    return Consumer(
        number=number,
        lane=lane,
        elected=thread == 0,
        c=float32(scale * LOG2_E),
        base_place=base_place,
        ds_place=int32(base_place + DS_AT // CHUNK),
        zeros=int32(base_place + ZEROS // CHUNK),
        own_at=int32(number * (CONSUMER_KEYS * ROW)),
        own_ninth_at=int32(NINTH + number * (CONSUMER_KEYS * CHUNK)),
        side=int32(number * (COLUMNS // 16)),
        ds_at=int32(
            DS_AT
            + (number * CONSUMER_KEYS + (thread >> 5) * 16 + (lane >> 2)) * DS_ROW
            + (lane >> 2) * CHUNK
            + (lane & 3) * 4
        ),
        # as `four_neighbours` leaves them
        query=int32((thread >> 5) * 16 + (lane >> 2) + (lane & 1) * 8),
    )
