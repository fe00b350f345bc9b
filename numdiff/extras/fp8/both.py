"""A tensor in E4M3 in both orientations: as stored, and transposed, with the sums of its columns.

MATHEMATICS
    rows = E4M3(x / scale), as quantise.py rounds; columns = rowsᵀ
    sums_c = scale · Σ_r rows_rc
    A weight's gradient, dyᵀ·x, is a sum over rows, and 8-bit products read both operands along
    their sum: they are `columns` of dy and of x. The bias's gradient is `sums` of dy.
SHAPES
    quantise_both    x (R, C) float16, scale float32 (1,) -> uint8 (R, C) and (C, P); amax uint32 (PARTIALS,),
                     sums float32 (C,), which are added to
    columns_of       rows uint8 (R, C), scale -> uint8 (C, P)
    C is a multiple of 16, P is R rounded up to one, as TMA wants rows of 16 bytes; elements beyond
    R are zero.
VERSIONS
    one, a tile of 64 × 64 at a time: words of four bytes go through shared memory, and a thread
    turns four of them, four rows of four columns, by eight byte permutations
LAUNCH
    at most PARTIALS blocks of 256 threads, each for every gridDim-th tile; 5.4 KiB of static shared
    memory
DETERMINISM
    the order of all additions follows from the shape: within a tile a tree, then the tiles' sums by
    kernels/reduce/second_pass.py.
COST
    4 bytes a number, 2 of them where it is in E4M3 already. Roof: memory.
SOURCE
    PTX ISA, section 9.7.9.7 (prmt); Micikevicius et al. 2022, arXiv:2209.05433, for the use of
    8-bit operands in weight gradients.
READ NEXT
    linear.py, which has three products of a layer made of these.
"""

from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, launch, uint32
from ...device.eight import load8
from ...device.float8 import transpose_bytes, unpack_e4m3x4
from ...device.limits import FULL_MASK
from ...device.requires import requires
from ...device.rounded8 import PARTIALS, larger
from ...device.specialise import Constant, specialise
from ...device.tensor_core import load_word, load_words4, store_word, store_words4
from ...float8 import bits_of, numbers_of
from ...kernels.operation import Array, Problem, filled, half, numbers, operation, single
from ...kernels.reduce.second_pass import add_rows
from ...kernels.reduce.trees import column_sum
from .quantise import (
    BLOCK,
    EACH,
    HISTORY,
    block_largest,
    check_rounding,
    largest8,
    pack8,
    quantise_forward_reference,
    scale_update,
)
from .weights import TILE

PITCH = TILE + 4  # bytes from row to row in shared memory: rows four apart begin in other banks
TILE_BYTES = TILE * PITCH
FROM_BYTES = Constant()  # whether x is in E4M3 already


class Wanted(NamedTuple):
    """The matrix, and what is made of it. R, C: its extents, pitch: P, tiles: of 64 × 64; amax,
    sums: whether the largest magnitude and the sums of the columns are wanted."""

    R: int
    C: int
    pitch: int
    tiles: int
    amax: int
    sums: int


# Reference ----------------------------------------------------------------------------------------


