"""The convolution's weight gradient on Hopper's tensor cores: pixels are the inner dimension.

MATHEMATICS
    dweight[n, tap, c] += Σ_p dy[p, n] · x[p + tap - pad, c]          dbias[n] += Σ_p dy[p, n]
    For each tap a matrix product: the transposed dy (n × pixels) by x (pixels × c), moved by the
    tap.
SHAPES
    dy (B, H, W, N), x (B, H, W, C): float16 or bfloat16; dweight (N, kernel, kernel, C), dbias
    (N,): float32, added to C and N multiples of 8, kernel odd, stride 1
VERSIONS
    v5 hopper-columns, v6 hopper: x comes in a box for each column of taps, or in one with its whole
    halo (boxes.py). All nine taps of a 3 × 3 kernel read the same boxes: dy crosses from L2 once
    for nine products, x 1.27 times.
ROLES  (512 threads: four warpgroups)
    warp 0 loads boxes of dy and x              one stage for each group of 128 or 256 pixels
    warps 1, 2 sum 32 of dy's columns each      while the boxes are there anyway, for dbias
    warpgroups 1, 2, 3 multiply three taps each: three times 64 × 64 sums, 96 registers of a thread
    In both matrices the inner dimension, the pixels, runs from row to row (eight pixels of an image
    row are eight rows of 128 bytes). wgmma reads float16 operands that way, too, so nothing is
    transposed.
LAUNCH
    grid (tiles of 64 × 64 channels × groups of nine taps, parts): the pixels are shared among as
    many parts as fill the GPU.
DETERMINISM
    a part writes its own sums, in the order in which registers hold them (so each warp writes 512
    neighbouring bytes); a second kernel adds the parts in a fixed order to dweight. How many parts
    there are depends on the shape and the GPU's size.
COST
    FLOPs as in ../direct.py; the parts cost 2 · 4 · parts · N · kernel² · C bytes, mostly in the L2
    cache.
SOURCE
    PTX ISA, section 9.7.15; Chetlur et al. 2014, "cuDNN", arXiv:1410.0759.
READ NEXT
    weight_gradient_plan.py
"""

from typing import NamedTuple

import numpy as np

