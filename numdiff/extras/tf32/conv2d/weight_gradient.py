"""The weight gradient of a float32 convolution by tf32: pixels are the inner dimension, both
operands are transposed.

    dweight[n, k] += Σ_p dy[p, n] · col[p, k]
WHAT A THREAD KNOWS
    A row of channels for each pixel, of dy and of col. A thread copies for one of a step's 16
    pixels, of dy and of what that pixel's window shows, and keeps its columns: what moves is the
    pixel, whose place it counts on without a division.
LAUNCH
    128 threads. 128 or 64 channels of dy × 128 columns of col, or 64 × 256; a column is a tap and a
    channel, so that tiles are full whatever C is. Grid (column tiles, channel tiles, parts of the
    pixels).
SOURCE
    PTX ISA, sections 9.7.9.25.3 (cp.async) and 9.7.14.5 (mma); the rounding: ../matmul.py.
READ NEXT
    launcher.py
"""

from typing import NamedTuple

from ....device import cuda, int32, uint32
from ....device.async_copy import cp_async_16_zfill, cp_async_commit, cp_async_wait, shared_address
from ....device.common import divide
from ....device.requires import requires
from ....device.specialise import Constant
from ....kernels.conv2d.direct import Added, Addends
from ....kernels.conv2d.implicit_weight_gradient import column_source
from ..matmul import (
    A_BYTES,
    ACCUMULATORS,
    B_BYTES,
    B_FIRST,
    BK,
    PENDING,
    STAGES,
    THREADS,
    TILE_M,
    TILE_N,
    WARP_M,
    WARP_N,
    WARPS_N,
    clear,
    multiply_tiles,
    place_across,
)
from .forward import write_outputs

PER_PIXEL = THREADS // BK  # threads of a pixel, in the weight gradient
OF_DY, OF_X = (
    Constant(lambda TILE_M: TILE_M // 4 // PER_PIXEL),
    Constant(lambda TILE_N: TILE_N // 4 // PER_PIXEL),
)


# The producer: copies of a step -------------------------------------------------------------------


class Tf32GradientColumns(NamedTuple):
    """What a thread copies of each step's pixel: channels n, n + 32 … of dy, to address a_to; of x,
    to address b_to, OF_X columns of col, whose taps are dr rows and ds columns away, `offset`
    elements further on."""

    n: int
    a_to: int
    b_to: int
    dr: object
    ds: object
    offset: object


class Tf32GradientPixel(NamedTuple):
    """A pixel of dy: its number in all, its image, its row and its column there."""

    number: int
    image: int
    i: int
    j: int


@cuda.jit(device=True, forceinline=True)
def find_columns(dr, ds, offset, first_k, mine, geometry):
    """Which taps and channels this thread's columns of col are: chunks mine, mine + 8, … of a
    tile's row."""
    W, C, size = geometry.W, geometry.C, geometry.size
    for i in range(OF_X):
        dr[i], ds[i], offset[i], left = column_source(
            int32(first_k + 4 * (mine + PER_PIXEL * i)), W, C, C, size
        )
        if left == 0:
            dr[i] = int32(-32768 * size)  # no such column: a tap far above every image


@cuda.jit(device=True, forceinline=True)
def fetch_pixel(dy, x, at, last, stage, mine, geometry):
    """Start this thread's copies of a step: of dy's pixel `at`, and of what its window shows."""
    H, W, stride = geometry.H, geometry.W, geometry.stride
    exists = at.number < last
    h, w = int32(at.i * stride), int32(at.j * stride)
    row_of_x = h if exists else int32(-(1 << 20))  # outside through every tap
    dy_at, x_at = (
        int32(at.number * geometry.N + mine.n),
        int32(((at.image * H + h) * W + w) * geometry.C),
    )
    for i in range(OF_DY):
        inside = exists and mine.n + 4 * PER_PIXEL * i < geometry.N
        cp_async_16_zfill(
            mine.a_to + int32(stage * A_BYTES + i * PER_PIXEL * 16),
            dy,
            int32(dy_at + 4 * PER_PIXEL * i),
            int32(16) if inside else int32(0),
        )
    for i in range(OF_X):
        # as a number without sign, one left of or above the image is beyond its end
        inside = (uint32(row_of_x + mine.dr[i]) < uint32(H)) & (uint32(w + mine.ds[i]) < uint32(W))
        cp_async_16_zfill(
            mine.b_to + int32(stage * B_BYTES + i * PER_PIXEL * 16),
            x,
            int32(x_at + mine.offset[i]),
            int32(16) if inside else int32(0),
        )


@cuda.jit(device=True, forceinline=True)
def next_pixel(at, on, geometry):
    """BK pixels on: `on` images, rows and columns, and what is carried over."""
    number, image = int32(at.number + BK), int32(at.image + on.image)
    i, j = int32(at.i + on.i), int32(at.j + on.j)
    if j >= geometry.Wo:
        i, j = int32(i + 1), int32(j - geometry.Wo)
    if i >= geometry.Ho:
        image, i = int32(image + 1), int32(i - geometry.Ho)
    return Tf32GradientPixel(number, image, i, j)


@cuda.jit(device=True, forceinline=True)
def pixel_at(number, geometry):
    image, rest = divide(number, int32(geometry.Ho * geometry.Wo))
    i, j = divide(rest, geometry.Wo)
    return Tf32GradientPixel(number, image, i, j)


# The kernel ---------------------------------------------------------------------------------------


@requires("8.0")
def conv2d_tf32_weight_gradient(dy, x, partial, geometry, pixels, part_pixels):
    """partial[part] = the products of the part's pixels: TILE_M channels of dy × TILE_N columns of
    col a block."""
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
    mine = Tf32GradientColumns(
        int32(first_n + 4 * chunk),
        base + place_across(row, chunk, TILE_M * 4),
        base + B_FIRST + place_across(row, chunk, TILE_N * 4),
        dr,
        ds,
        offset,
    )
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
    write_outputs(
        partial,
        int32(cuda.blockIdx.z * N),
        accumulators,
        n,
        k,
        N,
        K,
        K,
        Addends(x, x, x),
        Added(False, False, False),
    )
