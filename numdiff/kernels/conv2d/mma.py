"""Convolution on the tensor cores of any GPU from sm_80 on: implicit GEMM by mma.sync, ldmatrix and
cp.async.

MATHEMATICS
    as in implicit.py, whose matrix col is gathered here, too, without being written:
    forward           y[p, n] = Σ_k col[p, k] · weight[n, k] + bias[n] + channel[image, n] + residual[p, n]
    weight gradient   dweight[n, k] += Σ_p dy[p, n] · col[p, k]
    input gradient    the forward over dy with the flipped weight. Where the stride is more than 1, dy's pixels are that
                      far apart in the image that is convolved, with zeros between them (`spread`).
SHAPES
    as in direct.py; x, weight, y, dy, dx, residual float16, bias, channel, dweight float32; C and N
    multiples of 8
VERSIONS
    v4 mma: of launcher.py in float16. Against version 3 in float32: the products are mma.m16n8k16,
    whose operands a warp loads from shared memory with ldmatrix; tiles travel to shared memory by
    cp.async, three stages deep, without passing through registers, zeros where a tap leaves the
    image.
LAUNCH
    forward: 128 threads for 128 pixels × 64 channels; a warp has 64 × 32. Grid (pixel tiles,
    channel tiles).
    weight gradient: 128 threads for 64 × 64 channels of one tap; a warp has 32 × 32. Grid (taps ·
    tiles of C, tiles of N, parts): the pixels are shared among as many parts as fill a GPU.
DETERMINISM
    a fixed order of k for each output; the gradient's parts are added in order by a second kernel.
COST
    FLOPs as in direct.py. A step of 32 channels brings 12 KiB for 2 · 128 · 64 · 32 FLOPs: 43 FLOPs
    a byte of the L2 cache.
SOURCE
    PTX ISA, sections 9.7.9.25.3 (cp.async) and 9.7.14.5 (mma, ldmatrix).
READ NEXT
    mma_halo.py, which takes all 3 × 3 taps of stride 1.
"""

import numpy as np

from ...device import cuda, device_inline, empty, float32, int32, launch, uint32
from ...device.async_copy import (
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    cp_async_wait_all,
    shared_address,
)
from ...device.common import divide
from ...device.half import in_bfloat16
from ...device.requires import requires, supports
from ...device.tensor_core import (
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_word,
    load_words4,
    mma_m16n8k16_into,
    pack_half2,
    store_word,
    store_words4,
    unpack_half2,
)
from ...dtypes import is_half
from ..reduce.trees import column_sum
from .direct import Geometry
from .flip import TRANSPOSE, flip_weight_kernel
from .mma_halo import addends_of, halo_forward
from .mma_halo_gradient import halo_fits, halo_weight_gradient
from .tiles import add_parts, within

THREADS = 128
TILE_M, TILE_N = 128, 64  # pixels and channels of a block
BK = 32  # channels of a step: a row of a tile is 64 bytes, four chunks of 16
STAGES = 3
PENDING = STAGES - 2  # groups of copies that may be in flight when a step begins
STAGE = (TILE_M + TILE_N) * 2 * BK  # bytes
SHARED = STAGES * STAGE
OUT_ROW = TILE_N + 8  # float16 from one pixel's results to the next: a warp's writes meet all banks
STEP = 32  # pixels of a step of the weight gradient
TILE = 64  # its channels, of dy and of x: a row is 128 bytes
GRADIENT_STAGE = 2 * STEP * 2 * TILE
GRADIENT_SHARED = STAGES * GRADIENT_STAGE
# in the gradient's grid: eight blocks for each of 132 multiprocessors, which take 0.6 to 1.0 of the
# time of four
THREADS_WANTED = 132 * 8 * THREADS


# Forward ------------------------------------------------------------------------------------------


@device_inline
def place_in(row, chunk):
    """Byte of a 16-byte chunk of a row of 64 bytes: swizzled, so that eight rows' chunks are in
    different banks."""
    return uint32(row * 64 + (chunk ^ ((row >> 1) & 3)) * 16)


