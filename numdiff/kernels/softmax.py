"""Softmax over the last axis: a row at a time, first by a block, then by a warp.

MATHEMATICS
    y_n = e^(s·x_n − m) / Σ_j e^(s·x_j − m),  m = max_j s·x_j        s is a scale, and m keeps e^… from overflowing
    dx_n = s · y_n · (dy_n − Σ_j dy_j y_j)                            since ∂y_j/∂x_n = s · y_j (δ_jn − y_n)
SHAPES
    x, y, dy, dx (..., N) float32: read as (rows, N)
VERSIONS
    v1 block-per-row: one block a row: its 128 threads each see every 128th element, and meet in
       shared memory to combine what they found in a tree of seven steps with a barrier each.
    v2 warp-per-row: one warp a row: 32 threads need no barrier and no shared memory, for they can
       read each other's registers (shuffles, five steps). And maximum and sum come from one pass
       over the row: a thread whose maximum grows multiplies the sum it has by e^(old − new). The
       forward reads x twice instead of three times.
    v3 vectorised: as v2 with 16-byte loads and stores: a quarter of the memory instructions.
LAUNCH
    v1 one block of 128 threads a row, 512 bytes of shared memory; v2, v3 one block of 128 threads
    for four rows.
DETERMINISM
    which thread adds which element, and the tree, depend on N alone.
COST
    forward reads x and writes y, backward reads dy and y and writes dx; the further passes over a
    row find it in cache.
    Roof: memory bandwidth.
SOURCE
    the one-pass maximum and sum: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.
READ NEXT
    attention/unfused.py, which has it between two products.
"""

import math

import numpy as np

from ..device import cuda, empty_like, float32, launch, load4, store4
from ..device.common import warp_sum
from ..device.limits import FULL_MASK, WARP
from ..dtypes import in_single
from .operation import Problem, Version, operation, single

BLOCK = 128  # threads: a power of two, for the tree
ROWS = BLOCK // WARP  # that a block of v2 and v3 takes, one to each of its warps
LOWEST = float32(-3.4e38)  # stands for "no maximum yet"; −inf would give inf − inf = NaN


# References ---------------------------------------------------------------------------------------


@in_single()
def softmax_forward_reference(x, scale=1.0, out=None):
    y = np.multiply(x, x.dtype.type(scale), out=out)
    y -= y.max(axis=-1, keepdims=True)
    np.exp(y, out=y)
    y /= y.sum(axis=-1, keepdims=True)
    return y


@in_single()
def softmax_backward_reference(dy, y, scale=1.0, out=None):
    mean = np.einsum("...n,...n->...", dy, y)[..., None]  # of dy under the probabilities y
    dx = np.subtract(dy, mean, out=out)
    dx *= y
    if scale != 1.0:
        dx *= dx.dtype.type(scale)
    return dx


# v1: one block a row ------------------------------------------------------------------------------


@cuda.jit(device=True)
def block_max(shared, t, value):
    """The largest `value` of the block's threads, in all of them."""
    shared[t] = value
    cuda.syncthreads()
    half = BLOCK // 2
    while half > 0:
        if t < half:
            shared[t] = max(shared[t], shared[t + half])
        cuda.syncthreads()
        half //= 2
    result = shared[0]
    cuda.syncthreads()  # the next call overwrites shared[0]
    return result


@cuda.jit(device=True)
def block_sum(shared, t, value):
    """The sum of the block's values, in all of its threads."""
    shared[t] = value
    cuda.syncthreads()
    half = BLOCK // 2
    while half > 0:
        if t < half:
            shared[t] += shared[t + half]
        cuda.syncthreads()
        half //= 2
    result = shared[0]
    cuda.syncthreads()
    return result


