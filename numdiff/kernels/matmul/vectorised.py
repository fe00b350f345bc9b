"""Matmul, rung 4: 16 bytes at a time, 8 × 8 outputs a thread, and the next tile fetched while this one is used.

WHAT IS NEW, AND WHY IT PAYS
    8 × 8 outputs a thread: 16 numbers read from shared memory feed 64 multiply-adds.
    16-byte loads (load4): those 16 numbers are 4 load instructions. So 64 of 68 instructions are arithmetic, where
        rung 3 had 16 of 24. Loads from memory and stores of C move 16 bytes a thread as well.
    Two buffers: while the threads multiply out of one pair of tiles, the next pair is already on its way from memory,
        into registers; it is stored into the other buffer when the multiplication is done. Nobody waits for memory, and
        one barrier a step is enough: between a buffer's last read and its next write every thread passes one.
    The loop over k is written out: no counter, no jump, every address a constant offset from one base, and
        the compiler can start a load several products before its numbers are used.
THE TILE OF A WARP
    32 threads as 4 × 8 own 32 × 64 outputs. Thread (y, x) owns rows 4y … 4y+3 and 16+4y … 16+4y+3, and columns
    4x … 4x+3 and 32+4x … 32+4x+3: in fours, so that each four is one load4, and so that the eight threads of a row read
    128 neighbouring bytes, all 32 banks of shared memory once. Threads that read the same four share one access.

            x = 0 … 7     x = 0 … 7
           columns 0…31  columns 32…63
    y = 0…3  rows  0…15     4 × 4         4 × 4      of each thread
    y = 0…3  rows 16…31     4 × 4         4 × 4
TILES IN SHARED MEMORY
    both lie as [k][row or column], so that an outer product reads along rows. An operand whose neighbours in memory
    run along k is turned round on the way in, by four 4-byte stores; rows of tile + 4 elements put the 32 stores of a
    warp into 32 different banks.
BLOCK TILES
    128 × 128 for large products, 128 × 64 and 64 × 64 where the result is small or N is 64: see launcher.py. A block
    has one thread for every 64 outputs: 256, 128 or 64.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    matmul_forward, 2048×2048, 2048×2048, float32
        v4*      413 µs  41.6 TFLOP/s   62 % of arithmetic   4.31 × v3    84 % of cuBLAS
LAUNCH
    grid (tiles of C, inner, outer). Shared memory 16.5, 12.5 or 8.5 KiB. About 128 registers a thread let two,
    four or eight blocks live on a multiprocessor: while one waits at its barrier, the others multiply.
NEEDS
    distances and extents that are multiples of 4 elements, so that every four is 16-byte aligned and lies wholly inside
    or outside of its matrix.
DETERMINISM
    one thread sums the products of each output in the order of k.
SOURCE
    Volkov and Demmel, SC 2008 (outer products in registers); Tan et al., "Fast Implementation of DGEMM on Fermi GPU",
    SC 2011, section 4 (two buffers, and loads hidden behind the products). load4: PTX ISA, section 9.7.9.
READ NEXT
    split_k.py, for results too small to fill a GPU.
"""
from ...device import cuda, float32, int32, load4, store4, uint32
from .operands import first_output

STEP = 8  # elements of K in a tile: two groups of four in memory, and a loop that can be written out
PAD = 4  # elements after each row of a tile: moves the next row 4 banks on and keeps it 16-byte aligned
WARP_ROWS, WARP_COLUMNS = 32, 64  # outputs of a warp: 4 × 8 threads with 8 × 8 each


