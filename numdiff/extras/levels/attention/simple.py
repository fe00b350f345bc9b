"""Flash attention, rung 1: one thread owns one row, and tiles of the other side pass by in shared
memory.

WHAT IT DOES
    Forward: a thread keeps one query's q and o, with its running maximum m and sum l (the online
    softmax of kernels/attention/reference.py). The block loads a tile of keys and values into shared memory, every
    thread takes its row through the whole tile, and the next tile comes. Nothing of size T × T
    exists anywhere.
    Backward: three kernels. Row sums D_i = dy_i·y_i; then one whose threads own queries and sum dq
    over the keys that pass by; then one whose threads own keys and sum dk and dv over the queries
    that pass by. The second and the third both compute P and dP: the price for keeping every sum in
    one thread, without atomics.
WHY IT IS SLOW
    A thread's rows of HS numbers are too many for its registers, and indexed by a loop: they live
    in local memory, which is cached device memory. So each multiply-add waits for two loads, one
    from there and one from shared memory.
LAUNCH
    grid (ceil(T / 64), heads, B), blocks of 64 threads; static shared memory 16, 32 or 36 KiB for
    HS 32, 64, 72.
DETERMINISM
    one thread sums over keys, or queries, in their order.
SOURCE
    kernels/attention/reference.py.
READ NEXT
    patches.py: how to hold rows in registers.
"""

import math

from ....device import cuda, float32, launch
from ....kernels.attention.heads import LOWEST
from ....kernels.attention.launcher import HEAD_SIZES, head_size, lacks_small_heads

ROWS = 64  # rows of a block, one a thread, and of a tile


@cuda.jit(device=True)
def load_rows(tile, x, start, step, first, T, HS):
    """tile = rows first … first + ROWS − 1 of a matrix whose row t is at start + t·step; zeros
    beyond row T."""
    for i in range(cuda.threadIdx.x, ROWS * HS, ROWS):
        t = first + i // HS
        tile[i] = float32(x[start + t * step + i % HS]) if t < T else float32(0)


@cuda.jit(device=True)
def score(q, tile, row, HS):
    """The dot product of a thread's own row and a row of a tile."""
    total = float32(0)
    for d in range(HS):
        total += q[d] * tile[row * HS + d]
    return total


@cuda.jit(device=True)
def add_scaled(o, factor, tile, row, HS):
    """o += factor · a row of a tile."""
    for d in range(HS):
        o[d] += factor * tile[row * HS + d]


