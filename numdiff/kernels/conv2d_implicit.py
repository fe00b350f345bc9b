"""Convolution as an implicit GEMM: im2col's matrix is multiplied without ever being written.

MATHEMATICS
    forward           y[p, n] = Σ_k col[p, k] · weight[n, k]            p a pixel, k = (r, s, c): tap row, tap column, channel
    weight gradient   dweight[n, k] += Σ_p dy[p, n] · col[p, k]
    input gradient    with stride 1 the forward over dy, with flipped_weight (conv2d.py derives it)
    col[p, k] lies at x[b, i·stride + r - pad, j·stride + s - pad, c], p = (b, i, j). So whoever fetches a tile of col can
    fetch it from x, if he knows his pixel and his tap. Everything else is matmul/vectorised.py.
SHAPES
    as in conv2d.py; every array flat, float32; fewer than 2³¹ elements each
VERSIONS
    this is version 3 of conv2d.py. The kernels come as three, made by one function, for want of templates:
      128 × 128 outputs a block, where C_out nearly fills whole tiles of 128;
      128 × 64, where it does not (64, 192, 320);
      128 × 64 with loads of single numbers, where channels do not come in eights (forward) or fours (weight gradient).
LAUNCH
    one thread for 8 × 8 outputs: 256 threads and 16.5 KiB of shared memory, or 128 and 12.5 KiB. Grid (row tiles, column
    tiles, parts): where tiles are too few to fill a GPU, the inner dimension is cut into parts. Never more than 128
    registers a thread, so that 512 threads fit on a multiprocessor.
DETERMINISM
    each part's sums are written apart (partial), and a second pass adds them in order. The number of parts depends on
    the shape alone, so one GPU gives the same bits as another of its kind.
COST
    FLOPs as in conv2d.py. A step reads 4·8·(128 + tile_n) bytes for 2·8·128·tile_n FLOPs: 32 or 21 FLOPs a byte,
    from L2, where neighbouring taps' pixels are found again. Roof: arithmetic.
SOURCE
    Chetlur et al. 2014, "cuDNN: Efficient Primitives for Deep Learning", arXiv:1410.0759, section 3.
READ NEXT
    conv2d_narrow.py, for when the tiles would be nearly empty.
"""
import numpy as np

from ..device import cuda, empty, float32, int32, launch, load4, store4
from .im2col import divide
from .matmul.vectorised import PAD, STEP, WARP_COLUMNS, WARP_ROWS, add_outer_product
from .reduce import column_sum

TILE_M = 128  # pixels (forward) or columns of col (weight gradient) of a block's tile
ROW_A = TILE_M + PAD  # shared-memory distance from one k to the next
STAGE_A = STEP * ROW_A  # one of the two buffers
SHARED_A = 2 * STAGE_A
THREADS_WANTED = 65536  # in the whole grid: what an H100's 132 multiprocessors hold at 128 registers a thread
SHORTEST_PART = 8  # steps of the inner dimension: below, filling and emptying the pipeline costs more than parts gain
NOWHERE = int32(-(1 << 20))  # a row so far above the image that every tap falls outside


# Device functions -----------------------------------------------------------------------------------------------------

@cuda.jit(device=True)
def fetch(x, at, inside, left, by_four):
    """x[at], …, x[at + 3]: zeros where not `inside`, and beyond the `left` that exist (by_four: all of them do)."""
    zero = float32(0)
    if by_four:
        if inside:
            return load4(x, at)
        return zero, zero, zero, zero
    left = left if inside else int32(0)
    a = b = c = d = zero
    if left > 0:
        a = x[at]
    if left > 1:
        b = x[at + 1]
    if left > 2:
        c = x[at + 2]
    if left > 3:
        d = x[at + 3]
    return a, b, c, d


@cuda.jit(device=True)
def write_four(out, at, left, v0, v1, v2, v3, by_four):
    """out[at], …, out[at + 3], of which `left` exist (by_four: four, or none)."""
    if by_four:
        if left > 0:
            store4(out, at, v0, v1, v2, v3)
    else:
        if left > 0:
            out[at] = v0
        if left > 1:
            out[at + 1] = v1
        if left > 2:
            out[at + 2] = v2
        if left > 3:
            out[at + 3] = v3


