"""Matmul of float32 on the tensor cores of every GPU from sm_80 on, by way of tf32.

WHAT IS NEW, AND WHY IT PAYS
    tf32 is float32 with 10 of its 23 mantissa bits. mma.m16n8k8 multiplies 16 × 8 by 8 × 8 of it,
        1024 multiply-adds an instruction of a warp where rung 4 has 32, and sums in float32.
        PyTorch's convolutions do the same by default.
    Memory holds float32, and so do the tiles; each number is rounded to the nearest tf32 when a
        warp has it in a register. A tensor core by itself truncates: then all numbers would err
        towards zero, by up to twice as much.
    A warp owns 64 × 64 outputs, 128 accumulators a thread: for each k it loads 64 + 64 numbers for
        4096 products. With 64 × 32, as in float16, the loads from shared memory would take as long
        as the products.
TILES IN SHARED MEMORY, and how fragments of 32 bits come out of them
    A step brings 16 of k. Lane l = 4·g + x holds, of an operand's sixteen rows (of A, or columns of
    B), the two neighbours 2g and 2g + 1, at k = x and x + 4. A product does not care which row is
    called which; the result's rows and columns just change places in the same way, see EPILOGUE.
        along k          rows of 16 k, 64 bytes. ldmatrix serves numbers of 32 bits as it serves pairs of 16. Of sixteen
                         rows the even ones come first, then the odd ones; chunk c (16 bytes) of place p is at
                         c ^ (p / 2 % 4). The eight addresses of a matrix then meet all banks.
        along m or n     a row for each k. ldmatrix turns only numbers of 16 bits round, so lanes load pairs of
                         neighbours, 8 bytes each; chunk c of row k is at c ^ (k % 4 · 2), and half a warp's sixteen
                         pairs meet all banks.
EPILOGUE
    Of fragments 2J and 2J + 1 of accumulators, a lane has columns 4x … 4x + 3 of 16·J …, in rows 2g
    and 2g + 1: each four are written as 16 bytes. alpha · sum + bias + `added` (the residual, or
    what C held).
LAUNCH
    grid (tiles of C, slices of K or inner batch, outer batch), 128 threads, 24 to 48 KiB of shared
    memory in three stages. Two blocks of 128 × 128 share a multiprocessor. A sum over K in slices:
    partial sums, and `add_partials`.
NEEDS
    as rung 4: extents and distances along the operands' rows that are multiples of 4.
ACCURACY
    an operand errs by up to 2⁻¹¹; of normal random matrices the result errs by 3e-4 in the 2-norm,
    whatever K is. The tests hold it below 5e-4.
DETERMINISM
    one warp sums each output in the order of k; slices are added in their order.
COST
    as kernels/matmul/reference.py. A step brings 16 KiB for 2 · 128 · 128 · 16 FLOPs: 32 FLOPs a
    byte of the L2 cache, and for 64 mma a warp has some 270 to 300 instructions. Roofs: the L2
    cache and the rate of mma.sync, close.
SOURCE
    PTX ISA, sections 9.7.9.25.3 (cp.async) and 9.7.14.5 (mma, ldmatrix); the rounding: Dekker 1971,
    "A Floating-Point Technique for Extending the Available Precision", Numerische Mathematik 18,
    section 5, with two fused multiply-adds.
READ NEXT
    conv2d/, which gathers a convolution's tiles and multiplies them with the functions here.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from ...device import copy_into, cuda, empty, float32, int32, launch, load4, store4, uint32
from ...device.async_copy import cp_async_16_zfill, cp_async_commit, cp_async_wait, shared_address
from ...device.batch_invariance import nominal_extent
from ...device.limits import multiprocessors_of
from ...device.requires import requires, supports
from ...device.specialise import Constant, Variants, specialise
from ...device.tensor_core import float_of, ldmatrix_x4, load_words2, mma_m16n8k8_tf32_into, word_of
from ...kernels.matmul.operands import (
    ProductEpilogue,
    ProductShape,
    Strides,
    first_output,
    length_of,
    start_of_c,
    starts_of,
)
from ...kernels.matmul.problems import layout_of, product
from ...kernels.matmul.split_half import add_partials
from ...kernels.operation import Problem, replaced, single
from ...kernels.operation.versions import capped, label

VERSION = 5  # of matmul in float32: the number that mma.sync has in float16
BK = 16  # of K in a tile: two mma deep; a row along k is 64 bytes, four chunks of 16
ROW = BK * 4
STAGES = 3
PENDING = STAGES - 2  # groups that may be in flight while a tile is multiplied
# tile of C -> its warps' tiles: four warps
TILES = {(128, 128): (64, 64), (128, 64): (64, 32), (64, 64): (32, 32)}
THREADS = 128

# Of each kernel, here and in conv2d/: the tile of C and that of a warp, whether the operands are
# transposed (contiguous along m or n)
TILE_M, TILE_N, WARP_M, WARP_N, A_ACROSS, B_ACROSS = (Constant() for _ in range(6))
WARPS_N = Constant(lambda TILE_N, WARP_N: TILE_N // WARP_N)  # warps side by side
FRAGMENTS = Constant(lambda WARP_M: WARP_M // 16)  # of 16 rows, of a warp
PAIRS = Constant(lambda WARP_N: WARP_N // 16)  # of fragments of 8 columns: 2 or 4
ACCUMULATORS = Constant(lambda WARP_M, WARP_N: WARP_M * WARP_N // 32)  # of a thread
# of a stage
A_BYTES, B_BYTES = Constant(lambda TILE_M: TILE_M * ROW), Constant(lambda TILE_N: TILE_N * ROW)
B_FIRST = Constant(lambda TILE_M: STAGES * TILE_M * ROW)  # all stages of A, then those of B

# ns of an H100's multiprocessor for 64 of K, and for the epilogue, from the bytes and instructions
# above
TIMES = {(128, 128): (1300.0, 1200.0), (128, 64): (850.0, 600.0), (64, 64): (550.0, 300.0)}
START, SECOND_PASS = 3000.0, 3000.0  # ns of a launch
NS_PER_BYTE = 1 / 2500  # of partial sums
SHORTEST_SLICE = 256  # of K


# Whether it is requested --------------------------------------------------------------------------


def switched_on(backend):
    """Whether this device computes products of float32 in tf32: its switch is on, and it has the
    instructions."""
    return bool(getattr(backend, "tf32", False)) and supports(backend, KERNELS)


def chosen(version, backend, wide):
    """Whether a product goes to this rung: forced by its version, or by the device's switch where
    it can be."""
    if version == VERSION and not wide:
        raise ValueError(
            f"version {label('matmul', VERSION, 'float32')} in float32 moves 16 bytes at a time: extents "
            "and distances along the operands' rows must be multiples of 4; use version=3, or None for "
            "the fastest that does it"
        )
    return version == VERSION or (
        version is None and wide and switched_on(backend) and capped("matmul", VERSION) == VERSION
    )


# Tiles in shared memory ---------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def row_at(place):
    """The row of a tile along k at a place: of every sixteen the even ones first."""
    return int32((place & ~15) | (place & 7) << 1 | (place >> 3 & 1))


@cuda.jit(device=True, forceinline=True)
def place_along_k(place, chunk):
    """Byte of a chunk of the row at a place."""
    return int32(place * ROW + ((chunk ^ (place >> 1 & 3)) << 4))


@cuda.jit(device=True, forceinline=True)
def place_across(k, chunk, row_bytes):
    """Byte of a chunk in a tile with a row for each k."""
    return int32(k * row_bytes + ((chunk ^ (k & 3) << 1) << 4))


@cuda.jit(device=True, forceinline=True)
def my_copies(t, start, first, extent, distance, rows, across):
    """This thread's copies of an operand's tile: (element of the first copy, its byte in the tile,
    what is left of the extent from there on, its k).

    start: element where the matrix begins; first: row of the tile's first, of `extent`; distance:
    from row to row in memory, or across, from k to k
    """
    if across:
        k, chunk = int32(t // (rows // 4)), int32(t % (rows // 4))
        row = int32(first + 4 * chunk)
        return (
            start + int32(k * distance + row),
            place_across(k, chunk, rows * 4),
            int32(extent - row),
            k,
        )
    place, chunk = int32(t // 4), int32(t % 4)
    row, k = int32(first + row_at(place)), int32(4 * chunk)
    return start + int32(row * distance + k), place_along_k(place, chunk), int32(extent - row), k


@cuda.jit(device=True, forceinline=True)
def fetch_tile(to, x, at, distance, left, k_left, rows, across):
    """Start this thread's copies of a tile, from x[at]; zeros beyond the ends.

    to: address of the first; left, k_left: of the extent and of K, from the first one's place on
    """
    # rows from copy to copy: their swizzle is the same
    apart = THREADS * 4 // rows if across else THREADS // 4
    row_bytes = rows * 4 if across else ROW
    for i in range(rows * BK // 4 // THREADS):
        inside = left > 0 and i * apart < k_left if across else k_left > 0 and i * apart < left
        cp_async_16_zfill(
            to + int32(i * apart * row_bytes),
            x,
            at + int32(i * apart * distance),
            int32(16) if inside else int32(0),
        )


# Fragments ----------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def nearest(word):
    """A float32, as a word, rounded to the nearest tf32 (ties to even; the last 4096th below a
    power of two to one of the two nearest; an infinity becomes a NaN).

    8193·x, rounded, has lost the last 13 bits of x, and less 8192·x it is x without them. Two
    multiply-adds, of which a multiprocessor does 128 a clock. cvt.rna.tf32 is compiled to a
    comparison and an addition under a predicate, half as fast, and adds two moves if fragments come
    from pairs.
    """
    x = float_of(word)
    return word_of(cuda.fma(x, float32(-8192), cuda.fma(x, float32(8192), x)))


@cuda.jit(device=True, forceinline=True)
def rounded(w0, w1, w2, w3):
    return nearest(w0), nearest(w1), nearest(w2), nearest(w3)


@cuda.jit(device=True, forceinline=True)
def pair_at(tile, row, step, rows, lane):
    """Byte of a lane's pair of neighbours in a tile across: rows row + 2g and the next, k = 8 ·
    step + x."""
    return int32(
        tile
        + place_across(8 * step + lane % 4, (row >> 2) + (lane >> 3), rows * 4)
        + (lane >> 2 & 1) * 8
    )


@cuda.jit(device=True, forceinline=True)
def load_left(shared, base, tile, row, step, across, rows, lane):
    """The fragment of A at `row` of a tile (its byte in `shared`, whose address is base) and k 8 ·
    step …"""
    if across:
        at = pair_at(tile, row, step, rows, lane)
        # x and x + 4: the same swizzle
        low, high = load_words2(shared, at), load_words2(shared, at + 16 * rows)
        return rounded(low[0], low[1], high[0], high[1])
    w = ldmatrix_x4(base + tile + place_along_k(row + lane % 16, 2 * step + lane // 16))
    return rounded(w[0], w[1], w[2], w[3])


@cuda.jit(device=True, forceinline=True)
def load_right(shared, base, tile, column, step, across, columns, lane):
    """Two fragments of B in four words: the even ones of the 16 columns at `column`, and the odd
    ones."""
    if across:
        at = pair_at(tile, column, step, columns, lane)
        low, high = load_words2(shared, at), load_words2(shared, at + 16 * columns)
        return rounded(low[0], high[0], low[1], high[1])
    w = ldmatrix_x4(
        base + tile + place_along_k(column + lane % 8 + lane // 16 * 8, 2 * step + lane // 8 % 2)
    )
    return rounded(w[0], w[1], w[2], w[3])


@cuda.jit(device=True, forceinline=True)
def clear(accumulators, count):
    """Zeros; four a turn, so that the compiler writes the loop out and the array becomes registers."""
    for i in range(0, count, 4):
        accumulators[i] = float32(0)
        accumulators[i + 1] = float32(0)
        accumulators[i + 2] = float32(0)
        accumulators[i + 3] = float32(0)


@cuda.jit(device=True, forceinline=True)
def multiply_pair(accumulators, first, a, b):
    mma_m16n8k8_tf32_into(accumulators, first, a, (b[0], b[1]))
    mma_m16n8k8_tf32_into(accumulators, first + 4, a, (b[2], b[3]))


@cuda.jit(device=True, forceinline=True)
def multiply_step(accumulators, shared, base, a_tile, b_tile, row, column, step, lane):
    """Eight of k of `multiply_tiles`."""
    b0 = load_right(shared, base, b_tile, column, step, B_ACROSS, TILE_N, lane)
    b1 = load_right(shared, base, b_tile, column + 16, step, B_ACROSS, TILE_N, lane)
    b2, b3 = b0, b1
    if PAIRS > 2:
        b2 = load_right(shared, base, b_tile, column + 32, step, B_ACROSS, TILE_N, lane)
        b3 = load_right(shared, base, b_tile, column + 48, step, B_ACROSS, TILE_N, lane)
    for i in range(FRAGMENTS):
        a = load_left(shared, base, a_tile, row + 16 * i, step, A_ACROSS, TILE_M, lane)
        first = 8 * PAIRS * i
        multiply_pair(accumulators, first, a, b0)
        multiply_pair(accumulators, first + 8, a, b1)
        if PAIRS > 2:
            multiply_pair(accumulators, first + 16, a, b2)
            multiply_pair(accumulators, first + 24, a, b3)


@cuda.jit(device=True, forceinline=True)
def multiply_tiles(accumulators, shared, base, stage, row, column, lane):
    """accumulators += the warp's part, from `row` and `column` on, of one tile of A times one of B:
    BK of k.

    accumulators[8 · (PAIRS · i + j) …] are those of fragment i of 16 rows and pair j of fragments,
    16 columns
    """
    a_tile, b_tile = int32(stage * A_BYTES), int32(B_FIRST + stage * B_BYTES)
    multiply_step(accumulators, shared, base, a_tile, b_tile, row, column, 0, lane)
    multiply_step(accumulators, shared, base, a_tile, b_tile, row, column, 1, lane)


# Epilogue -----------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def write_four(c, i, v0, v1, v2, v3, n, exists, bias, added, epilogue):
    """Four neighbours of a row of C, finished and written; added: read at the same places."""
    if exists:
        alpha = epilogue.alpha
        v0, v1, v2, v3 = alpha * v0, alpha * v1, alpha * v2, alpha * v3
        if epilogue.has_bias:
            v0 += bias[uint32(n)]
            v1 += bias[uint32(n + 1)]
            v2 += bias[uint32(n + 2)]
            v3 += bias[uint32(n + 3)]
        if epilogue.accumulate:
            r0, r1, r2, r3 = load4(added, i)
            v0, v1, v2, v3 = v0 + r0, v1 + r1, v2 + r2, v3 + r3
        store4(c, i, v0, v1, v2, v3)


@cuda.jit(device=True, forceinline=True)
def write_rows(c, start, c_row, accumulators, i, row, column, shape, bias, added, epilogue):
    """Fragments 16 · i … of a lane, from its `row` and `column` on: two rows, four neighbours of
    each pair."""
    m = int32(row + 16 * i)
    for j in range(PAIRS):
        s, n = 8 * (PAIRS * i + j), int32(column + 16 * j)
        at = start + m * c_row + n
        write_four(
            c,
            at,
            accumulators[s],
            accumulators[s + 4],
            accumulators[s + 1],
            accumulators[s + 5],
            n,
            m < shape.M and n < shape.N,
            bias,
            added,
            epilogue,
        )
        write_four(
            c,
            at + c_row,
            accumulators[s + 2],
            accumulators[s + 6],
            accumulators[s + 3],
            accumulators[s + 7],
            n,
            m + 1 < shape.M and n < shape.N,
            bias,
            added,
            epilogue,
        )


@cuda.jit(device=True, forceinline=True)
def write_outputs(c, start, c_row, accumulators, row, column, shape, bias, added, epilogue):
    """A lane's outputs, from its `row` and `column` on."""
    # not in a loop: accumulators stay in registers only under constant indices
    write_rows(c, start, c_row, accumulators, 0, row, column, shape, bias, added, epilogue)
    write_rows(c, start, c_row, accumulators, 1, row, column, shape, bias, added, epilogue)
    if FRAGMENTS > 2:
        write_rows(c, start, c_row, accumulators, 2, row, column, shape, bias, added, epilogue)
        write_rows(c, start, c_row, accumulators, 3, row, column, shape, bias, added, epilogue)


