"""The weight's gradient of a depthwise convolution in 16 bits, version 4: TMA, and every pixel read
once for all taps.

WHAT IS NEW
    P[m, n] = Σ_k x[k, m] · dy[k, n], whose diagonals m - n are taps, as in mma.py; but k counts 16
    places of a tile, four strips of rows by four groups of 8 columns, instead of 16 rows. A step is
    a row of x of each strip. Its A, 16 columns at 16 places, is multiplied by the rows of dy that
    see it, into the sums of all rows of taps, and never read
    again: dy of a whole tile is in registers. A lane has the four groups of one strip: columns 8 …
    15 of a group are the first eight of the next, so it reads five pixels for a row of A, not
    eight. Nothing becomes planes on the way. x has two stages; dy has one, which is free as soon as
    it is in registers, before the first product.
WHY IT PAYS
    Counted for 128 pixels of 7 × 7 taps in strips of 7 rows: 13 cycles of shared memory to read, 5
    for TMA to write; 7 to issue; 7 products. 81 KB of x and 59 of dy are in flight while a tile is
    multiplied.
    For 64×56×56×96 on an H200 28 µs were predicted, with 3 for the sums over blocks, and 32 came,
    where version 3 takes 65 and memory alone 19; shared memory takes 14, tensor cores 9 to 11.
LAUNCH
    as hopper.py: a persistent grid, all tiles of a block of the same 32 channels; a warpgroup that
    carries, two that multiply, a warp four channels: 112 sums and 56 words of dy in registers.
    Tiles of 4 · 7 (4 · 4) × 32 pixels.
BANKS
    TMA's swizzle spreads the same channels of eight neighbours over all banks; of a half-warp four
    columns by four strips read 8 bytes each. So the strips begin 2 or 4 pixels apart, modulo 8:
    rows of x are 38 pixels long with strips of 7 rows, 39 with strips of 4, those of dy 34 or 33.
    Two lanes still share a bank, as in hopper.py.
DETERMINISM
    a block adds up its tiles in their order; the blocks' sums are in a separate array, which
    kernels/reduce/trees.py adds up.
    With another number of multiprocessors the blocks have other tiles.
SOURCE
    as hopper.py and mma.py.
READ NEXT
    attention/hopper_tiles.py
"""

from typing import NamedTuple

import numpy as np

from ....device import cuda, empty, float32, int32, launch, uint32
from ....device.common import divide
from ....device.half import in_bfloat16
from ....device.mbarrier import bar_sync, fence_barrier_init, smem_u32
from ....device.pipeline import (
    Ring,
    advance,
    barrier_at,
    consumer_release,
    consumer_start,
    consumer_wait,
    init_ring,
    producer_acquire,
    producer_start,
    stage_at,
)
from ....device.requires import requires
from ....device.specialise import Constant, Variants, specialise
from ....device.tensor_core import high_halves, load_words2, low_halves, mma_m16n8k16_into
from ....device.tensor_map import tensor_map
from ....device.tma import tma_load_4d, tma_prefetch
from ....kernels.reduce.second_pass import add_rows
from .hopper import (
    BLOCK_OF_8,
    CHANNELS,
    CONSUMERS,
    STEPS,
    STRIP,
    STRIPS,
    THREADS,
    WIDTH,
    DepthwiseWork,
    blocks_of,
    consumer_registers,
    producer_registers,
)
from .mma import KERNELS, SHARE, DepthwiseMmaImage, K, place_of, store_diagonals

HEIGHTS = 7, 4  # of a strip
PITCHES, DY_PITCHES = {7: 38, 4: 39}, {7: 34, 4: 33}  # pixels from row to row
ALIGNED = 512  # elements, 1024 bytes

