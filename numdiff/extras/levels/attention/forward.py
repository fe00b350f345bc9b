"""Flash attention forward, rung 2: 64 scores and 64 outputs in each thread's registers.

WHAT IS NEW, AND WHY IT PAYS
    A warp owns 32 queries, a thread 8 of them (4y … 4y+3 and 16+4y …). Of a tile of 64 keys the
    thread computes 8 × 8 scores, of the outputs 8 × 4, 8 × 8 or 8 × 9 (patches.py). 16 loads of 16
    bytes feed 256 multiply-adds (HS 32: 12 feed 128, in the outputs), where rung 1 needs two loads
    for each.
    The online softmax is done once a tile, not once a key: the maximum of a row's 64 scores is
    found by its 8 threads (8 scores each, then three shuffles), then one correction of l and o,
    then 64 exponentials. Each thread sums its own share of l to the end, and only then the 8 shares
    are added: a correction is the same for all of them.
    The next tiles of k and v are in flight from memory, into registers, while the outputs are
    computed.
    Exponentials are powers of two, which the hardware has: q is multiplied by log₂e / √HS as it is
    loaded.
    Scores reach the second product through shared memory, but only threads of one warp share them:
    no barrier.
LAUNCH
    grid (ceil(T / queries), heads, B); a block is 4 warps for 128 queries, or 2 for 64, if those
    fit T better. Dynamic shared memory, KiB: q, k, v and scores, for HS 32, 64, 72: 70, 102, 110 (4
    warps) and 44, 68, 74.5 (2 warps).
DETERMINISM
    which thread adds which products, and in which order, depends on T and HS alone.
SOURCE
    kernels/attention/reference.py; the order of the loops, queries outside: Dao 2023, "FlashAttention-2",
    arXiv:2307.08691, algorithm 1.
READ NEXT
    backward.py
"""

import math
from typing import NamedTuple

from ....device import cuda, float32, int32
from ....device.limits import FULL_MASK, WARP
from ....device.specialise import Constant, specialise
from ....kernels.attention.heads import LN_2, LOG2_E, LOWEST
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
    multiply_fours,
    scale_rows,
    store_row,
    store_rows,
    store_tile,
    zero_patch,
)

WARP_QUERIES = 32


@cuda.jit(device=True)
def add_scores(scores, shared, q_at, k_at, step):
    """Four columns' share of 8 × 8 scores: queries 0 … 3 and 16 …, keys 0, 8 … and 32, 40 … from
    where one stands."""
    s, s_right, s_16, s_16_right = scores
    a = load_rows(shared, q_at, step)
    a_16 = load_rows(shared, q_at + 16 * step, step)
    b = load_rows(shared, k_at, 8 * step)
    b_right = load_rows(shared, k_at + 32 * step, 8 * step)
    return (
        dots(s, a, b),
        dots(s_right, a, b_right),
        dots(s_16, a_16, b),
        dots(s_16_right, a_16, b_right),
    )


@cuda.jit(device=True)
def hide_row(s, exist):
    return (
        s[0] if exist > 0 else LOWEST,
        s[1] if exist > 8 else LOWEST,
        s[2] if exist > 16 else LOWEST,
        s[3] if exist > 24 else LOWEST,
    )


@cuda.jit(device=True)
def hide(s, exist):
    """Scores of keys that do not exist become so low that nothing is left of them: the patch's keys
    are 8 apart."""
    return (
        hide_row(s[0], exist),
        hide_row(s[1], exist),
        hide_row(s[2], exist),
        hide_row(s[3], exist),
    )


@cuda.jit(device=True)
def largest_of_row(m, left, right):
    """The largest of m and a row's scores in all eight threads that share the row: those whose
    lanes differ in bits 1, 2 and 3."""
    m = max(
        max(m, max(max(left[0], left[1]), max(left[2], left[3]))),
        max(max(right[0], right[1]), max(right[2], right[3])),
    )
    m = max(m, cuda.shfl_xor_sync(FULL_MASK, m, 2))
    m = max(m, cuda.shfl_xor_sync(FULL_MASK, m, 4))
    return max(m, cuda.shfl_xor_sync(FULL_MASK, m, 8))


@cuda.jit(device=True)
def largest(m, left, right):
    return (
        largest_of_row(m[0], left[0], right[0]),
        largest_of_row(m[1], left[1], right[1]),
        largest_of_row(m[2], left[2], right[2]),
        largest_of_row(m[3], left[3], right[3]),
    )


@cuda.jit(device=True)
def power(s, m):
    return math.exp2(s[0] - m), math.exp2(s[1] - m), math.exp2(s[2] - m), math.exp2(s[3] - m)


