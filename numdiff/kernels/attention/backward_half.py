"""Flash attention backward, rung 3: all five products in float16 on the tensor cores, in one
kernel.

WHAT IS NEW, AND WHY IT PAYS
    A block has up to 256 keys, a warp 16 or 32 of them, and the queries pass by in tiles of 64. S
    and dP are computed transposed, a row for each key and a column for each query: then the
    accumulators of Pᵀ and dSᵀ, packed, are the left sides of dv += Pᵀ·dy and dk += dSᵀ·q in the
    warp's own registers, where dk and dv, too, stay to the end.
    Only dq sums over keys, which are spread over the warps. So dSᵀ goes to shared memory, and after
    a barrier each warp sums dS·k over all keys of the block, for 16 queries and its part of the
    columns.
    If the block has all keys of the image (T ≤ 256), that is dq, and it is written once, as
    float16. Otherwise each chunk of keys has a float32 dq of its own, and heads.py's
    kernel adds the chunks in order. The other way to avoid atomics, one kernel for dq and one for
    dk and dv, computes S and dP twice: 7 products instead of 5. A chunk's dq costs 8 bytes for each
    5·256·2 FLOPs: less than a third of the time of two more products, and nothing for the lengths
    that image models have.
    A block that has all keys of its head also computes the sums D of dy · y, while the first tiles
    are in flight: no separate kernel reads both arrays for them, and dy's second reading comes from
    the L2 cache.
A ROUND, for 16 queries of the tile: 4 + 4 loads of fragments from q and dy feed 4 products
    (ldmatrix, and .trans for the two that sum over queries); k's and v's fragments stay in
    registers as far as these suffice (HS 32; k's for 64). dk's product and the next round's S are
    one basic block, in which ptxas loads the one's fragments during the other.
TWO BARRIERS A TILE. Before the first dS is stored no warp may read the dS of the tile before. Until
    then each has S, P, dv and dP to compute, so that no warp waits long. After the last, dS is
    complete and the next tile of queries has arrived; its successor takes the place of the one just
    read.
PARTIAL dq is stored as a lane has it, two numbers each of two neighbouring fragments: 16 bytes, no
    shuffles. A second kernel adds the chunks and restores the order of columns.
LAUNCH
    grid (chunks, heads, B). A block has 64 keys (4 warps, one fragment of keys each), 128 (4 warps,
    two; for HS 128 8 warps, one) or 256 (8 warps, two): the most for which the card has the shared
    memory. That is dynamic, in KiB, for HS 32 and 64, 72: 40 and 64 (64 keys), 91 (128), 97 and 145
    (256); for HS 128, with tiles of 32 queries, 74 (64 keys) and 113 (128).
DETERMINISM
    each number is summed by one warp in the order of the loops, and chunks are added in order.
SOURCE
    reference.py; Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 2; PTX ISA, section
    9.7.14.5.
READ NEXT
    ../../extras/tf32/attention/products.py: float32 on the same tensor cores, from two products.
"""

from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, int64, load4, opaque, store4, uint32
from ...device.approximate import power_of_two
from ...device.async_copy import cp_async_4_zfill, cp_async_commit, cp_async_wait, shared_address
from ...device.common import divide
from ...device.eight import load8
from ...device.limits import FULL_MASK, WARP
from ...device.requires import requires
from ...device.specialise import Constant, specialise
from ...device.tensor_core import (
    float_of,
    ldmatrix_x2_trans,
    ldmatrix_x4_trans,
    load_words4,
    mma_m16n8k16_into,
    pack_half2,
    store_word,
)
from .fragments import (
    CHUNK,
    add_products,
    by_chunk,
    by_row,
    clear,
    copy_out,
    fetch_rows,
    four_neighbours,
    load_left,
    multiply_rows,
    multiply_tiles,
    pack,
    pitch_of,
    stash,
    write_four,
)
from .heads import LOG2_E, Head

NUMBERS = 8  # bytes a query: L and D


