"""Which rung of the ladder runs, over which tiles: the functions that everything above calls.

CHOICE
    rung 4 where all three matrices can be moved 16 bytes at a time, else rung 3. Its tile, and the number of slices of
    K, are those of the lowest estimate, in the time of one multiply-add of a multiprocessor:
        rounds · tile · work · (1 + 1 / warps) · slice length,     rounds = ceil(blocks / multiprocessors)
    where `work` is what a tile's instructions cost beside its multiply-adds, and a scheduler that has w warps to choose
    from is taken to be busy w / (w + 1) of the time; to which a split adds its second pass. Large products get
    the largest tiles, small ones many small tiles, and long sums with small results are split.
SOURCE
    the estimate is our own; the papers of the ladder are named in `__init__.py`.
"""
import functools
import math

import numpy as np

from ...device import empty, is_device, launch
from . import naive, register_tiles, split_k, tiled, vectorised
from .operands import Matrices
from .reference import matmul_forward_reference

MULTIPROCESSORS = 132  # of an H100: assumed where the device does not say how many it has
SQUARE = {v: (n, n) for v, n in ((1, naive.BLOCK), (2, tiled.TILE), (3, register_tiles.TILE))}  # their only tile
LARGEST_BATCH = 65535  # what gridDim.y and gridDim.z can count
LARGEST_MATRIX = 2**31  # elements: offsets within a matrix are int32 in the kernels
SHORTEST_SLICE = 64  # of K: below this the second pass costs more than the split saves
SECOND_PASS = 400_000  # multiply-adds of one multiprocessor in the time that one more launch takes, about 3 µs
SLICE_TRAFFIC = 0.25  # multiply-adds of one multiprocessor in the time that 132 write and read one partial sum
WORK = {(128, 128): 1.20, (128, 64): 1.25, (64, 64): 1.30}  # instructions for each multiply-add, counted for sm_90


