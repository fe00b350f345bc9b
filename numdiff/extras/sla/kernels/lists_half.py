"""Sparse-linear attention backward, rung 2, mma.sync: dq over the lists of key blocks, dk and dv
over their transpose.

WHAT IS NEW, AND WHY IT PAYS
    dq: a warp keeps q and dy of its 16 queries in registers and takes 16 keys at a time: S and dP,
    then dS as the left side of dq += dS k, three products. dk and dv: scores transposed, as
    ../backward_half.py has them, four products, with the block's A loaded with q and dy and
    subtracted from the total, as the forward does with H. Two kernels compute S and dP twice, 7
    products instead of 5, where one would have to add dq's shares of many blocks of keys, in an
    order: in float32 in memory that is 16 KiB a critical block each way, more than the two products
    take.
    The linear part's dφ(k) = v Rᵀ − ρ and dv += φ(k) R end the second kernel, from the fragments of
    k and v that are there.
    A list of dkv is as long as its block of keys is popular. Where lists above `long` go first, the
    grid is twice as
    large: its first half takes those of all heads, its second the others, and a block of the other
    half's ends at once.
LAUNCH
    grid (N, heads, B), 4 warps; dynamic shared memory, KiB: dq 25 or 45 (two stages of k and v, and
    q or dy); dkv 36, 72 or 76 (k, v, and two stages of q, dy, their numbers, A and a).
ACCURACY
    operands of products, A and R are float16, everything else float32.
DETERMINISM
    one warp sums a row, in the order of the list.
COST
    dq 6 · 64 · 64 · HS FLOPs a critical block, dkv 8; 4 · 64 · HS² for the linear part.
SOURCE
    reference.py; ../backward_half.py.
READ NEXT
    launcher.py
"""

from typing import NamedTuple

from ....device import cuda, float32, int32, opaque
from ....device.async_copy import cp_async_commit, cp_async_wait, shared_address
from ....device.limits import WARP
from ....device.requires import requires
from ....device.specialise import Constant, specialise
from ....device.tensor_core import load_word, load_words4, unpack_half2
from ....kernels.attention.backward_half import (
    fetch_numbers,
    probabilities,
    probability,
    score_gradients,
)
from ....kernels.attention.fragments import (
    add_products,
    by_chunk,
    by_row,
    clear,
    copy_out,
    fetch_rows,
    load_left,
    multiply_rows,
    pack,
    stash,
)
from ....kernels.attention.heads import LOG2_E
from .choice import BLOCK, head_number
from .simple import start_of_head
from .tiles_half import (
    HS,
    LEFT,
    NUMBERS,
    PITCH,
    SIZE,
    THREADS,
    TILE,
    WORDS,
    N,
    feature_gradient,
    features,
    fetch_sums,
    load_total,
    narrow,
    number_of_row,
    scale_rows,
    small_of,
    store_left,
    sums_bytes,
    take_away,
    tile_bytes,
    times_square,
    times_transposed,
    widen,
)

PAIR = 8  # numbers of a lane of 16 × 16 scores
ROW_NUMBERS = 8  # bytes a query: L and D
KV_STAGE = Constant(lambda HS: 2 * tile_bytes(HS))  # bytes of k and v
NUMBERS_AT = Constant(lambda HS: 2 * tile_bytes(HS))  # of a stage of queries: after q and dy
SUMS_AT = Constant(lambda HS: 2 * tile_bytes(HS) + BLOCK * ROW_NUMBERS)
Q_STAGE = Constant(lambda HS: 2 * tile_bytes(HS) + BLOCK * ROW_NUMBERS + sums_bytes(HS))


def dq_bytes(HS):
    return 5 * tile_bytes(HS)


def dkv_bytes(HS):
    return 6 * tile_bytes(HS) + 2 * (BLOCK * ROW_NUMBERS + sums_bytes(HS))


@cuda.jit(device=True, forceinline=True)
def multiply_sixteen(s, kept, rows, lane):
    """s = kept · (16 rows of a tile)ᵀ"""
    clear(s, PAIR)
    multiply_rows(s, 0, 2, kept, rows + by_chunk(lane, PITCH), rows + by_row(lane, PITCH), 1, HS)


# dq -----------------------------------------------------------------------------------------------


class SlaListQueries(NamedTuple):
    """A lane's: fragments of q and dy; scores and their gradients of 16 keys, either packed; dq."""

    q: object
    g: object
    s: object
    ds: object
    words: object
    dq: object