@device_inline
def fetch_numbers(tile, logsumexp, D, start, exist, t):
    """Start the copies of L and D of a tile's queries; zeros for those that do not exist.

    Their q and dy are zeros, too: P is 1 and dS is 0, and neither adds anything to dv, dk and dq.
    """
    query = int32(t // 2)
    size = int32(4) if query < exist else int32(0)
    if t < 2 * QUERIES:
        if t % 2:
            cp_async_4_zfill(tile + t * 4, D, start + query, size)
        else:
            cp_async_4_zfill(tile + t * 4, logsumexp, start + query, size)


@device_inline
def row_product(dy, y, row, c, HS):
    """One lane's part of dy · y of a row: the product of eight columns, and of the last eight of
    72."""
    g, v = load8(dy, row + c), load8(y, row + c)
    total = ((g[0] * v[0] + g[1] * v[1]) + (g[2] * v[2] + g[3] * v[3])) + (
        (g[4] * v[4] + g[5] * v[5]) + (g[6] * v[6] + g[7] * v[7])
    )
    if HS == 72 and c == 0:
        g, v = load8(dy, row + 64), load8(y, row + 64)
        total += ((g[0] * v[0] + g[1] * v[1]) + (g[2] * v[2] + g[3] * v[3])) + (
            (g[4] * v[4] + g[5] * v[5]) + (g[6] * v[6] + g[7] * v[7])
        )
    return total


@device_inline
def write_row_sum(D, to, total, exists, lane, LANES):
    """D[to] = the sum over the `LANES` lanes that share a row; all lanes of a warp call it."""
    if LANES == 16:
        total += cuda.shfl_xor_sync(FULL_MASK, total, 8)
    if LANES >= 8:
        total += cuda.shfl_xor_sync(FULL_MASK, total, 4)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 2)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 1)
    if lane == 0 and exists:
        D[to] = total


