"""Launching Hopper's matmul: tensor maps, the variant that fits, and the second pass of a sum in
slices.

The width of a tile and the number of slices are given: ../products.py chooses them. Kernels for
several products and E4M3 are launched elsewhere: ../group.py, extras/fp8/matmul.py.

SOURCE
    kernel.py; PTX ISA, section 5.5.3, on tensor maps.
READ NEXT
    ../../conv2d/hopper/: the same pipeline, with a convolution's coordinates.
"""

from typing import NamedTuple

import numpy as np

from ....device import empty, launch
from ....device.half import in_bfloat16
from ....device.limits import MAX_ELEMENTS
from ....device.tensor_map import tensor_map
from ....dtypes import is_half
from ...reduce.second_pass import Sum, add_parts
from ..product import ProductFused, Stacked, distance
from ..split_half import add_partials, unused
from .epilogue import has_two_tiles
from .kernel import (
    ACTIVATION_KERNELS,
    BATCH_FLOAT_KERNELS,
    BATCH_KERNELS,
    KERNELS,
    PAIR_ACTIVATION_KERNELS,
    PAIR_KERNELS,
    STACK_KERNELS,
)
from .layout import (
    BK,
    BM,
    BOX,
    THREADS,
    Batch,
    Gaps,
    Gated,
    GatedArrays,
    GemmArrays,
    GemmEpilogue,
    GemmMaps,
    GemmPair,
    GemmStack,
    GemmWork,
    ScaledArrays,
    StackArrays,
    shared_bytes,
)
from .row_sums import ADD_ROW_SUMS, WRITE_ROW_SUMS
from .work import schedule, workers_of


class GemmTiling(NamedTuple):
    """width: of a tile; slices: of K; paired: by pairs of blocks, where there is such a kernel."""

    width: int
    slices: int = 1
    paired: bool = False


def takes_batch(M, K, dtype):
    """Whether one launch takes several products with a result of this type."""
    return M % BM == 0 and K % BK == 0 and is_half(dtype)


def takes_operands(a, b, dtype):
    """`takes_batch` for these `Operand`s; with a result of float32, too, if the product is A·Bᵀ."""
    (M, K), (_, N) = a.extents, b.extents
    single = not a.transposed and b.transposed and a.count * M * N < MAX_ELEMENTS
    return takes_batch(M, K, a.array.dtype if single else dtype)


# Tensor maps, kernels and workspaces --------------------------------------------------------------


def map_of(x, along_k, rows):
    """The tensor map of an operand: boxes of `rows` rows of 64 k, or of 64 k with a row of 64 for
    each."""
    return tensor_map(x, (BK, rows) if along_k else (BOX, BK))


def map_of_stack(stack, box):
    """The tensor map of weights (N, K) at equal distances: (G, N, K), boxes of `box` columns and
    rows of one weight."""
    N, K = stack.arrays[0].shape
    dims, strides = (K, N, len(stack.arrays)), (2 * K, distance(stack.arrays))
    return tensor_map(stack.flat, (*box, 1), dims=dims, strides=strides)


def map_of_halves(x):
    """The tensor map of rows of two halves of H columns: (M, 2, H), boxes of 64 rows and 64 columns
    of one half."""
    M, H = len(x), x.shape[1] // 2
    return tensor_map(x, (BOX, 1, BOX), dims=(H, 2, M), strides=(2 * H, 4 * H))


def stack_of(b, c):
    """The `Stacked` that B or C is, or None."""
    return next((x.array for x in (b, c) if isinstance(x.array, Stacked)), None)


def variant_of(a, b, c, tiling, fused):
    """(kernel, whether pairs of blocks run it)."""
    key = tiling.width, a.transposed, not b.transposed, is_half(c.array.dtype)
    if stack_of(b, c):
        return STACK_KERNELS[key], False
    if a.count > 1 and not key[3]:
        return BATCH_FLOAT_KERNELS[tiling.width], False
    if fused.symmetric or a.count > 1:
        return (fused.symmetric.kernels if fused.symmetric else BATCH_KERNELS)[key[:3]], False
    alone, pairs = KERNELS, PAIR_KERNELS
    if fused.activation:
        key, alone, pairs = (
            (tiling.width, fused.activation),
            ACTIVATION_KERNELS,
            PAIR_ACTIVATION_KERNELS,
        )
    paired = tiling.paired and key in pairs
    return (pairs if paired else alone)[key], paired


def maps_of(a, b, c, fused, width, columns):
    """The tensor maps of a launch. width: of a tile; columns: of a box of B"""
    map_a = map_of(a.array, not a.transposed, BM)
    if isinstance(b.array, Stacked):
        map_b = map_of_stack(b.array, (BK, columns) if b.transposed else (BOX, BK))
    else:
        map_b = map_of(b.array, b.transposed, columns)
    map_c = tensor_map(c.array, (BOX, BOX)) if is_half(c.array.dtype) else map_a
    map_d = map_a if fused.other is None else tensor_map(fused.other, (BOX, BOX))
    if fused.activation == "swiglu_gradient":
        map_c, map_d = map_of_halves(c.array), map_of_halves(fused.other)
    elif fused.activation == "swiglu" and fused.keeps_u:
        map_c = map_of_halves(c.array)
    map_2 = (
        map_of(b.second, False, width)
        if b.second is not None
        else map_of(a.second, True, BM)
        if a.second is not None
        else map_a
        if c.second is None
        else tensor_map(c.second, (BOX, BOX))
    )
    return GemmMaps(map_a, map_b, map_c, map_d, map_2)


