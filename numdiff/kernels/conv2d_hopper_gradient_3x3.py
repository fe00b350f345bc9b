"""The weight gradient of a 3 × 3 convolution on Hopper's tensor cores: three taps in one product.

MATHEMATICS
    as in conv2d_hopper_gradient.py:  dweight[n, tap, c] += Σ_p dy[p, n] · x[p + tap - 1, c],  dbias[n] += Σ_p dy[p, n]
SHAPES
    dy (B, H, W, N), x (B, H, W, C): float16; dweight (N, 3, 3, C), dbias (N,): float32, added to
    dchannel (B, N) float32: the sums of dy over each image's pixels, where a vector of its own was added to each image
    C and N multiples of 8, stride 1
WHAT IS NEW, AND WHY IT PAYS
    Three taps below each other see pixels that lie one row of x's box apart. A wgmma's descriptor says how far it is
    from one run of channels to the next (its leading dimension), so with one row as that distance a single product is
    64 channels of dy by CW channels of x for three taps: 3 · CW columns. A matrix of dy is read from shared memory once
    for three taps, so narrow tiles are fast, too: CW is 64, 32 or 16.
    Narrow tiles are what a small image needs. Its pixels must be shared among many blocks, each of which writes float32
    sums of its own that a second kernel adds: 128 blocks with 9 · 64 · 64 sums write 19 MB, with 9 · 64 · 16 only 5.
    Where the tiles alone fill the GPU a block takes all pixels, and adds to dweight itself. Where up to JOINED blocks
    share them, each counts itself done, and the one that finds all others done adds up what they have left in the L2
    cache: no second kernel. A thread's loads for this all start before the first of them is needed.
WHO DOES WHAT  (512 threads: four warpgroups)
    warp 0 asks for boxes of dy and x           one stage for each chunk of 64, 128 or 256 pixels
    warps 1, 2, 3 sum dy's columns for dbias    while the boxes lie there anyway, image by image for dchannel
    warpgroups 1, 2, 3 multiply a column of three taps each, by the whole chunk before they wait
LAUNCH
    grid (tiles of 64 × CW channels, parts): the pixels are shared among `parts` blocks.
DETERMINISM
    a part writes its own sums, in dweight's layout; whoever adds the parts to dweight, the last block or a second
    kernel, adds them in a fixed order. How many parts there are depends on the shape and the GPU's size.
COST
    FLOPs as in conv2d.py; the parts cost 2 · 4 · parts · N · 9 · C bytes, mostly in the L2 cache.
SOURCE
    PTX ISA, section 9.7.15.5.1.2 (descriptors).
READ NEXT
    conv2d_mma.py, the same for GPUs without these instructions.
"""
import functools
from typing import NamedTuple

import numpy as np

from ..device import cuda, empty, float32, int32, launch, load4, store4, uint32, upload
from ..device.hopper import (
    bar_sync,
    fence_barrier_init,
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_wait,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
    tma_load_4d,
    tma_prefetch,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait_1,
)
from ..device.tensor_core import load_word, unpack_half2
from ..device.tensor_map import tensor_map
from .conv2d_hopper import BYTES_A_NS, ROW, SHARED, descriptor, no_numbers
from .im2col import divide

MINIMUM_CAPABILITY = (9, 0)  # wgmma exists there and nowhere else
THREADS = 512
TILE = 64  # channels of dy
WIDTHS = 64, 32, 16  # of x
SIZE, TAPS = 3, 9
MOST_STAGES = 6
BARRIERS = 2 * MOST_STAGES
BIAS_SUMS = 3 * TILE
JOINED = 4  # parts that the last block adds by itself, at most: it reads their sums alone
GROUP_SUMS = 4 * 6  # vectors of a thread whose loads are on their way at a time; three where registers are scarce
COUNTERS = 1024  # one for each tile; where there are more, a second kernel adds the parts
ALL_BUT_ONE = THREADS - 32  # threads: warp 0 has only the copies to start
ADD_THREADS = 256  # of the second kernel
ADD_FLOATS = 4 * ADD_THREADS
ADD_WANTED = 132 * 2048  # threads that fill a GPU