@cuda.jit
def row_sums_kernel_v1(dy, y, D, rows, T, heads, HS):
    """D (B, heads, T), the products of the rows of dy and y, which are in memory as (B, T, heads)."""
    row = cuda.grid(1)
    if row < rows:
        total = float32(0)
        for d in range(HS):
            total += float32(dy[row * HS + d]) * float32(y[row * HS + d])
        token, head = row // heads, row % heads
        D[(token // T * heads + head) * T + token % T] = total


def make_kernels(HS):
    """(forward, dq, dkv) for one head size: the rows that a thread keeps are arrays of constant
    length."""
    SIZE = ROWS * HS

    def forward_kernel_v1(qkv, y, logsumexp, T, width, head_step, part, scale):
        k_tile = cuda.shared.array(SIZE, float32)
        v_tile = cuda.shared.array(SIZE, float32)
        q = cuda.local.array(HS, float32)
        o = cuda.local.array(HS, float32)
        head, image, heads = cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
        start = image * T * width + head * head_step  # of the head's q; its k is `part` further on
        t = cuda.blockIdx.x * ROWS + cuda.threadIdx.x
        for d in range(HS):
            q[d] = scale * float32(qkv[start + t * width + d]) if t < T else float32(0)
            o[d] = float32(0)
        m, l = LOWEST, float32(0)
        for first in range(0, T, ROWS):
            load_rows(k_tile, qkv, start + part, width, first, T, HS)
            load_rows(v_tile, qkv, start + 2 * part, width, first, T, HS)
            cuda.syncthreads()
            for j in range(min(ROWS, T - first)):
                s = score(q, k_tile, j, HS)
                if s > m:  # what is there was measured against the old maximum
                    shrink = math.exp(m - s)
                    l *= shrink
                    for d in range(HS):
                        o[d] *= shrink
                    m = s
                p = math.exp(s - m)
                l += p
                add_scaled(o, p, v_tile, j, HS)
            cuda.syncthreads()
        if t < T:
            for d in range(HS):
                y[((image * T + t) * heads + head) * HS + d] = o[d] / l
            logsumexp[(image * heads + head) * T + t] = m + math.log(l)

    def dq_kernel_v1(dy, qkv, logsumexp, D, dqkv, T, width, head_step, part, scale):
        k_tile = cuda.shared.array(SIZE, float32)
        v_tile = cuda.shared.array(SIZE, float32)
        q = cuda.local.array(HS, float32)
        g = cuda.local.array(HS, float32)
        dq = cuda.local.array(HS, float32)
        head, image, heads = cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
        start = image * T * width + head * head_step  # of the head's q; its k is `part` further on
        t = cuda.blockIdx.x * ROWS + cuda.threadIdx.x
        inside = t < T
        for d in range(HS):
            q[d] = scale * float32(qkv[start + t * width + d]) if inside else float32(0)
            g[d] = float32(dy[((image * T + t) * heads + head) * HS + d]) if inside else float32(0)
            dq[d] = float32(0)
        row = (image * heads + head) * T + t
        L = logsumexp[row] if inside else float32(0)
        mean = D[row] if inside else float32(0)
        for first in range(0, T, ROWS):
            load_rows(k_tile, qkv, start + part, width, first, T, HS)
            load_rows(v_tile, qkv, start + 2 * part, width, first, T, HS)
            cuda.syncthreads()
            for j in range(min(ROWS, T - first)):
                p = math.exp(score(q, k_tile, j, HS) - L)
                add_scaled(dq, p * (score(g, v_tile, j, HS) - mean), k_tile, j, HS)
            cuda.syncthreads()
        if inside:
            for d in range(HS):
                dqkv[start + t * width + d] = scale * dq[d]

    def dkv_kernel_v1(dy, qkv, logsumexp, D, dqkv, T, width, head_step, part, scale):
        q_tile = cuda.shared.array(SIZE, float32)
        g_tile = cuda.shared.array(SIZE, float32)
        k = cuda.local.array(HS, float32)
        v = cuda.local.array(HS, float32)
        dk = cuda.local.array(HS, float32)
        dv = cuda.local.array(HS, float32)
        head, image, heads = cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
        start = image * T * width + head * head_step  # of the head's q; its k is `part` further on
        t = cuda.blockIdx.x * ROWS + cuda.threadIdx.x
        inside = t < T
        for d in range(HS):
            k[d] = scale * float32(qkv[start + t * width + part + d]) if inside else float32(0)
            v[d] = float32(qkv[start + t * width + 2 * part + d]) if inside else float32(0)
            dk[d] = float32(0)
            dv[d] = float32(0)
        for first in range(0, T, ROWS):
            load_rows(q_tile, qkv, start, width, first, T, HS)
            load_rows(g_tile, dy, (image * T * heads + head) * HS, heads * HS, first, T, HS)
            cuda.syncthreads()
            for i in range(min(ROWS, T - first)):
                row = (image * heads + head) * T + first + i
                p = math.exp(score(k, q_tile, i, HS) - logsumexp[row]) if inside else float32(0)
                add_scaled(dv, p, g_tile, i, HS)
                add_scaled(dk, p * (score(v, g_tile, i, HS) - D[row]), q_tile, i, HS)
            cuda.syncthreads()
        if inside:
            for d in range(HS):
                dqkv[start + t * width + part + d] = scale * dk[d]
                dqkv[start + t * width + 2 * part + d] = dv[d]

    forward_kernel_v1.__name__ = f"flash_attention_forward_kernel_v1_{HS}"
    dq_kernel_v1.__name__ = f"flash_attention_dq_kernel_v1_{HS}"
    dkv_kernel_v1.__name__ = f"flash_attention_dkv_kernel_v1_{HS}"
    return cuda.jit(forward_kernel_v1), cuda.jit(dq_kernel_v1), cuda.jit(dkv_kernel_v1)


kernels = {
    (HS, name): kernel
    for HS in HEAD_SIZES
    for name, kernel in zip(("forward", "dq", "dkv"), make_kernels(HS), strict=True)
}


# What kernels/attention/launcher.py takes from an extension ---------------------------------------


def lacks(HS, limit):
    """None if there are kernels for heads of HS channels, else a clause with what they need."""
    return lacks_small_heads(HS)


def forward_of(qkv, heads):
    """(queries of a block, threads, kernel, bytes of dynamic shared memory)"""
    return ROWS, ROWS, kernels[head_size(qkv, heads), "forward"], 0


def launch_backward(arrays, y, qkv, heads, layout):
    """dqkv, the last of `arrays`: dy, qkv, logsumexp, D and it, flat; layout: (head_step, part,
    scale)."""
    B, T, width = qkv.shape
    HS = head_size(qkv, heads)
    dy, D, rows = arrays[0], arrays[3], B * T * heads
    launch(row_sums_kernel_v1, -(-rows // ROWS), ROWS, dy, y, D, rows, T, heads, HS)
    for name in ("dq", "dkv"):
        launch(kernels[HS, name], (-(-T // ROWS), heads, B), ROWS, *arrays, T, width, *layout)
