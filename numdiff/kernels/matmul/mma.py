"""Matmul in float16, rung 5: the tensor cores of every GPU from sm_75 on.

WHAT IS NEW, AND WHY IT PAYS
    mma.sync: a warp multiplies 16 × 16 by 16 × 8 in one instruction, 2,048 multiply-adds where rung
        4 spends 64 instructions of 32 (one a lane). Accumulators stay float32, operands are
        float16: half the bytes as well.
    ldmatrix: loads the fragments that mma.sync needs and spreads them over the lanes as it needs
        them; `.trans` transposes an operand that is contiguous along m or n. So no case of
        transposes needs a copy.
    cp.async in STAGES stages: tiles go from global to shared memory without passing through
        registers, some of them in flight while one is multiplied.
    Large warp tiles: a warp of 64 × 64 loads 4 + 4 fragments of A and B for 32 mma; warps of 32 ×
        32 load twice as many for the same products. Shared memory moves 128 bytes a cycle, which
        limited smaller warp tiles.
    Fragments of the next 16 of k are loaded while those of the last 16 are multiplied: two sets of
    registers.
    A persistent grid: a block processes one tile after the other, and the copies for the next tile
        are in flight during an epilogue.
A BLOCK'S TILE is 128 × 256 (eight warps) or 128 × 128 (four; two blocks a multiprocessor), a warp's
    64 × 64; 192 × 128 with eight warps of 48 × 64 where 256 columns would be more than C has left,
    as of the 384 of DiT-S; 64 × 64 with four warps of 32 × 32 where C is small. TILES says how far
    each steps along K, and how many stages: what fits into the 99 KiB of sm_86, sm_89 and sm_120.
    The 64 KiB of sm_75 hold two stages of the widest, or two blocks of the next.
TILES IN SHARED MEMORY, their swizzles, and why B's columns are spread: ../../device/tiles.py
EPILOGUE
    mma_epilogues.py. A lane has eight neighbouring columns of a row: it loads and writes 16 bytes,
    without going through shared memory. A slice of a split K writes its partial sums, and
    split_half.py adds them up.
LAUNCH
    as many blocks as fit on all multiprocessors at once, or as there are units; 256 or 128 threads;
    48 to 96 KiB of shared memory.
NEEDS
    contiguous extents that are multiples of 8: every chunk is then aligned, and wholly inside or
    outside.
DETERMINISM
    one warp sums each output in the order of k; slices are added in their order.
SOURCE
    PTX ISA, sections 9.7.14.5 (mma, ldmatrix) and 9.7.9.25.3 (cp.async). What was predicted and
    measured: docs/log/2026-11-mma.md
READ NEXT
    mma_layout.py; hopper/, where TMA and instructions up to 128 times as large take over.
"""

import itertools
from typing import NamedTuple

import numpy as np

from ...device import (
    copy_into,
    cuda,
    device_inline,
    empty,
    float32,
    int32,
    int64,
    launch,
    opaque,
    uint32,
)
from ...device.async_copy import cp_async_16_zfill, cp_async_commit, cp_async_wait, shared_address
from ...device.eight import array_of, prefetch_l2
from ...device.half import in_bfloat16
from ...device.limits import shared_limit
from ...device.requires import requires
from ...device.specialise import Variants, specialise
from ...device.tensor_core import load_words4, mma_m16n8k16_into, ones_half2
from ...device.tiles import (
    a_across,
    a_along_k,
    b_across,
    b_spread,
    fragment,
    place_across,
    place_along_k,
    place_spread,
)
from .mma_epilogues import finish_rows, load_biases
from .mma_layout import (
    A_ACROSS,
    A_BYTES,
    A_COPIES,
    A_PASS,
    A_ROW,
    ACTIVATION_TILES,
    ACTIVATIONS,
    ADDING,
    B_ACROSS,
    B_COPIES,
    B_PASS,
    B_ROW,
    BK,
    COLUMNS,
    END,
    END_NAMES,
    FIELDS,
    GELU,
    GROUP,
    GROUPED,
    LAST_STAGE,
    PENDING,
    PLAIN,
    PREFETCHES,
    PRODUCT,
    PRODUCTS,
    ROW_SUMS,
    ROWS,
    STAGE_BYTES,
    STAGES,
    SUMS,
    THREADS,
    TILE_M,
    TILE_N,
    TILES,
    TURING_STAGES,
    WARPS_N,
    WRITE_ROWS,
    MmaArrays,
    MmaEpilogue,
    MmaPlace,
    stage_bytes,
    stages_of,
    takes,
    threads_of,
    work_of,
)
from .product import ProductFused
from .split_half import add_partials, unused


