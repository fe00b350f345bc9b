"""Convolution on Hopper's tensor cores: an implicit GEMM fed by TMA, forward and input gradient.

MATHEMATICS
    forward          y[p, n] = Σ_tap Σ_c x[p + tap - pad, c] · weight[n, tap, c]
    input gradient   dx[p, c] = Σ_tap Σ_n dy[p + tap - pad, n] · weight[n, taps - 1 - tap, c]        (stride 1)
    then + bias[n] + channel[image of p, n] + residual[p, n], rounded to float16 once. Where a GroupNorm reads y next,
    the mean and variance of each two channels over each 8 × 8 pixels are left for it.
    A block takes a tile of pixels and of output channels, and sums over blocks of 64 input channels and, in each, over
    the taps. For one tap that is a plain matrix product: pixels × 64 by 64 × channels. The pixels of another tap are
    the same ones shifted by some rows and columns, so nothing is gathered: TMA loads the tile of pixels WITH ITS HALO
    once, with zeros outside the image (which is the padding), and each tap begins to read it at another row.
SHAPES
    x (B, H, W, C), weight (N, kernel, kernel, C), y and residual (B, H, W, N): float16 or bfloat16
    bias (N,), channel (B, N): float32; statistics (B, H / 8 · W / 8, 2, N / 2) float32: groupnorm/normalise.py
    C and N multiples of 8 (a row that TMA brings is a multiple of 16 bytes), kernel odd, stride 1; any B, H, W
VERSIONS
    v5  hopper-columns: for each column of taps its own box of pixels: tile_w columns wide, with a halo above and below.
        A row of it is a multiple of eight pixels, so every matrix begins where the swizzle's pattern begins.
    v6  hopper: one box with the whole halo. A tile of 16 × 16 pixels becomes a box of 18 × 18: 1.27 times its pixels
        cross from L2, where v5 moves them 3.4 times and a box for each tap 9 times. A tap's matrix may begin at any row
        of 128 bytes, because TMA and wgmma both swizzle by the bits of the address.
    The kernels are the same; their arguments say which.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    conv2d_forward, 32×64×64×64, 64×3×3×64, float16
        v5*     21.1 µs   457 TFLOP/s   46 % of arithmetic   3.56 × v4   168 % of cuDNN
        v6      21.3 µs   453 TFLOP/s   46 % of arithmetic   0.99 × v5   166 % of cuDNN
    conv2d_input_gradient, 32×64×64×64, 64×3×3×64, float16
        v5*     21.1 µs   458 TFLOP/s   46 % of arithmetic   3.71 × v4   145 % of cuDNN
        v6      21.2 µs   456 TFLOP/s   46 % of arithmetic   1.00 × v5   144 % of cuDNN
    conv2d_forward, 32×32×32×256, 256×3×3×256, float16
        v6*     56.7 µs   681 TFLOP/s   69 % of arithmetic   101 % of cuDNN
HOW A TILE LIES IN SHARED MEMORY
    A pixel is a row of 64 channels, 128 bytes. Eight neighbouring pixels of an image row are one group of eight rows of
    a wgmma's matrix, and eight image rows below each other are its eight groups: a SUB-BLOCK of 8 × 8 pixels, whose
    groups are one row of the box apart. A wgmma takes one sub-block; a tile is 2 or 4 of them, side by side, below each
    other, or in several images. Each is stored by itself, and TMA clips it where the image ends.
WHO DOES WHAT  (384 threads: three warpgroups)
    warp 0 asks for boxes of pixels      one stage for each block of channels (v6), or column of taps (v5)
    warp 3 asks for the weight           one stage a tap, or a column of three (kernels of their own: a third of the
                                         waits); where all of it fits, once for all tiles (`resident`)
    warps 1, 2 run beside the products   each stores a consumer's results, makes their statistics, and brings the next
                                         residual, to the place of the next results, and what is added to each channel
    warpgroups 1, 2 multiply             sub-blocks of 64 pixels by BN output channels. Where shared memory holds all
                                         that a tile needs they ping-pong: one multiplies, one writes its results
LAUNCH
    as many blocks as multiprocessors, each of which walks over work tiles; shared memory: weight stages, output
    buffers, pixel stages.
DETERMINISM
    one warpgroup sums an output, in the order of channels and taps.
COST
    as in direct.py. From L2 to shared memory, for each tile and 64 channels: 128 · (pixels with halo + taps · BN)
    bytes for 128 · pixels · taps · BN FLOPs.
SOURCE
    PTX ISA, sections 9.7.15 (wgmma) and 9.7.9.27 (TMA); the implicit GEMM: Chetlur et al. 2014, "cuDNN",
    arXiv:1410.0759.
READ NEXT
    hopper_weight_gradient.py, the weight gradient.
"""
import functools
import itertools
from typing import NamedTuple

import numpy as np

from ...device import cuda, float32, int32, launch, uint32
from ...device.half import in_bfloat16
from ...device.limits import FULL_MASK, HOPPER_SHARED
from ...device.mbarrier import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_wait,
    smem_u32,
)
from ...device.pipeline import (
    Ring,
    advance,
    barrier_at,
    consumer_release,
    consumer_start,
    consumer_wait,
    init_barriers,
    producer_acquire,
    producer_start,
    stage_at,
)
from ...device.requires import requires, supports
from ...device.specialise import Constant, specialise
from ...device.tensor_core import load_word, pack_half2, store_word, unpack_half2
from ...device.tensor_map import tensor_map
from ...device.tma import (
    fence_proxy_async,
    tma_load_3d,
    tma_load_4d,
    tma_prefetch,
    tma_store_4d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
)
from ...device.wgmma import make_setmaxnreg, make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence, wgmma_wait_1
from ...dtypes import is_half
from ..any_batch import assumed
from ..common import divide, no_numbers
from ..tuning import tuned_or

