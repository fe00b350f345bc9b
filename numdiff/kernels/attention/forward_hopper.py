"""Flash attention forward, rung 5: Hopper's wgmma, fed by TMA (sm_90a).

WHAT IS NEW, AND WHY IT PAYS
    wgmma multiplies 64 queries by 128 keys straight from shared memory, where rung 3 issues 64
    times as many mma.sync and loads fragments for them. Its accumulators are laid out in the
    registers as those of mma.sync are, so that probabilities, packed, are again the left side of
    the next product (fragments.py).
    One thread, of a warpgroup that otherwise does nothing, loads q, k and v by TMA
    (hopper_tiles.py): for the next tiles, and for the next head, while this one is computed. With
    256 tokens, as image models have them, this kernel is limited by memory, which therefore must
    never be idle.
    Each of two consumers has 64 queries. While one computes a softmax, the other multiplies. Within
    a consumer, too, the two overlap: the scores of the next keys and the outputs of those before
    are issued together, and the next softmax begins while the outputs are still being computed.
A UNIT is 128 queries of a head, which see k and v in tiles of 128 tokens. A block takes every
gridDim-th unit.
LAUNCH
    grid min(units, multiprocessors), 384 threads; dynamic shared memory, KiB: four stages of k and
    v, two of q; for HS
    32, 64, 72: 80, 160, 182. Compiled for 168 registers a thread, of which the producer keeps 40
    and the consumers get 232.
NEEDS
    sm_90a; qkv and y at multiples of 16 bytes.
ACCURACY
    q, k, v and P are float16, S, m, l and o float32.
DETERMINISM
    one warpgroup sums a query's outputs in the order of the keys.
SOURCE
    reference.py; Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608, sections 3.1 and 3.2; PTX
    ISA, section 9.7.15.
READ NEXT
    backward_hopper/
"""

import math
from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, launch, uint32
from ...device.approximate import power_of_two
from ...device.common import divide
from ...device.half import in_bfloat16
from ...device.mbarrier import bar_sync, fence_barrier_init, smem_u32
from ...device.pipeline import (
    advance,
    barrier_at,
    consumer_release,
    consumer_start,
    consumer_wait,
    init_ring,
    make_ring,
    producer_acquire,
    producer_start,
    stage_at,
)
from ...device.requires import requires
from ...device.specialise import Constant, Variants, specialise
from ...device.tensor_core import store_word
from ...device.tma import (
    fence_proxy_async,
    tma_prefetch,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
)
from ...device.wgmma import (
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_a_registers,
    make_wgmma_wait,
    wgmma_commit,
    wgmma_fence,
)
from .forward_half import exponentials, hide_keys, largest_of_row, sum_of_row
from .fragments import clear, pack
from .heads import LN_2, LOG2_E, LOWEST
from .hopper_tiles import (
    CHUNK,
    fetch_tile,
    maps_of,
    matrix_at,
    ninth_across,
    ninth_along,
    row_bytes,
    stash,
    tile_bytes,
    u64,
    write_tile,
)

THREADS = 384  # a producer and two consumer warpgroups
ROWS = 64  # queries of a consumer
QUERIES = 2 * ROWS
KEYS = 128  # of a tile
N = KEYS // 8  # groups of eight scores side by side
SCORES, WORDS = KEYS // 2, KEYS // 4  # of a thread
STAGES, BUFFERS = 4, 2  # of k and v, of q
BARRIERS = 2 * (STAGES + BUFFERS)

wgmma_scores = make_wgmma(KEYS)
wgmma_values_8, wgmma_values_32, wgmma_values_64 = (
    make_wgmma_a_registers(n, transpose_b=True) for n in (8, 32, 64)
)
wait_scores, wait_scores_1 = (
    make_wgmma_wait(KEYS, pin=False),
    make_wgmma_wait(KEYS, pending=1, pin=False),
)
wait_8, wait_32, wait_64 = (make_wgmma_wait(n, pin=False) for n in (8, 32, 64))
producer_registers, consumer_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


