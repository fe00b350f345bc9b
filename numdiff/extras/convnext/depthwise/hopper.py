"""Depthwise convolution in 16 bits, version 4: TMA, strips of rows, and every pixel read once for
all rows of taps.

WHAT IS NEW
    A tile of pixels with its halo, of 32 channels, is loaded by TMA in its stored layout, channels
    last, while the tile before it is multiplied; pixels outside the image are zeros. Nothing turns
    channels into planes: a lane reads four channels of two pixels, 16 bytes, and four `prmt` make
    of them a word of A for each channel. Which pixels k counts is free, if the band of taps counts
    them so, too: a lane has pixels l and l + 4 of a block of eight.
    The 16 rows of A are 8 strips of neighbouring rows of the image, two runs of 8 outputs each. A
    step is a row of each
    strip: its A is multiplied by the bands of all rows of taps, into the sums of up to 7 rows of
    outputs at once, and never read again. Version 3 reads it once for each row of taps.
    The outputs overwrite the tile, when all warps have read it, and leave by TMA, a box of whole
    64-byte pixels.
WHY IT PAYS
    Counted for 128 outputs of 7 × 7 taps in strips of 7 rows: 11 cycles of shared memory to read
    pixels, where version 3 has 28, 9 for the outputs and TMA; 6 to issue, where it has 20; none of
    the 30 for lines of the L1 cache, which TMA leaves out. 7 products, as there. A multiprocessor
    has 85 KB in flight while it multiplies: memory at 4.1 TB/s with 0.7 µs of latency needs 22.
    For 64×56×56×96 on an H200 27 µs were predicted, and 29 came, where version 3 takes 65 and
    memory alone 19; shared memory takes 15, tensor cores 9 to 11, one eighth of each for columns
    from 56 on.
NOT FINITE pixels spoil the eight outputs of their run and those of the run before, as in version 3.
LAUNCH
    a persistent grid, at most a block for each multiprocessor, all of whose tiles are of the same
    32 channels; tiles of 4 · 7 (4 · 8, 4 · 4) × 32 pixels, two stages of 87 (97, 56) KB. A
    warpgroup carries, two multiply: a warp has four channels of the whole tile, their taps in 56
    registers, 112 sums.
BANKS
    A pixel is 64 bytes, TMA's swizzle spreads the same channels of eight neighbours over all banks.
    A half-warp, four strips by four lanes l, reads 8 bytes each: the odd strips read pixel l + 4
    first, the even ones l, or all of them would have the same four of the eight. Two lanes still
    share a bank: four channels are half of 16 bytes.
DETERMINISM
    one warp sums each output in the order of the rows of taps.
SOURCE
    PTX ISA, sections 9.7.9.27 (TMA), 9.7.13.15 (mbarrier), 9.7.14.5 (mma), 9.7.9.7 (prmt); the
    derivation is above and in mma.py.
READ NEXT
    hopper_weight_gradient.py
"""

from typing import NamedTuple

import numpy as np

from ....device import cuda, float32, int32, launch, load4, uint32
from ....device.common import divide, no_numbers
from ....device.half import in_bfloat16
from ....device.mbarrier import (
    bar_sync,
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_wait,
    smem_u32,
)
from ....device.pipeline import barrier_at, init_barriers
from ....device.requires import requires
from ....device.specialise import Constant, Variants, specialise
from ....device.tensor_core import (
    choose_bytes,
    high_halves,
    load_words2,
    load_words4,
    low_halves,
    mma_m16n8k16_into,
    pack_half2,
    store_words2,
    store_words4,
)
from ....device.tensor_map import tensor_map
from ....device.tma import (
    fence_proxy_async,
    tma_load_4d,
    tma_prefetch,
    tma_store_4d,
    tma_store_commit,
    tma_store_wait_read_0,
)
from ....device.wgmma import make_setmaxnreg
from .mma import KERNELS, ROWS, DepthwiseMmaImage, K, add_words, place_of

CHANNELS, WIDTH, STRIPS = 32, 32, 4  # of a tile: channels, columns, strips below each other
PITCH = WIDTH + 8  # pixels of a row with its halo: the last two have no taps
ROW, OUT_ROW = PITCH * CHANNELS, WIDTH * CHANNELS  # elements of a row of pixels, of outputs
BLOCK_OF_8 = 8 * CHANNELS  # elements from a run, or a block of pixels, to the next
HEIGHTS = 7, 8, 4  # of a strip
CONSUMERS, THREADS = 256, 384  # eight warps, four channels each; and the warpgroup that carries