@cuda.jit(device=True, forceinline=True)
def fetch_keys(stage, qkv, start, problem, j, t):
    """Start the copies of a block's k and v to an address."""
    at, exist = start + problem.part + j * BLOCK * problem.width, int32(problem.T - j * BLOCK)
    fetch_rows(stage, PITCH, qkv, at, problem.width, exist, BLOCK, HS, t, THREADS)
    fetch_rows(
        stage + TILE, PITCH, qkv, at + problem.part, problem.width, exist, BLOCK, HS, t, THREADS
    )
    cp_async_commit()


@cuda.jit(device=True, forceinline=True)
def add_keys(r, tile, L, D, c, lane):
    """dq += dS k of a block of keys at an address. Keys that do not exist are zeros, and add
    nothing."""
    for key in range(0, BLOCK, 16):
        rows = tile + int32(key * PITCH)
        multiply_sixteen(r.s, r.q, rows, lane)
        multiply_sixteen(r.ds, r.g, rows + TILE, lane)
        for i in range(0, PAIR, 4):
            for k in range(2):
                r.ds[i + k] = probability(r.s[i + k], c, L[0]) * (r.ds[i + k] - D[0])
                r.ds[i + k + 2] = probability(r.s[i + k + 2], c, L[1]) * (r.ds[i + k + 2] - D[1])
        pack(r.words, 0, r.ds, 0)
        add_products(r.dq, r.words, rows + by_row(lane, PITCH), 1, HS)


