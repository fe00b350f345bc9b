"""Sparse-linear attention forward, rung 2: float16 and mma.sync, the critical blocks one after the
other.

WHAT IS NEW, AND WHY IT PAYS
    The loop is ../forward_half.py's with 64 queries a block, and the next tile of keys is the next
    of a list instead of the next in memory: its number is read two rounds ahead, its copy starts
    one round ahead.
    With k and v comes the block's H, half as many bytes more from the L2 cache, and is subtracted
    from the total in the threads' registers: S needs no kernel of its own.
    Then S as float16 in shared memory, φ(q) from the fragments of q that are there, o_l = φ(q) S,
    o_l Wᵀ, and the sum with o_s: two more products, as much as one more block, without a byte in
    between.
LAUNCH
    grid (N, heads, B), 4 warps; dynamic shared memory, KiB: q and two stages of k, v, H and z, 29,
    62 or 66.
ACCURACY
    q, k, v, P, φ, S and o_l are float16, everything else float32.
DETERMINISM
    one warp sums a query's outputs, one thread a number of S, in the order of the list.
COST
    per block of queries 4 · 64 · 64 · HS FLOPs and 4 · 64 · HS + 2 · HS² bytes from the L2 cache a
    critical block; 4 · 64 · HS² FLOPs.
SOURCE
    reference.py; ../forward_half.py.
READ NEXT
    rest_half.py
"""

import math
from typing import NamedTuple

from ....device import cuda, float32, int32, opaque
from ....device.async_copy import cp_async_commit, cp_async_wait, shared_address
from ....device.limits import WARP
from ....device.requires import requires
from ....device.specialise import Constant, specialise
from ....kernels.attention.forward_half import hide_keys, online_softmax, sum_of_row
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
from ....kernels.attention.heads import LN_2, LOG2_E, LOWEST
from .choice import BLOCK, head_number
from .simple import start_of_head
from .tiles_half import (
    FLOOR,
    HS,
    LEFT,
    NUMBERS,
    PITCH,
    SIZE,
    SQUARE,
    THREADS,
    TILE,
    WORDS,
    N,
    dot_vector,
    features,
    fetch_small,
    fetch_square,
    fetch_sums,
    load_total,
    narrow,
    scale_rows,
    small_of,
    square_bytes,
    store_left,
    sums_bytes,
    take_away,
    tile_bytes,
    times_square,
    times_transposed,
    widen,
)

