"""Matmul, rung 2: tiles in shared memory.

WHAT IS NEW
    A block of 16 × 16 threads computes a 16 × 16 tile of C together. It walks along K in steps of
    16: all threads fetch a 16 × 16 tile of A and one of B into shared memory, one element each,
    wait for each other, and then each thread sums 16 products out of the tiles.
WHY IT PAYS
    An element that was fetched once is now used by 16 threads: the traffic to memory falls 16
    times.
WHAT REMAINS
    Shared memory is fast but not free. Each multiply-add still needs two loads, now from there, and
    shared memory gives one load for every four multiply-adds that the arithmetic units could do.
THE TWO BARRIERS
    the first: no thread reads the tiles before all have written them. The second: none overwrites
    them before all have read them. Both stand where every thread passes; threads outside the matrix
    fetch zeros, which add nothing.
COALESCING
    whichever axis of A or B has distance 1 is walked by neighbouring threads, whatever the
    transposition: that costs an `if` while fetching, and the tile in shared memory looks the same
    either way.
LAUNCH
    as rung 1; 2 KiB of shared memory.
DETERMINISM
    one thread sums its products in the order of k.
READ NEXT
    register_tiles.py, where a thread computes more than one output.
"""

from ...device import cuda, float32
from .operands import first_output, length_of, start_of_c, starts_of, write_output

# outputs along each side of a block, and elements of K a step: one element of each tile for each
# thread
TILE = 16
PADDED = TILE + 1  # a tile written along its columns then spreads over the banks of shared memory


@cuda.jit
def matmul_forward_kernel_v2(a, b, c, bias, shape, strides, epilogue):
    tile_a = cuda.shared.array((TILE, PADDED), float32)  # [row][k]
    tile_b = cuda.shared.array((TILE, PADDED), float32)  # [k][column]
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    M, N = shape.M, shape.N
    first_row, first_column = first_output(N, TILE, TILE)
    a_start, b_start = starts_of(strides)
    length = length_of(shape)

    # which element of each tile this thread fetches: x runs along the axis whose elements are
    # neighbours in memory
    if strides.a_k == 1:
        a_r, a_kk = y, x
    else:
        a_r, a_kk = x, y
    if strides.b_column == 1:
        b_c, b_kk = x, y
    else:
        b_c, b_kk = y, x

    total = float32(0)  # C[first_row + y, first_column + x], this thread's output
    for k0 in range(0, length, TILE):
        value = float32(0)
        if first_row + a_r < M and k0 + a_kk < length:
            value = float32(
                a[a_start + (first_row + a_r) * strides.a_row + (k0 + a_kk) * strides.a_k]
            )
        tile_a[a_r, a_kk] = value
        value = float32(0)
        if first_column + b_c < N and k0 + b_kk < length:
            value = float32(
                b[b_start + (k0 + b_kk) * strides.b_k + (first_column + b_c) * strides.b_column]
            )
        tile_b[b_kk, b_c] = value
        cuda.syncthreads()  # both tiles are complete
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
        cuda.syncthreads()  # no thread reads them any more: the next step may overwrite them

    row, column = first_row + y, first_column + x
    if row < M and column < N:
        write_output(
            c, start_of_c(strides) + row * strides.c_row + column, total, column, bias, epilogue
        )
