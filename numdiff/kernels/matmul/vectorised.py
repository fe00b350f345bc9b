"""Matmul, rung 4: 16 bytes at a time, 8 × 8 outputs a thread, and the next tile fetched while this
one is used.

WHAT IS NEW, AND WHY IT PAYS
    8 × 8 outputs a thread: 16 numbers read from shared memory feed 64 multiply-adds. 16-byte loads
    (load4): those 16 numbers are 4 load instructions. So 64 of 68 instructions are arithmetic,
    where
        rung 3 had 16 of 24. Loads from memory and stores of C move 16 bytes a thread as well.
    Two buffers: while the threads multiply out of one pair of tiles, the next pair is already in
        flight from memory, into registers; it is stored into the other buffer when the
        multiplication is done. No thread waits for memory, and one barrier a step is enough:
        between a buffer's last read and its next write every thread passes one.
    The loop over k is unrolled by hand: no counter, no jump, every address a constant offset from
        one base, and the compiler can start a load several products before its numbers are used.
THE TILE OF A WARP
    32 threads as 4 × 8 own 32 × 64 outputs. Thread (y, x) owns rows 4y … 4y+3 and 16+4y … 16+4y+3,
    and columns 4x … 4x+3 and 32+4x … 32+4x+3: in fours, so that each four is one load4, and so that
    the eight threads of a row read 128 neighbouring bytes, all 32 banks of shared memory once.
    Threads that read the same four share one access.

            x = 0 … 7     x = 0 … 7
           columns 0…31  columns 32…63
    y = 0…3  rows  0…15     4 × 4         4 × 4      of each thread
    y = 0…3  rows 16…31     4 × 4         4 × 4
TILES IN SHARED MEMORY
    both are [k][row or column], so that an outer product reads along rows. An operand whose
    neighbours in memory run along k is transposed while loading, by four 4-byte stores; rows of
    tile + 4 elements put the 32 stores of a warp into 32 different banks.
BLOCK TILES
    128 × 128 for large products, 128 × 64 and 64 × 64 where the result is small or N is 64: see
    choice.py. A block has one thread for every 64 outputs: 256, 128 or 64.
LAUNCH
    grid (tiles of C, inner, outer). Shared memory 16.5, 12.5 or 8.5 KiB. About 128 registers a
    thread let two, four or eight blocks live on a multiprocessor: while one waits at its barrier,
    the others multiply.
NEEDS
    distances and extents that are multiples of 4 elements, so that every four is 16-byte aligned
    and wholly inside or outside of its matrix.
DETERMINISM
    one thread sums the products of each output in the order of k.
SOURCE
    Volkov and Demmel, SC 2008 (outer products in registers); Tan et al., "Fast Implementation of
    DGEMM on Fermi GPU", SC 2011, section 4 (two buffers, and loads hidden behind the products).
    load4: PTX ISA, section 9.7.9.
READ NEXT
    split_k.py, for results too small to fill a GPU.
"""

from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, load4, store4, uint32
from ...device.specialise import Constant, specialise
from .operands import first_output, length_of, start_of_c, starts_of

# elements of K in a tile: two groups of four in memory, and a loop that can be written out
STEP = 8
# elements after each row of a tile: moves the next row 4 banks on and keeps it 16-byte aligned
PAD = 4
WARP_ROWS, WARP_COLUMNS = 32, 64  # outputs of a warp: 4 × 8 threads with 8 × 8 each
TILES = (128, 128), (128, 64), (64, 64)  # of a block