from ....device import (
    cuda,
    device_inline,
    empty,
    fill_zero,
    float32,
    int32,
    launch,
    load4,
    store4,
    uint32,
)
from ....device.common import divide, no_numbers
from ....device.half import in_bfloat16
from ....device.mbarrier import fence_barrier_init, smem_u32
from ....device.pipeline import (
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
from ....device.requires import requires
from ....device.tensor_map import tensor_map
from ....device.tma import tma_load_4d, tma_prefetch
from ....device.wgmma import (
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_wait,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait_1,
)
from ...reduce.second_pass import add_rows
from ...reduce.trees import column_sum, sample_sum
from .boxes import ROW, descriptor, row_of
from .cluster_sums import SIZE
from .column_sums import add_columns, column_of
from .weight_gradient_3x3 import hopper_weight_gradient_3x3
from .weight_gradient_plan import MAX_STAGES, SUMS, TAPS, TILE, choose_plan

THREADS = 512
BARRIERS = 2 * MAX_STAGES
ADDED = 32  # vectors of four sums in a block of the second kernel
SHARES = 8  # threads that share the parts of each
BLOCK_SUMS = 4 * ADDED * SHARES

wgmma_64 = make_wgmma(64, True, True)
wait_64 = make_wgmma_wait(64)
producer_registers, consumer_registers = make_setmaxnreg(104, False), make_setmaxnreg(136, True)


@device_inline
def tap_rows(tap, size, pitch, whole_halo, copy_rows):
    """Rows from the start of x's boxes to the pixels that a tap sees."""
    row, column = divide(tap, size)
    return int32(row * pitch + column * (1 if whole_halo else copy_rows))


@device_inline
def write_tap(partial, at, acc):
    """A thread's 32 sums of a tap, four by four, each time next to those of its neighbours."""
    for k in range(8):
        store4(partial, at + k * 512, acc[4 * k], acc[4 * k + 1], acc[4 * k + 2], acc[4 * k + 3])


class ConvGradientMaps(NamedTuple):
    """Tensor maps of dy and x."""

    dy: object
    x: object


class ConvGradientShape(NamedTuple):
    """The shape of dy; C: channels of x, size: of the kernel."""

    images: int
    height: int
    width: int
    C: int
    N: int
    size: int


class ConvGradientTiling(NamedTuple):
    """How the pixels are cut, as in `Plan`."""

    whole_halo: int
    tile_w: int
    tile_h: int
    tile_images: int
    stages: int
    x_bytes: int
    chunks: int
    part_chunks: int


class ConvGradientBoxes(NamedTuple):
    """The layout of a stage. pad: of the kernel; pitch: pixels in a row of x's box, height: its
    rows; copies: boxes of x, copy_rows: pixels of each; pixels: of dy's box, dy_bytes: its bytes.
    """

    pad: int
    pitch: int
    height: int
    copies: int
    copy_rows: int
    pixels: int
    dy_bytes: int


class ConvGradientOwn(NamedTuple):
    """A block's work: the column, row and group of nine taps of its tile; its chunks; whether it
    sums dy's pixels."""

    column: int
    row: int
    group: int
    first_chunk: int
    last_chunk: int
    sums_bias: bool


@device_inline
def boxes_of(shape, tiling):
    """The `ConvGradientBoxes` of a stage."""
    pad = int32(shape.size >> 1)
    pitch = int32(tiling.tile_w + 2 * pad if tiling.whole_halo else tiling.tile_w)
    height = int32(tiling.tile_h + 2 * pad)
    pixels = int32(tiling.tile_w * tiling.tile_h * tiling.tile_images)
    return ConvGradientBoxes(
        pad,
        pitch,
        height,
        int32(1 if tiling.whole_halo else shape.size),
        int32(pitch * height * tiling.tile_images),
        pixels,
        uint32(pixels * ROW),
    )


@device_inline
def own_work(shape, tiling, has_bias):
    """The block's `ConvGradientOwn`."""
    rest, column = divide(cuda.blockIdx.x, divide(shape.C + TILE - 1, TILE)[0])
    group, row = divide(rest, divide(shape.N + TILE - 1, TILE)[0])
    first_chunk = int32(cuda.blockIdx.y * tiling.part_chunks)
    return ConvGradientOwn(
        column,
        row,
        group,
        first_chunk,
        int32(min(first_chunk + tiling.part_chunks, tiling.chunks)),
        has_bias != 0 and column == 0 and group == 0,
    )


@device_inline
def load_boxes(ring, maps, boxes, own, shape, tiling):
    """One thread loads dy's and x's boxes of all chunks of the block by TMA."""
    tma_prefetch(maps.dy)
    tma_prefetch(maps.x)
    across = divide(shape.width + tiling.tile_w - 1, tiling.tile_w)[0]
    down = divide(shape.height + tiling.tile_h - 1, tiling.tile_h)[0]
    stage, parity = producer_start()
    for chunk in range(own.first_chunk, own.last_chunk):
        rest, i = divide(chunk, across)
        images_before, j = divide(rest, down)
        w, h, image = (
            int32(i * tiling.tile_w),
            int32(j * tiling.tile_h),
            uint32(images_before * tiling.tile_images),
        )
        full = producer_acquire(
            ring, stage, parity, boxes.dy_bytes + uint32(boxes.copies * boxes.copy_rows * ROW)
        )
        to = stage_at(ring, stage)
        tma_load_4d(to, maps.dy, full, uint32(own.row * TILE), uint32(w), uint32(h), image)
        for copy in range(boxes.copies):
            tma_load_4d(
                to + boxes.dy_bytes + uint32(copy * boxes.copy_rows * ROW),
                maps.x,
                full,
                uint32(own.column * TILE),
                uint32(w - boxes.pad + copy),
                uint32(h - boxes.pad),
                image,
            )
        stage, parity = advance(ring, stage, parity)


@device_inline
def sum_dy(ring, bias_partial, boxes, own, N):
    """Two warps sum 32 of dy's columns each, for dbias."""
    lane, warp = int32(cuda.threadIdx.x & 31), int32((cuda.threadIdx.x >> 5) - 1)
    total = float32(0)
    stage, parity = consumer_start()
    for _ in range(own.first_chunk, own.last_chunk):
        consumer_wait(ring, stage, parity)
        total += add_columns(stage_at(ring, stage), int32(boxes.pixels >> 6), warp, lane)
        cuda.syncwarp()
        if lane == 0:
            consumer_release(ring, stage)
        stage, parity = advance(ring, stage, parity)
    n = int32(own.row * TILE + column_of(warp, lane))
    if n < N:
        bias_partial[cuda.blockIdx.y * N + n] = total


@device_inline
def multiply_three(acc_0, acc_1, acc_2, a, b_0, b_1, b_2):
    """acc += the products of 16 pixels, for three taps."""
    wgmma_64(acc_0, a, b_0, int32(1))
    wgmma_64(acc_1, a, b_1, int32(1))
    wgmma_64(acc_2, a, b_2, int32(1))


@device_inline
def main_loop(acc_0, acc_1, acc_2, ring, shifts, boxes, tiling, chunks, elected):
    """acc = the products of `chunks` chunks, for three taps; shifts: bytes from a stage to the
    pixels that each sees.

    The first 64 pixels overwrite the accumulators; they stand before the loop so that ptxas sees
    it. A stage is released when the products of the next are under way.
    """
    shift_0, shift_1, shift_2 = shifts
    # from eight pixels to those below
    dy_stride, x_stride = uint32(tiling.tile_w * ROW), uint32(boxes.pitch * ROW)
    # 16 pixels, in descriptors
    dy_step, x_step = np.uint64(dy_stride >> uint32(3)), np.uint64(x_stride >> uint32(3))
    sub_blocks = boxes.pixels >> 6
    stage, parity = consumer_start()
    sub, at = int32(0), ring.base
    consumer_wait(ring, stage, parity)
    a = descriptor(at, uint32(16), dy_stride, 1)
    b_0 = descriptor(at + shift_0, uint32(16), x_stride, 1)
    b_1 = descriptor(at + shift_1, uint32(16), x_stride, 1)
    b_2 = descriptor(at + shift_2, uint32(16), x_stride, 1)
    wgmma_fence()
    wgmma_64(acc_0, a, b_0, int32(0))
    wgmma_64(acc_1, a, b_1, int32(0))
    wgmma_64(acc_2, a, b_2, int32(0))
    for _ in range(3):
        a += dy_step
        b_0 += x_step
        b_1 += x_step
        b_2 += x_step
        multiply_three(acc_0, acc_1, acc_2, a, b_0, b_1, b_2)
    wgmma_commit()
    for _ in range(int32(1), int32(chunks * sub_blocks)):
        previous = stage
        sub += int32(1)
        if sub == sub_blocks:
            sub = int32(0)
            stage, parity = advance(ring, stage, parity)
            at = stage_at(ring, stage)
            consumer_wait(ring, stage, parity)
        x_at = at + uint32(
            row_of(sub, tiling.tile_w, tiling.tile_h, boxes.pitch, boxes.height)
        ) * uint32(ROW)
        dy_row = row_of(sub, tiling.tile_w, tiling.tile_h, tiling.tile_w, tiling.tile_h)
        a = descriptor(at + uint32(dy_row) * uint32(ROW), uint32(16), dy_stride, 1)
        b_0 = descriptor(x_at + shift_0, uint32(16), x_stride, 1)
        b_1 = descriptor(x_at + shift_1, uint32(16), x_stride, 1)
        b_2 = descriptor(x_at + shift_2, uint32(16), x_stride, 1)
        wgmma_fence()
        for _ in range(4):
            multiply_three(acc_0, acc_1, acc_2, a, b_0, b_1, b_2)
            a += dy_step
            b_0 += x_step
            b_1 += x_step
            b_2 += x_step
        wgmma_commit()
        wgmma_wait_1()
        if elected and sub == 0:  # the stage before has been multiplied
            consumer_release(ring, previous)
    wait_64(acc_0)
    wait_64(acc_1)
    wait_64(acc_2)
    if elected:
        consumer_release(ring, stage)


@device_inline
def consume(ring, warpgroup, partial, boxes, own, shape, tiling):
    """A warpgroup multiplies three taps for all chunks of the block, and writes the results."""
    acc_0 = cuda.local.array(32, np.float32)
    acc_1 = cuda.local.array(32, np.float32)
    acc_2 = cuda.local.array(32, np.float32)
    thread = int32(cuda.threadIdx.x) & 127
    size, taps = shape.size, int32(shape.size * shape.size)
    tap = int32(own.group * TAPS + (warpgroup - 1) * 3)
    # a tap beyond the last repeats it, and its results are not read
    row_0 = tap_rows(min(tap, taps - 1), size, boxes.pitch, tiling.whole_halo, boxes.copy_rows)
    row_1 = tap_rows(min(tap + 1, taps - 1), size, boxes.pitch, tiling.whole_halo, boxes.copy_rows)
    row_2 = tap_rows(min(tap + 2, taps - 1), size, boxes.pitch, tiling.whole_halo, boxes.copy_rows)
    shifts = (
        uint32(row_0) * uint32(ROW) + boxes.dy_bytes,
        uint32(row_1) * uint32(ROW) + boxes.dy_bytes,
        uint32(row_2) * uint32(ROW) + boxes.dy_bytes,
    )
    main_loop(
        acc_0,
        acc_1,
        acc_2,
        ring,
        shifts,
        boxes,
        tiling,
        int32(own.last_chunk - own.first_chunk),
        thread == 0,
    )
    to = (
        (cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x) * SUMS
        + (warpgroup - 1) * (SUMS // 3)
        + thread * 4
    )
    write_tap(partial, to, acc_0)
    write_tap(partial, to + TILE * TILE, acc_1)
    write_tap(partial, to + 2 * TILE * TILE, acc_2)


@requires("9.0a")
@cuda.jit(launch_bounds=(THREADS, 1))
def conv2d_weight_gradient_kernel_v6(maps, partial, bias_partial, shape, tiling, has_bias):
    """maps: `ConvGradientMaps`, shape: `ConvGradientShape`, tiling: `ConvGradientTiling`."""
    tiles = cuda.shared.array(0, np.uint8, alignment=1024)
    barriers = cuda.shared.array(BARRIERS, np.uint64)
    first = smem_u32(barriers)
    boxes, own = boxes_of(shape, tiling), own_work(shape, tiling, has_bias)
    ring = Ring(
        smem_u32(tiles),
        uint32(boxes.dy_bytes + uint32(tiling.x_bytes)),
        tiling.stages,
        first,
        barrier_at(first, MAX_STAGES),
    )
    t = int32(cuda.threadIdx.x)
    if t == 0:
        init_barriers(ring.full, MAX_STAGES, 1)
        init_barriers(ring.empty, MAX_STAGES, 5 if own.sums_bias else 3)
        fence_barrier_init()
    cuda.syncthreads()
    warpgroup = t >> 7
    if warpgroup == 0:
        producer_registers()
        if t == 0:
            load_boxes(ring, maps, boxes, own, shape, tiling)
        elif t >= 32 and t < 96 and own.sums_bias:
            sum_dy(ring, bias_partial, boxes, own, shape.N)
    else:
        consumer_registers()
        consume(ring, warpgroup, partial, boxes, own, shape, tiling)


@cuda.jit
def add_weight_gradient_kernel(partial, dweight, parts, size, C, N, taps):
    """dweight += the sum of the parts: 32 vectors of four sums a block, its rows of threads share
    the parts."""
    tile = cuda.shared.array(BLOCK_SUMS, float32)
    lane, share, shares = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y), int32(cuda.blockDim.y)
    vector = int32(cuda.blockIdx.x * ADDED + lane)
    s0 = s1 = s2 = s3 = float32(0)
    for part in range(share, parts, shares):
        a, b, c, d = load4(partial, np.int64(part) * size + vector * 4)
        s0 += a
        s1 += b
        s2 += c
        s3 += d
    at = int32(share * 4 * ADDED + lane)
    tile[at], tile[at + ADDED], tile[at + 2 * ADDED], tile[at + 3 * ADDED] = s0, s1, s2, s3
    cuda.syncthreads()
    block, rest = divide(vector, int32(SUMS // 4))
    tap, rest = divide(rest, int32(TILE * TILE // 4))
    k, thread = rest >> 7, rest & 127
    rest, column = divide(block, divide(C + TILE - 1, TILE)[0])
    group, row = divide(rest, divide(N + TILE - 1, TILE)[0])
    tap = int32(group * TAPS + tap)
    # of the vector's sums; its location: emulator/wgmma_layouts.py
    for which in range(share, int32(4), shares):
        n = int32(row * TILE + (thread >> 5) * 16 + ((thread & 31) >> 2) + (which >> 1) * 8)
        c = int32(column * TILE + k * 8 + (thread & 3) * 2 + (which & 1))
        if n < N and c < C and tap < taps:
            total = tile[which * ADDED + lane]
            for other in range(int32(1), shares):
                total += tile[(other * 4 + which) * ADDED + lane]
            dweight[(n * taps + tap) * C + c] += total


# Launchers ----------------------------------------------------------------------------------------


def hopper_weight_gradient(
    dy, x, dweight, dbias=None, whole_halo=True, general=False, need_channel=False, accumulate=True
):
    """dweight += …, dbias += …, for arrays that ../launcher.py has checked; general: not by the
    kernels for 3 × 3 taps.

    accumulate: False: dweight = …
    need_channel: returns the sums of dy over each image's pixels, (B, N)
    """
    b, h, w, n = dy.shape
    c, size = x.shape[3], dweight.shape[1]
    if size == SIZE and not general:
        dchannel = empty((b, n), np.float32, like=dy) if need_channel else None
        hopper_weight_gradient_3x3(
            dy, x, dweight, dbias, whole_halo, dchannel=dchannel, accumulate=accumulate
        )
        return dchannel
    if not accumulate:
        fill_zero(dweight)
    dchannel = None
    if need_channel:
        dchannel = sample_sum(dy)
        if dbias is not None:
            column_sum(dchannel, dbias)
            dbias = None
    backend = dy.backend
    plan = choose_plan(b, h, w, c, n, size, bool(whole_halo), backend.multiprocessors)[1]
    pad = size // 2
    map_dy = tensor_map(dy, (TILE, plan.width, plan.height, plan.images))
    map_x = tensor_map(
        x, (TILE, plan.width + 2 * pad * bool(whole_halo), plan.height + 2 * pad, plan.images)
    )
    tiles = -(-c // TILE) * -(-n // TILE) * -(-size * size // TAPS)
    partial = empty((plan.parts, tiles * SUMS), np.float32, like=dy)
    bias_partial = (
        no_numbers(backend) if dbias is None else empty((plan.parts, n), np.float32, like=dy)
    )
    kernel = in_bfloat16(conv2d_weight_gradient_kernel_v6, x.dtype)
    launch(
        kernel,
        (tiles, plan.parts),
        THREADS,
        ConvGradientMaps(map_dy, map_x),
        partial.reshape(-1),
        bias_partial.reshape(-1),
        ConvGradientShape(b, h, w, c, n, size),
        ConvGradientTiling(
            int(whole_halo),
            plan.width,
            plan.height,
            plan.images,
            plan.stages,
            plan.x_bytes,
            plan.chunks,
            plan.part_chunks,
        ),
        int(dbias is not None),
        shared=plan.stages * (plan.width * plan.height * plan.images * ROW + plan.x_bytes),
    )
    launch(
        add_weight_gradient_kernel,
        tiles * SUMS // 4 // ADDED,
        (ADDED, min(plan.parts, SHARES)),
        partial.reshape(-1),
        dweight.reshape(-1),
        plan.parts,
        tiles * SUMS,
        c,
        n,
        size * size,
    )
    if dbias is not None:
        add_rows(bias_partial, dbias)
    return dchannel
