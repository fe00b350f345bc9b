"""Flash attention backward, rung 2: one kernel for dq, dk and dv, five products instead of seven.

WHAT IS NEW, AND WHY IT PAYS
    Rung 1 computes P and dP twice, once for the threads that sum over keys and once for those that
    sum over queries. Here one block does both: it takes a tile of 64 keys through all queries,
    keeps the tile's dk and dv in registers, and adds the tile's share of dq to dq in memory. To do
    that without atomics, one block has a head's keys all to itself, or a fixed part of them, a tile
    after the other: then the same thread always adds to an element of dq. Where B · heads blocks
    are too few to fill a GPU, the keys of a head are cut into chunks, each with its own dq, and a
    second kernel adds the chunks' dq in order (as ../matmul/split_k.py does). There are at most 16
    of them, so memory stays linear in T.
THE ROUND of a block, for 64 keys and 64 queries, a warp 16 queries
    S = q·kᵀ, P = 2^(S·log₂e/√HS − L·log₂e) and dP = dy·vᵀ, dS = P (dP − D): 4 × 8 each in a
    thread's registers P and dS go to shared memory; a barrier, for the next two sum over queries,
    and those are other warps' dv += Pᵀ·dy and dk += dSᵀ·q: rows are positions of keys (patches.py),
    a warp 16 of them, a thread 4 × HS / 8 dq += dS·k: a warp's own 16 queries, a thread 4 × HS / 8
    Of each product 12 loads of 16 bytes feed 128 multiply-adds (HS 32: 8 feed 64, in the last
    three).
LAUNCH
    grid (chunks, heads, B), 128 threads. Dynamic shared memory, KiB: k, v, q, dy, P, dS, L and D,
    for HS 32, 64, 72: 70.5, 102.5, 110.5.
DETERMINISM
    as said: each number is summed by one thread in the order of the loops, and chunks are added in
    order. The number of chunks depends on the shape and on the GPU's multiprocessors.
SOURCE
    kernels/attention/reference.py; the order of the loops: Dao et al. 2022, "FlashAttention", arXiv:2205.14135,
    algorithm 4.
READ NEXT
    kernels/attention/fragments.py
"""

import math
from typing import NamedTuple

from ....device import cuda, float32, int32, load4, store4, uint32
from ....device.limits import WARP
from ....device.specialise import Constant, specialise
from ....kernels.attention.heads import LOG2_E, head_of
from .patches import (
    KEYS,
    PAD,
    SCORE_ROW,
    combine,
    combine_column,
    dots,
    fetch_tile,
    key_row,
    lane_place,
    load_column,
    load_rows,
    store_row,
    store_rows,
    store_tile,
    transpose,
    zero_patch,
)

WARPS = 4
THREADS = WARP * WARPS
QUERIES = 64  # of a tile
NOTHING = float32(3.4e38)  # logsumexp of a query that does not exist: its probabilities are all 0


@cuda.jit(device=True)
def add_dots(left, right, shared, a_at, b_at, step):
    """Four columns' share of 4 × 8 dot products: of rows 0 … 3 with rows 0, 8 … and 32, 40 … from
    where one stands."""
    a = load_rows(shared, a_at, step)
    return (
        dots(left, a, load_rows(shared, b_at, 8 * step)),
        dots(right, a, load_rows(shared, b_at + 32 * step, 8 * step)),
    )


@cuda.jit(device=True)
def probability_row(s, c, L):
    """2^(c·s − L). It is at most 1, but for rounding, and for keys that do not exist, which have to
    stay finite."""
    zero = float32(0)
    return (
        math.exp2(min(c * s[0] - L, zero)),
        math.exp2(min(c * s[1] - L, zero)),
        math.exp2(min(c * s[2] - L, zero)),
        math.exp2(min(c * s[3] - L, zero)),
    )


@cuda.jit(device=True)
def probabilities(s, c, L):
    return (
        probability_row(s[0], c, L[0]),
        probability_row(s[1], c, L[1]),
        probability_row(s[2], c, L[2]),
        probability_row(s[3], c, L[3]),
    )


@cuda.jit(device=True)
def score_gradient_row(p, dp, mean):
    return (
        p[0] * (dp[0] - mean),
        p[1] * (dp[1] - mean),
        p[2] * (dp[2] - mean),
        p[3] * (dp[3] - mean),
    )


