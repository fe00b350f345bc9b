"""Flash attention forward, rung 3: float16 on the tensor cores of every GPU from sm_80 on.

WHAT IS NEW, AND WHY IT PAYS
    Both products are mma.sync, 2048 multiply-adds an instruction, float32 accumulators
    (fragments.py). A warp owns 16 or 32 queries: q's fragments stay in its registers, and a
    fragment of k or v from shared memory serves all of them. Probabilities never leave the
    registers: the accumulators of S are packed as the left side of P·v. cp.async brings the next
    tile of k and v into the other of two stages while this one is multiplied.
    Outputs are multiplied by 2^(old maximum − new) only where a maximum of the warp has grown,
    seldom after some tiles. What is left is the softmax. For each score: one multiply-add, one
    power of two, one addition, half a conversion; maxima and sums of a row go through two shuffles,
    for only four lanes share it.
LAUNCH
    grid (ceil(T / queries), heads, B), 4 warps for 64 or 128 queries. Dynamic shared memory, KiB: q
    and two stages of k and v; 64 queries: 25 (HS 32), 45 or 51 (HS 128, tiles of 32 keys); 128: 30,
    54 or 68.
ACCURACY
    q, k, v and P are float16, S, m, l and o float32.
DETERMINISM
    one warp sums a query's outputs in the order of the keys.
SOURCE
    reference.py; Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 1 and section 3.3.
READ NEXT
    backward_half.py
"""

import math
from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, opaque
from ...device.approximate import power_of_two
from ...device.async_copy import cp_async_commit, cp_async_wait, shared_address
from ...device.limits import FULL_MASK, WARP
from ...device.requires import requires
from ...device.specialise import Constant, specialise
from .fragments import (
    add_products,
    by_chunk,
    by_row,
    clear,
    copy_out,
    fetch_rows,
    load_left,
    multiply_rows,
    pack,
    pitch_of,
    stash,
)
from .heads import LN_2, LOG2_E, LOWEST

WARPS = 4
THREADS = WARP * WARPS


@device_inline
def hide_keys(s, M, N, exist, lane):
    """Scores of keys that do not exist become so low that nothing is left of them."""
    for n in range(N):
        key = int32(8 * n + lane % 4 * 2)
        for m in range(M):
            i = (m * N + n) * 4
            if key >= exist:
                s[i], s[i + 2] = LOWEST, LOWEST
            if key + 1 >= exist:
                s[i + 1], s[i + 3] = LOWEST, LOWEST


@device_inline
def largest_of_row(s, N, first, m):
    """The largest of m and a row's scores in all four lanes that share the row: s[first], s[first +
    1], and so on every 4."""
    for n in range(N):
        m = max(m, max(s[first + 4 * n], s[first + 4 * n + 1]))
    m = max(m, cuda.shfl_xor_sync(FULL_MASK, m, 1))
    return max(m, cuda.shfl_xor_sync(FULL_MASK, m, 2))


@device_inline
def exponentials(s, N, first, c, m):
    """The row's scores become 2^(c·s − c·m); the sum of this lane's."""
    total = float32(0)
    for n in range(N):
        a, b = power_of_two(c * s[first + 4 * n] - m), power_of_two(c * s[first + 4 * n + 1] - m)
        s[first + 4 * n], s[first + 4 * n + 1] = a, b
        total += a + b
    return total


@device_inline
def sum_of_row(l):
    l += cuda.shfl_xor_sync(FULL_MASK, l, 1)
    return l + cuda.shfl_xor_sync(FULL_MASK, l, 2)


@device_inline
def online_softmax(s, o, largest, l, shrink, M, N, C, c):
    """The scores of M · 16 queries and a tile of keys become probabilities, and what was summed is
    corrected.

    largest, l: for each of a lane's 2·M queries the maximum so far, and the lane's share of the
    sum; shrink: for words
    N, C: fragments of scores, and of outputs, side by side

    After the first tiles maxima seldom grow: where none of the warp's has, every factor is 1 and
    nothing is multiplied.
    """
    grows = False
    for m in range(M):
        for half in range(2):
            old = largest[2 * m + half]
            new = largest_of_row(s, N, 4 * N * m + 2 * half, old)
            shrink[2 * m + half] = power_of_two(c * old - c * new)
            largest[2 * m + half] = new
            grows = grows | (new > old)
    if cuda.any_sync(FULL_MASK, grows):
        for m in range(M):
            for half in range(2):
                l[2 * m + half] *= shrink[2 * m + half]
                for n in range(C):
                    at = (m * C + n) * 4 + 2 * half
                    o[at], o[at + 1] = (
                        o[at] * shrink[2 * m + half],
                        o[at + 1] * shrink[2 * m + half],
                    )
    for m in range(M):
        for half in range(2):
            l[2 * m + half] += exponentials(
                s, N, 4 * N * m + 2 * half, c, c * largest[2 * m + half]
            )


