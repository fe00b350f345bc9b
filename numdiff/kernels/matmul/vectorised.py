"""Matmul, rung 4: 16-byte loads, 8 × 8 outputs a thread, and two tiles in flight.

WHAT IS NEW
    (draft)
"""
from ...device import cuda, float32, int32, load4, store4
from .operands import batch_offset, write_output

STEP = 8
PAD = 4
WARP_ROWS = 32
WARP_COLUMNS = 64


@cuda.jit(device=True)
def position(group, along_k, extent):
    if along_k:
        return group // (STEP // 4), group % (STEP // 4) * 4
    return group % (extent // 4) * 4, group // (extent // 4)


@cuda.jit(device=True)
def fetch(x, i, inside):
    if inside:
        return load4(x, i)
    return float32(0), float32(0), float32(0), float32(0)


@cuda.jit(device=True)
def stash(tile, i, row, along_k, v):
    if along_k:
        tile[i] = v[0]
        tile[i + row] = v[1]
        tile[i + 2 * row] = v[2]
        tile[i + 3 * row] = v[3]
    else:
        store4(tile, i, v[0], v[1], v[2], v[3])


@cuda.jit(device=True)
def add_row(sums, a, b, d):
    return (sums[0] + a * b[0], sums[1] + a * b[1], sums[2] + a * b[2], sums[3] + a * b[3],
            sums[4] + a * d[0], sums[5] + a * d[1], sums[6] + a * d[2], sums[7] + a * d[3])


@cuda.jit(device=True)
def add_outer_product(sums, tile_a, i, tile_b, j):
    a = load4(tile_a, i)
    e = load4(tile_a, i + 16)
    b = load4(tile_b, j)
    d = load4(tile_b, j + 32)
    return (add_row(sums[0], a[0], b, d), add_row(sums[1], a[1], b, d),
            add_row(sums[2], a[2], b, d), add_row(sums[3], a[3], b, d),
            add_row(sums[4], e[0], b, d), add_row(sums[5], e[1], b, d),
            add_row(sums[6], e[2], b, d), add_row(sums[7], e[3], b, d))


@cuda.jit(device=True)
def write_four(c, i, column, N, v0, v1, v2, v3, bias, alpha, has_bias, accumulate, by_four):
    if by_four:
        if column < N:
            v0 *= alpha
            v1 *= alpha
            v2 *= alpha
            v3 *= alpha
            if has_bias:
                v0 += bias[column]
                v1 += bias[column + 1]
                v2 += bias[column + 2]
                v3 += bias[column + 3]
            if accumulate:
                c0, c1, c2, c3 = load4(c, i)
                v0 += c0
                v1 += c1
                v2 += c2
                v3 += c3
            store4(c, i, v0, v1, v2, v3)
    else:
        if column < N:
            write_output(c, i, v0, column, bias, alpha, has_bias, accumulate)
        if column + 1 < N:
            write_output(c, i + 1, v1, column + 1, bias, alpha, has_bias, accumulate)
        if column + 2 < N:
            write_output(c, i + 2, v2, column + 2, bias, alpha, has_bias, accumulate)
        if column + 3 < N:
            write_output(c, i + 3, v3, column + 3, bias, alpha, has_bias, accumulate)


@cuda.jit(device=True)
def write_row(c, start, row, column, M, N, sums, bias, alpha, has_bias, accumulate, by_four):
    if row < M:
        write_four(c, start + column, column, N, sums[0], sums[1], sums[2], sums[3], bias, alpha, has_bias, accumulate,
                   by_four)
        write_four(c, start + column + 32, column + 32, N, sums[4], sums[5], sums[6], sums[7], bias, alpha, has_bias,
                   accumulate, by_four)


def make_kernel(tile_m, tile_n):
    """The kernel for block tiles of tile_m × tile_n outputs."""
    THREADS = tile_m * tile_n // 64
    WARPS_N = tile_n // WARP_COLUMNS
    ROW_A = tile_m + PAD
    ROW_B = tile_n + PAD
    STAGE_A = STEP * ROW_A
    STAGE_B = STEP * ROW_B
    SHARED_A = 2 * STAGE_A
    SHARED_B = 2 * STAGE_B
    TWO_A = tile_m * STEP // 4 > THREADS
    TWO_B = tile_n * STEP // 4 > THREADS

    def kernel(a, b, c, bias, M, N, K, K_last, a_row, a_k, b_k, b_column, c_row, inner, a_outer, a_inner, b_outer,
               b_inner, c_outer, c_inner, alpha, has_bias, accumulate, by_four):
        tile_a = cuda.shared.array(SHARED_A, float32)
        tile_b = cuda.shared.array(SHARED_B, float32)
        t = cuda.threadIdx.x
        blocks_n = (N + tile_n - 1) // tile_n
        first_row = int32(cuda.blockIdx.x // blocks_n * tile_m)
        first_column = int32(cuda.blockIdx.x % blocks_n * tile_n)
        z = cuda.blockIdx.z
        a_start = batch_offset(z, inner, a_outer, a_inner) + first_row * a_row
        b_start = batch_offset(z, inner, b_outer, b_inner) + first_column * b_column
        length = int32(K_last if z == cuda.gridDim.z - 1 else K)
        a_along_k = a_k == 1
        b_along_k = b_k == 1

        r, k = position(t, a_along_k, tile_m)
        a_to = int32(k * ROW_A + r)
        a_from = int32(r * a_row + k * a_k)
        a_left = int32(length - k if first_row + r < M else 0)
        r, k = position(t + THREADS, a_along_k, tile_m)
        a_to2 = int32(k * ROW_A + r)
        a_from2 = int32(r * a_row + k * a_k)
        a_left2 = int32(length - k if first_row + r < M else 0)
        r, k = position(t, b_along_k, tile_n)
        b_to = int32(k * ROW_B + r)
        b_from = int32(r * b_column + k * b_k)
        b_left = int32(length - k if first_column + r < N else 0)
        r, k = position(t + THREADS, b_along_k, tile_n)
        b_to2 = int32(k * ROW_B + r)
        b_from2 = int32(r * b_column + k * b_k)
        b_left2 = int32(length - k if first_column + r < N else 0)

        warp = t // 32
        lane = t % 32
        row = int32(warp // WARPS_N * WARP_ROWS + lane // 8 * 4)
        column = int32(warp % WARPS_N * WARP_COLUMNS + lane % 8 * 4)

        stash(tile_a, a_to, ROW_A, a_along_k, fetch(a, a_start + a_from, a_left > 0))
        stash(tile_b, b_to, ROW_B, b_along_k, fetch(b, b_start + b_from, b_left > 0))
        if TWO_A:
            stash(tile_a, a_to2, ROW_A, a_along_k, fetch(a, a_start + a_from2, a_left2 > 0))
        if TWO_B:
            stash(tile_b, b_to2, ROW_B, b_along_k, fetch(b, b_start + b_from2, b_left2 > 0))
        cuda.syncthreads()

        zero = float32(0)
        zeros = (zero, zero, zero, zero, zero, zero, zero, zero)
        sums = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
        steps = int32((length + STEP - 1) // STEP)
        step = int32(0)
        while step < steps:
            here = step & 1
            step = int32(step + 1)
            there = step & 1
            k0 = int32(step * STEP)
            next_a = fetch(a, a_start + int32(a_from + k0 * a_k), k0 < a_left)
            next_b = fetch(b, b_start + int32(b_from + k0 * b_k), k0 < b_left)
            if TWO_A:
                next_a2 = fetch(a, a_start + int32(a_from2 + k0 * a_k), k0 < a_left2)
            if TWO_B:
                next_b2 = fetch(b, b_start + int32(b_from2 + k0 * b_k), k0 < b_left2)

            i = here * STAGE_A + row
            j = here * STAGE_B + column
            sums = add_outer_product(sums, tile_a, i, tile_b, j)
            sums = add_outer_product(sums, tile_a, i + ROW_A, tile_b, j + ROW_B)
            sums = add_outer_product(sums, tile_a, i + 2 * ROW_A, tile_b, j + 2 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 3 * ROW_A, tile_b, j + 3 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 4 * ROW_A, tile_b, j + 4 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 5 * ROW_A, tile_b, j + 5 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 6 * ROW_A, tile_b, j + 6 * ROW_B)
            sums = add_outer_product(sums, tile_a, i + 7 * ROW_A, tile_b, j + 7 * ROW_B)

            stash(tile_a, there * STAGE_A + a_to, ROW_A, a_along_k, next_a)
            stash(tile_b, there * STAGE_B + b_to, ROW_B, b_along_k, next_b)
            if TWO_A:
                stash(tile_a, there * STAGE_A + a_to2, ROW_A, a_along_k, next_a2)
            if TWO_B:
                stash(tile_b, there * STAGE_B + b_to2, ROW_B, b_along_k, next_b2)
            cuda.syncthreads()

        row = int32(row + first_row)
        column = int32(column + first_column)
        start = batch_offset(z, inner, c_outer, c_inner) + row * c_row
        write_row(c, start, row, column, M, N, sums[0], bias, alpha, has_bias, accumulate, by_four)
        write_row(c, start + c_row, row + 1, column, M, N, sums[1], bias, alpha, has_bias, accumulate, by_four)
        write_row(c, start + 2 * c_row, row + 2, column, M, N, sums[2], bias, alpha, has_bias, accumulate, by_four)
        write_row(c, start + 3 * c_row, row + 3, column, M, N, sums[3], bias, alpha, has_bias, accumulate, by_four)
        row += 16
        start += 16 * c_row
        write_row(c, start, row, column, M, N, sums[4], bias, alpha, has_bias, accumulate, by_four)
        write_row(c, start + c_row, row + 1, column, M, N, sums[5], bias, alpha, has_bias, accumulate, by_four)
        write_row(c, start + 2 * c_row, row + 2, column, M, N, sums[6], bias, alpha, has_bias, accumulate, by_four)
        write_row(c, start + 3 * c_row, row + 3, column, M, N, sums[7], bias, alpha, has_bias, accumulate, by_four)

    kernel.__name__ = f"matmul_forward_kernel_v4_{tile_m}x{tile_n}"
    return cuda.jit(kernel)


TILES = ((128, 128), (128, 64), (64, 64))
matmul_forward_kernels_v4 = {tile: make_kernel(*tile) for tile in TILES}


def threads_of(tile_m, tile_n):
    return tile_m * tile_n // 64
