"""Sparse-linear attention backward, rung 2: what a block of queries gives without looking at a
single key.

WHAT IS NEW, AND WHY IT PAYS
    All products of the linear part are between tiles of 64 rows that are there: dO = dy W, o_l =
    φ(q) S once more (it was not kept: S is as many bytes, and serves dφ(q) = dO Sᵀ, too), A = (r
    φ(q))ᵀ dO and dW = dyᵀ o_l: five, by mma.sync. Left sides along a row stay in registers; the two
    that sum over the rows go through shared memory, where ldmatrix transposes them.
    A block of threads takes several blocks of queries, and keeps dW and db in registers meanwhile:
    their partial sums would be as many bytes as A else.
    dq's linear part is written as dq; lists_half.py adds the rest.
LAUNCH
    grid (ceil(N / some), heads, B), 4 warps; dynamic shared memory 4 tiles and 2 squares: 25, 54 or
    56 KiB.
ACCURACY
    operands of products are float16, sums and everything else float32.
DETERMINISM
    one warp, or thread, adds in the order of rows and blocks.
COST
    per block of queries 10 · 64 · HS² FLOPs, 8 · 64 · HS + 4 · HS² bytes: memory.
SOURCE
    reference.py.
READ NEXT
    lists_half.py
"""

from typing import NamedTuple

from ....device import cuda, float32, int32, opaque
from ....device.async_copy import cp_async_commit, cp_async_wait, shared_address
from ....device.limits import WARP
from ....device.requires import requires
from ....device.specialise import Constant, specialise
from ....kernels.attention.fragments import (
    by_chunk,
    by_row,
    clear,
    copy_out,
    fetch_rows,
    load_left,
    stash,
)
from .choice import BLOCK, head_number
from .simple import start_of_head
from .tiles_half import (
    HS,
    NINTH,
    NUMBERS,
    PITCH,
    SIZE,
    TAIL,
    THREADS,
    WORDS,
    N,
    add_tail,
    add_transposed,
    dot_rows,
    dot_vector,
    feature_gradient,
    features,
    fetch_square,
    half_at,
    narrow,
    number_of_row,
    scale_rows,
    square_bytes,
    tile_bytes,
    times_square,
    times_transposed,
    widen,
    write_tail,
)

Q = Constant(lambda HS: 0 * HS)  # bytes where tiles begin: q, then r φ(q), then dq
G = Constant(lambda HS: tile_bytes(HS))  # dy
Y = Constant(lambda HS: 2 * tile_bytes(HS))  # y, then o_l
S = Constant(lambda HS: 3 * tile_bytes(HS))
W = Constant(lambda HS: 3 * tile_bytes(HS) + square_bytes(HS))
DO = Constant(lambda HS: 3 * tile_bytes(HS) + 2 * square_bytes(HS))  # dO, then A
OTHERS = Constant(lambda HS: THREADS - HS)  # the first of the threads that sum columns of dy


def shared_bytes(HS):
    return 4 * tile_bytes(HS) + 2 * square_bytes(HS)


class SlaQueryRegisters(NamedTuple):
    """A lane's: packed fragments of two tiles; φ(q), dO, o_l, dφ(q) or dq, and dW of its warp's
    rows; of dW's tail."""

    words: object
    more: object
    phi: object
    dO: object
    linear: object
    dq: object
    dW: object
    tail: object


@cuda.jit(device=True, forceinline=True)
def fetch_tiles(tiles, qkv, dy, y, S_in, start, i, problem, t):
    """Start the copies of a block of queries: q, dy, y and its S."""
    exist, heads = int32(problem.T - i * BLOCK), cuda.gridDim.y
    at = ((cuda.blockIdx.z * problem.T + i * BLOCK) * heads + cuda.blockIdx.y) * HS
    step = int32(heads * HS)
    fetch_rows(
        tiles + Q,
        PITCH,
        qkv,
        start + i * BLOCK * problem.width,
        problem.width,
        exist,
        BLOCK,
        HS,
        t,
        THREADS,
    )
    fetch_rows(tiles + G, PITCH, dy, at, step, exist, BLOCK, HS, t, THREADS)
    fetch_rows(tiles + Y, PITCH, y, at, step, exist, BLOCK, HS, t, THREADS)
    fetch_square(tiles + S, S_in, (head_number() * problem.N + i) * SIZE, t)
    cp_async_commit()


