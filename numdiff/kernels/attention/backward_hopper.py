"""Flash attention backward, rung 5: all five products with Hopper's wgmma, fed by TMA (sm_90a).

WHAT IS NEW, AND WHY IT PAYS
    Rung 3 issues an mma.sync for every 16 × 8 × 16 and loads fragments for it. Here one instruction multiplies 64 keys
    by 64 queries for each 16 columns, straight from shared memory, and one thread, of a warpgroup that does little
    else, asks TMA for all tiles (hopper_tiles.py): for the next queries, and for the keys of the next head while this
    one is computed. So memory, which limits this pass at 256 tokens, is never idle.
    Two warps of that warpgroup make the sums D of dy · y, from tiles in shared memory: each number of dy and y is read
    from memory once, and neither a separate kernel nor an array for D is needed.
A UNIT is a head's keys, or a chunk of them, in tiles of 256: 128 for each of two consumers, which keep their dk and dv
    in registers while the queries pass by, 64 at a time. A block takes every gridDim-th unit.
A ROUND, for 64 queries and twice 64 keys of a consumer:
    Sᵀ = k·qᵀ, dPᵀ = v·dyᵀ   both sides from shared memory
    Pᵀ, dSᵀ                  in registers, packed: they are the left sides of dv += Pᵀ·dy and dk += dSᵀ·q as they lie
    dSᵀ                      to shared memory, too. When both consumers' are there each makes half of the columns of
                             dq = dS·k, summed over all 256 keys; dSᵀ and k are read across, as they are
    While one consumer computes P and dS, the other multiplies.
REGISTERS decide the rest. dk and dv of 128 keys are 128 of a thread's (HS 64), S, dP and what is packed up to 96: just
    enough if the products of one half of the keys are awaited before those of the next begin. With HS 72 it takes
    products of 32 queries, in a loop: ptxas keeps everything that two straight pieces of code share. Places in shared
    memory are counted in 16 bytes, so that half of a descriptor is a constant.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    flash_attention_backward, 64×256×768, 64×256×2304, heads 12, float16
        v5*      100 µs    2,012 GB/s   49 % of memory   1.85 × v3   181 % of PyTorch
LAUNCH
    grid min(units, multiprocessors), 384 threads; dynamic shared memory, KiB: two buffers of k and v, dSᵀ, three stages
    of q and dy (two for HS 72), y: for HS 32, 64, 72: 127, 219, 224. Compiled for 168 registers a thread, of which the
    producer keeps 40 and the consumers get 232.
NEEDS
    sm_90a; qkv, dy, y and dqkv at multiples of 16 bytes. Keys beyond T are computed as if they were there, and not
    written: it is at its best where T is a multiple of 256, or large.
ACCURACY
    operands, P and dS are float16, all sums float32; dq of several tiles of keys is added in float32.
DETERMINISM
    each number is summed by one warpgroup in the order of the loops, and chunks are added in order.
SOURCE
    reference.py; Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 2; Shah et al. 2024, "FlashAttention-3",
    arXiv:2407.08608, section 3; PTX ISA, section 9.7.15.
READ NEXT
    ../../nn/dit.py, whose blocks call all this.
"""
import math
from typing import NamedTuple

from ...device import cuda, float32, int32, launch, opaque, uint32
from ...device.half import in_bfloat16
from ...device.limits import FULL_MASK, WARP
from ...device.mbarrier import bar_sync, fence_barrier_init, mbarrier_arrive, mbarrier_wait, smem_u32
from ...device.pipeline import (
    advance,
    barrier_at,
    consumer_release,
    consumer_start,
    consumer_wait,
    init_barriers,
    init_ring,
    make_ring,
    producer_acquire,
    producer_start,
    stage_at,
)
from ...device.requires import requires
from ...device.specialise import Constant, specialise
from ...device.tensor_core import float_of, load_words2, load_words4, store_word, unpack_half2, word_of
from ...device.tma import fence_proxy_async, tma_prefetch, tma_store_commit, tma_store_wait_0, tma_store_wait_read_0
from ...device.wgmma import (
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_a_registers,
    make_wgmma_wait,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait_0,
)
from ..common import divide
from .backward_half import probability, write_dq
from .forward import LOG2_E
from .fragments import CHUNK, clear, pack
from .hopper_tiles import (
    ADDRESS,
    GROUP,
    NARROW,
    UNIT,
    WIDE,
    fetch_tile,
    maps_of,
    place_in_tile,
    row_bytes,
    stash,
    tile_bytes,
    u64,
    write_tile,
)

