"""Sparse-linear attention, rung 2: what is known of each block of keys before any query looks at
it, in float16.

WHAT IS NEW, AND WHY IT PAYS
    q, k and v of a block pass through shared memory once, by cp.async, for everything: sums of
    columns in the order of choice.py; φ(k), from fragments in registers, in k's place; H = φ(k)ᵀ v
    by mma.sync, a warp for 16 of its rows, φ's fragments transposed in flight by ldmatrix; z from
    the φ that H has seen, rounded to float16.
LAUNCH
    grid (N, heads, B), 4 warps; dynamic shared memory 3 tiles: 15 or 27 KiB.
ACCURACY
    φ and H are float16, sums float32.
DETERMINISM
    one thread, or one mma, adds in the order of the rows.
COST
    per block 2 · 64 · HS² FLOPs, 6 · 64 · HS bytes read and 2 · HS² written: memory.
SOURCE
    reference.py.
READ NEXT
    forward_half.py
"""

from ....device import cuda, float32, int32
from ....device.async_copy import cp_async_commit, cp_async_wait, shared_address
from ....device.limits import WARP
from ....device.requires import requires
from ....device.specialise import specialise
from ....kernels.attention.fragments import (
    by_chunk,
    by_row,
    clear,
    copy_out,
    fetch_rows,
    load_left,
    pitch_of,
    stash,
)
from .choice import BLOCK, head_number, rows_of_block
from .simple import start_of_head
from .tiles_half import (
    HS,
    NINTH,
    NUMBERS,
    PITCH,
    SIZE,
    TAIL,
    THREADS,
    TILE,
    WARPS,
    WORDS,
    N,
    add_tail,
    add_transposed,
    features,
    joined,
    sum_runs,
    widen,
    write_tail,
)


def shared_bytes(HS):
    return 3 * BLOCK * pitch_of(HS)


@requires("7.5")
def sla_prepare_kernel_v2(qkv, q_mean, H, z, problem):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    partial = cuda.shared.array((3, WARPS, HS), float32)
    tiles, t = shared_address(shared), int32(cuda.threadIdx.x)
    lane, warp, width = int32(t % WARP), int32(t // WARP), problem.width
    rows = int32(rows_of_block(cuda.blockIdx.x, problem.T))
    block = head_number() * problem.N + cuda.blockIdx.x
    start = start_of_head(problem) + cuda.blockIdx.x * BLOCK * width
    for part in range(3):  # k, v, q
        at = start + (part + 1) % 3 * problem.part
        fetch_rows(tiles + int32(part * TILE), PITCH, qkv, at, width, rows, BLOCK, HS, t, THREADS)
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncthreads()
    sum_runs(partial, 0, shared, int32(2 * TILE), lane, warp)
    sum_runs(partial, 1, shared, int32(0), lane, warp)
    words, phi = cuda.local.array(WORDS, "uint32"), cuda.local.array(NUMBERS, "float32")
    load_left(words, tiles + int32(warp * 16 * PITCH + by_row(lane, PITCH)), 1, PITCH, HS)
    widen(phi, words)
    above, below = features(phi)
    row = int32(warp * 16 + lane // 4)
    cuda.syncthreads()  # k is no longer read
    stash(
        shared,
        int32(warp * 16 * PITCH),
        PITCH,
        phi,
        0,
        N,
        above if row < rows else float32(0),
        below if row + 8 < rows else float32(0),
        lane,
    )
    cuda.syncthreads()
    sum_runs(partial, 2, shared, int32(0), lane, warp)
    cuda.syncthreads()
    if t < HS:
        q_mean[block * HS + t] = joined(partial, 0, t) / float32(rows)
        z[block * 2 * HS + t] = joined(partial, 2, t)
        z[block * 2 * HS + HS + t] = joined(partial, 1, t)
    if warp * 16 < HS:
        clear(phi, NUMBERS)  # they become 16 rows of H
        add_transposed(
            phi,
            tiles + int32(warp * 32 + by_chunk(lane, PITCH)),
            tiles + int32(TILE + by_row(lane, PITCH)),
        )
        patch = int32(2 * TILE + warp * 16 * PITCH)
        stash(shared, patch, PITCH, phi, 0, N, float32(1), float32(1), lane)
        cuda.syncwarp()
        copy_out(
            shared,
            patch,
            PITCH,
            H,
            block * SIZE + warp * 16 * HS,
            int32(HS),
            int32(16),
            16,
            HS,
            lane,
        )
    if NINTH:
        tail = cuda.local.array(TAIL, "float32")
        clear(tail, TAIL)
        place = int32(by_row(lane, PITCH))
        add_tail(tail, tiles + place, tiles + int32(TILE + place), warp)
        write_tail(tail, H, block * SIZE, lane, warp)


def make_prepare(HS):
    return specialise(sla_prepare_kernel_v2, launch_bounds=(THREADS, 4), HS=HS)
