"""D of each query for flash attention's backward, D = Σ dy · y, and L: by two warps, concurrently
with the products.

dy is in shared memory for the products already, and y is loaded for this alone. So each element of
both is read from memory once, and no separate kernel and no array for D are needed (../reference.py
derives D). L is the logsumexp in units of ln 2, as `probability` wants it. HS // 16 · 2 lanes share
a row, eight numbers each at a time; their sums meet by shuffles.

SOURCE
    ../reference.py; Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 2, which makes D
    first; PTX ISA, section 9.7.9, shfl.sync.
READ NEXT
    kernel.py
"""

from ....device import cuda, device_inline, float32, int32, opaque
from ....device.limits import FULL_MASK, WARP
from ....device.mbarrier import mbarrier_arrive
from ....device.pipeline import advance, barrier_at, consumer_release, consumer_start, consumer_wait
from ....device.specialise import Constant
from ....device.tensor_core import load_words4, store_word, unpack_half2, word_of
from ..fragments import CHUNK
from ..heads import LOG2_E
from ..hopper_tiles import place_in_tile
from .layout import HS, KEYS, Q_TILE, QUERIES, STAGE, STAGES_AT, STATISTICS, Y_AT, work_tile

LANES = Constant(lambda HS: HS // 16 * 2)  # that share a row of dy and y for its sum
PASS = Constant(lambda LANES: WARP // LANES)  # rows of a warp at a time


@device_inline
def product_of_eight(a, b):
    """The sum of the products of eight numbers each, as words."""
    a0, a1 = unpack_half2(a[0])
    b0, b1 = unpack_half2(b[0])
    total = a0 * b0 + a1 * b1
    for k in range(1, 4):
        a0, a1 = unpack_half2(a[k])
        b0, b1 = unpack_half2(b[k])
        total += a0 * b0 + a1 * b1
    return total


@device_inline
def write_row_sum(HS, shared, dy_at, y_at, row, lane, to):
    """D of a row of the tiles of dy and y, HS // 16 · 2 lanes a row; `to`: where the tile's D go, 4
    bytes each."""
    LANES = HS // 16 * 2
    chunk = int32(lane & (LANES - 1))
    place = place_in_tile(HS, 0, row, chunk)
    total = product_of_eight(load_words4(shared, dy_at + place), load_words4(shared, y_at + place))
    if HS == 72 and chunk == 0:
        place = int32(QUERIES * 128 + row * CHUNK)
        total += product_of_eight(
            load_words4(shared, dy_at + place), load_words4(shared, y_at + place)
        )
    if LANES == 8:
        total += cuda.shfl_xor_sync(FULL_MASK, total, 4)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 2)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 1)
    if chunk == 0:
        store_word(shared, int32(to + row * 4), word_of(total))


@device_inline
def make_statistics(shared, logsumexp, rings, p):
    """Two warps, each for half of a tile's queries: L, in units of ln 2, and D = Σ dy · y, next to
    q and dy.

    They wait for dy and y, release y, and arrive at the stage's barrier `statistics`, for which
    consumers wait.
    """
    t = int32(cuda.threadIdx.x)
    lane, rows = int32(t & 31), int32((t >> 5) * WARP - WARP)
    row = int32(rows + lane // LANES)
    stage, parity = consumer_start()
    y_stage, y_parity = consumer_start()
    unit = int32(cuda.blockIdx.x)
    while unit < p.units:
        image, head, first_key, end, _ = work_tile(unit, p)
        statistics_at = (image * p.heads + head) * p.T
        while first_key < end:
            first = int32(0)
            while first < p.T:
                at = int32(STAGES_AT + stage * STAGE)
                L = float32(0)
                query = int32(first + rows + lane)
                if query < p.T:
                    L = LOG2_E * logsumexp[statistics_at + query]
                consumer_wait(rings.queries, stage, parity)
                consumer_wait(rings.y, y_stage, y_parity)
                store_word(shared, int32(at + STATISTICS + (rows + lane) * 4), word_of(L))
                i = opaque(row)
                while i < int32(rows + WARP):  # two at a time, in turn: there are few registers
                    to = int32(at + (STATISTICS + 4 * QUERIES))
                    write_row_sum(HS, shared, int32(at + Q_TILE), int32(Y_AT), i, lane, to)
                    write_row_sum(
                        HS, shared, int32(at + Q_TILE), int32(Y_AT), int32(i + PASS), lane, to
                    )
                    i = int32(i + 2 * PASS)
                consumer_release(rings.y, y_stage)
                mbarrier_arrive(barrier_at(rings.statistics, stage))
                y_stage, y_parity = advance(rings.y, y_stage, y_parity)
                stage, parity = advance(rings.queries, stage, parity)
                first = int32(first + QUERIES)
            first_key = int32(first_key + KEYS)
        unit = int32(unit + cuda.gridDim.x)
