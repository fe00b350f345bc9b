"""Weight gradient of a 3 × 3 convolution on the tensor cores of any GPU from sm_80 on: nine taps
from one tile.

MATHEMATICS
    dweight[n, r, s, c] += Σ_p dy[p, n] · x[p + (r, s), c]: a product whose inner dimension is the
    pixels dbias[n] += Σ_p dy[p, n], by one mma in 25: dy's fragments times ones
SHAPES
    as in mma.py; 3 × 3 taps, stride 1, C and N multiples of 8, any image size
WHAT IS NEW, AND WHY IT PAYS
    mma.py has a block for each tap, and each loads dy and x again. Here a block has all nine taps
        of 64 × 64 channels: dy and x, with a border of one pixel, come to shared memory once.
    12 warps: warp (s, q) has taps (0 … 2, s) of 16 channels of x and all 64 of dy, 96 accumulators
        a lane. It walks down the rows of its tile. Row h of dy meets rows h - 1, h and h + 1 of x,
        and the fragments of the last two stay in registers for the next row: 4 + 1 ldmatrix feed 24
        mma.
TILES
    8 rows of 16 pixels; 16 pixels are one segment of an image, or, for images of 8 columns, two
    segments of 8 of any images (as in mma_halo.py). The tiles of all images are shared among as
    many parts as fill a GPU; a part's sums stay in registers to its end.
LAUNCH
    grid (C / 64, N / 64, parts), 384 threads, one block on a multiprocessor; two or three stages of
    39 KiB (two
    segments: 41), as the card's shared memory allows.
DETERMINISM
    a part's order of pixels is fixed; parts are added in order by a second kernel.
SOURCE
    PTX ISA, sections 9.7.9.25.3 (cp.async) and 9.7.14.5 (mma, ldmatrix).
READ NEXT
    hopper/, where nothing is gathered any more.
"""

import itertools
from typing import NamedTuple

import numpy as np

from ...device import cuda, device_inline, empty, float32, int32, int64, launch, opaque, uint32
from ...device.async_copy import (
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    cp_async_wait_all,
    shared_address,
)
from ...device.batch_invariance import nominal_extent
from ...device.common import divide, no_numbers
from ...device.half import in_bfloat16
from ...device.limits import multiprocessors_of, shared_limit
from ...device.requires import requires
from ...device.specialise import Constant, Variants, specialise
from ...device.tensor_core import (
    ldmatrix_x4_trans,
    mma_m16n8k16_into,
    ones_half2,
    store_words2,
    word_of,
)
from ..reduce.second_pass import Sum, add_parts
from ..reduce.trees import column_sum

WARPS = 12
THREADS = 32 * WARPS
TILE = 64  # channels of dy and of x: a pixel's are 128 bytes
ROWS = 8  # of a tile
PASS = THREADS // 8  # pixels whose chunks one pass of all threads fetches
DY_BYTES = ROWS * 16 * TILE * 2
FRAGMENTS = 4  # of 16 channels of dy