KEYS = BLOCK // 8  # fragments of scores side by side
SCORES = BLOCK // 2  # in a lane
SCRATCH = Constant(lambda HS: max(SCORES, HS // 2))  # o_l takes their place
BOTH = Constant(lambda HS: 2 * HS)  # numbers of Z and of z's total
GIVEN = Constant()  # whether S is there (rest_half.py), not to be made of H
STAGE = Constant(lambda HS, GIVEN: stage_bytes(HS, GIVEN))
# of z, in a stage
SMALL_AT = Constant(lambda HS, GIVEN: 2 * tile_bytes(HS) + (0 if GIVEN else 2 * HS * HS))


def stage_bytes(HS, given):
    """Bytes of k, v, H and z; without H there is room for S and W."""
    return (
        max(2 * tile_bytes(HS) + 4 * HS, 2 * square_bytes(HS))
        if given
        else 2 * tile_bytes(HS) + sums_bytes(HS)
    )


def shared_bytes(HS, given=False):
    return tile_bytes(HS) + 2 * stage_bytes(HS, given)


class SlaRegisters(NamedTuple):
    """A lane's: fragments of q; scores; outputs; packed probabilities; maxima and sums of two
    queries, their factors; what is left of H's total."""

    q: object
    s: object
    o: object
    p: object
    largest: object
    l: object
    shrink: object
    left: object


@cuda.jit(device=True, forceinline=True)
def fetch_block(stage, qkv, sums, start, problem, j, t):
    """Start the copies of a block of keys to an address: k, v, H and z."""
    at = start + problem.part + j * BLOCK * problem.width
    exist = int32(problem.T - j * BLOCK)
    fetch_rows(stage, PITCH, qkv, at, problem.width, exist, BLOCK, HS, t, THREADS)
    fetch_rows(
        stage + TILE, PITCH, qkv, at + problem.part, problem.width, exist, BLOCK, HS, t, THREADS
    )
    block = head_number() * problem.N + j
    if GIVEN:
        fetch_small(stage + SMALL_AT, sums[1], block * 2 * HS, t)
    else:
        fetch_sums(stage + int32(2 * TILE), sums[0], block * SIZE, sums[1], block * 2 * HS, t)
    cp_async_commit()


@cuda.jit(device=True, forceinline=True)
def attend(r, tile, exist, c, lane):
    """The softmax attention of the warp's queries to a block of keys at an address."""
    clear(r.s, SCORES)
    for n in range(0, KEYS, 2):
        rows = tile + n * 8 * PITCH
        multiply_rows(
            r.s, n, KEYS, r.q, rows + by_chunk(lane, PITCH), rows + by_row(lane, PITCH), 1, HS
        )
    if exist < BLOCK:
        hide_keys(r.s, 1, KEYS, exist, lane)
    online_softmax(r.s, r.o, r.largest, r.l, r.shrink, 1, KEYS, N, c)
    for n in range(0, KEYS, 2):
        pack(r.p, 0, r.s, 4 * n)
        add_products(r.o, r.p, tile + int32(TILE + n * 8 * PITCH + by_row(lane, PITCH)), 1, HS)


@cuda.jit(device=True, forceinline=True)
def reciprocal_of(left, whole):
    """r of a row: reference.py's denominator."""
    floor = FLOOR * whole
    return float32(1) / left if left >= floor else float32(-1) / floor


@cuda.jit(device=True, forceinline=True)
def linear_part(r, phi, tiles, small, some, lane):
    """o_l of the warp's queries in r.s; r of the upper rows and of the lower. S is the tile at the
    address; small: Z, and z of all blocks, over N; some: whether any block is left."""
    widen(phi, r.q)
    above, below = features(phi)
    scale_rows(phi, above, below)
    left, whole = dot_vector(phi, small, 0, lane), dot_vector(phi, small, HS, lane)
    above, below = float32(0), float32(0)
    if some:
        above, below = reciprocal_of(left[0], whole[0]), reciprocal_of(left[1], whole[1])
    narrow(r.q, phi)
    clear(r.s, NUMBERS)
    times_square(r.s, r.q, tiles, lane)
    scale_rows(r.s, abs(above), abs(below))
    return above, below


@cuda.jit(device=True, forceinline=True)
def join(r, tile, bias, above, below, lane):
    """o = o_s + o_l Wᵀ + b; o_l is in r.s; W's tile at the address; above, below: 1 / l."""
    scale_rows(r.o, above, below)
    narrow(r.q, r.s)
    times_transposed(r.o, r.q, tile, lane)
    for n in range(N):
        c = 8 * n + lane % 4 * 2
        r.o[4 * n], r.o[4 * n + 1] = r.o[4 * n] + bias[c], r.o[4 * n + 1] + bias[c + 1]
        r.o[4 * n + 2], r.o[4 * n + 3] = r.o[4 * n + 2] + bias[c], r.o[4 * n + 3] + bias[c + 1]


@cuda.jit(device=True, forceinline=True)
def write_rows(r, shared, y, numbers, problem, weights, sums, keeps, t):
    """The epilogue: y, logsumexp and r of the warp's queries. numbers: (logsumexp, r); weights: r;
    sums: l."""
    lane, warp = int32(t % WARP), int32(t // WARP)
    first = int32(cuda.blockIdx.x * BLOCK + warp * 16)
    patch = int32(warp * 16 * PITCH)
    stash(shared, patch, PITCH, r.o, 0, N, float32(1), float32(1), lane)
    at, row = head_number() * problem.T, int32(first + lane // 4)
    if keeps and lane % 4 == 0 and row < problem.T:
        numbers[0][at + row] = problem.scale * r.largest[0] + LN_2 * math.log2(sums[0])
        numbers[1][at + row] = weights[0]
    if keeps and lane % 4 == 0 and row + 8 < problem.T:
        numbers[0][at + row + 8] = problem.scale * r.largest[1] + LN_2 * math.log2(sums[1])
        numbers[1][at + row + 8] = weights[1]
    cuda.syncwarp()
    heads = cuda.gridDim.y
    to = ((cuda.blockIdx.z * problem.T + first) * heads + cuda.blockIdx.y) * HS
    copy_out(shared, patch, PITCH, y, to, int32(heads * HS), int32(problem.T - first), 16, HS, lane)


@requires("7.5")
def sla_forward_kernel_v2(
    qkv, lists, sums, totals, layer, y, logsumexp, r_out, S, Z, problem, keeps
):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    small = cuda.shared.array(BOTH, float32)
    tiles, t = shared_address(shared), int32(cuda.threadIdx.x)
    lane, warp, count = int32(t % WARP), int32(t // WARP), problem.count
    start, i, head = start_of_head(problem), int32(cuda.blockIdx.x), head_number()
    listed = (head * problem.N + i) * count
    exist = int32(problem.T - i * BLOCK)
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
    j, ahead = lists[listed], lists[listed + min(1, count - 1)]
    fetch_block(tiles + TILE, qkv, sums, start, problem, j, t)
    r = SlaRegisters(
        cuda.local.array(WORDS, "uint32"),
        cuda.local.array(SCRATCH, "float32"),
        cuda.local.array(NUMBERS, "float32"),
        cuda.local.array(4, "uint32"),
        cuda.local.array(2, "float32"),
        cuda.local.array(2, "float32"),
        cuda.local.array(2, "float32"),
        cuda.local.array(LEFT, "float32"),
    )
    clear(r.o, NUMBERS)
    for k in range(2):
        r.largest[k], r.l[k] = LOWEST, float32(0)
    if not GIVEN:
        load_total(r.left, totals[0], head * SIZE, t)
    if t < HS:  # a thread's own, until all have ended the loop
        small[t] = totals[1][head * 2 * HS + t]
        small[HS + t] = small[t] / float32(problem.N)
    stage = int32(TILE)
    for n in range(count):
        cp_async_wait(0)
        cuda.syncthreads()  # the block is there, and the other stage is no longer read
        if n + 1 < count:
            fetch_block(
                tiles + int32(2 * TILE + STAGE - stage), qkv, sums, start, problem, ahead, opaque(t)
            )
        elif GIVEN:  # the other stage is free for S and W
            fetch_square(
                tiles + int32(2 * TILE + STAGE - stage), S, (head * problem.N + i) * SIZE, opaque(t)
            )
            fetch_square(tiles + int32(2 * TILE + SQUARE + STAGE - stage), layer[0], 0, opaque(t))
            cp_async_commit()
        if n == 0:
            load_left(r.q, tiles + int32(warp * 16 * PITCH + by_row(lane, PITCH)), 1, PITCH, HS)
        attend(
            r,
            tiles + stage,
            int32(problem.T - j * BLOCK),
            float32(problem.scale * LOG2_E),
            int32(opaque(t) % WARP),
        )
        t_sums = opaque(t)
        if problem.rest > 0:
            if not GIVEN:
                take_away(r.left, shared, stage + int32(2 * TILE), t_sums)
            if t_sums < HS:
                small[t_sums] -= small_of(shared, stage + SMALL_AT, t_sums)
        j, ahead = ahead, lists[listed + min(n + 2, count - 1)]
        stage = int32(2 * TILE + STAGE - stage)

    t = opaque(t)
    lane = int32(t % WARP)
    if not GIVEN:
        cuda.syncthreads()  # the stages are no longer read: S and W take the first one's place
        stage, block = int32(TILE), head * problem.N + i
        fetch_square(tiles + int32(TILE + SQUARE), layer[0], 0, t)
        cp_async_commit()
        store_left(
            shared, stage, r.left, float32(1) / float32(problem.N), S, block * SIZE, keeps, t
        )
    if t < HS:
        small[t] = small[t] / float32(problem.N)
        if keeps:
            Z[(head * problem.N + i) * HS + t] = small[t]
    cp_async_wait(0)
    cuda.syncthreads()
    weights = linear_part(
        r,
        cuda.local.array(NUMBERS, "float32"),
        tiles + stage,
        small,
        problem.rest == 0 or count < problem.N,
        lane,
    )
    l = sum_of_row(r.l[0]), sum_of_row(r.l[1])
    join(r, tiles + int32(stage + SQUARE), layer[1], float32(1) / l[0], float32(1) / l[1], lane)
    write_rows(r, shared, y, (logsumexp, r_out), problem, weights, l, keeps, opaque(t))


def make_forward(HS, given=False):
    """given: S is there, as rung 3 has it."""
    return specialise(
        sla_forward_kernel_v2,
        launch_bounds=(THREADS, 4 if given and HS < 72 else 3),
        HS=HS,
        GIVEN=given,
        name=f"sla_forward_kernel_v{3 if given else 2}_{HS}",
    )