@cuda.jit(device=True, forceinline=True)
def add_linear_part(dq, dqkv, at, width, exist, scale, lane):
    """dq = scale · dq + what is there; at: of the warp's first query."""
    row = int32(lane // 4)
    for n in range(N):
        c = at + row * width + 8 * n + lane % 4 * 2
        above, below = (float32(0), float32(0)), (float32(0), float32(0))
        if row < exist:
            above = unpack_half2(load_word(dqkv, c))
        if row + 8 < exist:
            below = unpack_half2(load_word(dqkv, c + 8 * width))
        dq[4 * n], dq[4 * n + 1] = scale * dq[4 * n] + above[0], scale * dq[4 * n + 1] + above[1]
        dq[4 * n + 2], dq[4 * n + 3] = (
            scale * dq[4 * n + 2] + below[0],
            scale * dq[4 * n + 3] + below[1],
        )


@requires("7.5")
def sla_dq_kernel_v2(dy, qkv, lists, logsumexp, sums, dqkv, problem):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    tiles, t = shared_address(shared), int32(cuda.threadIdx.x)
    lane, warp, i, count = int32(t % WARP), int32(t // WARP), int32(cuda.blockIdx.x), problem.count
    start, head, heads, T = start_of_head(problem), head_number(), cuda.gridDim.y, problem.T
    exist, listed = int32(T - i * BLOCK), (head * problem.N + i) * count
    fetch_rows(
        tiles,
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
    fetch_keys(tiles + TILE, qkv, start, problem, lists[listed], t)
    ahead = lists[listed + min(1, count - 1)]
    row = int32(i * BLOCK + warp * 16 + lane // 4)
    L = (
        LOG2_E * number_of_row(logsumexp, head * T, row, row < T, lane),
        LOG2_E * number_of_row(logsumexp, head * T, row + 8, row + 8 < T, lane),
    )
    D = (
        number_of_row(sums, head * T, row, row < T, lane),
        number_of_row(sums, head * T, row + 8, row + 8 < T, lane),
    )
    r = SlaListQueries(
        cuda.local.array(WORDS, "uint32"),
        cuda.local.array(WORDS, "uint32"),
        cuda.local.array(PAIR, "float32"),
        cuda.local.array(PAIR, "float32"),
        cuda.local.array(4, "uint32"),
        cuda.local.array(NUMBERS, "float32"),
    )
    clear(r.dq, NUMBERS)
    own = tiles + int32(warp * 16 * PITCH + by_row(lane, PITCH))
    cp_async_wait(0)
    cuda.syncthreads()
    load_left(r.q, own, 1, PITCH, HS)
    cuda.syncthreads()  # dy comes where q was
    fetch_rows(
        tiles,
        PITCH,
        dy,
        ((cuda.blockIdx.z * T + i * BLOCK) * heads + cuda.blockIdx.y) * HS,
        int32(heads * HS),
        exist,
        BLOCK,
        HS,
        t,
        THREADS,
    )
    cp_async_commit()
    stage = int32(TILE)
    for n in range(count):
        cp_async_wait(0)
        cuda.syncthreads()
        if n + 1 < count:
            fetch_keys(
                tiles + int32(2 * TILE + KV_STAGE - stage), qkv, start, problem, ahead, opaque(t)
            )
        if n == 0:
            load_left(r.g, own, 1, PITCH, HS)
        add_keys(r, tiles + stage, L, D, float32(problem.scale * LOG2_E), lane)
        ahead = lists[listed + min(n + 2, count - 1)]
        stage = int32(2 * TILE + KV_STAGE - stage)
    first = int32(i * BLOCK + warp * 16)
    at, patch = start + first * problem.width, int32(warp * 16 * PITCH)
    add_linear_part(r.dq, dqkv, at, problem.width, int32(T - first), problem.scale, lane)
    cuda.syncwarp()  # its rows of dy are no longer read
    stash(shared, patch, PITCH, r.dq, 0, N, float32(1), float32(1), lane)
    cuda.syncwarp()
    copy_out(shared, patch, PITCH, dqkv, at, problem.width, int32(T - first), 16, HS, lane)


# dk and dv ----------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """A lane's: fragments of k and v; scores and their gradients of 16 queries, either packed; dk
    and dv; what is left of A's total."""

    k: object
    v: object
    s: object
    ds: object
    words: object
    dk: object
    dv: object
    left: object


class SlaListGradients(NamedTuple):
    """Arrays that a key block reads of its queries: logsumexp, the row sums D, A and a."""

    logsumexp: object
    sums: object
    A: object
    a: object


@cuda.jit(device=True, forceinline=True)
def fetch_queries(stage, qkv, dy, given, start, images, problem, i, t):
    """Start the copies of a block of queries to an address: q, dy, L and D, A and a."""
    exist, image, heads = int32(problem.T - i * BLOCK), cuda.blockIdx.z % images, cuda.gridDim.y
    head = image * heads + cuda.blockIdx.y
    fetch_rows(
        stage,
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
    fetch_rows(
        stage + TILE,
        PITCH,
        dy,
        ((image * problem.T + i * BLOCK) * heads + cuda.blockIdx.y) * HS,
        int32(heads * HS),
        exist,
        BLOCK,
        HS,
        t,
        THREADS,
    )
    fetch_numbers(
        stage + NUMBERS_AT, given.logsumexp, given.sums, head * problem.T + i * BLOCK, exist, t
    )
    block = head * problem.N + i
    fetch_sums(stage + SUMS_AT, given.A, block * SIZE, given.a, block * HS, t)
    cp_async_commit()


@cuda.jit(device=True, forceinline=True)
def add_queries(r, shared, tiles, stage, c, lane):
    """dk and dv of the warp's keys, plus what a block of queries gives. Those that do not exist are
    zeros."""
    for query in range(0, BLOCK, 16):
        rows = tiles + int32(stage + query * PITCH)
        numbers = int32(stage + NUMBERS_AT + (query + lane % 4 * 2) * ROW_NUMBERS)
        multiply_sixteen(r.s, r.k, rows, lane)
        left, right = load_words4(shared, numbers), load_words4(shared, numbers + 8 * ROW_NUMBERS)
        probabilities(r.s, 0, c, left)
        probabilities(r.s, 4, c, right)
        pack(r.words, 0, r.s, 0)
        add_products(r.dv, r.words, rows + int32(TILE + by_row(lane, PITCH)), 1, HS)
        multiply_sixteen(r.ds, r.v, rows + TILE, lane)
        score_gradients(r.ds, 0, r.s, left)
        score_gradients(r.ds, 4, r.s, right)
        pack(r.words, 0, r.ds, 0)
        add_products(r.dk, r.words, rows + by_row(lane, PITCH), 1, HS)


@cuda.jit(device=True, forceinline=True)
def add_linear(r, phi, dphi, R, rho, scale, lane):
    """dk = scale · dk + the gradient through φ(k), dv += φ(k) R; R: of a tile, rho: float32 in
    shared memory."""
    widen(phi, r.k)
    above, below = features(phi)
    scale_rows(phi, above, below)
    narrow(r.k, phi)
    times_square(r.dv, r.k, R, lane)
    clear(dphi, NUMBERS)
    times_transposed(dphi, r.v, R, lane)
    for n in range(N):
        c = 8 * n + lane % 4 * 2
        for i in range(2):
            dphi[4 * n + i], dphi[4 * n + 2 + i] = (
                dphi[4 * n + i] - rho[c + i],
                dphi[4 * n + 2 + i] - rho[c + i],
            )
    feature_gradient(dphi, phi)
    for n in range(NUMBERS):
        r.dk[n] = scale * r.dk[n] + dphi[n]


@requires("7.5")
def sla_dkv_kernel_v2(dy, qkv, lists, counts, given, totals, dqkv, problem, long):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    rho = cuda.shared.array(HS, float32)
    tiles, t = shared_address(shared), int32(cuda.threadIdx.x)
    lane, warp, j, T, width = (
        int32(t % WARP),
        int32(t // WARP),
        int32(cuda.blockIdx.x),
        problem.T,
        problem.width,
    )
    images = int32(cuda.gridDim.z // 2) if long > 0 else int32(cuda.gridDim.z)
    start = cuda.blockIdx.z % images * T * width + cuda.blockIdx.y * problem.head_step
    head = cuda.blockIdx.z % images * cuda.gridDim.y + cuda.blockIdx.y
    listed = (head * problem.N + j) * problem.N
    count = counts[head * problem.N + j]
    if long > 0 and (count > long) != (cuda.blockIdx.z < images):
        return  # the other half's
    at, exist = start + problem.part + j * BLOCK * width, int32(T - j * BLOCK)
    fetch_rows(tiles, PITCH, qkv, at, width, exist, BLOCK, HS, t, THREADS)
    fetch_rows(tiles + TILE, PITCH, qkv, at + problem.part, width, exist, BLOCK, HS, t, THREADS)
    cp_async_commit()
    ahead = int32(0)
    if count > 0:
        fetch_queries(tiles + 2 * TILE, qkv, dy, given, start, images, problem, lists[listed], t)
        ahead = lists[listed + min(1, count - 1)]
    r = Keys(
        cuda.local.array(WORDS, "uint32"),
        cuda.local.array(WORDS, "uint32"),
        cuda.local.array(PAIR, "float32"),
        cuda.local.array(PAIR, "float32"),
        cuda.local.array(4, "uint32"),
        cuda.local.array(NUMBERS, "float32"),
        cuda.local.array(NUMBERS, "float32"),
        cuda.local.array(LEFT, "float32"),
    )
    clear(r.dk, NUMBERS)
    clear(r.dv, NUMBERS)
    load_total(r.left, totals[0], head * SIZE, t)
    small = float32(0)
    if t < HS:
        small = totals[1][head * HS + t]
    cp_async_wait(0)
    cuda.syncthreads()
    own = tiles + int32(warp * 16 * PITCH + by_row(lane, PITCH))
    load_left(r.k, own, 1, PITCH, HS)
    load_left(r.v, own + TILE, 1, PITCH, HS)
    stage = int32(2 * TILE)
    for n in range(count):
        cp_async_wait(0)
        cuda.syncthreads()  # the block is there, and the other stage is no longer read
        if n + 1 < count:
            fetch_queries(
                tiles + int32(4 * TILE + Q_STAGE - stage),
                qkv,
                dy,
                given,
                start,
                images,
                problem,
                ahead,
                opaque(t),
            )
        add_queries(r, shared, tiles, stage, float32(problem.scale * LOG2_E), lane)
        if problem.rest > 0:
            take_away(r.left, shared, stage + SUMS_AT, t)
        if problem.rest > 0 and t < HS:
            small -= small_of(shared, stage + SUMS_AT + 2 * SIZE, t)
        ahead = lists[listed + min(n + 2, count - 1)]
        stage = int32(4 * TILE + Q_STAGE - stage)
    cuda.syncthreads()  # R takes the first stage's place
    share = float32(1) / float32(problem.N)
    store_left(shared, int32(2 * TILE), r.left, share, dqkv, 0, False, t)
    if t < HS:
        rho[t] = share * small
    cuda.syncthreads()
    dphi, phi = cuda.local.array(NUMBERS, "float32"), cuda.local.array(NUMBERS, "float32")
    add_linear(r, phi, dphi, tiles + 2 * TILE, rho, problem.scale, lane)
    patch, first = int32(warp * 16 * PITCH), int32(warp * 16)
    stash(shared, patch, PITCH, r.dk, 0, N, float32(1), float32(1), lane)
    stash(shared, TILE + patch, PITCH, r.dv, 0, N, float32(1), float32(1), lane)
    cuda.syncwarp()
    copy_out(shared, patch, PITCH, dqkv, at + first * width, width, exist - first, 16, HS, lane)
    copy_out(
        shared,
        TILE + patch,
        PITCH,
        dqkv,
        at + problem.part + first * width,
        width,
        exist - first,
        16,
        HS,
        lane,
    )


def make_dq(HS):
    return specialise(sla_dq_kernel_v2, launch_bounds=(THREADS, 3), HS=HS)


def make_dkv(HS):
    return specialise(sla_dkv_kernel_v2, launch_bounds=(THREADS, 2), HS=HS)