THREADS = 384  # a producer and two consumer warpgroups
CONSUMERS = 256  # threads
QUERIES = 64  # of a tile
ROWS = 64  # keys of a product
CONSUMER_KEYS = 2 * ROWS
KEYS = 2 * CONSUMER_KEYS  # of a tile
DS_ROW = 2 * QUERIES  # bytes: a key's dS
BUFFERS = 2  # of k and v
MAX_STAGES = 3
BARRIERS = 2 * BUFFERS + 3 * MAX_STAGES + 2
DS_COMPLETE, DS_FREE, OWN = 1, 2, 2  # named barriers: of both consumers; each one's own is OWN + its warpgroup

product_32, product_64 = make_wgmma(32), make_wgmma(64)
rows_8, rows_32, rows_64 = (make_wgmma_a_registers(n, transpose_b=True) for n in (8, 32, 64))
keys_8, keys_16, keys_32 = (make_wgmma(n, True, True) for n in (8, 16, 32))
wait_8, wait_16, wait_32, wait_64 = (make_wgmma_wait(n, pin=False) for n in (8, 16, 32, 64))
wait_32_1, wait_64_1 = (make_wgmma_wait(n, pending=1, pin=False) for n in (32, 64))
producer_registers, consumer_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


def stages_of(HS):
    return 2 if HS == 72 else 3


def stage_bytes(HS):
    """Of q and dy, then L and D: a multiple of 1024."""
    return 2 * tile_bytes(HS, QUERIES) + 1024


