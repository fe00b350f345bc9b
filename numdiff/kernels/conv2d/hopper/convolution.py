"""Convolution on Hopper's tensor cores: an implicit GEMM fed by TMA, forward and input gradient.

MATHEMATICS
    forward          y[p, n] = Σ_tap Σ_c x[p + tap - pad, c] · weight[n, tap, c]
    input gradient   dx[p, c] = Σ_tap Σ_n dy[p + tap - pad, n] · weight[n, taps - 1 - tap, c]        (stride 1)
    then + bias[n] + channel[image of p, n] + residual[p, n], rounded to float16 once. Where a GroupNorm reads y next,
    the mean and variance of each two channels over each 8 × 8 pixels are left for it.
    A block takes a tile of pixels and of output channels, and sums over blocks of 64 input channels
    and, in each, over the taps. For one tap that is a plain matrix product: pixels × 64 by 64 ×
    channels. The pixels of another tap are the same ones shifted by some rows and columns, so
    nothing is gathered: TMA loads the tile of pixels WITH ITS HALO once, with zeros outside the
    image (which is the padding), and each tap begins to read it at another row (boxes.py).
SHAPES
    x (B, H, W, C), weight (N, kernel, kernel, C), y and residual (B, H, W, N): float16 or bfloat16
    bias (N,), channel (B, N): float32; statistics (B, H / 8 · W / 8, 2, N / 2) float32:
    ../../groupnorm/normalise.py C and N multiples of 8 (a row that TMA brings is a multiple of 16
    bytes), kernel odd, stride 1; any B, H, W
VERSIONS
    v5  hopper-columns: for each column of taps its own box of pixels: tile_w columns wide, with a halo above and below.
        A row of it is a multiple of eight pixels, so every matrix begins where the swizzle's pattern begins.
    v6  hopper: one box with the whole halo. A tile of 16 × 16 pixels becomes a box of 18 × 18: 1.27 times its pixels
        cross from L2, where v5 moves them 3.4 times and a box for each tap 9 times. A tap's matrix may begin at any row
        of 128 bytes, because TMA and wgmma both swizzle by the bits of the address.
    The kernels are the same; their arguments say which.
ROLES  (384 threads: three warpgroups)
    warp 0 loads boxes of pixels         one stage for each block of channels (v6), or column of taps (v5)
    warp 3 loads the weight              one stage a tap, or a column of three (separate kernels: a third of the
                                         waits); where all of it fits, once for all tiles
                                         (`resident`)
    warps 1, 2 overlap the products      each stores a consumer's results, makes their statistics, and brings the next
                                         residual, to the place of the next results, and what is added to each channel
    warpgroups 1, 2 multiply             sub-blocks of 64 pixels by BN output channels. Where shared memory holds all
                                         that a tile needs they ping-pong: one multiplies, one writes its results
LAUNCH
    as many blocks as multiprocessors, each of which walks over work tiles; shared memory: weight
    stages, output buffers, pixel stages.
DETERMINISM
    one warpgroup sums an output, in the order of channels and taps.
COST
    as in ../direct.py. From L2 to shared memory, for each tile and 64 channels: 128 · (pixels with
    halo + taps · BN) bytes for 128 · pixels · taps · BN FLOPs.
SOURCE
    PTX ISA, sections 9.7.15 (wgmma) and 9.7.9.27 (TMA); the implicit GEMM: Chetlur et al. 2014,
    "cuDNN", arXiv:1410.0759.
READ NEXT
    epilogue.py
"""

from typing import NamedTuple

import numpy as np