@cuda.jit(device=True, forceinline=True)
def take_rows(r, tiles, bias, weights, rows, lane):
    """φ(q), dO and o_l of the warp's rows; dy · (y − b) of the upper and of the lower. weights:
    |r|; rows: byte of the warp's first."""
    here = tiles + int32(rows + by_row(lane, PITCH))
    load_left(r.words, here + G, 1, PITCH, HS)
    load_left(r.more, here + Y, 1, PITCH, HS)
    widen(r.phi, r.words)
    widen(r.dq, r.more)
    plain, of_bias = dot_rows(r.phi, r.dq), dot_vector(r.phi, bias, 0, lane)
    clear(r.dO, NUMBERS)
    times_square(r.dO, r.words, tiles + W, lane)
    load_left(r.words, here + Q, 1, PITCH, HS)
    widen(r.phi, r.words)
    above, below = features(r.phi)
    scale_rows(r.phi, above, below)
    narrow(r.words, r.phi)
    clear(r.linear, NUMBERS)
    times_square(r.linear, r.words, tiles + S, lane)
    scale_rows(r.linear, weights[0], weights[1])
    return plain[0] - of_bias[0], plain[1] - of_bias[1]


@cuda.jit(device=True, forceinline=True)
def query_gradient(r, tiles, Z, at, weights, D, lane):
    """The linear part's gradient of the warp's queries, in r.dq."""
    clear(r.dq, NUMBERS)
    times_transposed(r.dq, r.more, tiles + S, lane)
    for n in range(N):
        c = at + 8 * n + lane % 4 * 2
        left, right = Z[c], Z[c + 1]
        r.dq[4 * n] = weights[0] * (r.dq[4 * n] - D[0] * left)
        r.dq[4 * n + 1] = weights[0] * (r.dq[4 * n + 1] - D[0] * right)
        r.dq[4 * n + 2] = weights[1] * (r.dq[4 * n + 2] - D[1] * left)
        r.dq[4 * n + 3] = weights[1] * (r.dq[4 * n + 3] - D[1] * right)
    feature_gradient(r.dq, r.phi)


@cuda.jit(device=True, forceinline=True)
def sum_columns(r, shared, tiles, means, A, a, block, column_sum, lane, warp, t):
    """A of the block, in r.linear, and its share of dW, by 16 rows a warp; a; the sum so far of a
    column of dy."""
    if warp * 16 < HS:
        place, columns = int32(by_row(lane, PITCH)), int32(warp * 32 + by_chunk(lane, PITCH))
        add_transposed(r.dW, tiles + int32(G + columns), tiles + int32(Y + place))
        clear(r.linear, NUMBERS)
        add_transposed(r.linear, tiles + int32(Q + columns), tiles + int32(DO + place))
    if NINTH:
        place, tail = int32(by_row(lane, PITCH)), cuda.local.array(TAIL, "float32")
        clear(tail, TAIL)
        add_tail(r.tail, tiles + int32(G + place), tiles + int32(Y + place), warp)
        add_tail(tail, tiles + int32(Q + place), tiles + int32(DO + place), warp)
        write_tail(tail, A, block * SIZE, lane, warp)
    if t < HS:
        total = float32(0)
        for row in range(BLOCK):
            total += half_at(shared, int32(Q + row * PITCH + 2 * t)) * means[row]
        a[block * HS + t] = total
    if t >= OTHERS:
        for row in range(BLOCK):
            column_sum += half_at(shared, int32(G + row * PITCH + 2 * (t - OTHERS)))
    return column_sum


@cuda.jit(device=True, forceinline=True)
def write_rows(r, shared, dqkv, A, start, i, block, problem, warp, lane):
    """16 rows of A, and the warp's dq."""
    patch = int32(warp * 16 * PITCH)
    if warp * 16 < HS:
        stash(shared, DO + patch, PITCH, r.linear, 0, N, float32(1), float32(1), lane)
    stash(shared, Q + patch, PITCH, r.dq, 0, N, float32(1), float32(1), lane)
    cuda.syncwarp()
    if warp * 16 < HS:
        copy_out(
            shared,
            DO + patch,
            PITCH,
            A,
            block * SIZE + warp * 16 * HS,
            int32(HS),
            int32(16),
            16,
            HS,
            lane,
        )
    first = int32(i * BLOCK + warp * 16)
    copy_out(
        shared,
        Q + patch,
        PITCH,
        dqkv,
        start + first * problem.width,
        problem.width,
        int32(problem.T - first),
        16,
        HS,
        lane,
    )


