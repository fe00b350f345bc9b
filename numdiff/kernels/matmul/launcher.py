"""Which rung of the ladder runs, over which tiles: the functions that everything above calls.

CHOICE
    rung 4 where all three matrices can be moved 16 bytes at a time, else rung 3; in place of rung 4 that of tf32.py
    where the device's switch `tf32` is on. Its tile, and the number of slices of
    K, are those of the lowest estimate, in the time of one multiply-add of a multiprocessor:
        rounds · tile · work · (1 + 1 / warps) · slice length,     rounds = ceil(blocks / multiprocessors)
    where `work` is the number of instructions for each multiply-add, and a scheduler with w warps to choose from is
    assumed to be busy w / (w + 1) of the time; a split adds the time of its second pass. Large products get the largest
    tiles, small ones many small tiles, and long sums with small results are split.
    16-bit operands: rung 6 on sm_90, rung 5 from sm_80 on, where contiguous extents come in eights (and, for rung 6,
        a batch comes in whole tiles); else rung 2, which casts as it fetches its tiles. Tile and slices by an estimate,
        in ns:
        rounds · (steps of a slice · time of a step + time of the epilogue) + the second pass of a split
        Rung 6 takes pairs of blocks (see PAIRS in hopper.py) where a card's table says so.
SOURCE
    the estimates are our own; the papers of the ladder are named in `__init__.py`.
"""
import functools
import math

import numpy as np

from ...device import copy_into, empty, empty_like, float32, is_device, launch
from ...device.limits import MAX_BLOCKS_YZ, MAX_ELEMENTS, MULTIPROCESSORS, multiprocessors_of
from ...device.requires import supports
from ...dtypes import is_half, working_type
from ...errors import TooManyElementsError
from ..any_batch import assumed
from ..concat import Pair
from ..elementwise import cast_forward, gelu_backward, gelu_forward
from ..reduce import column_sum
from ..transformer.gate import gate_forward
from ..transformer.swiglu import swiglu_backward, swiglu_forward
from ..tuning import tuned_or
from ..versions import capped, label, versions_by_name
from . import hopper, mma, naive, register_tiles, split_k, tf32, tiled, vectorised
from .operands import Epilogue, Matrices, Shape, Strides
from .reference import matmul_forward_cost, matmul_forward_reference
from .symmetric_epilogue import add_diagonal_kernel, tiles_of

SQUARE = {v: (n, n) for v, n in ((1, naive.BLOCK), (2, tiled.TILE), (3, register_tiles.TILE))}  # their only tile
SHORTEST_SLICE = 64  # of K: below this the second pass costs more than the split saves
SECOND_PASS = 400_000  # multiply-adds of one multiprocessor in the time that one more launch takes, about 3 µs
SLICE_TRAFFIC = 0.25  # multiply-adds of one multiprocessor in the time that 132 write and read one partial sum
# float16: ns of a multiprocessor for 64 of K and for the epilogue of a tile, on an H100 whose L2 cache feeds all at
# once: 2.08 ns for each row of 64 k that comes in (0.80 µs for a step of 128 × 256), 2.5 for each column of a tile
HALF_TILES = {6: {(hopper.BM, n): (2.08 * (hopper.BM + n), 2.5 * n) for n in hopper.STAGES},
              5: {(128, 128): (700.0, 600.0), (64, 64): (260.0, 200.0)}}
PAIRS = False  # whether blocks of rung 6 work in pairs where the card's table does not say: no faster (NOTES.md)
HALF_SLICE = 512  # of K: the shortest slice
HALF_SECOND_PASS = 3000.0  # ns of a launch more
HALF_START = 3000.0  # ns until a kernel's first tile is multiplied, and from the last one to the next kernel
NS_PER_BYTE = 1 / 2500  # of partial sums, written and read
DIAGONAL_BLOCK = 128
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