class Unit(NamedTuple):
    """What a block multiplies: of which matrix of a batch, or product of a group; the first row and
    column; k from where to where; which slice, or where a group's partial sums go, -1 if they are
    the result; the product's extents.
    """

    matrix: int
    row: int
    column: int
    k: int
    k_end: int
    part: int
    M: int
    N: int


class MmaAhead(NamedTuple):
    """The position of a thread's copies: the unit and its k; the elements of A and B that are
    copied next; its first row of A and of B (of an operand across, the k where its column ends: 0
    beyond the last column); extents."""

    unit: int
    matrix: int
    k: int
    k_end: int
    a_at: int
    b_at: int
    a_first: int
    b_first: int
    M: int
    N: int


class Fragments(NamedTuple):
    """16 of k for a warp: 64 rows of A, 64 columns of B; of a smaller warp tile only the first ones
    are used."""

    a0: tuple
    a1: tuple
    a2: tuple
    a3: tuple
    b0: tuple
    b1: tuple
    b2: tuple
    b3: tuple


# Units --------------------------------------------------------------------------------------------


@device_inline
def quotient(a, b, inverse):
    """(a // b, a % b) of numbers that are not negative; inverse: 2³² / b, rounded down."""
    q = int32(int64(a) * int64(inverse) >> 32)  # or one less
    rest = int32(a - int32(q * b))
    if rest >= b:
        q, rest = int32(q + 1), int32(rest - b)
    return q, rest