# Products -----------------------------------------------------------------------------------------


@device_inline
def multiply_rows(HS, s, q, q_ninth, k, k_ninth, zeros):
    """s = q · kᵀ for 64 queries and 128 keys; shared addresses of the first and the ninth parts."""
    a, b = matrix_at(HS, q), matrix_at(HS, k)
    wgmma_scores(s, a, b, int32(0))
    wgmma_scores(s, a + u64(2), b + u64(2), int32(1))
    if HS > 32:
        wgmma_scores(s, a + u64(4), b + u64(4), int32(1))
        wgmma_scores(s, a + u64(6), b + u64(6), int32(1))
    if HS == 72:
        wgmma_scores(s, ninth_along(q_ninth, zeros), ninth_along(k_ninth, zeros), int32(1))


@device_inline
def add_values(HS, o, o_ninth, words, v, v_ninth):
    """o += P · v for 128 keys; words: P, as the left side of a product."""
    b = matrix_at(HS, v)
    for i in range(KEYS // 16):
        p = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
        if HS == 32:
            wgmma_values_32(o, p, b + u64(64 * i), int32(1))
        else:
            wgmma_values_64(o, p, b + u64(128 * i), int32(1))
    if HS == 72:
        b = ninth_across(v_ninth)
        for i in range(KEYS // 16):
            p = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
            wgmma_values_8(o_ninth, p, b + u64(16 * i), int32(1))


@device_inline
def wait_for_outputs(HS, o, o_ninth):
    if HS == 32:
        wait_32(o)
    else:
        wait_64(o)
    if HS == 72:
        wait_8(o_ninth)


# Softmax ------------------------------------------------------------------------------------------


@device_inline
def probabilities(s, largest, l, c):
    """A thread's scores of two queries become 2^(c·(s − m)); returns what rescales the outputs so
    far, of each."""
    new_0, new_1 = largest_of_row(s, N, 0, largest[0]), largest_of_row(s, N, 2, largest[1])
    rescale_0, rescale_1 = (
        power_of_two(c * largest[0] - c * new_0),
        power_of_two(c * largest[1] - c * new_1),
    )
    l[0] = l[0] * rescale_0 + exponentials(s, N, 0, c, c * new_0)
    l[1] = l[1] * rescale_1 + exponentials(s, N, 2, c, c * new_1)
    largest[0], largest[1] = new_0, new_1
    return rescale_0, rescale_1


@device_inline
def pack_all(words, s):
    for i in range(KEYS // 16):
        pack(words, i, s, 8 * i)


@device_inline
def scale_rows(o, columns, f_0, f_1):
    for j in range(columns // 8):
        o[4 * j], o[4 * j + 1] = o[4 * j] * f_0, o[4 * j + 1] * f_0
        o[4 * j + 2], o[4 * j + 3] = o[4 * j + 2] * f_1, o[4 * j + 3] * f_1


# The kernel ---------------------------------------------------------------------------------------


@device_inline
def place_of(unit, tiles, heads):
    """(image, head, tile of queries) of a unit: neighbours share their keys."""
    rest, tile = divide(unit, tiles)
    image, head = divide(rest, heads)
    return image, head, tile


def shared_bytes(HS):
    """Stages of k and v, two buffers of q, and the zeros behind a ninth part."""
    return (
        STAGES * 2 * tile_bytes(HS, KEYS)
        + BUFFERS * tile_bytes(HS, QUERIES)
        + (CHUNK * KEYS if HS == 72 else 0)
    )


class AttentionForwardProblem(NamedTuple):
    """T: tokens; head_step: columns from a head to the next; part: from q's to k's, and on to v's;
    tiles: of queries; units: of all heads and images."""

    T: int
    heads: int
    head_step: int
    part: int
    tiles: int
    units: int
    scale: float


class AttentionForwardRegisters(NamedTuple):
    """A consumer thread's registers: scores, outputs, those of a ninth part, P packed; of two
    queries the largest score, l."""

    s: object
    o: object
    o_ninth: object
    words: object
    largest: object
    l: object


HS = Constant()  # the head size
ROW, COLUMNS, OUTPUTS = (
    Constant(row_bytes),
    Constant(lambda HS: min(HS, 64)),
    Constant(lambda HS: min(HS, 64) // 2),
)
TILE, Q_TILE = (
    Constant(lambda HS: tile_bytes(HS, KEYS)),
    Constant(lambda HS: tile_bytes(HS, QUERIES)),
)
STAGE = Constant(lambda TILE: 2 * TILE)  # k, then v
Q_FIRST = Constant(lambda STAGE: STAGES * STAGE)  # bytes from the start of shared memory
ZEROS = Constant(lambda Q_FIRST, Q_TILE: Q_FIRST + BUFFERS * Q_TILE)
# within a tile
NINTH, Q_NINTH = Constant(lambda ROW: KEYS * ROW), Constant(lambda ROW: QUERIES * ROW)
ZERO_WORDS = CHUNK * KEYS // 4


@device_inline
def set_up(shared, keys, queries, map_q, map_y):
    """All threads: barriers, and the zeros behind ninth parts. A stage is filled by one, and read
    by two consumers."""
    t = int32(cuda.threadIdx.x)
    if t == 0:
        init_ring(keys, 1, 2)
        init_ring(queries, 1, 2)
        fence_barrier_init()
        tma_prefetch(map_q)
        tma_prefetch(map_y)
    if HS == 72:
        for i in range((ZERO_WORDS + THREADS - 1) // THREADS):
            if t + i * THREADS < ZERO_WORDS:
                store_word(shared, int32(ZEROS + (t + i * THREADS) * 4), uint32(0))
        fence_proxy_async()
    cuda.syncthreads()


@device_inline
def produce(map_q, map_q_ninth, keys, queries, p):
    """The producer, one thread: loads the queries of each unit and all tiles of keys and values by
    TMA.

    It waits for a stage until both consumers have released it: so it is up to four tiles, and one
    unit, ahead.
    """
    stage, parity = producer_start()
    buffer, q_parity = producer_start()
    unit = int32(cuda.blockIdx.x)
    while unit < p.units:
        image, head, tile = place_of(unit, p.tiles, p.heads)
        column = int32(head * p.head_step)
        full = producer_acquire(queries, buffer, q_parity, Q_TILE)
        fetch_tile(
            HS,
            QUERIES,
            stage_at(queries, buffer),
            map_q,
            map_q_ninth,
            full,
            column,
            int32(tile * QUERIES),
            image,
        )
        buffer, q_parity = advance(queries, buffer, q_parity)
        first = int32(0)
        while first < p.T:
            full, k = producer_acquire(keys, stage, parity, STAGE), stage_at(keys, stage)
            fetch_tile(HS, KEYS, k, map_q, map_q_ninth, full, int32(column + p.part), first, image)
            fetch_tile(
                HS,
                KEYS,
                k + uint32(TILE),
                map_q,
                map_q_ninth,
                full,
                int32(column + 2 * p.part),
                first,
                image,
            )
            stage, parity = advance(keys, stage, parity)
            first = int32(first + KEYS)
        unit = int32(unit + cuda.gridDim.x)


@device_inline
def first_scores(r, q, q_ninth, k, zeros, T, c):
    """P of the unit's first tile of keys, packed; the maxima and l of the thread's two queries."""
    wgmma_fence()
    multiply_rows(HS, r.s, q, q_ninth, k, k + uint32(NINTH), zeros)
    wgmma_commit()
    wait_scores(r.s)
    if T < KEYS:
        hide_keys(r.s, 1, N, T, int32(cuda.threadIdx.x & 31))
    probabilities(r.s, r.largest, r.l, c)
    pack_all(r.words, r.s)


@device_inline
def add_tile(r, q, q_ninth, k, v, zeros, left, c, keys, ahead, ahead_parity):
    """One round of the main loop. It computes the scores of a tile at k, of whose keys `left`
    exist, and meanwhile the outputs of the tile before, whose P is packed and whose values are at
    v. Returns what rescales the outputs.

    ahead, ahead_parity: the stage after this one, which is waited for here if it has keys
    """
    wgmma_fence()
    multiply_rows(HS, r.s, q, q_ninth, k, k + uint32(NINTH), zeros)
    wgmma_commit()
    add_values(HS, r.o, r.o_ninth, r.words, v, v + uint32(NINTH))
    wgmma_commit()
    wait_scores_1(r.s)
    if left < KEYS:
        hide_keys(r.s, 1, N, left, int32(cuda.threadIdx.x & 31))
    rescale_0, rescale_1 = probabilities(r.s, r.largest, r.l, c)
    if left > KEYS:  # here, so that ptxas cannot put the wait for the outputs before the softmax
        consumer_wait(keys, ahead, ahead_parity)
    wait_for_outputs(HS, r.o, r.o_ninth)
    return rescale_0, rescale_1


@device_inline
def last_outputs(r, k, logsumexp, query, rows_at, p):
    """The outputs of the unit's last tile, at k, and log l of the thread's queries; returns the
    sums of their rows."""
    lane = int32(cuda.threadIdx.x & 31)
    wgmma_fence()
    add_values(HS, r.o, r.o_ninth, r.words, k + uint32(TILE), k + uint32(TILE + NINTH))
    wgmma_commit()
    above, below = sum_of_row(r.l[0]), sum_of_row(r.l[1])
    if lane & 3 == 0 and query < p.T:
        logsumexp[rows_at + query] = p.scale * r.largest[0] + LN_2 * math.log2(above)
    if lane & 3 == 0 and query + 8 < p.T:
        logsumexp[rows_at + query + 8] = p.scale * r.largest[1] + LN_2 * math.log2(below)
    wait_for_outputs(HS, r.o, r.o_ninth)
    return above, below


@device_inline
def write_outputs(shared, base, r, maps, q_at, q_ninth_at, above, below, column, row, image, T):
    """The epilogue: y of a consumer's 64 queries, by way of their rows of q, which are free by now.

    All threads of the consumer call it; its first starts the store by TMA, and waits until q has
    been read.
    """
    stash(HS, shared, q_at, q_ninth_at, r.o, r.o_ninth, float32(1) / above, float32(1) / below)
    fence_proxy_async()
    bar_sync(uint32(int32(cuda.threadIdx.x) >> 7), uint32(128))
    if int32(cuda.threadIdx.x) & 127 == 0 and row < T:
        write_tile(
            HS, base + uint32(q_at), base + uint32(q_ninth_at), maps[0], maps[1], column, row, image
        )
        tma_store_commit()
        tma_store_wait_read_0()


@device_inline
def consume(shared, base, r, maps, logsumexp, keys, queries, p):
    """A consumer, 128 threads: 64 queries of each unit. It waits for q and for tiles, and releases
    them when read."""
    t = int32(cuda.threadIdx.x)
    consumer, thread, lane = int32((t >> 7) - 1), int32(t & 127), int32(t & 31)
    elected, zeros, c = thread == 0, base + uint32(ZEROS), float32(p.scale * LOG2_E)
    stage, parity = consumer_start()
    buffer, q_parity = consumer_start()
    unit = int32(cuda.blockIdx.x)
    while unit < p.units:
        image, head, tile = place_of(unit, p.tiles, p.heads)
        q_at = int32(Q_FIRST + buffer * Q_TILE + consumer * (ROWS * ROW))  # bytes from the start
        q_ninth_at = int32(Q_FIRST + buffer * Q_TILE + (Q_NINTH + consumer * (ROWS * CHUNK)))
        q, q_ninth = base + uint32(q_at), base + uint32(q_ninth_at)
        clear(r.o, OUTPUTS)
        clear(r.o_ninth, 4)
        r.largest[0], r.largest[1], r.l[0], r.l[1] = LOWEST, LOWEST, float32(0), float32(0)

        consumer_wait(queries, buffer, q_parity)
        consumer_wait(keys, stage, parity)
        k = stage_at(keys, stage)
        first_scores(r, q, q_ninth, k, zeros, p.T, c)
        first = int32(KEYS)
        while first < p.T:
            v, v_stage = k + uint32(TILE), stage
            stage, parity = advance(keys, stage, parity)
            if first == KEYS:  # later ones have been waited for in the round before
                consumer_wait(keys, stage, parity)
            k = stage_at(keys, stage)
            ahead, ahead_parity = advance(keys, stage, parity)
            rescale_0, rescale_1 = add_tile(
                r, q, q_ninth, k, v, zeros, int32(p.T - first), c, keys, ahead, ahead_parity
            )
            first = int32(first + KEYS)
            if elected:
                consumer_release(keys, v_stage)
            scale_rows(r.o, COLUMNS, rescale_0, rescale_1)
            scale_rows(r.o_ninth, HS - COLUMNS, rescale_0, rescale_1)
            pack_all(r.words, r.s)

        row = int32(tile * QUERIES + consumer * ROWS)
        query = int32(row + (thread >> 5) * 16 + (lane >> 2))
        above, below = last_outputs(r, k, logsumexp, query, (image * p.heads + head) * p.T, p)
        if elected:
            consumer_release(keys, stage)
        stage, parity = advance(keys, stage, parity)
        write_outputs(
            shared, base, r, maps, q_at, q_ninth_at, above, below, int32(head * HS), row, image, p.T
        )
        if elected:
            consumer_release(queries, buffer)
        buffer, q_parity = advance(queries, buffer, q_parity)
        unit = int32(unit + cuda.gridDim.x)
    if elected:
        tma_store_wait_0()


@requires("9.0a")
def forward(map_q, map_q_ninth, map_y, map_y_ninth, logsumexp, p):
    """y, and logsumexp (B, heads, T), of qkv; map_q: of qkv, map_y: of y, as `maps_of` makes them;
    p: a `AttentionForwardProblem`."""
    shared = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    base, first_barrier = smem_u32(shared), smem_u32(barriers)
    keys = make_ring(base, STAGE, STAGES, first_barrier)
    queries = make_ring(
        base + uint32(Q_FIRST), Q_TILE, BUFFERS, barrier_at(first_barrier, 2 * STAGES)
    )
    set_up(shared, keys, queries, map_q, map_y)
    if int32(cuda.threadIdx.x) >> 7 == 0:
        producer_registers()
        if int32(cuda.threadIdx.x) == 0:
            produce(map_q, map_q_ninth, keys, queries, p)
    else:
        consumer_registers()
        r = AttentionForwardRegisters(
            cuda.local.array(SCORES, "float32"),
            cuda.local.array(OUTPUTS, "float32"),
            cuda.local.array(4, "float32"),
            cuda.local.array(WORDS, "uint32"),
            cuda.local.array(2, "float32"),
            cuda.local.array(2, "float32"),
        )
        consume(shared, base, r, (map_y, map_y_ninth), logsumexp, keys, queries, p)


forward_kernels_v5 = Variants(
    (32, 64, 72),
    lambda size: specialise(
        forward,
        name=f"flash_attention_forward_kernel_v5_{size}",
        launch_bounds=(THREADS, 1),
        HS=size,
    ),
)


def launch_forward(qkv, y, logsumexp, heads, HS, head_step, part, multiprocessors):
    """y (B, T, C) and logsumexp (B, heads, T) of qkv (B, T, 3C)."""
    B, T, _ = qkv.shape
    tiles = -(-T // QUERIES)
    units = B * heads * tiles
    kernel = in_bfloat16(forward_kernels_v5[HS], qkv.dtype)
    launch(
        kernel,
        min(units, multiprocessors),
        THREADS,
        *maps_of(qkv, HS, QUERIES),
        *maps_of(y, HS, ROWS),
        logsumexp.reshape(-1),
        AttentionForwardProblem(T, heads, head_step, part, tiles, units, 1 / math.sqrt(HS)),
        shared=shared_bytes(HS),
    )
