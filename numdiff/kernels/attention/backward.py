"""Flash attention backward, rung 2: one kernel for dq, dk and dv, five products instead of seven.

WHAT IS NEW, AND WHY IT PAYS
    Rung 1 computes P and dP twice, once for those who sum over keys and once for those who sum over queries. Here one
    block does both: it takes a tile of 64 keys through all queries, keeps the tile's dk and dv in registers, and adds
    the tile's share of dq to dq in memory. To do that without atomics, one block has a head's keys all to itself, or a
    fixed part of them, a tile after the other: then whoever adds to a number of dq is always the same thread.
    Where B · heads blocks are too few to fill a GPU, the keys of a head are cut into chunks, each with its own dq, and
    a second kernel adds the chunks' dq in order (as ../matmul/split_k.py does). There are at most 16 of them, so memory
    stays linear in T.
THE ROUND of a block, for 64 keys and 64 queries, a warp 16 queries
    S = q·kᵀ, P = 2^(S·log₂e/√HS − L·log₂e) and dP = dy·vᵀ, dS = P (dP − D): 4 × 8 each in a thread's registers
    P and dS go to shared memory; a barrier, for the next two sum over queries, and those are other warps'
    dv += Pᵀ·dy and dk += dSᵀ·q: rows are positions of keys (patches.py), a warp 16 of them, a thread 4 × HS / 8
    dq += dS·k: a warp's own 16 queries, a thread 4 × HS / 8
    Of each product 12 loads of 16 bytes feed 128 multiply-adds (HS 32: 8 feed 64, in the last three).
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files
    flash_attention_backward, 8×1024×512, 8×1024×1536, heads 8, float32
        v2     1,412 µs  30.4 TFLOP/s   45 % of arithmetic   4.87 × v1    91 % of PyTorch
LAUNCH
    grid (chunks, heads, B), 128 threads. Dynamic shared memory, KiB: k, v, q, dy, P, dS, L and D, for HS 32, 64, 72:
    70.5, 102.5, 110.5.
DETERMINISM
    as said: each number is summed by one thread in the order of the loops, and chunks are added in order. The number of
    chunks depends on the shape and on the GPU's multiprocessors.
SOURCE
    reference.py; the order of the loops: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithm 4.
READ NEXT
    fragments.py
"""
import math
from typing import NamedTuple