@cuda.jit(device=True)
def score_gradients(p, dp, D):
    return (
        score_gradient_row(p[0], dp[0], D[0]),
        score_gradient_row(p[1], dp[1], D[1]),
        score_gradient_row(p[2], dp[2], D[2]),
        score_gradient_row(p[3], dp[3], D[3]),
    )


@cuda.jit(device=True)
def add_row(x, at, o, f, exists, fresh):
    """x = or += f · (four neighbours)."""
    if exists:
        if fresh:
            store_row(x, at, o, f)
        else:
            x0, x1, x2, x3 = load4(x, at)
            store4(x, at, x0 + f * o[0], x1 + f * o[1], x2 + f * o[2], x3 + f * o[3])


@cuda.jit(device=True)
def add_rows(x, at, step, exist, o, f, fresh):
    """A patch times f onto rows `step` apart, as far as they exist."""
    add_row(x, at, o[0], f, exist > 0, fresh)
    add_row(x, at + step, o[1], f, exist > 1, fresh)
    add_row(x, at + 2 * step, o[2], f, exist > 2, fresh)
    add_row(x, at + 3 * step, o[3], f, exist > 3, fresh)


@cuda.jit(device=True)
def add_number(x, at, o, f, exists, fresh):
    if exists:
        x[at] = f * o if fresh else x[at] + f * o


@cuda.jit(device=True)
def add_column(x, at, step, exist, o, f, fresh):
    add_number(x, at, o[0], f, exist > 0, fresh)
    add_number(x, at + step, o[1], f, exist > 1, fresh)
    add_number(x, at + 2 * step, o[2], f, exist > 2, fresh)
    add_number(x, at + 3 * step, o[3], f, exist > 3, fresh)


@cuda.jit(device=True)
def fetch_row(logsumexp, D, start, exist, t):
    """Thread t's load of two numbers a query: the first 64 threads log₂e · L, the others D."""
    query = t % QUERIES
    if t < QUERIES:
        return LOG2_E * logsumexp[start + query] if query < exist else NOTHING
    return D[start + query] if query < exist else float32(0)


def shared_floats(HS):
    """Numbers in shared memory: k, v, q and dy; P and dS; L and D."""
    return 2 * (KEYS + QUERIES) * (HS + PAD) + 2 * QUERIES * SCORE_ROW + 2 * QUERIES


# The kernel's parts -------------------------------------------------------------------------------

HS = Constant()  # channels of a head
ROW = Constant(lambda HS: HS + PAD)
V = Constant(lambda ROW: KEYS * ROW)  # where the tiles start in shared memory; k's is the first
Q = Constant(lambda V, ROW: V + KEYS * ROW)
G = Constant(lambda Q, ROW: Q + QUERIES * ROW)  # dy
P = Constant(lambda G, ROW: G + QUERIES * ROW)
DS = Constant(lambda P: P + QUERIES * SCORE_ROW)
NUMBERS = Constant(lambda DS: DS + QUERIES * SCORE_ROW)  # L of each query, then D of each
# columns a turn of the loop over them: 8 if the registers suffice
STEP = Constant(lambda HS: 4 if HS == 32 else 8)
RIGHT = Constant(lambda HS: HS >= 64)  # a thread owns columns 32 + 4x … too
NINTH = Constant(lambda HS: HS == 72)  # and column 64 + x


class LevelBackwardPlace(NamedTuple):
    """A thread's: its first query in the tile, which is also its first position of a key; the key
    at that position (the next are 8 further on); its x; and where in shared memory are its first
    query, its first key, its rows of P and dS.
    """

    row: int
    key: int
    x: int
    q: int
    k: int
    p: int
    ds: int