wgmma_192, wgmma_96, wgmma_48 = (make_wgmma(3 * width, True, True) for width in WIDTHS)
wait_192, wait_96, wait_48 = (make_wgmma_wait(3 * width) for width in WIDTHS)
producer_registers, consumer_registers = make_setmaxnreg(56, False), make_setmaxnreg(152, True)


@cuda.jit(device=True, forceinline=True)
def multiply_first(CW, acc, a, b):
    """acc = A · B for 16 pixels. The 0 must be a literal: see hopper.py."""
    if CW == 64:
        wgmma_192(acc, a, b, int32(0))
    elif CW == 32:
        wgmma_96(acc, a, b, int32(0))
    else:
        wgmma_48(acc, a, b, int32(0))


@cuda.jit(device=True, forceinline=True)
def multiply(CW, acc, a, b):
    """acc += A · B for 16 pixels."""
    if CW == 64:
        wgmma_192(acc, a, b, int32(1))
    elif CW == 32:
        wgmma_96(acc, a, b, int32(1))
    else:
        wgmma_48(acc, a, b, int32(1))


@cuda.jit(device=True, forceinline=True)
def wait_for(CW, acc):
    """Wait for all products; acc may be read then."""
    if CW == 64:
        wait_192(acc)
    elif CW == 32:
        wait_96(acc)
    else:
        wait_48(acc)


