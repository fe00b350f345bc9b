"""Flash attention forward, rung 4: float32 on the tensor cores, two mma for one.

WHAT IS NEW, AND WHY IT PAYS
    kernels/attention/forward_half.py with the products of products.py. A warp owns 16 queries; q is read from shared
    memory again for each tile of keys, for its fragments would fill the registers that the outputs
    need.
    A tile of keys is multiplied for so long that one stage of k and one of v are enough: v travels
    while q·kᵀ is computed, the next k while P·v is. So three blocks find room on a multiprocessor.
LAUNCH
    grid (ceil(T / 64), heads, B), 4 warps. Dynamic shared memory, KiB: q, k and v, for HS 32, 64,
    72: 27, 51, 57.
DETERMINISM
    one warp sums a query's outputs in the order of the keys.
SOURCE
    products.py, kernels/attention/forward_half.py.
READ NEXT
    backward.py
"""

import math

from ....device import cuda, float32, int32, int64, opaque
from ....device.async_copy import cp_async_commit, cp_async_wait, shared_address
from ....device.limits import WARP
from ....device.requires import requires
from ....device.specialise import Constant, specialise
from ....kernels.attention.forward_half import hide_keys, online_softmax, sum_of_row
from ....kernels.attention.fragments import by_chunk, by_row, clear
from ....kernels.attention.heads import LN_2, LOG2_E, LOWEST
from .products import (
    add_accumulators,
    add_products,
    fetch_rows,
    lane_place,
    left_of_accumulators,
    multiply_rows,
    opaque_thread,
    pitch_of,
    write_rows,
)

WARPS = 4
THREADS = WARP * WARPS
ROWS = 16  # queries of a warp
QUERIES = ROWS * WARPS
KEYS = 64  # of a tile
N = KEYS // 8  # fragments of scores side by side


def shared_bytes(HS):
    return (QUERIES + 2 * KEYS) * pitch_of(HS)


# The kernel's parts -------------------------------------------------------------------------------

HS = Constant()  # channels of a head
PITCH = Constant(lambda HS: pitch_of(HS))
C = Constant(lambda HS: HS // 8)  # fragments of outputs side by side
OUTPUTS, SCORES = Constant(lambda HS: HS // 2), N * 4  # numbers in a lane
K = Constant(lambda PITCH: QUERIES * PITCH)  # bytes from the start of shared memory, where q is
V = Constant(lambda K, PITCH: K + KEYS * PITCH)


@cuda.jit(device=True, forceinline=True)
def fetch_tile(tile, qkv, start, width, first, T, t):
    """Start the copies of a tile of keys, from `first` on, to an address: k, or v, whichever begins
    at `start`."""
    fetch_rows(tile, PITCH, qkv, start + first * width, width, T - first, KEYS, HS, t, THREADS)
    cp_async_commit()


@cuda.jit(device=True, forceinline=True)
def add_values(o, tile, s, shared, v_at):
    """o += P·v for a tile of keys; tile: accumulators of its own."""
    clear(tile, OUTPUTS)
    for n in range(N):
        p, p_both = left_of_accumulators(s, 4 * n)
        add_products(tile, 0, C, p, p_both, shared, v_at + n * 8 * PITCH, PITCH)
    add_accumulators(o, tile, OUTPUTS)


@cuda.jit(device=True, forceinline=True)
def write_outputs(y, logsumexp, o, largest, l, first_query, T, scale, t):
    """The epilogue: a warp's outputs and logsumexp."""
    head, image, heads = cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
    lane, row = int32(t % WARP), int32(first_query + t // WARP * ROWS)
    rows_start = (image * heads + head) * T
    query = int32(row + lane // 4)
    above, below = sum_of_row(l[0]), sum_of_row(l[1])
    if lane % 4 == 0 and query < T:
        logsumexp[rows_start + query] = scale * largest[0] + LN_2 * math.log2(above)
    if lane % 4 == 0 and query + 8 < T:
        logsumexp[rows_start + query + 8] = scale * largest[1] + LN_2 * math.log2(below)
    write_rows(
        y,
        ((image * T + row) * heads + head) * HS,
        int32(heads * HS),
        int32(T - row),
        o,
        C,
        float32(1) / above,
        float32(1) / below,
        lane,
    )


# The kernel ---------------------------------------------------------------------------------------


@requires("8.0")
def flash_attention_forward_kernel_v4(qkv, y, logsumexp, T, width, head_step, part, scale):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    q_tile = shared_address(shared)
    t = int32(cuda.threadIdx.x)
    lane, warp = int32(t % WARP), int32(t // WARP)
    first_query = int32(cuda.blockIdx.x * QUERIES)
    # of the head's q; its k is `part` further on
    start = cuda.blockIdx.z * T * width + cuda.blockIdx.y * head_step
    k_start, v_start = start + part, start + 2 * part
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
    fetch_tile(q_tile + K, qkv, k_start, width, int32(0), T, t)

    s = cuda.local.array(SCORES, "float32")
    o = cuda.local.array(OUTPUTS, "float32")
    tile = cuda.local.array(OUTPUTS, "float32")
    largest = cuda.local.array(2, "float32")
    l = cuda.local.array(2, "float32")
    shrink = cuda.local.array(2, "float32")
    clear(o, OUTPUTS)
    for i in range(2):
        largest[i], l[i] = LOWEST, float32(0)
    q_rows = q_tile + int32(warp * ROWS * PITCH + by_row(lane, PITCH))
    k_rows = q_tile + int32(K + by_chunk(lane, PITCH))
    v_at = int64(V + lane_place(lane, PITCH))
    c = float32(scale * LOG2_E)
    first = int32(0)
    while first < T:
        cp_async_wait(0)
        cuda.syncthreads()  # k is there, and the v of the tile before is no longer read
        fetch_tile(q_tile + V, qkv, v_start, width, first, T, opaque_thread(t))
        clear(s, SCORES)
        multiply_rows(s, N, q_rows, k_rows, PITCH, HS)
        cp_async_wait(0)
        cuda.syncthreads()  # v is there, and k is no longer read
        ahead = int32(first + KEYS)
        if ahead < T:
            fetch_tile(q_tile + K, qkv, k_start, width, ahead, T, opaque_thread(t))
        if ahead > T:
            hide_keys(s, 1, N, T - first, opaque(lane))
        online_softmax(s, o, largest, l, shrink, 1, N, C, c)
        add_values(o, tile, s, shared, v_at)
        first = ahead

    write_outputs(y, logsumexp, o, largest, l, first_query, T, scale, opaque_thread(t))


def make_forward(HS):
    """The kernel for one head size."""
    blocks = 4 if HS == 32 else 3  # on a multiprocessor: at most 128 registers a thread, or 168
    return specialise(flash_attention_forward_kernel_v4, launch_bounds=(THREADS, blocks), HS=HS)
