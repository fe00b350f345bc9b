"""Matmul, rung 3: a tile of outputs in the registers of each thread.

WHAT IS NEW
    A block of 256 threads computes 64 × 64 outputs, each thread 4 × 4 of them. For every k a thread
    reads 4 elements of A's tile and 4 of B's and makes all 16 products: an outer product, summed
    into 16 registers.
WHY IT PAYS
    8 loads from shared memory now feed 16 multiply-adds, where rung 2 needed 32 loads. Registers
    are the only memory as fast as the arithmetic. The larger tile also fetches each element of A
    and B 64 / 16 = 4 times less often.
WHAT REMAINS
    One load for two multiply-adds is still twice what shared memory can deliver; each load moves 4
    bytes where it could move 16; and while the next tiles are in flight from memory, all threads
    wait.
WHICH 4 × 4
    Thread (x, y) owns rows y, y + 16, y + 32, y + 48 and columns x, x + 16, x + 32, x + 48. So in
    every load of B's tile neighbouring threads read neighbouring banks, and in every load of A's
    tile half a warp reads one address.
REGISTERS
    The accumulators are tuples, not a `cuda.local.array`: an array could land in memory if the
    compiler left any loop over it in place; a tuple's elements can only be named one by one, so
    they are registers.
LAUNCH
    grid (ceil(M / 64) · ceil(N / 64), inner, outer), blocks of 256 threads; 8 KiB of shared memory.
    This is the rung for operands that cannot be read 16 bytes at a time, such as the rows of 27 of
    a first 3 × 3 convolution.
DETERMINISM
    one thread sums the products of each output in the order of k.
SOURCE
    Volkov and Demmel 2008, named in `__init__.py`: outputs in registers, inputs through shared
    memory.
READ NEXT
    vectorised.py, the fast one.
"""

from ...device import cuda, float32, int32
from .operands import first_output, length_of, start_of_c, starts_of, write_output

TILE = 64  # outputs along each side of a block
STEP = 16  # elements of K fetched at a time
THREADS = 256
SIDE = 16  # threads along each side of the tile; each owns every 16th row and column
FETCHES = TILE * STEP // THREADS  # elements of each tile that a thread fetches
PADDED = TILE + 1  # a tile written along k then spreads over the banks of shared memory


@cuda.jit(device=True)
def tile_position(e, along_k):
    """(row, k) of element e of a tile, counted along the axis whose elements are neighbours in
    memory."""
    if along_k:
        return int32(e // STEP), int32(e % STEP)
    return int32(e % TILE), int32(e // TILE)


@cuda.jit(device=True)
def fetch(x, start, r, k, row_distance, k_distance, rows, length):
    """Element (r, k) of an operand, zero outside of it."""
    if r < rows and k < length:
        return x[start + int32(r * row_distance + k * k_distance)]
    return float32(0)


@cuda.jit(device=True)
def add_row(accumulators, a, b0, b1, b2, b3):
    """One row of an outer product, onto that row's four accumulators."""
    return (
        accumulators[0] + a * b0,
        accumulators[1] + a * b1,
        accumulators[2] + a * b2,
        accumulators[3] + a * b3,
    )


@cuda.jit(device=True)
def multiply(accumulators, tile_a, tile_b, x, y):
    """Four rows of accumulators plus the products of two tiles: STEP outer products of 4 by 4
    elements."""
    row0, row1, row2, row3 = accumulators
    for k in range(STEP):
        b0 = tile_b[k, x]
        b1 = tile_b[k, x + SIDE]
        b2 = tile_b[k, x + 2 * SIDE]
        b3 = tile_b[k, x + 3 * SIDE]
        row0 = add_row(row0, tile_a[k, y], b0, b1, b2, b3)
        row1 = add_row(row1, tile_a[k, y + SIDE], b0, b1, b2, b3)
        row2 = add_row(row2, tile_a[k, y + 2 * SIDE], b0, b1, b2, b3)
        row3 = add_row(row3, tile_a[k, y + 3 * SIDE], b0, b1, b2, b3)
    return row0, row1, row2, row3


@cuda.jit(device=True)
def write_row(c, start, row, column, shape, accumulators, bias, epilogue):
    """The epilogue of a row's four outputs, those that are in C; start: of the row."""
    if row < shape.M:
        if column < shape.N:
            write_output(c, start + column, accumulators[0], column, bias, epilogue)
        if column + SIDE < shape.N:
            write_output(c, start + column + SIDE, accumulators[1], column + SIDE, bias, epilogue)
        if column + 2 * SIDE < shape.N:
            write_output(
                c, start + column + 2 * SIDE, accumulators[2], column + 2 * SIDE, bias, epilogue
            )
        if column + 3 * SIDE < shape.N:
            write_output(
                c, start + column + 3 * SIDE, accumulators[3], column + 3 * SIDE, bias, epilogue
            )


@cuda.jit
def matmul_forward_kernel_v3(a, b, c, bias, shape, strides, epilogue):
    # [k][row]: what a thread reads for one k is in one row
    tile_a = cuda.shared.array((STEP, PADDED), float32)
    tile_b = cuda.shared.array((STEP, PADDED), float32)  # [k][column]
    t = cuda.threadIdx.x
    x, y = int32(t % SIDE), int32(t // SIDE)
    first_row, first_column = first_output(shape.N, TILE, TILE)
    a_start, b_start = starts_of(strides)
    length = length_of(shape)

    zeros = (float32(0), float32(0), float32(0), float32(0))
    accumulators = zeros, zeros, zeros, zeros  # of rows y, y + 16, y + 32, y + 48
    for k0 in range(0, length, STEP):
        for i in range(FETCHES):
            r, k = tile_position(t + i * THREADS, strides.a_k == 1)
            tile_a[k, r] = fetch(
                a, a_start, first_row + r, k0 + k, strides.a_row, strides.a_k, shape.M, length
            )
            r, k = tile_position(t + i * THREADS, strides.b_k == 1)
            tile_b[k, r] = fetch(
                b, b_start, first_column + r, k0 + k, strides.b_column, strides.b_k, shape.N, length
            )
        cuda.syncthreads()
        accumulators = multiply(accumulators, tile_a, tile_b, x, y)
        cuda.syncthreads()

    row, column, c_row = first_row + y, first_column + x, strides.c_row
    start = start_of_c(strides) + row * c_row
    write_row(c, start, row, column, shape, accumulators[0], bias, epilogue)
    write_row(c, start + SIDE * c_row, row + SIDE, column, shape, accumulators[1], bias, epilogue)
    write_row(
        c, start + 2 * SIDE * c_row, row + 2 * SIDE, column, shape, accumulators[2], bias, epilogue
    )
    write_row(
        c, start + 3 * SIDE * c_row, row + 3 * SIDE, column, shape, accumulators[3], bias, epilogue
    )
