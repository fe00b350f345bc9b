"""The weight gradient of a 3 × 3 convolution on Hopper's tensor cores: three taps in one product.

MATHEMATICS
    as in weight_gradient.py:  dweight[n, tap, c] += Σ_p dy[p, n] · x[p + tap - 1, c],  dbias[n] += Σ_p dy[p, n]
SHAPES
    dy (B, H, W, N), x (B, H, W, C): float16 or bfloat16; dweight (N, 3, 3, C), dbias (N,): float32,
    added to; dweight may be written instead
    dchannel (B, N) float32: the sums of dy over each image's pixels, where a vector of its own was
    added to each image C and N multiples of 8, stride 1
WHAT IS NEW, AND WHY IT PAYS
    Three taps below each other see pixels that are one row of x's box apart. A wgmma's descriptor
    says how far it is from one run of channels to the next (its leading dimension), so with one row
    as that distance a single product is 64 channels of dy by CW channels of x for three taps: 3 ·
    CW columns. A matrix of dy is read from shared memory once for three taps, so narrow tiles are
    fast, too: CW is 64, 32 or 16.
    Small images need narrow tiles. Their pixels must be shared among many blocks, each of which has
    float32 partial sums that must be added: 19 MB for 128 blocks with 9 · 64 · 64 sums, only 5 MB
    with 9 · 64 · 16.
    Up to eight blocks with parts of one tile's pixels form a cluster. Each leaves its accumulators
    in its shared memory, where the pixels were, and adds up one share of the tile from the shared
    memory of all. If one cluster has all the pixels, that is the result: no partial sums go through
    the L2 cache, and no second kernel adds them. If several clusters share the pixels, each writes
    its sums once, an eighth of what its blocks would write.
    The share that a block will add up starts from what dweight holds, if it is added to; the block
    loads that while the first pixels are in flight.
    A chunk's products are one stretch of code without a branch, so a kernel is made for each number
    of pixels: see `multiply_chunk`.
ROLES  (512 threads: four warpgroups)
    warp 0 loads boxes of dy and x              one stage for each chunk of 64, 128 or 256 pixels
    warps 1, 2 sum 32 of dy's columns each      while the boxes are there anyway, for dbias, and image by image for
                                                dchannel: products with ones
    warpgroups 1, 2, 3 multiply a column of three taps each, by the whole chunk before they wait
    then, in a cluster                          they write their sums to shared memory, and after a barrier add up the
                                                block's share; warp 1 of the first block dbias
LAUNCH
    grid (tiles of CW channels of x, of 64 of dy, parts), cluster (1, 1, blocks): the pixels are
    shared among `parts` blocks, neighbours along z are a cluster. Where there is more than one
    cluster a tile, or an image's sums for dchannel come from several chunks, a second kernel adds
    those.
DETERMINISM
    a sum takes the blocks of its cluster in turn, from the one that adds it up; a second kernel
    adds the clusters' sums in a fixed order. How the pixels are shared depends on the shape and the
    GPU's size, or its table of tiles.
COST
    FLOPs as in ../direct.py; a cluster's blocks read 4 · (blocks - 1) · 64 · 9 · CW bytes from each
    other, and where there are several clusters a tile they cost 2 · 4 · clusters · N · 9 · C bytes,
    mostly in the L2 cache.
SOURCE
    PTX ISA, section 9.7.15.5.1.2 (descriptors); of clusters, device/cluster.py.
READ NEXT
    weight_gradient_3x3_plan.py
"""

import numpy as np