def pitch_of(R):
    """Bytes from row to row of the transposed tensor of R rows."""
    return -(-R // EACH) * EACH


def columns_of_reference(rows, scale, sums=None):
    R, C = rows.shape
    columns = np.zeros((C, pitch_of(R)), np.uint8)
    columns[:, :R] = rows.T
    if sums is not None:
        sums += scale[0] * column_sum(numbers_of(rows))
    return columns


# Kernel -------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def sum_of_group(value):
    """The sum over 16 neighbouring lanes, in each of them."""
    value += cuda.shfl_xor_sync(FULL_MASK, value, 8)
    value += cuda.shfl_xor_sync(FULL_MASK, value, 4)
    value += cuda.shfl_xor_sync(FULL_MASK, value, 2)
    return value + cuda.shfl_xor_sync(FULL_MASK, value, 1)


@cuda.jit(device=True, forceinline=True)
def write_columns(tile, columns, sums, unit, row, column, wanted):
    """A thread's four rows of four columns of a tile that begins at this row and column,
    transposed; and the columns' sums over the tile."""
    t = int32(cuda.threadIdx.x)
    down, across = int32(t % 16 * 4), int32(t // 16 * 4)
    at = down * PITCH + across
    a, b = load_word(tile, at), load_word(tile, at + PITCH)
    c, d = load_word(tile, at + 2 * PITCH), load_word(tile, at + 3 * PITCH)
    turned = transpose_bytes(a, b, c, d)
    n = int32(column + across)
    if n < wanted.C and row + down < wanted.pitch:
        for i in range(4):
            store_word(columns, (n + i) * wanted.pitch + row + down, turned[i])
    if wanted.sums:
        for i in range(4):
            v0, v1, v2, v3 = unpack_e4m3x4(turned[i])
            total = sum_of_group((v0 + v1) + (v2 + v3))
            if t % 16 == 0 and n < wanted.C:
                sums[row // TILE * wanted.C + n + i] = total * unit


@requires("8.9")
def both(x, scale, rows, columns, amax, sums, wanted):
    """wanted: `Wanted`."""
    tile = cuda.shared.array(TILE_BYTES, "uint8", alignment=16)
    t, most, unit = int32(cuda.threadIdx.x), uint32(0), scale[0]
    factor = float32(1) / unit
    tiles_across = int32((wanted.C + TILE - 1) // TILE)
    number = int32(cuda.blockIdx.x)
    while number < wanted.tiles:
        first_row, first_column = (
            int32(number // tiles_across * TILE),
            int32(number % tiles_across * TILE),
        )
        row, column = int32(first_row + t // 4), int32(first_column + t % 4 * EACH)
        a = b = c = d = uint32(0)
        if row < wanted.R and column < wanted.C:
            at = row * wanted.C + column
            if FROM_BYTES:
                a, b, c, d = load_words4(x, at)
            else:
                low, high = load8(x, at), load8(x, at + 8)
                most = largest8(largest8(most, low), high)
                a, b = pack8(low, factor)
                c, d = pack8(high, factor)
                store_words4(rows, at, a, b, c, d)
        cuda.syncthreads()  # the tile before has been read
        at = t // 4 * PITCH + t % 4 * EACH
        store_word(tile, at, a)
        store_word(tile, at + 4, b)
        store_word(tile, at + 8, c)
        store_word(tile, at + 12, d)
        cuda.syncthreads()
        write_columns(tile, columns, sums, unit, first_row, first_column, wanted)
        number = int32(number + cuda.gridDim.x)
    if wanted.amax and not FROM_BYTES:
        most = block_largest(most)
        if t == 0:
            amax[cuda.blockIdx.x] = larger(amax[cuda.blockIdx.x], most)


quantise_both_kernel_v1 = specialise(both, name="quantise_both_kernel_v1", FROM_BYTES=False)
columns_of_kernel_v1 = specialise(both, name="columns_of_kernel_v1", FROM_BYTES=True)


# Cost ---------------------------------------------------------------------------------------------


def quantise_both_cost(n):
    """(bytes, FLOPs) of n numbers."""
    return 4 * n, n


def columns_of_cost(n):
    return 2 * n, 0


# Operations ---------------------------------------------------------------------------------------


def _check_both(x):
    if x.ndim != 2 or x.shape[1] % EACH:
        raise ValueError(
            f"a tensor {x.shape} in both orientations must be a matrix with a multiple of {EACH} columns"
        )


def _launch(kernel, x, scale, rows, amax, sums):
    R, C = x.shape
    columns = empty((C, pitch_of(R)), np.uint8, like=x)
    across, down = -(-C // TILE), -(-R // TILE)
    partial = empty((1,) if sums is None else (down, C), np.float32, like=x)
    launch(
        kernel,
        min(PARTIALS, across * down),
        BLOCK,
        x.reshape(-1),
        scale,
        rows.reshape(-1),
        columns.reshape(-1),
        empty((1,), np.uint32, like=x) if amax is None else amax,
        partial.reshape(-1),
        Wanted(R, C, pitch_of(R), across * down, int(amax is not None), int(sums is not None)),
    )
    if sums is not None:
        add_rows(partial, sums)
    return columns


def quantise_both_reference(x, scale, amax=None, sums=None):
    rows = quantise_forward_reference(x, scale, amax)
    return rows, columns_of_reference(rows, scale, sums)


def _with_the_next_scale(a, version):
    """Bytes in both orientations, the columns' sums, and the scale that the largest magnitude
    gives."""
    amax = a.amax.copy() if isinstance(a.amax, np.ndarray) else a.amax
    rows, columns = quantise_both(a.x, a.scale, amax, a.sums)
    scale_update(amax.reshape(1, PARTIALS), a.history, a.unit)
    return rows, columns, a.sums, a.unit


def _activations(rng):
    return {
        "x": (300 * rng.standard_normal((70, 80))).astype(np.float16),
        "scale": np.float32([2]),
        "unit": np.float32([1]),
        "sums": np.arange(80, dtype=np.float32),
        "history": np.zeros((1, HISTORY), np.float32),
        "amax": np.zeros(PARTIALS, np.uint32),
    }


@operation(
    reference=quantise_both_reference,
    cost=quantise_both_cost,
    check=lambda x: _check_both(x),
    problems=[
        Problem("70 × 80", inputs=_activations, run=_with_the_next_scale),
        Problem("without sums", x=half(70, 80), scale=numbers([2])),
        Problem(
            x=half(64 * 256, 4 * 768),
            scale=single(1),
            amax=numbers(np.zeros(PARTIALS), np.uint32),
            sums=single(4 * 768),
            measured=True,
        ),
    ],
    writes=("sums",),
)
def quantise_both(x, scale, amax=None, sums=None):
    """(rows (R, C), columns (C, P)): E4M3(x / scale) of x (R, C) float16 as new arrays of bytes, in
    both orientations.

    scale, amax: as of `quantise_forward`; sums: float32 (C,), to which scale · the sums of the
    bytes' columns are added
    """
    check_rounding(x)
    rows = empty(x.shape, np.uint8, like=x)
    return rows, _launch(quantise_both_kernel_v1, x, scale, rows, amax, sums)


@operation(
    reference=columns_of_reference,
    cost=columns_of_cost,
    check=lambda rows: _check_both(rows),
    problems=[
        Problem(
            "70 × 80",
            rows=filled((70, 80), lambda rng: bits_of(rng.standard_normal((70, 80))), np.uint8),
            scale=numbers([2]),
            sums=single(80),
        ),
        Problem(
            rows=Array((64 * 256, 4 * 768), np.dtype(np.uint8)),
            scale=single(1),
            sums=single(4 * 768),
            measured=True,
        ),
    ],
    writes=("sums",),
)
def columns_of(rows, scale, sums=None):
    """(C, P): the transpose of bytes (R, C), as a new array; sums as of `quantise_both`."""
    return _launch(columns_of_kernel_v1, rows, scale, rows, None, sums)