@device_inline
def write_row_sums(D, dy, y, start, step, to, T, HS, LANES, t, THREADS):
    """D of all queries of a head, LANES lanes a row; start, step, to: of the rows of dy and y, and
    in D.

    Four rows at a time, so that eight loads are under way; rows that do not exist are the last one
    once more.
    """
    lane, row = int32(t % LANES), int32(t // LANES)
    c, turn, last = int32(lane * 8), int32(THREADS // LANES), int32(T - 1)
    first = int32(0)  # of the block: all threads take the same number of turns
    while first < T:
        r0, r1 = int32(first + row), int32(first + row + turn)
        r2, r3 = int32(r1 + turn), int32(r1 + 2 * turn)
        s0 = row_product(dy, y, start + min(r0, last) * step, c, HS)
        s1 = row_product(dy, y, start + min(r1, last) * step, c, HS)
        s2 = row_product(dy, y, start + min(r2, last) * step, c, HS)
        s3 = row_product(dy, y, start + min(r3, last) * step, c, HS)
        write_row_sum(D, to + r0, s0, r0 < T, lane, LANES)
        write_row_sum(D, to + r1, s1, r1 < T, lane, LANES)
        write_row_sum(D, to + r2, s2, r2 < T, lane, LANES)
        write_row_sum(D, to + r3, s3, r3 < T, lane, LANES)
        first = int32(first + 4 * turn)


@device_inline
def probability(s, c, L):
    """2^(c·s − L). It is at most 1, but for rounding, and for keys that do not exist, which have to
    stay finite."""
    return power_of_two(min(c * s - L, float32(0)))


@device_inline
def probabilities(s, first, c, numbers):
    """A fragment of scores, two queries across, becomes probabilities; numbers: L and D of the two,
    as words."""
    L0, L1 = LOG2_E * float_of(numbers[0]), LOG2_E * float_of(numbers[2])
    s[first], s[first + 1] = probability(s[first], c, L0), probability(s[first + 1], c, L1)
    s[first + 2], s[first + 3] = probability(s[first + 2], c, L0), probability(s[first + 3], c, L1)


@device_inline
def score_gradients(dp, first, p, numbers):
    """A fragment of dP becomes dS = P (dP − D)."""
    D0, D1 = float_of(numbers[1]), float_of(numbers[3])
    dp[first], dp[first + 1] = p[first] * (dp[first] - D0), p[first + 1] * (dp[first + 1] - D1)
    dp[first + 2], dp[first + 3] = (
        p[first + 2] * (dp[first + 2] - D0),
        p[first + 3] * (dp[first + 3] - D1),
    )


@device_inline
def add_sixteen(accumulators, ds, row, pairs, ninth):
    """accumulators += dS·k over 16 keys: ds, row: addresses of their dS and k."""
    a = ldmatrix_x4_trans(ds)
    for n in range(pairs):
        b = ldmatrix_x4_trans(row + uint32(n * 2 * CHUNK))
        mma_m16n8k16_into(accumulators, 8 * n, a, (b[0], b[1]))
        mma_m16n8k16_into(accumulators, 8 * n + 4, a, (b[2], b[3]))
    if ninth:
        mma_m16n8k16_into(
            accumulators, 8 * pairs, a, ldmatrix_x2_trans(row + uint32(pairs * 2 * CHUNK))
        )


@device_inline
def add_dq(accumulators, ds, k, exist, KEYS, PITCH, pairs, ninth):
    """accumulators += dS·k for 16 queries, `pairs` of fragments of 8 columns, one more if the last
    of 72 are the warp's.

    ds, k: addresses in shared memory, of the warp's queries and columns, and the lane's place;
    exist: keys, or more
    """
    ds, k = uint32(ds), uint32(k)
    if exist >= KEYS:  # offsets are constants of the instructions
        for key in range(0, KEYS, 16):
            add_sixteen(
                accumulators, ds + uint32(key * DS_PITCH), k + uint32(key * PITCH), pairs, ninth
            )
    else:
        key = int32(0)
        while key < exist:
            add_sixteen(
                accumulators, ds + uint32(key * DS_PITCH), k + uint32(key * PITCH), pairs, ninth
            )
            key = int32(key + 16)


@device_inline
def write_partial(dq, at, exists, accumulators, first, f, fresh):
    """Two numbers each of two neighbouring fragments, of one row, as four neighbours: written, or
    added.

    So a partial dq has its columns by sixteens in the order 0 1 8 9 2 3 10 11 …;
    `add_partials_kernel` restores theirs.
    """
    a, b = f * accumulators[first], f * accumulators[first + 1]
    c, d = f * accumulators[first + 4], f * accumulators[first + 5]
    if exists:
        if not fresh:
            o = load4(dq, at)
            a, b, c, d = a + o[0], b + o[1], c + o[2], d + o[3]
        store4(dq, at, a, b, c, d)


@cuda.jit
def add_partials_kernel(partial, dqkv, count, chunks, width, head_step, heads, HS):
    """dq of dqkv = the sum over chunks of partial (chunks, B, T, heads, HS); a thread has four of
    B·T·C = count."""
    i = int32(cuda.grid(1) * 4)
    if i < count:
        a, b, c, d = load4(partial, i)
        for chunk in range(1, chunks):
            a1, b1, c1, d1 = load4(partial, int64(chunk) * count + i)
            a, b, c, d = a + a1, b + b1, c + c1, d + d1
        row, column = divide(i, int32(heads * HS))
        head, column = divide(column, HS)
        at = int64(row) * width + head * head_step + column
        # sixteens of columns are as `write_partial` has left them
        if column < int32(HS // 16 * 16):
            at -= column % 16 // 2
            store_word(dqkv, at, pack_half2(a, b))
            store_word(dqkv, at + 8, pack_half2(c, d))
        else:
            store4(dqkv, at, a, b, c, d)


@device_inline
def write_dq(dq, at, exist, accumulators, first, f, fresh, lane):
    """A fragment of dq, or its share, written or added: four numbers a lane."""
    v = four_neighbours(accumulators, first, lane)
    f_old = float32(0)
    o = v
    if exist and not fresh:
        o = load4(dq, at)
        f_old = float32(1)
        write_four(
            dq,
            at,
            (f * v[0] + o[0], f * v[1] + o[1], f * v[2] + o[2], f * v[3] + o[3]),
            f_old,
            True,
        )
    else:
        write_four(dq, at, v, f, exist)


def queries_of(HS):
    """Queries of a tile."""
    return 64 if HS <= 72 else 32


def shared_bytes(HS, M, WARPS):
    """k and v; two stages of q, dy, L and D; dSᵀ."""
    keys, queries = 16 * M * WARPS, queries_of(HS)
    return (
        2 * keys * pitch_of(HS)
        + 2 * queries * (2 * pitch_of(HS) + NUMBERS)
        + keys * (2 * queries + CHUNK)
    )


# The kernel's parts -------------------------------------------------------------------------------

HS = Constant()  # channels of a head
M = Constant()  # fragments of 16 keys of a warp
WARPS = Constant()  # of a block
QUERIES = Constant(lambda HS: queries_of(HS))  # of a tile
# bytes of a row of dSᵀ: an odd number of chunks
DS_PITCH = Constant(lambda QUERIES: QUERIES * 2 + CHUNK)
PITCH = Constant(lambda HS: pitch_of(HS))
THREADS = Constant(lambda WARPS: WARP * WARPS)
ROWS = Constant(lambda M: 16 * M)  # keys of a warp
KEYS = Constant(lambda ROWS, WARPS: ROWS * WARPS)
# words of k, or v, in a lane
LEFT = Constant(lambda HS, M: M * (HS // 16 * 4 + HS % 16 // 4) if HS <= 72 else 1)
KEEP_K = Constant(lambda HS, M: HS <= (72 if M == 1 else 64))  # whether these stay in registers
KEEP_V = Constant(lambda HS, M: HS <= (72 if M == 1 else 32))
TOTALS = Constant(lambda HS, M: M * HS // 2)  # numbers of dk, or dv, in a lane
SCORES, WORDS = Constant(lambda M: M * 8), Constant(lambda M: M * 4)  # of 16 queries' S; packed
V = Constant(lambda KEYS, PITCH: KEYS * PITCH)  # bytes from the start of shared memory, where k is
STAGES = Constant(lambda V: 2 * V)
G = Constant(lambda QUERIES, PITCH: QUERIES * PITCH)  # of dy within a stage: q comes first
ROW_NUMBERS = Constant(lambda G: 2 * G)
STAGE = Constant(lambda ROW_NUMBERS, QUERIES: ROW_NUMBERS + QUERIES * NUMBERS)  # bytes of a stage
DS = Constant(lambda STAGES, STAGE: STAGES + 2 * STAGE)
GROUPS = Constant(lambda QUERIES: QUERIES // 16)  # of a tile's queries, one a warp
# of dq's columns, for the other warps
PARTS = Constant(lambda M, WARPS, GROUPS: max(M, WARPS // GROUPS))
# parts of a warp, one after the other
TURNS = Constant(lambda PARTS, WARPS, GROUPS: PARTS * GROUPS // WARPS)
PAIRS = Constant(lambda HS, PARTS: HS // 16 // PARTS)  # pairs of fragments of dq in a warp
NINTH = Constant(lambda HS: HS == 72)
DQ = Constant(lambda PAIRS, NINTH: PAIRS * 8 + (4 if NINTH else 0))
# that share a row of dy and y for its sum, 16 bytes each
LANES = Constant(lambda HS: {32: 4, 128: 16}.get(HS, 8))


class HalfBackwardRegisters(NamedTuple):
    """A lane's: fragments of k and v; S, then P, and dP, then dS, of 16 queries; either packed; dk,
    dv; a tile's dq."""

    k: object
    v: object
    words: object
    s: object
    ds: object
    dk: object
    dv: object
    dq: object


class HalfBackwardLane(NamedTuple):
    """A lane's places in shared memory: of the warp's keys, of its dS, in 16 queries (two), of
    their L and D."""

    k_rows: int
    ds_words: int
    by_row: int
    by_chunk: int
    numbers: int


@device_inline
def head_again(problem):
    """`head_of` once more: between two uses it would take seven registers."""
    head, image, heads = (
        opaque(int32(cuda.blockIdx.y)),
        opaque(int32(cuda.blockIdx.z)),
        int32(cuda.gridDim.y),
    )
    return Head(
        int64(image) * problem.T * problem.width + head * problem.head_step,
        (int64(image) * problem.T * heads + head) * HS,
        heads * HS,
        (int64(image) * heads + head) * problem.T,
    )


@device_inline
def fetch_queries(tile, qkv, dy, head, problem, first, exist, t):
    """Start the copies of q and dy of a tile of queries, from query `first` on."""
    fetch_rows(
        tile,
        PITCH,
        qkv,
        head.start + first * problem.width,
        problem.width,
        exist,
        QUERIES,
        HS,
        t,
        THREADS,
    )
    fetch_rows(
        tile + G,
        PITCH,
        dy,
        head.dy_start + first * head.dy_step,
        head.dy_step,
        exist,
        QUERIES,
        HS,
        t,
        THREADS,
    )


@device_inline
def multiply_keys(s, keep, kept, k_rows, by_chunk, by_row):
    """s = the warp's keys · (16 queries)ᵀ, or v and dy; the left fragments are `kept`, or loaded as
    they are needed.

    by_chunk, by_row: addresses of the queries, and the lane's place
    """
    clear(s, SCORES)
    if keep:
        multiply_rows(s, 0, 2, kept, by_chunk, by_row, M, HS)
    else:
        multiply_tiles(s, 2, k_rows, by_chunk, by_row, M, PITCH, HS)


@device_inline
def store_ds(shared, to, words, m):
    """Fragment m of dSᵀ, 16 keys by 16 queries, into shared memory."""
    store_word(shared, to, words[4 * m])
    store_word(shared, to + 8 * DS_PITCH, words[4 * m + 1])
    store_word(shared, to + CHUNK, words[4 * m + 2])
    store_word(shared, to + 8 * DS_PITCH + CHUNK, words[4 * m + 3])


@device_inline
def multiply_scores(r, shared, lane, c):
    """dv += Pᵀ·dy for 16 queries, and their dS in registers."""
    multiply_keys(r.s, KEEP_K, r.k, lane.k_rows, lane.by_chunk, lane.by_row)
    left = load_words4(shared, lane.numbers)  # L, D, L and D of a lane's two queries
    right = load_words4(shared, lane.numbers + 8 * NUMBERS)  # and of those 8 further on
    for m in range(M):
        probabilities(r.s, 8 * m, c, left)
        probabilities(r.s, 8 * m + 4, c, right)
        pack(r.words, m, r.s, 8 * m)
    add_products(r.dv, r.words, lane.by_row + uint32(G), M, HS)

    multiply_keys(
        r.ds,
        KEEP_V,
        r.v,
        lane.k_rows + uint32(V),
        lane.by_chunk + uint32(G),
        lane.by_row + uint32(G),
    )
    left = load_words4(shared, lane.numbers)  # again: they would take eight registers meanwhile
    right = load_words4(shared, lane.numbers + 8 * NUMBERS)
    for m in range(M):
        score_gradients(r.ds, 8 * m, r.s, left)
        score_gradients(r.ds, 8 * m + 4, r.s, right)
        pack(r.words, m, r.ds, 8 * m)


@device_inline
def add_keys(r, shared, lane):
    """dk += dSᵀ·q for 16 queries; their dS goes to shared memory."""
    for m in range(M):
        store_ds(shared, lane.ds_words + m * 16 * DS_PITCH, r.words, m)
    add_products(r.dk, r.words, lane.by_row, M, HS)


@device_inline
def next_round(lane):
    """The lane's places 16 queries further on."""
    return HalfBackwardLane(
        lane.k_rows,
        int32(lane.ds_words + 32),
        uint32(lane.by_row + uint32(16 * PITCH)),
        uint32(lane.by_chunk + uint32(16 * PITCH)),
        int32(lane.numbers + 16 * NUMBERS),
    )


@device_inline
def add_queries(r, shared, k_tile, stage, first, exist, c, t):
    """dk and dv of the warp's keys, if any exist, from a tile of queries; dSᵀ of both in shared
    memory.

    Queries that do not exist are zeros, and add nothing.
    """
    number, warp = int32(t % WARP), int32(t // WARP)
    q_rows = k_tile + stage
    row_place, chunk_place = by_row(number, PITCH), by_chunk(number, PITCH)
    lane = HalfBackwardLane(
        uint32(k_tile + int32(warp * ROWS * PITCH + row_place)),
        int32(DS + (warp * ROWS + number // 4) * DS_PITCH + number % 4 * 4),
        uint32(q_rows + row_place),
        uint32(q_rows + chunk_place),
        int32(stage + ROW_NUMBERS + number % 4 * 2 * NUMBERS),
    )
    works = warp * ROWS < exist
    if works:
        if KEEP_K and first == 0:
            load_left(r.k, lane.k_rows, M, PITCH, HS)
        if KEEP_V and first == 0:
            load_left(r.v, lane.k_rows + uint32(V), M, PITCH, HS)
        multiply_scores(r, shared, lane, c)
    cuda.syncthreads()  # the dS of the tile before is no longer read
    if works:
        # dk's product of one round and S of the next are one stretch of code
        for _ in range(QUERIES // 16 - 1):
            add_keys(r, shared, lane)
            lane = next_round(lane)
            multiply_scores(r, shared, lane, c)
        add_keys(r, shared, lane)


@device_inline
def sum_part_of_dq(accumulators, dq, k_tile, problem, first, exist, fresh, is_partial, turn, t):
    """dq of a tile of queries, summed over the block's keys: the warp's 16 queries, and its part of
    the columns."""
    lane, group, side = (
        int32(t % WARP),
        int32(t // WARP % GROUPS),
        int32(t // WARP // GROUPS + turn * (PARTS // TURNS)),
    )
    # dS of the warp's 16 queries
    ds_rows = k_tile + int32(DS + by_chunk(lane, DS_PITCH) + group * 32)
    k_columns = k_tile + int32(by_row(lane, PITCH) + side * (PAIRS * 32))  # its part of k's columns
    if first + group * 16 < problem.T:
        last = NINTH and side == PARTS - 1
        clear(accumulators, DQ)
        add_dq(accumulators, ds_rows, k_columns, exist, KEYS, PITCH, PAIRS, last)
        at = (
            (opaque(cuda.blockIdx.x) * cuda.gridDim.z + cuda.blockIdx.z)
            * problem.T
            * problem.dq_row
        )
        at += cuda.blockIdx.y * problem.dq_head  # of the head's dq
        query = int32(first + group * 16 + lane // 4 + lane % 2 * 8)
        row = at + query * problem.dq_row + int32(side * (PAIRS * 16) + lane % 4 // 2 * 4)
        if is_partial:
            above = int32(first + group * 16 + lane // 4)
            at += above * problem.dq_row + int32(side * (PAIRS * 16) + lane % 4 * 4)
            below = at + 8 * problem.dq_row
            for n in range(PAIRS):
                write_partial(
                    dq, at + 16 * n, above < problem.T, accumulators, 8 * n, problem.scale, fresh
                )
                write_partial(
                    dq,
                    below + 16 * n,
                    above + 8 < problem.T,
                    accumulators,
                    8 * n + 2,
                    problem.scale,
                    fresh,
                )
        else:
            for n in range(2 * PAIRS):
                write_dq(
                    dq,
                    row + 8 * n,
                    query < problem.T,
                    accumulators,
                    4 * n,
                    problem.scale,
                    fresh,
                    lane,
                )
        if last:
            write_dq(
                dq,
                row + 16 * PAIRS,
                query < problem.T,
                accumulators,
                8 * PAIRS,
                problem.scale,
                fresh,
                lane,
            )


@device_inline
def sum_dq(accumulators, dq, k_tile, problem, first, exist, fresh, is_partial, t):
    """dq of a tile of queries, summed over the block's keys: the warp's 16 queries, and its parts
    of the columns."""
    sum_part_of_dq(accumulators, dq, k_tile, problem, first, exist, fresh, is_partial, 0, t)
    if TURNS > 1:
        sum_part_of_dq(
            accumulators, dq, k_tile, problem, first, exist, fresh, is_partial, 1, opaque(t)
        )


@device_inline
def write_keys(r, shared, dqkv, start, problem, first_key, t):
    """The epilogue: a warp's dk and dv, by way of its rows of k and v in shared memory, which are
    free by now."""
    lane, warp = int32(t % WARP), int32(t // WARP)
    patch = int32(warp * ROWS * PITCH)
    for m in range(M):
        stash(
            shared,
            int32(patch + m * 16 * PITCH),
            PITCH,
            r.dk,
            m,
            HS // 8,
            problem.scale,
            problem.scale,
            lane,
        )
        stash(
            shared,
            int32(V + patch + m * 16 * PITCH),
            PITCH,
            r.dv,
            m,
            HS // 8,
            float32(1),
            float32(1),
            lane,
        )
    cuda.syncwarp()
    key = int32(first_key + warp * ROWS)
    at = start + problem.part + key * problem.width
    exist = int32(problem.T - key)
    copy_out(shared, patch, PITCH, dqkv, at, problem.width, exist, ROWS, HS, lane)
    copy_out(
        shared,
        int32(V + patch),
        PITCH,
        dqkv,
        at + problem.part,
        problem.width,
        exist,
        ROWS,
        HS,
        lane,
    )


# The kernel ---------------------------------------------------------------------------------------


@requires("7.5")
def flash_attention_backward_kernel_v3(
    dy, qkv, logsumexp, D, dqkv, dq, problem, y, own_sums, is_partial, c
):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    k_tile = shared_address(shared)
    t = int32(cuda.threadIdx.x)
    T, width, part = problem.T, problem.width, problem.part
    r = HalfBackwardRegisters(
        cuda.local.array(LEFT, "uint32"),
        cuda.local.array(LEFT, "uint32"),
        cuda.local.array(WORDS, "uint32"),
        cuda.local.array(SCORES, "float32"),
        cuda.local.array(SCORES, "float32"),
        cuda.local.array(TOTALS, "float32"),
        cuda.local.array(TOTALS, "float32"),
        cuda.local.array(DQ, "float32"),
    )
    first_key = int32(cuda.blockIdx.x * problem.chunk_tiles * KEYS)
    end = int32(min(T, first_key + problem.chunk_tiles * KEYS))
    fresh = True  # the chunk's first tile of keys finds nothing to add to
    while first_key < end:
        exist = int32(T - first_key)  # keys of the tile, or more
        head = head_again(problem)
        at = head.start + part + first_key * width
        cuda.syncthreads()  # the tiles of the round before are free
        t_start = opaque(t)
        fetch_rows(k_tile, PITCH, qkv, at, width, exist, KEYS, HS, t_start, THREADS)
        fetch_rows(k_tile + V, PITCH, qkv, at + part, width, exist, KEYS, HS, t_start, THREADS)
        first = opaque(int32(0))  # query of the tile
        fetch_queries(k_tile + STAGES, qkv, dy, head, problem, first, T, t_start)
        if own_sums and fresh:
            write_row_sums(
                D,
                dy,
                y,
                head.dy_start,
                head.dy_step,
                head.numbers_start,
                T,
                HS,
                LANES,
                t_start,
                THREADS,
            )
            cuda.syncthreads()  # D is there for all threads of the block
        fetch_numbers(k_tile + (STAGES + ROW_NUMBERS), logsumexp, D, head.numbers_start, T, t_start)
        cp_async_commit()
        if QUERIES < T:
            fetch_queries(
                k_tile + (STAGES + STAGE),
                qkv,
                dy,
                head,
                problem,
                int32(QUERIES),
                T - QUERIES,
                t_start,
            )
            fetch_numbers(
                k_tile + (STAGES + STAGE + ROW_NUMBERS),
                logsumexp,
                D,
                head.numbers_start + QUERIES,
                T - QUERIES,
                t_start,
            )
        cp_async_commit()
        clear(r.dk, TOTALS)
        clear(r.dv, TOTALS)
        stage = int32(STAGES)
        cp_async_wait(1)  # this thread's part of the first tile is there
        cuda.syncthreads()  # so are all parts
        while first < T:
            add_queries(r, shared, k_tile, stage, first, exist, c, opaque(t))
            cp_async_wait(0)  # this thread's part of the next tile is there
            cuda.syncthreads()  # so are all parts; dS is complete, and this tile is no longer read
            ahead = int32(first + 2 * QUERIES)
            if ahead < T:
                t_next = opaque(t)
                again = head_again(problem)
                fetch_queries(k_tile + stage, qkv, dy, again, problem, ahead, T - ahead, t_next)
                fetch_numbers(
                    k_tile + stage + ROW_NUMBERS,
                    logsumexp,
                    D,
                    again.numbers_start + ahead,
                    T - ahead,
                    t_next,
                )
                cp_async_commit()
            sum_dq(r.dq, dq, k_tile, problem, first, exist, fresh, is_partial, opaque(t))
            stage = int32(2 * STAGES + STAGE - stage)
            first = int32(first + QUERIES)

        # k is no longer read: a warp's rows of k and v hold its dk and dv before the store
        cuda.syncthreads()
        write_keys(r, shared, dqkv, head_again(problem).start, problem, first_key, opaque(t))
        first_key = int32(first_key + KEYS)
        fresh = False


def make_backward(HS, M, WARPS):
    """The kernel for one head size, `WARPS` warps and M fragments of 16 keys a warp."""
    # on a multiprocessor: at most 168 registers a thread, or 255
    blocks = 1 if WARPS == 8 else 3 if HS == 32 else 2
    return specialise(
        flash_attention_backward_kernel_v3,
        launch_bounds=(WARP * WARPS, blocks),
        HS=HS,
        M=M,
        WARPS=WARPS,
        name=f"flash_attention_backward_kernel_v3_{HS}_{16 * M * WARPS}",
    )
