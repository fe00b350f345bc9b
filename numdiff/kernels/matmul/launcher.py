"""Which rung of the ladder runs: `matmul_forward` and `matmul_backward`, which everything above
calls.

CHOICE
    float32: rung 4 where all three matrices can be moved 16 bytes at a time, else rung 3; in place
        of rung 4 an extension's, v5 tf32: where the device's switch `tf32` is on
        (extras/tf32/matmul.py).
    16-bit operands: rung 6 on sm_90, rung 5 from sm_80 on, where contiguous extents come in eights
        (and, for rung 6, a batch comes in whole tiles); else rung 2, which casts as it fetches its
        tiles. Rung 5 on sm_90, too, where it is estimated to be clearly faster.
    Tile and slices of K: choice.py
SOURCE
    the papers of the ladder are named in `__init__.py`.
READ NEXT
    activations.py; pair.py: products of rung 6 that are called by names of their own.
"""

import functools
import math

import numpy as np

from ... import extensions
from ...device import copy_into, empty, launch
from ...device.batch_invariance import nominal_extent
from ...device.limits import MAX_BLOCKS_YZ, MAX_ELEMENTS, multiprocessors_of
from ...device.requires import supports
from ...dtypes import is_half
from ...errors import TooManyElementsError
from ..elementwise import cast_forward
from ..operation import Version, operation
from ..operation.versions import capped, label
from ..reduce.trees import column_sum
from . import mma, naive, register_tiles, split_k, tiled, vectorised
from .choice import as_nominal, by_eight, by_four, choose_tile, operand_by_four, slice_of
from .hopper.kernel import KERNELS
from .hopper.launcher import takes_operands
from .hopper.layout import BK, BM
from .operands import Matrices, ProductEpilogue, ProductShape, Strides
from .problems import backward_problems, matmul_problems, strided_problems
from .product import Product, ProductFused, ProductOperand
from .products import cheaper_rung, launch_products
from .reference import matmul_forward_cost, matmul_forward_reference

SINGLE, HALF = ("float32",), ("float16", "bfloat16")
LADDER = [
    Version("naive", dtypes=SINGLE),
    Version("tiled"),
    Version("register-tiled", dtypes=SINGLE),
    Version("vectorised", dtypes=SINGLE),
    Version("mma", dtypes=HALF, requires="7.5"),
    *(
        Version(name, dtypes=SINGLE, requires="8.0", number=5)
        for name in extensions.entries("matmul")
    ),
    Version("hopper", dtypes=HALF, requires="9.0a"),
]
# their only tile
SQUARE = {v: (n, n) for v, n in ((1, naive.BLOCK), (2, tiled.TILE), (3, register_tiles.TILE))}


# Checks and references ----------------------------------------------------------------------------


def _whole(x, transpose):
    """((rows, columns), the matrices of a contiguous array as they enter the product)."""
    rows, columns = x.shape[-2:]
    matrices = Matrices(x, columns, 1, inner=rows * columns if x.ndim > 2 else 0)
    return ((columns, rows), matrices.T) if transpose else ((rows, columns), matrices)


def _check(a, b, transpose_a, transpose_b, bias, out, accumulate, residual, out_dtype, row_sums):
    if a.ndim < 2 or b.ndim < 2 or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"a {a.shape} and b {b.shape} must be matrices with the same leading axes")
    if accumulate and out is None:
        raise ValueError("accumulate=True adds into `out`: pass out=")
    if accumulate and residual is not None:
        raise ValueError("accumulate=True and residual= both add to the product: pass one of them")
    (M, K), (K_b, N) = _whole(a, transpose_a)[0], _whole(b, transpose_b)[0]
    if K_b != K:
        raise ValueError(
            f"a gives K = {K} and b gives K = {K_b}; check transpose_a and transpose_b (a {a.shape}, "
            f"b {b.shape})"
        )
    shape = (*a.shape[:-2], M, N)
    for name, x in ("out", out), ("residual", residual):
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {x.shape}, the product has {shape}")
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(f"bias has shape {bias.shape}, the product needs ({N},)")
    if row_sums is not None and (not transpose_a or a.ndim > 2 or tuple(row_sums.shape) != (M,)):
        raise ValueError(
            f"row_sums {row_sums.shape} must have shape ({M},), with transpose_a=True and without leading "
            f"axes (a {a.shape}); use column_sum or row sums of your own"
        )
    if out is not None and out.dtype != np.dtype(out_dtype or out.dtype):
        raise ValueError(
            f"out is {out.dtype} and out_dtype {np.dtype(out_dtype)}: pass one of them"
        )


