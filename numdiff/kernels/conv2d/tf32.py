"""Convolution of float32 on tensor cores, by way of tf32: implicit GEMM for any GPU from sm_80 on.

MATHEMATICS
    as in implicit.py, whose matrix col is gathered here, too, without being written:
    forward           y[p, n] = Σ_k col[p, k] · weight[n, k] + bias[n] + channel[image, n] + residual[p, n]
    input gradient    the forward over dy, whose weight[c, tap, n] is weight[n, taps - 1 - tap, c]. The tile of it is
                      read as it lies, a row of c for each n, and multiplied across: no flipped copy is made. With a
                      stride only every stride-th tap meets a pixel of dy: launcher.py then multiplies and calls im2col.
    weight gradient   dweight[n, k] += Σ_p dy[p, n] · col[p, k]
SHAPES
    as in direct.py; all float32, C and N multiples of 4
VERSIONS
    v4 tf32: of launcher.py in float32, which runs where the device's switch `tf32` is on. Against version 3: products
    by mma.m16n8k8, 1024 multiply-adds an instruction; tiles travel by cp.async, three stages deep. Tiles in shared
    memory, fragments and the rounding are those of matmul/tf32.py: read that first.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files
    conv2d_forward, 32×64×64×64, 64×3×3×64, tf32
        v4      74.6 µs   130 TFLOP/s   26 % of arithmetic    87 % of cuDNN
    conv2d_weight_gradient, 32×64×64×64, 32×64×64×64, tf32
        v4       114 µs  84.5 TFLOP/s   17 % of arithmetic    94 % of cuDNN
LAUNCH
    128 threads. Forward: 128 × 128 or 256 × 64 pixels × channels, or 64 × 64 where those are few; a warp has 64 × 64 or
    32 × 32. Grid (pixel tiles, channel tiles, parts): where the tiles do not fill a GPU, the taps and channels are cut
    into parts, and a second kernel adds them up, and what else is added.
    Weight gradient: 128 or 64 channels of dy × 128 columns of col, or 64 × 256; a column is a tap and a channel, so
    that tiles are full whatever C is. Grid (column tiles, channel tiles, parts of the pixels).
    Shared memory 24 to 60 KiB.
ACCURACY
    as matmul/tf32.py: about 3e-4 in the 2-norm; the tests hold it below 5e-4.
DETERMINISM
    a fixed order of k for each output; parts are added in order by a second kernel.
COST
    FLOPs as in direct.py. A step of 16 channels brings 16 KiB for 2 · 128 · 128 · 16 FLOPs, 32 a byte of the L2
    cache, or 20 KiB for as many, 26.
SOURCE
    PTX ISA, sections 9.7.9.25.3 (cp.async) and 9.7.14.5 (mma, ldmatrix).
READ NEXT
    narrow_half.py, for layers too narrow for any of this.
"""
import functools
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, int32, launch, load4, store4, uint32
from ...device.async_copy import cp_async_16_zfill, cp_async_commit, cp_async_wait, shared_address
from ...device.limits import multiprocessors_of
from ...device.requires import requires, supports
from ...device.specialise import Constant, specialise
from ..any_batch import assumed
from ..common import divide
from ..matmul.tf32 import (
    A_BYTES,
    ACCUMULATORS,
    B_BYTES,
    B_FIRST,
    BK,
    FRAGMENTS,
    NS_PER_BYTE,
    PAIRS,
    PENDING,
    ROW,
    SECOND_PASS,
    STAGES,
    START,
    THREADS,
    TILE_M,
    TILE_N,
    WARP_M,
    WARP_N,
    WARPS_N,
    clear,
    multiply_tiles,
    place_across,
    place_along_k,
    row_at,
    switched_on,
)
from ..versions import capped, label
from .direct import Added, Addends, Geometry
from .implicit import add_parts, column_source
from .narrow import NARROW