@cuda.jit
def softmax_forward_kernel_v1(x, y, N, scale):
    shared = cuda.shared.array(BLOCK, float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    largest = LOWEST
    for n in range(t, N, BLOCK):
        largest = max(largest, scale * float32(x[row * N + n]))
    largest = block_max(shared, t, largest)
    total = float32(0)
    for n in range(t, N, BLOCK):
        total += math.exp(scale * float32(x[row * N + n]) - largest)
    total = block_sum(shared, t, total)
    for n in range(t, N, BLOCK):
        y[row * N + n] = math.exp(scale * float32(x[row * N + n]) - largest) / total


@cuda.jit
def softmax_backward_kernel_v1(dy, y, dx, N, scale):
    shared = cuda.shared.array(BLOCK, float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    mean = float32(0)
    for n in range(t, N, BLOCK):
        mean += float32(dy[row * N + n]) * float32(y[row * N + n])
    mean = block_sum(shared, t, mean)
    for n in range(t, N, BLOCK):
        dx[row * N + n] = scale * float32(y[row * N + n]) * (float32(dy[row * N + n]) - mean)


# v2: one warp a row, one pass for maximum and sum -------------------------------------------------


@cuda.jit(device=True)
def include(largest, total, value):
    """(maximum, sum of e^(… − maximum)) of a set of values, with one more value."""
    if value > largest:
        return value, total * math.exp(largest - value) + float32(1)
    return largest, total + math.exp(value - largest)


@cuda.jit(device=True)
def warp_softmax(largest, total):
    """The (maximum, sum) of all lanes, from each lane's own, in all of them."""
    distance = WARP // 2
    while distance > 0:
        other_largest = cuda.shfl_xor_sync(FULL_MASK, largest, distance)
        other_total = cuda.shfl_xor_sync(FULL_MASK, total, distance)
        larger = max(largest, other_largest)
        total = total * math.exp(largest - larger) + other_total * math.exp(other_largest - larger)
        largest = larger
        distance //= 2
    return largest, total


@cuda.jit
def softmax_forward_kernel_v2(x, y, rows, N, scale):
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    lane = cuda.threadIdx.x % WARP
    if row < rows:  # the same for a whole warp, so its shuffles are complete
        largest, total = LOWEST, float32(0)
        for n in range(lane, N, WARP):
            largest, total = include(largest, total, scale * float32(x[row * N + n]))
        largest, total = warp_softmax(largest, total)
        for n in range(lane, N, WARP):
            y[row * N + n] = math.exp(scale * float32(x[row * N + n]) - largest) / total


@cuda.jit
def softmax_backward_kernel_v2(dy, y, dx, rows, N, scale):
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    lane = cuda.threadIdx.x % WARP
    if row < rows:
        mean = float32(0)
        for n in range(lane, N, WARP):
            mean += float32(dy[row * N + n]) * float32(y[row * N + n])
        mean = warp_sum(mean)
        for n in range(lane, N, WARP):
            dx[row * N + n] = scale * float32(y[row * N + n]) * (float32(dy[row * N + n]) - mean)


# v3: 16 bytes at a time ---------------------------------------------------------------------------


@cuda.jit
def softmax_forward_kernel_v3(x, y, rows, N, scale):
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    lane = cuda.threadIdx.x % WARP
    if row < rows:
        largest, total = LOWEST, float32(0)
        for n in range(4 * lane, N, 4 * WARP):
            x0, x1, x2, x3 = load4(x, row * N + n)
            x0, x1, x2, x3 = scale * x0, scale * x1, scale * x2, scale * x3
            # one correction of the sum for four values
            larger = max(largest, max(max(x0, x1), max(x2, x3)))
            total *= math.exp(largest - larger)
            total += (
                math.exp(x0 - larger)
                + math.exp(x1 - larger)
                + math.exp(x2 - larger)
                + math.exp(x3 - larger)
            )
            largest = larger
        largest, total = warp_softmax(largest, total)
        inverse = float32(1) / total
        for n in range(4 * lane, N, 4 * WARP):
            x0, x1, x2, x3 = load4(x, row * N + n)
            store4(
                y,
                row * N + n,
                inverse * math.exp(scale * x0 - largest),
                inverse * math.exp(scale * x1 - largest),
                inverse * math.exp(scale * x2 - largest),
                inverse * math.exp(scale * x3 - largest),
            )


@cuda.jit
def softmax_backward_kernel_v3(dy, y, dx, rows, N, scale):
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    lane = cuda.threadIdx.x % WARP
    if row < rows:
        mean = float32(0)
        for n in range(4 * lane, N, 4 * WARP):
            g0, g1, g2, g3 = load4(dy, row * N + n)
            y0, y1, y2, y3 = load4(y, row * N + n)
            mean += (g0 * y0 + g1 * y1) + (g2 * y2 + g3 * y3)
        mean = warp_sum(mean)
        for n in range(4 * lane, N, 4 * WARP):
            g0, g1, g2, g3 = load4(dy, row * N + n)
            y0, y1, y2, y3 = load4(y, row * N + n)
            store4(
                dx,
                row * N + n,
                scale * y0 * (g0 - mean),
                scale * y1 * (g1 - mean),
                scale * y2 * (g2 - mean),
                scale * y3 * (g3 - mean),
            )


# Cost ---------------------------------------------------------------------------------------------


def softmax_forward_cost(rows, N):
    """(bytes, FLOPs)."""
    return 8 * rows * N, 5 * rows * N


def softmax_backward_cost(rows, N):
    return 12 * rows * N, 5 * rows * N


# Operations ---------------------------------------------------------------------------------------


def _lacks_fours(*arrays):
    """What v3 needs and these arrays lack; None if rows begin at multiples of 16 bytes."""
    N = arrays[0].shape[-1]
    if N % 4 or any(a is not None and a.offset % 16 for a in arrays):
        return f"moves four elements at a time, and rows of {N} are not made of aligned fours"
    return None


def _launch_rows(version, scale, *arrays):
    """Launch a kernel over the rows of `arrays`, the last of which is the result."""
    N = arrays[0].shape[-1]
    rows = arrays[0].size // N
    if any(a.shape != arrays[0].shape for a in arrays):
        raise ValueError(f"softmax arrays differ in shape: {[a.shape for a in arrays]}")
    flat = [a.reshape(-1) for a in arrays]
    if version.name == "block-per-row":
        launch(version.kernel, rows, BLOCK, *flat, N, float(scale))
    else:
        launch(version.kernel, -(-rows // ROWS), BLOCK, *flat, rows, N, float(scale))
    return arrays[-1]


@operation(
    reference=softmax_forward_reference,
    cost=softmax_forward_cost,
    versions=[
        Version("block-per-row", softmax_forward_kernel_v1),
        Version("warp-per-row", softmax_forward_kernel_v2),
        Version("vectorised", softmax_forward_kernel_v3, fits=lambda x, out: _lacks_fours(x, out)),
    ],
    problems=[
        Problem(x=single(3, 7), scale=0.7),
        Problem(x=single(5, 36), scale=0.7),
        Problem(x=single(49152, 256), scale=0.125, measured=True),
    ],
)
def softmax_forward(x, scale=1.0, out=None, version=None):
    """softmax(scale · x) over the last axis, as a new array or in `out` (which may be x itself)."""
    return _launch_rows(version, scale, x, empty_like(x) if out is None else out)


@operation(
    reference=softmax_backward_reference,
    cost=softmax_backward_cost,
    versions=[
        Version("block-per-row", softmax_backward_kernel_v1),
        Version("warp-per-row", softmax_backward_kernel_v2),
        Version(
            "vectorised",
            softmax_backward_kernel_v3,
            fits=lambda dy, y, out: _lacks_fours(dy, y, out),
        ),
    ],
    problems=[
        Problem(dy=single(3, 7), y=single(3, 7), scale=0.7),
        Problem(dy=single(5, 36), y=single(5, 36), scale=0.7),
        Problem(dy=single(49152, 256), y=single(49152, 256), scale=0.125, measured=True),
    ],
)
def softmax_backward(dy, y, scale=1.0, out=None, version=None):
    """dx from dy and the forward's result y, as a new array or in `out` (which may be dy itself)."""
    return _launch_rows(version, scale, dy, y, empty_like(y) if out is None else out)