def matmul_strided_reference(a, b, c, M, N, K, outer=1, inner=1, fused=ProductFused()):  # noqa: B008
    def view(x, rows, columns):
        flat = x.array.reshape(-1)[x.start :]
        strides = [flat.itemsize * step for step in (x.outer, x.inner, x.row, x.column)]
        return np.lib.stride_tricks.as_strided(flat, (outer, inner, rows, columns), strides)

    product = fused.alpha * (view(a, M, K) @ view(b, K, N))
    product += 0 if fused.bias is None else fused.bias
    if fused.residual is not None:
        c.array[...] = fused.residual
    target = view(c, M, N)
    target[...] = product + (target if fused.accumulate or fused.residual is not None else 0)


# The contract -------------------------------------------------------------------------------------


@operation(
    reference=matmul_forward_reference,
    cost=matmul_forward_cost,
    versions=LADDER,
    problems=matmul_problems,
    chooses=True,
    check=_check,
    writes=("out", "row_sums"),
)
def matmul_forward(
    a,
    b,
    transpose_a=False,
    transpose_b=False,
    bias=None,
    alpha=1.0,
    out=None,
    accumulate=False,
    version=None,
    residual=None,
    out_dtype=None,
    row_sums=None,
):
    """alpha · A·B + bias + residual, as a new array or in `out` (added to what `out` holds if
    `accumulate`).

    a (..., M, K), or (..., K, M) with transpose_a; b (..., K, N), or (..., N, K) with transpose_b;
    bias (N,) float32; residual (..., M, N). Operands float32, float16 or bfloat16; of 16 bits all
    sums are float32, and the result is like the operands, or what `out_dtype` or `out` says.
    row_sums: float32 (M,), with transpose_a and without leading axes: the sums of A's rows over k
        are added to it, in the same kernel where that can. Of a weight's gradient dyᵀ·x they are
        the bias's gradient.
    """
    (M, K), left = _whole(a, transpose_a)
    (_, N), right = _whole(b, transpose_b)
    dtype, half = np.dtype(out_dtype or (a.dtype if out is None else out.dtype)), is_half(a.dtype)
    if (
        a.dtype != b.dtype
        or not (half or a.dtype == np.float32)
        or dtype not in (a.dtype, np.dtype(np.float32))
    ):
        raise ValueError(
            "matmul on a GPU is float32, or of float16 or bfloat16 with a result like them or float32, "
            f"not of {a.dtype} and {b.dtype} with {dtype}; use cast_forward first"
        )
    if (
        bias is not None
        and bias.dtype != np.float32
        or residual is not None
        and residual.dtype != a.dtype
    ):
        raise ValueError(
            f"matmul of {a.dtype} needs a float32 bias and a residual like its operands, not "
            f"{getattr(bias, 'dtype', None)} and {getattr(residual, 'dtype', None)}; use cast_forward "
            "first"
        )
    c = empty((*a.shape[:-2], M, N), dtype, like=a) if out is None else out
    batch = math.prod(a.shape[:-2])
    if half:
        operands = [
            ProductOperand(x.reshape(-1, x.shape[-1]), transposed, batch)
            for x, transposed in ((a, transpose_a), (b, transpose_b), (c, False))
        ]
        if residual is not None:
            residual = operands[2].array if residual is c else residual.reshape(-1, N)
        _half(*operands, ProductFused(bias, residual, alpha, accumulate, row_sums), version)
        return c
    if row_sums is not None:
        column_sum(a, row_sums)
    matmul_strided(
        left,
        right,
        _whole(c, False)[1],
        M,
        N,
        K,
        inner=batch,
        fused=ProductFused(bias, residual, alpha, accumulate),
        version=version,
    )
    return c