from ....device import cuda, device_inline, int32, launch, uint32
from ....device.batch_invariance import nominal_extent
from ....device.common import divide, no_numbers
from ....device.half import in_bfloat16
from ....device.mbarrier import fence_barrier_init, mbarrier_arrive, mbarrier_wait, smem_u32
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
from ....device.requires import requires, supports
from ....device.specialise import Constant, Variants, specialise
from ....device.tensor_map import tensor_map
from ....device.tma import (
    fence_proxy_async,
    tma_load_3d,
    tma_load_4d,
    tma_load_5d,
    tma_prefetch,
)
from ....device.wgmma import make_setmaxnreg
from ....dtypes import is_half
from ...tuning import tuned_or
from .boxes import ROW, u64
from .epilogue import exchange, stage_results
from .layout import (
    B_BYTES,
    BARRIERS,
    BK,
    BN,
    COLS,
    MAX_A,
    MAX_B,
    OUT_BYTES,
    PHASED,
    RESAMPLED_VARIANTS,
    SLAB_BYTES,
    SLABS,
    STRIDED,
    SUB,
    TAP_BYTES,
    TAPS_PER_STAGE,
    TRANSPOSED,
    VARIANTS,
    Buffers,
    ConvEpilogue,
    ConvMaps,
    ConvShape,
    ConvTiling,
    ConvVectors,
    PhaseEpilogue,
    PhaseShape,
    boxes_of,
    place_of,
)
from .plan import choose_plan
from .products import advance_weight, main_loop, view_of, wgmma_wait