@cuda.jit(device=True)
def locate(group, along_k, extent, distance, k_distance, rows, length, tile_row):
    """Group number `group` of four of an operand's tile: (offset in memory, offset in shared memory, k0 it is below).

    Neighbouring threads take neighbouring groups in memory. In the tile that starts at k0 the group lies inside the
    matrix if k0 is below the third number, which is 0 where its row (a row of A, a column of B) is outside.
    """
    if along_k:
        row, k = group // (STEP // 4), group % (STEP // 4) * 4
    else:
        row, k = group % (extent // 4) * 4, group // (extent // 4)
    limit = length - k if row < rows else 0
    return int32(row * distance + k * k_distance), int32(k * tile_row + row), int32(limit)


@cuda.jit(device=True)
def fetch(x, i, inside):
    """Four neighbours in memory, or zeros, which add nothing to any sum."""
    if inside:
        return load4(x, i)
    return float32(0), float32(0), float32(0), float32(0)


@cuda.jit(device=True)
def stash(tile, i, tile_row, along_k, values):
    """Store a group of four in shared memory: in four rows if it lay along k, else in one.

    An unsigned index saves the test for a negative one, which Python would count from the array's end.
    """
    if along_k:
        tile[uint32(i)] = values[0]
        tile[uint32(i + tile_row)] = values[1]
        tile[uint32(i + 2 * tile_row)] = values[2]
        tile[uint32(i + 3 * tile_row)] = values[3]
    else:
        store4(tile, i, values[0], values[1], values[2], values[3])


@cuda.jit(device=True)
def add_row(sums, a, left, right):
    """One row of an outer product, onto that row's eight sums."""
    return (sums[0] + a * left[0], sums[1] + a * left[1], sums[2] + a * left[2], sums[3] + a * left[3],
            sums[4] + a * right[0], sums[5] + a * right[1], sums[6] + a * right[2], sums[7] + a * right[3])


@cuda.jit(device=True)
def add_outer_product(sums, tile_a, i, tile_b, j):
    """8 × 8 sums plus (8 elements of A) × (8 elements of B), all of one k. Tuples of tuples are 64 registers."""
    top = load4(tile_a, i)
    bottom = load4(tile_a, i + WARP_ROWS // 2)
    left = load4(tile_b, j)
    right = load4(tile_b, j + WARP_COLUMNS // 2)
    return (add_row(sums[0], top[0], left, right), add_row(sums[1], top[1], left, right),
            add_row(sums[2], top[2], left, right), add_row(sums[3], top[3], left, right),
            add_row(sums[4], bottom[0], left, right), add_row(sums[5], bottom[1], left, right),
            add_row(sums[6], bottom[2], left, right), add_row(sums[7], bottom[3], left, right))


@cuda.jit(device=True)
def write_four(c, i, v0, v1, v2, v3, column, N, bias, alpha, has_bias, accumulate):
    """write_output of operands.py, for four neighbours."""
    if column < N:
        v0, v1, v2, v3 = alpha * v0, alpha * v1, alpha * v2, alpha * v3
        if has_bias:
            v0 += bias[uint32(column)]
            v1 += bias[uint32(column + 1)]
            v2 += bias[uint32(column + 2)]
            v3 += bias[uint32(column + 3)]
        if accumulate:
            c0, c1, c2, c3 = load4(c, i)
            v0, v1, v2, v3 = v0 + c0, v1 + c1, v2 + c2, v3 + c3
        store4(c, i, v0, v1, v2, v3)


@cuda.jit(device=True)
def write_row(c, start, row, column, M, N, sums, bias, alpha, has_bias, accumulate):
    if row < M:
        write_four(c, start + column, sums[0], sums[1], sums[2], sums[3], column, N, bias, alpha, has_bias, accumulate)
        column += WARP_COLUMNS // 2
        write_four(c, start + column, sums[4], sums[5], sums[6], sums[7], column, N, bias, alpha, has_bias, accumulate)


def threads_of(tile_m, tile_n):
    """Threads of a block: one for every 8 × 8 outputs."""
    return tile_m * tile_n // 64


def make_kernel(tile_m, tile_n):
    """The kernel for block tiles of tile_m × tile_n; what depends on them is constant in it."""
    THREADS = threads_of(tile_m, tile_n)
    WARPS_N = tile_n // WARP_COLUMNS  # warps side by side
    ROW_A, ROW_B = tile_m + PAD, tile_n + PAD
    BUFFER_A, BUFFER_B = STEP * ROW_A, STEP * ROW_B
    BOTH_A, BOTH_B = 2 * BUFFER_A, 2 * BUFFER_B
    TWO_A = tile_m * STEP // 4 == 2 * THREADS  # a thread fetches two groups of A's tile instead of one
    TWO_B = tile_n * STEP // 4 == 2 * THREADS

    def kernel(a, b, c, bias, M, N, K, K_last, a_row, a_k, b_k, b_column, c_row, a_outer, a_inner, b_outer, b_inner,
               c_outer, c_inner, alpha, has_bias, accumulate):
        tile_a = cuda.shared.array(BOTH_A, float32)
        tile_b = cuda.shared.array(BOTH_B, float32)
        t = cuda.threadIdx.x
        inner, outer = cuda.blockIdx.y, cuda.blockIdx.z
        first_row, first_column = first_output(N, tile_m, tile_n)
        rows, columns = int32(M - first_row), int32(N - first_column)
        length = int32(K_last if inner == cuda.gridDim.y - 1 else K)
        a_start = outer * a_outer + inner * a_inner + first_row * a_row
        b_start = outer * b_outer + inner * b_inner + first_column * b_column
        a_along_k, b_along_k = a_k == 1, b_k == 1

        # the first tiles, into the first buffers
        a_from, a_to, a_below = locate(t, a_along_k, tile_m, a_row, a_k, rows, length, ROW_A)
        b_from, b_to, b_below = locate(t, b_along_k, tile_n, b_column, b_k, columns, length, ROW_B)
        stash(tile_a, a_to, ROW_A, a_along_k, fetch(a, a_start + a_from, a_below > 0))
        stash(tile_b, b_to, ROW_B, b_along_k, fetch(b, b_start + b_from, b_below > 0))
        if TWO_A:
            a_from2, a_to2, a_below2 = locate(t + THREADS, a_along_k, tile_m, a_row, a_k, rows, length, ROW_A)
            stash(tile_a, a_to2, ROW_A, a_along_k, fetch(a, a_start + a_from2, a_below2 > 0))
        if TWO_B:
            b_from2, b_to2, b_below2 = locate(t + THREADS, b_along_k, tile_n, b_column, b_k, columns, length, ROW_B)
            stash(tile_b, b_to2, ROW_B, b_along_k, fetch(b, b_start + b_from2, b_below2 > 0))
        cuda.syncthreads()

        # this thread's first output within the block
        warp, lane = t // 32, t % 32
        row = int32(warp // WARPS_N * WARP_ROWS + lane // 8 * 4)
        column = int32(warp % WARPS_N * WARP_COLUMNS + lane % 8 * 4)
        zero = float32(0)
        zeros = (zero, zero, zero, zero, zero, zero, zero, zero)
        sums = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
        k0, buffer = int32(0), int32(0)
        while k0 < length:
            # the next tiles start on their way; after the last ones these are zeros that nobody reads
            k0 = int32(k0 + STEP)
            a_next = fetch(a, a_start + int32(a_from + k0 * a_k), k0 < a_below)
            b_next = fetch(b, b_start + int32(b_from + k0 * b_k), k0 < b_below)
            if TWO_A:
                a_next2 = fetch(a, a_start + int32(a_from2 + k0 * a_k), k0 < a_below2)
            if TWO_B:
                b_next2 = fetch(b, b_start + int32(b_from2 + k0 * b_k), k0 < b_below2)

            # meanwhile: STEP outer products
            i = int32(buffer * BUFFER_A + row)
            j = int32(buffer * BUFFER_B + column)
            sums = add_outer_product(sums, tile_a, i, tile_b, j)
            sums = add_outer_product(sums, tile_a, i + ROW_A, tile_b, j + ROW_B)
            sums = add_outer_product(sums, tile_a, i + 2 * ROW_A, tile_b, j + 2 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 3 * ROW_A, tile_b, j + 3 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 4 * ROW_A, tile_b, j + 4 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 5 * ROW_A, tile_b, j + 5 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 6 * ROW_A, tile_b, j + 6 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 7 * ROW_A, tile_b, j + 7 * ROW_B)

            # what was fetched goes into the other buffers, which were last read before the barrier of the step before
            buffer = int32(1 - buffer)
            stash(tile_a, buffer * BUFFER_A + a_to, ROW_A, a_along_k, a_next)
            stash(tile_b, buffer * BUFFER_B + b_to, ROW_B, b_along_k, b_next)
            if TWO_A:
                stash(tile_a, buffer * BUFFER_A + a_to2, ROW_A, a_along_k, a_next2)
            if TWO_B:
                stash(tile_b, buffer * BUFFER_B + b_to2, ROW_B, b_along_k, b_next2)
            cuda.syncthreads()

        row, column = int32(row + first_row), int32(column + first_column)
        start = outer * c_outer + inner * c_inner + row * c_row
        write_row(c, start, row, column, M, N, sums[0], bias, alpha, has_bias, accumulate)
        write_row(c, start + c_row, row + 1, column, M, N, sums[1], bias, alpha, has_bias, accumulate)
        write_row(c, start + 2 * c_row, row + 2, column, M, N, sums[2], bias, alpha, has_bias, accumulate)
        write_row(c, start + 3 * c_row, row + 3, column, M, N, sums[3], bias, alpha, has_bias, accumulate)
        row += WARP_ROWS // 2
        start += WARP_ROWS // 2 * c_row
        write_row(c, start, row, column, M, N, sums[4], bias, alpha, has_bias, accumulate)
        write_row(c, start + c_row, row + 1, column, M, N, sums[5], bias, alpha, has_bias, accumulate)
        write_row(c, start + 2 * c_row, row + 2, column, M, N, sums[6], bias, alpha, has_bias, accumulate)
        write_row(c, start + 3 * c_row, row + 3, column, M, N, sums[7], bias, alpha, has_bias, accumulate)

    kernel.__name__ = f"matmul_forward_kernel_v4_{tile_m}x{tile_n}"
    return cuda.jit(kernel)


TILES = (128, 128), (128, 64), (64, 64)
matmul_forward_kernels_v4 = {tile: make_kernel(*tile) for tile in TILES}