# Of each kernel: columns of a segment (16, 8); stages of tiles; whether it also sums dy over the
# pixels
SEG, STAGES, SUMS = Constant(), Constant(), Constant()
ACCUMULATORS = Constant(lambda SUMS: 100 if SUMS else 96)
SEGMENTS = Constant(lambda SEG: 16 // SEG)
PITCH = Constant(lambda SEG, SEGMENTS: SEGMENTS * (SEG + 2))  # pixels of a row of x's tile
HALO = Constant(lambda PITCH: (ROWS + 2) * PITCH)  # pixels
X_BYTES = Constant(lambda HALO: HALO * TILE * 2)
STAGE = Constant(lambda X_BYTES: X_BYTES + DY_BYTES)
X_PASSES, DY_PASSES = Constant(lambda HALO: -(-HALO // PASS)), -(-ROWS * 16 // PASS)
PENDING = Constant(lambda STAGES: STAGES - 2)
ROW_BYTES = Constant(lambda PITCH: PITCH * TILE * 2)


class HaloGradientParts(NamedTuple):
    """x (·, H, W, C), dy (·, H, W, N); segments of an image down and across, and of all images;
    tiles of a part."""

    H: int
    W: int
    C: int
    N: int
    bands: int
    across: int
    segments: int
    tiles: int


def stage_bytes(seg):
    return (ROWS + 2) * 16 // seg * (seg + 2) * TILE * 2 + DY_BYTES


# Into shared memory -------------------------------------------------------------------------------


@device_inline
def origin(segment, image):
    """(image, row, column) of a segment's first pixel; one that does not exist begins far below its
    image."""
    number, rest = divide(segment, int32(image.bands * image.across))
    band, column = divide(rest, image.across)
    return number, int32(band * ROWS if segment < image.segments else 1 << 20), int32(column * SEG)


@device_inline
def origins(tile, image):
    """`origin` of a tile's one or two segments."""
    first = origin(int32(tile * SEGMENTS), image)
    return first, origin(int32(tile * SEGMENTS + 1), image) if SEGMENTS > 1 else first


@device_inline
def fetch_pixels(stage, x, at, image, first_c, t):
    """Start the copies of a tile's x, with its border: chunk c of a pixel is stored at c ^ (column
    % 8)."""
    chunk, first = t & 7, t >> 3
    c = int32(first_c + 8 * chunk)
    for i in range(X_PASSES):
        p = int32(first + i * PASS)
        line, column = divide(p, int32(PITCH))
        number, h, w = at[0]
        w += column
        if SEGMENTS > 1 and column >= SEG + 2:
            number, h, w = at[1]
            w += column - (SEG + 2)
        h, w = int32(h + line - 1), int32(w - 1)
        inside = (h >= 0) & (h < image.H) & (w >= 0) & (w < image.W) & (c < image.C)
        index = int32(((number * image.H + h) * image.W + w) * image.C + c)
        if (i + 1) * PASS <= HALO or p < HALO:
            cp_async_16_zfill(
                stage + uint32(p * 128 + ((chunk ^ column & 7) << 4)),
                x,
                index,
                uint32(16) if inside else uint32(0),
            )


@device_inline
def fetch_gradients(stage, dy, at, image, first_n, t):
    """Start the copies of a tile's dy."""
    chunk, first = t & 7, t >> 3
    n = int32(first_n + 8 * chunk)
    for i in range(DY_PASSES):
        p = int32(first + i * PASS)
        line, column = p >> 4, p & 15
        number, h, w = at[0]
        w += column
        if SEGMENTS > 1 and column >= SEG:
            number, h, w = at[1]
            w += column - SEG
        h, w = int32(h + line), int32(w)
        inside = (h < image.H) & (w < image.W) & (n < image.N)
        index = int32(((number * image.H + h) * image.W + w) * image.N + n)
        if (i + 1) * PASS <= ROWS * 16 or p < ROWS * 16:
            cp_async_16_zfill(
                stage + uint32(X_BYTES + p * 128 + ((chunk ^ column & 7) << 4)),
                dy,
                index,
                uint32(16) if inside else uint32(0),
            )


# Products -----------------------------------------------------------------------------------------


@device_inline
def load_row(b, k, x_at, h):
    """Four words of b, from b[k] on: row h of x's tile, 16 pixels × 16 channels."""
    w = ldmatrix_x4_trans(x_at + uint32(h * ROW_BYTES))
    b[k], b[k + 1], b[k + 2], b[k + 3] = w[0], w[1], w[2], w[3]


@device_inline
def multiply_row(accumulators, b, x_at, dy_at, mine, h):
    """accumulators += row h of dy times rows h, h + 1 and h + 2 of x's tile, the last of which is
    loaded here.

    SUMS: a product with ones sums the pixels of 16 channels of dy, which are at `mine`.
    """
    load_row(b, 4 * ((h + 2) % 3), x_at, h + 2)
    for m in range(FRAGMENTS):
        a = ldmatrix_x4_trans((dy_at ^ uint32(32 * m)) + uint32(h * 2048))
        for r in range(3):
            k = 4 * ((h + r) % 3)
            mma_m16n8k16_into(accumulators, 32 * r + 8 * m, a, (b[k], b[k + 1]))
            mma_m16n8k16_into(accumulators, 32 * r + 8 * m + 4, a, (b[k + 2], b[k + 3]))
    if SUMS:
        a = ldmatrix_x4_trans(mine + uint32(h * 2048))
        mma_m16n8k16_into(accumulators, 96, a, (ones_half2(), ones_half2()))


@device_inline
def multiply_tile(accumulators, b, x_at, dy_at, mine):
    """All rows of a tile, one by one: indices of registers have to be constants."""
    load_row(b, 0, x_at, 0)
    load_row(b, 4, x_at, 1)
    multiply_row(accumulators, b, x_at, dy_at, mine, 0)
    multiply_row(accumulators, b, x_at, dy_at, mine, 1)
    multiply_row(accumulators, b, x_at, dy_at, mine, 2)
    multiply_row(accumulators, b, x_at, dy_at, mine, 3)
    multiply_row(accumulators, b, x_at, dy_at, mine, 4)
    multiply_row(accumulators, b, x_at, dy_at, mine, 5)
    multiply_row(accumulators, b, x_at, dy_at, mine, 6)
    multiply_row(accumulators, b, x_at, dy_at, mine, 7)


@device_inline
def places(t):
    """Bytes in a stage of a lane's rows in x's tile, seen through taps (0, s), and in dy's."""
    lane, warp = t & 31, t >> 5
    s, quarter = warp >> 2, warp & 3
    column = int32((lane & 15) + (lane & 15) // SEG * 2 + s)
    pixel = int32((lane & 7) + (lane >> 4 << 3))
    return (
        uint32(column * 128 + ((2 * quarter + (lane >> 4) ^ column & 7) << 4)),
        uint32(X_BYTES + pixel * 128 + ((lane >> 3 & 1 ^ pixel & 7) << 4)),
    )


@device_inline
def write_tap(partial, accumulators, r, tap, image, first_n, first_c, part, lane):
    """The warp's sums for one tap: 64 channels of dy, 16 of x."""
    n, c = int32(first_n + (lane >> 2)), int32(first_c + (lane & 3) * 2)
    at, step = int64(int32(((part * image.N + n) * 9 + tap) * image.C + c)), int32(72 * image.C)
    for m in range(FRAGMENTS):
        for j in range(2):
            k = 32 * r + 8 * m + 4 * j
            index = at + 2 * m * step + 8 * j
            if (n + 16 * m < image.N) & (c + 8 * j < image.C):
                store_words2(partial, index, word_of(accumulators[k]), word_of(accumulators[k + 1]))
            if (n + 16 * m + 8 < image.N) & (c + 8 * j < image.C):
                store_words2(
                    partial,
                    index + step,
                    word_of(accumulators[k + 2]),
                    word_of(accumulators[k + 3]),
                )


# The kernel ---------------------------------------------------------------------------------------


@requires("7.5")
def sum_halo(dy, x, partial, partial_sums, image):
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    base = shared_address(tiles)
    t = int32(cuda.threadIdx.x)
    first_c, first_n = int32(cuda.blockIdx.x * TILE), int32(cuda.blockIdx.y * TILE)
    tile = int32(cuda.blockIdx.z * image.tiles)
    end = int32(
        min(int32(tile + image.tiles), divide(image.segments + SEGMENTS - 1, int32(SEGMENTS))[0])
    )

    b = cuda.local.array(12, "uint32")
    accumulators = cuda.local.array(ACCUMULATORS, "float32")
    for k in range(ACCUMULATORS):
        accumulators[k] = float32(0)
    for i in range(STAGES - 1):
        if tile + i < end:
            at = origins(int32(tile + i), image)
            fetch_pixels(base + uint32(i * STAGE), x, at, image, first_c, t)
            fetch_gradients(base + uint32(i * STAGE), dy, at, image, first_n, t)
        cp_async_commit()
    stage, ahead = uint32(0), uint32((STAGES - 1) * STAGE)
    while tile < end:
        cp_async_wait(PENDING)  # this thread's copies of the tile have arrived
        # so have all others', and the stage of the tile before is no longer read
        cuda.syncthreads()
        later = int32(tile + STAGES - 1)
        if later < end:
            t, at = opaque(t), origins(later, image)
            fetch_pixels(base + ahead, x, at, image, first_c, t)
            fetch_gradients(base + ahead, dy, at, image, first_n, t)
        cp_async_commit()
        t = opaque(t)
        x_at, dy_at = places(t)
        dy_at += base + stage
        multiply_tile(accumulators, b, base + stage + x_at, dy_at, dy_at ^ uint32(t & 96))
        ahead = stage
        stage = uint32(stage + STAGE if stage < (STAGES - 1) * STAGE else 0)
        tile = int32(tile + 1)

    cp_async_wait_all()
    t = opaque(t)
    lane, warp = t & 31, t >> 5
    s, part = int32(warp >> 2), int32(cuda.blockIdx.z)
    n = int32(first_n + 16 * (warp & 3) + (lane >> 2))
    if SUMS and s == 0 and first_c == 0 and lane & 3 == 0:
        if n < image.N:
            partial_sums[uint32(int32(part * image.N + n))] = accumulators[96]
        if n + 8 < image.N:
            partial_sums[uint32(int32(part * image.N + n + 8))] = accumulators[98]
    first_c = int32(first_c + 16 * (warp & 3))
    write_tap(partial, accumulators, 0, s, image, first_n, first_c, part, lane)
    write_tap(partial, accumulators, 1, int32(3 + s), image, first_n, first_c, part, lane)
    write_tap(partial, accumulators, 2, int32(6 + s), image, first_n, first_c, part, lane)


def make_kernel(seg, stages, sums):
    return specialise(
        sum_halo,
        launch_bounds=(THREADS, 1),
        SEG=seg,
        STAGES=stages,
        SUMS=sums,
        name=f"conv2d_weight_gradient_kernel_v4_halo_{seg}_{stages}{'_sums' if sums else ''}",
    )


KERNELS = Variants(itertools.product((16, 8), (3, 2), (False, True)), lambda key: make_kernel(*key))


# Launcher -----------------------------------------------------------------------------------------


def halo_fits(x):
    """Whether a block has shared memory for two stages: from sm_80 on."""
    return 2 * max(map(stage_bytes, (16, 8))) <= shared_limit(x)


# nanoseconds, fitted to the times of all candidates of some 50 drawn gradients on an H200
# (benchmark/scripts/choices.py): of a tile by its segments' columns, of a block in addition, of the
# second pass; bytes a ns of its parts
TILE_NS, BLOCK_NS, PARTS_A_NS = {16: 2710.0, 8: 3080.0}, 2000.0, 5700.0


def choose_cut(b, h, w, c, n, multiprocessors, only=None):
    """(columns of a segment, parts that the tiles of all images are cut into) with the lowest
    estimate: rounds of blocks, and the parts that are added up. only: SEG"""
    best, bands, blocks = None, -(-h // ROWS), -(-c // TILE) * -(-n // TILE)
    for seg in TILE_NS:
        if only not in (None, seg):
            continue
        tiles = -(-b * bands * -(-w // seg) // (16 // seg))
        for turns in (1, 2, 3, 4, 6):
            part_tiles = -(-tiles // max(1, min(turns * multiprocessors // blocks, tiles)))
            parts = -(-tiles // part_tiles)
            rounds = -(-blocks * parts // multiprocessors)
            ns = rounds * (part_tiles * TILE_NS[seg] + BLOCK_NS)
            ns += 4 * 9 * c * n * (2 * parts + 1) / PARTS_A_NS
            if best is None or ns < best[0]:
                best = ns, seg, parts
    return best[1:]


def halo_weight_gradient(dy, x, dweight, accumulate=True, dbias=None, only=None):
    """dweight += …, or = …, and dbias +=, for arrays that launcher.py has checked. only: (SEG,
    STAGES)"""
    b, h, w, c = x.shape
    n = dy.shape[3]
    seg, parts = choose_cut(nominal_extent(b), h, w, c, n, multiprocessors_of(x), only and only[0])
    stages = only[1] if only else 3 if 3 * stage_bytes(seg) <= shared_limit(x) else 2
    bands, across = -(-h // ROWS), -(-w // seg)
    tiles = -(-b * bands * across // (16 // seg))
    part_tiles = -(-tiles // min(parts, tiles))
    parts = -(-tiles // part_tiles)
    partial = empty((parts * dweight.size,), np.float32, like=dy)
    partial_sums = (
        no_numbers(dy.backend) if dbias is None else empty((parts * n,), np.float32, like=dy)
    )
    launch(
        in_bfloat16(KERNELS[seg, stages, dbias is not None], x.dtype),
        (-(-c // TILE), -(-n // TILE), parts),
        THREADS,
        dy.reshape(-1),
        x.reshape(-1),
        partial,
        partial_sums,
        HaloGradientParts(h, w, c, n, bands, across, b * bands * across, part_tiles),
        shared=stages * stage_bytes(seg),
    )
    sums = [Sum(partial, parts, dweight.reshape(-1), accumulate)]
    if dbias is not None and dbias.offset % 16 == 0:
        sums.append(Sum(partial_sums, parts, dbias, True))
    add_parts(sums)
    if dbias is not None and dbias.offset % 16:
        column_sum(partial_sums.reshape(parts, n), dbias)
