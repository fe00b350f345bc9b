"""Flash attention backward, rung 5: all five products with Hopper's wgmma, fed by the copy engine (sm_90a).

WHAT IS NEW, AND WHY IT PAYS
    Rung 3 gives a mma.sync for every 16 × 8 × 16 and loads fragments for it. Here 64 keys meet 64 queries in one
    instruction for each 16 columns, straight from shared memory, and one thread, of a warpgroup that does little else,
    asks the copy engine for all tiles (hopper_tiles.py): for the next queries, and for the keys of the next head while
    this one is computed. So memory, which is what limits this pass at 256 tokens, never rests.
    The sums D of dy · y are made by two warps of that warpgroup, from tiles in shared memory: each number of dy and y
    crosses the memory's bus once, and no kernel of its own, and no array of D, is left.
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

from ...device import afresh, cuda, float32, int32, launch, uint32
from ...device.mbarrier import (
    bar_sync,
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
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
from .fragments import ALL, CHUNK, WARP, clear, pack
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

MINIMUM_CAPABILITY = (9, 0)
THREADS = 384  # a producer and two consumer warpgroups
CONSUMERS = 256  # threads
QUERIES = 64  # of a tile
ROWS = 64  # keys of a product
CONSUMER_KEYS = 2 * ROWS
KEYS = 2 * CONSUMER_KEYS  # of a tile
DS_ROW = 2 * QUERIES  # bytes: a key's dS
BUFFERS = 2  # of k and v
MOST_STAGES = 3
BARRIERS = 2 * BUFFERS + 3 * MOST_STAGES + 2
DS_COMPLETE, DS_FREE, OWN = 1, 2, 2  # named barriers: of both consumers; each one's own is OWN + its warpgroup

product_32, product_64 = make_wgmma(32), make_wgmma(64)
rows_8, rows_32, rows_64 = (make_wgmma_a_registers(n, transpose_b=True) for n in (8, 32, 64))
keys_8, keys_16, keys_32 = (make_wgmma(n, True, True) for n in (8, 16, 32))
wait_8, wait_16, wait_32, wait_64 = (make_wgmma_wait(n, pin=False) for n in (8, 16, 32, 64))
wait_32_1, wait_64_1 = (make_wgmma_wait(n, pending=1, pin=False) for n in (32, 64))
producer_registers, consumer_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


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
def add_queries(HS, N, sums, sums_ninth, words, q, q_ninth):
    """sums += left · q for 64 keys, over N queries; words: the left side, of a key and its queries."""
    for i in range(N // 16):
        left = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
        if HS == 32:
            rows_32(sums, left, named(HS, q + uint32(64 * i)), int32(1))
        else:
            rows_64(sums, left, named(HS, q + uint32(128 * i)), int32(1))
    if HS == 72:
        for i in range(N // 16):
            left = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
            rows_8(sums_ninth, left, named_across(q_ninth + uint32(16 * i)), int32(1))


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
def wait_for_sums(HS, sums, sums_ninth):
    if HS == 32:
        wait_32(sums)
    else:
        wait_64(sums)
    if HS == 72:
        wait_8(sums_ninth)


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
        total += cuda.shfl_xor_sync(ALL, total, 4)
    total += cuda.shfl_xor_sync(ALL, total, 2)
    total += cuda.shfl_xor_sync(ALL, total, 1)
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

    The rows, 128 bytes, are swizzled as the copy engine does it.
    """
    at = afresh(at)
    for i in range(N // 16):
        place, next_place = int32(at ^ ((chunk + 2 * i) * CHUNK)), int32(at ^ ((chunk + 2 * i + 1) * CHUNK))
        store_word(shared, place, words[4 * i])
        store_word(shared, int32(place + 8 * DS_ROW), words[4 * i + 1])
        store_word(shared, next_place, words[4 * i + 2])
        store_word(shared, int32(next_place + 8 * DS_ROW), words[4 * i + 3])


@cuda.jit(device=True, forceinline=True)
def add_block(HS, N, sizes, s, ds, words, ds_words, dk, dk_ninth, dv, dv_ninth, k, k_ninth, q, q_ninth, zeros, shared,
              numbers, parity, numbers_at, c, ds_at, chunk, first):
    """dv += P · dy and dk += dS · q for 64 keys and N queries; dS goes to shared memory, from a chunk of a row on.

    k, q: places, from which those of v and dy follow; sizes: of a tile of k, and of q, likewise in 16 bytes
    numbers: the barrier of L and D, numbers_at: where the thread's are; first: whether dS may still be read for dq
    """
    V, DY = sizes
    zeros = uint32(zeros)
    k, k_ninth, q, q_ninth = uint32(afresh(k)), uint32(afresh(k_ninth)), uint32(afresh(q)), uint32(afresh(q_ninth))
    wgmma_fence()
    multiply_along(HS, N, s, k, k_ninth, q, q_ninth, zeros)
    wgmma_commit()
    multiply_along(HS, N, ds, k + uint32(V), k_ninth + uint32(V), q + uint32(DY), q_ninth + uint32(DY), zeros)
    wgmma_commit()

    mbarrier_wait(numbers, uint32(parity))
    wait_for_scores(N, s)
    probabilities(N, s, shared, numbers_at, c)
    pack_all(N, words, s)
    wgmma_fence()
    add_queries(HS, N, dv, dv_ninth, words, q + uint32(DY), q_ninth + uint32(DY))
    wgmma_commit()

    wait_for_scores(N, ds)
    score_gradients(N, ds, s, shared, int32(numbers_at + 4 * QUERIES))
    pack_all(N, ds_words, ds)
    wgmma_fence()
    add_queries(HS, N, dk, dk_ninth, ds_words, q, q_ninth)
    wgmma_commit()
    if first:
        bar_sync(uint32(DS_FREE), uint32(CONSUMERS))
    store_ds(N, shared, ds_at, ds_words, chunk)
    if HS > 32:
        wgmma_wait_0()  # there are no registers for the next products, too


# Results --------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def write_queries(columns, dq_out, at, exists, dq, scale, fresh, lane):
    """A thread's share of so many columns of dq; at: of its first four numbers."""
    for j in range(columns // 8):
        write_dq(dq_out, at + 8 * j, exists, dq, 4 * j, scale, fresh, lane)


# The kernel -----------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def place_of(unit, chunks, heads):
    """(image, head, chunk of keys) of a unit."""
    rest, chunk = divide(unit, chunks)
    image, head = divide(rest, heads)
    return image, head, chunk


def stages_of(HS):
    return 2 if HS == 72 else 3


def shared_bytes(HS):
    """Buffers of k and v; dSᵀ; stages of q, dy, L and D; y; the zeros behind a ninth part."""
    return BUFFERS * 2 * tile_bytes(HS, KEYS) + KEYS * DS_ROW + (CHUNK * ROWS if HS == 72 else 0) + \
        stages_of(HS) * stage_bytes(HS) + tile_bytes(HS, QUERIES)


def stage_bytes(HS):
    """Of q and dy, then L and D: a multiple of 1024."""
    return 2 * tile_bytes(HS, QUERIES) + 1024


def make_backward(HS):
    """The kernel for one head size."""
    ROW, COLUMNS = row_bytes(HS), min(HS, 64)
    SUMS = COLUMNS // 2  # of dk, or dv, of 64 keys, in a thread
    N = 32 if HS == 72 else 64  # queries of a product
    SCORES, WORDS, DQ = N // 2, N // 4, COLUMNS // 4  # of a thread
    TILE, Q_TILE = tile_bytes(HS, KEYS), tile_bytes(HS, QUERIES)
    BUFFER, STAGE, STAGES = 2 * TILE, stage_bytes(HS), stages_of(HS)  # k, then v; q, then dy
    NUMBERS, D_NUMBERS = 2 * Q_TILE, 2 * Q_TILE + 4 * QUERIES  # within a stage
    NINTH = KEYS * ROW  # within a tile
    SIZES = TILE // CHUNK, Q_TILE // CHUNK
    DS_AT = BUFFERS * BUFFER  # bytes from the start of shared memory
    STAGES_AT = DS_AT + KEYS * DS_ROW
    Y_AT = STAGES_AT + STAGES * STAGE
    ZEROS = Y_AT + Q_TILE  # behind all ninth parts
    ZERO_WORDS = CHUNK * ROWS // 4
    LANES = HS // 16 * 2  # that share a row of dy and y for its sum
    PASS = WARP // LANES  # rows of a warp at a time

    def kernel(map_q, map_q_ninth, map_k, map_k_ninth, map_dy, map_dy_ninth, map_y, map_y_ninth, map_out,
               map_out_ninth, logsumexp, dq_out, images, T, heads, head_step, part, dq_row, dq_head, chunks,
               chunk_tiles, units, scale):
        """map_q, map_k: of qkv, in boxes of 64 and 256 tokens; map_dy, map_y: of 64; map_out: of dqkv, of 128.

        dq_out: where dq of (image, token, head) lies at image · T · dq_row + token · dq_row + head · dq_head, and each
            further chunk's behind all images: dqkv itself, or float32
        """
        shared = cuda.shared.array(0, "uint8", alignment=1024)
        barriers = cuda.shared.array(BARRIERS, "uint64")
        base, full_0 = smem_u32(shared), smem_u32(barriers)
        empty_0, numbers_0 = full_0 + uint32(8 * STAGES), full_0 + uint32(16 * STAGES)
        k_full_0 = full_0 + uint32(24 * STAGES)
        k_empty_0 = k_full_0 + uint32(8 * BUFFERS)
        y_full, y_empty = k_full_0 + uint32(16 * BUFFERS), k_full_0 + uint32(16 * BUFFERS + 8)
        t = int32(cuda.threadIdx.x)
        warpgroup = int32(t >> 7)
        if t == 0:
            for i in range(STAGES):
                mbarrier_init(full_0 + uint32(8 * i), uint32(1))
                mbarrier_init(empty_0 + uint32(8 * i), uint32(2))
                mbarrier_init(numbers_0 + uint32(8 * i), uint32(2 * WARP))
            for i in range(BUFFERS):
                mbarrier_init(k_full_0 + uint32(8 * i), uint32(1))
                mbarrier_init(k_empty_0 + uint32(8 * i), uint32(2))
            mbarrier_init(y_full, uint32(1))
            mbarrier_init(y_empty, uint32(2 * WARP))
            fence_barrier_init()
            tma_prefetch(map_q)
            tma_prefetch(map_k)
            tma_prefetch(map_dy)
            tma_prefetch(map_y)
            tma_prefetch(map_out)
        if HS == 72:
            if t < ZERO_WORDS:
                store_word(shared, int32(ZEROS + t * 4), uint32(0))
            fence_proxy_async()
        cuda.syncthreads()
        stage, buffer = int32(0), int32(0)
        if warpgroup == 0:
            producer_registers()
            if t == 0:
                parity, k_parity, y_parity = int32(1), int32(1), int32(1)  # fresh barriers let the first round through
                unit = int32(cuda.blockIdx.x)
                while unit < units:
                    image, head, chunk = place_of(unit, chunks, heads)
                    column = int32(head * head_step)
                    first_key = int32(chunk * chunk_tiles * KEYS)
                    end = int32(min(int32(T), int32(first_key + chunk_tiles * KEYS)))
                    while first_key < end:
                        full, k = k_full_0 + uint32(8) * uint32(buffer), base + uint32(buffer) * uint32(BUFFER)
                        mbarrier_wait(k_empty_0 + uint32(8) * uint32(buffer), uint32(k_parity))
                        mbarrier_expect_tx(full, uint32(BUFFER))
                        fetch_tile(HS, KEYS, k, map_k, map_k_ninth, full, int32(column + part), first_key, image)
                        fetch_tile(HS, KEYS, k + uint32(TILE), map_k, map_k_ninth, full, int32(column + 2 * part),
                                   first_key, image)
                        buffer = int32(buffer ^ 1)
                        if buffer == 0:
                            k_parity = int32(k_parity ^ 1)
                        first = int32(0)
                        while first < T:
                            full = full_0 + uint32(8) * uint32(stage)
                            q = base + uint32(STAGES_AT) + uint32(stage) * uint32(STAGE)
                            mbarrier_wait(empty_0 + uint32(8) * uint32(stage), uint32(parity))
                            mbarrier_expect_tx(full, uint32(2 * Q_TILE))
                            fetch_tile(HS, QUERIES, q, map_q, map_q_ninth, full, column, first, image)
                            fetch_tile(HS, QUERIES, q + uint32(Q_TILE), map_dy, map_dy_ninth, full, int32(head * HS),
                                       first, image)
                            mbarrier_wait(y_empty, uint32(y_parity))
                            mbarrier_expect_tx(y_full, uint32(Q_TILE))
                            fetch_tile(HS, QUERIES, base + uint32(Y_AT), map_y, map_y_ninth, y_full, int32(head * HS),
                                       first, image)
                            y_parity = int32(y_parity ^ 1)
                            stage = int32(stage + 1)
                            if stage == STAGES:
                                stage, parity = int32(0), int32(parity ^ 1)
                            first = int32(first + QUERIES)
                        first_key = int32(first_key + KEYS)
                    unit = int32(unit + cuda.gridDim.x)
            elif t >= WARP and t < 3 * WARP:
                lane, rows = int32(t & 31), int32((t >> 5) * WARP - WARP)  # a warp has half of the queries
                row = int32(rows + lane // LANES)
                parity, y_parity = int32(0), int32(0)
                unit = int32(cuda.blockIdx.x)
                while unit < units:
                    image, head, chunk = place_of(unit, chunks, heads)
                    numbers_at = (image * heads + head) * T
                    first_key = int32(chunk * chunk_tiles * KEYS)
                    end = int32(min(int32(T), int32(first_key + chunk_tiles * KEYS)))
                    while first_key < end:
                        first = int32(0)
                        while first < T:
                            at = int32(STAGES_AT + stage * STAGE)
                            L = float32(0)
                            query = int32(first + rows + lane)
                            if query < T:
                                L = LOG2_E * logsumexp[numbers_at + query]
                            mbarrier_wait(full_0 + uint32(8) * uint32(stage), uint32(parity))
                            mbarrier_wait(y_full, uint32(y_parity))
                            y_parity = int32(y_parity ^ 1)
                            store_word(shared, int32(at + NUMBERS + (rows + lane) * 4), word_of(L))
                            i = afresh(row)
                            while i < int32(rows + WARP):  # two at a time, in turn: there are few registers
                                write_row_sum(HS, shared, int32(at + Q_TILE), int32(Y_AT), i, lane,
                                              int32(at + D_NUMBERS))
                                write_row_sum(HS, shared, int32(at + Q_TILE), int32(Y_AT), int32(i + PASS), lane,
                                              int32(at + D_NUMBERS))
                                i = int32(i + 2 * PASS)
                            mbarrier_arrive(y_empty)
                            mbarrier_arrive(numbers_0 + uint32(8) * uint32(stage))
                            stage = int32(stage + 1)
                            if stage == STAGES:
                                stage, parity = int32(0), int32(parity ^ 1)
                            first = int32(first + QUERIES)
                        first_key = int32(first_key + KEYS)
                    unit = int32(unit + cuda.gridDim.x)
        else:
            consumer_registers()
            s = cuda.local.array(SCORES, "float32")
            ds = cuda.local.array(SCORES, "float32")
            words = cuda.local.array(WORDS, "uint32")
            ds_words = cuda.local.array(WORDS, "uint32")
            dk_0 = cuda.local.array(SUMS, "float32")
            dk_1 = cuda.local.array(SUMS, "float32")
            dv_0 = cuda.local.array(SUMS, "float32")
            dv_1 = cuda.local.array(SUMS, "float32")
            dk_0_ninth = cuda.local.array(4, "float32")
            dk_1_ninth = cuda.local.array(4, "float32")
            dv_0_ninth = cuda.local.array(4, "float32")
            dv_1_ninth = cuda.local.array(4, "float32")
            dq = cuda.local.array(DQ, "float32")
            dq_ninth = cuda.local.array(4, "float32")
            consumer, thread, lane = int32(warpgroup - 1), int32(t & 127), int32(t & 31)
            elected = thread == 0
            c = float32(scale * LOG2_E)
            parity, k_parity = int32(0), int32(0)
            owed = False  # whether this thread's stores may still read the other buffer of k and v
            base_place = int32((base & ADDRESS) >> UNIT)
            ds_place, zeros = int32(base_place + DS_AT // CHUNK), int32(base_place + ZEROS // CHUNK)
            # from a tile's start to the consumer's keys, and from a row's start to its columns of dq
            own_at, own_ninth_at = int32(consumer * (CONSUMER_KEYS * ROW)), int32(
                NINTH + consumer * (CONSUMER_KEYS * CHUNK))
            side = int32(consumer * (COLUMNS // 16))
            # dS of the thread's key in the first 64, of its first query
            ds_at = int32(DS_AT + (consumer * CONSUMER_KEYS + (thread >> 5) * 16 + (lane >> 2)) * DS_ROW
                          + (lane >> 2) * CHUNK + (lane & 3) * 4)
            ds_at_1 = int32(ds_at + ROWS * DS_ROW)
            own_query = int32((thread >> 5) * 16 + (lane >> 2) + (lane & 1) * 8)  # of dq: see `four_neighbours`
            own_column = int32(consumer * (COLUMNS // 2) + (lane & 2) * 2)
            unit = int32(cuda.blockIdx.x)
            while unit < units:
                image, head, chunk = place_of(unit, chunks, heads)
                first_key = int32(chunk * chunk_tiles * KEYS)
                end = int32(min(int32(T), int32(first_key + chunk_tiles * KEYS)))
                out_at = (chunk * images + image) * T * dq_row + head * dq_head + own_column
                fresh = True  # the chunk's first tile of keys finds nothing to add to
                while first_key < end:
                    k_at = int32(buffer * BUFFER)
                    all_place = int32(base_place + k_at // CHUNK)
                    k_place, k_ninth_place = int32(all_place + own_at // CHUNK), int32(
                        all_place + own_ninth_at // CHUNK)
                    k_place_1, k_ninth_place_1 = int32(k_place + ROWS * ROW // CHUNK), int32(k_ninth_place + ROWS)
                    clear(dk_0, SUMS)
                    clear(dk_1, SUMS)
                    clear(dv_0, SUMS)
                    clear(dv_1, SUMS)
                    if HS == 72:
                        clear(dk_0_ninth, 4)
                        clear(dk_1_ninth, 4)
                        clear(dv_0_ninth, 4)
                        clear(dv_1_ninth, 4)
                    mbarrier_wait(k_full_0 + uint32(8) * uint32(buffer), uint32(k_parity))
                    first = int32(0)
                    while first < T:
                        at = int32(STAGES_AT + stage * STAGE)
                        q_place = int32(base_place + at // CHUNK)
                        q_ninth_place = int32(q_place + QUERIES * ROW // CHUNK)
                        numbers, numbers_at = numbers_0 + uint32(8) * uint32(stage), int32(
                            at + NUMBERS + (lane & 3) * 8)
                        mbarrier_wait(full_0 + uint32(8) * uint32(stage), uint32(parity))
                        if N == QUERIES:
                            add_block(HS, N, SIZES, s, ds, words, ds_words, dk_0, dk_0_ninth, dv_0, dv_0_ninth, k_place,
                                      k_ninth_place, q_place, q_ninth_place, zeros, shared, numbers, parity, numbers_at,
                                      c, ds_at, 0, True)
                        else:
                            query = afresh(int32(0))
                            while query < QUERIES:
                                add_block(HS, N, SIZES, s, ds, words, ds_words, dk_0, dk_0_ninth, dv_0, dv_0_ninth,
                                          k_place, k_ninth_place, int32(q_place + query * (ROW // CHUNK)),
                                          int32(q_ninth_place + query), zeros, shared, numbers, parity, int32(numbers_at
                                          + 4 * query), c, ds_at, query >> 3, query == 0)
                                query = int32(query + N)
                        if elected and owed:
                            tma_store_wait_read_0()
                            mbarrier_arrive(k_empty_0 + uint32(8) * uint32(buffer ^ 1))
                        owed = False
                        if N == QUERIES:
                            add_block(HS, N, SIZES, s, ds, words, ds_words, dk_1, dk_1_ninth, dv_1, dv_1_ninth,
                                      k_place_1, k_ninth_place_1, q_place, q_ninth_place, zeros, shared, numbers,
                                      parity, numbers_at, c, ds_at_1, 0, False)
                        else:
                            query = afresh(int32(0))
                            while query < QUERIES:
                                add_block(HS, N, SIZES, s, ds, words, ds_words, dk_1, dk_1_ninth, dv_1, dv_1_ninth,
                                          k_place_1, k_ninth_place_1, int32(q_place + query * (ROW // CHUNK)),
                                          int32(q_ninth_place + query), zeros, shared, numbers, parity, int32(numbers_at
                                          + 4 * query), c, ds_at_1, query >> 3, False)
                                query = int32(query + N)

                        # dq, of which each consumer has half of the columns; the last eight of 72 are the second's
                        fence_proxy_async()
                        bar_sync(uint32(DS_COMPLETE), uint32(CONSUMERS))
                        wgmma_fence()
                        keys = uint32(afresh(all_place))
                        multiply_keys(HS, dq, uint32(afresh(ds_place)), keys + uint32(side))
                        wgmma_commit()
                        wait_for_dq(HS, dq)
                        if elected:
                            mbarrier_arrive(empty_0 + uint32(8) * uint32(stage))
                        query = int32(first + own_query)
                        write_queries(COLUMNS // 2, dq_out, out_at + query * dq_row, query < T, dq, scale, fresh, lane)
                        if HS == 72 and consumer == 1:
                            wgmma_fence()
                            multiply_ninth(dq_ninth, uint32(afresh(ds_place)), keys + uint32(NINTH // CHUNK))
                            wgmma_commit()
                            wait_8(dq_ninth)
                            write_queries(8, dq_out, out_at + query * dq_row + COLUMNS // 2, query < T, dq_ninth, scale,
                                          fresh, lane)
                        stage = int32(stage + 1)
                        if stage == STAGES:
                            stage, parity = int32(0), int32(parity ^ 1)
                        first = int32(first + QUERIES)
                    wait_for_sums(HS, dk_0, dk_0_ninth)
                    wait_for_sums(HS, dk_1, dk_1_ninth)
                    wait_for_sums(HS, dv_0, dv_0_ninth)
                    wait_for_sums(HS, dv_1, dv_1_ninth)
                    # nobody needs the consumer's rows of v any more, nor, when all have made their dq, those of k
                    tile, ninth = int32(k_at + own_at), int32(k_at + own_ninth_at)
                    one = float32(1)
                    stash(HS, shared, int32(tile + TILE), int32(ninth + TILE), dv_0, dv_0_ninth, one, one)
                    stash(HS, shared, int32(tile + (TILE + ROWS * ROW)), int32(ninth + (TILE + ROWS * CHUNK)), dv_1,
                          dv_1_ninth, one, one)
                    bar_sync(uint32(DS_FREE), uint32(CONSUMERS))
                    stash(HS, shared, tile, ninth, dk_0, dk_0_ninth, scale, scale)
                    stash(HS, shared, int32(tile + ROWS * ROW), int32(ninth + ROWS * CHUNK), dk_1, dk_1_ninth, scale,
                          scale)
                    fence_proxy_async()
                    bar_sync(uint32(OWN + warpgroup), uint32(128))
                    row = int32(first_key + consumer * CONSUMER_KEYS)
                    if elected and row < T:
                        column = int32(head * head_step + part)
                        k, k_ninth = base + uint32(tile), base + uint32(ninth)
                        write_tile(HS, k, k_ninth, map_out, map_out_ninth, column, row, image)
                        write_tile(HS, k + uint32(TILE), k_ninth + uint32(TILE), map_out, map_out_ninth,
                                   int32(column + part), row, image)
                        tma_store_commit()
                    owed = True
                    buffer = int32(buffer ^ 1)
                    if buffer == 0:
                        k_parity = int32(k_parity ^ 1)
                    first_key = int32(first_key + KEYS)
                    fresh = False
                unit = int32(unit + cuda.gridDim.x)
            if elected:
                tma_store_wait_0()

    kernel.__name__ = kernel.__qualname__ = f"flash_attention_backward_kernel_v5_{HS}"
    return cuda.jit(kernel, launch_bounds=(THREADS, 1))


backward_kernels_v5 = {HS: make_backward(HS) for HS in (32, 64, 72)}


def launch_backward(dy, qkv, y, logsumexp, dqkv, dq, dq_row, dq_head, heads, HS, head_step, part, chunks, chunk_tiles,
                    multiprocessors):
    """dk and dv of dqkv (B, T, 3C), and dq in the flat array `dq`; y (B, T, C) and logsumexp (B, heads, T) as usual.

    dq: dqkv's own (dq_row 3C, dq_head head_step) where one tile has all keys; else float32 (chunks, B, T, heads, HS),
        dq_row heads · HS, dq_head HS, for backward.add_chunks_kernel
    chunks, chunk_tiles: as `choose_chunks` gives them for tiles of KEYS
    """
    B, T, _ = qkv.shape
    units = B * heads * chunks
    launch(backward_kernels_v5[HS], min(units, multiprocessors), THREADS, *maps_of(qkv, HS, QUERIES),
           *maps_of(qkv, HS, KEYS), *maps_of(dy, HS, QUERIES), *maps_of(y, HS, QUERIES),
           *maps_of(dqkv, HS, CONSUMER_KEYS), logsumexp.reshape(-1), dq, B, T, heads, head_step, part, dq_row, dq_head,
           chunks, chunk_tiles, units, 1 / math.sqrt(HS), shared=shared_bytes(HS))
