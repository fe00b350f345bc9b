"""Launching Hopper's matmul: tensor maps, the variant that fits, and the second pass of a sum in slices.

The width of a tile and the number of slices are given: ../choice.py chooses them. Kernels for weights at equal
distances, several products and E4M3 are launched elsewhere: ../stack.py, ../group.py, ../hopper_fp8.py.

SOURCE
    kernel.py; PTX ISA, section 5.5.3, on tensor maps.
READ NEXT
    ../../conv2d/hopper/: the same pipeline, with a convolution's coordinates.
"""
import numpy as np

from ....device import empty, launch
from ....device.half import in_bfloat16
from ....device.tensor_map import tensor_map
from ....dtypes import is_half
from ...second_pass import Sum, add_parts
from ..split_half import add_partials, unused
from .kernel import ACTIVATION_KERNELS, BATCH_KERNELS, KERNELS, PAIR_ACTIVATION_KERNELS, PAIR_KERNELS, SYMMETRIC_KERNELS
from .layout import BK, BM, BOX, THREADS, TWO_TILES, Arrays, Epilogue, Gated, Maps, Work, shared_bytes
from .row_sums import ADD_ROW_SUMS, WRITE_ROW_SUMS
from .symmetric_epilogue import tiles_of
from .work import schedule, workers_of


def takes_batch(M, K, dtype):
    """Whether one launch takes several products with a result of this type."""
    return M % BM == 0 and K % BK == 0 and is_half(dtype)


def map_of(x, along_k, rows):
    """The tensor map of an operand: boxes of `rows` rows of 64 k, or of 64 k with a row of 64 for each."""
    return tensor_map(x, (BK, rows) if along_k else (BOX, BK))


def map_of_halves(x):
    """The tensor map of rows of two halves of H columns: (M, 2, H), boxes of 64 rows and 64 columns of one half."""
    M, H = len(x), x.shape[1] // 2
    return tensor_map(x, (BOX, 1, BOX), dims=(H, 2, M), strides=(2 * H, 4 * H))


def variant_of(key, activation, batch, symmetric, paired):
    """(kernel, whether pairs of blocks run it). key: (width, transpose_a, not transpose_b, whether c has 16 bits), or
    (width, activation)."""
    if symmetric or batch > 1:
        return (SYMMETRIC_KERNELS if symmetric else BATCH_KERNELS)[key[:3]], False
    alone, pairs = (ACTIVATION_KERNELS, PAIR_ACTIVATION_KERNELS) if activation else (KERNELS, PAIR_KERNELS)
    paired = paired and key in pairs
    return (pairs if paired else alone)[key], paired


def maps_of(a, b, c, other, second, transpose_a, transpose_b, activation, keeps_u, width, columns):
    """The tensor maps of a launch, and the columns of the first of TWO MATRICES AS ONE, or None.

    columns: of a box of b
    """
    map_a, map_b = map_of(a, not transpose_a, BM), map_of(b, transpose_b, columns)
    map_c = tensor_map(c, (BOX, BOX)) if is_half(c.dtype) else map_a
    map_d = map_a if other is None else tensor_map(other, (BOX, BOX))
    if activation == "swiglu_gradient":
        map_c, map_d = map_of_halves(c), map_of_halves(other)
    elif activation == "swiglu" and keeps_u:
        map_c = map_of_halves(c)
    if second is None:
        return Maps(map_a, map_b, map_c, map_d, map_a), None
    split = b if transpose_a else a if transpose_b else c
    map_2 = (map_of(second, False, width) if split is b else map_of(second, True, BM) if split is a else
             tensor_map(second, (BOX, BOX)))
    return Maps(map_a, map_b, map_c, map_d, map_2), split.shape[1]


def places_of_sums(a, c, row_sums, M, N, slices, tiles_n):
    """(where a launch writes its sums in float32, where those of rows, what it does with these); with several slices,
    or several tiles in a row, these are parts that a second pass adds up."""
    nothing = unused(a)
    target = nothing if is_half(c.dtype) else c.reshape(-1)
    if slices > 1:
        target = empty((slices * (M * N + (0 if row_sums is None else tiles_n * M)),), np.float32, like=a)
    if row_sums is None:
        return target, nothing, 0
    if slices * tiles_n == 1:
        return target, row_sums, ADD_ROW_SUMS
    return target, (target[slices * M * N:] if slices > 1 else
                    empty((tiles_n * M,), np.float32, like=a)), WRITE_ROW_SUMS