VERSION = 4  # of launcher.py
LARGEST_KERNEL = 5  # the taps of a window that lie inside the image are kept as bits of one number
# a tile -> the tile of each of its four warps, ns of an H100's multiprocessor for a step, and for the epilogue
TILES = {(128, 128): ((64, 64), 325.0, 1200.0), (256, 64): ((64, 64), 340.0, 1200.0),
         (64, 64): ((32, 32), 140.0, 300.0)}
# channels of dy × columns of col
GRADIENT_TILES = {(128, 128): ((64, 64), 325.0, 1200.0), (64, 256): ((64, 64), 340.0, 1200.0),
                  (64, 128): ((64, 32), 215.0, 600.0)}
SHORTEST_PART = 8  # steps: below this a part only fills and empties its pipeline
BLOCK = 256  # threads of the kernel that adds parts

# Of each kernel, beside those of matmul/tf32.py
GRADIENT = Constant()  # of the input: the weight is (C, taps, N), to be read from its last tap to its first
PIXELS, WEIGHTS = Constant(lambda TILE_M: TILE_M * 4 // THREADS), Constant(lambda TILE_N: TILE_N * 4 // THREADS)
# copies of a thread in a step; and from one to the next of them so many pixels, or rows of weights
APART = THREADS // 4
FOURS = Constant(lambda TILE_N: TILE_N // 4)  # of a row of n in the gradient's tile
K_APART = Constant(lambda TILE_N: THREADS // (TILE_N // 4))
PER_PIXEL = THREADS // BK  # threads of a pixel, in the weight gradient
OF_DY, OF_X = Constant(lambda TILE_M: TILE_M // 4 // PER_PIXEL), Constant(lambda TILE_N: TILE_N // 4 // PER_PIXEL)


# Forward --------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def inside_of(first, extent, size, apart):
    """Bits 0, apart, … below size · apart: up to the first and from the last that lies in an image of `extent`."""
    low, high = int32(max(int32(0), int32(-first))), int32(min(int32(size), int32(extent - first)))
    return int32((int32(1) << int32(high * apart)) - (int32(1) << int32(low * apart)))


@cuda.jit(device=True, forceinline=True)
def window(pixel, pixels, H, W, C, Ho, Wo, size, stride, rows):
    """Where an output pixel's window starts in x (perhaps before it), and which of its taps lie inside the image, as
    bits; none for a pixel beyond the last.

    rows: a bit for the first tap of each row. Times the bits of one row that is the same bits in all of them.
    """
    image, rest = divide(min(pixel, int32(pixels - 1)), int32(Ho * Wo))
    i, j = divide(rest, Wo)
    top, left = int32(i * stride - size // 2), int32(j * stride - size // 2)
    seen = int32(inside_of(left, W, size, 1) * rows & inside_of(top, H, size, size))
    return int32(((image * H + top) * W + left) * C), seen if pixel < pixels else int32(0)


@cuda.jit(device=True, forceinline=True)
def write_four(y, pixel, n, exists, N, per_image, v0, v1, v2, v3, addends, added):
    """Four neighbouring channels of a pixel, with all that is added to them, into y."""
    if exists:
        at = int32(pixel * N + n)
        if added.bias:
            v0 += addends.bias[uint32(n)]
            v1 += addends.bias[uint32(n + 1)]
            v2 += addends.bias[uint32(n + 2)]
            v3 += addends.bias[uint32(n + 3)]
        if added.channel:
            c0, c1, c2, c3 = load4(addends.channel, divide(pixel, per_image)[0] * N + n)
            v0, v1, v2, v3 = v0 + c0, v1 + c1, v2 + c2, v3 + c3
        if added.residual:
            r0, r1, r2, r3 = load4(addends.residual, at)
            v0, v1, v2, v3 = v0 + r0, v1 + r1, v2 + r2, v3 + r3
        store4(y, at, v0, v1, v2, v3)


@cuda.jit(device=True, forceinline=True)
def write_rows(y, start, accumulators, i, pixel, n, pixels, N, per_image, addends, added):
    """Fragments 16 · i … of a lane, as `write_rows` of matmul/tf32.py: two pixels, four channels of each pair."""
    p = int32(pixel + 16 * i)
    for j in range(PAIRS):
        s, m = 8 * (PAIRS * i + j), int32(n + 16 * j)
        write_four(y, int32(start + p), m, p < pixels and m < N, N, per_image, accumulators[s], accumulators[s + 4],
                   accumulators[s + 1], accumulators[s + 5], addends, added)
        write_four(y, int32(start + p + 1), m, p + 1 < pixels and m < N, N, per_image, accumulators[s + 2],
                   accumulators[s + 6], accumulators[s + 3], accumulators[s + 7], addends, added)


@cuda.jit(device=True, forceinline=True)
def write_outputs(y, start, accumulators, pixel, n, pixels, N, per_image, addends, added):
    """A lane's outputs, from its first pixel and channel on; start: pixels before those of this part."""
    # not in a loop: accumulators stay in registers only under constant indices
    write_rows(y, start, accumulators, 0, pixel, n, pixels, N, per_image, addends, added)
    write_rows(y, start, accumulators, 1, pixel, n, pixels, N, per_image, addends, added)
    if FRAGMENTS > 2:
        write_rows(y, start, accumulators, 2, pixel, n, pixels, N, per_image, addends, added)
        write_rows(y, start, accumulators, 3, pixel, n, pixels, N, per_image, addends, added)


class Copies(NamedTuple):
    """What a thread copies of each step: the channels from `four` on of PIXELS pixels, to address a_to; of WEIGHTS rows
    of the weight, of channel n, what begins with b_k of the step's channels, to address b_to. (Of the gradient's, the
    channels from n on, and b_k is the row.)"""

    four: int
    a_to: int
    b_to: int
    n: int
    b_k: int


class Step(NamedTuple):
    """Of the inner dimension: a tap, its row and column in the window, and the first channel."""

    tap: int
    r: int
    s: int
    c: int


@cuda.jit(device=True, forceinline=True)
def copies_of(base, first_n, t):
    place, four = int32(t // 4), int32(t % 4 * 4)
    a_to = base + place_along_k(place, int32(t % 4))
    if GRADIENT:
        b_k, n = int32(t // FOURS), int32(first_n + t % FOURS * 4)
        b_to = base + B_FIRST + place_across(b_k, int32(t % FOURS), TILE_N * 4)
    else:
        b_k, n = four, int32(first_n + row_at(place))
        b_to = base + B_FIRST + place_along_k(place, int32(t % 4))
    return Copies(four, a_to, b_to, n, b_k)


@cuda.jit(device=True, forceinline=True)
def fetch_pixels(x, at, stage, starts, seen, mine, geometry):
    """Start this thread's copies of a step's pixels; starts, seen: what `window` says of them."""
    four = mine.four
    a_at = int32((at.r * geometry.W + at.s) * geometry.C + at.c + four)
    tap_bit = int32(int32(1) << at.tap if at.c + four < geometry.C else 0)
    for i in range(PIXELS):
        inside = seen[i] & tap_bit != 0
        cp_async_16_zfill(mine.a_to + int32(stage * A_BYTES + i * APART * ROW), x, int32(starts[i] + a_at),
                          int32(16) if inside else int32(0))


@cuda.jit(device=True, forceinline=True)
def fetch_weights(weight, at, stage, taps, mine, geometry):
    """Start this thread's copies of a step's weights."""
    C, N, n, b_k = geometry.C, geometry.N, mine.n, mine.b_k
    for i in range(WEIGHTS):
        if GRADIENT:
            k = int32(at.c + b_k + i * K_APART)
            inside = k < C and n < N
            source = int32((k * taps + taps - 1 - at.tap) * N + n)
            to = int32(i * K_APART * TILE_N * 4)
        else:
            inside = at.c + b_k < C and n + i * APART < N
            source = int32(((n + i * APART) * taps + at.tap) * C + at.c + b_k)
            to = int32(i * APART * ROW)
        cp_async_16_zfill(mine.b_to + int32(stage * B_BYTES + to), weight, source, int32(16) if inside else int32(0))


@cuda.jit(device=True, forceinline=True)
def next_step(at, geometry):
    tap, r, s, c = at.tap, at.r, at.s, int32(at.c + BK)
    if c >= geometry.C:  # the channels are through: the next tap
        c, tap, s = int32(0), int32(tap + 1), int32(s + 1)
        if s == geometry.size:
            s, r = int32(0), int32(r + 1)
    return Step(tap, r, s, c)


@requires("8.0")
def conv2d_tf32(x, weight, addends, y, geometry, pixels, part_steps, added):
    H, W, C, Ho, Wo, N, size, stride = geometry
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    base = shared_address(tiles)
    t = int32(cuda.threadIdx.x)
    lane, warp = int32(t % 32), int32(t // 32)
    first_pixel, first_n = int32(cuda.blockIdx.x * TILE_M), int32(cuda.blockIdx.y * TILE_N)
    warp_row, warp_column = int32(warp // WARPS_N * WARP_M), int32(warp % WARPS_N * WARP_N)
    taps = int32(size * size)
    first_taps = int32(((int32(1) << taps) - 1) // ((int32(1) << size) - 1))  # bits 0, size, 2 · size, …
    chunks = int32((uint32(C) + uint32(BK - 1)) // uint32(BK))  # steps of a tap
    first_step = int32(cuda.blockIdx.z * part_steps)
    steps = int32(min(int32(part_steps), int32(taps * chunks - first_step)))

    starts = cuda.local.array(PIXELS, "int32")
    seen = cuda.local.array(PIXELS, "int32")
    for i in range(PIXELS):
        starts[i], seen[i] = window(int32(first_pixel + row_at(int32(t // 4)) + i * APART), pixels, H, W, C, Ho, Wo,
                                    size, stride, first_taps)
    mine = copies_of(base, first_n, t)
    tap, chunk = divide(first_step, chunks)
    r, s = divide(tap, size)
    at = Step(tap, r, s, int32(chunk * BK))  # the step that is fetched
    accumulators = cuda.local.array(ACCUMULATORS, "float32")
    clear(accumulators, ACCUMULATORS)
    stage, ahead = int32(0), int32(0)
    for step in range(int32(1 - STAGES), steps):
        if step >= 0:
            cp_async_wait(PENDING)  # this thread's part of the step's tiles is there
            cuda.syncthreads()  # so is everybody's, and nobody reads the tiles before them any more
        if step + STAGES - 1 < steps:
            fetch_pixels(x, at, ahead, starts, seen, mine, geometry)
            fetch_weights(weight, at, ahead, taps, mine, geometry)
            at = next_step(at, geometry)
            ahead = int32(0 if ahead == STAGES - 1 else ahead + 1)
        cp_async_commit()
        if step >= 0:
            multiply_tiles(accumulators, tiles, base, stage, warp_row, warp_column, lane)
            stage = int32(0 if stage == STAGES - 1 else stage + 1)

    pixel, n = int32(first_pixel + warp_row + lane // 4 * 2), int32(first_n + warp_column + lane % 4 * 4)
    write_outputs(y, int32(cuda.blockIdx.z * pixels), accumulators, pixel, n, pixels, N, int32(Ho * Wo), addends, added)


@cuda.jit
def add_parts_and_more_kernel(partial, addends, y, parts, pixels, N, per_image, added):
    """Four neighbouring channels a thread: their parts, in order, and what is added to them."""
    four = int32(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x)
    pixel, n = divide(four, int32(N // 4))
    n = int32(n * 4)
    if pixel < pixels:
        size, at = pixels * N, pixel * N + n
        v0, v1, v2, v3 = load4(partial, at)
        for part in range(1, parts):
            p0, p1, p2, p3 = load4(partial, part * size + at)
            v0, v1, v2, v3 = v0 + p0, v1 + p1, v2 + p2, v3 + p3
        write_four(y, pixel, n, True, N, per_image, v0, v1, v2, v3, addends, added)


# Weight gradient ------------------------------------------------------------------------------------------------------
# Now pixels are the inner dimension, and both operands lie across: a row of channels for each. A thread copies for one
# of a step's 16 pixels, of dy and of what that pixel's window shows, and keeps its columns: what moves is the pixel,
# whose place it counts on without a division.

class Columns(NamedTuple):
    """What a thread copies of each step's pixel: channels n, n + 32 … of dy, to address a_to; of x, to address b_to,
    OF_X columns of col, whose taps lie dr rows and ds columns away, `offset` elements further on."""

    n: int
    a_to: int
    b_to: int
    dr: object
    ds: object
    offset: object


class Pixel(NamedTuple):
    """A pixel of dy: its number in all, its image, its row and its column there."""

    number: int
    image: int
    i: int
    j: int


@cuda.jit(device=True, forceinline=True)
def find_columns(dr, ds, offset, first_k, mine, geometry):
    """Which taps and channels this thread's columns of col are: chunks mine, mine + 8, … of a tile's row."""
    W, C, size = geometry.W, geometry.C, geometry.size
    for i in range(OF_X):
        dr[i], ds[i], offset[i], left = column_source(int32(first_k + 4 * (mine + PER_PIXEL * i)), W, C, C, size)
        if left == 0:
            dr[i] = int32(-32768 * size)  # no such column: a tap far above every image


@cuda.jit(device=True, forceinline=True)
def fetch_pixel(dy, x, at, last, stage, mine, geometry):
    """Start this thread's copies of a step: of dy's pixel `at`, and of what its window shows."""
    H, W, stride = geometry.H, geometry.W, geometry.stride
    exists = at.number < last
    h, w = int32(at.i * stride), int32(at.j * stride)
    row_of_x = h if exists else int32(-(1 << 20))  # outside through every tap
    dy_at, x_at = int32(at.number * geometry.N + mine.n), int32(((at.image * H + h) * W + w) * geometry.C)
    for i in range(OF_DY):
        inside = exists and mine.n + 4 * PER_PIXEL * i < geometry.N
        cp_async_16_zfill(mine.a_to + int32(stage * A_BYTES + i * PER_PIXEL * 16), dy,
                          int32(dy_at + 4 * PER_PIXEL * i), int32(16) if inside else int32(0))
    for i in range(OF_X):
        # as a number without sign, one left of or above the image is beyond its end
        inside = (uint32(row_of_x + mine.dr[i]) < uint32(H)) & (uint32(w + mine.ds[i]) < uint32(W))
        cp_async_16_zfill(mine.b_to + int32(stage * B_BYTES + i * PER_PIXEL * 16), x, int32(x_at + mine.offset[i]),
                          int32(16) if inside else int32(0))


@cuda.jit(device=True, forceinline=True)
def next_pixel(at, on, geometry):
    """BK pixels on: `on` images, rows and columns, and what is carried over."""
    number, image = int32(at.number + BK), int32(at.image + on.image)
    i, j = int32(at.i + on.i), int32(at.j + on.j)
    if j >= geometry.Wo:
        i, j = int32(i + 1), int32(j - geometry.Wo)
    if i >= geometry.Ho:
        image, i = int32(image + 1), int32(i - geometry.Ho)
    return Pixel(number, image, i, j)


@cuda.jit(device=True, forceinline=True)
def pixel_at(number, geometry):
    image, rest = divide(number, int32(geometry.Ho * geometry.Wo))
    i, j = divide(rest, geometry.Wo)
    return Pixel(number, image, i, j)


@requires("8.0")
def conv2d_tf32_weight_gradient(dy, x, partial, geometry, pixels, part_pixels):
    """partial[part] = the products of the part's pixels: TILE_M channels of dy × TILE_N columns of col a block."""
    N, C, size = geometry.N, geometry.C, geometry.size
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    base = shared_address(tiles)
    t = int32(cuda.threadIdx.x)
    lane, warp = int32(t % 32), int32(t // 32)
    first_k, first_n = int32(cuda.blockIdx.x * TILE_N), int32(cuda.blockIdx.y * TILE_M)
    warp_row, warp_column = int32(warp // WARPS_N * WARP_M), int32(warp % WARPS_N * WARP_N)
    K = int32(size * size * C)
    first = int32(cuda.blockIdx.z * part_pixels)
    last = int32(min(int32(first + part_pixels), int32(pixels)))
    steps = int32(uint32(last - first + BK - 1) // uint32(BK))

    row, chunk = int32(t // PER_PIXEL), int32(t % PER_PIXEL)
    dr = cuda.local.array(OF_X, "int32")
    ds = cuda.local.array(OF_X, "int32")
    offset = cuda.local.array(OF_X, "int32")
    find_columns(dr, ds, offset, first_k, chunk, geometry)
    mine = Columns(int32(first_n + 4 * chunk), base + place_across(row, chunk, TILE_M * 4),
                   base + B_FIRST + place_across(row, chunk, TILE_N * 4), dr, ds, offset)
    at = pixel_at(int32(first + row), geometry)
    on = pixel_at(int32(BK), geometry)  # from a step's pixel to the next one's
    accumulators = cuda.local.array(ACCUMULATORS, "float32")
    clear(accumulators, ACCUMULATORS)
    stage, ahead = int32(0), int32(0)
    for step in range(int32(1 - STAGES), steps):
        if step >= 0:
            cp_async_wait(PENDING)
            cuda.syncthreads()
        if step + STAGES - 1 < steps:
            fetch_pixel(dy, x, at, last, ahead, mine, geometry)
            at = next_pixel(at, on, geometry)
            ahead = int32(0 if ahead == STAGES - 1 else ahead + 1)
        cp_async_commit()
        if step >= 0:
            multiply_tiles(accumulators, tiles, base, stage, warp_row, warp_column, lane)
            stage = int32(0 if stage == STAGES - 1 else stage + 1)

    n, k = int32(first_n + warp_row + lane // 4 * 2), int32(first_k + warp_column + lane % 4 * 4)
    write_outputs(partial, int32(cuda.blockIdx.z * N), accumulators, n, k, N, K, K, Addends(x, x, x),
                  Added(False, False, False))


# The kernels ----------------------------------------------------------------------------------------------------------

def make_forward(tile, gradient):
    """The kernel for a tile; gradient: of the input."""
    (warp_m, warp_n), *_ = TILES[tile]
    name = f"conv2d_tf32_{'input_gradient' if gradient else 'forward'}_{tile[0]}x{tile[1]}"
    return specialise(conv2d_tf32, name=name, launch_bounds=(THREADS, 2), TILE_M=tile[0], TILE_N=tile[1],
                      WARP_M=warp_m, WARP_N=warp_n, A_ACROSS=False, B_ACROSS=gradient, GRADIENT=gradient)


def make_weight_gradient(tile):
    """The kernel for a tile: channels of dy × columns of col."""
    (warp_m, warp_n), *_ = GRADIENT_TILES[tile]
    return specialise(conv2d_tf32_weight_gradient, name=f"conv2d_tf32_weight_gradient_{tile[0]}x{tile[1]}",
                      launch_bounds=(THREADS, 2), TILE_M=tile[0], TILE_N=tile[1], WARP_M=warp_m, WARP_N=warp_n,
                      A_ACROSS=True, B_ACROSS=True)


FORWARD = {(tile, gradient): make_forward(tile, gradient) for tile in TILES for gradient in (False, True)}
WEIGHT_GRADIENT = {tile: make_weight_gradient(tile) for tile in GRADIENT_TILES}


# Launchers ------------------------------------------------------------------------------------------------------------

def tf32_chosen(x, weight, version):
    """Whether a convolution goes to this rung: forced by its version, or by the device's switch where it can be."""
    n, size, _, c = weight.shape
    takes = (x.dtype == np.float32 and supports(x, FORWARD) and n % 4 == c % 4 == 0
             and size <= LARGEST_KERNEL and x.offset % 16 == weight.offset % 16 == 0)
    if version == VERSION and x.dtype == np.float32 and not takes:
        raise ValueError(f"version {label('conv2d', VERSION, 'float32')} in float32 does not take x {tuple(x.shape)} "
                         f"and weight {tuple(weight.shape)} on this device: channels must come in fours; use "
                         "version=3, or None for the fastest that does it")
    return takes and (version == VERSION or version is None and min(n, c) > NARROW and switched_on(x.backend)
                      and capped("conv2d", VERSION) == VERSION)


@functools.lru_cache(maxsize=4096)
def choose(rows, columns, steps, size, multiprocessors, gradient):
    """(tile, parts, steps a part) with the lowest estimate, in ns: rows × columns of results, `size` of them."""
    best = None
    for tile, (_, step, epilogue) in (GRADIENT_TILES if gradient else TILES).items():
        blocks = -(-rows // tile[0]) * -(-columns // tile[1])
        tried = {1} | {max(1, min(turns * multiprocessors // blocks, steps // SHORTEST_PART)) for turns in (1, 2, 3, 4)}
        for parts in sorted(tried):
            part_steps = -(-steps // parts)
            parts = -(-steps // part_steps)
            if not gradient and parts * size >= 2**31:
                continue
            estimate = START + -(-blocks * parts // multiprocessors) * (part_steps * step + epilogue)
            if parts > 1 or gradient:
                estimate += SECOND_PASS + NS_PER_BYTE * 8 * parts * size
            if best is None or estimate < best[0]:
                best = estimate, tile, parts, part_steps
    return best[1:]


def shared_bytes(tile):
    return STAGES * (tile[0] + tile[1]) * ROW


def tf32_forward(x, weight, bias, y, stride, channel=None, residual=None, gradient=False):
    """y = conv2d(x, weight) + …, for arrays that launcher.py has checked.

    gradient: x is dy, y is dx, of a convolution with stride 1
    """
    _, h, w, c = x.shape
    b, ho, wo, n = y.shape
    size, pixels = weight.shape[1], b * ho * wo
    steps = size * size * -(-c // BK)
    tile, parts, part_steps = choose(assumed(pixels), n, steps, assumed(y.size),
                                     multiprocessors_of(x), False)
    flat = x.reshape(-1)
    biases, channels = flat if bias is None else bias, flat if channel is None else channel.reshape(-1)
    residuals = flat if residual is None else residual.reshape(-1)
    addends = Addends(biases, channels, residuals)
    added = Added(int(bias is not None), int(channel is not None), int(residual is not None))
    whole = parts == 1
    out = y.reshape(-1) if whole else empty((parts * y.size,), np.float32, like=y)
    launch(FORWARD[tile, gradient], (-(-pixels // tile[0]), -(-n // tile[1]), parts), THREADS, flat, weight.reshape(-1),
           addends, out, Geometry(h, w, c, ho, wo, n, size, stride), pixels, part_steps,
           added if whole else Added(0, 0, 0), shared=shared_bytes(tile))
    if not whole:
        launch(add_parts_and_more_kernel, -(-y.size // (4 * BLOCK)), BLOCK, out, addends, y.reshape(-1), parts,
               pixels, n, ho * wo, added)
    return y


def tf32_input_gradient(dy, weight, dx):
    """dx of a convolution with stride 1."""
    return tf32_forward(dy, weight, None, dx, 1, gradient=True)


def tf32_weight_gradient(dy, x, dweight, stride):
    """dweight += …"""
    _, h, w, c = x.shape
    b, ho, wo, n = dy.shape
    size, pixels = dweight.shape[1], b * ho * wo
    columns = size * size * c
    tile, parts, part_steps = choose(n, columns, -(-pixels // BK), dweight.size,
                                     multiprocessors_of(x), True)
    partial = empty((parts, dweight.size), np.float32, like=dy)
    launch(WEIGHT_GRADIENT[tile], (-(-columns // tile[1]), -(-n // tile[0]), parts), THREADS, dy.reshape(-1),
           x.reshape(-1), partial.reshape(-1), Geometry(h, w, c, ho, wo, n, size, stride), pixels, part_steps * BK,
           shared=shared_bytes(tile))
    add_parts(partial, dweight, accumulate=True)