@cuda.jit(device=True)
def powers(s, m):
    """2^(s − m), row by row."""
    return power(s[0], m[0]), power(s[1], m[1]), power(s[2], m[2]), power(s[3], m[3])


@cuda.jit(device=True)
def shrinkage(old, new):
    """The factor for everything measured against the old maxima."""
    return (
        math.exp2(old[0] - new[0]),
        math.exp2(old[1] - new[1]),
        math.exp2(old[2] - new[2]),
        math.exp2(old[3] - new[3]),
    )


@cuda.jit(device=True)
def sum_of_row(l, left, right):
    return (
        l
        + ((left[0] + left[1]) + (left[2] + left[3]))
        + ((right[0] + right[1]) + (right[2] + right[3]))
    )


@cuda.jit(device=True)
def sums(l, left, right):
    return (
        sum_of_row(l[0], left[0], right[0]),
        sum_of_row(l[1], left[1], right[1]),
        sum_of_row(l[2], left[2], right[2]),
        sum_of_row(l[3], left[3], right[3]),
    )


@cuda.jit(device=True)
def total_of_row(l):
    l += cuda.shfl_xor_sync(FULL_MASK, l, 2)
    l += cuda.shfl_xor_sync(FULL_MASK, l, 4)
    return l + cuda.shfl_xor_sync(FULL_MASK, l, 8)


@cuda.jit(device=True)
def totals(l):
    return total_of_row(l[0]), total_of_row(l[1]), total_of_row(l[2]), total_of_row(l[3])


@cuda.jit(device=True)
def inverses(l):
    one = float32(1)
    return one / l[0], one / l[1], one / l[2], one / l[3]


@cuda.jit(device=True)
def write_rows(y, at, step, exist, o, f):
    """A patch's rows, times f, to y[at], y[at + step] …, as far as they exist."""
    if exist > 0:
        store_row(y, at, o[0], f[0])
    if exist > 1:
        store_row(y, at + step, o[1], f[1])
    if exist > 2:
        store_row(y, at + 2 * step, o[2], f[2])
    if exist > 3:
        store_row(y, at + 3 * step, o[3], f[3])


@cuda.jit(device=True)
def write_column(y, at, step, exist, o):
    """One number a row: logsumexp, or the ninth column."""
    if exist > 0:
        y[at] = o[0]
    if exist > 1:
        y[at + step] = o[1]
    if exist > 2:
        y[at + 2 * step] = o[2]
    if exist > 3:
        y[at + 3 * step] = o[3]


@cuda.jit(device=True)
def write_logsumexp(logsumexp, at, exist, m, l):
    write_column(
        logsumexp,
        at,
        1,
        exist,
        (
            LN_2 * (m[0] + math.log2(l[0])),
            LN_2 * (m[1] + math.log2(l[1])),
            LN_2 * (m[2] + math.log2(l[2])),
            LN_2 * (m[3] + math.log2(l[3])),
        ),
    )


# The kernel's parts -------------------------------------------------------------------------------

HS = Constant()  # channels of a head
WARPS = Constant()  # of a block: 4 or 2
THREADS = Constant(lambda WARPS: WARP * WARPS)
QUERIES = Constant(lambda WARPS: WARP_QUERIES * WARPS)
ROW = Constant(lambda HS: HS + PAD)
# where the tiles start in shared memory; q's is the first
K = Constant(lambda QUERIES, ROW: QUERIES * ROW)
V = Constant(lambda K, ROW: K + KEYS * ROW)
P = Constant(lambda V, ROW: V + KEYS * ROW)
# columns a turn of the loop over them: 8 if the registers suffice
STEP = Constant(lambda HS: 4 if HS == 32 else 8)
RIGHT = Constant(lambda HS: HS >= 64)  # a thread owns columns 32 + 4x … too
NINTH = Constant(lambda HS: HS == 72)  # and column 64 + x
# tiles are fetched a round ahead; 64 threads lack the registers for that
EARLY = Constant(lambda WARPS: WARPS == 4)


class LevelForwardPlace(NamedTuple):
    """A thread's: its first query in the tile (the fifth: row + 16), its x, and where in shared
    memory are its first query, its first key, its first columns of v, and its row of scores."""

    row: int
    x: int
    q: int
    k: int
    v: int
    p: int