u64 = np.uint64

THREADS = 384
BK = 64  # input channels in a stage: 128 bytes, as far as the swizzle reaches
ROW = 128  # bytes of a pixel in a stage
MAX_A, MAX_B = 4, 12  # stages
BARRIERS = 2 * MAX_A + 2 * MAX_B + 6
SHARED = HOPPER_SHARED - 1024  # bytes of dynamic shared memory; barriers and alignment take less than the rest
WIDTHS = 32, 64, 96, 128  # BN

producer_registers, consumer_registers = make_setmaxnreg(72, False), make_setmaxnreg(216, True)


# Constants of a kernel ------------------------------------------------------------------------------------------------

BN = Constant()  # output channels of a tile
SUB = Constant()  # sub-blocks of 64 pixels that a consumer multiplies: 1 or 2
# of the weight: 1, or 3 of a column. A constant, as a branch among the products of a round ends their group
TAPS_PER_STAGE = Constant()
# whether it is the input gradient. There the weight's tile is read across: its 64 rows are the inner dimension, and
# output channels lie next to each other
TRANSPOSED = Constant()
ACCUMULATORS = Constant(lambda BN: BN // 2)  # of a thread for a sub-block
COLS = Constant(lambda BN: 64 if BN % 64 == 0 else 32)  # channels in a row of an output buffer, of a transposed weight
SLABS = Constant(lambda BN, COLS: BN // COLS)
SLAB_BYTES = Constant(lambda COLS: 128 * COLS)  # of 64 such rows
TAP_BYTES = Constant(lambda BN: BN * ROW)  # of the weight
B_BYTES = Constant(lambda TAP_BYTES, TAPS_PER_STAGE: TAPS_PER_STAGE * TAP_BYTES)  # of a stage of it
OUT_BYTES = Constant(lambda SUB, SLABS, SLAB_BYTES: SUB * SLABS * SLAB_BYTES)  # of a consumer's output buffer
# in descriptors, where 16 bytes count 1: from a tap to the next; from 16 channels to the next
B_TAP = Constant(lambda TAP_BYTES: u64(TAP_BYTES // 16))
B_STEP = Constant(lambda TRANSPOSED, COLS: 2 * COLS if TRANSPOSED else 2)
B_LEADING = Constant(lambda TRANSPOSED, SLAB_BYTES: SLAB_BYTES if TRANSPOSED else 16)
B_STRIDE = Constant(lambda TRANSPOSED, COLS: 16 * COLS if TRANSPOSED else 8 * ROW)
B_SWIZZLE = Constant(lambda TRANSPOSED, COLS: 2 if TRANSPOSED and COLS == 32 else 1)
wgmma = Constant(lambda BN, TRANSPOSED: make_wgmma(BN, transpose_b=TRANSPOSED))
wgmma_wait = Constant(lambda BN: make_wgmma_wait(BN))


# Arguments ------------------------------------------------------------------------------------------------------------

class Maps(NamedTuple):
    """Tensor maps of x (or dy), of the weight, of y and of the residual."""

    x: object
    weight: object
    y: object
    residual: object


class Vectors(NamedTuple):
    """What is added to each channel: bias (N,), channel (B · N,) of each image."""

    bias: object
    channel: object


class Shape(NamedTuple):
    """Of y: images, height, width, N channels; channel_blocks: of 64 input channels; size: of the kernel."""

    images: int
    height: int
    width: int
    N: int
    channel_blocks: int
    size: int


class Tiling(NamedTuple):
    """How the work is cut, as in `Plan`."""

    whole_halo: int
    tile_w: int
    tile_h: int
    tile_images: int
    a_stages: int
    a_bytes: int
    b_stages: int
    resident: int
    ping_pong: int


class Epilogue(NamedTuple):
    """What becomes of the accumulators; statistics: flat."""

    has_bias: int
    has_channel: int
    has_residual: int
    statistics: object
    has_statistics: int


# Where things lie -----------------------------------------------------------------------------------------------------

class Boxes(NamedTuple):
    """A box of pixels: padding, pixels in a row, rows; loads: boxes for one block of channels. The tiles: columns (of
    BN output channels), across and down an image, all."""

    pad: int
    pitch: int
    height: int
    loads: int
    columns: int
    across: int
    down: int
    tiles: int


class Buffers(NamedTuple):
    """Shared memory of the results. tiles: all bytes, address: of the first consumer's output buffer, at: its first
    byte; addends (float32): what is added to each channel of each sub-block, from addends_at on.

    Barriers of the two consumers: ready: it may write (and the residual is there); written: it has written; turn: it
    may multiply, with ping-pong.
    """

    tiles: object
    address: int
    at: int
    addends: object
    addends_at: int
    ready: int
    written: int
    turn: int


@cuda.jit(device=True, forceinline=True)
def boxes_of(shape, tiling):
    """The `Boxes` of a convolution."""
    pad = int32(shape.size >> 1)
    columns = divide(shape.N + BN - 1, BN)[0]
    across = divide(shape.width + tiling.tile_w - 1, tiling.tile_w)[0]
    down = divide(shape.height + tiling.tile_h - 1, tiling.tile_h)[0]
    groups = divide(shape.images + tiling.tile_images - 1, tiling.tile_images)[0]
    return Boxes(pad, int32(tiling.tile_w + 2 * pad if tiling.whole_halo else tiling.tile_w),
                 int32(tiling.tile_h + 2 * pad), int32(1 if tiling.whole_halo else shape.size), columns, across, down,
                 int32(columns * across * down * groups))


@cuda.jit(device=True, forceinline=True)
def place_of(tile, boxes):
    """(column of tiles, tile across, tile down, group of images) of a tile; neighbours in a launch share pixels."""
    rest, column = divide(tile, boxes.columns)
    rest, i = divide(rest, boxes.across)
    image, j = divide(rest, boxes.down)
    return column, i, j, image


@cuda.jit(device=True, forceinline=True)
def sub_block_at(sub_block, tile_w, tile_h):
    """(columns, rows, images) from a tile's first pixel to a sub-block's."""
    rest, i = divide(sub_block, tile_w >> 3)
    image, j = divide(rest, tile_h >> 3)
    return int32(i * 8), int32(j * 8), image


@cuda.jit(device=True, forceinline=True)
def row_of(sub_block, tile_w, tile_h, pitch, box_h):
    """The row of a box at which a sub-block begins: pixels before it, in a box `pitch` wide and `box_h` high."""
    i, j, image = sub_block_at(sub_block, tile_w, tile_h)
    return int32((image * box_h + j) * pitch + i)


@cuda.jit(device=True, forceinline=True)
def descriptor(address, leading, stride, swizzle):
    """A wgmma's matrix descriptor; leading, stride: bytes; swizzle: 1 for 128 bytes, 2 for 64 (emulator/wgmma.py)."""
    return (u64((address & uint32(0x3FFFF)) >> uint32(4)) | (u64(leading >> uint32(4)) << u64(16))
            | (u64(stride >> uint32(4)) << u64(32)) | (u64(swizzle) << u64(62)))


# Producers: a thread for the pixels, a thread for the weight ----------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def load_pixels(ring, map_x, boxes, shape, tiling):
    """One thread asks TMA for boxes of pixels, for all tiles of the block."""
    tma_prefetch(map_x)
    stage, parity = producer_start()
    for tile in range(cuda.blockIdx.x, boxes.tiles, cuda.gridDim.x):
        _, i, j, group = place_of(tile, boxes)
        w, h = int32(i * tiling.tile_w - boxes.pad), int32(j * tiling.tile_h - boxes.pad)
        image = int32(group * tiling.tile_images)
        for block in range(shape.channel_blocks):
            for load in range(boxes.loads):
                full = producer_acquire(ring, stage, parity, boxes.pitch * boxes.height * tiling.tile_images * ROW)
                tma_load_4d(stage_at(ring, stage), map_x, full, uint32(block * BK), uint32(w + load), uint32(h),
                            uint32(image))
                stage, parity = advance(ring, stage, parity)


@cuda.jit(device=True, forceinline=True)
def load_tap(address, map_weight, full, first, tap, taps, block):
    """Ask TMA for a tap of the weight: BN output channels from `first` on, a block of 64 input channels."""
    if TRANSPOSED:
        for slab in range(SLABS):
            tma_load_3d(address + uint32(slab * SLAB_BYTES), map_weight, full, uint32(first + slab * COLS),
                        uint32(taps - 1 - tap), uint32(block * BK))
    else:
        tma_load_3d(address, map_weight, full, uint32(block * BK), uint32(tap), uint32(first))


@cuda.jit(device=True, forceinline=True)
def load_weight(ring, map_weight, boxes, shape, tiling):
    """One thread asks TMA for the weight, TAPS_PER_STAGE taps of a column at a time; once, if it is resident."""
    tma_prefetch(map_weight)
    stage, parity = producer_start()
    size = shape.size
    end = int32(cuda.blockIdx.x + 1) if tiling.resident else boxes.tiles
    for tile in range(cuda.blockIdx.x, end, cuda.gridDim.x):
        first = int32(divide(tile, boxes.columns)[1] * BN)
        for block in range(shape.channel_blocks):
            for column in range(size):
                for part in range(1 if TAPS_PER_STAGE == 3 else size):
                    full = producer_acquire(ring, stage, parity, B_BYTES)
                    to = stage_at(ring, stage)
                    for k in range(TAPS_PER_STAGE):
                        load_tap(to, map_weight, full, first, int32((part + k) * size + column), size * size, block)
                        to += uint32(TAP_BYTES)
                    stage, parity = advance(ring, stage, parity)


# Two warps beside them: results out, residuals in ---------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def stage_addends(addends, at, first, N, vectors, channel_at, epilogue):
    """addends[at … at + BN - 1] = what is added to each channel of a sub-block from `first` on, by a warp."""
    for k in range(BN // 32):
        n = int32(32 * k + (cuda.threadIdx.x & 31))
        total = float32(0)
        if first + n < N:
            if epilogue.has_bias:
                total += vectors.bias[first + n]
            if epilogue.has_channel:
                total += vectors.channel[channel_at + first + n]
        addends[at + n] = total


@cuda.jit(device=True, forceinline=True)
def write_statistics(tiles, at, statistics, to, left, columns):
    """Statistics of a sub-block as it lies in its buffer, by a warp; left: pairs of channels that exist.

    Of each two channels the mean goes to statistics[to …], the variance to `columns` later.
    A lane has two channels, of every second pixel where rows are short, so that a warp's loads touch each bank once. It
    sums beside the first of its numbers, so that q - s² / n cancels no more than groupnorm/chunks.py says.
    """
    LANES, PIXELS = COLS // 2, COLS  # of a pixel; of a lane
    words = cuda.local.array(8, np.uint32)
    lane = int32(cuda.threadIdx.x & 31)
    own, half, share = int32(lane & (LANES - 1)), int32(lane // LANES), float32(1) / float32(2 * PIXELS)
    for slab in range(BN // COLS):
        from_here = int32(at + slab * 128 * COLS + half * 2 * COLS + (own & 3) * 4)
        first = unpack_half2(load_word(tiles, int32(from_here + (own >> 2) * 16)))[0]
        s = q = float32(0)
        for eight in range(PIXELS // 8):  # eight loads in flight at once, as each has a long latency
            for k in range(8):
                place = int32(from_here + k * 128 + ((own >> 2) ^ (k & (COLS // 8 - 1))) * 16)
                words[k] = load_word(tiles, int32(place + eight * 1024))
            for k in range(8):
                low, high = unpack_half2(words[k])
                low -= first
                high -= first
                s += low + high
                q += low * low + high * high
        mean, squares = first + s * share, max(q - s * s * share, float32(0))
        if COLS == 32:
            mean_2 = cuda.shfl_xor_sync(FULL_MASK, mean, 16)
            squares += cuda.shfl_xor_sync(FULL_MASK, squares, 16) + float32(PIXELS) * (mean - mean_2) * (mean - mean_2)
            mean = float32(0.5) * (mean + mean_2)
        pair = int32(slab * LANES + own)
        if pair < left and half == 0:
            statistics[to + pair], statistics[to + columns + pair] = mean, squares * float32(1 / 128)


@cuda.jit(device=True, forceinline=True)
def load_residual(buffer, free, map_residual, first, w, h, image, consumer, tiling):
    """Ask TMA for the residual of a consumer's sub-blocks, to where its results will lie."""
    mbarrier_expect_tx(free, uint32(OUT_BYTES))
    for slab in range(SUB * SLABS):
        di, dj, more = sub_block_at(consumer * SUB + slab // SLABS, tiling.tile_w, tiling.tile_h)
        tma_load_4d(buffer + uint32(slab * SLAB_BYTES), map_residual, free, uint32(first + slab % SLABS * COLS),
                    uint32(w + di), uint32(h + dj), uint32(image + more))


@cuda.jit(device=True, forceinline=True)
def store_results(buffer, map_y, first, w, h, image, consumer, tiling):
    """Ask TMA to write a consumer's results."""
    for slab in range(SUB * SLABS):
        di, dj, more = sub_block_at(consumer * SUB + slab // SLABS, tiling.tile_w, tiling.tile_h)
        tma_store_4d(buffer + uint32(slab * SLAB_BYTES), map_y, uint32(first + slab % SLABS * COLS), uint32(w + di),
                     uint32(h + dj), uint32(image + more))
    tma_store_commit()


@cuda.jit(device=True, forceinline=True)
def exchange(buffers, consumer, maps, vectors, boxes, shape, tiling, epilogue):
    """A warp brings what a consumer's epilogue needs, for all tiles of the block, and takes away what it has written.
    """
    chosen = (cuda.threadIdx.x & 31) == 0
    if chosen:
        tma_prefetch(maps.y)
    buffer = buffers.address + uint32(consumer * OUT_BYTES)
    free, done = barrier_at(buffers.ready, consumer), barrier_at(buffers.written, consumer)
    parity = uint32(0)
    for tile in range(cuda.blockIdx.x, boxes.tiles, cuda.gridDim.x):
        column, i, j, group = place_of(tile, boxes)
        first = int32(column * BN)
        w, h, image = int32(i * tiling.tile_w), int32(j * tiling.tile_h), int32(group * tiling.tile_images)
        if epilogue.has_bias or epilogue.has_channel:
            for sub in range(SUB):
                more = sub_block_at(consumer * SUB + sub, tiling.tile_w, tiling.tile_h)[2]
                mine = min(int32(image + more), int32(shape.images - 1))
                stage_addends(buffers.addends, int32(buffers.addends_at + (consumer * SUB + sub) * BN), first, shape.N,
                              vectors, mine * shape.N, epilogue)
        cuda.syncwarp()
        if chosen and epilogue.has_residual:
            load_residual(buffer, free, maps.residual, first, w, h, image, consumer, tiling)
        else:
            mbarrier_arrive(free)  # every lane, for what it has written and read
        mbarrier_wait(done, parity)
        parity ^= uint32(1)
        if chosen:
            store_results(buffer, maps.y, first, w, h, image, consumer, tiling)
        if not TRANSPOSED and epilogue.has_statistics:
            for sub in range(SUB):
                di, dj, more = sub_block_at(consumer * SUB + sub, tiling.tile_w, tiling.tile_h)
                x, y, b = int32(w + di), int32(h + dj), int32(image + more)
                if x < shape.width and y < shape.height and b < shape.images:
                    chunk = int32(((b * shape.height + y) >> 3) * (shape.width >> 3) + (x >> 3))
                    # buffers.at, from what it is made of: with few registers better computed again than kept
                    at = int32(tiling.b_stages * B_BYTES + consumer * OUT_BYTES + sub * SLABS * SLAB_BYTES)
                    write_statistics(buffers.tiles, at, epilogue.statistics, int32(chunk * shape.N + (first >> 1)),
                                     int32((shape.N - first) >> 1), shape.N >> 1)
            fence_proxy_async()  # the next residual comes to where was read
        if chosen:
            tma_store_wait_read_0()
        cuda.syncwarp()
    if chosen:
        tma_store_wait_0()


# Consumers ------------------------------------------------------------------------------------------------------------

class View(NamedTuple):
    """How a consumer sees a box. rows, rows_2: bytes to its sub-blocks; stride: from an image row to the next; rounds
    of a tile; box_taps: that read one box; size: of the kernel; elected: whether this thread releases stages."""

    rows: int
    rows_2: int
    stride: int
    rounds: int
    box_taps: int
    size: int
    elected: bool


@cuda.jit(device=True, forceinline=True)
def view_of(consumer, boxes, shape, tiling):
    """The `View` of a consumer."""
    rows = row_of(consumer * SUB, tiling.tile_w, tiling.tile_h, boxes.pitch, boxes.height)
    rows_2 = row_of(consumer * SUB + 1, tiling.tile_w, tiling.tile_h, boxes.pitch, boxes.height)
    size = shape.size
    return View(uint32(rows) * uint32(ROW), uint32(rows_2) * uint32(ROW), uint32(uint32(boxes.pitch) * uint32(ROW)),
                int32(shape.channel_blocks * size * (1 if TAPS_PER_STAGE == 3 else size)),
                int32(size * size if tiling.whole_halo else size), size, (cuda.threadIdx.x & 127) == 0)


@cuda.jit(device=True, forceinline=True)
def advance_weight(ring, stage, parity, resident):
    """As `advance`; the stages of a resident weight stay in their first phase."""
    stage = int32(stage + 1)
    if stage == ring.stages:
        stage = int32(0)
        if not resident:
            parity = uint32(parity ^ uint32(1))
    return stage, parity


@cuda.jit(device=True, forceinline=True)
def multiply_rest(acc, a, b):
    """acc += a tap's products, except those of the first 16 of its 64 channels; a, b: descriptors."""
    wgmma(acc, a + u64(2), b + u64(B_STEP), int32(1))
    wgmma(acc, a + u64(4), b + u64(2 * B_STEP), int32(1))
    wgmma(acc, a + u64(6), b + u64(3 * B_STEP), int32(1))


@cuda.jit(device=True, forceinline=True)
def multiply_first(acc, a_at, stride, b):
    """acc = a tap's products for 64 channels; a_at: address of the pixels, b: the weight's descriptor."""
    a = descriptor(a_at, uint32(16), stride, 1)
    wgmma(acc, a, b, int32(0))
    multiply_rest(acc, a, b)


@cuda.jit(device=True, forceinline=True)
def multiply_tap(acc, acc_2, a_1, a_2, stride, b):
    """acc += a tap's products for 64 channels, acc_2 likewise where a warpgroup has two sub-blocks."""
    a = descriptor(a_1, uint32(16), stride, 1)
    wgmma(acc, a, b, int32(1))
    multiply_rest(acc, a, b)
    if SUB == 2:
        a = descriptor(a_2, uint32(16), stride, 1)
        wgmma(acc_2, a, b, int32(1))
        multiply_rest(acc_2, a, b)


@cuda.jit(device=True, forceinline=True)
def multiply_column(acc, acc_2, a_1, a_2, stride, b):
    """The products of a stage's other two taps, below the first one, whose pixels lie at a_1 and a_2."""
    if TAPS_PER_STAGE == 3:
        multiply_tap(acc, acc_2, a_1 + stride, a_2 + stride, stride, b + B_TAP)
        multiply_tap(acc, acc_2, a_1 + stride + stride, a_2 + stride + stride, stride, b + B_TAP + B_TAP)


@cuda.jit(device=True, forceinline=True)
def weight_at(ring, stage):
    """The descriptor of a stage's first tap."""
    return descriptor(stage_at(ring, stage), uint32(B_LEADING), uint32(B_STRIDE), B_SWIZZLE)


@cuda.jit(device=True, forceinline=True)
def main_loop(acc, acc_2, a_ring, b_ring, a_stage, a_parity, b_stage, b_parity, view, resident):
    """acc, acc_2 = a tile's products, once the first stages of pixels and weight are there; returns the rings' state.

    The first round overwrites the accumulators; it stands before the loop so that ptxas sees it. Taps are counted down
    each column: a row of taps is `stride` bytes on. A stage is released when the next round is under way.
    """
    stride = view.stride
    a_at = stage_at(a_ring, a_stage)
    b = weight_at(b_ring, b_stage)
    wgmma_fence()
    multiply_first(acc, a_at + view.rows, stride, b)
    if SUB == 2:
        multiply_first(acc_2, a_at + view.rows_2, stride, b)
    multiply_column(acc, acc_2, a_at + view.rows, a_at + view.rows_2, stride, b)
    wgmma_commit()

    shift = uint32(TAPS_PER_STAGE) * stride
    used, row = TAPS_PER_STAGE, TAPS_PER_STAGE  # taps that have read the stage, and those of the column
    for _ in range(int32(1), view.rounds):
        before_a, before_b = a_stage, b_stage
        next_box = used == view.box_taps
        if row == view.size:  # the next column of taps
            row = int32(0)
            shift += uint32(ROW) - uint32(view.size) * stride
        if next_box:
            used, shift = int32(0), uint32(0)
            a_stage, a_parity = advance(a_ring, a_stage, a_parity)
            consumer_wait(a_ring, a_stage, a_parity)
            a_at = stage_at(a_ring, a_stage)
        b_stage, b_parity = advance_weight(b_ring, b_stage, b_parity, resident)
        consumer_wait(b_ring, b_stage, b_parity)
        wgmma_fence()
        a_1, a_2 = a_at + view.rows + shift, a_at + view.rows_2 + shift
        b = weight_at(b_ring, b_stage)
        multiply_tap(acc, acc_2, a_1, a_2, stride, b)
        multiply_column(acc, acc_2, a_1, a_2, stride, b)
        wgmma_commit()
        shift += uint32(TAPS_PER_STAGE) * stride
        used += TAPS_PER_STAGE
        row += TAPS_PER_STAGE
        wgmma_wait_1()
        if view.elected:
            if not resident:
                consumer_release(b_ring, before_b)
            if next_box:
                consumer_release(a_ring, before_a)
    return a_stage, a_parity, b_stage, b_parity


@cuda.jit(device=True, forceinline=True)
def stage_results(tiles, at, acc, addends, addends_at, epilogue):
    """Write a warpgroup's 64 × BN results to its buffer, as rows of COLS channels, swizzled as TMA expects them.

    The residual is already where they go; all of it is loaded before any of it is used. The lanes of eight neighbouring
    pixels write the same 16-byte chunk of their rows: the swizzle puts these in eight places, so that a warp's store
    touches each bank once.
    """
    old = cuda.local.array(32, np.uint32)
    thread = int32(cuda.threadIdx.x & 127)
    lane = thread & 31
    row = int32((thread >> 5) * 16 + (lane >> 2))
    turn = row & 7 if COLS == 64 else (row >> 1) & 3
    row_at = int32(at + row * 2 * COLS + (lane & 3) * 4)
    if epilogue.has_bias or epilogue.has_channel:
        for j in range(BN // 8):
            n = int32(addends_at + j * 8 + (lane & 3) * 2)
            low, high = addends[n], addends[n + 1]
            acc[4 * j] += low
            acc[4 * j + 1] += high
            acc[4 * j + 2] += low
            acc[4 * j + 3] += high
    if epilogue.has_residual:
        for j in range(BN // 8):
            place = int32(row_at + j * 8 // COLS * 128 * COLS + (j % (COLS // 8) ^ turn) * 16)
            old[2 * j], old[2 * j + 1] = load_word(tiles, place), load_word(tiles, int32(place + 16 * COLS))
        for j in range(BN // 4):
            low, high = unpack_half2(old[j])
            acc[2 * j] += low
            acc[2 * j + 1] += high
    for j in range(BN // 8):
        place = int32(row_at + j * 8 // COLS * 128 * COLS + (j % (COLS // 8) ^ turn) * 16)
        store_word(tiles, place, pack_half2(acc[4 * j], acc[4 * j + 1]))
        store_word(tiles, int32(place + 16 * COLS), pack_half2(acc[4 * j + 2], acc[4 * j + 3]))


@cuda.jit(device=True, forceinline=True)
def consume(consumer, a_ring, b_ring, buffers, boxes, shape, tiling, epilogue):
    """A warpgroup multiplies its sub-blocks of all tiles of the block, and leaves the results in its buffer."""
    acc = cuda.local.array(ACCUMULATORS, np.float32)
    acc_2 = cuda.local.array(ACCUMULATORS, np.float32)
    view = view_of(consumer, boxes, shape, tiling)
    out = int32(buffers.at + consumer * OUT_BYTES)
    a_stage, a_parity = consumer_start()
    b_stage, b_parity = consumer_start()
    out_parity, turn_parity = uint32(0), uint32(1 - consumer)  # of ping-pong, the first consumer begins
    for _ in range(cuda.blockIdx.x, boxes.tiles, cuda.gridDim.x):
        consumer_wait(b_ring, b_stage, b_parity)
        consumer_wait(a_ring, a_stage, a_parity)
        if tiling.ping_pong:
            mbarrier_wait(barrier_at(buffers.turn, consumer), turn_parity)
            turn_parity ^= uint32(1)
        a_stage, a_parity, b_stage, b_parity = main_loop(acc, acc_2, a_ring, b_ring, a_stage, a_parity, b_stage,
                                                         b_parity, view, tiling.resident)
        if tiling.ping_pong:
            mbarrier_arrive(barrier_at(buffers.turn, 1 - consumer))
        wgmma_wait(acc)
        if SUB == 2:
            wgmma_wait(acc_2)
        if view.elected:
            if not tiling.resident:
                consumer_release(b_ring, b_stage)
            consumer_release(a_ring, a_stage)
        a_stage, a_parity = advance(a_ring, a_stage, a_parity)
        b_stage, b_parity = advance_weight(b_ring, b_stage, b_parity, tiling.resident)

        mbarrier_wait(barrier_at(buffers.ready, consumer), out_parity)
        out_parity ^= uint32(1)
        addends_at = int32(buffers.addends_at + consumer * SUB * BN)
        stage_results(buffers.tiles, out, acc, buffers.addends, addends_at, epilogue)
        if SUB == 2:
            stage_results(buffers.tiles, int32(out + SLABS * SLAB_BYTES), acc_2, buffers.addends,
                          int32(addends_at + BN), epilogue)
        fence_proxy_async()
        mbarrier_arrive(barrier_at(buffers.written, consumer))


# The kernel -----------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def set_up(a_ring, b_ring, buffers):
    """Make all barriers; by one thread."""
    init_barriers(a_ring.full, MAX_A, 1)
    init_barriers(a_ring.empty, MAX_A, 2)
    init_barriers(b_ring.full, MAX_B, 1)
    init_barriers(b_ring.empty, MAX_B, 2)
    init_barriers(buffers.ready, 2, 32)
    init_barriers(buffers.written, 2, 128)
    init_barriers(buffers.turn, 2, 128)  # by all, so that none still waits for the last
    fence_barrier_init()


@requires("9.0a")
def convolve(maps, vectors, shape, tiling, epilogue):
    """maps: `Maps`, vectors: `Vectors`, shape: `Shape`, tiling: `Tiling`, epilogue: `Epilogue`."""
    tiles = cuda.shared.array(0, np.uint8, alignment=1024)
    addends = cuda.shared.array(0, np.float32, alignment=1024)  # sees the same memory
    barriers = cuda.shared.array(BARRIERS, np.uint64)
    first, base = smem_u32(barriers), smem_u32(tiles)
    out_at = int32(tiling.b_stages * B_BYTES)  # behind the weight's stages; then come the pixels', then the addends
    out_address = uint32(base + uint32(tiling.b_stages) * uint32(B_BYTES))
    a_ring = Ring(uint32(out_address + uint32(2 * OUT_BYTES)), tiling.a_bytes, tiling.a_stages, first,
                  barrier_at(first, MAX_A))
    b_ring = Ring(base, B_BYTES, tiling.b_stages, barrier_at(first, 2 * MAX_A), barrier_at(first, 2 * MAX_A + MAX_B))
    ready = barrier_at(first, 2 * MAX_A + 2 * MAX_B)
    buffers = Buffers(tiles, out_address, out_at, addends,
                      int32((out_at + 2 * OUT_BYTES + tiling.a_stages * tiling.a_bytes) >> 2),
                      ready, barrier_at(ready, 2), barrier_at(ready, 4))
    t = int32(cuda.threadIdx.x)
    if t == 0:
        set_up(a_ring, b_ring, buffers)
    cuda.syncthreads()
    boxes = boxes_of(shape, tiling)
    warpgroup = t >> 7
    if warpgroup == 0:
        producer_registers()
        if t == 0:
            load_pixels(a_ring, maps.x, boxes, shape, tiling)
        elif t == 96:
            load_weight(b_ring, maps.weight, boxes, shape, tiling)
        elif t >= 32 and t < 96:
            exchange(buffers, int32((t >> 5) - 1), maps, vectors, boxes, shape, tiling, epilogue)
    else:
        consumer_registers()
        consume(int32(warpgroup - 1), a_ring, b_ring, buffers, boxes, shape, tiling, epilogue)


def make_kernel(BN, SUB, taps_per_stage, transposed):
    """The kernel for tiles of BN output channels and 128 · SUB pixels; transposed: the input gradient."""
    kind = "input_gradient" if transposed else "forward"
    return specialise(convolve, name=f"conv2d_{kind}_kernel_v6_{128 * SUB}x{BN}_{taps_per_stage}",
                      launch_bounds=(THREADS, 1), BN=BN, SUB=SUB, TAPS_PER_STAGE=taps_per_stage, TRANSPOSED=transposed)


VARIANTS = tuple((bn, sub) for sub in (1, 2) for bn in WIDTHS)
conv2d_forward_kernels_v6, conv2d_input_gradient_kernels_v6 = (
    {(*tile, taps): make_kernel(*tile, taps, transposed) for tile in VARIANTS for taps in (1, 3)
     if (*tile, taps) != (128, 2, 3)}  # of these, no three stages fit beside the pixels
    for transposed in (False, True))


# Launchers ------------------------------------------------------------------------------------------------------------

class Plan(NamedTuple):
    """How one convolution is cut: tiles of width × height pixels of `images` images, by `bn` channels; its pipeline."""

    bn: int
    width: int
    height: int
    images: int
    whole_halo: bool
    a_stages: int
    a_bytes: int
    b_stages: int
    taps_per_stage: int
    resident: bool
    ping_pong: bool
    addends: bool
    tiles: int

    @property
    def pixels(self):
        return self.width * self.height * self.images

    @property
    def shared(self):
        stages = self.b_stages * self.taps_per_stage * self.bn * ROW + self.a_stages * self.a_bytes
        return stages + output_bytes(self.bn, self.pixels, self.addends)


# what the estimate of `choose_plan` is made of, from measurements on an H100; nanoseconds of one multiprocessor
BYTES_A_NS = 52.0  # from L2 to shared memory, all of them at it
CYCLES_A_NS = 1.55  # in which wgmma takes BN / 2 cycles, or a sixteenth of a KiB from shared memory one
START_NS = 4500.0  # launch to first product and last store
TILE_NS, OUTPUT_NS = 300.0, 0.107  # a tile's results: each tile, each of its numbers
ROUND_NS = 130.0  # a round of the consumers' loop, but what of it hides behind a quarter of its products


def output_bytes(bn, pixels, addends):
    """Shared memory for a tile's results, and for what is added to each channel of each 64 of its pixels."""
    return pixels * bn * 2 + (pixels // 64 * bn * 4 if addends else 0)


def plans(B, H, W, C, N, size, whole_halo, bn, sub, taps_per_stage, addends):
    """Every `Plan` with these tiles that fits into shared memory; the deepest pipeline for each."""
    pad, found = size // 2, []
    columns, steps = -(-N // bn), size * size * -(-C // BK)
    boxes = -(-C // BK) * (1 if whole_halo else size)  # of x for a tile
    for width in (8, 16, 32):
        for height in (8, 16, 32):
            images, rest = divmod(128 * sub, width * height)
            if rest or not images:
                continue
            b_bytes = taps_per_stage * bn * ROW
            box = (width + 2 * pad * whole_halo) * (height + 2 * pad) * images
            if max(width, height) + 2 * pad > 256:
                continue
            a_bytes = -(-box * ROW // 1024) * 1024
            tiles = columns * -(-W // width) * -(-H // height) * -(-B // images)
            left = SHARED - output_bytes(bn, 128 * sub, addends)
            for a_stages in (3, 2, 1)[:3 if boxes == 1 else 2]:  # a box goes back when the next has come
                b_stages, resident = min((left - a_stages * a_bytes) // b_bytes, MAX_B), False
                if columns == 1 and steps <= b_stages * taps_per_stage:
                    b_stages, resident = steps // taps_per_stage, True
                enough = 4 if taps_per_stage == 1 else 3
                if resident or b_stages >= enough or b_stages >= 2 and a_stages == taps_per_stage == 1:
                    found.append(Plan(bn, width, height, images, whole_halo, a_stages, a_bytes, b_stages,
                                      taps_per_stage, resident, resident and boxes <= a_stages, addends, tiles))
                    break
    return found


@functools.lru_cache(maxsize=4096)
def choose_plan(B, H, W, C, N, size, whole_halo, multiprocessors, only=None, taps_per_stage=None, addends=True):
    """(estimate of nanoseconds, `Plan`) with the lowest estimate; only: (BN, SUB), to choose from these tiles alone.

    taps_per_stage: of the weight, 1 or, of a 3 × 3 kernel, 3; None for either; addends: room for a bias's

    A block multiplies while its copies travel, so a tile takes the longer of the two, and a little.
    """
    best = None
    for (bn, sub), staged in itertools.product(VARIANTS, (1, 3)[:1 + (size == 3)]):
        if only not in (None, (bn, sub)) or taps_per_stage not in (None, staged):
            continue
        for plan in plans(B, H, W, C, N, size, whole_halo, bn, sub, staged, addends):
            blocks, taps = -(-C // BK), size * size
            loads = 1 if whole_halo else size
            moving = blocks * (loads * plan.a_bytes + (0 if plan.resident else taps * bn * ROW)) / BYTES_A_NS
            # A, 64 rows, crosses shared memory for each wgmma, and so does B
            tap = 8 * sub * max(bn / 2, 16 + bn / 4) / CYCLES_A_NS
            multiplied = blocks * taps * (tap + max(0.0, ROUND_NS - tap / 4) / plan.taps_per_stage)
            turns = -(-plan.tiles // multiprocessors)
            both = (1.3 if plan.a_stages == 1 else 1.0) * max(moving, multiplied) + 0.03 * min(moving, multiplied)
            estimate = START_NS + turns * (TILE_NS + OUTPUT_NS * plan.pixels * bn + both)
            if best is None or estimate < best[0]:
                best = estimate, plan
    if best is None:
        if only is not None or taps_per_stage is not None:
            raise ValueError(f"no plan with {only} (BN, SUB) and {taps_per_stage} taps in a stage for a "
                             f"{size} × {size} convolution of these arrays.")
        raise ValueError(f"a {size} × {size} convolution does not fit into shared memory: use version=1")
    return best


def hopper_supports(x, weight, stride):
    """Whether this rung takes these operands."""
    size, inputs = weight.shape[2:]
    return (supports(x, conv2d_forward_kernels_v6) and x.dtype == weight.dtype and is_half(x.dtype) and stride == 1
            and inputs % 8 == 0 and weight.shape[0] % 8 == 0 and size <= 7)


def statistics_shape(y_shape):
    """The shape of the statistics of a result (B, H, W, N), or None where 8 × 8 pixels do not tile its images."""
    B, H, W, N = y_shape
    return (B, H // 8 * (W // 8), 2, N // 2) if H % 8 == W % 8 == 0 else None


def hopper_convolution(x, weight, bias, y, channel=None, residual=None, gradient=False, whole_halo=True, only=None,
                       taps_per_stage=None, statistics=None):
    """y = conv2d(x, weight) + …, or with `gradient` the input gradient from x = dy; launcher.py has checked them.

    statistics: of `statistics_shape`, to be written; not with `gradient`
    """
    b, h, w, c = x.shape
    n, size = y.shape[3], weight.shape[1]
    backend = x.backend

    def planned(only=None, taps_per_stage=None):
        return choose_plan(assumed(b), h, w, c, n, size, bool(whole_halo), backend.multiprocessors, only,
                           taps_per_stage, bias is not None or channel is not None)[1]

    def measured(choice):
        bn, sub, taps = choice
        return planned((bn, sub), taps)

    if only is None and taps_per_stage is None:
        kind = "conv2d_input_gradient v6" if gradient else "conv2d v6"
        plan = tuned_or(planned, measured, backend, kind, assumed(b), h, w, c, n, size)
    else:
        plan = planned(only, taps_per_stage)
    if assumed(b) != b:  # the number of tiles that there really are
        plan = plan._replace(tiles=-(-n // plan.bn) * -(-w // plan.width) * -(-h // plan.height) * -(-b // plan.images))
    pad, columns = size // 2, 64 if plan.bn % 64 == 0 else 32
    map_x = tensor_map(x, (BK, plan.width + 2 * pad * plan.whole_halo, plan.height + 2 * pad, plan.images))
    taps = weight.reshape(weight.shape[0], size * size, weight.shape[3])
    if gradient:
        map_weight = tensor_map(taps, (columns, 1, BK), swizzle=2 * columns)
    else:
        map_weight = tensor_map(taps, (BK, 1, plan.bn))
    map_y = tensor_map(y, (columns, 8, 8, 1), swizzle=2 * columns)
    map_residual = map_y if residual is None else tensor_map(residual, (columns, 8, 8, 1), swizzle=2 * columns)
    nothing = no_numbers(backend)
    kernels = conv2d_input_gradient_kernels_v6 if gradient else conv2d_forward_kernels_v6
    kernel = in_bfloat16(kernels[plan.bn, plan.pixels // 128, plan.taps_per_stage], x.dtype)
    launch(kernel, min(plan.tiles, backend.multiprocessors), THREADS,
           Maps(map_x, map_weight, map_y, map_residual),
           Vectors(nothing if bias is None else bias, nothing if channel is None else channel.reshape(-1)),
           Shape(b, h, w, n, -(-c // BK), size),
           Tiling(int(plan.whole_halo), plan.width, plan.height, plan.images, plan.a_stages, plan.a_bytes,
                  plan.b_stages, int(plan.resident), int(plan.ping_pong)),
           Epilogue(int(bias is not None), int(channel is not None), int(residual is not None),
                    nothing if statistics is None else statistics.reshape(-1), int(statistics is not None)),
           shared=plan.shared)
    return y


def hopper_forward(x, weight, bias, y, channel=None, residual=None, whole_halo=True, statistics=None):
    """y = conv2d(x, weight) + bias + channel + residual; of it `statistics`, if an array for them is given."""
    return hopper_convolution(x, weight, bias, y, channel, residual, whole_halo=whole_halo, statistics=statistics)


def hopper_input_gradient(dy, weight, dx, whole_halo=True):
    """dx of a convolution of stride 1."""
    return hopper_convolution(dy, weight, None, dx, gradient=True, whole_halo=whole_halo)