@cuda.jit(device=True)
def scatter(tile, at, row, v):
    """Four neighbouring k of one row go to four rows of the tile, which is k-major: transposed on the way."""
    tile[at] = v[0]
    tile[at + row] = v[1]
    tile[at + 2 * row] = v[2]
    tile[at + 3 * row] = v[3]


@cuda.jit(device=True)
def multiply(sums, tile_a, i, row_a, tile_b, j, row_b):
    """sums += the STEP outer products of two tiles: as in matmul, written out so that the compiler overlaps them."""
    sums = add_outer_product(sums, tile_a, i, tile_b, j)
    sums = add_outer_product(sums, tile_a, i + row_a, tile_b, j + row_b)
    sums = add_outer_product(sums, tile_a, i + 2 * row_a, tile_b, j + 2 * row_b)
    sums = add_outer_product(sums, tile_a, i + 3 * row_a, tile_b, j + 3 * row_b)
    sums = add_outer_product(sums, tile_a, i + 4 * row_a, tile_b, j + 4 * row_b)
    sums = add_outer_product(sums, tile_a, i + 5 * row_a, tile_b, j + 5 * row_b)
    sums = add_outer_product(sums, tile_a, i + 6 * row_a, tile_b, j + 6 * row_b)
    return add_outer_product(sums, tile_a, i + 7 * row_a, tile_b, j + 7 * row_b)


@cuda.jit(device=True)
def window(pixel, pixels, H, W, C, Ho, Wo, kernel, stride):
    """Where an output pixel's window starts: row, column, and index into x. All may be negative: padding."""
    image, rest = divide(pixel, int32(Ho * Wo))
    i, j = divide(rest, Wo)
    top = int32(i * stride - (kernel >> 1))
    left = int32(j * stride - (kernel >> 1))
    start = int32(((image * H + top) * W + left) * C)
    return top if pixel < pixels else NOWHERE, left, start


@cuda.jit(device=True)
def look_through(top, left, start, r, s, H, W, C):
    """What a window shows through tap (r, s): index into x, and whether it is inside the image."""
    h, w = int32(top + r), int32(left + s)
    return int32(start + (r * W + s) * C), visible(h, w, H, W)


@cuda.jit(device=True)
def visible(h, w, H, W):
    return h >= 0 and h < H and w >= 0 and w < W


@cuda.jit(device=True)
def column_source(column, W, C, C4, kernel):
    """What a column of col is: its tap's distance from the window's middle in rows, in columns and as an index into x
    (its channel included), and how many channels are left from there on (0 beyond the last column)."""
    tap, c = divide(column, C4)
    r, s = divide(tap, kernel)
    dr, ds = int32(r - (kernel >> 1)), int32(s - (kernel >> 1))
    return dr, ds, int32((dr * W + ds) * C + c), int32(C - c if tap < kernel * kernel else 0)


@cuda.jit(device=True)
def write_pixel(y, at, exists, left, sums, bias_0, bias_32, by_four):
    """A thread's eight channels of one pixel: four at `at` and four at `at + 32`."""
    if exists:
        write_four(y, at, left, sums[0] + bias_0[0], sums[1] + bias_0[1], sums[2] + bias_0[2], sums[3] + bias_0[3],
                   by_four)
        write_four(y, at + 32, left - 32, sums[4] + bias_32[0], sums[5] + bias_32[1], sums[6] + bias_32[2],
                   sums[7] + bias_32[3], by_four)


@cuda.jit(device=True)
def write_columns(partial, at, K, channels, left, s0, s1, s2, s3, by_four):
    """A thread's four columns (s0 … s3) of eight channels: 0 … 3 and 32 … 35, of which `channels` exist."""
    write_four(partial, at, left if channels > 0 else 0, s0[0], s1[0], s2[0], s3[0], by_four)
    write_four(partial, at + K, left if channels > 1 else 0, s0[1], s1[1], s2[1], s3[1], by_four)
    write_four(partial, at + 2 * K, left if channels > 2 else 0, s0[2], s1[2], s2[2], s3[2], by_four)
    write_four(partial, at + 3 * K, left if channels > 3 else 0, s0[3], s1[3], s2[3], s3[3], by_four)
    at += 32 * K
    write_four(partial, at, left if channels > 32 else 0, s0[4], s1[4], s2[4], s3[4], by_four)
    write_four(partial, at + K, left if channels > 33 else 0, s0[5], s1[5], s2[5], s3[5], by_four)
    write_four(partial, at + 2 * K, left if channels > 34 else 0, s0[6], s1[6], s2[6], s3[6], by_four)
    write_four(partial, at + 3 * K, left if channels > 35 else 0, s0[7], s1[7], s2[7], s3[7], by_four)