@device_inline
def window(pixel, pixels, Ho, Wo, stride, pad):
    """(image, row, column) of the window's first pixel; a pixel beyond the last looks far outside."""
    image, rest = divide(min(pixel, int32(pixels - 1)), int32(Ho * Wo))
    i, j = divide(rest, Wo)
    return image, int32(i * stride - pad if pixel < pixels else -(1 << 20)), int32(j * stride - pad)


@device_inline
def fetch_pixel(to, x, at, r, s, H, W, C, c, spread):
    """Start the copy of eight channels of the pixel that tap (r, s) of a window sees."""
    h, w = int32(at[1] + r), int32(at[2] + s)
    inside = h >= 0 and w >= 0 and c < C
    if spread > 1:
        inside = inside and h % spread == 0 and w % spread == 0
        h, w = int32(h // spread), int32(w // spread)
    inside = inside and within(h, w, H, W)
    index = ((at[0] * H + h) * W + w) * C + c if inside else 0
    cp_async_16_zfill(to, x, index, uint32(16 if inside else 0))


@device_inline
def fetch_weight(to, weight, n, N, K, k, inside):
    inside = inside and n < N
    cp_async_16_zfill(to, weight, n * K + k if inside else 0, uint32(16 if inside else 0))


@device_inline
def stash_pair(results, row, column, low, high, pixel, n, pixels, N, per_image, addends, added):
    """Two neighbouring channels of a pixel, with all that is added to them, into the block's
    results."""
    if pixel < pixels and n < N:
        if added.bias:
            low += addends.bias[n]
            high += addends.bias[n + 1]
        if added.channel:
            at = divide(pixel, per_image)[0] * N + n
            low += addends.channel[at]
            high += addends.channel[at + 1]
        if added.residual:
            a, b = unpack_half2(load_word(addends.residual, pixel * N + n))
            low += a
            high += b
    store_word(results, (row * OUT_ROW + column) * 2, pack_half2(low, high))


@requires("7.5")
@cuda.jit(launch_bounds=THREADS)
def conv2d_forward_kernel_v4(x, weight, addends, y, geometry, spread, pixels, added):
    H, W, C, Ho, Wo, N, size, stride = geometry
    tiles = cuda.shared.array(SHARED, np.uint8, alignment=128)
    base = shared_address(tiles)
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    first_pixel, first_n = int32(cuda.blockIdx.x * TILE_M), int32(cuda.blockIdx.y * TILE_N)
    pad, K = int32(size >> 1), int32(size * size * C)
    chunks_a_tap = divide(C + BK - 1, BK)[0]
    steps = int32(size * size * chunks_a_tap)

    # what this thread fetches: chunk `chunk` of pixels mine, mine + 32, … and of weight rows mine
    # and mine + 32
    mine, chunk = t >> 2, t & 3
    at_0 = window(int32(first_pixel + mine), pixels, Ho, Wo, stride, pad)
    at_1 = window(int32(first_pixel + mine + 32), pixels, Ho, Wo, stride, pad)
    at_2 = window(int32(first_pixel + mine + 64), pixels, Ho, Wo, stride, pad)
    at_3 = window(int32(first_pixel + mine + 96), pixels, Ho, Wo, stride, pad)
    to = base + place_in(mine, chunk)  # rows 32 apart have the same swizzle
    r, s, c = int32(0), int32(0), int32(chunk * 8)  # of the step that is fetched

    accumulators = cuda.local.array(64, np.float32)
    for k in range(64):
        accumulators[k] = float32(0)
    row, column = int32((warp >> 1) * 64), int32((warp & 1) * 32)
    for step in range(int32(1 - STAGES), steps):
        if step >= 0:
            cp_async_wait(PENDING)
            cuda.syncthreads()
        coming = int32(step + STAGES - 1)
        if coming < steps:
            stage = to + uint32(coming % STAGES * STAGE)
            fetch_pixel(stage, x, at_0, r, s, H, W, C, c, spread)
            fetch_pixel(stage + uint32(2048), x, at_1, r, s, H, W, C, c, spread)
            fetch_pixel(stage + uint32(4096), x, at_2, r, s, H, W, C, c, spread)
            fetch_pixel(stage + uint32(6144), x, at_3, r, s, H, W, C, c, spread)
            k = int32((r * size + s) * C + c)
            fetch_weight(stage + uint32(8192), weight, int32(first_n + mine), N, K, k, c < C)
            fetch_weight(stage + uint32(10240), weight, int32(first_n + mine + 32), N, K, k, c < C)
            c += int32(BK)
            if c - chunk * 8 >= C:  # the channels are through: the next tap
                c = int32(chunk * 8)
                s += int32(1)
                if s == size:
                    s = int32(0)
                    r += int32(1)
        cp_async_commit()
        if step >= 0:
            a_at = base + uint32(step % STAGES * STAGE)
            b_at = a_at + uint32(8192)
            for half in range(2):
                b_row = int32(column + (lane & 7) + ((lane >> 4) << 3))
                b_chunk = int32(half * 2 + ((lane >> 3) & 1))
                b_0 = ldmatrix_x4(b_at + place_in(b_row, b_chunk))
                b_1 = ldmatrix_x4(b_at + place_in(int32(b_row + 16), b_chunk))
                for m in range(4):
                    a = ldmatrix_x4(
                        a_at
                        + place_in(int32(row + m * 16 + (lane & 15)), int32(half * 2 + (lane >> 4)))
                    )
                    mma_m16n8k16_into(accumulators, m * 16, a, (b_0[0], b_0[1]))
                    mma_m16n8k16_into(accumulators, m * 16 + 4, a, (b_0[2], b_0[3]))
                    mma_m16n8k16_into(accumulators, m * 16 + 8, a, (b_1[0], b_1[1]))
                    mma_m16n8k16_into(accumulators, m * 16 + 12, a, (b_1[2], b_1[3]))

    # the results go through shared memory, so that they are written 16 bytes at a time
    cp_async_wait_all()
    cuda.syncthreads()
    per_image = int32(Ho * Wo)
    for m in range(4):
        for j in range(4):
            out_row, out_column = (
                int32(row + m * 16 + (lane >> 2)),
                int32(column + j * 8 + (lane & 3) * 2),
            )
            pixel, n, k = int32(first_pixel + out_row), int32(first_n + out_column), m * 16 + j * 4
            stash_pair(
                tiles,
                out_row,
                out_column,
                accumulators[k],
                accumulators[k + 1],
                pixel,
                n,
                pixels,
                N,
                per_image,
                addends,
                added,
            )
            stash_pair(
                tiles,
                int32(out_row + 8),
                out_column,
                accumulators[k + 2],
                accumulators[k + 3],
                int32(pixel + 8),
                n,
                pixels,
                N,
                per_image,
                addends,
                added,
            )
    cuda.syncthreads()
    for k in range(8):
        out_row, n = int32(k * 16 + (t >> 3)), int32(first_n + (t & 7) * 8)
        if first_pixel + out_row < pixels and n < N:
            a, b, c_2, d = load_words4(tiles, (out_row * OUT_ROW + (t & 7) * 8) * 2)
            store_words4(y, (first_pixel + out_row) * N + n, a, b, c_2, d)


# Weight gradient ----------------------------------------------------------------------------------
# The inner dimension of both tiles, the pixels, runs across: ldmatrix transposes them while loading
# to registers.


@device_inline
def place_of_pixel(pixel, chunk):
    """Byte of a chunk of a row of 128 bytes, swizzled."""
    return uint32(pixel * 128 + (chunk ^ (pixel & 7)) * 16)


@device_inline
def fetch_both(to, dy, x, pixel, last, n, r, s, c, pad, geometry):
    """Start the copies of eight channels of dy at a pixel, and of those of x that it sees through a
    tap."""
    H, W, C, Ho, Wo, N, _, stride = geometry
    exists = pixel < last
    image, rest = divide(pixel if exists else int32(0), int32(Ho * Wo))
    i, j = divide(rest, Wo)
    h, w = int32(i * stride + r - pad), int32(j * stride + s - pad)
    dy_inside = exists and n < N
    cp_async_16_zfill(to, dy, pixel * N + n if dy_inside else 0, uint32(16 if dy_inside else 0))
    inside = exists and c < C and within(h, w, H, W)
    cp_async_16_zfill(
        to + uint32(STEP * 128),
        x,
        ((image * H + h) * W + w) * C + c if inside else 0,
        uint32(16 if inside else 0),
    )


@requires("7.5")
@cuda.jit(launch_bounds=THREADS)
def conv2d_weight_gradient_kernel_v4(dy, x, partial, geometry, pixels, part_pixels):
    C, N, size = geometry.C, geometry.N, geometry.size
    tiles = cuda.shared.array(GRADIENT_SHARED, np.uint8, alignment=128)
    base = shared_address(tiles)
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    tap, column = divide(cuda.blockIdx.x, divide(C + TILE - 1, TILE)[0])
    r, s = divide(tap, size)
    first_c, first_n = int32(column * TILE), int32(cuda.blockIdx.y * TILE)
    pad = int32(size >> 1)
    first = int32(cuda.blockIdx.z * part_pixels)
    last = int32(min(first + part_pixels, pixels))
    steps = int32((last - first + STEP - 1) // STEP)

    # what this thread fetches: chunk `chunk` of pixels mine and mine + 16 of each step
    mine, chunk = t >> 3, t & 7
    to, to_16 = base + place_of_pixel(mine, chunk), base + place_of_pixel(int32(mine + 16), chunk)
    n, c = int32(first_n + chunk * 8), int32(first_c + chunk * 8)

    accumulators = cuda.local.array(32, np.float32)
    for k in range(32):
        accumulators[k] = float32(0)
    row, c_row = int32((warp >> 1) * 4), int32((warp & 1) * 4)  # in chunks of eight channels
    for step in range(int32(1 - STAGES), steps):
        if step >= 0:
            cp_async_wait(PENDING)
            cuda.syncthreads()
        coming = int32(step + STAGES - 1)
        if coming < steps:
            stage = uint32(coming % STAGES * GRADIENT_STAGE)
            pixel = int32(first + coming * STEP + mine)
            fetch_both(to + stage, dy, x, pixel, last, n, r, s, c, pad, geometry)
            fetch_both(to_16 + stage, dy, x, int32(pixel + 16), last, n, r, s, c, pad, geometry)
        cp_async_commit()
        if step >= 0:
            a_at = base + uint32(step % STAGES * GRADIENT_STAGE)
            b_at = a_at + uint32(STEP * 128)
            for half in range(2):
                # of dy: matrices (k 0…7, n 0…7), (k 0…7, n 8…15), (k 8…15, n 0…7), …; of x: those
                # along k first
                a_pixel = int32(half * 16 + (lane & 7) + ((lane >> 4) << 3))
                b_pixel = int32(half * 16 + (lane & 15))
                b_0 = ldmatrix_x4_trans(b_at + place_of_pixel(b_pixel, int32(c_row + (lane >> 4))))
                b_1 = ldmatrix_x4_trans(
                    b_at + place_of_pixel(b_pixel, int32(c_row + 2 + (lane >> 4)))
                )
                for m in range(2):
                    a = ldmatrix_x4_trans(
                        a_at + place_of_pixel(a_pixel, int32(row + m * 2 + ((lane >> 3) & 1)))
                    )
                    mma_m16n8k16_into(accumulators, m * 16, a, (b_0[0], b_0[1]))
                    mma_m16n8k16_into(accumulators, m * 16 + 4, a, (b_0[2], b_0[3]))
                    mma_m16n8k16_into(accumulators, m * 16 + 8, a, (b_1[0], b_1[1]))
                    mma_m16n8k16_into(accumulators, m * 16 + 12, a, (b_1[2], b_1[3]))
    cp_async_wait_all()
    taps = int32(size * size)
    for m in range(2):
        for j in range(4):
            for k in range(4):
                n_out = int32(first_n + row * 8 + m * 16 + (lane >> 2) + (k >> 1) * 8)
                c_out = int32(first_c + c_row * 8 + j * 8 + (lane & 3) * 2 + (k & 1))
                if n_out < N and c_out < C:
                    partial[((cuda.blockIdx.z * N + n_out) * taps + tap) * C + c_out] = (
                        accumulators[m * 16 + j * 4 + k]
                    )


# Launchers ----------------------------------------------------------------------------------------


def mma_supports(x, weight):
    """Whether this rung takes these operands."""
    return (
        is_half(x.dtype)
        and supports(x, conv2d_forward_kernel_v4)
        and weight.shape[0] % 8 == 0
        and weight.shape[3] % 8 == 0
    )


def mma_forward(x, weight, bias, y, stride, channel=None, residual=None, spread=1):
    """y = conv2d(x, weight) + …, for arrays that launcher.py has checked."""
    if weight.shape[1] == 3 and stride == spread == 1:
        return halo_forward(x, weight, bias, y, channel, residual)
    _, h, w, c = x.shape
    b, ho, wo, n = y.shape
    addends, added = addends_of(x, bias, channel, residual)
    launch(
        in_bfloat16(conv2d_forward_kernel_v4, x.dtype),
        (-(-b * ho * wo // TILE_M), -(-n // TILE_N)),
        THREADS,
        x.reshape(-1),
        weight.reshape(-1),
        addends,
        y.reshape(-1),
        Geometry(h, w, c, ho, wo, n, weight.shape[1], stride),
        spread,
        b * ho * wo,
        added,
    )
    return y


def mma_input_gradient(dy, weight, dx, stride, residual=None):
    """dx, as the forward over dy with the flipped weight; residual: added to it."""
    n, size, _, c = weight.shape
    if size == 3 and stride == 1:
        return halo_forward(dy, weight, None, dx, residual=residual, flipped=True)
    flipped = empty((c, size, size, n), weight.dtype, like=weight)
    launch(
        flip_weight_kernel,
        (-(-c // TRANSPOSE), -(-n // TRANSPOSE), size * size),
        (TRANSPOSE, 8),
        weight.reshape(-1),
        flipped.reshape(-1),
        n,
        c,
        size * size,
    )
    return mma_forward(dy, flipped, None, dx, 1, residual=residual, spread=stride)


def mma_weight_gradient(dy, x, dweight, stride, accumulate=True, dbias=None):
    """dweight += …, or = …; dbias +=, unless it is None."""
    if dweight.shape[1] == 3 and stride == 1 and halo_fits(x):
        halo_weight_gradient(dy, x, dweight, accumulate, dbias)
        return
    if dbias is not None:
        column_sum(dy, dbias)
    _, h, w, c = x.shape
    b, ho, wo, n = dy.shape
    size, pixels = dweight.shape[1], b * ho * wo
    grid = size * size * -(-c // TILE), -(-n // TILE)
    steps = -(-pixels // STEP)
    part_steps = -(
        -steps // max(1, min(THREADS_WANTED // (THREADS * grid[0] * grid[1]), steps // 8))
    )
    parts = -(-steps // part_steps)
    partial = empty((parts, dweight.size), np.float32, like=dy)
    kernel = in_bfloat16(conv2d_weight_gradient_kernel_v4, x.dtype)
    launch(
        kernel,
        (*grid, parts),
        THREADS,
        dy.reshape(-1),
        x.reshape(-1),
        partial.reshape(-1),
        Geometry(h, w, c, ho, wo, n, size, stride),
        pixels,
        part_steps * STEP,
    )
    add_parts(partial, dweight, accumulate=accumulate)