from ....device import cuda, device_inline, empty, float32, int32, launch, uint32
from ....device.cluster import cluster_sync, cluster_sync_relaxed
from ....device.common import divide, no_numbers
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
from ...reduce.second_pass import Sum, add_parts
from ...tuning import tuned_or
from .boxes import ROW, descriptor, u64
from .cluster_sums import (
    CW,
    TAPS,
    TILE,
    add_bias,
    add_up,
    leave_sums,
    read_sums,
    share_of,
    write_sums,
)
from .column_sums import add_columns, column_of
from .weight_gradient_3x3_layout import (
    Gradient3x3Arrays,
    Gradient3x3Maps,
    Gradient3x3Parts,
    Gradient3x3Shape,
    Gradient3x3Tiling,
    boxes_of,
    own_work,
    place_of,
)
from .weight_gradient_3x3_plan import MAX_STAGES, PIXELS, WIDTHS, choose_plan

THREADS = 512  # four warpgroups
BARRIERS = 2 * MAX_STAGES

producer_registers, consumer_registers = make_setmaxnreg(104, False), make_setmaxnreg(136, True)


# Constants of a kernel ----------------------------------------------------------------------------

SUBS = Constant()  # sub-blocks of 64 pixels in a chunk: 1, 2 or 4
ACCUMULATORS = Constant(lambda CW: 3 * CW // 2)  # of a thread: three taps
X_ROW = Constant(lambda CW: 2 * CW)  # bytes of a pixel in x's box
X_SWIZZLE = Constant(lambda CW: {64: 1, 32: 2, 16: 3}[CW])  # of that box, in descriptors
wgmma = Constant(lambda CW: make_wgmma(3 * CW, True, True))
wgmma_wait = Constant(lambda CW: make_wgmma_wait(3 * CW))


# The producer's warpgroup -------------------------------------------------------------------------


@device_inline
def load_boxes(ring, maps, boxes, own, shape, tiling):
    """One thread loads dy's and x's boxes of all chunks of the block by TMA."""
    stage, parity = producer_start()
    rest, i = divide(own.first_chunk, shape.across)
    before, j = divide(rest, shape.down)
    for _ in range(own.first_chunk, own.last_chunk):
        w, h, image = (
            int32(i * tiling.tile_w),
            int32(j * tiling.tile_h),
            uint32(before * tiling.tile_images),
        )
        full = producer_acquire(
            ring, stage, parity, boxes.dy_bytes + uint32(boxes.copies * boxes.copy_rows * X_ROW)
        )
        to = stage_at(ring, stage)
        tma_load_4d(to, maps.dy, full, uint32(own.line * TILE), uint32(w), uint32(h), image)
        for copy in range(boxes.copies):
            tma_load_4d(
                to + boxes.dy_bytes + uint32(copy * boxes.copy_rows * X_ROW),
                maps.x,
                full,
                uint32(own.column * CW),
                uint32(w - 1 + copy),
                uint32(h - 1),
                image,
            )
        i += int32(1)
        if i == shape.across:
            i, j = int32(0), int32(j + 1)
            if j == shape.down:
                j, before = int32(0), int32(before + 1)
        stage, parity = advance(ring, stage, parity)


@device_inline
def sum_dy(ring, bias_sums, arrays, own, shape, tiling, blocks, has_bias, has_channel):
    """Two warps sum 32 of dy's columns each, for dbias, and image by image for dchannel."""
    lane, warp = int32(cuda.threadIdx.x & 31), int32((cuda.threadIdx.x >> 5) - 1)
    n = int32(own.line * TILE + column_of(warp, lane))
    sixty_fours = int32(tiling.tile_w * tiling.tile_h >> 6)
    total = float32(0)
    if has_bias and own.part == 0 and n < shape.N:
        total = arrays.dbias[n]
    stage, parity = consumer_start()
    places = int32(shape.across * shape.down)
    before, place = divide(own.first_chunk, places)
    for _ in range(own.first_chunk, own.last_chunk):
        consumer_wait(ring, stage, parity)
        box = stage_at(ring, stage)
        for i in range(tiling.tile_images):
            mine = add_columns(box, sixty_fours, warp, lane)
            box += uint32(sixty_fours * (64 * ROW))
            total += mine
            image = int32(before * tiling.tile_images + i)
            if has_channel and n < shape.N and image < shape.images:
                arrays.channel_out[(place * shape.images + image) * shape.N + n] = mine
        place += int32(1)
        if place == places:
            place, before = int32(0), int32(before + 1)
        cuda.syncwarp()
        if lane == 0:
            consumer_release(ring, stage)
        stage, parity = advance(ring, stage, parity)
    bias_sums[column_of(warp, lane)] = total
    if has_bias and blocks == 1 and n < shape.N:
        arrays.bias_out[own.part * shape.N + n] = total


# Consumers ----------------------------------------------------------------------------------------


@device_inline
def multiply_sub_block(acc, a, b, dy_step, x_step):
    """acc += the products of 8 × 8 pixels."""
    wgmma(acc, a, b, int32(1))
    wgmma(acc, a + dy_step, b + x_step, int32(1))
    wgmma(acc, a + dy_step + dy_step, b + x_step + x_step, int32(1))
    wgmma(acc, a + dy_step + dy_step + dy_step, b + x_step + x_step + x_step, int32(1))


@device_inline
def multiply_chunk(acc, dy_at, x_at, dy_stride, x_stride, places):
    """acc += the products of a chunk's SUBS sub-blocks; the strides: bytes from eight pixels to
    those below.

    It has no branch: at a branch ptxas would end the group of products, and the wait for all but
    the last group would become a wait for this chunk.
    """
    a, b = (
        descriptor(dy_at, uint32(16), dy_stride, 1),
        descriptor(x_at, x_stride, x_stride, X_SWIZZLE),
    )
    # 16 pixels, in descriptors
    dy_step, x_step = u64(dy_stride >> uint32(3)), u64(x_stride >> uint32(3))
    dy_1, x_1, dy_2, x_2, dy_3, x_3 = places
    multiply_sub_block(acc, a, b, dy_step, x_step)
    if SUBS > 1:
        multiply_sub_block(
            acc,
            a + u64(dy_1 * uint32(ROW // 16)),
            b + u64(x_1 * uint32(X_ROW // 16)),
            dy_step,
            x_step,
        )
    if SUBS > 2:
        multiply_sub_block(
            acc,
            a + u64(dy_2 * uint32(ROW // 16)),
            b + u64(x_2 * uint32(X_ROW // 16)),
            dy_step,
            x_step,
        )
        multiply_sub_block(
            acc,
            a + u64(dy_3 * uint32(ROW // 16)),
            b + u64(x_3 * uint32(X_ROW // 16)),
            dy_step,
            x_step,
        )


@device_inline
def main_loop(acc, ring, x_shift, dy_stride, x_stride, places, chunks, elected):
    """acc += the products of `chunks` chunks; x_shift: bytes from a stage to the pixels of x that
    the taps see.

    A stage is released when the products of the next chunk are under way.
    """
    stage, parity = consumer_start()
    consumer_wait(ring, stage, parity)
    wgmma_fence()
    multiply_chunk(acc, ring.base, ring.base + x_shift, dy_stride, x_stride, places)
    wgmma_commit()
    for _ in range(int32(1), chunks):
        previous = stage
        stage, parity = advance(ring, stage, parity)
        at = stage_at(ring, stage)
        consumer_wait(ring, stage, parity)
        wgmma_fence()
        multiply_chunk(acc, at, at + x_shift, dy_stride, x_stride, places)
        wgmma_commit()
        wgmma_wait_1()
        if elected:
            consumer_release(ring, previous)
    wgmma_wait(acc)
    if elected:
        consumer_release(ring, stage)


@device_inline
def consume(ring, sums, warpgroup, arrays, boxes, own, shape, tiling, parts):
    """A warpgroup multiplies a column of three taps for all chunks of the block, and writes, or
    adds up, the results.
    """
    acc = cuda.local.array(ACCUMULATORS, np.float32)
    thread = int32(cuda.threadIdx.x) & 127
    tap_column = int32(warpgroup - 1)
    x_shift = boxes.dy_bytes + uint32(
        tap_column * (1 if tiling.whole_halo else boxes.copy_rows) * X_ROW
    )
    dy_stride, x_stride = uint32(tiling.tile_w * ROW), uint32(boxes.pitch * X_ROW)
    w, h = tiling.tile_w, tiling.tile_h
    # of sub-blocks 1, 2 and 3: in dy's box, and in x's
    places = (
        place_of(1, w, h, w, h),
        place_of(1, w, h, boxes.pitch, boxes.height),
        place_of(2, w, h, w, h),
        place_of(2, w, h, boxes.pitch, boxes.height),
        place_of(3, w, h, w, h),
        place_of(3, w, h, boxes.pitch, boxes.height),
    )
    mine = share_of(thread, tap_column, own, parts.share, shape.C, shape.N)
    read_sums(acc, arrays.dweight, mine, int32(mine.left if own.group == 0 and parts.adds else 0))
    # no product is in flight yet: for the compilers, the accumulators are complete from here on
    wgmma_wait(acc)
    main_loop(
        acc,
        ring,
        x_shift,
        dy_stride,
        x_stride,
        places,
        int32(own.last_chunk - own.first_chunk),
        thread == 0,
    )

    at = np.int64(own.group) * int32(shape.N * TAPS * shape.C) + mine.at
    if parts.blocks == 1:
        write_sums(arrays.out, at, acc, mine)
    else:
        bar_sync(uint32(1), uint32(THREADS))  # the stages are free
        consumer = int32(int32(cuda.threadIdx.x) - 128)
        leave_sums(sums, consumer, acc)
        cluster_sync()  # all sums are there
        add_up(ring.base + uint32(16 * consumer), own.rank, parts.blocks, arrays.out, at, mine)
        cluster_sync_relaxed()  # all reads are complete


# The kernel ---------------------------------------------------------------------------------------


@requires("9.0a")
def weight_gradient(maps, arrays, shape, tiling, parts, has_bias, has_channel):
    """Arguments: a `Gradient3x3Maps`, `Gradient3x3Arrays`, `Gradient3x3Shape`, `Gradient3x3Tiling`
    and
    `Gradient3x3Parts`."""
    tiles = cuda.shared.array(0, np.uint8, alignment=1024)
    # in the same place, once all is multiplied
    sums = cuda.shared.array(0, float32, alignment=1024)
    barriers = cuda.shared.array(BARRIERS, np.uint64)
    bias_sums = cuda.shared.array(TILE, float32)
    first = smem_u32(barriers)
    boxes, own = boxes_of(tiling), own_work(parts, has_bias, has_channel)
    ring = Ring(
        smem_u32(tiles),
        uint32(boxes.dy_bytes + uint32(tiling.x_bytes)),
        tiling.stages,
        first,
        barrier_at(first, MAX_STAGES),
    )
    t = int32(cuda.threadIdx.x)
    if t == 0:
        tma_prefetch(maps.dy)
        tma_prefetch(maps.x)
        init_ring(ring, 1, 5 if own.sums_dy else 3)
        fence_barrier_init()
    cuda.syncthreads()
    warpgroup = t >> 7
    if warpgroup == 0:
        producer_registers()
        if t == 0:
            load_boxes(ring, maps, boxes, own, shape, tiling)
        elif t >= 32 and t < 96 and own.sums_dy:
            sum_dy(ring, bias_sums, arrays, own, shape, tiling, parts.blocks, has_bias, has_channel)
        if parts.blocks > 1:
            cuda.syncwarp()
            bar_sync(uint32(1), uint32(THREADS))  # the stages are free
            add_bias(bias_sums, arrays.bias_out, own, shape.N, parts.blocks, has_bias)
    else:
        consumer_registers()
        consume(ring, sums, warpgroup, arrays, boxes, own, shape, tiling, parts)


def make_kernel(width, pixels):
    """The kernel for tiles of `width` channels that takes `pixels` pixels at once."""
    return specialise(
        weight_gradient,
        name=f"conv2d_weight_gradient_3x3_kernel_v6_{width}_{pixels}",
        launch_bounds=(THREADS, 1),
        CW=width,
        SUBS=pixels // 64,
    )


conv2d_weight_gradient_3x3_kernels_v6 = Variants(
    [(width, pixels) for width in WIDTHS for pixels in PIXELS], lambda key: make_kernel(*key)
)


# Launchers ----------------------------------------------------------------------------------------


def plan_for(dy, x, whole_halo, only):
    """The `Plan` for these arrays: as estimated, or as measured on this card, or with `only`."""
    (b, h, w, n), c, backend = dy.shape, x.shape[3], dy.backend

    def planned(only=None):
        return choose_plan(b, h, w, c, n, bool(whole_halo), backend.multiprocessors, only)[1]

    def measured(choice):
        channels, parts, pixels, blocks = choice
        return planned((channels, parts, pixels, blocks))

    if only is None and whole_halo:
        return tuned_or(planned, measured, backend, "conv2d_weight_gradient_3x3 v6", b, h, w, c, n)
    return planned(only and tuple(only))


def hopper_weight_gradient_3x3(
    dy, x, dweight, dbias=None, whole_halo=True, only=None, dchannel=None, accumulate=True
):
    """dweight += …, dbias += …, dchannel = …, for arrays that ../launcher.py has checked.

    accumulate: False: dweight = …
    only: as of `choose_plan`, for tests and `numdiff bench tune`
    """
    (b, h, w, n), c = dy.shape, x.shape[3]
    plan = plan_for(dy, x, whole_halo, only)
    across, down = -(-w // plan.width), -(-h // plan.height)
    places = across * down
    map_dy = tensor_map(dy, (TILE, plan.width, plan.height, plan.images))
    map_x = tensor_map(
        x,
        (plan.channels, plan.width + 2 * bool(whole_halo), plan.height + 2, plan.images),
        swizzle=2 * plan.channels,
    )

    nothing = no_numbers(dy.backend)
    targets = [nothing if a is None else a.reshape(-1) for a in (dweight, dbias, dchannel)]
    # of their parts; of dchannel's one for each chunk of an image
    counts = plan.groups, plan.groups, places
    out, bias_out, channel_out = parts = [
        target
        if count == 1 or target is nothing
        else empty((count * target.size,), np.float32, like=dy)
        for target, count in zip(targets, counts, strict=True)
    ]
    kernel = conv2d_weight_gradient_3x3_kernels_v6[
        plan.channels, plan.width * plan.height * plan.images
    ]
    launch(
        in_bfloat16(kernel, x.dtype),
        (-(-c // plan.channels), -(-n // TILE), plan.parts),
        THREADS,
        Gradient3x3Maps(map_dy, map_x),
        Gradient3x3Arrays(targets[0], targets[1], out, bias_out, channel_out),
        Gradient3x3Shape(b, across, down, c, n),
        Gradient3x3Tiling(
            int(whole_halo), plan.width, plan.height, plan.images, plan.stages, plan.x_bytes
        ),
        Gradient3x3Parts(
            *divmod(plan.chunks, plan.parts), plan.blocks, plan.share, int(accumulate)
        ),
        int(dbias is not None),
        int(dchannel is not None),
        shared=plan.shared,
        cluster=(1, 1, plan.blocks) if plan.blocks > 1 else 1,
    )
    sums = [
        Sum(part, count, target, False)
        for part, count, target in zip(parts, counts, targets, strict=True)
        if count > 1 and target is not nothing
    ]
    if sums:  # only dchannel is read before the backward pass ends
        add_parts(sums, waits=dchannel is None or places == 1)