# Forward --------------------------------------------------------------------------------------------------------------
# A step multiplies 8 channels of one tap, for 128 pixels and tile_n output channels. Two threads share a pixel: each
# fetches four of the eight channels by one 16-byte load. All divisions happen before the loop (`window`); from step to
# step an index grows by 8, and only when the channels of a tap are through is the next tap looked up. A step's numbers
# are fetched while those of the step before are multiplied, and go to the other of two shared buffers: one barrier a
# step.

def make_forward(tile_n, by_four):
    """The kernel for tiles of 128 × tile_n; `by_four` needs C to be a multiple of 8 (whole steps, 16-byte loads)."""
    HALF = TILE_M * tile_n // 128  # pixels that one round of fetches serves: two threads a pixel
    TWO_ROUNDS = HALF < TILE_M
    ROW_B = tile_n + PAD
    STAGE_B = STEP * ROW_B
    SHARED_B = 2 * STAGE_B
    WARPS_N = tile_n // WARP_COLUMNS

    def kernel_v3(x, weight, bias, y, H, W, C, Ho, Wo, N, kernel, stride, pixels, part_steps, has_bias):
        tile_a = cuda.shared.array(SHARED_A, float32)
        tile_b = cuda.shared.array(SHARED_B, float32)
        t = int32(cuda.threadIdx.x)
        first_pixel = int32(cuda.blockIdx.x * TILE_M)
        first_channel = int32(cuda.blockIdx.y * tile_n)
        steps_a_tap = int32((C + STEP - 1) // STEP)
        first_step = int32(cuda.blockIdx.z * part_steps)
        end = int32(min(first_step + part_steps, kernel * kernel * steps_a_tap))

        # what this thread fetches: channels k … k + 3 of a step, of pixel `mine` of the tile and of weight row `mine`
        mine = t >> 1
        k = int32((t & 1) * 4)
        to_a, to_b = int32(k * ROW_A + mine), int32(k * ROW_B + mine)
        tap, chunk = divide(first_step, steps_a_tap)
        r, s = divide(tap, kernel)
        c = int32(chunk * STEP)
        top, left, start = window(int32(first_pixel + mine), pixels, H, W, C, Ho, Wo, kernel, stride)
        start = int32(start + k)
        at, inside = look_through(top, left, int32(start + c), r, s, H, W, C)
        if TWO_ROUNDS:
            top_2, left_2, start_2 = window(int32(first_pixel + mine + HALF), pixels, H, W, C, Ho, Wo, kernel, stride)
            start_2 = int32(start_2 + k)
            at_2, inside_2 = look_through(top_2, left_2, int32(start_2 + c), r, s, H, W, C)
        n = min(first_channel + mine, N - 1)  # rows beyond the last repeat it: their outputs are never written
        weight_at = int32((n * kernel * kernel + tap) * C + c + k)

        # what this thread multiplies: rows row … + 3 and row + 16 … of the tile, columns column … + 3 and column + 32 …
        warp, lane = t >> 5, t & 31
        row = int32((warp // WARPS_N) * WARP_ROWS + (lane >> 3) * 4)
        column = int32((warp % WARPS_N) * WARP_COLUMNS + (lane & 7) * 4)
        zero = float32(0)
        zeros = (zero, zero, zero, zero, zero, zero, zero, zero)
        sums = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
        stage = int32(0)
        step = first_step
        while step <= end:  # one round more than steps: each multiplies what the round before has stored
            more = step < end
            a = fetch(x, at, inside and more, C - c - k, by_four)
            b = fetch(weight, weight_at, more, C - c - k, by_four)
            if TWO_ROUNDS:
                a_2 = fetch(x, at_2, inside_2 and more, C - c - k, by_four)

            if step > first_step:
                sums = multiply(sums, tile_a, stage * STAGE_A + row, ROW_A, tile_b, stage * STAGE_B + column, ROW_B)

            stage = int32(1 - stage)
            scatter(tile_a, stage * STAGE_A + to_a, ROW_A, a)
            scatter(tile_b, stage * STAGE_B + to_b, ROW_B, b)
            if TWO_ROUNDS:
                scatter(tile_a, stage * STAGE_A + to_a + HALF, ROW_A, a_2)
            cuda.syncthreads()

            step = int32(step + 1)
            c = int32(c + STEP)
            at = int32(at + STEP)
            weight_at = int32(weight_at + STEP)
            if TWO_ROUNDS:
                at_2 = int32(at_2 + STEP)
            if c >= C:  # all threads of the block together: the next tap
                weight_at = int32(weight_at + C - c)
                c = int32(0)
                s = int32(s + 1)
                if s == kernel:
                    s = int32(0)
                    r = int32(r + 1)
                at, inside = look_through(top, left, start, r, s, H, W, C)
                if TWO_ROUNDS:
                    at_2, inside_2 = look_through(top_2, left_2, start_2, r, s, H, W, C)

        pixel = first_pixel + row
        channel = int32(first_channel + column)
        exist = int32(N - channel)
        whole = N % 4 == 0
        leads = has_bias != 0 and cuda.blockIdx.z == 0  # one part brings the bias
        bias_0 = fetch(bias, channel, leads, exist, False)
        bias_32 = fetch(bias, channel + 32, leads, exist - 32, False)
        out = (cuda.blockIdx.z * pixels + pixel) * N + channel
        write_pixel(y, out, pixel < pixels, exist, sums[0], bias_0, bias_32, whole)
        write_pixel(y, out + N, pixel + 1 < pixels, exist, sums[1], bias_0, bias_32, whole)
        write_pixel(y, out + 2 * N, pixel + 2 < pixels, exist, sums[2], bias_0, bias_32, whole)
        write_pixel(y, out + 3 * N, pixel + 3 < pixels, exist, sums[3], bias_0, bias_32, whole)
        pixel += 16
        out += 16 * N
        write_pixel(y, out, pixel < pixels, exist, sums[4], bias_0, bias_32, whole)
        write_pixel(y, out + N, pixel + 1 < pixels, exist, sums[5], bias_0, bias_32, whole)
        write_pixel(y, out + 2 * N, pixel + 2 < pixels, exist, sums[6], bias_0, bias_32, whole)
        write_pixel(y, out + 3 * N, pixel + 3 < pixels, exist, sums[7], bias_0, bias_32, whole)

    kernel_v3.__name__ = f"conv2d_forward_kernel_v3_{tile_n}{'' if by_four else '_by_one'}"
    return cuda.jit(kernel_v3)


# Weight gradient ------------------------------------------------------------------------------------------------------
# Now pixels are the inner dimension: a step multiplies 8 pixels, for 128 columns of col and tile_n output channels. A
# thread keeps its columns, so its tap and channel are found once; what moves is the pixel, by 8 a step, without a
# division. Both operands lie with their tile's long side contiguous: whole warps read 256 or 512 neighbouring bytes,
# and nothing is transposed on the way to shared memory. A tap has C4 columns, C rounded up to whole fours.

def make_weight_gradient(tile_n, by_four):
    """The kernel for tiles of 128 × tile_n; `by_four` needs C and N to be multiples of 4."""
    LANES = tile_n // 4  # threads that share a pixel
    TWO_ROUNDS = 4 * LANES < TILE_M
    ROW_B = tile_n + PAD
    STAGE_B = STEP * ROW_B
    SHARED_B = 2 * STAGE_B
    WARPS_N = tile_n // WARP_COLUMNS

    def kernel_v3(dy, x, partial, H, W, C, C4, Ho, Wo, N, kernel, stride, pixels, part_pixels):
        tile_a = cuda.shared.array(SHARED_A, float32)
        tile_b = cuda.shared.array(SHARED_B, float32)
        t = int32(cuda.threadIdx.x)
        first_column = int32(cuda.blockIdx.x * TILE_M)
        first_channel = int32(cuda.blockIdx.y * tile_n)
        first_pixel = int32(cuda.blockIdx.z * part_pixels)
        end = int32(min(first_pixel + part_pixels, pixels))

        # what this thread fetches: four columns (and four more, 64 on) and four channels, of every eighth pixel
        k, mine = t // LANES, int32(t % LANES * 4)
        to_a, to_b = int32(k * ROW_A + mine), int32(k * ROW_B + mine)
        dr, ds, offset, left = column_source(int32(first_column + mine), W, C, C4, kernel)
        if TWO_ROUNDS:
            dr_2, ds_2, offset_2, left_2 = column_source(int32(first_column + mine + 64), W, C, C4, kernel)
        channel = int32(first_channel + mine)
        pixel = int32(first_pixel + k)
        image, rest = divide(pixel, int32(Ho * Wo))
        i, j = divide(rest, Wo)
        image_row = int32(image * H)
        dy_at = int32(pixel * N + channel)

        warp, lane = t >> 5, t & 31
        row = int32((warp // WARPS_N) * WARP_ROWS + (lane >> 3) * 4)
        column = int32((warp % WARPS_N) * WARP_COLUMNS + (lane & 7) * 4)
        zero = float32(0)
        zeros = (zero, zero, zero, zero, zero, zero, zero, zero)
        sums = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
        stage = int32(0)
        base = first_pixel
        while base < end + STEP:  # one round more than steps, as in the forward
            h, w = int32(i * stride), int32(j * stride)
            at = int32(((image_row + h) * W + w) * C)
            more = pixel < end
            a = fetch(x, int32(at + offset), more and left > 0 and visible(h + dr, w + ds, H, W), left, by_four)
            b = fetch(dy, dy_at, more and channel < N, N - channel, by_four)
            if TWO_ROUNDS:
                a_2 = fetch(x, int32(at + offset_2), more and left_2 > 0 and visible(h + dr_2, w + ds_2, H, W), left_2,
                            by_four)

            if base > first_pixel:
                sums = multiply(sums, tile_a, stage * STAGE_A + row, ROW_A, tile_b, stage * STAGE_B + column, ROW_B)

            stage = int32(1 - stage)
            store4(tile_a, stage * STAGE_A + to_a, a[0], a[1], a[2], a[3])
            store4(tile_b, stage * STAGE_B + to_b, b[0], b[1], b[2], b[3])
            if TWO_ROUNDS:
                store4(tile_a, stage * STAGE_A + to_a + 64, a_2[0], a_2[1], a_2[2], a_2[3])
            cuda.syncthreads()

            base = int32(base + STEP)
            pixel = int32(pixel + STEP)
            dy_at = int32(dy_at + STEP * N)
            j = int32(j + STEP)
            while j >= Wo:  # on into the next row, or the next image
                j = int32(j - Wo)
                i = int32(i + 1)
                if i == Ho:
                    i = int32(0)
                    image_row = int32(image_row + H)

        K = kernel * kernel * C
        channel = int32(first_channel + column)
        out = (cuda.blockIdx.z * N + channel) * K
        tap, c = divide(int32(first_column + row), C4)
        left = int32(C - c if tap < kernel * kernel else 0)
        write_columns(partial, out + tap * C + c, K, N - channel, left, sums[0], sums[1], sums[2], sums[3], by_four)
        tap, c = divide(int32(first_column + row + 16), C4)
        left = int32(C - c if tap < kernel * kernel else 0)
        write_columns(partial, out + tap * C + c, K, N - channel, left, sums[4], sums[5], sums[6], sums[7], by_four)

    kernel_v3.__name__ = f"conv2d_weight_gradient_kernel_v3_{tile_n}{'' if by_four else '_by_one'}"
    return cuda.jit(kernel_v3)


forward_kernels = {key: make_forward(*key) for key in ((128, True), (64, True), (64, False))}
weight_gradient_kernels = {key: make_weight_gradient(*key) for key in ((128, True), (64, True), (64, False))}


def flipped_weight(*a): raise NotImplementedError
implicit_forward = implicit_weight_gradient = flipped_weight