def matrices_of(operands, fused, otherwise):
    """The `GemmStack` or `Batch` of the operands, or their `GemmPair`, whose seam is this column of
    one matrix."""
    if stack := stack_of(*operands[1:]):
        return GemmStack(len(stack.arrays[0]))
    pair = next((operand for operand in operands if operand.second is not None), None)
    if pair is not None:
        return GemmPair(pair.array.shape[1])
    if operands[0].count > 1 or fused.symmetric:
        return Batch(operands[0].extents[0])
    return GemmPair(otherwise)


def flat_of(x):
    """All elements of an array, or the memory of a `Stacked`, as one axis."""
    return x.flat if isinstance(x, Stacked) else x.reshape(-1)


def places_of_sums(a, c, row_sums, M, N, slices, tiles_n):
    """(where a launch writes its sums in float32, where those of rows, what it does with these);
    with several slices, or several tiles in a row, these are parts that a second pass adds up."""
    nothing = unused(a)
    target = nothing if is_half(c.dtype) else flat_of(c)
    if slices > 1:
        target = empty(
            (slices * (M * N + (0 if row_sums is None else tiles_n * M)),), np.float32, like=a
        )
    if row_sums is None:
        return target, nothing, 0
    if slices * tiles_n == 1 or isinstance(row_sums, Stacked):
        return target, flat_of(row_sums), ADD_ROW_SUMS
    return (
        target,
        (target[slices * M * N :] if slices > 1 else empty((tiles_n * M,), np.float32, like=a)),
        WRITE_ROW_SUMS,
    )


# The launch ---------------------------------------------------------------------------------------


def launch_hopper(a, b, c, tiling, fused=ProductFused()):  # noqa: B008 - never changed
    """C = A·B of float16 or bfloat16, with what is fused to it; C is like them, or float32 and then
    without a residual.

    a, b, c: `Operand`; tiling: `GemmTiling`; fused: `ProductFused`
    """
    (rows, K), (_, N), width = a.extents, b.extents, tiling.width
    # of a tile, or of each half in it
    M, N, columns = a.count * rows, N // fused.halves, width // fused.halves
    kernel, paired = variant_of(a, b, c, tiling, fused)
    maps = maps_of(a, b, c, fused, width, width // 2 if paired else columns)
    matrices = matrices_of((a, b, c), fused, max(N, K) + width)
    cluster, k_tiles, tiles_n = 2 if paired else 1, -(-K // BK), -(-N // columns)
    tiles_m, tiles_n = (
        (a.count, fused.symmetric.tiles_of(N, width))
        if fused.symmetric
        else (-(-M // (BM * cluster)), tiles_n)
    )
    workers = workers_of(a.array.backend.multiprocessors, paired)
    slice_tiles, slices, alone = schedule(tiles_m * tiles_n, tiling.slices, k_tiles, workers)
    units = slices * tiles_m * tiles_n
    target, sums, summing = places_of_sums(a.array, c.array, fused.row_sums, M, N, slices, tiles_n)
    biases = unused(a.array) if fused.bias is None else flat_of(fused.bias)
    residual, stack = fused.residual, stack_of(b, c)
    if stack:
        of_bias = fused.bias or fused.row_sums
        gaps = Gaps(stack.gap, of_bias.gap if of_bias else 0)
        arrays = StackArrays(target, biases, gaps, sums)
    elif isinstance(residual, Gated):
        arrays = GatedArrays(target, biases, residual, sums)
    else:
        added = a.array if residual is None else residual.reshape(M, N)
        arrays = (
            GemmArrays(target, biases, added, sums)
            if fused.scale is None
            else ScaledArrays(target, biases, added, fused.scale)
        )
    end = float(fused.alpha), int(fused.bias is not None)
    written = (
        fused.keeps_u and not fused.activation.endswith("gradient")
        if fused.activation
        else residual is not None
    )
    launch(
        in_bfloat16(kernel, a.array.dtype),
        cluster * min(units, workers),
        THREADS,
        maps,
        arrays,
        GemmWork(M, N, matrices, k_tiles, slice_tiles, tiles_m, tiles_n, units, alone),
        GemmEpilogue(
            *(end if slices == 1 else (1.0, 0)),
            int(written),
            int(fused.accumulate and slices == 1),
            summing,
            float(fused.diagonal),
        ),
        shared=shared_bytes(width, has_two_tiles(fused.activation)),
        cluster=cluster,
    )
    if slices > 1:
        add_partials(
            target,
            c.array,
            slices,
            biases,
            *end,
            fused.accumulate,
            fused.row_sums,
            slices * tiles_n,
        )
    elif summing == WRITE_ROW_SUMS:
        add_parts([Sum(sums, tiles_n, fused.row_sums, True)])