# The kernel ---------------------------------------------------------------------------------------


class Tf32Copies(NamedTuple):
    """Of an operand's tiles, what a thread copies: the address in the first stage, the distance in
    memory from copy to copy, what is left of the extent and of K from the first copy on, and how
    far it is in memory from step to step."""

    to: int
    distance: int
    left: int
    k_left: int
    step: int


@cuda.jit(device=True, forceinline=True)
def fetch_tiles(a, b, a_at, b_at, of_a, of_b, stage, passed):
    """Start this thread's copies of the tiles of a step, after `passed` of k, into a stage; they
    are a group."""
    fetch_tile(
        of_a.to + stage * A_BYTES,
        a,
        a_at,
        of_a.distance,
        of_a.left,
        int32(of_a.k_left - passed),
        TILE_M,
        A_ACROSS,
    )
    fetch_tile(
        of_b.to + stage * B_BYTES,
        b,
        b_at,
        of_b.distance,
        of_b.left,
        int32(of_b.k_left - passed),
        TILE_N,
        B_ACROSS,
    )
    cp_async_commit()


@requires("8.0")
def gemm_tf32(a, b, c, bias, added, shape, strides, epilogue):
    """c = alpha · a·b + bias + added: the kernel's arguments are those of operands.py. added: an
    array with c's strides, or c itself, read only if epilogue.accumulate."""
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    base = shared_address(tiles)
    t = int32(cuda.threadIdx.x)
    lane, warp = int32(t % 32), int32(t // 32)
    first_row, first_column = first_output(shape.N, TILE_M, TILE_N)
    warp_row, warp_column = int32(warp // WARPS_N * WARP_M), int32(warp % WARPS_N * WARP_N)
    a_start, b_start = starts_of(strides)
    k_end = int32(length_of(shape))

    accumulators = cuda.local.array(ACCUMULATORS, "float32")
    clear(accumulators, ACCUMULATORS)

    a_distance = strides.a_k if A_ACROSS else strides.a_row
    b_distance = strides.b_k if B_ACROSS else strides.b_column
    a_at, a_to, a_left, a_k = my_copies(
        t, a_start, first_row, shape.M, a_distance, TILE_M, A_ACROSS
    )
    b_at, b_to, b_left, b_k = my_copies(
        t, b_start, first_column, shape.N, b_distance, TILE_N, B_ACROSS
    )
    of_a = Tf32Copies(
        a_to + base,
        a_distance,
        a_left,
        int32(k_end - a_k),
        int32(BK * a_distance if A_ACROSS else BK),
    )
    of_b = Tf32Copies(
        b_to + base + B_FIRST,
        b_distance,
        b_left,
        int32(k_end - b_k),
        int32(BK * b_distance if B_ACROSS else BK),
    )
    for s in range(STAGES - 1):
        fetch_tiles(a, b, a_at, b_at, of_a, of_b, s, s * BK)
        a_at, b_at = a_at + of_a.step, b_at + of_b.step
    stage, k = int32(0), int32(0)
    while k < k_end:
        cp_async_wait(PENDING)  # this thread's part of the tile at k is there
        cuda.syncthreads()  # so are all parts, and the tile before it is no longer read
        ahead = int32(stage + STAGES - 1 if stage == 0 else stage - 1)
        fetch_tiles(a, b, a_at, b_at, of_a, of_b, ahead, int32(k + (STAGES - 1) * BK))
        a_at, b_at = a_at + of_a.step, b_at + of_b.step
        multiply_tiles(accumulators, tiles, base, stage, warp_row, warp_column, lane)
        stage = int32(stage + 1)
        if stage == STAGES:
            stage = int32(0)
        k = int32(k + BK)

    row, column = (
        int32(first_row + warp_row + lane // 4 * 2),
        int32(first_column + warp_column + lane % 4 * 4),
    )
    write_outputs(
        c,
        start_of_c(strides),
        strides.c_row,
        accumulators,
        row,
        column,
        shape,
        bias,
        added,
        epilogue,
    )


def make_kernel(tile, a_across, b_across):
    """The kernel for one tile and one case of transposes (across: contiguous along m or n)."""
    case = f"{'t' if a_across else 'n'}{'n' if b_across else 't'}"
    return specialise(
        gemm_tf32,
        name=f"gemm_tf32_{tile[0]}x{tile[1]}_{case}",
        launch_bounds=(THREADS, 2),
        TILE_M=tile[0],
        TILE_N=tile[1],
        WARP_M=TILES[tile][0],
        WARP_N=TILES[tile][1],
        A_ACROSS=a_across,
        B_ACROSS=b_across,
    )


KERNELS = Variants(
    itertools.product(TILES, (False, True), (False, True)), lambda key: make_kernel(*key)
)


# Launchers ----------------------------------------------------------------------------------------


def shared_bytes(tile):
    return STAGES * (tile[0] + tile[1]) * ROW


@functools.lru_cache(maxsize=4096)
def choose(batch, M, N, K, can_split, multiprocessors):
    """(tile, slices of K) with the lowest estimate, in ns."""
    best = None
    for tile, (step, epilogue) in TIMES.items():
        tiles_of_c = batch * -(-M // tile[0]) * -(-N // tile[1])
        splits = {1}
        if can_split:
            splits |= {
                max(1, min(turns * multiprocessors // tiles_of_c, K // SHORTEST_SLICE))
                for turns in range(1, 9)
            }
        for slices in sorted(splits):
            length = slice_of(K, slices)
            slices = -(-K // length)
            rounds = -(-tiles_of_c * slices // multiprocessors)
            estimate = START + rounds * (length / 64 * step + epilogue)
            if slices > 1:
                estimate += SECOND_PASS + NS_PER_BYTE * 8 * slices * M * N
            if best is None or estimate < best[0]:
                best = estimate, tile, slices
    return best[1:]


def slice_of(K, slices):
    """Elements of K in each of `slices` slices but the last: whole steps."""
    return -(-K // (slices * BK)) * BK


def multiply(a, b, c, M, N, K, outer, inner, fused):
    """As `launcher.matmul_strided`: c = or += alpha · a·b + bias, or + residual, which has c's
    strides."""
    bias, residual, alpha, accumulate = fused[:4]
    array = c.array
    if residual is not None and residual.offset % 16:
        copy_into(array, residual)
        residual, accumulate = None, True
    flat_c = array.reshape(-1)[c.start :]
    images = bool(a.outer)
    batch, rows = (
        (nominal_extent(outer) * inner, M) if images else (outer * inner, nominal_extent(M))
    )
    whole = batch == 1 and c.row == N and flat_c.size == M * N
    tile, slices = choose(batch, rows, N, K, whole, multiprocessors_of(array))
    flat_a, flat_b = (m.array.reshape(-1)[m.start :] for m in (a, b))
    biases = flat_a if bias is None else bias
    a_across, b_across = a.column != 1, b.row != 1
    kernel, tiles = KERNELS[tile, a_across, b_across], -(-M // tile[0]) * -(-N // tile[1])
    if slices == 1:
        added = flat_c if residual is None else residual.reshape(-1)
        launch(
            kernel,
            (tiles, inner, outer),
            THREADS,
            flat_a,
            flat_b,
            flat_c,
            biases,
            added,
            ProductShape(M, N, K, K),
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
            ProductEpilogue(
                float(alpha), int(bias is not None), int(accumulate or residual is not None)
            ),
            shared=shared_bytes(tile),
        )
        return
    length = slice_of(K, slices)
    partial = empty((slices * M * N,), np.float32, like=array)
    launch(
        kernel,
        (tiles, slices, 1),
        THREADS,
        flat_a,
        flat_b,
        partial,
        biases,
        partial,
        ProductShape(M, N, length, K - (slices - 1) * length),
        Strides(
            a.row, a.column, b.row, b.column, N, 0, length * a.column, 0, length * b.row, 0, M * N
        ),
        ProductEpilogue(1.0, 0, 0),
        shared=shared_bytes(tile),
    )
    if residual is not None:
        copy_into(array, residual)
    add_partials(
        partial,
        flat_c.reshape(M, N),
        slices,
        biases,
        float(alpha),
        int(bias is not None),
        accumulate or residual is not None,
    )


# Problems -----------------------------------------------------------------------------------------


def problems():
    """[Problem] of matmul_forward: each tile and order, a sum in slices, a large one for the
    benchmark."""
    for tile, transpose_a, across, slices in (
        *((*key, 1) for key in KERNELS),
        ((64, 64), True, True, 2),
    ):
        label = (
            f"tf32, {layout_of(transpose_a, not across)}, tile {tile}{', in slices' * (slices > 1)}"
        )
        yield product(
            label,
            *((16, 12, 8) if slices == 1 else (20, 12, 40)),
            transpose_a,
            not across,
            # operands are rounded to 10 mantissa bits
            versions=("tf32",),
            tolerance=5e-4,
            fast=slices > 1 or (tile, transpose_a, across) == ((128, 128), False, False),
            within=functools.partial(replaced, __name__, choose=lambda *_, c=(tile, slices): c),
        )
    for label, (M, N, K), transposes, slices, more in (
        ("two tiles", (72, 44, 20), (True, False), 1, {}),
        ("two tiles, a·bᵀ", (52, 68, 20), (False, True), 1, {"fast": False}),
        ("odd", (36, 20, 44), (False, False), 1, {"fast": False}),
        ("all addends", (20, 24, 40), (True, False), 3, {"residual": single(20, 24)}),
        (
            "added",
            (20, 24, 40),
            (True, False),
            1,
            {"out": single(20, 24), "accumulate": True, "fast": False},
        ),
    ):
        more |= {"bias": single(N), "alpha": 0.5} if "add" in label else {}
        yield product(
            f"tf32, {label}",
            M,
            N,
            K,
            *transposes,
            versions=("tf32",),
            tolerance=5e-4,
            within=functools.partial(
                replaced, __name__, choose=lambda *_, slices=slices: ((64, 64), slices)
            ),
            **more,
        )
    large = single(8192, 8192)
    yield Problem(a=large, b=large, measured=True, versions=("tf32",), precision="tf32")