@operation(versions=LADDER, problems=backward_problems, chooses=True)
def matmul_backward(dc, a, b, transpose_a=False, transpose_b=False, alpha=1.0, version=None):
    """(da, db) from dc and the forward's operands: two more matmuls, see reference.py."""
    if transpose_a:
        da = matmul_forward(b, dc, transpose_b, True, alpha=alpha, version=version)
    else:
        da = matmul_forward(dc, b, False, not transpose_b, alpha=alpha, version=version)
    if transpose_b:
        db = matmul_forward(dc, a, True, transpose_a, alpha=alpha, version=version)
    else:
        db = matmul_forward(a, dc, not transpose_a, False, alpha=alpha, version=version)
    return da, db


# 16 bits ------------------------------------------------------------------------------------------


def _half(a, b, c, fused, version):
    """matmul_forward for operands of 16 bits on a device; c like them, or float32. a, b, c:
    `ProductOperand`."""
    (M, K), (_, N), batch, result = a.extents, b.extents, a.count, c.array.dtype
    if is_half(result) and fused.accumulate:
        # each output is read by the thread that writes it, before it does
        fused = fused._replace(residual=c.array, accumulate=False)
    residual = fused.residual
    wide = by_eight((a.array, b.array, c.array, residual), (a.array.shape[1], b.array.shape[1], N))
    wide = wide and (residual is None or is_half(result))
    if version is None:
        version = 2
        if wide and supports(a.array, mma.KERNELS):
            takes = batch == 1 or takes_operands(a, b, result)
            version = capped("matmul", 6 if takes and supports(a.array, KERNELS) else 5)
            # 3 and 4 are for float32, and 2 takes all that comes
            version = version if version > 4 else 2
            if version == 6 and fused.row_sums is None:
                version = cheaper_rung(a, b, c, fused)
    if version > 2 and not wide:
        raise ValueError(
            f"version {label('matmul', version, a.array.dtype)} moves eight float16 at a time: contiguous "
            f"extents must be multiples of 8 (M {M}, N {N}, K {K}), arrays aligned to 16 bytes, and a "
            "residual needs a float16 result; use version=2"
        )
    if version == 6 and batch > 1 and not takes_operands(a, b, result):
        raise ValueError(
            f"version 6 (hopper) takes a batch for float16 results, or float32 ones of A·Bᵀ, M a "
            f"multiple of {BM} and K of {BK}, not M {M}, K {K} and {result}; use version=5"
        )
    sums = fused.row_sums
    if sums is not None and (version != 6 or result != np.float32 or sums.offset % 16):
        column_sum(a.array, sums)
        fused = fused._replace(row_sums=None)
    if version > 2:
        launch_products([Product(a, b, c, fused)], version)
        return
    if residual is not None and residual is not c.array:
        copy_into(c.array, residual if residual.dtype == result else cast_forward(residual, result))
    left, right, target = (
        _whole(
            x.array if batch == 1 else x.array.reshape(batch, -1, x.array.shape[1]), x.transposed
        )[1]
        for x in (a, b, c)
    )
    _launch(
        2,
        SQUARE[2],
        left,
        right,
        target,
        ProductShape(M, N, K, K),
        1,
        batch,
        fused.bias,
        _epilogue(fused.bias, fused.alpha, fused.accumulate or residual is not None),
    )


# float32 ------------------------------------------------------------------------------------------


@functools.cache
def _of_extensions():
    """(module,) of products that the device's switches choose: chosen(version, backend, wide),
    multiply(…) with the arguments below but `version`, and problems()."""
    return tuple(extensions.available("matmul").values())