@cuda.jit(device=True, forceinline=True)
def place_of(t):
    lane_y, lane_x = lane_place(t % WARP)
    row = int32(t // WARP * 16 + 4 * lane_y)
    key = int32(t // 64 * 32 + t // WARP % 2 * 4 + lane_y)
    return LevelBackwardPlace(
        row,
        key,
        lane_x,
        int32(Q + row * ROW),
        int32(lane_x * ROW),
        int32(P + row * SCORE_ROW),
        int32(DS + row * SCORE_ROW),
    )


@cuda.jit(device=True, forceinline=True)
def nothing_yet():
    """A thread's 4 × HS / 8 accumulators: columns 4x …, 32 + 4x … and 64 + x of four rows."""
    zero = float32(0)
    return zero_patch(), zero_patch(), (zero, zero, zero, zero)


@cuda.jit(device=True, forceinline=True)
def fetch_queries(qkv, dy, logsumexp, D, head, problem, query, t):
    """A tile of queries, from `query` on, starts loading into registers: q, dy, and one of their L
    and D."""
    exist = problem.T - query
    return (
        fetch_tile(qkv, head.start + query * problem.width, problem.width, exist, t, HS, THREADS),
        fetch_tile(dy, head.dy_start + query * head.dy_step, head.dy_step, exist, t, HS, THREADS),
        fetch_row(logsumexp, D, head.numbers_start + query, exist, t),
    )


@cuda.jit(device=True, forceinline=True)
def store_queries(shared, q_tile, dy_tile, number, t):
    """What `fetch_queries` has brought goes into shared memory."""
    one = float32(1)
    store_tile(shared, Q, q_tile, one, t, HS, THREADS)
    store_tile(shared, G, dy_tile, one, t, HS, THREADS)
    shared[uint32(NUMBERS + t)] = number


@cuda.jit(device=True, forceinline=True)
def store_keys(shared, qkv, head, problem, first_key, t):
    """A tile of keys, from `first_key` on, into shared memory: k and v."""
    one, exist = float32(1), problem.T - first_key
    at = head.start + problem.part + first_key * problem.width
    store_tile(
        shared, 0, fetch_tile(qkv, at, problem.width, exist, t, HS, THREADS), one, t, HS, THREADS
    )
    store_tile(
        shared,
        V,
        fetch_tile(qkv, at + problem.part, problem.width, exist, t, HS, THREADS),
        one,
        t,
        HS,
        THREADS,
    )


@cuda.jit(device=True, forceinline=True)
def product(shared, a_at, b_at):
    """4 × 8 of a product of two tiles, all HS columns of it: scores, or their gradients before the
    softmax's."""
    left, right = zero_patch(), zero_patch()
    for d in range(0, HS, STEP):
        left, right = add_dots(left, right, shared, int32(a_at + d), int32(b_at + d), ROW)
        if STEP > 4:
            left, right = add_dots(
                left, right, shared, int32(a_at + d + 4), int32(b_at + d + 4), ROW
            )
    return left, right


@cuda.jit(device=True, forceinline=True)
def store_scores(shared, me, c):
    """P and dS of 4 × 8: the thread's queries, keys x, x + 8 … of the tile's first 32 and of its
    last."""
    s, s_right = product(shared, me.q, me.k)
    dp, dp_right = product(shared, me.q + G - Q, me.k + V)
    L, mean = load4(shared, NUMBERS + me.row), load4(shared, NUMBERS + QUERIES + me.row)
    p, p_right = probabilities(s, c, L), probabilities(s_right, c, L)
    store_rows(shared, me.p + 4 * me.x, SCORE_ROW, p)
    store_rows(shared, me.p + 4 * me.x + 32, SCORE_ROW, p_right)
    store_rows(shared, me.ds + 4 * me.x, SCORE_ROW, score_gradients(p, dp, mean))
    store_rows(shared, me.ds + 4 * me.x + 32, SCORE_ROW, score_gradients(p_right, dp_right, mean))


@cuda.jit(device=True, forceinline=True)
def add_keys(dk, dv, shared, me):
    """dk and dv of the thread's 4 positions, plus what a tile of queries brings."""
    (dk, dk_right, dk_ninth), (dv, dv_right, dv_ninth) = dk, dv
    for i in range(0, QUERIES, 4):
        a_at = int32(P + i * SCORE_ROW + me.row)
        b_at = int32(G + i * ROW + 4 * me.x)
        p = transpose(load_rows(shared, a_at, SCORE_ROW))
        ds = transpose(load_rows(shared, a_at + DS - P, SCORE_ROW))
        dv = combine(dv, p, load_rows(shared, b_at, ROW))
        dk = combine(dk, ds, load_rows(shared, b_at + Q - G, ROW))
        if RIGHT:
            dv_right = combine(dv_right, p, load_rows(shared, b_at + 32, ROW))
            dk_right = combine(dk_right, ds, load_rows(shared, b_at + Q - G + 32, ROW))
        if NINTH:
            b_at = int32(b_at + 64 - 3 * me.x)
            dv_ninth = combine_column(dv_ninth, p, load_column(shared, b_at, ROW))
            dk_ninth = combine_column(dk_ninth, ds, load_column(shared, b_at + Q - G, ROW))
    return (dk, dk_right, dk_ninth), (dv, dv_right, dv_ninth)


@cuda.jit(device=True, forceinline=True)
def add_positions(o, shared, ds_at, lane_x, g):
    """dq of the thread's 4 queries, plus what four positions of the scores, 4g … 4g + 3, bring."""
    o, o_right, o_ninth = o
    k_at = int32(key_row(g) * ROW + 4 * lane_x)
    a = load_rows(shared, ds_at, SCORE_ROW)
    o = combine(o, a, load_rows(shared, k_at, 8 * ROW))
    if RIGHT:
        o_right = combine(o_right, a, load_rows(shared, k_at + 32, 8 * ROW))
    if NINTH:
        o_ninth = combine_column(o_ninth, a, load_column(shared, k_at + 64 - 3 * lane_x, 8 * ROW))
    return o, o_right, o_ninth


@cuda.jit(device=True, forceinline=True)
def sum_queries(shared, me):
    """dq of the thread's 4 queries, summed over the positions of a tile of keys."""
    o = nothing_yet()
    for g in range(0, KEYS // 4, 2):
        o = add_positions(o, shared, me.ds + 4 * g, me.x, g)
        o = add_positions(o, shared, me.ds + 4 * g + 4, me.x, g + 1)
    return o


@cuda.jit(device=True, forceinline=True)
def add_to(x, at, step, exist, o, f, fresh, lane_x):
    """x = or += f · o: the thread's columns of four rows, `step` apart, as far as they exist."""
    add_rows(x, at, step, exist, o[0], f, fresh)
    if RIGHT:
        add_rows(x, at + 32, step, exist, o[1], f, fresh)
    if NINTH:
        add_column(x, at + 64 - 3 * lane_x, step, exist, o[2], f, fresh)


# The kernel ---------------------------------------------------------------------------------------


def flash_attention_backward_kernel_v2(dy, qkv, logsumexp, D, dqkv, dq, problem):
    shared = cuda.shared.array(0, float32)
    t = int32(cuda.threadIdx.x)
    chunk, T, scale = cuda.blockIdx.x, problem.T, problem.scale
    head = head_of(problem, HS)
    dq_start = (
        chunk * cuda.gridDim.z + cuda.blockIdx.z
    ) * T * problem.dq_row + cuda.blockIdx.y * problem.dq_head
    me = place_of(t)
    q_next, dy_next, number_next = fetch_queries(qkv, dy, logsumexp, D, head, problem, int32(0), t)
    first_key = int32(chunk * problem.chunk_tiles * KEYS)
    end = int32(min(T, first_key + problem.chunk_tiles * KEYS))
    fresh = True  # the chunk's first tile of keys finds nothing to add to
    while first_key < end:
        cuda.syncthreads()  # the tiles of the round before are free
        store_keys(shared, qkv, head, problem, first_key, t)
        dk, dv = nothing_yet(), nothing_yet()
        first = int32(0)
        while first < T:
            cuda.syncthreads()
            store_queries(shared, q_next, dy_next, number_next, t)
            cuda.syncthreads()
            store_scores(shared, me, scale * LOG2_E)
            cuda.syncthreads()
            # the next queries start loading; after the last, the first, for the next tile of keys
            ahead = int32(first + QUERIES)
            query = int32(ahead if ahead < T else 0)
            q_next, dy_next, number_next = fetch_queries(
                qkv, dy, logsumexp, D, head, problem, query, t
            )
            dk, dv = add_keys(dk, dv, shared, me)
            at = dq_start + (first + me.row) * problem.dq_row + 4 * me.x
            exist = int32(T - first - me.row)
            add_to(dq, at, problem.dq_row, exist, sum_queries(shared, me), scale, fresh, me.x)
            first = ahead

        # of this thread's four keys, which are 8 apart
        exist = int32((T - first_key - me.key + 7) // 8)
        at = head.start + problem.part + (first_key + me.key) * problem.width + 4 * me.x
        add_to(dqkv, at, 8 * problem.width, exist, dk, scale, True, me.x)
        add_to(dqkv, at + problem.part, 8 * problem.width, exist, dv, float32(1), True, me.x)
        first_key = int32(first_key + KEYS)
        fresh = False


def make_backward(HS):
    """The kernel for one head size."""
    blocks = 3 if HS == 32 else 2  # on a multiprocessor: at most 168 registers a thread, or 255
    return specialise(flash_attention_backward_kernel_v2, launch_bounds=(THREADS, blocks), HS=HS)
