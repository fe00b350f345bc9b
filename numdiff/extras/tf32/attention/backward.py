"""Flash attention backward, rung 4: float32, all five products on the tensor cores, two mma for
one.

WHAT IS NEW, AND WHY IT PAYS
    kernels/attention/backward_half.py with the products of products.py. A warp has 16 keys, a block 64, and queries
    pass by in tiles of 32, so that S and dP of a tile are 16 numbers each in a lane. As in
    extras/levels/attention/backward.py, each block adds its share of dq to dq in memory, or to its
    chunk's, always the same thread to the same number.
    One warp alone keeps the tensor cores busy for less than half of its time: the rest goes into
    splitting numbers, barriers and waiting. So a multiprocessor gets three small blocks (four for
    HS 32), which are seldom at the same point. That takes at most 168 registers (128) and one stage
    of q and dy: the next tile travels while dq is computed, and so does the dq that is added to.
    dS goes to shared memory by rows of queries, as ldmatrix needs it, with keys 2x and 2x + 1 of
    each eight in columns x and x + 4, the order in which k is read (products.py).
    k and v are split again for every tile: their fragments would take all registers.
LAUNCH
    grid (chunks, heads, B), 4 warps. Dynamic shared memory, KiB: k and v; q, dy, L and D; dS: for
    HS 32, 64, 72: 36, 60, 66.
DETERMINISM
    as kernels/attention/backward_half.py.
SOURCE
    products.py; kernels/attention/reference.py; the loops' order: Dao et al. 2022, "FlashAttention",
    arXiv:2205.14135, algorithm 4.
READ NEXT
    kernels/attention/launcher.py
"""

from typing import NamedTuple

from ....device import cuda, float32, int32, int64, load4
from ....device.async_copy import cp_async_4_zfill, cp_async_commit, cp_async_wait, shared_address
from ....device.limits import WARP
from ....device.requires import requires
from ....device.specialise import Constant, specialise
from ....device.tensor_core import load_words4, store_word, word_of
from ....kernels.attention.backward_half import NUMBERS, probabilities, score_gradients
from ....kernels.attention.fragments import (
    CHUNK,
    by_chunk,
    by_row,
    clear,
    four_neighbours,
    write_four,
)
from ....kernels.attention.heads import LOG2_E, head_of
from .products import (
    add_accumulators,
    add_products,
    fetch_rows,
    lane_place,
    left_of_accumulators,
    load_left,
    multiply_rows,
    opaque_thread,
    pitch_of,
    write_rows,
)

WARPS = 4
THREADS = WARP * WARPS
ROWS = 16  # keys of a warp
KEYS = ROWS * WARPS
QUERIES = 32  # of a tile
N = QUERIES // 8  # fragments of a tile's queries side by side
DS_PITCH = 4 * KEYS + CHUNK  # bytes of a query's dS: an odd number of chunks
PARTS = WARPS // 2  # of dq's columns: two warps have 16 queries each, of the tile's 32