# Of each kernel, from its block tile
TILE_M, TILE_N = Constant(), Constant()
THREADS = Constant(lambda TILE_M, TILE_N: threads_of(TILE_M, TILE_N))
WARPS_N = Constant(lambda TILE_N: TILE_N // WARP_COLUMNS)  # warps side by side
ROW_A, ROW_B = Constant(lambda TILE_M: TILE_M + PAD), Constant(lambda TILE_N: TILE_N + PAD)
BUFFER_A, BUFFER_B = Constant(lambda ROW_A: STEP * ROW_A), Constant(lambda ROW_B: STEP * ROW_B)
BOTH_A, BOTH_B = Constant(lambda BUFFER_A: 2 * BUFFER_A), Constant(lambda BUFFER_B: 2 * BUFFER_B)
# a thread fetches two groups, not one
TWO_A = Constant(lambda TILE_M, THREADS: TILE_M * STEP // 4 == 2 * THREADS)
TWO_B = Constant(lambda TILE_N, THREADS: TILE_N * STEP // 4 == 2 * THREADS)


def threads_of(tile_m, tile_n):
    """Threads of a block: one for every 8 × 8 outputs."""
    return tile_m * tile_n // 64


class RegisterTileOperand(NamedTuple):
    """A block's part of A or B: where it starts, from row to row (of A; B: columns) and from k to
    k, how many rows there are, and whether its neighbours in memory run along k."""

    start: int
    distance: int
    k_distance: int
    rows: int
    along_k: bool


class RegisterTileGroup(NamedTuple):
    """Four neighbours of a tile: their offset in memory and in shared memory, and the k0 that they
    are below.

    In the tile that starts at k0 they are inside the matrix if k0 is below `limit`, which is 0
    where their row is outside.
    """

    source: int
    target: int
    limit: int


class Groups(NamedTuple):
    """What a thread fetches of each pair of tiles; a2 and b2 only where TWO_A and TWO_B."""

    a: RegisterTileGroup
    b: RegisterTileGroup
    a2: RegisterTileGroup
    b2: RegisterTileGroup


# From memory to shared memory ---------------------------------------------------------------------


@cuda.jit(device=True)
def locate(group, x, extent, length, tile_row):
    """Group number `group` of an operand's tile. Neighbouring threads take neighbouring groups in
    memory."""
    if x.along_k:
        row, k = group // (STEP // 4), group % (STEP // 4) * 4
    else:
        row, k = group % (extent // 4) * 4, group // (extent // 4)
    limit = length - k if row < x.rows else 0
    return RegisterTileGroup(
        int32(row * x.distance + k * x.k_distance), int32(k * tile_row + row), int32(limit)
    )


@cuda.jit(device=True)
def fetch(x, i, inside):
    """Four neighbours in memory, or zeros, which add nothing to any sum."""
    if inside:
        return load4(x, i)
    return float32(0), float32(0), float32(0), float32(0)


@cuda.jit(device=True)
def stash(tile, i, tile_row, along_k, values):
    """Store a group of four in shared memory: in four rows if it lay along k, else in one.

    An unsigned index saves the test for a negative one, which Python would count from the array's
    end.
    """
    if along_k:
        tile[uint32(i)] = values[0]
        tile[uint32(i + tile_row)] = values[1]
        tile[uint32(i + 2 * tile_row)] = values[2]
        tile[uint32(i + 3 * tile_row)] = values[3]
    else:
        store4(tile, i, *values)


@device_inline
def load_first_tiles(a, b, of_a, of_b, length, tile_a, tile_b, t):
    """The tiles at k = 0 into the first buffers; returns this thread's `Groups` of all tiles."""
    a_1, b_1 = locate(t, of_a, TILE_M, length, ROW_A), locate(t, of_b, TILE_N, length, ROW_B)
    stash(tile_a, a_1.target, ROW_A, of_a.along_k, fetch(a, of_a.start + a_1.source, a_1.limit > 0))
    stash(tile_b, b_1.target, ROW_B, of_b.along_k, fetch(b, of_b.start + b_1.source, b_1.limit > 0))
    a_2, b_2 = a_1, b_1
    if TWO_A:
        a_2 = locate(t + THREADS, of_a, TILE_M, length, ROW_A)
        stash(
            tile_a,
            a_2.target,
            ROW_A,
            of_a.along_k,
            fetch(a, of_a.start + a_2.source, a_2.limit > 0),
        )
    if TWO_B:
        b_2 = locate(t + THREADS, of_b, TILE_N, length, ROW_B)
        stash(
            tile_b,
            b_2.target,
            ROW_B,
            of_b.along_k,
            fetch(b, of_b.start + b_2.source, b_2.limit > 0),
        )
    return Groups(a_1, b_1, a_2, b_2)


@device_inline
def fetch_at(x, operand, group, k0):
    """A group of the tile at k0."""
    return fetch(x, operand.start + int32(group.source + k0 * operand.k_distance), k0 < group.limit)


@device_inline
def fetch_tiles(a, b, of_a, of_b, groups, k0):
    """This thread's groups of the tiles at k0: in flight into registers, as (a, b, a2, b2)."""
    a_1, b_1 = fetch_at(a, of_a, groups.a, k0), fetch_at(b, of_b, groups.b, k0)
    a_2, b_2 = a_1, b_1
    if TWO_A:
        a_2 = fetch_at(a, of_a, groups.a2, k0)
    if TWO_B:
        b_2 = fetch_at(b, of_b, groups.b2, k0)
    return a_1, b_1, a_2, b_2


@device_inline
def stash_tiles(tile_a, tile_b, of_a, of_b, groups, buffer, fetched):
    """What `fetch_tiles` has brought goes into a buffer."""
    stash(tile_a, buffer * BUFFER_A + groups.a.target, ROW_A, of_a.along_k, fetched[0])
    stash(tile_b, buffer * BUFFER_B + groups.b.target, ROW_B, of_b.along_k, fetched[1])
    if TWO_A:
        stash(tile_a, buffer * BUFFER_A + groups.a2.target, ROW_A, of_a.along_k, fetched[2])
    if TWO_B:
        stash(tile_b, buffer * BUFFER_B + groups.b2.target, ROW_B, of_b.along_k, fetched[3])


# Products -----------------------------------------------------------------------------------------


@cuda.jit(device=True)
def add_row(accumulators, a, left, right):
    """One row of an outer product, onto that row's eight accumulators."""
    return (
        accumulators[0] + a * left[0],
        accumulators[1] + a * left[1],
        accumulators[2] + a * left[2],
        accumulators[3] + a * left[3],
        accumulators[4] + a * right[0],
        accumulators[5] + a * right[1],
        accumulators[6] + a * right[2],
        accumulators[7] + a * right[3],
    )


@cuda.jit(device=True)
def add_outer_product(rows, tile_a, i, tile_b, j):
    """8 × 8 accumulators plus (8 elements of A) × (8 elements of B), all of one k. Tuples of
    tuples: 64 registers."""
    top = load4(tile_a, i)
    bottom = load4(tile_a, i + WARP_ROWS // 2)
    left = load4(tile_b, j)
    right = load4(tile_b, j + WARP_COLUMNS // 2)
    return (
        add_row(rows[0], top[0], left, right),
        add_row(rows[1], top[1], left, right),
        add_row(rows[2], top[2], left, right),
        add_row(rows[3], top[3], left, right),
        add_row(rows[4], bottom[0], left, right),
        add_row(rows[5], bottom[1], left, right),
        add_row(rows[6], bottom[2], left, right),
        add_row(rows[7], bottom[3], left, right),
    )


@device_inline
def no_products():
    """8 × 8 accumulators before the first product."""
    zero = float32(0)
    row = zero, zero, zero, zero, zero, zero, zero, zero
    return row, row, row, row, row, row, row, row


@device_inline
def multiply(accumulators, tile_a, i, tile_b, j, row_a, row_b):
    """accumulators plus the STEP outer products of two tiles, written out so that the compiler
    overlaps their loads.

    row_a, row_b: from one k to the next in a tile
    """
    accumulators = add_outer_product(accumulators, tile_a, i, tile_b, j)
    accumulators = add_outer_product(accumulators, tile_a, i + row_a, tile_b, j + row_b)
    accumulators = add_outer_product(accumulators, tile_a, i + 2 * row_a, tile_b, j + 2 * row_b)
    accumulators = add_outer_product(accumulators, tile_a, i + 3 * row_a, tile_b, j + 3 * row_b)
    accumulators = add_outer_product(accumulators, tile_a, i + 4 * row_a, tile_b, j + 4 * row_b)
    accumulators = add_outer_product(accumulators, tile_a, i + 5 * row_a, tile_b, j + 5 * row_b)
    accumulators = add_outer_product(accumulators, tile_a, i + 6 * row_a, tile_b, j + 6 * row_b)
    return add_outer_product(accumulators, tile_a, i + 7 * row_a, tile_b, j + 7 * row_b)


# Epilogue -----------------------------------------------------------------------------------------


@cuda.jit(device=True)
def write_four(c, i, v0, v1, v2, v3, column, N, bias, epilogue):
    """write_output of operands.py, for four neighbours."""
    if column < N:
        alpha = epilogue.alpha
        v0, v1, v2, v3 = alpha * v0, alpha * v1, alpha * v2, alpha * v3
        if epilogue.has_bias:
            v0 += bias[uint32(column)]
            v1 += bias[uint32(column + 1)]
            v2 += bias[uint32(column + 2)]
            v3 += bias[uint32(column + 3)]
        if epilogue.accumulate:
            c0, c1, c2, c3 = load4(c, i)
            v0, v1, v2, v3 = v0 + c0, v1 + c1, v2 + c2, v3 + c3
        store4(c, i, v0, v1, v2, v3)


@cuda.jit(device=True)
def write_row(c, start, row, column, shape, v, bias, epilogue):
    """A row's eight outputs, if it is in C: four from `column` on, four half a warp's columns
    further."""
    if row < shape.M:
        write_four(c, start + column, v[0], v[1], v[2], v[3], column, shape.N, bias, epilogue)
        column += WARP_COLUMNS // 2
        write_four(c, start + column, v[4], v[5], v[6], v[7], column, shape.N, bias, epilogue)


@device_inline
def write_outputs(c, start, c_row, row, column, shape, rows, bias, epilogue):
    """The thread's 8 × 8 outputs: rows row … row + 3, and four half a warp's rows further; start:
    of the first."""
    write_row(c, start, row, column, shape, rows[0], bias, epilogue)
    write_row(c, start + c_row, row + 1, column, shape, rows[1], bias, epilogue)
    write_row(c, start + 2 * c_row, row + 2, column, shape, rows[2], bias, epilogue)
    write_row(c, start + 3 * c_row, row + 3, column, shape, rows[3], bias, epilogue)
    row += WARP_ROWS // 2
    start += WARP_ROWS // 2 * c_row
    write_row(c, start, row, column, shape, rows[4], bias, epilogue)
    write_row(c, start + c_row, row + 1, column, shape, rows[5], bias, epilogue)
    write_row(c, start + 2 * c_row, row + 2, column, shape, rows[6], bias, epilogue)
    write_row(c, start + 3 * c_row, row + 3, column, shape, rows[7], bias, epilogue)


# The kernel ---------------------------------------------------------------------------------------


def matmul_forward_kernel_v4(a, b, c, bias, shape, strides, epilogue):
    tile_a = cuda.shared.array(BOTH_A, float32)
    tile_b = cuda.shared.array(BOTH_B, float32)
    t = cuda.threadIdx.x
    first_row, first_column = first_output(shape.N, TILE_M, TILE_N)
    a_start, b_start = starts_of(strides)
    length = int32(length_of(shape))
    of_a = RegisterTileOperand(
        a_start + first_row * strides.a_row,
        strides.a_row,
        strides.a_k,
        int32(shape.M - first_row),
        strides.a_k == 1,
    )
    of_b = RegisterTileOperand(
        b_start + first_column * strides.b_column,
        strides.b_column,
        strides.b_k,
        int32(shape.N - first_column),
        strides.b_k == 1,
    )
    groups = load_first_tiles(a, b, of_a, of_b, length, tile_a, tile_b, t)
    cuda.syncthreads()

    # this thread's first output within the block
    warp, lane = t // 32, t % 32
    row = int32(warp // WARPS_N * WARP_ROWS + lane // 8 * 4)
    column = int32(warp % WARPS_N * WARP_COLUMNS + lane % 8 * 4)
    accumulators = no_products()
    k0, buffer = int32(0), int32(0)
    while k0 < length:
        # the next tiles start loading; after the last ones these are zeros that are not read
        k0 = int32(k0 + STEP)
        fetched = fetch_tiles(a, b, of_a, of_b, groups, k0)
        # meanwhile: STEP outer products
        accumulators = multiply(
            accumulators,
            tile_a,
            int32(buffer * BUFFER_A + row),
            tile_b,
            int32(buffer * BUFFER_B + column),
            ROW_A,
            ROW_B,
        )
        # what was fetched goes into the other buffers, which were last read before the barrier of
        # the step before
        buffer = int32(1 - buffer)
        stash_tiles(tile_a, tile_b, of_a, of_b, groups, buffer, fetched)
        cuda.syncthreads()

    row, column = int32(row + first_row), int32(column + first_column)
    start = start_of_c(strides) + row * strides.c_row
    write_outputs(c, start, strides.c_row, row, column, shape, accumulators, bias, epilogue)


matmul_forward_kernels_v4 = {
    (m, n): specialise(
        matmul_forward_kernel_v4, name=f"matmul_forward_kernel_v4_{m}x{n}", TILE_M=m, TILE_N=n
    )
    for m, n in TILES
}