PITCH, DY_PITCH = Constant(lambda STRIP: PITCHES[STRIP]), Constant(lambda STRIP: DY_PITCHES[STRIP])
# elements of x
STAGE = Constant(lambda ROWS, K, PITCH: -(-(ROWS + K - 1) * PITCH * CHANNELS // ALIGNED) * ALIGNED)
BYTES = Constant(lambda ROWS, K, PITCH: 2 * (ROWS + K - 1) * PITCH * CHANNELS)
STAGE_BYTES = Constant(lambda STAGE: 2 * STAGE)
DY_BYTES = Constant(lambda ROWS, DY_PITCH: 2 * ROWS * DY_PITCH * CHANNELS)
SUMS = Constant(lambda K: 16 * K)  # of a lane: four of each row of taps and channel
GRADIENTS = Constant(lambda STRIP: 8 * STRIP)  # words of dy of a lane


class DepthwiseGradientLane(NamedTuple):
    """What a lane reads: its pixel in row 0 of its strip, in x's first block of eight, in x's last,
    in dy's first; and which eighth of a pixel."""

    pixel: int
    last: int
    dy: int
    quad: int


# Carrying: one thread -----------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def request_tile(tensor, ring, stage, parity, size, n, pad, work, image):
    """Load tile n, with `pad` pixels on its left and above."""
    tile, part = divide(n, work.slices)
    b, top, left = place_of(tile, image)
    full = producer_acquire(ring, stage, parity, size)
    tma_load_4d(
        stage_at(ring, stage),
        tensor,
        full,
        uint32(part * CHANNELS),
        uint32(left - pad),
        uint32(top - pad),
        uint32(b),
    )
    return advance(ring, stage, parity)


@cuda.jit(device=True, forceinline=True)
def bring_tiles(map_dy, map_x, x_ring, dy_ring, work, image):
    """All tiles of the block; x one ahead."""
    tma_prefetch(map_x)
    tma_prefetch(map_dy)
    start, step = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
    stage, parity = producer_start()
    dy_stage, dy_parity = producer_start()
    stage, parity = request_tile(map_x, x_ring, stage, parity, BYTES, start, K // 2, work, image)
    for n in range(start, int32(work.tiles), step):
        dy_stage, dy_parity = request_tile(
            map_dy, dy_ring, dy_stage, dy_parity, DY_BYTES, n, 0, work, image
        )
        if n + step < work.tiles:
            stage, parity = request_tile(
                map_x, x_ring, stage, parity, BYTES, int32(n + step), K // 2, work, image
            )


# Multiplying: a warp four channels ----------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def element_of(pixel, quad):
    """The element of a stage at which four channels of a pixel begin."""
    return int32(pixel * CHANNELS + ((quad >> 1 ^ pixel >> 1) & 3) * 8 + 4 * (quad & 1))


@cuda.jit(device=True, forceinline=True)
def read_gradient(gradients, memory, at, lane):
    """gradients[8 · row + 2 · channel …] = the words of B: column lane // 4 of the strip's groups
    0, 1 and 2, 3."""
    for row in range(STRIP):
        here = int32(at + element_of(int32(lane.dy + row * DY_PITCH), lane.quad))
        for h in range(2):
            a0, a1 = load_words2(memory, here + 2 * h * BLOCK_OF_8)
            z0, z1 = load_words2(memory, here + (2 * h + 1) * BLOCK_OF_8)
            gradients[8 * row + h], gradients[8 * row + 2 + h] = (
                low_halves(a0, z0),
                high_halves(a0, z0),
            )
            gradients[8 * row + 4 + h], gradients[8 * row + 6 + h] = (
                low_halves(a1, z1),
                high_halves(a1, z1),
            )


@cuda.jit(device=True, forceinline=True)
def read_row(words, memory, at, t, lane):
    """words[4 · channel …] = A: columns lane // 4 and 8 more of the strip's groups 0 and 1, then of
    2 and 3; row t."""
    here = int32(at + element_of(int32(lane.pixel + t * PITCH), lane.quad))
    a0, a1 = load_words2(memory, here)
    for n in range(4):
        if n < 3:
            here = int32(here + BLOCK_OF_8)
        else:
            here = int32(at + element_of(int32(lane.last + t * PITCH), lane.quad))
        z0, z1 = load_words2(memory, here)
        words[n], words[4 + n] = low_halves(a0, z0), high_halves(a0, z0)
        words[8 + n], words[12 + n] = low_halves(a1, z1), high_halves(a1, z1)
        a0, a1 = z0, z1


@cuda.jit(device=True, forceinline=True)
def add_row(acc, gradients, memory, at, t, lane):
    """acc[4 · (K · channel + r) …] += row t of x of each strip by the row t - r of dy, for all rows
    of taps r."""
    if t >= STEPS:
        return
    words = cuda.local.array(16, "uint32")
    read_row(words, memory, at, t, lane)
    for k in range(4):
        a = words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]
        for r in range(K):
            if t - r >= 0 and t - r < STRIP:
                b = 8 * (t - r) + 2 * k
                mma_m16n8k16_into(acc, 4 * (K * k + r), a, (gradients[b], gradients[b + 1]))


@cuda.jit(device=True, forceinline=True)
def add_tile(acc, gradients, memory, at, lane):
    """All rows of a tile; by hand, since the compiler does not unroll so long a loop."""
    add_row(acc, gradients, memory, at, 0, lane)
    add_row(acc, gradients, memory, at, 1, lane)
    add_row(acc, gradients, memory, at, 2, lane)
    add_row(acc, gradients, memory, at, 3, lane)
    add_row(acc, gradients, memory, at, 4, lane)
    add_row(acc, gradients, memory, at, 5, lane)
    add_row(acc, gradients, memory, at, 6, lane)
    add_row(acc, gradients, memory, at, 7, lane)
    add_row(acc, gradients, memory, at, 8, lane)
    add_row(acc, gradients, memory, at, 9, lane)
    add_row(acc, gradients, memory, at, 10, lane)
    add_row(acc, gradients, memory, at, 11, lane)
    add_row(acc, gradients, memory, at, 12, lane)


@cuda.jit(device=True, forceinline=True)
def store_sums(acc, memory, warp, partial, at, C, lane):
    """The sums of four channels at partial[at + tap · C …]."""
    mine = int32(warp * SHARE)
    store_diagonals(acc, 0, memory, mine, partial, at, C, lane)
    store_diagonals(acc, 4 * K, memory, mine, partial, int32(at + 1), C, lane)
    store_diagonals(acc, 8 * K, memory, mine, partial, int32(at + 2), C, lane)
    store_diagonals(acc, 12 * K, memory, mine, partial, int32(at + 3), C, lane)


@cuda.jit(device=True, forceinline=True)
def multiply_tiles(memory, x_ring, dy_ring, partial, work, image):
    """Eight warps: the sums over all tiles of the block."""
    warp, lane = divide(int32(cuda.threadIdx.x) - (THREADS - CONSUMERS), int32(32))
    part, piece = divide(int32(cuda.blockIdx.x), work.slices)
    c = int32(piece * CHANNELS + 4 * warp)
    column, strip = int32(lane >> 2), int32(lane & 3)
    first = int32(strip * STRIP * PITCH)
    # of the last block columns 6 and 7 are taps' that there are not, and are outside
    where = DepthwiseGradientLane(
        int32(first + column),
        int32(first + 32 + min(column, 5)),
        int32(strip * STRIP * DY_PITCH + column),
        warp,
    )
    acc, gradients = cuda.local.array(SUMS, "float32"), cuda.local.array(GRADIENTS, "uint32")
    for n in range(SUMS):
        acc[n] = float32(0)
    stage, parity = consumer_start()
    dy_stage, dy_parity = consumer_start()
    for _ in range(int32(cuda.blockIdx.x), int32(work.tiles), int32(cuda.gridDim.x)):
        consumer_wait(dy_ring, dy_stage, dy_parity)
        read_gradient(gradients, memory, int32(2 * STAGE), where)
        consumer_release(dy_ring, dy_stage)
        dy_stage, dy_parity = advance(dy_ring, dy_stage, dy_parity)
        consumer_wait(x_ring, stage, parity)
        if c < image.C:
            add_tile(acc, gradients, memory, int32(stage * STAGE), where)
        consumer_release(x_ring, stage)
        stage, parity = advance(x_ring, stage, parity)
    bar_sync(uint32(1), uint32(CONSUMERS))  # all have read the last tile
    if c < image.C:
        store_sums(acc, memory, warp, partial, int32(part * K * K * image.C + c), image.C, lane)


# The kernel ---------------------------------------------------------------------------------------


@requires("9.0a")
def depthwise_weight_gradient_kernel_v4(map_dy, map_x, like, partial, work, image):
    """partial (blocks of a slice, K, K, C): the sums over each block's tiles. like: an array of x's
    type; work: `DepthwiseWork`, image: mma.py's `DepthwiseMmaImage`."""
    memory = cuda.shared.array(0, like.dtype.type, alignment=1024)
    barriers = cuda.shared.array(6, np.uint64)
    base, full = smem_u32(memory), smem_u32(barriers)
    x_ring = Ring(base, STAGE_BYTES, 2, full, barrier_at(full, 2))
    dy_ring = Ring(
        uint32(base + uint32(2 * STAGE_BYTES)),
        DY_BYTES,
        1,
        barrier_at(full, 4),
        barrier_at(full, 5),
    )
    if cuda.threadIdx.x == 0:
        init_ring(x_ring, 1, CONSUMERS)
        init_ring(dy_ring, 1, CONSUMERS)
        fence_barrier_init()
    cuda.syncthreads()
    if cuda.threadIdx.x < THREADS - CONSUMERS:
        producer_registers()
        if cuda.threadIdx.x == 0:
            bring_tiles(map_dy, map_x, x_ring, dy_ring, work, image)
    else:
        consumer_registers()
        multiply_tiles(memory, x_ring, dy_ring, partial, work, image)


WEIGHT_GRADIENT = Variants(
    [(kernel, height) for kernel in KERNELS for height in HEIGHTS],
    lambda key: specialise(
        depthwise_weight_gradient_kernel_v4,
        launch_bounds=(THREADS, 1),
        K=key[0],
        ROWS=STRIPS * key[1],
        COLUMNS=WIDTH,
    ),
)


# Launcher -----------------------------------------------------------------------------------------


def add_weight_gradient(dy, x, dweight):
    """Add to dweight."""
    (B, H, W, C), kernel = x.shape, len(dweight)
    height = min(HEIGHTS, key=lambda each: -(-H // (STRIPS * each)) * each)
    rows, slices = STRIPS * height, -(-C // CHANNELS)
    work = DepthwiseWork(slices, B * -(-H // rows) * -(-W // WIDTH) * slices)
    blocks = blocks_of(work, x.backend.multiprocessors)
    partial = empty((blocks // slices, dweight.size), np.float32, like=x)
    stage = -(-(rows + kernel - 1) * PITCHES[height] * CHANNELS // ALIGNED) * ALIGNED
    launch(
        in_bfloat16(WEIGHT_GRADIENT[kernel, height], x.dtype),
        blocks,
        THREADS,
        tensor_map(dy, (CHANNELS, DY_PITCHES[height], rows, 1), swizzle=64),
        tensor_map(x, (CHANNELS, PITCHES[height], rows + kernel - 1, 1), swizzle=64),
        x.reshape(-1),
        partial.reshape(-1),
        work,
        DepthwiseMmaImage(H, W, C, 0, 0, 0, 0),
        shared=2 * (2 * stage + rows * DY_PITCHES[height] * CHANNELS),
    )
    add_rows(partial, dweight.reshape(-1))