@cuda.jit(device=True, forceinline=True)
def place_of(t):
    lane_y, lane_x = lane_place(t % WARP)
    row = int32(t // WARP * WARP_QUERIES + 4 * lane_y)
    return LevelForwardPlace(
        row,
        lane_x,
        int32(row * ROW),
        int32(K + lane_x * ROW),
        int32(V + 4 * lane_x),
        int32(P + row * SCORE_ROW),
    )


@cuda.jit(device=True, forceinline=True)
def store_queries(shared, qkv, start, width, scale, first_query, T, t):
    """q, times scale, into shared memory, for as long as the block lives."""
    for tile in range(QUERIES // KEYS):
        query = int32(first_query + tile * KEYS)
        q_tile = fetch_tile(qkv, start + query * width, width, T - query, t, HS, THREADS)
        store_tile(shared, tile * KEYS * ROW, q_tile, scale * LOG2_E, t, HS, THREADS)


@cuda.jit(device=True, forceinline=True)
def scores_of(shared, me, first, T):
    """8 × 8 scores: rows `row` and `row + 16`, keys x, x + 8 … of the tile's first 32, and of its
    last. The tile begins with key `first`; scores of keys from T on are hidden."""
    scores = zero_patch(), zero_patch(), zero_patch(), zero_patch()
    for d in range(0, HS, STEP):
        d = int32(d)
        scores = add_scores(scores, shared, me.q + d, me.k + d, ROW)
        if STEP > 4:
            scores = add_scores(scores, shared, me.q + d + 4, me.k + d + 4, ROW)
    s, s_right, s_16, s_16_right = scores
    if first + KEYS > T:
        exist = int32(T - first - me.x)
        s, s_16 = hide(s, exist), hide(s_16, exist)
        s_right, s_16_right = hide(s_right, exist - 32), hide(s_16_right, exist - 32)
    return s, s_right, s_16, s_16_right


@cuda.jit(device=True, forceinline=True)
def online_softmax(m, m_16, l, l_16, scores):
    """(maxima, the thread's share of their sums, 2^(scores − maxima), what the outputs so far are
    multiplied by)."""
    s, s_right, s_16, s_16_right = scores
    higher, higher_16 = largest(m, s, s_right), largest(m_16, s_16, s_16_right)
    shrink, shrink_16 = shrinkage(m, higher), shrinkage(m_16, higher_16)
    s, s_right = powers(s, higher), powers(s_right, higher)
    s_16, s_16_right = powers(s_16, higher_16), powers(s_16_right, higher_16)
    l = sums(multiply_fours(l, shrink), s, s_right)
    l_16 = sums(multiply_fours(l_16, shrink_16), s_16, s_16_right)
    return (higher, higher_16), (l, l_16), (s, s_right, s_16, s_16_right), (shrink, shrink_16)


@cuda.jit(device=True, forceinline=True)
def store_scores(shared, me, scores):
    s, s_right, s_16, s_16_right = scores
    at = me.p + 4 * me.x
    store_rows(shared, at, SCORE_ROW, s)
    store_rows(shared, at + 32, SCORE_ROW, s_right)
    store_rows(shared, at + 16 * SCORE_ROW, SCORE_ROW, s_16)
    store_rows(shared, at + 16 * SCORE_ROW + 32, SCORE_ROW, s_16_right)


@cuda.jit(device=True, forceinline=True)
def shrink_outputs(outputs, shrink, shrink_16):
    o, o_right, ninth, o_16, o_16_right, ninth_16 = outputs
    o, o_16 = scale_rows(o, shrink), scale_rows(o_16, shrink_16)
    if RIGHT:
        o_right, o_16_right = scale_rows(o_right, shrink), scale_rows(o_16_right, shrink_16)
    if NINTH:
        ninth, ninth_16 = multiply_fours(ninth, shrink), multiply_fours(ninth_16, shrink_16)
    return o, o_right, ninth, o_16, o_16_right, ninth_16


@cuda.jit(device=True)
def add_outputs(outputs, shared, p_at, v_at, lane_x, g):
    """Add the products of four positions of the scores, 4g … 4g + 3, to a thread's 8 × HS / 8
    outputs."""
    o, o_right, ninth, o_16, o_16_right, ninth_16 = outputs
    v_at = int32(v_at + key_row(g) * ROW)
    a = load_rows(shared, p_at, SCORE_ROW)
    a_16 = load_rows(shared, p_at + 16 * SCORE_ROW, SCORE_ROW)
    b = load_rows(shared, v_at, 8 * ROW)
    o, o_16 = combine(o, a, b), combine(o_16, a_16, b)
    if RIGHT:
        b = load_rows(shared, v_at + 32, 8 * ROW)
        o_right, o_16_right = combine(o_right, a, b), combine(o_16_right, a_16, b)
    if NINTH:
        b_ninth = load_column(shared, v_at + 64 - 3 * lane_x, 8 * ROW)
        ninth, ninth_16 = combine_column(ninth, a, b_ninth), combine_column(ninth_16, a_16, b_ninth)
    return o, o_right, ninth, o_16, o_16_right, ninth_16


@cuda.jit(device=True, forceinline=True)
def add_values(outputs, shared, me):
    """Add a tile of keys to a thread's 8 × HS / 8 outputs, from the scores in shared memory."""
    for g in range(0, KEYS // 4, 2):
        outputs = add_outputs(outputs, shared, me.p + 4 * g, me.v, me.x, g)
        outputs = add_outputs(outputs, shared, me.p + 4 * g + 4, me.v, me.x, g + 1)
    return outputs


@cuda.jit(device=True, forceinline=True)
def write_outputs(y, at, step, exist, outputs, f, f_16, lane_x):
    """Outputs, their rows times f and f_16, to rows of y that are `step` apart, as far as they
    exist."""
    o, o_right, ninth, o_16, o_16_right, ninth_16 = outputs
    write_rows(y, at, step, exist, o, f)
    write_rows(y, at + 16 * step, step, exist - 16, o_16, f_16)
    if RIGHT:
        write_rows(y, at + 32, step, exist, o_right, f)
        write_rows(y, at + 16 * step + 32, step, exist - 16, o_16_right, f_16)
    if NINTH:
        at += 64 - 3 * lane_x
        write_column(y, at, step, exist, multiply_fours(ninth, f))
        write_column(y, at + 16 * step, step, exist - 16, multiply_fours(ninth_16, f_16))


# The kernel ---------------------------------------------------------------------------------------


def flash_attention_forward_kernel_v2(qkv, y, logsumexp, T, width, head_step, part, scale):
    shared = cuda.shared.array(0, float32)
    t = int32(cuda.threadIdx.x)
    head, image, heads = cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
    first_query = int32(cuda.blockIdx.x * QUERIES)
    start = image * T * width + head * head_step  # of the head's q; its k is `part` further on
    one = float32(1)
    store_queries(shared, qkv, start, width, scale, first_query, T, t)

    me = place_of(t)
    low, zero = (LOWEST, LOWEST, LOWEST, LOWEST), (float32(0), float32(0), float32(0), float32(0))
    m, m_16, l, l_16 = low, low, zero, zero
    outputs = zero_patch(), zero_patch(), zero, zero_patch(), zero_patch(), zero
    if EARLY:
        k_next = fetch_tile(qkv, start + part, width, T, t, HS, THREADS)
        v_next = fetch_tile(qkv, start + 2 * part, width, T, t, HS, THREADS)
    first = int32(0)
    while first < T:
        cuda.syncthreads()  # the tiles of the round before are free
        if EARLY:
            store_tile(shared, K, k_next, one, t, HS, THREADS)
            store_tile(shared, V, v_next, one, t, HS, THREADS)
        else:
            at = start + part + first * width
            store_tile(
                shared,
                K,
                fetch_tile(qkv, at, width, T - first, t, HS, THREADS),
                one,
                t,
                HS,
                THREADS,
            )
            store_tile(
                shared,
                V,
                fetch_tile(qkv, at + part, width, T - first, t, HS, THREADS),
                one,
                t,
                HS,
                THREADS,
            )
        cuda.syncthreads()
        scores = scores_of(shared, me, first, T)
        (m, m_16), (l, l_16), scores, (shrink, shrink_16) = online_softmax(m, m_16, l, l_16, scores)
        store_scores(shared, me, scores)
        outputs = shrink_outputs(outputs, shrink, shrink_16)
        cuda.syncwarp()
        first = int32(first + KEYS)
        if EARLY:  # the next tiles, zeros after the last, start loading
            at = start + part + first * width
            k_next = fetch_tile(qkv, at, width, T - first, t, HS, THREADS)
            v_next = fetch_tile(qkv, at + part, width, T - first, t, HS, THREADS)
        outputs = add_values(outputs, shared, me)

    l, l_16 = totals(l), totals(l_16)
    exist = int32(T - first_query - me.row)
    query = first_query + me.row
    if me.x == 0:
        at = (image * heads + head) * T + query
        write_logsumexp(logsumexp, at, exist, m, l)
        write_logsumexp(logsumexp, at + 16, exist - 16, m_16, l_16)
    l, l_16 = inverses(l), inverses(l_16)
    step = heads * HS
    write_outputs(
        y, (image * T + query) * step + head * HS + 4 * me.x, step, exist, outputs, l, l_16, me.x
    )


def shared_floats(HS, warps):
    """Numbers in shared memory: q, k, v, scores."""
    queries = WARP_QUERIES * warps
    return (queries + 2 * KEYS) * (HS + PAD) + queries * SCORE_ROW


def make_forward(HS, warps):
    """The kernel for one head size and 32 · warps queries a block."""
    # on a multiprocessor: at most 168, or 255, registers a thread
    blocks = (3 if HS == 32 else 2) * 4 // warps
    return specialise(
        flash_attention_forward_kernel_v2, launch_bounds=(WARP * warps, blocks), HS=HS, WARPS=warps
    )