@functools.lru_cache(maxsize=4096)
def choose_tile(batch, M, N, K, multiprocessors, tiles=vectorised.TILES):
    """((tile_m, tile_n), slices of K) with the lowest estimate."""
    best = None
    for tile_m, tile_n in tiles:
        tiles_of_c = batch * -(-M // tile_m) * -(-N // tile_n)
        splits = {1}
        if batch == 1:
            splits |= {max(1, min(turns * multiprocessors // tiles_of_c, K // SHORTEST_SLICE)) for turns in range(1, 9)}
        for slices in sorted(splits):
            slice_length = slice_of(K, slices)
            slices = -(-K // slice_length)
            rounds = -(-tiles_of_c * slices // multiprocessors)
            warps_of_tile = tile_m * tile_n / 64 / 32 / 4  # a thread has 64 outputs; a multiprocessor four schedulers
            warps = min(rounds * warps_of_tile, 4)  # 128 registers a thread leave room for four
            estimate = rounds * tile_m * tile_n * WORK[tile_m, tile_n] * (1 + 1 / warps) * slice_length
            if slices > 1:
                estimate += SECOND_PASS + SLICE_TRAFFIC * slices * M * N * 132 / multiprocessors
            if best is None or estimate < best[0]:
                best = estimate, (tile_m, tile_n), slices
    return best[1:]


def slice_of(K, slices):
    """Elements of K in each of `slices` slices but the last: a multiple of what a kernel fetches at a time."""
    return -(-K // (slices * register_tiles.STEP)) * register_tiles.STEP


def by_four(matrices, neighbours, across, extent):
    """True where the matrices can be moved 16 bytes at a time along an axis of `extent` elements.

    neighbours, across: the distances along that axis and along the other one.
    """
    distances = (across, matrices.outer, matrices.inner, matrices.start + matrices.array.offset // 4, extent)
    return neighbours == 1 and all(d % 4 == 0 for d in distances)


def operand_by_four(matrices, k_distance, other_distance, K, extent):
    """`by_four` for A or B, along k if that is where its neighbours are (the kernels decide in the same way)."""
    if k_distance == 1:
        return by_four(matrices, 1, other_distance, K)
    return by_four(matrices, other_distance, k_distance, extent)


def matmul_strided(a, b, c, M, N, K, outer=1, inner=1, bias=None, alpha=1.0, accumulate=False, version=None):
    """c = alpha · a·b + bias for outer · inner matrices wherever they lie; a, b, c: `Matrices`, c with column == 1."""
    if max(outer, inner) > LARGEST_BATCH:
        raise ValueError(f"a batch of {outer} × {inner} matrices is more than one launch can count ({LARGEST_BATCH} on "
                         "each axis); split it")
    if max(M * a.row, K * a.column, K * b.row, N * b.column, M * c.row) >= LARGEST_MATRIX:
        raise ValueError(f"a matrix of this product (M {M}, N {N}, K {K}) spans 2³¹ elements or more; use a "
                         "smaller batch")
    wide = (operand_by_four(a, a.column, a.row, K, M) and operand_by_four(b, b.row, b.column, K, N)
            and by_four(c, 1, c.row, N))
    if version is None:
        version = 4 if wide else 3
    elif version == 4 and not wide:
        raise ValueError("version 4 moves 16 bytes at a time: extents and distances along the operands' rows must be "
                         f"multiples of 4 (M {M}, N {N}, K {K}, a {a[1:]}, b {b[1:]}, c {c[1:]}); use version=3")
    tile, slices = SQUARE.get(version), 1
    if version == 3 or version == 4:
        multiprocessors = getattr(c.array.backend, "multiprocessors", MULTIPROCESSORS)
        tiles = vectorised.TILES if version == 4 else (tile,)
        tile, slices = choose_tile(outer * inner, M, N, K, multiprocessors, tiles)
    if slices == 1:
        _launch(version, tile, a, b, c, M, N, K, K, outer, inner, bias, alpha, accumulate)
        return
    length = slice_of(K, slices)
    partial = empty((slices, M, N), np.float32, like=c.array)
    _launch(version, tile, a._replace(inner=length * a.column), b._replace(inner=length * b.row),
            Matrices(partial, N, 1, inner=M * N), M, N, length, K - (slices - 1) * length, 1, slices, None, 1.0, False)
    target, flat = c.array.reshape(-1)[c.start:], partial.reshape(-1)
    launch(split_k.sum_slices_kernel, -(-M * N // split_k.OUTPUTS), (split_k.OUTPUTS, split_k.SHARES), flat, slices,
           target, flat if bias is None else bias, M, N, c.row, float(alpha), int(bias is not None), int(accumulate))


def _launch(version, tile, a, b, c, M, N, K, K_last, outer, inner, bias, alpha, accumulate):
    flat_a, flat_b, flat_c = (m.array.reshape(-1)[m.start:] for m in (a, b, c))
    if version == 1:
        kernel, block = naive.matmul_forward_kernel_v1, tile
    elif version == 2:
        kernel, block = tiled.matmul_forward_kernel_v2, tile
    elif version == 3:
        kernel, block = register_tiles.matmul_forward_kernel_v3, register_tiles.THREADS
    elif version == 4:
        kernel, block = vectorised.matmul_forward_kernels_v4[tile], vectorised.threads_of(*tile)
    else:
        raise ValueError(f"there is no version {version} of matmul: use 1, 2, 3 or 4")
    launch(kernel, (-(-M // tile[0]) * -(-N // tile[1]), inner, outer), block, flat_a, flat_b, flat_c,
           flat_a if bias is None else bias, M, N, K, K_last, a.row, a.column, b.row, b.column, c.row, a.outer, a.inner,
           b.outer, b.inner, c.outer, c.inner, float(alpha), int(bias is not None), int(accumulate))


def _whole(x, transpose):
    """((rows, columns), the matrices of a contiguous array as they enter the product)."""
    rows, columns = x.shape[-2:]
    matrices = Matrices(x, columns, 1, inner=rows * columns if x.ndim > 2 else 0)
    return ((columns, rows), matrices.T) if transpose else ((rows, columns), matrices)


def matmul_forward(a, b, transpose_a=False, transpose_b=False, bias=None, alpha=1.0, out=None, accumulate=False,
                   version=None):
    """alpha · A·B + bias, as a new array or in `out` (added to what `out` holds if `accumulate`).

    a (..., M, K), or (..., K, M) with transpose_a; b (..., K, N), or (..., N, K) with transpose_b; bias (N,).
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"a {a.shape} and b {b.shape} must be matrices with the same leading axes")
    if accumulate and out is None:
        raise ValueError("accumulate=True adds into `out`: pass out=")
    (M, K), left = _whole(a, transpose_a)
    (K_b, N), right = _whole(b, transpose_b)
    shape = (*a.shape[:-2], M, N)
    if K_b != K:
        raise ValueError(f"a gives K = {K} and b gives K = {K_b}; check transpose_a and transpose_b (a {a.shape}, "
                         f"b {b.shape})")
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out has shape {out.shape}, the product has {shape}")
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(f"bias has shape {bias.shape}, the product needs ({N},)")
    if not is_device(a):
        return matmul_forward_reference(a, b, transpose_a, transpose_b, bias, alpha, out, accumulate)
    c = empty(shape, np.float32, like=a) if out is None else out
    if any(x.dtype != np.float32 for x in (a, b, c)):
        raise ValueError(f"matmul is float32 on a GPU, not {a.dtype}, {b.dtype}, {c.dtype}; use cast_forward first")
    matmul_strided(left, right, _whole(c, False)[1], M, N, K, inner=math.prod(shape[:-2]), bias=bias, alpha=alpha,
                   accumulate=accumulate, version=version)
    return c


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