@cuda.jit(device=True, forceinline=True)
def exchange(CW, begin, acc, odd):
    """A thread has two sums of row n and two of row n + 8: in pairs of lanes, four neighbours of one row instead.

    For a tap's vectors, from number `begin` on.
    """
    for j in range(begin, begin + CW // 8):
        k = 4 * j
        a0, a1, a2, a3 = acc[k], acc[k + 1], acc[k + 2], acc[k + 3]
        b0 = cuda.shfl_xor_sync(0xFFFFFFFF, a0 if odd else a2, 1)
        b1 = cuda.shfl_xor_sync(0xFFFFFFFF, a1 if odd else a3, 1)
        acc[k], acc[k + 1] = b0 if odd else a0, b1 if odd else a1
        acc[k + 2], acc[k + 3] = a2 if odd else b0, a3 if odd else b1


@cuda.jit(device=True, forceinline=True)
def offset_of(CW, vector, tap_row):
    """Elements from a thread's first vector of four sums to another."""
    return int32(vector // (CW // 8) * tap_row + vector % (CW // 8) * 8)


@cuda.jit(device=True, forceinline=True)
def write_tap(CW, tap, out, at, acc, left):
    """A thread's sums of one of its taps; left: channels from the tile's first, none in a row beyond the last."""
    k = tap * CW // 2
    for j in range(CW // 8):
        if 8 * j < left:
            store4(out, at + 8 * j, acc[k + 4 * j], acc[k + 4 * j + 1], acc[k + 4 * j + 2], acc[k + 4 * j + 3])


@cuda.jit(device=True, forceinline=True)
def add_sums(CW, begin, count, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left):
    """dweight += the parts' sums in their order, `count` vectors of a thread; its own, of part `part`, are in acc."""
    for v in range(count):
        vector = begin + v
        a0 = a1 = a2 = a3 = float32(0)
        if vector % (CW // 8) * 8 < left:
            a0, a1, a2, a3 = load4(dweight, to + offset_of(CW, vector, tap_row))
        total[4 * v], total[4 * v + 1], total[4 * v + 2], total[4 * v + 3] = a0, a1, a2, a3
    for other in range(parts):
        if other == part:
            for k in range(4 * count):
                total[k] += acc[4 * begin + k]
        else:
            at = np.int64(other) * part_size + to
            for v in range(count):
                vector = begin + v
                a0 = a1 = a2 = a3 = float32(0)
                if vector % (CW // 8) * 8 < left:
                    a0, a1, a2, a3 = load4(partial, at + offset_of(CW, vector, tap_row))
                total[4 * v] += a0
                total[4 * v + 1] += a1
                total[4 * v + 2] += a2
                total[4 * v + 3] += a3
    for v in range(count):
        vector, k = begin + v, 4 * v
        if vector % (CW // 8) * 8 < left:
            store4(dweight, to + offset_of(CW, vector, tap_row), total[k], total[k + 1], total[k + 2], total[k + 3])


@cuda.jit(device=True, forceinline=True)
def last_of(counter, tile, parts, ticket, t):
    """Whether this block is the last of a tile's that comes here; the counter is 0 again then. For ALL_BUT_ONE."""
    bar_sync(uint32(2), uint32(ALL_BUT_ONE))
    if t == 32:
        cuda.threadfence()  # what the block has written is seen by whoever finds it counted
        before = cuda.atomic.add(counter, tile, int32(1))
        if before == parts - 1:
            counter[tile] = int32(0)
        cuda.threadfence()
        ticket[0] = before
    bar_sync(uint32(2), uint32(ALL_BUT_ONE))
    return ticket[0] == parts - 1


@cuda.jit(device=True, forceinline=True)
def multiply_chunk(CW, begin, acc, dy_at, x_at, tile_w, tile_h, pitch, box_h, sub_blocks):
    """acc += the products of a chunk's sub-blocks of 8 × 8 pixels, from number `begin` (0 or 1) on."""
    X_ROW, SWIZZLE = 2 * CW, 1 if CW == 64 else 2 if CW == 32 else 3
    dy_stride, x_stride = uint32(tile_w * ROW), uint32(pitch * X_ROW)  # from eight pixels to those below
    dy_step, x_step = np.uint64(dy_stride >> uint32(3)), np.uint64(x_stride >> uint32(3))  # 16 pixels, in descriptors
    i, j = int32(0), int32(0)  # columns and rows from the tile's first pixel to the sub-block's
    for sub in range(sub_blocks):
        if sub >= begin:
            da = descriptor(dy_at, uint32(16), dy_stride, 1)
            db = descriptor(x_at, x_stride, x_stride, SWIZZLE)
            multiply(CW, acc, da, db)
            multiply(CW, acc, da + dy_step, db + x_step)
            multiply(CW, acc, da + dy_step + dy_step, db + x_step + x_step)
            multiply(CW, acc, da + dy_step + dy_step + dy_step, db + x_step + x_step + x_step)
        i += int32(8)
        dy_at += uint32(8 * ROW)
        x_at += uint32(8 * X_ROW)
        if i == tile_w:
            i, j = int32(0), int32(j + 8)
            dy_at += uint32(7 * tile_w * ROW)
            x_at += uint32((8 * pitch - tile_w) * X_ROW)
            if j == tile_h:
                j = int32(0)
                x_at += uint32((box_h - tile_h) * pitch * X_ROW)


def make_kernel(CW):
    """The kernel for tiles of CW channels of x."""
    ACCUMULATORS = 3 * CW // 2
    X_ROW = 2 * CW  # bytes of a pixel in x's box, and of its swizzle
    SWIZZLE = {64: 1, 32: 2, 16: 3}[CW]  # in a descriptor

    def kernel(map_dy, map_x, dweight, dbias, channel_out, partial, bias_partial, counter, images, height, width, C, N,
               whole_halo, tile_w, tile_h, tile_images, stages, x_bytes, chunks, part_chunks, has_bias, has_channel,
               adds):
        """partial (parts, N, taps, C), bias_partial (parts, N): the parts' sums; `adds`: the last block adds them.

        channel_out (places of a chunk in an image, B, N)
        """
        tiles = cuda.shared.array(0, np.uint8, alignment=1024)
        barriers = cuda.shared.array(BARRIERS, np.uint64)
        bias_sums = cuda.shared.array(BIAS_SUMS, float32)
        ticket = cuda.shared.array(1, np.int32)
        base, full0 = smem_u32(tiles), smem_u32(barriers)
        empty0 = full0 + uint32(8 * MOST_STAGES)
        t = int32(cuda.threadIdx.x)
        warpgroup = t >> 7

        pitch = int32(tile_w + 2 if whole_halo else tile_w)
        box_h = int32(tile_h + 2)
        copy_rows = int32(pitch * box_h * tile_images)
        copies = int32(1 if whole_halo else SIZE)
        pixels = int32(tile_w * tile_h * tile_images)
        dy_bytes = uint32(pixels * ROW)
        stage_bytes = dy_bytes + uint32(x_bytes)
        across, down = divide(width + tile_w - 1, tile_w)[0], divide(height + tile_h - 1, tile_h)[0]
        line, column = divide(cuda.blockIdx.x, divide(C + CW - 1, int32(CW))[0])
        sums_dy = (has_bias != 0 or has_channel != 0) and column == 0
        part, parts = int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
        first_chunk = int32(cuda.blockIdx.y * part_chunks)
        last_chunk = int32(min(first_chunk + part_chunks, chunks))
        if t == 0:
            for stage in range(MOST_STAGES):
                mbarrier_init(full0 + uint32(8 * stage), uint32(1))
                mbarrier_init(empty0 + uint32(8 * stage), uint32(6 if sums_dy else 3))
            fence_barrier_init()
        cuda.syncthreads()

        if warpgroup == 0:
            producer_registers()
            if t == 0:
                tma_prefetch(map_dy)
                tma_prefetch(map_x)
                stage, parity = int32(0), uint32(1)
                for chunk in range(first_chunk, last_chunk):
                    rest, i = divide(chunk, across)
                    images_before, j = divide(rest, down)
                    w, h, image = int32(i * tile_w), int32(j * tile_h), uint32(images_before * tile_images)
                    full = full0 + uint32(8) * uint32(stage)
                    mbarrier_wait(empty0 + uint32(8) * uint32(stage), parity)
                    mbarrier_expect_tx(full, dy_bytes + uint32(copies * copy_rows * X_ROW))
                    to = base + uint32(stage) * stage_bytes
                    tma_load_4d(to, map_dy, full, uint32(line * TILE), uint32(w), uint32(h), image)
                    for copy in range(copies):
                        tma_load_4d(to + dy_bytes + uint32(copy * copy_rows * X_ROW), map_x, full, uint32(column * CW),
                                    uint32(w - 1 + copy), uint32(h - 1), image)
                    stage += int32(1)
                    if stage == stages:
                        stage, parity = int32(0), parity ^ uint32(1)
            elif t >= 32:
                # a lane has two channels; each of the three warps every third group of eight pixels of an image
                lane, warp = t & 31, int32((t >> 5) - 1)
                k = int32(t - 32)
                n = int32(line * TILE + k)
                exists = k < TILE and n < N
                if sums_dy:
                    low = high = float32(0)
                    stage, parity = int32(0), uint32(0)
                    eights = int32(tile_w * tile_h >> 3)
                    for chunk in range(first_chunk, last_chunk):
                        mbarrier_wait(full0 + uint32(8) * uint32(stage), parity)
                        at = int32(uint32(stage) * stage_bytes) + (lane & 3) * 4
                        before, place = divide(chunk, int32(across * down))
                        for i in range(tile_images):
                            image = int32(before * tile_images + i)
                            image_low = image_high = float32(0)
                            for eight in range(warp, eights, int32(3)):
                                for pixel in range(8):
                                    a, b = unpack_half2(load_word(tiles, int32(
                                        at + (i * eights + eight) * 1024 + pixel * 128 + ((lane >> 2) ^ pixel) * 16)))
                                    image_low += a
                                    image_high += b
                            low += image_low
                            high += image_high
                            if has_channel:
                                bias_sums[warp * TILE + 2 * lane] = image_low
                                bias_sums[warp * TILE + 2 * lane + 1] = image_high
                                bar_sync(uint32(1), uint32(96))
                                if exists and image < images:
                                    channel_out[(place * images + image) * N + n] = (
                                        bias_sums[k] + bias_sums[TILE + k] + bias_sums[2 * TILE + k])
                                bar_sync(uint32(1), uint32(96))
                        cuda.syncwarp()
                        if lane == 0:
                            mbarrier_arrive(empty0 + uint32(8) * uint32(stage))
                        stage += int32(1)
                        if stage == stages:
                            stage, parity = int32(0), parity ^ uint32(1)
                    bias_sums[warp * TILE + 2 * lane] = low
                    bias_sums[warp * TILE + 2 * lane + 1] = high
                    bar_sync(uint32(1), uint32(96))
                sums = has_bias != 0 and column == 0 and exists
                mine = float32(0)
                if sums:
                    mine = bias_sums[k] + bias_sums[TILE + k] + bias_sums[2 * TILE + k]
                    if parts > 1:
                        bias_partial[part * N + n] = mine
                last = adds != 0
                if adds != 0 and parts > 1:
                    last = last_of(counter, cuda.blockIdx.x, parts, ticket, t)
                if sums and last:
                    total = float32(0)
                    for other in range(parts):
                        total += mine if other == part else bias_partial[other * N + n]
                    dbias[n] += total
        else:
            consumer_registers()
            acc = cuda.local.array(ACCUMULATORS, np.float32)
            arrives = (t & 127) == 0
            tap_column = int32(warpgroup - 1)
            shift = dy_bytes + uint32(tap_column * (1 if whole_halo else copy_rows) * X_ROW)
            dy_stride, x_stride = uint32(tile_w * ROW), uint32(pitch * X_ROW)  # from eight pixels to those below
            dy_step, x_step = np.uint64(dy_stride >> uint32(3)), np.uint64(x_stride >> uint32(3))
            sub_blocks = pixels >> 6
            stage, parity = int32(0), uint32(0)

            # the first chunk: acc = …
            mbarrier_wait(full0, uint32(0))
            da = descriptor(base, uint32(16), dy_stride, 1)
            db = descriptor(base + shift, x_stride, x_stride, SWIZZLE)
            wgmma_fence()
            multiply_first(CW, acc, da, db)
            for _ in range(3):
                da += dy_step
                db += x_step
                multiply(CW, acc, da, db)
            multiply_chunk(CW, int32(1), acc, base, base + shift, tile_w, tile_h, pitch, box_h, sub_blocks)
            wgmma_commit()

            # all others: acc += …
            for _ in range(int32(first_chunk + 1), last_chunk):
                before = stage
                stage += int32(1)
                if stage == stages:
                    stage, parity = int32(0), parity ^ uint32(1)
                at = base + uint32(stage) * stage_bytes
                mbarrier_wait(full0 + uint32(8) * uint32(stage), parity)
                wgmma_fence()
                multiply_chunk(CW, int32(0), acc, at, at + shift, tile_w, tile_h, pitch, box_h, sub_blocks)
                wgmma_commit()
                wgmma_wait_1()
                if arrives:  # the stage before has been multiplied
                    mbarrier_arrive(empty0 + uint32(8) * uint32(before))
            wait_for(CW, acc)
            if arrives:
                mbarrier_arrive(empty0 + uint32(8) * uint32(stage))
            # a thread writes four neighbouring channels at a time, of row n or of row n + 8
            thread = t & 127
            odd = thread & 1
            n = int32(line * TILE + (thread >> 5) * 16 + ((thread & 31) >> 2) + odd * 8)
            first_c = int32(column * CW)
            to = int32(n * (TAPS * C) + tap_column * C + first_c + (thread & 2) * 2)
            left = int32(C - first_c if n < N else 0)
            tap_row, part_size = int32(SIZE * C), int32(N * TAPS * C)
            exchange(CW, 0, acc, odd)
            exchange(CW, CW // 8, acc, odd)
            exchange(CW, CW // 4, acc, odd)
            if parts > 1:
                mine = np.int64(part) * part_size + to
                write_tap(CW, 0, partial, mine, acc, left)
                write_tap(CW, 1, partial, mine + tap_row, acc, left)
                write_tap(CW, 2, partial, mine + 2 * tap_row, acc, left)
            last = adds != 0
            if adds != 0 and parts > 1:
                last = last_of(counter, cuda.blockIdx.x, parts, ticket, t)
            if last:
                total = cuda.local.array(GROUP_SUMS, np.float32)
                if CW == 64:
                    add_sums(CW, 0, 3, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)
                    add_sums(CW, 3, 3, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)
                    add_sums(CW, 6, 3, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)
                    add_sums(CW, 9, 3, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)
                    add_sums(CW, 12, 3, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)
                    add_sums(CW, 15, 3, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)
                    add_sums(CW, 18, 3, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)
                    add_sums(CW, 21, 3, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)
                else:
                    add_sums(CW, 0, 6, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)
                    if CW == 32:
                        add_sums(CW, 6, 6, dweight, to, acc, total, partial, part_size, part, parts, tap_row, left)

    kernel.__name__ = f"conv2d_weight_gradient_3x3_kernel_v6_{CW}"
    return cuda.jit(kernel, launch_bounds=(THREADS, 1))


conv2d_weight_gradient_3x3_kernels_v6 = {width: make_kernel(width) for width in WIDTHS}


@cuda.jit(device=True, forceinline=True)
def four(array, at, exists):
    """Four neighbours, or zeros."""
    a0 = a1 = a2 = a3 = float32(0)
    if exists:
        a0, a1, a2, a3 = load4(array, at)
    return a0, a1, a2, a3


@cuda.jit
def add_gradient_parts_kernel(partial, dweight, vectors, bias_partial, dbias, bias_vectors, parts, channel_partial,
                              dchannel, channel_vectors, places):
    """dweight += the parts' sums, four by four, dbias likewise; dchannel = the sum over the places. One, then another.

    A block's rows share the parts.
    """
    tile = cuda.shared.array(ADD_FLOATS, float32)
    lane, share = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y)
    lanes, shares = int32(cuda.blockDim.x), int32(cuda.blockDim.y)
    blocks, bias_blocks = divide(vectors + lanes - 1, lanes)[0], divide(bias_vectors + lanes - 1, lanes)[0]
    block, which = int32(cuda.blockIdx.x), int32(0)
    if block >= blocks + bias_blocks:
        block, which = int32(block - blocks - bias_blocks), int32(2)
    elif block >= blocks:
        block, which = int32(block - blocks), int32(1)
    vector = int32(block * lanes + lane)
    count = vectors if which == 0 else bias_vectors if which == 1 else channel_vectors
    source = partial if which == 0 else bias_partial if which == 1 else channel_partial
    terms = int32(places if which == 2 else parts)
    target = dweight if which == 0 else dbias if which == 1 else dchannel
    first = share == 0 and vector < count
    o0, o1, o2, o3 = four(target, np.int64(vector) * 4, first and which != 2)  # on its way as well, perhaps from afar
    s0 = s1 = s2 = s3 = float32(0)
    if vector < count:
        part = share
        at, step = (np.int64(share) * count + vector) * 4, np.int64(shares) * count * 4
        while part < terms:  # four loads on their way at a time
            a0, a1, a2, a3 = load4(source, at)
            b0, b1, b2, b3 = four(source, at + step, part + shares < terms)
            c0, c1, c2, c3 = four(source, at + 2 * step, part + 2 * shares < terms)
            d0, d1, d2, d3 = four(source, at + 3 * step, part + 3 * shares < terms)
            s0, s1, s2, s3 = s0 + a0 + b0 + c0 + d0, s1 + a1 + b1 + c1 + d1, s2 + a2 + b2 + c2 + d2, \
                s3 + a3 + b3 + c3 + d3
            at += 4 * step
            part = int32(part + 4 * shares)
    mine = int32((share * lanes + lane) * 4)
    tile[mine], tile[mine + 1], tile[mine + 2], tile[mine + 3] = s0, s1, s2, s3
    cuda.syncthreads()
    if first:
        for other in range(int32(1), shares):
            mine = int32((other * lanes + lane) * 4)
            s0, s1, s2, s3 = s0 + tile[mine], s1 + tile[mine + 1], s2 + tile[mine + 2], s3 + tile[mine + 3]
        store4(target, vector * 4, o0 + s0, o1 + s1, o2 + s2, o3 + s3)


# Launchers ------------------------------------------------------------------------------------------------------------

class Plan(NamedTuple):
    """How the work is cut: tiles of `channels` channels of x, chunks of width × height pixels of `images` images.

    joined: the last block of each tile adds the parts, or there is one part alone
    """

    channels: int
    width: int
    height: int
    images: int
    stages: int
    x_bytes: int
    chunks: int
    part_chunks: int
    parts: int
    joined: bool

    @property
    def shared(self):
        return self.stages * (self.width * self.height * self.images * ROW + self.x_bytes)


START_NS, CHUNK_NS, PASS_NS = 4500.0, 100.0, 2000.0  # launch to first product, and last sums; a stage; the second pass
WRITTEN_A_NS, READ_A_NS = 3000.0, 4000.0  # bytes of the parts, through the L2 cache
JOIN_NS, JOINED_A_NS = 1200.0, 55.0  # to find out which block is the last; bytes that it reads, its loads 36 KiB a turn
PRODUCTS_A_NS = 6000.0  # FLOPs of a multiprocessor, where shared memory keeps up
SLOWEST_ROW = 64  # bytes as which the copy engine's shorter rows count


@functools.lru_cache(maxsize=4096)
def choose_plan(B, H, W, C, N, whole_halo, multiprocessors, only=None):
    """(estimate of nanoseconds, `Plan`) with the lowest estimate; only: (CW, parts, joined), None for any."""
    best, (only_width, only_parts, only_joined) = None, only or (None, None, None)
    for channels in WIDTHS if only_width is None else (only_width,):
        tiles = -(-C // channels) * -(-N // TILE)
        # 128 bytes a cycle: a matrix of dy and three of x for each product, and what arrives
        reading = 16 + 0.75 * channels + (128 + 2.8 * channels) / 24
        slow = max(1.0, reading / (1.5 * channels))
        for width in (8, 16, 32):
            for height in (8, 16, 32):
                for pixels in (64, 128, 256):
                    images, rest = divmod(pixels, width * height)
                    if rest or not images:
                        continue
                    rows = (width + 2 * whole_halo) * (height + 2) * images * (1 if whole_halo else SIZE)
                    x_bytes = -(-rows * 2 * channels // 1024) * 1024
                    stages = min(SHARED // (pixels * ROW + x_bytes), MOST_STAGES)
                    if stages < 2:
                        continue
                    chunks = -(-W // width) * -(-H // height) * -(-B // images)
                    moved = (pixels * ROW + rows * max(2 * channels, SLOWEST_ROW)) / BYTES_A_NS
                    multiplied = 2 * pixels * TILE * channels * TAPS / PRODUCTS_A_NS * slow
                    chunk = (1.2 if stages == 2 else 1.0) * max(moved, multiplied) + 0.1 * min(moved, multiplied)
                    wanted = {turns * multiprocessors // tiles for turns in (1, 2, 3)} | {1, 2, 3, 4, 6, 8, 12, 16}
                    for parts in sorted(wanted) if only_parts is None else (only_parts,):
                        part_chunks = -(-chunks // max(1, min(chunks, parts)))
                        parts = -(-chunks // part_chunks)
                        rounds = -(-parts * tiles // multiprocessors)
                        estimate = START_NS + rounds * part_chunks * (CHUNK_NS + chunk) + (rounds - 1) * 1500
                        written = 4 * parts * tiles * TAPS * TILE * channels
                        joined = parts == 1
                        if joined:
                            estimate += 2 * written / WRITTEN_A_NS
                        else:
                            estimate += written / WRITTEN_A_NS
                            second = PASS_NS + (written + 8 * N * TAPS * C) / READ_A_NS
                            own = 4 * parts * TAPS * TILE * channels  # bytes that the last block reads
                            last = JOIN_NS + own / JOINED_A_NS
                            joined = parts <= JOINED and last < second if only_joined is None else only_joined
                            joined = joined and tiles <= COUNTERS
                            estimate += last if joined else second
                        if best is None or estimate < best[0]:
                            best = estimate, Plan(channels, width, height, images, stages, x_bytes, chunks, part_chunks,
                                                  parts, joined)
    return best


@functools.cache
def counters(backend):
    """For each tile, how many of its blocks are done; every launch leaves zeros."""
    return upload(np.zeros(COUNTERS, np.int32), backend)


def hopper_weight_gradient_3x3(dy, x, dweight, dbias=None, whole_halo=True, only=None, dchannel=None):
    """dweight += …, dbias += …, dchannel = …, for arrays that conv2d.py has checked."""
    b, h, w, n = dy.shape
    c = x.shape[3]
    backend = dy.backend
    plan = choose_plan(b, h, w, c, n, bool(whole_halo), backend.multiprocessors, only)[1]
    nothing, adds, tiles = no_numbers(backend), plan.joined, -(-c // plan.channels) * -(-n // TILE)
    places = -(-w // plan.width) * -(-h // plan.height)
    map_dy = tensor_map(dy, (TILE, plan.width, plan.height, plan.images))
    map_x = tensor_map(x, (plan.channels, plan.width + 2 * bool(whole_halo), plan.height + 2, plan.images),
                       swizzle=2 * plan.channels)
    partial = bias_partial = channel_out = nothing
    if plan.parts > 1:
        partial = empty((plan.parts * dweight.size,), np.float32, like=dy)
        bias_partial = nothing if dbias is None else empty((plan.parts * n,), np.float32, like=dy)
    if dchannel is not None:  # where a chunk has all of an image, its sums are the result
        channel_out = dchannel.reshape(-1) if places == 1 else empty((places * b * n,), np.float32, like=dy)
    bias_target = nothing if dbias is None else dbias
    launch(conv2d_weight_gradient_3x3_kernels_v6[plan.channels], (tiles, plan.parts), THREADS, map_dy, map_x,
           dweight.reshape(-1), bias_target, channel_out, partial, bias_partial, counters(backend), b, h, w, c, n,
           int(whole_halo), plan.width, plan.height, plan.images, plan.stages, plan.x_bytes, plan.chunks,
           plan.part_chunks, int(dbias is not None), int(dchannel is not None), int(adds), shared=plan.shared)
    vectors = 0 if adds else dweight.size // 4
    bias_vectors = 0 if adds or dbias is None else n // 4
    channel_vectors = 0 if dchannel is None or places == 1 else b * n // 4
    if not vectors + channel_vectors:
        return
    shares = 1
    while shares < 32 and 2 * shares <= max(plan.parts, places) and 2 * shares * vectors <= ADD_WANTED:
        shares *= 2
    lanes = ADD_THREADS // shares
    launch(add_gradient_parts_kernel, sum(-(-v // lanes) for v in (vectors, bias_vectors, channel_vectors)),
           (lanes, shares), partial, dweight.reshape(-1), vectors, bias_partial, bias_target, bias_vectors, plan.parts,
           channel_out, nothing if dchannel is None else dchannel.reshape(-1), channel_vectors, places)