@cuda.jit(device=True, forceinline=True)
def write_weights(r, parts, bias_parts, column_sum, lane, warp, t):
    """This block of threads' share of dW and db."""
    part = head_number() * cuda.gridDim.x + cuda.blockIdx.x
    if warp * 16 < HS:
        for n in range(N):
            at = part * SIZE + (warp * 16 + lane // 4) * HS + 8 * n + lane % 4 * 2
            parts[at], parts[at + 1] = r.dW[4 * n], r.dW[4 * n + 1]
            parts[at + 8 * HS], parts[at + 8 * HS + 1] = r.dW[4 * n + 2], r.dW[4 * n + 3]
    if NINTH:
        for i in range(3):
            n = int32(warp + 4 * i)
            at = part * SIZE + (HS - 8 + lane // 4) * HS + 8 * n + lane % 4 * 2
            if n < N:
                parts[at], parts[at + 1] = r.tail[4 * i], r.tail[4 * i + 1]
    if t >= OTHERS:
        bias_parts[part * HS + t - OTHERS] = column_sum


@requires("7.5")
def sla_queries_kernel_v2(dy, qkv, y, layer, kept, dqkv, sums, A, a, out, problem, some):
    """kept: r, S and Z of the forward."""
    r_in, S_in, Z = kept
    shared = cuda.shared.array(0, "uint8", alignment=128)
    means = cuda.shared.array(BLOCK, float32)
    tiles, t_start = shared_address(shared), int32(cuda.threadIdx.x)
    start, head = start_of_head(problem), head_number()
    r = SlaQueryRegisters(
        cuda.local.array(WORDS, "uint32"),
        cuda.local.array(WORDS, "uint32"),
        cuda.local.array(NUMBERS, "float32"),
        cuda.local.array(NUMBERS, "float32"),
        cuda.local.array(NUMBERS, "float32"),
        cuda.local.array(NUMBERS, "float32"),
        cuda.local.array(NUMBERS, "float32"),
        cuda.local.array(TAIL, "float32"),
    )
    clear(r.dW, NUMBERS)
    clear(r.tail, TAIL)
    column_sum = float32(0)
    fetch_square(tiles + W, layer[0], 0, t_start)
    i = int32(cuda.blockIdx.x * some)
    end = int32(min(problem.N, i + some))
    while i < end:
        t = opaque(t_start)
        lane, warp, block = int32(t % WARP), int32(t // WARP), head * problem.N + i
        cuda.syncthreads()  # the tiles of the block before are no longer read
        fetch_tiles(tiles, qkv, dy, y, S_in, start, i, problem, t)
        row = int32(i * BLOCK + warp * 16 + lane // 4)
        signed = (
            number_of_row(r_in, head * problem.T, row, row < problem.T, lane),
            number_of_row(r_in, head * problem.T, row + 8, row + 8 < problem.T, lane),
        )
        weights = abs(signed[0]), abs(signed[1])
        cp_async_wait(0)
        cuda.syncthreads()
        plain = take_rows(r, tiles, layer[1], weights, int32(warp * 16 * PITCH), lane)
        D = dot_rows(r.dO, r.linear)
        if lane % 4 == 0 and row < problem.T:
            sums[head * problem.T + row] = plain[0] - D[0]
        if lane % 4 == 0 and row + 8 < problem.T:
            sums[head * problem.T + row + 8] = plain[1] - D[1]
        D = (
            (float32(0) if signed[0] < float32(0) else D[0]),
            (float32(0) if signed[1] < float32(0) else D[1]),
        )
        if lane % 4 == 0:
            means[warp * 16 + lane // 4], means[warp * 16 + lane // 4 + 8] = D
        patch = int32(warp * 16 * PITCH)
        narrow(r.more, r.dO)
        cuda.syncwarp()  # what this warp alone has read makes room
        stash(shared, Q + patch, PITCH, r.phi, 0, N, weights[0], weights[1], lane)
        stash(shared, DO + patch, PITCH, r.dO, 0, N, float32(1), float32(1), lane)
        stash(shared, Y + patch, PITCH, r.linear, 0, N, float32(1), float32(1), lane)
        query_gradient(r, tiles, Z, block * HS, weights, D, lane)
        cuda.syncthreads()
        column_sum = sum_columns(r, shared, tiles, means, A, a, block, column_sum, lane, warp, t)
        cuda.syncthreads()
        write_rows(r, shared, dqkv, A, start, i, block, problem, warp, lane)
        i = int32(i + 1)
    t = opaque(t_start)
    write_weights(r, out[0], out[1], column_sum, int32(t % WARP), int32(t // WARP), t)


def make_queries(HS):
    return specialise(sla_queries_kernel_v2, launch_bounds=(THREADS, 2), HS=HS)