from ...device import cuda, float32, int32, load4, store4, uint32
from ...device.limits import FULL_MASK, WARP
from .forward import LOG2_E
from .patches import (
    KEYS,
    PAD,
    SCORE_ROW,
    combine,
    combine_column,
    compile_kernel,
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
SUM_LANES = 8  # threads that share a row in row_sums_kernel_v2
SUM_ROWS = THREADS // SUM_LANES
LARGEST_CHUNKS = 16


class Problem(NamedTuple):
    """qkv is (images, T, width); k of a head lies `part` after its q, and its v as far after that. dq of (chunk of
    keys, image, token, head) lies by tokens `dq_row` apart and heads `dq_head` apart; a chunk is so many tiles."""

    T: int
    width: int
    head_step: int
    part: int
    dq_row: int
    dq_head: int
    chunk_tiles: int
    scale: float


class Head(NamedTuple):
    """Where a block's head begins: its q in qkv, its dy, and its numbers of L and D."""

    start: int
    dy_start: int
    dy_step: int
    numbers_start: int


@cuda.jit(device=True, forceinline=True)
def head_of(problem, HS):
    head, image, heads = cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
    return Head(image * problem.T * problem.width + head * problem.head_step, (image * problem.T * heads + head) * HS,
                int32(heads * HS), (image * heads + head) * problem.T)


@cuda.jit
def row_sums_kernel_v2(dy, y, D, rows, T, heads, HS):
    """row_sums_kernel_v1 of simple.py with eight threads a row: they read 128 neighbouring bytes at a time."""
    row = cuda.blockIdx.x * SUM_ROWS + cuda.threadIdx.x // SUM_LANES
    lane = cuda.threadIdx.x % SUM_LANES
    total = float32(0)
    if row < rows:
        for d in range(4 * lane, HS, 4 * SUM_LANES):
            g0, g1, g2, g3 = load4(dy, row * HS + d)
            y0, y1, y2, y3 = load4(y, row * HS + d)
            total += (g0 * y0 + g1 * y1) + (g2 * y2 + g3 * y3)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 4)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 2)
    total += cuda.shfl_xor_sync(FULL_MASK, total, 1)
    if row < rows and lane == 0:
        token, head = row // heads, row % heads
        D[(token // T * heads + head) * T + token % T] = total


@cuda.jit(device=True)
def add_dots(left, right, shared, a_at, b_at, step):
    """Four columns' share of 4 × 8 dot products: of rows 0 … 3 with rows 0, 8 … and 32, 40 … from where one stands."""
    a = load_rows(shared, a_at, step)
    return (dots(left, a, load_rows(shared, b_at, 8 * step)),
            dots(right, a, load_rows(shared, b_at + 32 * step, 8 * step)))


@cuda.jit(device=True)
def probability_row(s, c, L):
    """2^(c·s − L). It is at most 1, but for rounding, and for keys that do not exist, which have to stay finite."""
    zero = float32(0)
    return (math.exp2(min(c * s[0] - L, zero)), math.exp2(min(c * s[1] - L, zero)),
            math.exp2(min(c * s[2] - L, zero)), math.exp2(min(c * s[3] - L, zero)))


@cuda.jit(device=True)
def probabilities(s, c, L):
    return (probability_row(s[0], c, L[0]), probability_row(s[1], c, L[1]), probability_row(s[2], c, L[2]),
            probability_row(s[3], c, L[3]))


@cuda.jit(device=True)
def score_gradient_row(p, dp, mean):
    return p[0] * (dp[0] - mean), p[1] * (dp[1] - mean), p[2] * (dp[2] - mean), p[3] * (dp[3] - mean)


@cuda.jit(device=True)
def score_gradients(p, dp, D):
    return (score_gradient_row(p[0], dp[0], D[0]), score_gradient_row(p[1], dp[1], D[1]),
            score_gradient_row(p[2], dp[2], D[2]), score_gradient_row(p[3], dp[3], D[3]))


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
    """What thread t fetches of two numbers a query: the first 64 threads log₂e · L, the others D."""
    query = t % QUERIES
    if t < QUERIES:
        return LOG2_E * logsumexp[start + query] if query < exist else NOTHING
    return D[start + query] if query < exist else float32(0)


@cuda.jit(device=True)
def product(shared, a_at, b_at, HS, STEP):
    """4 × 8 of a product of two tiles, all HS columns of it: scores, or their gradients before the softmax's."""
    ROW = HS + PAD
    left, right = zero_patch(), zero_patch()
    for d in range(0, HS, STEP):
        left, right = add_dots(left, right, shared, int32(a_at + d), int32(b_at + d), ROW)
        if STEP > 4:
            left, right = add_dots(left, right, shared, int32(a_at + d + 4), int32(b_at + d + 4), ROW)
    return left, right


@cuda.jit(device=True)
def add_dq(o, o_right, o_ninth, shared, ds_at, lane_x, g, HS):
    """What four positions of the scores, 4g … 4g + 3, give to a thread's 4 × HS / 8 numbers of dq."""
    ROW = HS + PAD
    k_at = int32(key_row(g) * ROW + 4 * lane_x)
    a = load_rows(shared, ds_at, SCORE_ROW)
    o = combine(o, a, load_rows(shared, k_at, 8 * ROW))
    if HS >= 64:
        o_right = combine(o_right, a, load_rows(shared, k_at + 32, 8 * ROW))
    if HS == 72:
        o_ninth = combine_column(o_ninth, a, load_column(shared, k_at + 64 - 3 * lane_x, 8 * ROW))
    return o, o_right, o_ninth


def shared_floats(HS):
    """Numbers in shared memory: k, v, q and dy; P and dS; L and D."""
    return 2 * (KEYS + QUERIES) * (HS + PAD) + 2 * QUERIES * SCORE_ROW + 2 * QUERIES


def make_backward(HS):
    """The kernel for one head size; what depends on it is constant in it."""
    ROW = HS + PAD
    V = KEYS * ROW  # where the tiles start in shared memory; k's is the first
    Q = V + KEYS * ROW
    G = Q + QUERIES * ROW
    P = G + QUERIES * ROW
    DS = P + QUERIES * SCORE_ROW
    ROWS = DS + QUERIES * SCORE_ROW  # L of each query, then D of each
    BLOCKS = 3 if HS == 32 else 2  # on a multiprocessor: at most 168, or 255, registers a thread
    STEP = 4 if HS == 32 else 8  # columns a turn of the loop over them: with 8 the registers would not suffice
    RIGHT = HS >= 64  # a thread owns columns 32 + 4x … too
    NINTH = HS == 72  # and column 64 + x

    def kernel(dy, qkv, logsumexp, D, dqkv, dq, problem):
        T, width, head_step, part, dq_row, dq_head, chunk_tiles, scale = problem
        shared = cuda.shared.array(0, float32)
        t = int32(cuda.threadIdx.x)
        chunk, head, image = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        start, dy_start, dy_step, rows_start = head_of(problem, HS)
        dq_start = (chunk * cuda.gridDim.z + image) * T * dq_row + head * dq_head
        one, zero = float32(1), float32(0)

        lane_y, lane_x = lane_place(t % WARP)
        row = int32(t // WARP * 16 + 4 * lane_y)  # this thread's first query, and its first position of a key
        key = int32(t // 64 * 32 + t // WARP % 2 * 4 + lane_y)  # the key at that position; the next are 8 further on
        q_at, k_at = int32(Q + row * ROW), int32(lane_x * ROW)
        p_at, ds_at = int32(P + row * SCORE_ROW), int32(DS + row * SCORE_ROW)
        zero4 = (zero, zero, zero, zero)
        q_next = fetch_tile(qkv, start, width, T, t, HS, THREADS)
        g_next = fetch_tile(dy, dy_start, dy_step, T, t, HS, THREADS)
        row_next = fetch_row(logsumexp, D, rows_start, T, t)
        first_key = int32(chunk * chunk_tiles * KEYS)
        end = int32(min(T, first_key + chunk_tiles * KEYS))
        fresh = True  # the chunk's first tile of keys finds nothing to add to
        while first_key < end:
            cuda.syncthreads()  # nobody needs the tiles of the round before
            at = start + part + first_key * width
            store_tile(shared, 0, fetch_tile(qkv, at, width, T - first_key, t, HS, THREADS), one, t, HS, THREADS)
            store_tile(shared, V, fetch_tile(qkv, at + part, width, T - first_key, t, HS, THREADS), one, t, HS, THREADS)
            dk, dk_right, dk_ninth = zero_patch(), zero_patch(), zero4
            dv, dv_right, dv_ninth = zero_patch(), zero_patch(), zero4
            first = int32(0)
            while first < T:
                cuda.syncthreads()
                store_tile(shared, Q, q_next, one, t, HS, THREADS)
                store_tile(shared, G, g_next, one, t, HS, THREADS)
                shared[uint32(ROWS + t)] = row_next
                cuda.syncthreads()

                # P and dS of 4 × 8: queries row …, keys x, x + 8 … of the tile's first 32 and of its last
                s, s_right = product(shared, q_at, k_at, HS, STEP)
                dp, dp_right = product(shared, q_at + G - Q, k_at + V, HS, STEP)
                L, mean = load4(shared, ROWS + row), load4(shared, ROWS + QUERIES + row)
                s, s_right = probabilities(s, scale * LOG2_E, L), probabilities(s_right, scale * LOG2_E, L)
                store_rows(shared, p_at + 4 * lane_x, SCORE_ROW, s)
                store_rows(shared, p_at + 4 * lane_x + 32, SCORE_ROW, s_right)
                store_rows(shared, ds_at + 4 * lane_x, SCORE_ROW, score_gradients(s, dp, mean))
                store_rows(shared, ds_at + 4 * lane_x + 32, SCORE_ROW, score_gradients(s_right, dp_right, mean))
                cuda.syncthreads()

                # the next queries start on their way; after the last, the first, for the next tile of keys
                query = int32(first + QUERIES if first + QUERIES < T else 0)
                q_next = fetch_tile(qkv, start + query * width, width, T - query, t, HS, THREADS)
                g_next = fetch_tile(dy, dy_start + query * dy_step, dy_step, T - query, t, HS, THREADS)
                row_next = fetch_row(logsumexp, D, rows_start + query, T - query, t)

                # dv and dk of 4 positions, summed over queries
                for i in range(0, QUERIES, 4):
                    a_at = int32(P + i * SCORE_ROW + row)
                    b_at = int32(G + i * ROW + 4 * lane_x)
                    p = transpose(load_rows(shared, a_at, SCORE_ROW))
                    ds = transpose(load_rows(shared, a_at + DS - P, SCORE_ROW))
                    dv = combine(dv, p, load_rows(shared, b_at, ROW))
                    dk = combine(dk, ds, load_rows(shared, b_at + Q - G, ROW))
                    if RIGHT:
                        dv_right = combine(dv_right, p, load_rows(shared, b_at + 32, ROW))
                        dk_right = combine(dk_right, ds, load_rows(shared, b_at + Q - G + 32, ROW))
                    if NINTH:
                        b_at = int32(b_at + 64 - 3 * lane_x)
                        dv_ninth = combine_column(dv_ninth, p, load_column(shared, b_at, ROW))
                        dk_ninth = combine_column(dk_ninth, ds, load_column(shared, b_at + Q - G, ROW))

                # dq of 4 queries, summed over positions
                o, o_right, o_ninth = zero_patch(), zero_patch(), zero4
                for g in range(0, KEYS // 4, 2):
                    o, o_right, o_ninth = add_dq(o, o_right, o_ninth, shared, ds_at + 4 * g, lane_x, g, HS)
                    o, o_right, o_ninth = add_dq(o, o_right, o_ninth, shared, ds_at + 4 * g + 4, lane_x, g + 1, HS)
                exist = int32(T - first - row)
                at = dq_start + (first + row) * dq_row + 4 * lane_x
                add_rows(dq, at, dq_row, exist, o, scale, fresh)
                if RIGHT:
                    add_rows(dq, at + 32, dq_row, exist, o_right, scale, fresh)
                if NINTH:
                    add_column(dq, at + 64 - 3 * lane_x, dq_row, exist, o_ninth, scale, fresh)
                first = int32(first + QUERIES)

            exist = int32((T - first_key - key + 7) // 8)  # of this thread's four keys, which are 8 apart
            at = start + (first_key + key) * width + 4 * lane_x
            add_rows(dqkv, at + part, 8 * width, exist, dk, scale, True)
            add_rows(dqkv, at + 2 * part, 8 * width, exist, dv, one, True)
            if RIGHT:
                add_rows(dqkv, at + part + 32, 8 * width, exist, dk_right, scale, True)
                add_rows(dqkv, at + 2 * part + 32, 8 * width, exist, dv_right, one, True)
            if NINTH:
                at += 64 - 3 * lane_x
                add_column(dqkv, at + part, 8 * width, exist, dk_ninth, scale, True)
                add_column(dqkv, at + 2 * part, 8 * width, exist, dv_ninth, one, True)
            first_key = int32(first_key + KEYS)
            fresh = False

    kernel.__name__ = f"flash_attention_backward_kernel_v2_{HS}"
    return compile_kernel(kernel, THREADS, BLOCKS)


@cuda.jit
def add_chunks_kernel(partial, dqkv, count, chunks, width, head_step, heads, HS):
    """dq of dqkv = the sum over chunks of partial (chunks, B, T, heads, HS); a thread has four of B·T·C = count."""
    i = cuda.grid(1) * 4
    if i < count:
        a, b, c, d = load4(partial, i)
        for chunk in range(1, chunks):
            a1, b1, c1, d1 = load4(partial, chunk * count + i)
            a, b, c, d = a + a1, b + b1, c + c1, d + d1
        row, column = i // (heads * HS), i % (heads * HS)
        store4(dqkv, row * width + column // HS * head_step + column % HS, a, b, c, d)