THREADS = 384  # three warpgroups
ACCUMULATORS = Constant(lambda BN: BN // 2)  # of a thread for a sub-block

producer_registers, consumer_registers = make_setmaxnreg(72, False), make_setmaxnreg(216, True)


# Producers: a thread for the pixels, a thread for the weight --------------------------------------


@device_inline
def load_pixels(ring, map_x, boxes, shape, tiling):
    """One thread loads boxes of pixels by TMA, for all tiles of the block."""
    tma_prefetch(map_x)
    stage, parity = producer_start()
    for tile in range(cuda.blockIdx.x, boxes.tiles, cuda.gridDim.x):
        _, i, j, group = place_of(tile, boxes)
        w, h = int32(i * tiling.tile_w - boxes.pad), int32(j * tiling.tile_h - boxes.pad)
        if PHASED:
            w, h = int32(i * tiling.tile_w - shape.left), int32(j * tiling.tile_h - shape.top)
        if STRIDED:
            w, h = int32(i * tiling.tile_w), int32(j * tiling.tile_h)
        image = int32(group * tiling.tile_images)
        for block in range(shape.channel_blocks):
            for load in range(boxes.loads):
                full = producer_acquire(
                    ring, stage, parity, boxes.pitch * boxes.height * tiling.tile_images * ROW
                )
                if STRIDED:
                    tma_load_5d(
                        stage_at(ring, stage),
                        map_x,
                        full,
                        uint32(((load & 1) * shape.channel_blocks + block) * BK),
                        uint32(w),
                        uint32(load >> 1),
                        uint32(h),
                        uint32(image),
                    )
                else:
                    tma_load_4d(
                        stage_at(ring, stage),
                        map_x,
                        full,
                        uint32(block * BK),
                        uint32(w + load),
                        uint32(h),
                        uint32(image),
                    )
                stage, parity = advance(ring, stage, parity)


@device_inline
def load_tap(address, map_weight, full, first, tap, taps, block):
    """Load a tap of the weight by TMA: BN output channels from `first` on, a block of 64 input
    channels."""
    if TRANSPOSED:
        for slab in range(SLABS):
            tma_load_3d(
                address + uint32(slab * SLAB_BYTES),
                map_weight,
                full,
                uint32(first + slab * COLS),
                uint32(taps - 1 - tap),
                uint32(block * BK),
            )
    else:
        tma_load_3d(address, map_weight, full, uint32(block * BK), uint32(tap), uint32(first))


@device_inline
def strided_tap(n):
    """The n-th tap of a 3 × 3 kernel of stride 2: those of even rows and columns of pixels, of odd
    columns, of odd rows, of both; in each from the top down, then from left to right."""
    return int32((u64(0x453718260) >> u64(4 * n)) & u64(15))


@device_inline
def load_weight(ring, map_weight, boxes, shape, tiling):
    """One thread loads the weight by TMA, TAPS_PER_STAGE taps of a column at a time; once, if it is
    resident."""
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
                        tap = int32((part + k) * size + column)
                        if STRIDED:
                            tap = strided_tap(int32(column * size + part))
                        load_tap(to, map_weight, full, first, tap, size * size, block)
                        to += uint32(TAP_BYTES)
                    stage, parity = advance(ring, stage, parity)


# Consumers ----------------------------------------------------------------------------------------


@device_inline
def consume(consumer, a_ring, b_ring, buffers, boxes, shape, tiling, epilogue):
    """A warpgroup multiplies its sub-blocks of all tiles of the block, and leaves the results in
    its buffer."""
    acc = cuda.local.array(ACCUMULATORS, np.float32)
    acc_2 = cuda.local.array(ACCUMULATORS, np.float32)
    view = view_of(consumer, boxes, shape, tiling)
    out = int32(buffers.at + consumer * OUT_BYTES)
    a_stage, a_parity = consumer_start()
    b_stage, b_parity = consumer_start()
    # of ping-pong, the first consumer begins
    out_parity, turn_parity = uint32(0), uint32(1 - consumer)
    for _ in range(cuda.blockIdx.x, boxes.tiles, cuda.gridDim.x):
        consumer_wait(b_ring, b_stage, b_parity)
        consumer_wait(a_ring, a_stage, a_parity)
        if tiling.ping_pong:
            mbarrier_wait(barrier_at(buffers.turn, consumer), turn_parity)
            turn_parity ^= uint32(1)
        a_stage, a_parity, b_stage, b_parity = main_loop(
            acc, acc_2, a_ring, b_ring, a_stage, a_parity, b_stage, b_parity, view, tiling.resident
        )
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
            stage_results(
                buffers.tiles,
                int32(out + SLABS * SLAB_BYTES),
                acc_2,
                buffers.addends,
                int32(addends_at + BN),
                epilogue,
            )
        fence_proxy_async()
        mbarrier_arrive(barrier_at(buffers.written, consumer))


# The kernel ---------------------------------------------------------------------------------------


@device_inline
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
    """maps: `ConvMaps`, vectors: `ConvVectors`, shape: `ConvShape`, tiling: `ConvTiling`, epilogue:
    `ConvEpilogue`."""
    tiles = cuda.shared.array(0, np.uint8, alignment=1024)
    addends = cuda.shared.array(0, np.float32, alignment=1024)  # sees the same memory
    barriers = cuda.shared.array(BARRIERS, np.uint64)
    first, base = smem_u32(barriers), smem_u32(tiles)
    # behind the weight's stages; then come the pixels', then the addends
    out_at = int32(tiling.b_stages * B_BYTES)
    out_address = uint32(base + uint32(tiling.b_stages) * uint32(B_BYTES))
    a_ring = Ring(
        uint32(out_address + uint32(2 * OUT_BYTES)),
        tiling.a_bytes,
        tiling.a_stages,
        first,
        barrier_at(first, MAX_A),
    )
    b_ring = Ring(
        base,
        B_BYTES,
        tiling.b_stages,
        barrier_at(first, 2 * MAX_A),
        barrier_at(first, 2 * MAX_A + MAX_B),
    )
    ready = barrier_at(first, 2 * MAX_A + 2 * MAX_B)
    buffers = Buffers(
        tiles,
        out_address,
        out_at,
        addends,
        int32((out_at + 2 * OUT_BYTES + tiling.a_stages * tiling.a_bytes) >> 2),
        ready,
        barrier_at(ready, 2),
        barrier_at(ready, 4),
    )
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


def make_kernel(BN, SUB, taps_per_stage, kind="forward"):
    """The kernel for tiles of BN output channels and 128 · SUB pixels; kind: "forward",
    "input_gradient", or resampled.py's "upsampled" and "halved"."""
    return specialise(
        convolve,
        name=f"conv2d_{kind}_kernel_v6_{128 * SUB}x{BN}_{taps_per_stage}",
        launch_bounds=(THREADS, 1),
        BN=BN,
        SUB=SUB,
        TAPS_PER_STAGE=taps_per_stage,
        TRANSPOSED=kind == "input_gradient",
        PHASED=kind == "upsampled",
        STRIDED=kind == "halved",
    )


KEYS = [
    (*tile, taps) for tile in VARIANTS for taps in (1, 3) if (*tile, taps) != (128, 2, 3)
]  # of these, no three stages fit with the pixels
conv2d_forward_kernels_v6 = Variants(KEYS, lambda key: make_kernel(*key))
conv2d_input_gradient_kernels_v6 = Variants(KEYS, lambda key: make_kernel(*key, "input_gradient"))
RESAMPLED_KEYS = [(*tile, 1) for tile in RESAMPLED_VARIANTS]
conv2d_upsampled_kernels = Variants(RESAMPLED_KEYS, lambda key: make_kernel(*key, "upsampled"))
conv2d_halved_kernels = Variants(RESAMPLED_KEYS, lambda key: make_kernel(*key, "halved"))


# Launchers ----------------------------------------------------------------------------------------


def hopper_supports(x, weight, stride):
    """Whether this rung takes these operands."""
    size, inputs = weight.shape[2:]
    return (
        supports(x, conv2d_forward_kernels_v6)
        and is_half(x.dtype)
        and stride == 1
        and inputs % 8 == 0
        and weight.shape[0] % 8 == 0
        and size <= 7
    )


def statistics_shape(y_shape):
    """The shape of the statistics of a result (B, H, W, N), or None if 8 × 8 pixels do not tile its
    images."""
    B, H, W, N = y_shape
    return (B, H // 8 * (W // 8), 2, N // 2) if H % 8 == W % 8 == 0 else None


def plan_for(
    x, y, size, addends, gradient, whole_halo=True, only=None, taps_per_stage=None, strided=False
):
    """The `Plan` for these arrays: as estimated, or as measured on this card, or `only` and
    `taps_per_stage`."""
    b, c, multiprocessors = len(x), x.shape[3], x.backend.multiprocessors
    h, w, channels = y.shape[1:] if strided else (*x.shape[1:3], y.shape[3])

    def planned(only=None, taps_per_stage=None):
        return choose_plan(
            nominal_extent(b),
            h,
            w,
            c,
            channels,
            size,
            bool(whole_halo),
            multiprocessors,
            only,
            taps_per_stage,
            addends,
            "halved" if strided else "input_gradient" if gradient else "forward",
        )[1]

    def measured(choice):
        bn, sub, taps = choice
        return planned((bn, sub), taps)

    if only is None and taps_per_stage is None and not strided:
        kind = "conv2d_input_gradient v6" if gradient else "conv2d v6"
        plan = tuned_or(
            planned, measured, x.backend, kind, nominal_extent(b), h, w, c, channels, size
        )
    else:
        plan = planned(only, taps_per_stage)
    if nominal_extent(b) == b:
        return plan
    tiles = (
        -(-channels // plan.bn) * -(-w // plan.width) * -(-h // plan.height) * -(-b // plan.images)
    )
    return plan._replace(tiles=tiles)  # that there really are


def map_of_weight(plan, weight, gradient):
    """The tensor map of a weight (N, kernel, kernel, C): boxes of a tap."""
    taps = weight.reshape(weight.shape[0], weight.shape[1] ** 2, weight.shape[3])
    if gradient:
        columns = 64 if plan.bn % 64 == 0 else 32
        return tensor_map(taps, (columns, 1, BK), swizzle=2 * columns)
    return tensor_map(taps, (BK, 1, plan.bn))


def map_of_results(plan, y, **view):
    """The tensor map of y or of the residual: boxes of an output buffer. view: `dims` and `strides`"""
    columns = 64 if plan.bn % 64 == 0 else 32
    return tensor_map(y, (columns, 8, 8, 1), swizzle=2 * columns, **view)


def maps_for(plan, x, weight, y, residual, gradient):
    """The `ConvMaps` of a convolution: boxes of pixels with their halo, of taps, and of output
    buffers."""
    halo = weight.shape[1] - 1
    map_x = tensor_map(
        x, (BK, plan.width + halo * plan.whole_halo, plan.height + halo, plan.images)
    )
    map_y = map_of_results(plan, y)
    return ConvMaps(
        map_x,
        map_of_weight(plan, weight, gradient),
        map_y,
        map_y if residual is None else map_of_results(plan, residual),
    )


class ConvStatistics(NamedTuple):
    """Where a convolution leaves those of its result: `array` of `chunks` for each sample, from
    `first` on."""

    array: object
    chunks: int
    first: int = 0


def launch_tiles(
    kernels, plan, maps, x, shape, bias=None, channel=None, has_residual=False, statistics=None
):
    """Launch a convolution's kernel. kernels: by (BN, SUB, taps in a stage), shape: its
    `ConvShape`; statistics: `ConvStatistics`, or None"""
    backend = x.backend
    nothing = no_numbers(backend)
    array, chunks, first = (nothing, 0, 0) if statistics is None else statistics
    epilogue = ConvEpilogue(
        int(bias is not None),
        int(channel is not None),
        int(has_residual),
        array.reshape(-1),
        int(statistics is not None),
    )
    if isinstance(shape, PhaseShape):
        epilogue = PhaseEpilogue(*epilogue, chunks, first)
    launch(
        in_bfloat16(kernels[plan.bn, plan.pixels // 128, plan.taps_per_stage], x.dtype),
        min(plan.tiles, backend.multiprocessors),
        THREADS,
        maps,
        ConvVectors(
            nothing if bias is None else bias, nothing if channel is None else channel.reshape(-1)
        ),
        shape,
        ConvTiling(
            int(plan.whole_halo),
            plan.width,
            plan.height,
            plan.images,
            plan.a_stages,
            plan.a_bytes,
            plan.b_stages,
            int(plan.resident),
            int(plan.ping_pong),
        ),
        epilogue,
        shared=plan.shared,
    )


def hopper_convolution(
    x,
    weight,
    bias,
    y,
    channel=None,
    residual=None,
    gradient=False,
    whole_halo=True,
    only=None,
    taps_per_stage=None,
    statistics=None,
):
    """y = conv2d(x, weight) + …, or with `gradient` the input gradient from x = dy; ../launcher.py
    has checked them.

    statistics: of `statistics_shape`, to be written; not with `gradient`
    only, taps_per_stage: a forced tile (BN, SUB) and 1 or 3, for tests and `numdiff bench tune`
    """
    b, h, w, c = x.shape
    size, addends = weight.shape[1], bias is not None or channel is not None
    plan = plan_for(x, y, size, addends, gradient, whole_halo, only, taps_per_stage)
    launch_tiles(
        conv2d_input_gradient_kernels_v6 if gradient else conv2d_forward_kernels_v6,
        plan,
        maps_for(plan, x, weight, y, residual, gradient),
        x,
        ConvShape(b, h, w, y.shape[3], -(-c // BK), size),
        bias,
        channel,
        residual is not None,
        None if statistics is None else ConvStatistics(statistics, statistics.shape[1]),
    )
    return y


def hopper_forward(
    x, weight, bias, y, channel=None, residual=None, whole_halo=True, statistics=None
):
    """y = conv2d(x, weight) + bias + channel + residual; of it `statistics`, if an array for them
    is given."""
    return hopper_convolution(
        x, weight, bias, y, channel, residual, whole_halo=whole_halo, statistics=statistics
    )


def hopper_input_gradient(dy, weight, dx, whole_halo=True, residual=None):
    """dx of a convolution of stride 1, plus `residual`, like it."""
    return hopper_convolution(
        dy, weight, None, dx, residual=residual, gradient=True, whole_halo=whole_halo
    )