HS = Constant()  # the head size
ROW, COLUMNS = Constant(row_bytes), Constant(lambda HS: min(HS, 64))
N = Constant(lambda HS: 32 if HS == 72 else 64)  # queries of a product
TILE, Q_TILE = Constant(lambda HS: tile_bytes(HS, KEYS)), Constant(lambda HS: tile_bytes(HS, QUERIES))
V, DY = Constant(lambda TILE: TILE // CHUNK), Constant(lambda Q_TILE: Q_TILE // CHUNK)  # from k's place, from q's
BUFFER, STAGE, STAGES = Constant(lambda TILE: 2 * TILE), Constant(stage_bytes), Constant(stages_of)  # k, v; q, dy
NUMBERS = Constant(lambda Q_TILE: 2 * Q_TILE)  # within a stage: L, then D
NINTH = Constant(lambda ROW: KEYS * ROW)  # within a tile
DS_AT = Constant(lambda BUFFER: BUFFERS * BUFFER)  # bytes from the start of shared memory
STAGES_AT = Constant(lambda DS_AT: DS_AT + KEYS * DS_ROW)
Y_AT = Constant(lambda STAGES_AT, STAGES, STAGE: STAGES_AT + STAGES * STAGE)
ZEROS = Constant(lambda Y_AT, Q_TILE: Y_AT + Q_TILE)  # behind all ninth parts
ZERO_WORDS = CHUNK * ROWS // 4
LANES = Constant(lambda HS: HS // 16 * 2)  # that share a row of dy and y for its sum
PASS = Constant(lambda LANES: WARP // LANES)  # rows of a warp at a time
ACCUMULATORS = Constant(lambda COLUMNS: COLUMNS // 2)  # of dk, or dv, of 64 keys, in a thread
SCORES, WORDS, DQ = Constant(lambda N: N // 2), Constant(lambda N: N // 4), Constant(lambda COLUMNS: COLUMNS // 4)


# Products -------------------------------------------------------------------------------------------------------------
# A place is an address in shared memory in units of 16 bytes, as descriptors count.

@cuda.jit(device=True, forceinline=True)
def multiply(N, s, a, b, more):
    """s = a · b for 16 of k, or s += a · b with `more`."""
    if N == 32:
        product_32(s, a, b, int32(more))
    else:
        product_64(s, a, b, int32(more))


@cuda.jit(device=True, forceinline=True)
def named(HS, place):
    """The descriptor of the first part of a tile at a place; its upper half is a constant."""
    return (NARROW if HS == 32 else WIDE) | u64(uint32(place))


@cuda.jit(device=True, forceinline=True)
def named_along(place, zeros):
    """Of a ninth part and the zeros behind it, as `ninth_along`."""
    return GROUP << u64(32) | u64(uint32(place | uint32(zeros - place) << uint32(16)))


@cuda.jit(device=True, forceinline=True)
def named_across(place):
    """Of a ninth part, as `ninth_across`."""
    return GROUP << u64(16) | u64(uint32(place))


@cuda.jit(device=True, forceinline=True)
def multiply_along(HS, N, s, k, k_ninth, q, q_ninth, zeros):
    """s = k · qᵀ for 64 keys and N queries; places of the first and the ninth parts."""
    multiply(N, s, named(HS, k), named(HS, q), 0)
    multiply(N, s, named(HS, k + uint32(2)), named(HS, q + uint32(2)), 1)
    if HS > 32:
        multiply(N, s, named(HS, k + uint32(4)), named(HS, q + uint32(4)), 1)
        multiply(N, s, named(HS, k + uint32(6)), named(HS, q + uint32(6)), 1)
    if HS == 72:
        multiply(N, s, named_along(k_ninth, zeros), named_along(q_ninth, zeros), 1)


@cuda.jit(device=True, forceinline=True)
def add_queries(HS, N, accumulators, accumulators_ninth, words, q, q_ninth):
    """accumulators += left · q for 64 keys, over N queries; words: the left side, of a key and its queries."""
    for i in range(N // 16):
        left = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
        if HS == 32:
            rows_32(accumulators, left, named(HS, q + uint32(64 * i)), int32(1))
        else:
            rows_64(accumulators, left, named(HS, q + uint32(128 * i)), int32(1))
    if HS == 72:
        for i in range(N // 16):
            left = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
            rows_8(accumulators_ninth, left, named_across(q_ninth + uint32(16 * i)), int32(1))


@cuda.jit(device=True, forceinline=True)
def multiply_keys(HS, dq, ds, k):
    """dq = dS · k over all keys of the tile, for half of the columns of the first part, from the place k on."""
    if HS == 32:
        keys_16(dq, named(64, ds), named(HS, k), int32(0))
        for i in range(1, KEYS // 16):
            keys_16(dq, named(64, ds + uint32(128 * i)), named(HS, k + uint32(64 * i)), int32(1))
    else:
        keys_32(dq, named(64, ds), named(HS, k), int32(0))
        for i in range(1, KEYS // 16):
            keys_32(dq, named(64, ds + uint32(128 * i)), named(HS, k + uint32(128 * i)), int32(1))


@cuda.jit(device=True, forceinline=True)
def multiply_ninth(dq_ninth, ds, k_ninth):
    """The last eight of 72 columns of dq, likewise."""
    keys_8(dq_ninth, named(64, ds), named_across(k_ninth), int32(0))
    for i in range(1, KEYS // 16):
        keys_8(dq_ninth, named(64, ds + uint32(128 * i)), named_across(k_ninth + uint32(16 * i)), int32(1))


@cuda.jit(device=True, forceinline=True)
def wait_for_scores(N, s):
    """Of the groups under way all but the last are over: s may be read."""
    if N == 32:
        wait_32_1(s)
    else:
        wait_64_1(s)


@cuda.jit(device=True, forceinline=True)
def wait_for_dq(HS, dq):
    if HS == 32:
        wait_16(dq)
    else:
        wait_32(dq)


@cuda.jit(device=True, forceinline=True)
def wait_for_accumulators(HS, accumulators, accumulators_ninth):
    if HS == 32:
        wait_32(accumulators)
    else:
        wait_64(accumulators)
    if HS == 72:
        wait_8(accumulators_ninth)


# Numbers --------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
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


@cuda.jit(device=True, forceinline=True)
def write_row_sum(HS, shared, dy_at, y_at, row, lane, to):
    """D of a row of the tiles of dy and y, HS // 16 · 2 lanes a row; `to`: where the tile's D go, 4 bytes each."""
    LANES = HS // 16 * 2
    chunk = int32(lane & (LANES - 1))
    place = place_in_tile(HS, 0, row, chunk)
    total = product_of_eight(load_words4(shared, dy_at + place), load_words4(shared, y_at + place))
    if HS == 72 and chunk == 0:
        place = int32(QUERIES * 128 + row * CHUNK)
        total += product_of_eight(load_words4(shared, dy_at + place), load_words4(shared, y_at + place))
    if LANES == 8:
        total += cuda.shfl_xor_sync(FULL_MASK, total, 4)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 2)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 1)
    if chunk == 0:
        store_word(shared, int32(to + row * 4), word_of(total))


@cuda.jit(device=True, forceinline=True)
def probabilities(N, s, shared, at, c):
    """A thread's scores become probabilities; at: of L of its first query, in shared memory."""
    for j in range(N // 8):
        w = load_words2(shared, int32(at + 32 * j))
        L0, L1 = float_of(w[0]), float_of(w[1])
        s[4 * j], s[4 * j + 1] = probability(s[4 * j], c, L0), probability(s[4 * j + 1], c, L1)
        s[4 * j + 2], s[4 * j + 3] = probability(s[4 * j + 2], c, L0), probability(s[4 * j + 3], c, L1)


@cuda.jit(device=True, forceinline=True)
def score_gradients(N, s, p, shared, at):
    """dP becomes dS = P (dP − D); at: of D of the thread's first query."""
    for j in range(N // 8):
        w = load_words2(shared, int32(at + 32 * j))
        D0, D1 = float_of(w[0]), float_of(w[1])
        s[4 * j], s[4 * j + 1] = p[4 * j] * (s[4 * j] - D0), p[4 * j + 1] * (s[4 * j + 1] - D1)
        s[4 * j + 2], s[4 * j + 3] = p[4 * j + 2] * (s[4 * j + 2] - D0), p[4 * j + 3] * (s[4 * j + 3] - D1)


@cuda.jit(device=True, forceinline=True)
def pack_all(N, words, s):
    for i in range(N // 16):
        pack(words, i, s, 8 * i)


@cuda.jit(device=True, forceinline=True)
def store_ds(N, shared, at, words, chunk):
    """A thread's dS of N queries into shared memory, from a chunk of its key's row on; at: its word in the row's first.

    The rows, 128 bytes, are swizzled as TMA does it.
    """
    at = opaque(at)
    for i in range(N // 16):
        place, next_place = int32(at ^ ((chunk + 2 * i) * CHUNK)), int32(at ^ ((chunk + 2 * i + 1) * CHUNK))
        store_word(shared, place, words[4 * i])
        store_word(shared, int32(place + 8 * DS_ROW), words[4 * i + 1])
        store_word(shared, next_place, words[4 * i + 2])
        store_word(shared, int32(next_place + 8 * DS_ROW), words[4 * i + 3])


class Registers(NamedTuple):
    """Of a consumer's thread: S, then P, and dP, then dS, of 64 keys; P and dS packed; its columns of dq."""

    s: object
    ds: object
    words: object
    ds_words: object
    dq: object
    dq_ninth: object


class Gradients(NamedTuple):
    """dk and dv of 64 keys, and of their ninth parts: accumulators that a thread keeps while the queries pass by."""

    dk: object
    dk_ninth: object
    dv: object
    dv_ninth: object


class Queries(NamedTuple):
    """A tile's places of q and of its ninth part, which dy follows; the barrier of L and D, its parity, and where in
    shared memory this thread's are."""

    q: int
    q_ninth: int
    barrier: int
    parity: int
    numbers_at: int


@cuda.jit(device=True, forceinline=True)
def add_block(r, accumulators, k, k_ninth, tile, zeros, shared, c, ds_at, chunk, first):
    """dv += P · dy and dk += dS · q for 64 keys and N queries; dS goes to shared memory, from a chunk of a row on.

    k: places, which those of v follow; first: whether dS may still be read for dq. On return S, dS and P are free, and
    with HS over 32 all products are done.
    """
    zeros = uint32(zeros)
    k, k_ninth = uint32(opaque(k)), uint32(opaque(k_ninth))
    q, q_ninth = uint32(opaque(tile.q)), uint32(opaque(tile.q_ninth))
    wgmma_fence()
    multiply_along(HS, N, r.s, k, k_ninth, q, q_ninth, zeros)
    wgmma_commit()
    multiply_along(HS, N, r.ds, k + uint32(V), k_ninth + uint32(V), q + uint32(DY), q_ninth + uint32(DY), zeros)
    wgmma_commit()

    mbarrier_wait(tile.barrier, uint32(tile.parity))
    wait_for_scores(N, r.s)
    probabilities(N, r.s, shared, tile.numbers_at, c)
    pack_all(N, r.words, r.s)
    wgmma_fence()
    add_queries(HS, N, accumulators.dv, accumulators.dv_ninth, r.words, q + uint32(DY), q_ninth + uint32(DY))
    wgmma_commit()

    wait_for_scores(N, r.ds)
    score_gradients(N, r.ds, r.s, shared, int32(tile.numbers_at + 4 * QUERIES))
    pack_all(N, r.ds_words, r.ds)
    wgmma_fence()
    add_queries(HS, N, accumulators.dk, accumulators.dk_ninth, r.ds_words, q, q_ninth)
    wgmma_commit()
    if first:
        bar_sync(uint32(DS_FREE), uint32(CONSUMERS))
    store_ds(N, shared, ds_at, r.ds_words, chunk)
    if HS > 32:
        wgmma_wait_0()  # there are no registers for the next products, too


@cuda.jit(device=True, forceinline=True)
def add_keys(r, accumulators, k, k_ninth, tile, zeros, shared, c, ds_at, first):
    """`add_block` for 64 keys and all queries of a tile: at once, or N in a loop."""
    if N == QUERIES:
        add_block(r, accumulators, k, k_ninth, tile, zeros, shared, c, ds_at, 0, first)
    else:
        query = opaque(int32(0))
        while query < QUERIES:
            part = Queries(int32(tile.q + query * (ROW // CHUNK)), int32(tile.q_ninth + query), tile.barrier,
                           tile.parity, int32(tile.numbers_at + 4 * query))
            add_block(r, accumulators, k, k_ninth, part, zeros, shared, c, ds_at, query >> 3, first and query == 0)
            query = int32(query + N)


# Results --------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def write_queries(columns, dq_out, at, exists, dq, scale, fresh, lane):
    """A thread's share of `columns` columns of dq; at: of its first four numbers."""
    for j in range(columns // 8):
        write_dq(dq_out, at + 8 * j, exists, dq, 4 * j, scale, fresh, lane)


# The kernel -----------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def place_of(unit, chunks, heads):
    """(image, head, chunk of keys) of a unit."""
    rest, chunk = divide(unit, chunks)
    image, head = divide(rest, heads)
    return image, head, chunk


def shared_bytes(HS):
    """Buffers of k and v; dSᵀ; stages of q, dy, L and D; y; the zeros behind a ninth part."""
    return BUFFERS * 2 * tile_bytes(HS, KEYS) + KEYS * DS_ROW + (CHUNK * ROWS if HS == 72 else 0) + \
        stages_of(HS) * stage_bytes(HS) + tile_bytes(HS, QUERIES)


class Maps(NamedTuple):
    """q, k: of qkv, in boxes of 64 and 256 tokens; dy, y: of 64; out: of dqkv, of 128; with those of ninth parts."""

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


class Problem(NamedTuple):
    """dq of (image, token, head) lies at image · T · dq_row + token · dq_row + head · dq_head, and each further chunk's
    behind all images. head_step: columns of qkv from a head to the next; part: from q's to k's and v's."""

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


class Rings(NamedTuple):
    """keys: buffers of k and v; queries: stages of q and dy, and of L and D, whose barriers begin at `numbers`; y."""

    keys: object
    queries: object
    y: object
    numbers: int


@cuda.jit(device=True, forceinline=True)
def make_rings(base, barriers):
    return Rings(make_ring(base, BUFFER, BUFFERS, barrier_at(barriers, 3 * STAGES)),
                 make_ring(base + uint32(STAGES_AT), STAGE, STAGES, barriers),
                 make_ring(base + uint32(Y_AT), Q_TILE, 1, barrier_at(barriers, 3 * STAGES + 2 * BUFFERS)),
                 barrier_at(barriers, 2 * STAGES))


@cuda.jit(device=True, forceinline=True)
def set_up(shared, rings, maps):
    """All threads: barriers, and the zeros behind ninth parts.

    Two consumers read keys and queries; the two warps that make D read y, and fill L and D.
    """
    t = int32(cuda.threadIdx.x)
    if t == 0:
        init_ring(rings.queries, 1, 2)
        init_barriers(rings.numbers, STAGES, 2 * WARP)
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


@cuda.jit(device=True, forceinline=True)
def work_tile(unit, p):
    """(image, head, first key, end of the keys, chunk) of a unit."""
    image, head, chunk = place_of(unit, p.chunks, p.heads)
    first_key = int32(chunk * p.chunk_tiles * KEYS)
    return image, head, first_key, int32(min(int32(p.T), int32(first_key + p.chunk_tiles * KEYS))), chunk


@cuda.jit(device=True, forceinline=True)
def produce(maps, rings, p):
    """The producer, one thread: asks TMA for each tile of k and v, and beside it for all tiles of q, dy and y.

    It waits for a buffer of k and v until both consumers have stored what took its place, for a stage of q and dy until
    both have made their dq, for y until its sums D are made.
    """
    stage, parity = producer_start()
    buffer, k_parity = producer_start()
    y_stage, y_parity = producer_start()
    unit = int32(cuda.blockIdx.x)
    while unit < p.units:
        image, head, first_key, end, _ = work_tile(unit, p)
        column = int32(head * p.head_step)
        while first_key < end:
            full, k = producer_acquire(rings.keys, buffer, k_parity, BUFFER), stage_at(rings.keys, buffer)
            fetch_tile(HS, KEYS, k, maps.k, maps.k_ninth, full, int32(column + p.part), first_key, image)
            fetch_tile(HS, KEYS, k + uint32(TILE), maps.k, maps.k_ninth, full, int32(column + 2 * p.part), first_key,
                       image)
            buffer, k_parity = advance(rings.keys, buffer, k_parity)
            first = int32(0)
            while first < p.T:
                full, q = producer_acquire(rings.queries, stage, parity, 2 * Q_TILE), stage_at(rings.queries, stage)
                fetch_tile(HS, QUERIES, q, maps.q, maps.q_ninth, full, column, first, image)
                fetch_tile(HS, QUERIES, q + uint32(Q_TILE), maps.dy, maps.dy_ninth, full, int32(head * HS), first,
                           image)
                full = producer_acquire(rings.y, y_stage, y_parity, Q_TILE)
                fetch_tile(HS, QUERIES, rings.y.base, maps.y, maps.y_ninth, full, int32(head * HS), first, image)
                y_stage, y_parity = advance(rings.y, y_stage, y_parity)
                stage, parity = advance(rings.queries, stage, parity)
                first = int32(first + QUERIES)
            first_key = int32(first_key + KEYS)
        unit = int32(unit + cuda.gridDim.x)


@cuda.jit(device=True, forceinline=True)
def make_numbers(shared, logsumexp, rings, p):
    """Two warps, each for half of a tile's queries: L, in units of ln 2, and D = Σ dy · y, beside q and dy.

    They wait for dy and y, release y, and arrive at the stage's barrier `numbers`, for which consumers wait.
    """
    t = int32(cuda.threadIdx.x)
    lane, rows = int32(t & 31), int32((t >> 5) * WARP - WARP)
    row = int32(rows + lane // LANES)
    stage, parity = consumer_start()
    y_stage, y_parity = consumer_start()
    unit = int32(cuda.blockIdx.x)
    while unit < p.units:
        image, head, first_key, end, _ = work_tile(unit, p)
        numbers_at = (image * p.heads + head) * p.T
        while first_key < end:
            first = int32(0)
            while first < p.T:
                at = int32(STAGES_AT + stage * STAGE)
                L = float32(0)
                query = int32(first + rows + lane)
                if query < p.T:
                    L = LOG2_E * logsumexp[numbers_at + query]
                consumer_wait(rings.queries, stage, parity)
                consumer_wait(rings.y, y_stage, y_parity)
                store_word(shared, int32(at + NUMBERS + (rows + lane) * 4), word_of(L))
                i = opaque(row)
                while i < int32(rows + WARP):  # two at a time, in turn: there are few registers
                    to = int32(at + (NUMBERS + 4 * QUERIES))
                    write_row_sum(HS, shared, int32(at + Q_TILE), int32(Y_AT), i, lane, to)
                    write_row_sum(HS, shared, int32(at + Q_TILE), int32(Y_AT), int32(i + PASS), lane, to)
                    i = int32(i + 2 * PASS)
                consumer_release(rings.y, y_stage)
                mbarrier_arrive(barrier_at(rings.numbers, stage))
                y_stage, y_parity = advance(rings.y, y_stage, y_parity)
                stage, parity = advance(rings.queries, stage, parity)
                first = int32(first + QUERIES)
            first_key = int32(first_key + KEYS)
        unit = int32(unit + cuda.gridDim.x)


class Consumer(NamedTuple):
    """What stays of a consumer's thread. Places are in 16 bytes, what ends in _at in bytes from shared memory's start.

    own_at, own_ninth_at: from a tile's start to this consumer's keys; side: from a row's start to its columns of dq, a
    place; ds_at: dS of the thread's key in the first 64, of its first query; query: whose dq it writes, of a tile
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


@cuda.jit(device=True, forceinline=True)
def this_consumer(base, scale):
    t = int32(cuda.threadIdx.x)
    number, thread, lane = int32((t >> 7) - 1), int32(t & 127), int32(t & 31)
    base_place = int32((base & ADDRESS) >> UNIT)
    return Consumer(
        number, lane, thread == 0, float32(scale * LOG2_E), base_place, int32(base_place + DS_AT // CHUNK),
        int32(base_place + ZEROS // CHUNK), int32(number * (CONSUMER_KEYS * ROW)),
        int32(NINTH + number * (CONSUMER_KEYS * CHUNK)), int32(number * (COLUMNS // 16)),
        int32(DS_AT + (number * CONSUMER_KEYS + (thread >> 5) * 16 + (lane >> 2)) * DS_ROW + (lane >> 2) * CHUNK
              + (lane & 3) * 4),
        int32((thread >> 5) * 16 + (lane >> 2) + (lane & 1) * 8))  # see `four_neighbours`


@cuda.jit(device=True, forceinline=True)
def write_dq_tile(r, me, all_place, queries, stage, dq_out, out_at, first, fresh, p):
    """dq of a tile of queries, of which each consumer has half of the columns; the last eight of 72 are the second's.

    Called by both consumers when their dS is stored; they wait for each other's, and release the stage of q and dy.
    """
    fence_proxy_async()
    bar_sync(uint32(DS_COMPLETE), uint32(CONSUMERS))
    wgmma_fence()
    keys = uint32(opaque(all_place))
    multiply_keys(HS, r.dq, uint32(opaque(me.ds_place)), keys + uint32(me.side))
    wgmma_commit()
    wait_for_dq(HS, r.dq)
    if me.elected:
        consumer_release(queries, stage)
    query = int32(first + me.query)
    write_queries(COLUMNS // 2, dq_out, out_at + query * p.dq_row, query < p.T, r.dq, p.scale, fresh, me.lane)
    if HS == 72 and me.number == 1:
        wgmma_fence()
        multiply_ninth(r.dq_ninth, uint32(opaque(me.ds_place)), keys + uint32(NINTH // CHUNK))
        wgmma_commit()
        wait_8(r.dq_ninth)
        write_queries(8, dq_out, out_at + query * p.dq_row + COLUMNS // 2, query < p.T, r.dq_ninth, p.scale, fresh,
                      me.lane)


@cuda.jit(device=True, forceinline=True)
def clear_accumulators(accumulators):
    clear(accumulators.dk, ACCUMULATORS)
    clear(accumulators.dv, ACCUMULATORS)
    if HS == 72:
        clear(accumulators.dk_ninth, 4)
        clear(accumulators.dv_ninth, 4)


@cuda.jit(device=True, forceinline=True)
def stash_keys(shared, base, me, gradients_0, gradients_1, k_at, scale):
    """dk and dv of this consumer's keys, float16, where their k and v were; returns where, for the store by TMA.

    Nobody needs the consumer's rows of v any more, nor, when both have made their dq (DS_FREE), those of k.
    """
    wait_for_accumulators(HS, gradients_0.dk, gradients_0.dk_ninth)
    wait_for_accumulators(HS, gradients_1.dk, gradients_1.dk_ninth)
    wait_for_accumulators(HS, gradients_0.dv, gradients_0.dv_ninth)
    wait_for_accumulators(HS, gradients_1.dv, gradients_1.dv_ninth)
    tile, ninth = int32(k_at + me.own_at), int32(k_at + me.own_ninth_at)
    one = float32(1)
    stash(HS, shared, int32(tile + TILE), int32(ninth + TILE), gradients_0.dv, gradients_0.dv_ninth, one, one)
    stash(HS, shared, int32(tile + (TILE + ROWS * ROW)), int32(ninth + (TILE + ROWS * CHUNK)), gradients_1.dv,
          gradients_1.dv_ninth, one, one)
    bar_sync(uint32(DS_FREE), uint32(CONSUMERS))
    stash(HS, shared, tile, ninth, gradients_0.dk, gradients_0.dk_ninth, scale, scale)
    stash(HS, shared, int32(tile + ROWS * ROW), int32(ninth + ROWS * CHUNK), gradients_1.dk, gradients_1.dk_ninth,
          scale, scale)
    fence_proxy_async()
    bar_sync(uint32(OWN + 1 + me.number), uint32(128))
    return base + uint32(tile), base + uint32(ninth)


@cuda.jit(device=True, forceinline=True)
def consume(shared, base, r, gradients_0, gradients_1, rings, maps, dq_out, p):
    """A consumer, 128 threads: dk and dv of 128 of each tile's 256 keys, and half of the columns of dq.

    It waits for k and v, q and dy, L and D; it releases q and dy when dq is made, k and v when dk and dv, which take
    their place, have been read by TMA.
    """
    me = this_consumer(base, p.scale)
    stage, parity = consumer_start()
    buffer, k_parity = consumer_start()
    owed = False  # whether this thread's stores may still read the other buffer of k and v
    unit = int32(cuda.blockIdx.x)
    while unit < p.units:
        image, head, first_key, end, chunk = work_tile(unit, p)
        own_column = int32(me.number * (COLUMNS // 2) + (me.lane & 2) * 2)
        out_at = (chunk * p.images + image) * p.T * p.dq_row + head * p.dq_head + own_column
        fresh = True  # the chunk's first tile of keys finds nothing to add to
        while first_key < end:
            k_at = int32(buffer * BUFFER)
            all_place = int32(me.base_place + k_at // CHUNK)
            k, k_ninth = int32(all_place + me.own_at // CHUNK), int32(all_place + me.own_ninth_at // CHUNK)
            clear_accumulators(gradients_0)
            clear_accumulators(gradients_1)
            consumer_wait(rings.keys, buffer, k_parity)
            first = int32(0)
            while first < p.T:
                at = int32(STAGES_AT + stage * STAGE)
                q = int32(me.base_place + at // CHUNK)
                tile = Queries(q, int32(q + QUERIES * ROW // CHUNK), barrier_at(rings.numbers, stage), parity,
                               int32(at + NUMBERS + (me.lane & 3) * 8))
                consumer_wait(rings.queries, stage, parity)
                add_keys(r, gradients_0, k, k_ninth, tile, me.zeros, shared, me.c, me.ds_at, True)
                if me.elected and owed:
                    tma_store_wait_read_0()
                    consumer_release(rings.keys, buffer ^ 1)
                owed = False
                add_keys(r, gradients_1, int32(k + ROWS * ROW // CHUNK), int32(k_ninth + ROWS), tile, me.zeros, shared,
                         me.c, int32(me.ds_at + ROWS * DS_ROW), False)
                write_dq_tile(r, me, all_place, rings.queries, stage, dq_out, out_at, first, fresh, p)
                stage, parity = advance(rings.queries, stage, parity)
                first = int32(first + QUERIES)

            tile_at, ninth_at = stash_keys(shared, base, me, gradients_0, gradients_1, k_at, p.scale)
            row = int32(first_key + me.number * CONSUMER_KEYS)
            if me.elected and row < p.T:
                column = int32(head * p.head_step + p.part)
                write_tile(HS, tile_at, ninth_at, maps.out, maps.out_ninth, column, row, image)
                write_tile(HS, tile_at + uint32(TILE), ninth_at + uint32(TILE), maps.out, maps.out_ninth,
                           int32(column + p.part), row, image)
                tma_store_commit()
            owed = True
            buffer, k_parity = advance(rings.keys, buffer, k_parity)
            first_key = int32(first_key + KEYS)
            fresh = False
        unit = int32(unit + cuda.gridDim.x)
    if me.elected:
        tma_store_wait_0()


@requires("9.0a")
def backward(maps, logsumexp, dq_out, p):
    """dk and dv of dqkv, and dq in dq_out: dqkv itself, or float32. maps: `Maps`, p: a `Problem`."""
    shared = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    base = smem_u32(shared)
    rings = make_rings(base, smem_u32(barriers))
    set_up(shared, rings, maps)
    t = int32(cuda.threadIdx.x)
    if t >> 7 == 0:
        producer_registers()
        if t == 0:
            produce(maps, rings, p)
        elif t >= WARP and t < 3 * WARP:
            make_numbers(shared, logsumexp, rings, p)
    else:
        consumer_registers()
        r = Registers(cuda.local.array(SCORES, "float32"), cuda.local.array(SCORES, "float32"),
                      cuda.local.array(WORDS, "uint32"), cuda.local.array(WORDS, "uint32"),
                      cuda.local.array(DQ, "float32"), cuda.local.array(4, "float32"))
        gradients_0 = Gradients(cuda.local.array(ACCUMULATORS, "float32"), cuda.local.array(4, "float32"),
                           cuda.local.array(ACCUMULATORS, "float32"), cuda.local.array(4, "float32"))
        gradients_1 = Gradients(cuda.local.array(ACCUMULATORS, "float32"), cuda.local.array(4, "float32"),
                           cuda.local.array(ACCUMULATORS, "float32"), cuda.local.array(4, "float32"))
        consume(shared, base, r, gradients_0, gradients_1, rings, maps, dq_out, p)


backward_kernels_v5 = {size: specialise(backward, name=f"flash_attention_backward_kernel_v5_{size}",
                                        launch_bounds=(THREADS, 1), HS=size) for size in (32, 64, 72)}


def launch_backward(dy, qkv, y, logsumexp, dqkv, dq, dq_row, dq_head, heads, HS, head_step, part, chunks, chunk_tiles,
                    multiprocessors):
    """dk and dv of dqkv (B, T, 3C), and dq in the flat array `dq`; y (B, T, C) and logsumexp (B, heads, T) as usual.

    dq: dqkv's own (dq_row 3C, dq_head head_step) where one tile has all keys; else float32 (chunks, B, T, heads, HS),
        dq_row heads · HS, dq_head HS, for backward.add_chunks_kernel
    chunks, chunk_tiles: as `choose_chunks` gives them for tiles of KEYS
    """
    B, T, _ = qkv.shape
    units = B * heads * chunks
    kernel = in_bfloat16(backward_kernels_v5[HS], qkv.dtype)
    launch(kernel, min(units, multiprocessors), THREADS,
           Maps(*maps_of(qkv, HS, QUERIES),
                *maps_of(qkv, HS, KEYS), *maps_of(dy, HS, QUERIES), *maps_of(y, HS, QUERIES),
                *maps_of(dqkv, HS, CONSUMER_KEYS)), logsumexp.reshape(-1), dq,
           Problem(B, T, heads, head_step, part, dq_row, dq_head, chunks, chunk_tiles, units, 1 / math.sqrt(HS)),
           shared=shared_bytes(HS))