RESIDUAL = Constant()  # whether something is added to each output
STRIP = Constant(lambda ROWS: ROWS // STRIPS)
STEPS = Constant(lambda STRIP, K: STRIP + K - 1)  # rows that a strip sees
STAGE = Constant(lambda ROWS, K: (ROWS + K - 1) * ROW)  # elements
STAGE_BYTES = Constant(lambda STAGE: 2 * STAGE)
# of a lane: four pixels of four channels in each row of outputs
SUMS = Constant(lambda STRIP: 16 * STRIP)
WORDS = Constant(lambda STRIP: 8 * STRIP)  # the same, rounded
TAPS = Constant(lambda K: 8 * K)  # words of a lane: two for each row of taps and channel

producer_registers, consumer_registers = make_setmaxnreg(24, False), make_setmaxnreg(240, True)


class DepthwiseWork(NamedTuple):
    """How many slices of channels there are, and how many tiles of all of them."""

    slices: int
    tiles: int


class DepthwiseLane(NamedTuple):
    """The places of a lane's elements, from the start of a tile.

    first, second: of the two pixels that it reads, of outputs that it writes; low, high: how to
    make words of a channel of what it has read; odd: whether pixel l + 4 is the first
    """

    first: int
    second: int
    first_out: int
    second_out: int
    low: int
    high: int
    odd: int


# Carrying: one thread -----------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def request_tile(map_x, full, address, n, work, image):
    """Load tile n, if there is one."""
    if n < work.tiles:
        tile, part = divide(n, work.slices)
        b, top, left = place_of(tile, image)
        mbarrier_expect_tx(full, uint32(STAGE_BYTES))
        tma_load_4d(
            address,
            map_x,
            full,
            uint32(part * CHANNELS),
            uint32(left - K // 2),
            uint32(top - K // 2),
            uint32(b),
        )


@cuda.jit(device=True, forceinline=True)
def carry_tiles(map_x, map_y, base, full, written, work, image):
    """Bring pixels into two stages by turns, and outputs from there."""
    tma_prefetch(map_x)
    tma_prefetch(map_y)
    start, step = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
    for stage in range(2):
        request_tile(
            map_x,
            barrier_at(full, stage),
            uint32(base + uint32(stage * STAGE_BYTES)),
            int32(start + stage * step),
            work,
            image,
        )
    stage, parity = int32(0), uint32(0)
    for n in range(start, int32(work.tiles), step):
        address = uint32(base + uint32(stage) * uint32(STAGE_BYTES))
        tile, part = divide(n, work.slices)
        b, top, left = place_of(tile, image)
        mbarrier_wait(barrier_at(written, stage), parity)
        tma_store_4d(address, map_y, uint32(part * CHANNELS), uint32(left), uint32(top), uint32(b))
        tma_store_commit()
        tma_store_wait_read_0()
        request_tile(map_x, barrier_at(full, stage), address, int32(n + 2 * step), work, image)
        stage, parity = int32(1 - stage), uint32(parity ^ uint32(stage))


# Multiplying: a warp four channels ----------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def lane_at(quad, lane):
    """The `DepthwiseLane` of the warp with channels 4 · quad …: rows g and g + 8 of A are two runs
    of strip g % 4, the first or the last two."""
    l, strip, pair = int32(lane & 3), int32(lane >> 2 & 3), int32(lane >> 4)
    odd = int32(strip & 1)
    p, q = int32(l + 4 * odd), int32(l + 4 - 4 * odd)
    first = int32(p * CHANNELS + ((quad >> 1 ^ p >> 1) & 3) * 8 + 4 * (quad & 1))
    second = int32(q * CHANNELS + ((quad >> 1 ^ q >> 1) & 3) * 8 + 4 * (quad & 1))
    at = int32(strip * STRIP * ROW + 2 * pair * BLOCK_OF_8)
    out = int32(strip * STRIP * OUT_ROW + 2 * pair * BLOCK_OF_8)
    return DepthwiseLane(
        int32(at + first),
        int32(at + second),
        int32(out + first),
        int32(out + second),
        uint32(0x1054) if odd else uint32(0x5410),
        uint32(0x3276) if odd else uint32(0x7632),
        odd,
    )


@cuda.jit(device=True, forceinline=True)
def load_tap(weight, r, e, c, image):
    """Tap e of row r of four channels, as two words; zeros where there is none."""
    a = b = uint32(0)
    if e < K and c < image.C:
        tap = int32(K * K - 1 - r * K - e) if image.flip else int32(r * K + e)
        a, b = load_words2(weight, tap * image.C + c)
    return a, b


@cuda.jit(device=True, forceinline=True)
def load_bands(taps, weight, c, lane, image):
    """taps[8 · r + 2 · channel …]: the two words of B of a row of taps: those of pixels l, l + 4
    and l + 8, l + 12, seen by the output n of a run, its pixel n // 2 + 4 · (n % 2). Of l and l + 8
    at most one has a tap."""
    n = int32(lane >> 2)
    distance = int32((lane & 3) - (n >> 1) - 4 * (n & 1))
    zero = uint32(0)
    near, far = distance >= 0, distance >= -4  # whether l, and l + 4, have it
    for r in range(K):
        a0, a1 = load_tap(weight, int32(r), int32(distance & 7), c, image)
        z0, z1 = load_tap(weight, int32(r), int32(distance + 4 & 7), c, image)
        b0, b1, y0, y1 = (
            a0 if near else zero,
            a1 if near else zero,
            z0 if far else zero,
            z1 if far else zero,
        )
        taps[8 * r], taps[8 * r + 2] = low_halves(b0, y0), high_halves(b0, y0)
        taps[8 * r + 4], taps[8 * r + 6] = low_halves(b1, y1), high_halves(b1, y1)
        b0, b1, y0, y1 = (
            zero if near else a0,
            zero if near else a1,
            zero if far else z0,
            zero if far else z1,
        )
        taps[8 * r + 1], taps[8 * r + 3] = low_halves(b0, y0), high_halves(b0, y0)
        taps[8 * r + 5], taps[8 * r + 7] = low_halves(b1, y1), high_halves(b1, y1)


@cuda.jit(device=True, forceinline=True)
def load_added(added, bias, channel, c, b, image):
    """What is added to each of four channels, of image b."""
    b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = float32(0)
    if image.bias:
        b0, b1, b2, b3 = load4(bias, c)
    if image.channel:
        c0, c1, c2, c3 = load4(channel, b * image.C + c)
    added[0], added[1], added[2], added[3] = b0 + c0, b1 + c1, b2 + c2, b3 + c3


@cuda.jit(device=True, forceinline=True)
def read_blocks(blocks, pixels, at, lane):
    """Three blocks of eight pixels of a row of each strip: blocks[4 · channel + …], words of pixels
    l and l + 4."""
    for n in range(3):
        a0, a1 = load_words2(pixels, lane.first + (at + n * BLOCK_OF_8))
        z0, z1 = load_words2(pixels, lane.second + (at + n * BLOCK_OF_8))
        blocks[n], blocks[4 + n] = choose_bytes(a0, z0, lane.low), choose_bytes(a0, z0, lane.high)
        blocks[8 + n], blocks[12 + n] = (
            choose_bytes(a1, z1, lane.low),
            choose_bytes(a1, z1, lane.high),
        )


@cuda.jit(device=True, forceinline=True)
def multiply_row(acc, words, pixels, taps, added, t, lane):
    """Step t: row t of each strip, through all rows of taps, into the sums of rows t - K + 1 … t of
    outputs."""
    if t >= STEPS:
        return
    blocks = cuda.local.array(16, "uint32")
    read_blocks(blocks, pixels, t * ROW, lane)
    for k in range(4):
        s0, s1, s2 = blocks[4 * k], blocks[4 * k + 1], blocks[4 * k + 2]
        if t < STRIP:
            for e in range(4):
                acc[16 * t + 4 * k + e] = added[k]
        for r in range(K):
            if t - r >= 0 and t - r < STRIP:
                mma_m16n8k16_into(
                    acc,
                    16 * (t - r) + 4 * k,
                    (s0, s1, s1, s2),
                    (taps[8 * r + 2 * k], taps[8 * r + 2 * k + 1]),
                )
    if t >= K - 1:
        row = t - (K - 1)
        for e in range(4):
            words[8 * row + 2 * e] = pack_half2(acc[16 * row + e], acc[16 * row + 4 + e])
            words[8 * row + 2 * e + 1] = pack_half2(acc[16 * row + 8 + e], acc[16 * row + 12 + e])


@cuda.jit(device=True, forceinline=True)
def multiply_tile(words, pixels, taps, added, lane):
    """words[8 · row …]: a lane's outputs, rounded: of each of its four pixels two words of two
    channels. `pixels`: the stage. By hand, since the compiler does not unroll so long a loop."""
    acc = cuda.local.array(SUMS, "float32")
    multiply_row(acc, words, pixels, taps, added, 0, lane)
    multiply_row(acc, words, pixels, taps, added, 1, lane)
    multiply_row(acc, words, pixels, taps, added, 2, lane)
    multiply_row(acc, words, pixels, taps, added, 3, lane)
    multiply_row(acc, words, pixels, taps, added, 4, lane)
    multiply_row(acc, words, pixels, taps, added, 5, lane)
    multiply_row(acc, words, pixels, taps, added, 6, lane)
    multiply_row(acc, words, pixels, taps, added, 7, lane)
    multiply_row(acc, words, pixels, taps, added, 8, lane)
    multiply_row(acc, words, pixels, taps, added, 9, lane)
    multiply_row(acc, words, pixels, taps, added, 10, lane)
    multiply_row(acc, words, pixels, taps, added, 11, lane)
    multiply_row(acc, words, pixels, taps, added, 12, lane)
    multiply_row(acc, words, pixels, taps, added, 13, lane)


@cuda.jit(device=True, forceinline=True)
def stage_outputs(outputs, words, lane):
    """Store them where the pixels were."""
    for row in range(STRIP):
        for run in range(2):
            n, at = 8 * row + 4 * run, row * OUT_ROW + run * BLOCK_OF_8
            a, b, c, d = words[n], words[n + 1], words[n + 2], words[n + 3]
            store_words2(outputs, lane.first_out + at, c if lane.odd else a, d if lane.odd else b)
            store_words2(outputs, lane.second_out + at, a if lane.odd else c, b if lane.odd else d)


@cuda.jit(device=True, forceinline=True)
def add_residual(outputs, residual, place, first, image):
    """outputs += residual, 16 bytes a thread; by all that multiply."""
    b, top, left = place
    t = int32(cuda.threadIdx.x) - (THREADS - CONSUMERS)
    row, column, chunk = int32(t >> 7), int32(t >> 2 & 31), int32(t & 3)
    at = int32((row * WIDTH + column) * CHANNELS + 8 * ((chunk ^ column >> 1) & 3))
    if left + column < image.W and first + 8 * chunk < image.C:
        here = int32(
            ((b * image.H + top + row) * image.W + left + column) * image.C + first + 8 * chunk
        )
        for _ in range(row, int32(min(ROWS, image.H - top)), 2):
            w0, w1, w2, w3 = load_words4(outputs, at)
            r0, r1, r2, r3 = load_words4(residual, here)
            store_words4(
                outputs,
                at,
                add_words(w0, r0),
                add_words(w1, r1),
                add_words(w2, r2),
                add_words(w3, r3),
            )
            at, here = int32(at + 2 * OUT_ROW), int32(here + 2 * image.W * image.C)


@cuda.jit(device=True, forceinline=True)
def multiply_tiles(memory, full, written, weight, bias, channel, residual, work, image):
    """Eight warps: all tiles of the block."""
    warp, lane = divide(int32(cuda.threadIdx.x) - (THREADS - CONSUMERS), int32(32))
    first = int32(divide(int32(cuda.blockIdx.x), work.slices)[1] * CHANNELS)  # of all its tiles
    c = int32(first + 4 * warp)
    where = lane_at(warp, lane)
    taps, words = cuda.local.array(TAPS, "uint32"), cuda.local.array(WORDS, "uint32")
    added = cuda.local.array(4, "float32")
    load_bands(taps, weight, c, lane, image)
    stage, parity = int32(0), uint32(0)
    for n in range(int32(cuda.blockIdx.x), int32(work.tiles), int32(cuda.gridDim.x)):
        place = place_of(divide(n, work.slices)[0], image)
        pixels = memory[stage * STAGE :]
        if c < image.C:
            load_added(added, bias, channel, c, place[0], image)
        mbarrier_wait(barrier_at(full, stage), parity)
        if c < image.C:
            multiply_tile(words, pixels, taps, added, where)
        bar_sync(uint32(1), uint32(CONSUMERS))  # all have read the pixels
        if c < image.C:
            stage_outputs(pixels, words, where)
        if RESIDUAL:
            bar_sync(uint32(1), uint32(CONSUMERS))
            add_residual(pixels, residual, place, first, image)
        fence_proxy_async()
        mbarrier_arrive(barrier_at(written, stage))
        stage, parity = int32(1 - stage), uint32(parity ^ uint32(stage))


# The kernel ---------------------------------------------------------------------------------------


@requires("9.0a")
def depthwise_forward_kernel_v4(map_x, map_y, weight, bias, channel, residual, work, image):
    """work: `DepthwiseWork`, image: mma.py's `DepthwiseMmaImage`."""
    memory = cuda.shared.array(0, weight.dtype.type, alignment=1024)
    barriers = cuda.shared.array(4, np.uint64)
    full = smem_u32(barriers)
    written = barrier_at(full, 2)
    if cuda.threadIdx.x == 0:
        init_barriers(full, 2, 1)
        init_barriers(written, 2, CONSUMERS)
        fence_barrier_init()
    cuda.syncthreads()
    if cuda.threadIdx.x < THREADS - CONSUMERS:
        producer_registers()
        if cuda.threadIdx.x == 0:
            carry_tiles(map_x, map_y, smem_u32(memory), full, written, work, image)
    else:
        consumer_registers()
        multiply_tiles(memory, full, written, weight, bias, channel, residual, work, image)


def heights(kernel, residual):
    """Of strips: with strips of 8 rows, 7 × 7 taps and a residual ptxas would spill registers."""
    return tuple(height for height in HEIGHTS if (height, kernel, residual) != (8, 7, True))


FORWARD = Variants(
    [
        (kernel, height, residual)
        for kernel in KERNELS
        for residual in (False, True)
        for height in heights(kernel, residual)
    ],
    lambda key: specialise(
        depthwise_forward_kernel_v4,
        launch_bounds=(THREADS, 1),
        K=key[0],
        ROWS=STRIPS * key[1],
        RESIDUAL=key[2],
        COLUMNS=WIDTH,
    ),
)


# Launcher -----------------------------------------------------------------------------------------


def height_of(H, kernel, residual):
    """Rows of a strip, so that the fewest rows of tiles are below an image."""
    return min(heights(kernel, residual), key=lambda height: -(-H // (STRIPS * height)) * height)


def blocks_of(work, multiprocessors):
    """As many as there are multiprocessors, about: a multiple of the slices, so that a block has
    the same channels in all tiles."""
    return min(work.tiles, max(work.slices, multiprocessors - multiprocessors % work.slices))


def convolve(x, weight, bias, channel, residual, y, flip):
    """As mma.py's."""
    (B, H, W, C), nothing, kernel = x.shape, no_numbers(x.backend), len(weight)
    height = height_of(H, kernel, residual is not None)
    rows, slices = STRIPS * height, -(-C // CHANNELS)
    work = DepthwiseWork(slices, B * -(-H // rows) * -(-W // WIDTH) * slices)
    variant = in_bfloat16(FORWARD[kernel, height, residual is not None], x.dtype)
    launch(
        variant,
        blocks_of(work, x.backend.multiprocessors),
        THREADS,
        tensor_map(x, (CHANNELS, PITCH, rows + kernel - 1, 1), swizzle=64),
        tensor_map(y, (CHANNELS, WIDTH, rows, 1), swizzle=64),
        weight.reshape(-1),
        *(nothing if a is None else a.reshape(-1) for a in (bias, channel)),
        (x if residual is None else residual).reshape(-1),
        work,
        DepthwiseMmaImage(H, W, C, flip, *(int(a is not None) for a in (bias, channel, residual))),
        shared=2 * 2 * (rows + kernel - 1) * ROW,
    )
