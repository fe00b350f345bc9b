"""What the kernels of flash attention share: where a head is, the sums D of dy · y, and the sum of
partial dq over chunks of keys.

SHAPES
    as in reference.py; D (B, heads, T) float32
LAUNCH
    row sums: 128 threads for 16 rows; chunks: one thread for four numbers of dq. No shared memory.
DETERMINISM
    shuffles and chunks are added in an order that the shape alone decides.
SOURCE
    reference.py.
READ NEXT
    fragments.py
"""

import math
from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, load4, store4
from ...device.limits import FULL_MASK, WARP

LOWEST = float32(-3.4e38)  # stands for "no maximum yet"; −inf would give inf − inf = NaN
LOG2_E = float32(math.log2(math.e))
LN_2 = float32(math.log(2))
THREADS = 4 * WARP  # of the kernels of this file
SUM_LANES = 8  # threads that share a row in row_sums_kernel_v2
SUM_ROWS = THREADS // SUM_LANES


class AttentionProblem(NamedTuple):
    """qkv is (images, T, width); k of a head is `part` after its q, and its v as far after that. dq
    of (chunk of keys, image, token, head) has the stride `dq_row` by tokens and `dq_head` by heads;
    a chunk is `chunk_tiles` tiles."""

    T: int
    width: int
    head_step: int
    part: int
    dq_row: int
    dq_head: int
    chunk_tiles: int
    scale: float


class Head(NamedTuple):
    """The start of a block's head: its q in qkv, its dy, and its numbers of L and D."""

    start: int
    dy_start: int
    dy_step: int
    numbers_start: int


@device_inline
def head_of(problem, HS):
    head, image, heads = cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
    return Head(
        image * problem.T * problem.width + head * problem.head_step,
        (image * problem.T * heads + head) * HS,
        int32(heads * HS),
        (image * heads + head) * problem.T,
    )


@cuda.jit
def row_sums_kernel_v2(dy, y, D, rows, T, heads, HS):
    """D (B, heads, T), the products of the rows of dy and y, which are in memory as (B, T, heads).

    Eight threads share a row: they read 128 neighbouring bytes at a time."""
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


@cuda.jit
def add_chunks_kernel(partial, dqkv, count, chunks, width, head_step, heads, HS):
    """dq of dqkv = the sum over chunks of partial (chunks, B, T, heads, HS); a thread has four of
    B·T·C = count."""
    i = cuda.grid(1) * 4
    if i < count:
        a, b, c, d = load4(partial, i)
        for chunk in range(1, chunks):
            a1, b1, c1, d1 = load4(partial, chunk * count + i)
            a, b, c, d = a + a1, b + b1, c + c1, d + d1
        row, column = i // (heads * HS), i % (heads * HS)
        store4(dqkv, row * width + column // HS * head_step + column % HS, a, b, c, d)