# float16 --------------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=4096)
def choose_half(version, batch, M, N, K, can_split, multiprocessors, widths=tuple(hopper.STAGES)):
    """(tile, slices of K, ns) with the lowest estimate for rung 5 or 6; widths: that a tile of rung 6 may have."""
    best = None
    for tile, (step, epilogue) in HALF_TILES[version].items():
        if version == 6 and tile[1] not in widths:
            continue
        tiles_of_c = batch * -(-M // tile[0]) * -(-N // tile[1])
        splits = {1}
        if can_split:
            splits |= {max(1, min(turns * multiprocessors // tiles_of_c, K // HALF_SLICE)) for turns in range(1, 9)}
            splits.add(max(1, min(multiprocessors // tiles_of_c + 1, K // HALF_SLICE)))
        for slices in sorted(splits):
            k_tiles, rounds = -(-K // 64), 1
            if version == 6:
                steps, slices, alone = hopper.schedule(tiles_of_c, slices, k_tiles, multiprocessors)
            else:
                steps, alone = -(-k_tiles // slices), 0
                slices = -(-k_tiles // steps)
            if not alone:
                rounds = -(-tiles_of_c * slices // multiprocessors)
            estimate = HALF_START + rounds * (steps * step + epilogue)
            if alone:  # a block with several short slices has as many epilogues
                each = -(-tiles_of_c // (multiprocessors - alone))
                short = k_tiles - (slices - 1) * steps
                estimate = max(estimate, HALF_START + each * (short * step + epilogue))
            if slices > 1:
                estimate += HALF_SECOND_PASS + NS_PER_BYTE * 8 * slices * M * N
            if best is None or estimate < best[2]:
                best = tile, slices, estimate
    return best


def pairs_fit(M, batch=1):
    """Whether blocks of rung 6 can work in pairs: on one product, which has tiles one below the other."""
    return batch == 1 and M > hopper.BM


def by_eight(arrays, extents):
    """True where float16 matrices with these contiguous extents can be moved 16 bytes at a time."""
    return all(n % 8 == 0 for n in extents) and all(x is None or x.offset % 16 == 0 for x in arrays)


def _half_tile(backend, version, batch, M, N, K, can_split):
    """(tile, slices of K, whether in pairs of blocks): measured on this card, or estimated."""
    multiprocessors = getattr(backend, "multiprocessors", MULTIPROCESSORS)

    def estimated():
        tile, slices, _ = choose_half(version, batch, M, N, K, can_split, multiprocessors)
        return tile, slices, PAIRS and version == 6 and pairs_fit(M, batch)

    def measured(choice):
        tile_m, tile_n, slices, *pairs = choice  # a table of before says nothing of pairs
        if (tile_m, tile_n) not in HALF_TILES[6] or not 1 <= slices <= (-(-K // hopper.BK) if can_split else 1):
            raise ValueError(f"rung 6 has no tile {tile_m} × {tile_n}, or this product not {slices} slices of K")
        if len(pairs) > 1 or pairs and pairs[0] not in range(1 + pairs_fit(M)):
            raise ValueError(f"{pairs} says whether blocks work in pairs: 0, or 1 where they can")
        return (tile_m, tile_n), slices, bool(*pairs) if pairs else PAIRS and pairs_fit(M)

    if version == 6 and batch == 1:
        return tuned_or(estimated, measured, backend, "matmul v6", M, N, K, can_split)
    return estimated()


def _as_assumed(batch, M):
    """(batch, M): what grows with the model's batch is the rows of one product, or the number of products."""
    return (batch, assumed(M)) if batch == 1 else (assumed(batch), M)


def _half(a, b, c, batch, M, N, K, transpose_a, transpose_b, bias, residual, alpha, accumulate, version, row_sums):
    """matmul_forward for float16 operands on a device; c float16 or float32."""
    if is_half(c.dtype) and accumulate:
        residual, accumulate = c, False  # each output is read by the thread that writes it, before it does
    wide = by_eight((a, b, c, residual), (M if transpose_a else K, K if transpose_b else N, N))
    wide = wide and (residual is None or is_half(c.dtype))
    if version is None:
        version = 2
        if wide and supports(a, mma.KERNELS):
            takes = batch == 1 or hopper.takes_batch(M, K, c.dtype)
            version = capped("matmul", 6 if takes and supports(a, hopper.KERNELS) else 5)
            version = version if version > 4 else 2  # 3 and 4 are for float32, and 2 takes all that comes
    if version not in (2, 5, 6):
        raise ValueError(f"version {label('matmul', version, a.dtype)} of matmul is for float32: use 2, 5 or 6 for "
                         "float16")
    if version > 2 and not wide:
        raise ValueError(f"version {label('matmul', version, a.dtype)} moves eight float16 at a time: contiguous "
                         f"extents must be multiples of 8 (M {M}, N {N}, K {K}), arrays aligned to 16 bytes, and a "
                         "residual needs a float16 result; use version=2")
    if version == 6 and batch > 1 and not hopper.takes_batch(M, K, c.dtype):
        raise ValueError(f"version 6 (hopper) takes a batch for float16 results, M a multiple of {hopper.BM} and K of "
                         f"{hopper.BK}, not M {M}, K {K} and {c.dtype}; use version=5")
    if row_sums is not None and (version != 6 or c.dtype != np.float32 or row_sums.offset % 16):
        column_sum(a, row_sums)
        row_sums = None
    if version > 2:
        tile, slices, paired = _half_tile(a.backend, version, *_as_assumed(batch, M), N, K,
                                          c.dtype == np.float32 and batch == 1)
        if version == 6:
            a, b, c = (x.reshape(-1, x.shape[-1]) for x in (a, b, c))
            hopper.launch_hopper(a, b, c, M, N, K, transpose_a, transpose_b, bias, residual, alpha, accumulate,
                                 tile[1], slices, row_sums, batch=batch, paired=paired)
        else:
            mma.launch_mma(a, b, c, batch, M, N, K, transpose_a, transpose_b, bias, residual, alpha, accumulate, tile,
                           slices)
        return
    if residual is not None and residual is not c:
        copy_into(c, residual if residual.dtype == c.dtype else cast_forward(residual, c.dtype))
    left, right, target = (_whole(x, t)[1] for x, t in ((a, transpose_a), (b, transpose_b), (c, False)))
    _launch(2, SQUARE[2], left, right, target, M, N, K, K, 1, batch, bias, alpha, accumulate or residual is not None)


def gelu_supports(x, *extents):
    """True where rung 6 takes products of x, so that GELU and its derivative cost no pass of their own.

    extents: of the matrices along the axes that are contiguous in one of them
    """
    return (is_device(x) and is_half(x.dtype) and supports(x, hopper.KERNELS) and capped("matmul", 6) == 6
            and by_eight((x,), extents))


def _launch_activation(a, b, c, N, transpose_b, activation, other=None, bias=None, keeps_u=True, residual=None,
                       scale=None):
    """N: columns of A·B, or of each of its halves."""
    M, K = a.shape
    (_, width), _, paired = _half_tile(a.backend, 6, 1, assumed(M), 2 * N if activation == "swiglu" else N, K, False)
    width = min(w for w in hopper.ACTIVATIONS[activation] if w >= width)
    hopper.launch_hopper(a, b, c, M, N, K, False, transpose_b, bias, residual, 1.0, False, width, 1,
                         activation=activation, other=other, keeps_u=keeps_u, scale=scale, paired=paired)


def matmul_gate_forward(a, b, bias, residual, gated):
    """residual (M, N) + gate · (a (M, K) · b (N, K)ᵀ + bias (N,)) as a new array (M, N), for a `Gated` like a.

    Only where `gelu_supports` has K and N; the sum in brackets is rounded before it is gated.
    """
    (M, _), N = a.shape, b.shape[0]
    if gated.tokens % 16 or M % gated.tokens or gated.first % 2 or gated.pitch % 2:
        raise ValueError(f"{M} rows in images of {gated.tokens} must be whole images of a multiple of 16, and gates at "
                         f"even places, not from {gated.first} on every {gated.pitch}; use gate_forward")
    c = empty((M, N), a.dtype, like=a)
    _launch_activation(a, b, c, N, True, "gate", residual, bias, residual=gated)
    return c


def matmul_gelu_forward(a, b, bias, keeps_u=True):
    """(u, GELU(u)) as new arrays, u = a (M, K) · b (N, K)ᵀ + bias (N,); in one kernel where `gelu_supports`.

    keeps_u: False where no backward will ask for u, which is then None
    """
    (M, K), N = a.shape, b.shape[0]
    if tuple(b.shape) != (N, K) or tuple(bias.shape) != (N,):
        raise ValueError(f"a {a.shape} needs b (N, {K}) and bias (N,), not {b.shape} and {bias.shape}")
    if not gelu_supports(a, K, N) or b.dtype != a.dtype or bias.dtype != np.float32 or not by_eight((b,), ()):
        u = matmul_forward(a, b, transpose_b=True, bias=bias)
        return u, gelu_forward(u)
    y = empty((M, N), a.dtype, like=a)
    u = empty((M, N), a.dtype, like=a) if keeps_u else None
    _launch_activation(a, b, y if u is None else u, N, True, "gelu", y, bias, keeps_u)
    return u, y


def matmul_gelu_backward(a, b, u, again=False):
    """(a (M, K) · b (K, N)) ∘ GELU'(u (M, N)) as a new array; in one kernel where `gelu_supports`.

    again: give (that, GELU(u)), the second as a new array or in place of u, which nobody may read afterwards
    """
    (M, K), N = a.shape, b.shape[1]
    if tuple(b.shape) != (K, N) or tuple(u.shape) != (M, N):
        raise ValueError(f"a {a.shape} needs b ({K}, N) and u ({M}, N), not {b.shape} and {u.shape}")
    if not gelu_supports(a, K, N) or b.dtype != a.dtype or u.dtype != a.dtype or not by_eight((b, u), ()):
        du = gelu_backward(matmul_forward(a, b), u)
        return (du, gelu_forward(u)) if again else du
    c = empty((M, N), a.dtype, like=a)
    _launch_activation(a, b, c, N, False, "gelu_again_gradient" if again else "gelu_gradient", u)
    return (c, u) if again else c


def matmul_layer_scale_forward(a, b, bias, scale, residual, keeps_z=True):
    """(z, residual + scale (N,) · z) as new arrays, z = a (M, K) · b (N, K)ᵀ + bias (N,), residual (M, N); in one
    kernel where `gelu_supports`.

    keeps_z: False where no backward will ask for z, which is then None
    """
    (M, K), N = a.shape, b.shape[0]
    if tuple(b.shape) != (N, K) or any(tuple(v.shape) != (N,) for v in (bias, scale)) or residual.shape != (M, N):
        raise ValueError(f"a {a.shape} needs b (N, {K}), bias and scale (N,) and a residual ({M}, N), not {b.shape}, "
                         f"{bias.shape}, {scale.shape} and {residual.shape}")
    if not gelu_supports(a, K, N) or not (a.dtype == b.dtype == residual.dtype) or not by_eight((b, residual), ()):
        z = matmul_forward(a, b, transpose_b=True, bias=bias)
        return z, gate_forward(residual.reshape(1, M, N), z.reshape(1, M, N), scale.reshape(1, N)).reshape(M, N)
    y = empty((M, N), a.dtype, like=a)
    z = empty((M, N), a.dtype, like=a) if keeps_z else None
    _launch_activation(a, b, y if z is None else z, N, True, "layer_scale", y, bias, keeps_z, residual, scale)
    return z, y


def matmul_swiglu_forward(a, b, bias=None, keeps_u=True):
    """(u, h) as new arrays: u = a (M, K) · b (2 · H, K)ᵀ + bias (2 · H,), h = silu(u[:, :H]) · u[:, H:].

    One kernel where `gelu_supports` has K and H. keeps_u: False where no backward will ask for u, which is then None
    """
    (M, K), H = a.shape, len(b) // 2
    if tuple(b.shape) != (2 * H, K) or bias is not None and tuple(bias.shape) != (2 * H,):
        raise ValueError(f"a {a.shape} needs b (2 · H, {K}) and bias (2 · H,), not {b.shape} and "
                         f"{None if bias is None else bias.shape}")
    if not gelu_supports(a, K, H) or b.dtype != a.dtype or not by_eight((b,), ()):
        u = matmul_forward(a, b, transpose_b=True, bias=bias)
        return u, swiglu_forward(u)
    h = empty((M, H), a.dtype, like=a)
    u = empty((M, 2 * H), a.dtype, like=a) if keeps_u else None
    _launch_activation(a, b, h if u is None else u, H, True, "swiglu", h, bias, keeps_u)
    return u, h


def matmul_swiglu_backward(a, b, u):
    """du (M, 2 · H) as a new array: what SwiGLU's backward makes of dh = a (M, K) · b (K, H) and its input u like du.
    One kernel where `gelu_supports` has K and H.
    """
    (M, K), H = a.shape, b.shape[1]
    if tuple(b.shape) != (K, H) or tuple(u.shape) != (M, 2 * H):
        raise ValueError(f"a {a.shape} needs b ({K}, H) and u ({M}, 2 · H), not {b.shape} and {u.shape}")
    if not gelu_supports(a, K, H) or b.dtype != a.dtype or u.dtype != a.dtype or not by_eight((b, u), ()):
        return swiglu_backward(matmul_forward(a, b), u)
    du = empty((M, 2 * H), a.dtype, like=a)
    _launch_activation(a, b, du, H, False, "swiglu_gradient", u)
    return du


def pair_supports(x, weight=None):
    """True where rung 6 reads a `Pair` x (..., K), or writes one like it, as it is; with this weight (N, K)."""
    a, b = x
    return (is_device(a) and a.dtype == b.dtype and is_half(a.dtype) and a.shape[-1] % hopper.BOX == 0
            and supports(a, hopper.KERNELS) and capped("matmul", 6) == 6
            and by_eight((a, b, weight), (b.shape[-1], 8 if weight is None else len(weight)))
            and (weight is None or weight.dtype == a.dtype))


def _launch_pair(a, b, c, second, N, transpose_a, transpose_b, bias=None, row_sums=None):
    a, b, c, second = (x.reshape(-1, x.shape[-1]) for x in (a, b, c, second))
    M, K = a.shape[::-1] if transpose_a else a.shape
    K += second.shape[1] if transpose_b else 0
    (_, width), slices, paired = _half_tile(a.backend, 6, 1, assumed(M), N, K, transpose_a)
    hopper.launch_hopper(a, b, c, M, N, K, transpose_a, transpose_b, bias, None, 1.0, transpose_a, width, slices,
                         row_sums, second=second, paired=paired)


def matmul_pair_forward(x, weight, bias=None):
    """x·weightᵀ + bias as a new array (..., N): x a `Pair` (..., K) that `pair_supports`, weight (N, K)."""
    y = empty((*x.shape[:-1], len(weight)), weight.dtype, like=weight)
    _launch_pair(x.a, weight, y, x.b, len(weight), False, True, bias=bias)
    return y


def matmul_pair_backward(dy, x, weight):
    """dy (..., N)·weight (N, K) as a new `Pair` like x."""
    dx = Pair(*map(empty_like, x))
    _launch_pair(dy, weight, dx.a, dx.b, x.shape[-1], False, False)
    return dx


def matmul_pair_gradient(dy, x, dweight, dbias=None):
    """dweight (N, K) += dyᵀ·x, dbias (N,) += the sums of dy's rows."""
    if dbias is not None and dbias.offset % 16:
        column_sum(dy, dbias)
        dbias = None
    _launch_pair(dy, x.a, dweight, x.b, x.shape[-1], True, False, row_sums=dbias)


def matmul_pair_forward_cost(rows, N, K):
    """As `matmul_forward_cost`; the two other products cost the same."""
    return matmul_forward_cost(1, rows, N, K)


def matmul_pair_gradient_cost(rows, N, K):
    return matmul_forward_cost(1, rows, N, K)


# Symmetric results ----------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=4096)
def choose_symmetric(batch, N, K, multiprocessors):
    """The width of rung 6's tiles with the lowest estimate, of those on and below the diagonals."""
    def estimate(width):
        step, epilogue = HALF_TILES[6][hopper.BM, width]
        rounds = -(-batch * tiles_of(N, width) // multiprocessors)
        return rounds * (K // hopper.BK * step + 2 * epilogue)  # two tiles are stored
    return min(hopper.SYMMETRIC_WIDTHS, key=estimate)


def _symmetric_in_one(a, b, residual, N, K):
    """True where rung 6 computes one half."""
    return (is_half(a.dtype) and a.dtype == b.dtype and supports(a, hopper.KERNELS) and capped("matmul", 6) == 6
            and hopper.takes_batch(N, K, a.dtype) and by_eight((a, b, residual), (N, K)))


def matmul_symmetric(a, b, transpose_a=False, transpose_b=False, alpha=1.0, diagonal=0.0, residual=None):
    """alpha · A·B + residual + diagonal · I of products that are symmetric, as a new array (batch, N, N).

    a (batch, N, K), or (batch, K, N) with transpose_a; b (batch, K, N), or (batch, N, K) with transpose_b; residual
    (batch, N, N), symmetric. That A·B is, is not checked: X·Xᵀ, or A·B of symmetric matrices that commute. On Hopper
    only one half is computed, in float16 or bfloat16 where 128 divides N and 64 divides K; elsewhere all of it, and the
    diagonal by a pass of its own.
    """
    (N, K), batch = (a.shape[:0:-1] if transpose_a else a.shape[1:]), a.shape[0]
    if a.ndim != 3 or tuple(b.shape) != ((batch, N, K) if transpose_b else (batch, K, N)):
        raise ValueError(f"a {a.shape} and b {b.shape} must be batches of matrices whose products are symmetric; check "
                         "transpose_a and transpose_b")
    if residual is not None and tuple(residual.shape) != (batch, N, N):
        raise ValueError(f"residual has shape {residual.shape}, the product has {(batch, N, N)}")
    if is_device(a) and _symmetric_in_one(a, b, residual, N, K):
        c = empty((batch, N, N), a.dtype, like=a)
        width = choose_symmetric(assumed(batch), N, K, a.backend.multiprocessors)
        flat = (x.reshape(-1, x.shape[-1]) for x in (a, b, c))
        hopper.launch_hopper(*flat, N, N, K, transpose_a, transpose_b, None, residual, alpha, False, width, 1,
                             batch=batch, symmetric=True, diagonal=diagonal)
        return c
    if not is_device(a):
        working = working_type(a.dtype)
        left = a.astype(working, copy=False)
        right = left if b is a else b.astype(working, copy=False)  # NumPy computes one half of x·xᵀ, too
        c = matmul_forward_reference(left, right, transpose_a, transpose_b, None, alpha)
        if residual is not None:
            c += residual
        c.reshape(batch, -1)[:, ::N + 1] += c.dtype.type(diagonal)
        return c.astype(a.dtype, copy=False)
    c = matmul_forward(a, b, transpose_a, transpose_b, alpha=alpha, residual=residual)
    if diagonal:
        launch(add_diagonal_kernel, (-(-N // DIAGONAL_BLOCK), batch), DIAGONAL_BLOCK, c.reshape(-1), N,
               float32(diagonal))
    return c


# float32 --------------------------------------------------------------------------------------------------------------

@versions_by_name(asks=True)
def matmul_strided(a, b, c, M, N, K, outer=1, inner=1, bias=None, alpha=1.0, accumulate=False, version=None,
                   residual=None):
    """c = alpha · a·b + bias for outer · inner matrices wherever they lie; a, b, c: `Matrices`, c with column == 1.

    residual: like all of c's array, added to it
    """
    if max(outer, inner) > MAX_BLOCKS_YZ:
        raise TooManyElementsError(f"a batch of {outer} × {inner} matrices is more than one launch can count "
                                   f"({MAX_BLOCKS_YZ} on each axis); split it")
    if max(M * a.row, K * a.column, K * b.row, N * b.column, M * c.row) >= MAX_ELEMENTS:
        raise TooManyElementsError(f"a matrix of this product (M {M}, N {N}, K {K}) spans 2³¹ elements or more; use a "
                                   "smaller batch")
    wide = (operand_by_four(a, a.column, a.row, K, M) and operand_by_four(b, b.row, b.column, K, N)
            and by_four(c, 1, c.row, N))
    if tf32.chosen(version, c.array.backend, wide):
        return tf32.launch_tf32(a, b, c, M, N, K, outer, inner, bias, alpha, accumulate, residual)
    if residual is not None:
        copy_into(c.array, residual)
        accumulate = True
    if version is None:
        version = capped("matmul", 4 if wide else 3)
    elif version == 4 and not wide:
        raise ValueError("version 4 (vectorised) moves 16 bytes at a time: extents and distances along the operands' "
                         f"rows must be multiples of 4 (M {M}, N {N}, K {K}, a {a[1:]}, b {b[1:]}, c {c[1:]}); use "
                         "version=3")
    tile, slices = SQUARE.get(version), 1
    if version == 3 or version == 4:
        multiprocessors = multiprocessors_of(c.array)
        tiles = vectorised.TILES if version == 4 else (tile,)
        batch, rows = (assumed(outer) * inner, M) if a.outer else _as_assumed(outer * inner, M)  # a.outer: images
        tile, slices = choose_tile(batch, rows, N, K, multiprocessors, tiles)
    if slices == 1:
        _launch(version, tile, a, b, c, M, N, K, K, outer, inner, bias, alpha, accumulate)
        return
    length = slice_of(K, slices)
    partial = empty((slices, M, N), np.float32, like=c.array)
    _launch(version, tile, a._replace(inner=length * a.column), b._replace(inner=length * b.row),
            Matrices(partial, N, 1, inner=M * N), M, N, length, K - (slices - 1) * length, 1, slices, None, 1.0, False)
    target, flat = c.array.reshape(-1)[c.start:], partial.reshape(-1)
    launch(split_k.sum_slices_kernel, -(-M * N // split_k.OUTPUTS), (split_k.OUTPUTS, split_k.SHARES), flat, slices,
           target, flat if bias is None else bias, M, N, c.row,
           Epilogue(float(alpha), int(bias is not None), int(accumulate)))


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
        raise ValueError(f"there is no version {version} of matmul in float32: use 1, 2, 3, 4 or 5")
    launch(kernel, (-(-M // tile[0]) * -(-N // tile[1]), inner, outer), block, flat_a, flat_b, flat_c,
           flat_a if bias is None else bias, Shape(M, N, K, K_last),
           Strides(a.row, a.column, b.row, b.column, c.row, a.outer, a.inner, b.outer, b.inner, c.outer, c.inner),
           Epilogue(float(alpha), int(bias is not None), int(accumulate)))


def _whole(x, transpose):
    """((rows, columns), the matrices of a contiguous array as they enter the product)."""
    rows, columns = x.shape[-2:]
    matrices = Matrices(x, columns, 1, inner=rows * columns if x.ndim > 2 else 0)
    return ((columns, rows), matrices.T) if transpose else ((rows, columns), matrices)


def _numpy(a, b, transpose_a, transpose_b, bias, alpha, out, accumulate, residual, dtype):
    """matmul_forward on the CPU: the reference, for operands of 16 bits in float32, rounded at the end."""
    if not is_half(a.dtype) and residual is None:
        return matmul_forward_reference(a, b, transpose_a, transpose_b, bias, alpha, out, accumulate)
    working = working_type(a.dtype)
    c = matmul_forward_reference(a.astype(working), b.astype(working), transpose_a, transpose_b, bias, alpha)
    if residual is not None:
        c += residual
    if out is None:
        return c.astype(dtype, copy=False)
    out[...] = out.astype(working) + c if accumulate else c
    return out


@versions_by_name(asks=True)
def matmul_forward(a, b, transpose_a=False, transpose_b=False, bias=None, alpha=1.0, out=None, accumulate=False,
                   version=None, residual=None, out_dtype=None, row_sums=None):
    """alpha · A·B + bias + residual, as a new array or in `out` (added to what `out` holds if `accumulate`).

    a (..., M, K), or (..., K, M) with transpose_a; b (..., K, N), or (..., N, K) with transpose_b; bias (N,) float32;
    residual (..., M, N). Operands float32, float16 or bfloat16; of 16 bits all sums are float32, and the result is
    like the operands, or what `out_dtype` or `out` says.
    row_sums: float32 (M,), with transpose_a and without leading axes: the sums of A's rows over k are added to it, in
        the same kernel where that can. Of a weight's gradient dyᵀ·x they are the bias's gradient.
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"a {a.shape} and b {b.shape} must be matrices with the same leading axes")
    if accumulate and out is None:
        raise ValueError("accumulate=True adds into `out`: pass out=")
    if accumulate and residual is not None:
        raise ValueError("accumulate=True and residual= both add to the product: pass one of them")
    (M, K), left = _whole(a, transpose_a)
    (K_b, N), right = _whole(b, transpose_b)
    shape = (*a.shape[:-2], M, N)
    if K_b != K:
        raise ValueError(f"a gives K = {K} and b gives K = {K_b}; check transpose_a and transpose_b (a {a.shape}, "
                         f"b {b.shape})")
    for name, x, wanted in (("out", out, shape), ("residual", residual, shape)):
        if x is not None and tuple(x.shape) != wanted:
            raise ValueError(f"{name} has shape {x.shape}, the product has {wanted}")
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(f"bias has shape {bias.shape}, the product needs ({N},)")
    if row_sums is not None and (not transpose_a or a.ndim > 2 or tuple(row_sums.shape) != (M,)):
        raise ValueError(f"row_sums {row_sums.shape} must have shape ({M},), with transpose_a=True and without leading "
                         f"axes (a {a.shape}); use column_sum or row sums of your own")
    dtype = np.dtype(out_dtype or (a.dtype if out is None else out.dtype))
    if out is not None and out.dtype != dtype:
        raise ValueError(f"out is {out.dtype} and out_dtype {dtype}: pass one of them")
    if not is_device(a):
        if row_sums is not None:
            column_sum(a.astype(row_sums.dtype, copy=False), row_sums)
        return _numpy(a, b, transpose_a, transpose_b, bias, alpha, out, accumulate, residual, dtype)
    half = is_half(a.dtype)
    if a.dtype != b.dtype or not (half or a.dtype == np.float32) or dtype not in (a.dtype, np.dtype(np.float32)):
        raise ValueError("matmul on a GPU is float32, or of float16 or bfloat16 with a result like them or float32, "
                         f"not of {a.dtype} and {b.dtype} with {dtype}; use cast_forward first")
    if bias is not None and bias.dtype != np.float32 or residual is not None and residual.dtype != a.dtype:
        raise ValueError(f"matmul of {a.dtype} needs a float32 bias and a residual like its operands, not "
                         f"{getattr(bias, 'dtype', None)} and {getattr(residual, 'dtype', None)}; use cast_forward "
                         "first")
    c = empty(shape, dtype, like=a) if out is None else out
    batch = math.prod(shape[:-2])
    if half:
        _half(a, b, c, batch, M, N, K, transpose_a, transpose_b, bias, residual, alpha, accumulate, version,
              row_sums)
        return c
    if row_sums is not None:
        column_sum(a, row_sums)
    matmul_strided(left, right, _whole(c, False)[1], M, N, K, inner=batch, bias=bias, alpha=alpha,
                   accumulate=accumulate, version=version, residual=residual)
    return c


@versions_by_name(asks=True)
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