def launch_hopper(a, b, c, M, N, K, transpose_a, transpose_b, bias, residual, alpha, accumulate, width, slices,
                  row_sums=None, activation="", other=None, second=None, keeps_u=True, batch=1, scale=None,
                  symmetric=False, diagonal=0.0, paired=False):
    """c = alpha · A·B + bias + residual for matrices of float16 or bfloat16; c like them, or float32 and then without
    residual.

    second: of TWO MATRICES AS ONE (producer.py) the columns that follow those of a, b or c; M, N, K are those of the
        whole product
    row_sums: (M,), to which the sums of A's rows are added; for a float32 c and an A along m (transpose_a)
    activation, other: with a c of 16 bits
        gate: for A·Bᵀ; residual is a `Gated`, other what is added
        gelu: for A·Bᵀ; other is like c, and is given GELU(c); c itself is written only if keeps_u
        gelu_gradient: for A·B without bias and residual; a factor GELU'(other)
        gelu_again_gradient: the same, and other becomes GELU(other)
        layer_scale: for A·Bᵀ; other is like c, and is given residual + scale · c, scale (N,) float32; keeps_u as above
        swiglu: for A·Bᵀ; b and bias have 2 · N rows, c is (M, 2 · N), and other, (M, N), is given SwiGLU(c); keeps_u as
            above. Without keeps_u c may be anything
        swiglu_gradient: for A·B without bias and residual; c becomes SwiGLU's dx (M, 2 · N) at x = other, like c, with
            A·B as dy
    batch: the number of products, if `takes_batch`; a, b, c hold the matrices one below the other; M, N, K are of one
    paired: by pairs of blocks, where there is such a kernel; batch is 1 and C not symmetric
    symmetric: where `takes_batch`, also for one product; M == N; one half of each is computed, `diagonal` is added to
        the numbers on its diagonal
    """
    rows, M = M, batch * M
    columns = width // 2 if activation == "swiglu" else width  # of a tile, or of each half in it
    key = (width, activation) if activation else (width, transpose_a, not transpose_b, is_half(c.dtype))
    kernel, paired = variant_of(key, activation, batch, symmetric, paired)
    maps, seam = maps_of(a, b, c, other, second, transpose_a, transpose_b, activation, keeps_u, width,
                         width // 2 if paired else columns)
    if seam is None:
        seam = rows if batch > 1 or symmetric else max(N, K) + width
    cluster, k_tiles, tiles_n = 2 if paired else 1, -(-K // BK), -(-N // columns)
    tiles_m, tiles_n = (batch, tiles_of(N, width)) if symmetric else (-(-M // (BM * cluster)), tiles_n)
    workers = workers_of(a.backend.multiprocessors, paired)
    slice_tiles, slices, alone = schedule(tiles_m * tiles_n, slices, k_tiles, workers)
    units = slices * tiles_m * tiles_n
    target, sums, summing = places_of_sums(a, c, row_sums, M, N, slices, tiles_n)
    biases = unused(a) if bias is None else bias
    added = a if residual is None else residual if isinstance(residual, Gated) else residual.reshape(M, N)
    end = float(alpha), int(bias is not None)
    written = int(keeps_u and not activation.endswith("gradient") if activation else residual is not None)
    launch(in_bfloat16(kernel, a.dtype), cluster * min(units, workers), THREADS, maps,
           Arrays(target, biases, added, sums if scale is None else scale),
           Work(M, N, seam, k_tiles, slice_tiles, tiles_m, tiles_n, units, alone),
           Epilogue(*(end if slices == 1 else (1.0, 0)), written, int(accumulate and slices == 1), summing,
                    float(diagonal)),
           shared=shared_bytes(width, activation in TWO_TILES), cluster=cluster)
    if slices > 1:
        add_partials(target, c, slices, biases, *end, accumulate, row_sums, slices * tiles_n)
    elif summing == WRITE_ROW_SUMS:
        add_parts([Sum(sums, tiles_n, row_sums, True)])