@cuda.jit(device=True, forceinline=True)
def fetch_numbers(tile, logsumexp, D, start, exist, t):
    """Start the copies of L and D of a tile's queries, as in backward_half.py."""
    query = int32(t // 2)
    size = int32(4) if query < exist else int32(0)
    if t < 2 * QUERIES:
        if t % 2:
            cp_async_4_zfill(tile + t * 4, D, start + query, size)
        else:
            cp_async_4_zfill(tile + t * 4, logsumexp, start + query, size)


def shared_bytes(HS):
    return 2 * KEYS * pitch_of(HS) + QUERIES * (2 * pitch_of(HS) + NUMBERS + DS_PITCH)


# The kernel's parts -------------------------------------------------------------------------------

HS = Constant()  # channels of a head
PITCH = Constant(lambda HS: pitch_of(HS))
C = Constant(lambda HS: HS // 8)  # fragments of a head's columns
TOTALS, SCORES = Constant(lambda C: C * 4), N * 4  # numbers in a lane: of dk, or dv; of S, or dP
V = Constant(lambda PITCH: KEYS * PITCH)  # bytes from the start of shared memory, where k is
Q = Constant(lambda V: 2 * V)
G = Constant(lambda Q, PITCH: Q + QUERIES * PITCH)  # dy
ROW_NUMBERS = Constant(lambda G, PITCH: G + QUERIES * PITCH)
DS = Constant(lambda ROW_NUMBERS: ROW_NUMBERS + QUERIES * NUMBERS)
COLUMNS = Constant(lambda C: C // PARTS)  # fragments of dq in a warp
NINTH = Constant(lambda HS: HS == 72)  # the last warps have one more
DQ = Constant(lambda COLUMNS, NINTH: COLUMNS * 4 + (4 if NINTH else 0))


class Tf32AttentionRegisters(NamedTuple):
    """A lane's: S, then P, and dP, then dS, of a tile of queries; dk, dv; what a tile adds to dv,
    dk, and then dq; and the dq that it is added to."""

    s: object
    ds: object
    dk: object
    dv: object
    tile: object
    old: object


@cuda.jit(device=True, forceinline=True)
def fetch_keys(k_tile, qkv, head, problem, first_key, t):
    """Start the copies of a tile of keys, from `first_key` on: k and v."""
    exist, at = int32(problem.T - first_key), head.start + problem.part + first_key * problem.width
    fetch_rows(k_tile, PITCH, qkv, at, problem.width, exist, KEYS, HS, t, THREADS)
    fetch_rows(
        k_tile + V, PITCH, qkv, at + problem.part, problem.width, exist, KEYS, HS, t, THREADS
    )


@cuda.jit(device=True, forceinline=True)
def fetch_queries(k_tile, qkv, dy, logsumexp, D, head, problem, first, t):
    """Start the copies of a tile of queries, from `first` on: q, dy, then L and D."""
    exist = problem.T - first
    fetch_rows(
        k_tile + Q,
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
        k_tile + G,
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
    fetch_numbers(k_tile + ROW_NUMBERS, logsumexp, D, head.numbers_start + first, exist, t)
    cp_async_commit()


@cuda.jit(device=True, forceinline=True)
def multiply_tiles(s, keys, queries, t):
    """s = the warp's rows of a tile of keys · (a tile of queries)ᵀ; keys, queries: their addresses."""
    t_now = opaque_thread(t)
    lane, warp = int32(t_now % WARP), int32(t_now // WARP)
    clear(s, SCORES)
    multiply_rows(
        s,
        N,
        keys + int32(warp * ROWS * PITCH + by_row(lane, PITCH)),
        queries + int32(by_chunk(lane, PITCH)),
        PITCH,
        HS,
    )


@cuda.jit(device=True, forceinline=True)
def add_values(r, shared, k_tile, place, at_numbers, c, t):
    """dv += Pᵀ·dy for the warp's keys and a tile of queries; P is left in s."""
    multiply_tiles(r.s, k_tile, k_tile + Q, t)
    clear(r.tile, TOTALS)
    for n in range(N):
        probabilities(r.s, 4 * n, c, load_words4(shared, at_numbers + n * 8 * NUMBERS))
        p, p_both = left_of_accumulators(r.s, 4 * n)
        add_products(r.tile, 0, C, p, p_both, shared, place + (G + n * 8 * PITCH), PITCH)
    add_accumulators(r.dv, r.tile, TOTALS)


@cuda.jit(device=True, forceinline=True)
def store_ds(shared, to, ds, first):
    """A fragment of dS, 16 keys by 8 queries, into shared memory."""
    store_word(shared, to, word_of(ds[first]))
    store_word(shared, to + DS_PITCH, word_of(ds[first + 1]))
    store_word(shared, to + 32, word_of(ds[first + 2]))
    store_word(shared, to + (DS_PITCH + 32), word_of(ds[first + 3]))


@cuda.jit(device=True, forceinline=True)
def add_keys(r, shared, k_tile, place, at_numbers, t):
    """dk += dSᵀ·q for the warp's keys and a tile of queries, after `add_values`; dS goes to shared
    memory."""
    multiply_tiles(r.ds, k_tile + V, k_tile + G, t)
    clear(r.tile, TOTALS)
    t_ds = opaque_thread(t)  # dS: query 2x of the tile, and the column of key l / 4 of the warp
    to = int64(
        DS
        + t_ds % 4 * 2 * DS_PITCH
        + t_ds // WARP * ROWS * 4
        + (t_ds // 8 % 4 + t_ds // 4 % 2 * 4) * 4
    )
    for n in range(N):
        score_gradients(r.ds, 4 * n, r.s, load_words4(shared, at_numbers + n * 8 * NUMBERS))
        store_ds(shared, to + n * 8 * DS_PITCH, r.ds, 4 * n)
    for n in range(N):
        left, left_both = left_of_accumulators(r.ds, 4 * n)
        add_products(r.tile, 0, C, left, left_both, shared, place + (Q + n * 8 * PITCH), PITCH)
    add_accumulators(r.dk, r.tile, TOTALS)


@cuda.jit(device=True, forceinline=True)
def load_old(r, first, N, dq, at):
    """N fragments of dq, from the tiles of keys before."""
    for i in range(first, first + 4 * N, 4):
        r.old[i], r.old[i + 1], r.old[i + 2], r.old[i + 3] = load4(dq, at + 2 * i)


@cuda.jit(device=True, forceinline=True)
def write_dq(dq, at, exists, r, first, N, f, lane):
    """N fragments of dq, or its share, onto what was there."""
    old = r.old
    for i in range(first, first + 4 * N, 4):
        v = four_neighbours(r.tile, i, lane)
        write_four(
            dq,
            at + 2 * i,
            (
                f * v[0] + old[i],
                f * v[1] + old[i + 1],
                f * v[2] + old[i + 2],
                f * v[3] + old[i + 3],
            ),
            float32(1),
            exists,
        )


@cuda.jit(device=True, forceinline=True)
def multiply_ds(r, shared, k_tile, exist, lane, group, side, last):
    """dS·k for the warp's 16 queries and its part of the columns, summed over the keys of a tile
    that exist."""
    ds_rows = k_tile + int32(DS + by_row(lane, DS_PITCH) + group * (16 * DS_PITCH))
    k_at = int64(lane_place(lane, PITCH) + side * (COLUMNS * 32))
    clear(r.tile, DQ)
    key = int32(0)
    while key < min(exist, int32(KEYS)):
        for half in range(0, ROWS, 8):
            a, a_both = load_left(ds_rows + int32((key + half) * 4))
            k_row = k_at + int32((key + half) * PITCH)
            add_products(r.tile, 0, COLUMNS, a, a_both, shared, k_row, PITCH)
            if last:
                add_products(r.tile, COLUMNS, 1, a, a_both, shared, k_row + COLUMNS * 32, PITCH)
        key = int32(key + ROWS)


@cuda.jit(device=True, forceinline=True)
def add_queries(r, shared, dq, dq_start, k_tile, problem, first, exist, fresh, t):
    """dq of a tile of queries, or its share: the warp's 16 queries, and its part of the columns."""
    t_dq = opaque_thread(t)
    lane, group, side = int32(t_dq % WARP), int32(t_dq // WARP % 2), int32(t_dq // (2 * WARP))
    if first + group * 16 < problem.T:
        last = NINTH and side == PARTS - 1
        query = int32(first + group * 16 + lane // 4 + lane % 2 * 8)
        at = dq_start + query * problem.dq_row + int32(side * (COLUMNS * 8) + lane % 4 // 2 * 4)
        clear(r.old, DQ)
        if not fresh and query < problem.T:
            load_old(r, 0, COLUMNS, dq, at)
            if last:
                load_old(r, COLUMNS * 4, 1, dq, at)
        multiply_ds(r, shared, k_tile, exist, lane, group, side, last)
        write_dq(dq, at, query < problem.T, r, 0, COLUMNS, problem.scale, lane)
        if last:
            write_dq(dq, at, query < problem.T, r, COLUMNS * 4, 1, problem.scale, lane)


@cuda.jit(device=True, forceinline=True)
def write_keys(r, dqkv, head, problem, first_key, t):
    """The epilogue of a tile of keys: the warp's rows of dk and dv."""
    t_end = opaque_thread(t)
    lane, key = int32(t_end % WARP), int32(first_key + t_end // WARP * ROWS)
    at, exist, one = (
        head.start + problem.part + key * problem.width,
        int32(problem.T - key),
        float32(1),
    )
    write_rows(dqkv, at, problem.width, exist, r.dk, C, problem.scale, problem.scale, lane)
    write_rows(dqkv, at + problem.part, problem.width, exist, r.dv, C, one, one, lane)


# The kernel ---------------------------------------------------------------------------------------


@requires("8.0")
def flash_attention_backward_kernel_v4(dy, qkv, logsumexp, D, dqkv, dq, problem):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    k_tile = shared_address(shared)
    t = int32(cuda.threadIdx.x)
    chunk, T = cuda.blockIdx.x, problem.T
    head = head_of(problem, HS)
    dq_start = (
        chunk * cuda.gridDim.z + cuda.blockIdx.z
    ) * T * problem.dq_row + cuda.blockIdx.y * problem.dq_head
    c = float32(problem.scale * LOG2_E)
    place = int64(lane_place(int32(t % WARP), PITCH))
    r = Tf32AttentionRegisters(
        cuda.local.array(SCORES, "float32"),
        cuda.local.array(SCORES, "float32"),
        cuda.local.array(TOTALS, "float32"),
        cuda.local.array(TOTALS, "float32"),
        cuda.local.array(TOTALS, "float32"),
        cuda.local.array(DQ, "float32"),
    )
    turn = int32(0)
    first_key = int32(chunk * problem.chunk_tiles * KEYS)
    while turn < problem.chunk_tiles and first_key < T:
        exist = int32(T - first_key)  # keys of the tile, or more
        cuda.syncthreads()  # the tiles of the round before are free
        t_start = opaque_thread(t)
        fetch_keys(k_tile, qkv, head, problem, first_key, t_start)
        fetch_queries(k_tile, qkv, dy, logsumexp, D, head, problem, int32(0), t_start)
        clear(r.dk, TOTALS)
        clear(r.dv, TOTALS)
        first = int32(0)
        while first < T:
            cp_async_wait(0)  # this thread's part of the tile is there
            cuda.syncthreads()  # so are all parts, and dS is no longer read
            if opaque_thread(t) // WARP * ROWS < exist:
                at_numbers = int32(ROW_NUMBERS + opaque_thread(t) % 4 * 2 * NUMBERS)
                add_values(r, shared, k_tile, place, at_numbers, c, t)
                add_keys(r, shared, k_tile, place, at_numbers, t)
            cuda.syncthreads()  # dS is complete, and the queries are no longer read
            ahead = int32(first + QUERIES)
            if ahead < T:
                fetch_queries(k_tile, qkv, dy, logsumexp, D, head, problem, ahead, opaque_thread(t))
            fresh = turn == 0  # the chunk's first tile of keys finds nothing to add to
            add_queries(r, shared, dq, dq_start, k_tile, problem, first, exist, fresh, t)
            first = ahead

        write_keys(r, dqkv, head, problem, first_key, t)
        turn = int32(turn + 1)
        first_key = int32(first_key + KEYS)


def make_backward(HS):
    """The kernel for one head size."""
    blocks = 4 if HS == 32 else 3  # on a multiprocessor: at most 128 registers a thread, or 168
    return specialise(flash_attention_backward_kernel_v4, launch_bounds=(THREADS, blocks), HS=HS)
