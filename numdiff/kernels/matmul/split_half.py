"""Sums of 16-bit products in several slices: how a kernel writes float32 results, and the pass that
adds slices up.

DETERMINISM
    slices are added in their order.
SOURCE
    the project's own.
READ NEXT
    hopper/
"""

import numpy as np

from ...device import DeviceArray, cuda, device_inline, float32, int32, launch, load4
from ...device.limits import FULL_MASK
from ...dtypes import is_half
from ..reduce.second_pass import Sum, add_parts
from .operands import ProductEpilogue
from .vectorised import write_four

PARTIALS_BLOCK = 256
PLANES = 4 * PARTIALS_BLOCK  # shared elements: four planes
# slices from which the warps of a block share them: one thread's loads would come one by one
MANY_PARTIALS = 8


def unused(x):
    """A float32 array for an argument that a kernel does not read: the memory of `x`."""
    return DeviceArray(x.backend, (x.nbytes // 4,), np.float32, x.memory, x.offset)


@device_inline
def write_fragment(c, start, a0, a1, a2, a3, row, column, lane, shape, bias, epilogue):
    """A fragment's four accumulators as float32. A lane has two elements of `row` and two of the
    row 8 below. It exchanges one pair with its neighbour, so that even lanes write 16 bytes of
    `row`, and odd ones 16 bytes of the row below.

    row: of the lane; column: where the fragment's 8 columns begin; shape: has M and N
    """
    even = lane & 1 == 0
    got0 = cuda.shfl_xor_sync(FULL_MASK, a2 if even else a0, 1)
    got1 = cuda.shfl_xor_sync(FULL_MASK, a3 if even else a1, 1)
    v0, v1, v2, v3 = a0, a1, got0, got1
    if not even:
        v0, v1, v2, v3 = got0, got1, a2, a3
        row = int32(row + 8)
    n = int32(column + lane % 4 // 2 * 4)
    if row < shape.M:
        write_four(c, start + row * shape.N + n, v0, v1, v2, v3, n, shape.N, bias, epilogue)


# The second pass of a split sum -------------------------------------------------------------------


@cuda.jit
def add_partials_kernel(partial, c, bias, slices, MN, N, epilogue):
    """Four neighbouring outputs a thread: their slices, in order, then what `write_output` does."""
    i = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * 4
    if i < MN:
        v0, v1, v2, v3 = load4(partial, i)
        for s in range(1, slices):
            p0, p1, p2, p3 = load4(partial, i + s * MN)
            v0, v1, v2, v3 = v0 + p0, v1 + p1, v2 + p2, v3 + p3
        write_four(c, i, v0, v1, v2, v3, int32(i % N), N, bias, epilogue)


@cuda.jit
def add_many_partials_kernel(partial, c, bias, slices, MN, N, epilogue):
    """The same for small results of many slices: the eight warps of a block share them, for the
    same 128 outputs.

    Warp w adds slices w, w + 8, …; then the first adds up the warps' sums, in their order.
    """
    sums = cuda.shared.array(PLANES, float32)  # in four planes: a warp touches neighbouring words
    t = cuda.threadIdx.x
    i = (cuda.blockIdx.x * 32 + t % 32) * 4
    v0 = v1 = v2 = v3 = float32(0)
    if i < MN:
        for s in range(t // 32, slices, PARTIALS_BLOCK // 32):
            p0, p1, p2, p3 = load4(partial, i + s * MN)
            v0, v1, v2, v3 = v0 + p0, v1 + p1, v2 + p2, v3 + p3
    sums[t], sums[PARTIALS_BLOCK + t] = v0, v1
    sums[2 * PARTIALS_BLOCK + t], sums[3 * PARTIALS_BLOCK + t] = v2, v3
    cuda.syncthreads()
    if t < 32 and i < MN:
        for w in range(32 + t, PARTIALS_BLOCK, 32):
            v0, v1 = v0 + sums[w], v1 + sums[PARTIALS_BLOCK + w]
            v2, v3 = v2 + sums[2 * PARTIALS_BLOCK + w], v3 + sums[3 * PARTIALS_BLOCK + w]
        write_four(c, i, v0, v1, v2, v3, int32(i % N), N, bias, epilogue)


def add_partials(partial, c, slices, bias, alpha, has_bias, accumulate, row_sums=None, row_parts=0):
    """c = or += alpha · the sum of `slices` partial results + bias, rounded once where c has 16
    bits; row_sums += that of its `row_parts`, which come after the others."""
    sums = []
    if alpha == 1 and not has_bias and not is_half(c.dtype):
        sums.append(Sum(partial[: slices * c.size], slices, c, accumulate))
    else:
        kernel, outputs = add_partials_kernel, 4 * PARTIALS_BLOCK
        if slices >= MANY_PARTIALS:
            kernel, outputs = add_many_partials_kernel, 4 * 32
        launch(
            kernel,
            -(-c.size // outputs),
            PARTIALS_BLOCK,
            partial,
            c.reshape(-1),
            bias,
            slices,
            c.size,
            c.shape[-1],
            ProductEpilogue(alpha, has_bias, int(accumulate)),
        )
    if row_sums is not None:
        sums.append(Sum(partial[slices * c.size :], row_parts, row_sums, True))
    if sums:
        add_parts(sums)