def keys_of(HS):
    """Keys of a tile: as many scores as registers leave room for."""
    return 64 if HS <= 72 else 32


def shared_bytes(HS, M):
    """q and two stages of k and v."""
    return (16 * M * WARPS + 4 * keys_of(HS)) * pitch_of(HS)


# The kernel's parts -------------------------------------------------------------------------------

HS = Constant()  # channels of a head
M = Constant()  # fragments of 16 queries of a warp
PITCH = Constant(lambda HS: pitch_of(HS))
KEYS = Constant(lambda HS: keys_of(HS))
N = Constant(lambda KEYS: KEYS // 8)  # fragments of scores side by side
KEEP_Q = Constant(lambda HS: HS <= 72)  # whether q's fragments stay in registers
ROWS = Constant(lambda M: 16 * M)  # queries of a warp
QUERIES = Constant(lambda M: 16 * M * WARPS)
C = Constant(lambda HS: HS // 8)  # fragments of outputs side by side
# words of q in a lane
LEFT = Constant(lambda HS, M: M * (HS // 16 * 4 + HS % 16 // 4) if HS <= 72 else M * 4)
SCORES, OUTPUTS = Constant(lambda M, N: M * N * 4), Constant(lambda HS, M: M * HS // 2)
WORDS, PAIRS = Constant(lambda M: M * 4), Constant(lambda M: M * 2)
STAGE = Constant(lambda KEYS, PITCH: 2 * KEYS * PITCH)  # bytes of k, then v
STAGES = Constant(lambda QUERIES, PITCH: QUERIES * PITCH)  # where they begin: after q


class HalfForwardRegisters(NamedTuple):
    """A lane's: fragments of q; S; the outputs; packed probabilities; maxima and sums of its
    queries, and factors."""

    q: object
    s: object
    o: object
    p: object
    largest: object
    l: object
    shrink: object


@device_inline
def fetch_keys(stage, qkv, start, part, width, first, T, t):
    """Start the copies of a tile of keys, from `first` on, to an address: k and v, which begin
    `part` and twice that after `start`."""
    fetch_rows(
        stage, PITCH, qkv, start + part + first * width, width, T - first, KEYS, HS, t, THREADS
    )
    fetch_rows(
        stage + KEYS * PITCH,
        PITCH,
        qkv,
        start + 2 * part + first * width,
        width,
        T - first,
        KEYS,
        HS,
        t,
        THREADS,
    )
    cp_async_commit()


@device_inline
def multiply_queries(r, q_rows, k_tile, row_place, chunk_place):
    """S = q·kᵀ of the warp's queries and a tile of keys."""
    clear(r.s, SCORES)
    if KEEP_Q:
        for n in range(0, N, 2):
            rows = k_tile + n * 8 * PITCH
            multiply_rows(r.s, n, N, r.q, rows + chunk_place, rows + row_place, M, HS)
    else:
        for step in range(HS // 16):
            load_left(r.q, q_rows + int32(step * 32), M, PITCH, 16)
            for n in range(0, N, 2):
                multiply_rows(
                    r.s,
                    n,
                    N,
                    r.q,
                    k_tile + int32(n * 8 * PITCH + step * 32) + chunk_place,
                    row_place,
                    M,
                    16,
                )


@device_inline
def add_values(r, v_tile):
    """o += P·v; P is packed on the way. v_tile: address, and the lane's `by_row`."""
    for n in range(0, N, 2):
        for m in range(M):
            pack(r.p, m, r.s, (m * N + n) * 4)
        add_products(r.o, r.p, v_tile + n * 8 * PITCH, M, HS)


@device_inline
def write_outputs(r, shared, y, logsumexp, first_query, T, scale, t):
    """The epilogue: q's rows in shared memory, which no other warp reads, hold the warp's outputs
    before the store."""
    head, image, heads = cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
    lane, warp = int32(t % WARP), int32(t // WARP)
    patch = int32(warp * ROWS * PITCH)
    row = int32(first_query + warp * ROWS)  # of the warp's first query
    rows_start = (image * heads + head) * T
    for m in range(M):
        above, below = sum_of_row(r.l[2 * m]), sum_of_row(r.l[2 * m + 1])
        stash(
            shared,
            int32(patch + m * 16 * PITCH),
            PITCH,
            r.o,
            m,
            C,
            float32(1) / above,
            float32(1) / below,
            lane,
        )
        query = int32(row + 16 * m + lane // 4)
        if lane % 4 == 0 and query < T:
            logsumexp[rows_start + query] = scale * r.largest[2 * m] + LN_2 * math.log2(above)
        if lane % 4 == 0 and query + 8 < T:
            logsumexp[rows_start + query + 8] = scale * r.largest[2 * m + 1] + LN_2 * math.log2(
                below
            )
    cuda.syncwarp()
    at = ((image * T + row) * heads + head) * HS
    copy_out(shared, patch, PITCH, y, at, int32(heads * HS), int32(T - row), ROWS, HS, lane)


# The kernel ---------------------------------------------------------------------------------------


@requires("7.5")
def flash_attention_forward_kernel_v3(qkv, y, logsumexp, T, width, head_step, part, scale):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    q_tile = shared_address(shared)
    t = int32(cuda.threadIdx.x)
    lane, warp = int32(t % WARP), int32(t // WARP)
    first_query = int32(cuda.blockIdx.x * QUERIES)
    # of the head's q; its k is `part` further on
    start = cuda.blockIdx.z * T * width + cuda.blockIdx.y * head_step
    fetch_rows(
        q_tile,
        PITCH,
        qkv,
        start + first_query * width,
        width,
        T - first_query,
        QUERIES,
        HS,
        t,
        THREADS,
    )
    fetch_keys(q_tile + STAGES, qkv, start, part, width, int32(0), T, t)

    r = HalfForwardRegisters(
        cuda.local.array(LEFT, "uint32"),
        cuda.local.array(SCORES, "float32"),
        cuda.local.array(OUTPUTS, "float32"),
        cuda.local.array(WORDS, "uint32"),
        cuda.local.array(PAIRS, "float32"),
        cuda.local.array(PAIRS, "float32"),
        cuda.local.array(PAIRS, "float32"),
    )
    clear(r.o, OUTPUTS)
    for i in range(PAIRS):
        r.largest[i], r.l[i] = LOWEST, float32(0)
    row_place, chunk_place = by_row(lane, PITCH), by_chunk(lane, PITCH)
    c = float32(scale * LOG2_E)
    stage = int32(STAGES)
    first = int32(0)
    while first < T:
        cp_async_wait(0)  # this thread's part of the tile is there
        cuda.syncthreads()  # so are all parts, and the other stage is no longer read
        ahead = int32(first + KEYS)
        if ahead < T:
            fetch_keys(
                q_tile + int32(2 * STAGES + STAGE - stage),
                qkv,
                start,
                part,
                width,
                ahead,
                T,
                opaque(t),
            )
        if first_query + warp * ROWS < T:  # the warp has queries
            q_rows = q_tile + int32(warp * ROWS * PITCH + row_place)
            if KEEP_Q and first == 0:
                load_left(r.q, q_rows, M, PITCH, HS)
            k_tile = q_tile + stage
            multiply_queries(r, q_rows, k_tile, row_place, chunk_place)
            if ahead > T:
                hide_keys(r.s, M, N, T - first, lane)
            online_softmax(r.s, r.o, r.largest, r.l, r.shrink, M, N, C, c)
            add_values(r, k_tile + int32(KEYS * PITCH + row_place))
        stage = int32(2 * STAGES + STAGE - stage)
        first = ahead

    cuda.syncwarp()  # its rows of q are no longer read
    write_outputs(r, shared, y, logsumexp, first_query, T, scale, opaque(t))


def make_forward(HS, M):
    """The kernel for one head size and M fragments of 16 queries a warp."""
    # on a multiprocessor: at most 255, or 168, registers a thread
    blocks = 2 if M == 2 or HS > 72 else 3
    return specialise(
        flash_attention_forward_kernel_v3,
        launch_bounds=(THREADS, blocks),
        HS=HS,
        M=M,
        name=f"flash_attention_forward_kernel_v3_{HS}_{16 * M * WARPS}",
    )