@device_inline
def unit_of(number, work):
    """The `Unit` with this number; one beyond the last has no k."""
    if GROUPED:
        return unit_in_table(number, work)
    matrix, part, tile = int32(0), int32(0), int32(number)
    if work.parts > 1:
        part, tile = quotient(tile, work.tiles, work.inverse_tiles)
        if work.slices == 1:
            matrix, part = part, int32(0)
    group, tile = quotient(tile, work.group, work.inverse_group)
    first = int32(group * GROUP)
    rows = int32(work.tiles_m - first)
    if rows >= GROUP:
        column, row = int32(tile // GROUP), int32(tile % GROUP)
    else:
        column = int32(uint32(tile) // uint32(rows))
        row = int32(tile - column * rows)
    k = int32(part * work.slice_length)
    k_end = int32(min(int32(k + work.slice_length), int32(work.K)))
    if number >= work.units:
        k_end = k
    return Unit(
        matrix,
        int32(int32(first + row) * TILE_M),
        int32(column * TILE_N),
        k,
        k_end,
        part,
        int32(work.M),
        int32(work.N),
    )


@device_inline
def unit_in_table(number, work):
    matrix = row = column = k = k_end = part = M = N = uint32(0)
    if number < work.units:
        matrix, row, column, k = load_words4(work.table, number * FIELDS)
        k_end, part, M, N = load_words4(work.table, number * FIELDS + 4)
    return Unit(
        int32(matrix),
        int32(row),
        int32(column),
        int32(k),
        int32(k_end),
        int32(part),
        int32(M),
        int32(N),
    )


# From global to shared memory ---------------------------------------------------------------------


@device_inline
def start_of(matrix, first, k, k_end, extent, K, across, row_bytes, t):
    """(element of a thread's first chunk at k, what `MmaAhead` has as a_first) of an operand with
    `extent` rows in the tile's direction."""
    chunks = row_bytes // 16
    row, chunk = int32(t // chunks), int32(t % chunks)
    start = int64(0) if GROUPED else int64(matrix) * extent * K
    if across:
        column = int32(first + 8 * chunk)
        return start + int64(int32(k + row)) * extent + column, int32(
            k_end if column < extent else 0
        )
    return start + int64(int32(first + row)) * K + int32(k + 8 * chunk), int32(first + row)


@device_inline
def ahead_at(number, work, t):
    """A thread's `MmaAhead` at the start of a unit."""
    unit = unit_of(number, work)
    a_at, a_first = start_of(
        unit.matrix, unit.row, unit.k, unit.k_end, unit.M, work.K, A_ACROSS, A_ROW, t
    )
    b_at, b_first = start_of(
        unit.matrix, unit.column, unit.k, unit.k_end, unit.N, work.K, B_ACROSS, B_ROW, t
    )
    return MmaAhead(
        int32(number),
        unit.matrix,
        unit.k,
        unit.k_end,
        int64(a_at),
        int64(b_at),
        a_first,
        b_first,
        unit.M,
        unit.N,
    )


@device_inline
def advance(ahead, work, t):
    """One step along K, or to the next unit."""
    k = int32(ahead.k + BK)
    if k < ahead.k_end:
        return MmaAhead(
            ahead.unit,
            ahead.matrix,
            k,
            ahead.k_end,
            int64(ahead.a_at + int64(BK) * (ahead.M if A_ACROSS else 1)),
            int64(ahead.b_at + int64(BK) * (ahead.N if B_ACROSS else 1)),
            ahead.a_first,
            ahead.b_first,
            ahead.M,
            ahead.N,
        )
    return ahead_at(int32(ahead.unit + int32(cuda.gridDim.x)), work, t)


class Side(NamedTuple):
    """How threads copy an operand's tile. across, spread: as in
    ../../device/tiles.py; row_bytes: of the tile;
    rows: that they copy at once; copies: of a thread."""

    across: bool
    spread: bool
    row_bytes: int
    rows: int
    copies: int


@device_inline
def fetch_operand(x, tile, at, first, ahead, extent, K, side, t):
    """Start this thread's copies of an operand's tile, `side.rows` rows from one to the next; zeros
    beyond the ends."""
    chunks = side.row_bytes // 16
    row, chunk = int32(t // chunks), int32(t % chunks)
    for i in range(side.copies):
        if side.across:
            inside = int32(ahead.k + row + i * side.rows) < first
            place = place_across(row, chunk, side.row_bytes) + i * side.rows * side.row_bytes
            index = at + int64(i * side.rows) * extent
        else:
            inside = (
                int32(first + i * side.rows) < extent and int32(ahead.k + 8 * chunk) < ahead.k_end
            )
            near = int32(row + i * side.rows % 32)  # 32 rows further the swizzle is the same
            place = (
                place_spread(near, chunk, side.row_bytes)
                if side.spread
                else place_along_k(near, chunk, side.row_bytes)
            )
            place += i * side.rows // 32 * 32 * side.row_bytes
            index = at + int64(i * side.rows) * K
        cp_async_16_zfill(uint32(tile + place), x, index, uint32(16) if inside else uint32(0))


@device_inline
def fetch(a, b, stage, ahead, work, t):
    """Start this thread's copies of both tiles, and make them a group."""
    left, right = a, b
    if GROUPED:
        left, right = array_of(ahead.matrix, a), array_of(ahead.matrix, b)
    side_a = Side(A_ACROSS, False, int32(A_ROW), int32(A_PASS), int32(A_COPIES))
    side_b = Side(B_ACROSS, True, int32(B_ROW), int32(B_PASS), int32(B_COPIES))
    fetch_operand(left, stage, ahead.a_at, ahead.a_first, ahead, ahead.M, work.K, side_a, t)
    tile_b = int32(stage + A_BYTES)
    fetch_operand(right, tile_b, ahead.b_at, ahead.b_first, ahead, ahead.N, work.K, side_b, t)
    cp_async_commit()


# From shared memory to registers ------------------------------------------------------------------


@device_inline
def load_a(stage, step, i, warp_row, lane):
    """The fragment of A's rows 16 · i …"""
    if A_ACROSS:
        return fragment(
            uint32(
                opaque(int32(stage + a_across(int32(warp_row + 16 * i), lane, A_ROW)))
                + step * 16 * A_ROW
            ),
            True,
        )
    return fragment(
        uint32(opaque(int32(stage + a_along_k(warp_row, step, lane, A_ROW))) + i * 16 * A_ROW),
        False,
    )


@device_inline
def load_b(stage, step, j, warp_column, lane):
    """Two fragments of B: columns 16 · j …, or of the spread 32 columns 16."""
    tile = int32(stage + A_BYTES)
    if B_ACROSS:
        return fragment(
            uint32(
                opaque(int32(tile + b_across(int32(warp_column + 16 * j), lane, B_ROW)))
                + step * 16 * B_ROW
            ),
            True,
        )
    return fragment(
        uint32(
            opaque(int32(tile + b_spread(warp_column, j % 2, step, lane, B_ROW)))
            + j // 2 * 32 * B_ROW
        ),
        False,
    )


@device_inline
def load_fragments(stage, step, warp_row, warp_column, lane):
    """The warp's `Fragments` of 16 of k in a stage."""
    b0 = load_b(stage, step, 0, warp_column, lane)
    a0 = load_a(stage, step, 0, warp_row, lane)
    b1 = load_b(stage, step, 1, warp_column, lane)
    b2, b3 = b0, b1
    if COLUMNS > 32:
        b2 = load_b(stage, step, 2, warp_column, lane)
        b3 = load_b(stage, step, 3, warp_column, lane)
    a1 = load_a(stage, step, 1, warp_row, lane)
    a2, a3 = a0, a1
    if ROWS > 32:
        a2 = load_a(stage, step, 2, warp_row, lane)
    if ROWS > 48:
        a3 = load_a(stage, step, 3, warp_row, lane)
    return Fragments(a0, a1, a2, a3, b0, b1, b2, b3)


# Products -----------------------------------------------------------------------------------------


@device_inline
def add_product(sums, first, a, b):
    """sums[first … first + 3] += a · b: fragments of float16, 16 × 16 by 16 × 8."""
    mma_m16n8k16_into(sums, first, a, b)


@device_inline
def multiply_rows(sums, first, a, f):
    """The sums of 16 rows += a · the warp's columns of B."""
    PRODUCT(sums, first, a, (f.b0[0], f.b0[1]))
    PRODUCT(sums, first + 4, a, (f.b0[2], f.b0[3]))
    PRODUCT(sums, first + 8, a, (f.b1[0], f.b1[1]))
    PRODUCT(sums, first + 12, a, (f.b1[2], f.b1[3]))
    if COLUMNS > 32:
        PRODUCT(sums, first + 16, a, (f.b2[0], f.b2[1]))
        PRODUCT(sums, first + 20, a, (f.b2[2], f.b2[3]))
        PRODUCT(sums, first + 24, a, (f.b3[0], f.b3[1]))
        PRODUCT(sums, first + 28, a, (f.b3[2], f.b3[3]))


@device_inline
def multiply(sums, f):
    """sums += the warp's part of 16 of k."""
    multiply_rows(sums, 0, f.a0, f)
    multiply_rows(sums, ROW_SUMS, f.a1, f)
    if ROWS > 32:
        multiply_rows(sums, 2 * ROW_SUMS, f.a2, f)
    if ROWS > 48:
        multiply_rows(sums, 3 * ROW_SUMS, f.a3, f)


@device_inline
def add_row_sums(totals, f, share):
    """totals (4,) += the sums over 16 of k of 16 rows of A, as a product with ones: warps of the
    same rows take a fragment each, that of `share`. A lane has row lane // 4 in totals[0], eight
    further in totals[2]."""
    upper, lower = f.a0 if share == 0 else f.a1, f.a2 if share == 2 else f.a3
    ones = ones_half2()
    mma_m16n8k16_into(totals, 0, upper if share < 2 else lower, (ones, ones))


@device_inline
def write_row_sums(totals, unit, row, lane, work):
    """The row sums of a unit: added to those of its product, or written as those of a part. row: a
    lane's first one of the tile."""
    if lane % 4 == 0:
        if unit.part >= 0:
            parts = array_of(int32(PRODUCTS), work.row_sums)
            first = int64(unit.part) * TILE_M + row
            parts[first], parts[first + 8] = totals[0], totals[2]
        else:
            sums, m = array_of(unit.matrix, work.row_sums), int32(unit.row + row)
            if m < unit.M:
                sums[m] += totals[0]
            if int32(m + 8) < unit.M:
                sums[m + 8] += totals[2]


@device_inline
def prefetch_other(other, unit, t):
    """Have what the epilogue reads brought into the L2 cache while the tile is multiplied: 64
    elements each time."""
    if END != PLAIN and END != GELU:
        for i in range(PREFETCHES):
            e = int32(t + i * THREADS)
            row, column = (
                int32(unit.row + e // (TILE_N // 64)),
                int32(unit.column + e % (TILE_N // 64) * 64),
            )
            if row < unit.M and column < unit.N:
                prefetch_l2(other, (int64(unit.matrix) * unit.M + row) * unit.N + column)


@device_inline
def finish(sums, unit, warp_row, warp_column, lane, arrays, epilogue):
    """The epilogue of a warp's outputs."""
    row, column = int32(warp_row + lane // 4), int32(warp_column + lane % 4 * 8)
    if GROUPED:
        partial = unit.part >= 0
        c = array_of(int32(PRODUCTS) if partial else unit.matrix, arrays.c)
        place = MmaPlace(
            int64(0), int32(unit.row + row), int32(unit.column + column), unit.M, unit.N
        )
        if partial:  # whole tiles of their own
            place = MmaPlace(
                int64(unit.part) * (TILE_M * TILE_N), row, column, int32(TILE_M), int32(TILE_N)
            )
        given, adds = MmaArrays(c, arrays.bias, c), not partial
    else:
        place = MmaPlace(
            int64(int32(unit.matrix + unit.part)) * unit.M * unit.N,
            int32(unit.row + row),
            int32(unit.column + column),
            unit.M,
            unit.N,
        )
        given, adds = arrays, True
    biases = load_biases(given.bias, place, epilogue)
    WRITE_ROWS(sums, 0, place, given, biases, epilogue, adds, lane)
    WRITE_ROWS(sums, 1, place, given, biases, epilogue, adds, lane)
    if ROWS > 32:
        WRITE_ROWS(sums, 2, place, given, biases, epilogue, adds, lane)
    if ROWS > 48:
        WRITE_ROWS(sums, 3, place, given, biases, epilogue, adds, lane)


# The kernel ---------------------------------------------------------------------------------------


@requires("7.5")
def gemm_mma(a, b, arrays, work, epilogue):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    tiles = int32(shared_address(shared))
    t = int32(cuda.threadIdx.x)
    lane, warp = int32(t % 32), int32(t // 32)
    warp_row, warp_column = int32(warp // WARPS_N * ROWS), int32(warp % WARPS_N * COLUMNS)
    sums = cuda.local.array(SUMS, "float32")
    if GROUPED:
        share, totals = int32(warp % WARPS_N), cuda.local.array(4, "float32")

    number, stage = int32(cuda.blockIdx.x), int32(0)  # stage: the bytes before it
    ahead = ahead_at(number, work, t)
    for s in range(STAGES - 1):
        fetch(a, b, int32(tiles + s * STAGE_BYTES), ahead, work, t)
        ahead = advance(ahead, work, t)
    cp_async_wait(PENDING)  # this thread's copies of the first stage have arrived
    cuda.syncthreads()  # and those of all threads
    unit = unit_of(number, work)
    while unit.k < unit.k_end:
        f = load_fragments(int32(tiles + stage), 0, warp_row, warp_column, lane)
        prefetch_other(arrays.other, unit, t)
        for i in range(SUMS):
            sums[i] = float32(0)
        if GROUPED:  # tiles of the first columns have the row sums of A, where they are asked for
            adds_rows = unit.column == 0 and work.summed >> unit.matrix & 1
            totals[0] = totals[1] = totals[2] = totals[3] = float32(0)
        k = unit.k
        while k < unit.k_end:
            # its last reads precede the barrier
            refilled = int32(stage - STAGE_BYTES if stage > 0 else LAST_STAGE)
            g = load_fragments(int32(tiles + stage), 1, warp_row, warp_column, lane)
            fetch(a, b, int32(tiles + refilled), ahead, work, t)
            multiply(sums, f)
            if GROUPED and adds_rows:
                add_row_sums(totals, f, share)
            if BK > 32:
                f = load_fragments(int32(tiles + stage), 2, warp_row, warp_column, lane)
                multiply(sums, g)
                if GROUPED and adds_rows:
                    add_row_sums(totals, g, share)
                g = load_fragments(int32(tiles + stage), 3, warp_row, warp_column, lane)
                multiply(sums, f)
                if GROUPED and adds_rows:
                    add_row_sums(totals, f, share)
            stage = int32(stage + STAGE_BYTES if stage < LAST_STAGE else 0)
            cp_async_wait(PENDING)
            cuda.syncthreads()
            f = load_fragments(int32(tiles + stage), 0, warp_row, warp_column, lane)
            multiply(sums, g)
            if GROUPED and adds_rows:
                add_row_sums(totals, g, share)
            ahead = advance(ahead, work, t)
            k = int32(k + BK)
        finish(sums, unit, warp_row, warp_column, lane, arrays, epilogue)
        if GROUPED and adds_rows:
            write_row_sums(totals, unit, int32(warp_row + share * 16 + lane // 4), lane, work)
        number = int32(number + int32(cuda.gridDim.x))
        unit = unit_of(number, work)
    cp_async_wait(0)


def make_kernel(
    tile,
    stages,
    a_across,
    b_across,
    end,
    grouped=False,
    module=__name__,
    product=add_product,
    write_rows=finish_rows,
    kind="",
    layout=None,
):
    """The kernel for one tile, its stages, one case of transposes (across: contiguous along m or n)
    and one epilogue.

    module: name of the module that keeps it
    product, write_rows: PRODUCT and WRITE_ROWS of mma_layout.py; kind: their part of its name
    layout: another `Tile` than that of TILES
    """
    layout = layout or TILES[tile]
    shape = "x".join(map(str, (*tile, layout.k, stages)))
    case = f"{'t' if a_across else 'n'}{'n' if b_across else 't'}{kind}"
    return specialise(
        gemm_mma,
        name=f"gemm_mma_{shape}_{case}_{END_NAMES[end]}{'_group' * grouped}",
        launch_bounds=(threads_of(layout), layout.blocks),
        TILE_M=tile[0],
        TILE_N=tile[1],
        LAYOUT=layout,
        STAGES=stages,
        A_ACROSS=a_across,
        B_ACROSS=b_across,
        END=end,
        GROUPED=grouped,
        PRODUCT=product,
        WRITE_ROWS=write_rows,
        module=module,
    )


STAGED = tuple((tile, s) for tile in TILES for s in (TILES[tile].stages, TURING_STAGES))
KERNELS = Variants(
    (
        (*staged, *case)
        for staged in STAGED
        for case in itertools.product((False, True), (False, True), (PLAIN, ADDING))
        if takes(staged[0], case[0])
    ),
    lambda key: make_kernel(*key),
)
ACTIVATION_KERNELS = Variants(
    ((*staged, end) for staged in STAGED if staged[0] in ACTIVATION_TILES for end in ACTIVATIONS),
    lambda key: make_kernel(*key[:2], False, key[2] != "gelu", ACTIVATIONS[key[2]]),
)


def launch_mma(a, b, c, tile, slices=1, fused=ProductFused()):  # noqa: B008 - never changed
    """As `launch_hopper`; several slices of K only for one matrix, also of 16 bits. tile: of TILES"""
    (rows, K), (_, N) = a.extents, b.extents
    work, residual, accumulate = (
        work_of(a.count, rows, N, K, tile, slices),
        fused.residual,
        fused.accumulate,
    )
    slices, nothing = work.slices, unused(a.array)
    stages = stages_of(tile, shared_limit(a.array))
    biases, end = (
        nothing if fused.bias is None else fused.bias,
        (float(fused.alpha), int(fused.bias is not None)),
    )
    if slices > 1 and residual is not None:
        if residual is not c.array:
            copy_into(c.array, residual)
        residual, accumulate = None, True
    target = (
        empty((slices * rows * N,), np.float32, like=a.array) if slices > 1 else c.array.reshape(-1)
    )
    other = residual if residual is not None else c.array if accumulate and slices == 1 else None
    if fused.activation:
        kernel, other = ACTIVATION_KERNELS[tile, stages, fused.activation], fused.other
    else:
        end_of = PLAIN if other is None else ADDING
        kernel = KERNELS[tile, stages, a.transposed, not b.transposed, end_of]
    launch(
        in_bfloat16(kernel, a.array.dtype),
        min(work.units, a.array.backend.multiprocessors * TILES[tile].blocks),
        threads_of(tile),
        a.array.reshape(-1),
        b.array.reshape(-1),
        MmaArrays(target, biases, target if other is None else other.reshape(-1)),
        work,
        MmaEpilogue(*(end if slices == 1 else (1.0, 0)), int(fused.keeps_u)),
        shared=stages * stage_bytes(tile),
    )
    if slices > 1:
        add_partials(target, c.array, slices, biases, *end, accumulate)