@operation(
    reference=matmul_strided_reference,
    versions=[v for v in LADDER if v.takes(np.dtype(np.float32))],
    problems=strided_problems,
    chooses=True,
    writes=("c",),
)
def matmul_strided(
    a,
    b,
    c,
    M,
    N,
    K,
    outer=1,
    inner=1,
    fused=ProductFused(),  # noqa: B008 - never changed
    version=None,
):
    """c = alpha · a·b + bias for outer · inner matrices with any strides; a, b, c: `Matrices`, c
    with column == 1.

    fused: bias, alpha, accumulate, and residual, which is like all of c's array
    """
    bias, residual, alpha, accumulate = fused[:4]
    if max(outer, inner) > MAX_BLOCKS_YZ:
        raise TooManyElementsError(
            f"a batch of {outer} × {inner} matrices is more than one launch can count "
            f"({MAX_BLOCKS_YZ} on each axis); split it"
        )
    if max(M * a.row, K * a.column, K * b.row, N * b.column, M * c.row) >= MAX_ELEMENTS:
        raise TooManyElementsError(
            f"a matrix of this product (M {M}, N {N}, K {K}) spans 2³¹ elements or more; use a "
            "smaller batch"
        )
    wide = (
        operand_by_four(a, a.column, a.row, K, M)
        and operand_by_four(b, b.row, b.column, K, N)
        and by_four(c, 1, c.row, N)
    )
    for module in _of_extensions():
        if module.chosen(version, c.array.backend, wide):
            return module.multiply(a, b, c, M, N, K, outer, inner, fused)
    if residual is not None:
        copy_into(c.array, residual)
        accumulate = True
    if version is None:
        version = capped("matmul", 4 if wide else 3)
    elif version == 4 and not wide:
        raise ValueError(
            "version 4 (vectorised) moves 16 bytes at a time: extents and distances along the operands' "
            f"rows must be multiples of 4 (M {M}, N {N}, K {K}, a {a[1:]}, b {b[1:]}, c {c[1:]}); use "
            "version=3"
        )
    tile, slices = SQUARE.get(version), 1
    if version == 3 or version == 4:
        multiprocessors = multiprocessors_of(c.array)
        tiles = vectorised.TILES if version == 4 else (tile,)
        # a.outer: images
        batch, rows = (
            (nominal_extent(outer) * inner, M) if a.outer else as_nominal(outer * inner, M)
        )
        tile, slices = choose_tile(batch, rows, N, K, multiprocessors, tiles)
    epilogue = _epilogue(bias, alpha, accumulate)
    if slices == 1:
        _launch(version, tile, a, b, c, ProductShape(M, N, K, K), outer, inner, bias, epilogue)
        return
    length = slice_of(K, slices)
    partial = empty((slices, M, N), np.float32, like=c.array)
    _launch(
        version,
        tile,
        a._replace(inner=length * a.column),
        b._replace(inner=length * b.row),
        Matrices(partial, N, 1, inner=M * N),
        ProductShape(M, N, length, K - (slices - 1) * length),
        1,
        slices,
        None,
        _epilogue(),
    )
    target, flat = c.array.reshape(-1)[c.start :], partial.reshape(-1)
    launch(
        split_k.sum_slices_kernel,
        -(-M * N // split_k.OUTPUTS),
        (split_k.OUTPUTS, split_k.SHARES),
        flat,
        slices,
        target,
        flat if bias is None else bias,
        M,
        N,
        c.row,
        epilogue,
    )


def _epilogue(bias=None, alpha=1.0, accumulate=False):
    return ProductEpilogue(float(alpha), int(bias is not None), int(accumulate))


def _launch(version, tile, a, b, c, shape, outer, inner, bias, epilogue):
    """Launch a kernel of rungs 1 to 4 for outer · inner matrices, `Matrices` of this
    `ProductShape`."""
    flat_a, flat_b, flat_c = (m.array.reshape(-1)[m.start :] for m in (a, b, c))
    if version == 1:
        kernel, block = naive.matmul_forward_kernel_v1, tile
    elif version == 2:
        kernel, block = tiled.matmul_forward_kernel_v2, tile
    elif version == 3:
        kernel, block = register_tiles.matmul_forward_kernel_v3, register_tiles.THREADS
    else:
        kernel, block = vectorised.matmul_forward_kernels_v4[tile], vectorised.threads_of(*tile)
    launch(
        kernel,
        (-(-shape.M // tile[0]) * -(-shape.N // tile[1]), inner, outer),
        block,
        flat_a,
        flat_b,
        flat_c,
        flat_a if bias is None else bias,
        shape,
        Strides(
            a.row,
            a.column,
            b.row,
            b.column,
            c.row,
            a.outer,
            a.inner,
            b.outer,
            b.inner,
            c.outer,
            c.inner,
        ),
        epilogue,
    )
