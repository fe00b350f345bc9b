"""Convolution on Hopper's tensor cores: an implicit GEMM that the copy engine feeds, forward and input gradient.

MATHEMATICS
    forward          y[p, n] = Σ_tap Σ_c x[p + tap - pad, c] · weight[n, tap, c]
    input gradient   dx[p, c] = Σ_tap Σ_n dy[p + tap - pad, n] · weight[n, taps - 1 - tap, c]        (stride 1)
    then + bias[n] + channel[image of p, n] + residual[p, n], rounded to float16 once. Where a GroupNorm reads y next,
    the mean and variance of each two channels over each 8 × 8 pixels are left for it.
    A block takes a tile of pixels and of output channels, and sums over blocks of 64 input channels and, in each, over
    the taps. For one tap that is a plain matrix product: pixels × 64 by 64 × channels. The pixels of another tap are
    the same ones moved by some rows and columns, so nothing is gathered: the copy engine brings the tile of pixels WITH
    ITS HALO once, zeros where that leaves the image (which is the padding), and each tap begins to read it at another
    row.
SHAPES
    x (B, H, W, C), weight (N, kernel, kernel, C), y and residual (B, H, W, N): float16
    bias (N,), channel (B, N): float32; statistics (B, H / 8 · W / 8, 2, N / 2) float32: groupnorm/normalise.py
    C and N multiples of 8 (a row of the copy engine is a multiple of 16 bytes), kernel odd, stride 1; any B, H, W
VERSIONS
    v5  for each column of taps its own box of pixels: tile_w columns wide, with a halo above and below. A row of it is
        a multiple of eight pixels, so every matrix begins where the swizzle's pattern begins.
    v6  one box with the whole halo. A box of 16 × 16 pixels becomes 18 × 18: 1.27 times the pixels cross from L2 where
        v5 moves 3.4 times and a box for each tap 9 times. The matrix of a tap begins at any row of 128 bytes: the
        swizzle goes by the bits of the address, so that is where the copy engine has put it.
    The kernels are the same; what differs is told by their arguments.
HOW A TILE LIES IN SHARED MEMORY
    A pixel is a row of 64 channels, 128 bytes. Eight neighbouring pixels of an image row are one group of a wgmma's
    matrix, the eight rows of images below each other its eight groups: a SUB-BLOCK of 8 × 8 pixels, whose groups lie
    one image row of the box apart. A wgmma takes one sub-block; a tile is 2, or 4, of them, side by side, below each
    other, or in several images. Each is stored by itself, clipped by the copy engine where the image ends.
WHO DOES WHAT  (384 threads: three warpgroups)
    warp 0 asks for boxes of pixels      one stage for each block of channels (v6), or column of taps (v5)
    warp 3 asks for the weight           one stage a tap, or a column of three (kernels of their own: a third of the
                                         waits); where all of it fits, once and for all tiles (`resident`)
    warps 1, 2 store what a consumer has written, make its statistics, and bring it the next residual, to where its
                                         result will lie, and what is added to each channel: while the others multiply
    warpgroups 1, 2 multiply: sub_blocks of 64 pixels each, by BN output channels. Where shared memory holds all that a
                                         tile needs they take turns (`by_turns`): one multiplies, one writes its results
LAUNCH
    as many blocks as multiprocessors, each walks over tiles; shared memory: weight stages, output buffers, pixel
    stages.
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
from ...device.mbarrier import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
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
from ..any_batch import assumed
from ..common import divide, no_numbers
from ..tuning import tuned_or

u64 = np.uint64

MINIMUM_CAPABILITY = (9, 0)  # wgmma exists there and nowhere else
THREADS = 384
BK = 64  # input channels in a stage: 128 bytes, as far as the swizzle reaches
ROW = 128  # bytes of a pixel in a stage
MOST_A, MOST_B = 4, 12  # stages
BARRIERS = 2 * MOST_A + 2 * MOST_B + 6
SHARED = 227 * 1024 - 1024  # bytes of dynamic shared memory; the barriers and the alignment take less than the rest
WIDTHS = 32, 64, 96, 128  # BN: output channels of a tile
EVERYBODY = 0xFFFFFFFF

wgmma_32, wgmma_64, wgmma_96, wgmma_128 = (make_wgmma(n) for n in WIDTHS)
wgmma_t_32, wgmma_t_64, wgmma_t_96, wgmma_t_128 = (make_wgmma(n, transpose_b=True) for n in WIDTHS)
wait_32, wait_64, wait_96, wait_128 = (make_wgmma_wait(n) for n in WIDTHS)
producer_registers, consumer_registers = make_setmaxnreg(72, False), make_setmaxnreg(216, True)


# Device functions -----------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def descriptor(address, leading, stride, swizzle):
    """A wgmma's matrix descriptor; leading, stride: bytes; swizzle: 1 for 128 bytes, 2 for 64 (emulator/wgmma.py)."""
    return (u64((address & uint32(0x3FFFF)) >> uint32(4)) | (u64(leading >> uint32(4)) << u64(16))
            | (u64(stride >> uint32(4)) << u64(32)) | (u64(swizzle) << u64(62)))


@cuda.jit(device=True, forceinline=True)
def multiply_first(BN, transposed, acc, a, b):
    """acc = A · B for 16 channels. The 0 must be a literal: see ../../device/wgmma.py."""
    if transposed:
        if BN == 32:
            wgmma_t_32(acc, a, b, int32(0))
        elif BN == 64:
            wgmma_t_64(acc, a, b, int32(0))
        elif BN == 96:
            wgmma_t_96(acc, a, b, int32(0))
        else:
            wgmma_t_128(acc, a, b, int32(0))
    else:
        if BN == 32:
            wgmma_32(acc, a, b, int32(0))
        elif BN == 64:
            wgmma_64(acc, a, b, int32(0))
        elif BN == 96:
            wgmma_96(acc, a, b, int32(0))
        else:
            wgmma_128(acc, a, b, int32(0))


@cuda.jit(device=True, forceinline=True)
def multiply(BN, transposed, acc, a, b):
    """acc += A · B for 16 channels."""
    if transposed:
        if BN == 32:
            wgmma_t_32(acc, a, b, int32(1))
        elif BN == 64:
            wgmma_t_64(acc, a, b, int32(1))
        elif BN == 96:
            wgmma_t_96(acc, a, b, int32(1))
        else:
            wgmma_t_128(acc, a, b, int32(1))
    else:
        if BN == 32:
            wgmma_32(acc, a, b, int32(1))
        elif BN == 64:
            wgmma_64(acc, a, b, int32(1))
        elif BN == 96:
            wgmma_96(acc, a, b, int32(1))
        else:
            wgmma_128(acc, a, b, int32(1))


@cuda.jit(device=True, forceinline=True)
def multiply_tap(BN, SUB, transposed, acc, acc_2, a_1, a_2, a_stride, b, b_step):
    """acc += a tap's products for 64 channels, acc_2 likewise where a warpgroup has two sub-blocks.

    a_1, a_2: addresses of the sub-blocks' pixels; b: the weight's descriptor, b_step: from 16 channels to the next
    """
    a = descriptor(a_1, uint32(16), a_stride, 1)
    multiply(BN, transposed, acc, a, b)
    multiply(BN, transposed, acc, a + u64(2), b + u64(b_step))
    multiply(BN, transposed, acc, a + u64(4), b + u64(2 * b_step))
    multiply(BN, transposed, acc, a + u64(6), b + u64(3 * b_step))
    if SUB == 2:
        a = descriptor(a_2, uint32(16), a_stride, 1)
        multiply(BN, transposed, acc_2, a, b)
        multiply(BN, transposed, acc_2, a + u64(2), b + u64(b_step))
        multiply(BN, transposed, acc_2, a + u64(4), b + u64(2 * b_step))
        multiply(BN, transposed, acc_2, a + u64(6), b + u64(3 * b_step))


@cuda.jit(device=True, forceinline=True)
def wait_for(BN, acc):
    """Wait for all products; acc may be read then."""
    if BN == 32:
        wait_32(acc)
    elif BN == 64:
        wait_64(acc)
    elif BN == 96:
        wait_96(acc)
    else:
        wait_128(acc)


@cuda.jit(device=True, forceinline=True)
def place_of(tile, columns, across, down):
    """(column of tiles, tile across, tile down, group of images) of a tile; neighbours in a launch share pixels."""
    rest, column = divide(tile, columns)
    rest, i = divide(rest, across)
    image, j = divide(rest, down)
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
def bring_addends(BN, addends, at, first, N, bias, channel, channel_at, has_bias, has_channel):
    """addends[at … at + BN - 1] = what is added to each channel of a sub-block from `first` on, by a warp."""
    for k in range(BN // 32):
        n = int32(32 * k + (cuda.threadIdx.x & 31))
        total = float32(0)
        if first + n < N:
            if has_bias:
                total += bias[first + n]
            if has_channel:
                total += channel[channel_at + first + n]
        addends[at + n] = total


@cuda.jit(device=True, forceinline=True)
def write_sub_block(BN, tiles, at, acc, addends, addends_at, has_addends, has_residual):
    """A warpgroup's 64 × BN sums into its buffer, as rows of COLS channels, swizzled as the copy engine takes them.

    The residual lies where they go; all of it is asked for before any of it is needed. In a row of eight pixels, eight
    rows of lanes write the same chunk of 16 bytes: the swizzle puts them in eight places, so that a warp's store
    touches each bank once.
    """
    COLS = 64 if BN % 64 == 0 else 32
    old = cuda.local.array(32, np.uint32)
    thread = int32(cuda.threadIdx.x & 127)
    lane = thread & 31
    row = int32((thread >> 5) * 16 + (lane >> 2))
    turn = row & 7 if COLS == 64 else (row >> 1) & 3
    row_at = int32(at + row * 2 * COLS + (lane & 3) * 4)
    if has_addends:
        for j in range(BN // 8):
            n = int32(addends_at + j * 8 + (lane & 3) * 2)
            low, high = addends[n], addends[n + 1]
            acc[4 * j] += low
            acc[4 * j + 1] += high
            acc[4 * j + 2] += low
            acc[4 * j + 3] += high
    if has_residual:
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
def leave_statistics(BN, tiles, at, statistics, to, left, columns):
    """Statistics of a sub-block as it lies in its buffer, by a warp; left: pairs of channels that exist.

    Of each two channels the mean goes to statistics[to …], the variance to `columns` later.
    A lane has two channels, of every second pixel where rows are short, so that a warp's loads touch each bank once. It
    sums beside the first of its numbers, so that q - s² / n cancels no more than groupnorm/chunks.py says.
    """
    COLS = 64 if BN % 64 == 0 else 32
    LANES, PIXELS = COLS // 2, COLS  # of a pixel; of a lane
    words = cuda.local.array(8, np.uint32)
    lane = int32(cuda.threadIdx.x & 31)
    own, half, share = int32(lane & (LANES - 1)), int32(lane // LANES), float32(1) / float32(2 * PIXELS)
    for slab in range(BN // COLS):
        from_here = int32(at + slab * 128 * COLS + half * 2 * COLS + (own & 3) * 4)
        first = unpack_half2(load_word(tiles, int32(from_here + (own >> 2) * 16)))[0]
        s = q = float32(0)
        for eight in range(PIXELS // 8):  # eight at once: each takes its time
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
            mean_2 = cuda.shfl_xor_sync(EVERYBODY, mean, 16)
            squares += cuda.shfl_xor_sync(EVERYBODY, squares, 16) + float32(PIXELS) * (mean - mean_2) * (mean - mean_2)
            mean = float32(0.5) * (mean + mean_2)
        pair = int32(slab * LANES + own)
        if pair < left and half == 0:
            statistics[to + pair], statistics[to + columns + pair] = mean, squares * float32(1 / 128)


# The kernel -----------------------------------------------------------------------------------------------------------

def make_kernel(BN, SUB, together, transposed):
    """The kernel for tiles of BN output channels and 128 · SUB pixels.

    together: taps of the weight in a stage. A constant: a branch among the products of a turn ends their group.
    transposed: the input gradient. There the weight's tile is read across: its 64 rows are the inner dimension, and
        output channels lie next to each other.
    """
    R = BN // 2  # sums of a thread for a sub-block
    COLS = 64 if BN % 64 == 0 else 32  # channels in a row of the output buffers, and of a transposed weight
    SLABS = BN // COLS
    SLAB = 128 * COLS  # bytes of 64 such rows
    SWIZZLE = 1 if COLS == 64 else 2
    B_BYTES, OUT_BYTES = BN * ROW, SUB * SLABS * SLAB  # of a stage of the weight; of a consumer's output buffer
    B_LEADING, B_STRIDE = (SLAB, 16 * COLS) if transposed else (16, 8 * ROW)
    B_TAP = u64(B_BYTES // 16)  # from a tap to the next in a descriptor
    B_SWIZZLE, B_STEP = (SWIZZLE, 2 * COLS) if transposed else (1, 2)  # in descriptors 16 bytes count 1

    def kernel(map_x, map_weight, map_y, map_residual, bias, channel, images, height, width, N, channel_blocks, size,
               whole_halo, tile_w, tile_h, tile_images, a_stages, a_bytes, b_stages, resident, by_turns,
               has_bias, has_channel, has_residual, statistics, has_statistics):
        tiles = cuda.shared.array(0, np.uint8, alignment=1024)
        addends = cuda.shared.array(0, np.float32, alignment=1024)  # sees the same memory
        barriers = cuda.shared.array(BARRIERS, np.uint64)
        b_base = smem_u32(tiles)
        b_bytes = uint32(together * B_BYTES)
        out_base = b_base + uint32(b_stages) * b_bytes
        a_base = out_base + uint32(2 * OUT_BYTES)
        addends_at = int32((b_stages * together * B_BYTES + 2 * OUT_BYTES + a_stages * a_bytes) >> 2)  # behind stages
        a_full = smem_u32(barriers)
        a_empty = a_full + uint32(8 * MOST_A)
        b_full = a_full + uint32(16 * MOST_A)
        b_empty = b_full + uint32(8 * MOST_B)
        # of each consumer's output buffer: it may write (and the residual is there)
        ready = b_full + uint32(16 * MOST_B)
        written = ready + uint32(16)  # it has written
        turn = ready + uint32(32)  # it may multiply, where they take turns
        t = int32(cuda.threadIdx.x)
        if t == 0:
            for stage in range(MOST_A):
                mbarrier_init(a_full + uint32(8 * stage), uint32(1))
                mbarrier_init(a_empty + uint32(8 * stage), uint32(2))
            for stage in range(MOST_B):
                mbarrier_init(b_full + uint32(8 * stage), uint32(1))
                mbarrier_init(b_empty + uint32(8 * stage), uint32(2))
            for consumer in range(2):
                mbarrier_init(ready + uint32(8 * consumer), uint32(32))
                mbarrier_init(written + uint32(8 * consumer), uint32(128))
                mbarrier_init(turn + uint32(8 * consumer), uint32(128))  # by all, so that none still waits for the last
            fence_barrier_init()
        cuda.syncthreads()

        pad = int32(size >> 1)
        pitch = int32(tile_w + 2 * pad if whole_halo else tile_w)  # pixels in a row of a box
        box_h = int32(tile_h + 2 * pad)
        loads = int32(1 if whole_halo else size)  # boxes for one block of channels
        columns = divide(N + BN - 1, BN)[0]
        across, down = divide(width + tile_w - 1, tile_w)[0], divide(height + tile_h - 1, tile_h)[0]
        last = int32(columns * across * down * divide(images + tile_images - 1, tile_images)[0])
        warpgroup = t >> 7

        if warpgroup == 0:
            producer_registers()
            if t == 0:  # boxes of pixels
                tma_prefetch(map_x)
                stage, parity = int32(0), uint32(1)
                for tile in range(cuda.blockIdx.x, last, cuda.gridDim.x):
                    column, i, j, group = place_of(tile, columns, across, down)
                    w, h, image = int32(i * tile_w - pad), int32(j * tile_h - pad), int32(group * tile_images)
                    for block in range(channel_blocks):
                        for load in range(loads):
                            full = a_full + uint32(8) * uint32(stage)
                            mbarrier_wait(a_empty + uint32(8) * uint32(stage), parity)
                            mbarrier_expect_tx(full, uint32(pitch * box_h * tile_images * ROW))
                            tma_load_4d(a_base + uint32(stage) * uint32(a_bytes), map_x, full, uint32(block * BK),
                                        uint32(w + load), uint32(h), uint32(image))
                            stage += int32(1)
                            if stage == a_stages:
                                stage, parity = int32(0), parity ^ uint32(1)
            elif t == 96:  # the weight, `together` taps of a column at a time
                tma_prefetch(map_weight)
                stage, parity = int32(0), uint32(1)
                end = int32(cuda.blockIdx.x + 1) if resident else last
                for tile in range(cuda.blockIdx.x, end, cuda.gridDim.x):
                    first = int32(divide(tile, columns)[1] * BN)
                    for block in range(channel_blocks):
                        for column in range(size):
                            for part in range(1 if together == 3 else size):
                                full = b_full + uint32(8) * uint32(stage)
                                mbarrier_wait(b_empty + uint32(8) * uint32(stage), parity)
                                mbarrier_expect_tx(full, b_bytes)
                                to = b_base + uint32(stage) * b_bytes
                                for k in range(together):
                                    tap = int32((part + k) * size + column)
                                    if transposed:
                                        for slab in range(SLABS):
                                            tma_load_3d(to + uint32(slab * SLAB), map_weight, full,
                                                        uint32(first + slab * COLS), uint32(size * size - 1 - tap),
                                                        uint32(block * BK))
                                    else:
                                        tma_load_3d(to, map_weight, full, uint32(block * BK), uint32(tap),
                                                    uint32(first))
                                    to += uint32(B_BYTES)
                                stage += int32(1)
                                if stage == b_stages:
                                    stage, parity = int32(0), parity ^ uint32(1)
            elif t >= 32 and t < 96:  # results out, residuals in
                consumer, chosen = int32((t >> 5) - 1), (t & 31) == 0
                if chosen:
                    tma_prefetch(map_y)
                buffer = out_base + uint32(consumer * OUT_BYTES)
                free, done = ready + uint32(8 * consumer), written + uint32(8 * consumer)
                parity = uint32(0)
                for tile in range(cuda.blockIdx.x, last, cuda.gridDim.x):
                    column, i, j, group = place_of(tile, columns, across, down)
                    first = int32(column * BN)
                    w, h, image = int32(i * tile_w), int32(j * tile_h), int32(group * tile_images)
                    if has_bias or has_channel:
                        for sub in range(SUB):
                            more = sub_block_at(consumer * SUB + sub, tile_w, tile_h)[2]
                            mine = min(int32(image + more), int32(images - 1))
                            bring_addends(BN, addends, int32(addends_at + (consumer * SUB + sub) * BN), first, N, bias,
                                          channel, mine * N, has_bias, has_channel)
                    cuda.syncwarp()
                    if chosen and has_residual:
                        mbarrier_expect_tx(free, uint32(OUT_BYTES))
                        for slab in range(SUB * SLABS):
                            di, dj, more = sub_block_at(consumer * SUB + slab // SLABS, tile_w, tile_h)
                            tma_load_4d(buffer + uint32(slab * SLAB), map_residual, free,
                                        uint32(first + slab % SLABS * COLS), uint32(w + di), uint32(h + dj),
                                        uint32(image + more))
                    else:
                        mbarrier_arrive(free)  # every lane, for what it has written and read
                    mbarrier_wait(done, parity)
                    parity ^= uint32(1)
                    if chosen:
                        for slab in range(SUB * SLABS):
                            di, dj, more = sub_block_at(consumer * SUB + slab // SLABS, tile_w, tile_h)
                            tma_store_4d(buffer + uint32(slab * SLAB), map_y, uint32(first + slab % SLABS * COLS),
                                         uint32(w + di), uint32(h + dj), uint32(image + more))
                        tma_store_commit()
                    if not transposed and has_statistics:
                        for sub in range(SUB):
                            di, dj, more = sub_block_at(consumer * SUB + sub, tile_w, tile_h)
                            x, y, b = int32(w + di), int32(h + dj), int32(image + more)
                            if x < width and y < height and b < images:
                                chunk = int32(((b * height + y) >> 3) * (width >> 3) + (x >> 3))
                                at = int32(b_stages * together * B_BYTES + consumer * OUT_BYTES + sub * SLABS * SLAB)
                                leave_statistics(BN, tiles, at, statistics, int32(chunk * N + (first >> 1)),
                                                 int32((N - first) >> 1), N >> 1)
                        fence_proxy_async()  # the next residual comes to where was read
                    if chosen:
                        tma_store_wait_read_0()
                    cuda.syncwarp()
                if chosen:
                    tma_store_wait_0()
        else:
            consumer_registers()
            acc = cuda.local.array(R, np.float32)
            acc_2 = cuda.local.array(R, np.float32)
            consumer = int32(warpgroup - 1)
            arrives = (t & 127) == 0
            out = int32(b_stages * together * B_BYTES + consumer * OUT_BYTES)
            rows = uint32(row_of(consumer * SUB, tile_w, tile_h, pitch, box_h)) * uint32(ROW)
            rows_2 = uint32(row_of(consumer * SUB + 1, tile_w, tile_h, pitch, box_h)) * uint32(ROW)
            a_stride = uint32(pitch) * uint32(ROW)
            rounds = int32(channel_blocks * size * (1 if together == 3 else size))
            taps_a_load = int32(size * size if whole_halo else size)
            a_stage, a_parity, b_stage, b_parity, out_parity = int32(0), uint32(0), int32(0), uint32(0), uint32(0)
            my_turn, its_turn = turn + uint32(8 * consumer), turn + uint32(8 * (1 - consumer))
            turn_parity = uint32(1 - consumer)  # the first consumer begins
            for _tile in range(cuda.blockIdx.x, last, cuda.gridDim.x):
                # the first tap: acc = …
                mbarrier_wait(b_full + uint32(8) * uint32(b_stage), b_parity)
                mbarrier_wait(a_full + uint32(8) * uint32(a_stage), a_parity)
                if by_turns:
                    mbarrier_wait(my_turn, turn_parity)
                    turn_parity ^= uint32(1)
                a_at = a_base + uint32(a_stage) * uint32(a_bytes)
                b_at = b_base + uint32(b_stage) * b_bytes
                da = descriptor(a_at + rows, uint32(16), a_stride, 1)
                db = descriptor(b_at, uint32(B_LEADING), uint32(B_STRIDE), B_SWIZZLE)
                wgmma_fence()
                multiply_first(BN, transposed, acc, da, db)
                multiply(BN, transposed, acc, da + u64(2), db + u64(B_STEP))
                multiply(BN, transposed, acc, da + u64(4), db + u64(2 * B_STEP))
                multiply(BN, transposed, acc, da + u64(6), db + u64(3 * B_STEP))
                if SUB == 2:
                    da = descriptor(a_at + rows_2, uint32(16), a_stride, 1)
                    multiply_first(BN, transposed, acc_2, da, db)
                    multiply(BN, transposed, acc_2, da + u64(2), db + u64(B_STEP))
                    multiply(BN, transposed, acc_2, da + u64(4), db + u64(2 * B_STEP))
                    multiply(BN, transposed, acc_2, da + u64(6), db + u64(3 * B_STEP))
                shift = a_stride
                if together == 3:
                    a_1, a_2 = a_at + rows + shift, a_at + rows_2 + shift
                    multiply_tap(BN, SUB, transposed, acc, acc_2, a_1, a_2, a_stride, db + B_TAP, B_STEP)
                    multiply_tap(BN, SUB, transposed, acc, acc_2, a_1 + a_stride, a_2 + a_stride, a_stride,
                                 db + B_TAP + B_TAP, B_STEP)
                    shift += a_stride + a_stride
                wgmma_commit()

                # all others: acc += …. Taps are counted down each column: a row of taps is `a_stride` bytes on
                used, row = together, together  # taps that have read the stage, and those of the column
                for _ in range(int32(1), rounds):
                    before_a, before_b = a_stage, b_stage
                    next_box = used == taps_a_load
                    if row == size:  # the next column of taps
                        row = int32(0)
                        shift += uint32(ROW) - uint32(size) * a_stride
                    if next_box:
                        used, shift = int32(0), uint32(0)
                        a_stage += int32(1)
                        if a_stage == a_stages:
                            a_stage, a_parity = int32(0), a_parity ^ uint32(1)
                        mbarrier_wait(a_full + uint32(8) * uint32(a_stage), a_parity)
                        a_at = a_base + uint32(a_stage) * uint32(a_bytes)
                    b_stage += int32(1)
                    if b_stage == b_stages:
                        b_stage = int32(0)
                        if not resident:
                            b_parity ^= uint32(1)
                    mbarrier_wait(b_full + uint32(8) * uint32(b_stage), b_parity)
                    b_at = b_base + uint32(b_stage) * b_bytes
                    wgmma_fence()
                    a_1, a_2 = a_at + rows + shift, a_at + rows_2 + shift
                    db = descriptor(b_at, uint32(B_LEADING), uint32(B_STRIDE), B_SWIZZLE)
                    multiply_tap(BN, SUB, transposed, acc, acc_2, a_1, a_2, a_stride, db, B_STEP)
                    shift += a_stride
                    if together == 3:
                        multiply_tap(BN, SUB, transposed, acc, acc_2, a_1 + a_stride, a_2 + a_stride, a_stride,
                                     db + B_TAP, B_STEP)
                        multiply_tap(BN, SUB, transposed, acc, acc_2, a_1 + a_stride + a_stride,
                                     a_2 + a_stride + a_stride, a_stride, db + B_TAP + B_TAP, B_STEP)
                        shift += a_stride + a_stride
                    wgmma_commit()
                    used += together
                    row += together
                    wgmma_wait_1()  # the taps before have been multiplied: their stages may be filled again
                    if arrives:
                        if not resident:
                            mbarrier_arrive(b_empty + uint32(8) * uint32(before_b))
                        if next_box:
                            mbarrier_arrive(a_empty + uint32(8) * uint32(before_a))
                if by_turns:
                    mbarrier_arrive(its_turn)
                wait_for(BN, acc)
                if SUB == 2:
                    wait_for(BN, acc_2)
                if arrives:
                    if not resident:
                        mbarrier_arrive(b_empty + uint32(8) * uint32(b_stage))
                    mbarrier_arrive(a_empty + uint32(8) * uint32(a_stage))
                a_stage += int32(1)
                if a_stage == a_stages:
                    a_stage, a_parity = int32(0), a_parity ^ uint32(1)
                b_stage += int32(1)
                if b_stage == b_stages:
                    b_stage = int32(0)
                    if not resident:
                        b_parity ^= uint32(1)

                # the results, through the buffer
                mbarrier_wait(ready + uint32(8) * uint32(consumer), out_parity)
                out_parity ^= uint32(1)
                has_addends, at = has_bias or has_channel, int32(addends_at + consumer * SUB * BN)
                write_sub_block(BN, tiles, out, acc, addends, at, has_addends, has_residual)
                if SUB == 2:
                    write_sub_block(BN, tiles, int32(out + SLABS * SLAB), acc_2, addends, int32(at + BN), has_addends,
                                    has_residual)
                fence_proxy_async()
                mbarrier_arrive(written + uint32(8) * uint32(consumer))

    kernel.__name__ = f"conv2d_{'input_gradient' if transposed else 'forward'}_kernel_v6_{128 * SUB}x{BN}_{together}"
    return cuda.jit(kernel, launch_bounds=(THREADS, 1))


VARIANTS = tuple((bn, sub) for sub in (1, 2) for bn in WIDTHS)
conv2d_forward_kernels_v6, conv2d_input_gradient_kernels_v6 = (
    {(*tile, together): make_kernel(*tile, together, transposed) for tile in VARIANTS for together in (1, 3)
     if (*tile, together) != (128, 2, 3)}  # of these, no three stages fit beside the pixels
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
    together: int
    resident: bool
    by_turns: bool
    addends: bool
    tiles: int

    @property
    def pixels(self):
        return self.width * self.height * self.images

    @property
    def shared(self):
        stages = self.b_stages * self.together * self.bn * ROW + self.a_stages * self.a_bytes
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


def plans(B, H, W, C, N, size, whole_halo, bn, sub, together, addends):
    """Every `Plan` with these tiles that fits into shared memory; the deepest pipeline for each."""
    pad, found = size // 2, []
    columns, steps = -(-N // bn), size * size * -(-C // BK)
    boxes = -(-C // BK) * (1 if whole_halo else size)  # of x for a tile
    for width in (8, 16, 32):
        for height in (8, 16, 32):
            images, rest = divmod(128 * sub, width * height)
            if rest or not images:
                continue
            b_bytes = together * bn * ROW
            box = (width + 2 * pad * whole_halo) * (height + 2 * pad) * images
            if max(width, height) + 2 * pad > 256:
                continue
            a_bytes = -(-box * ROW // 1024) * 1024
            tiles = columns * -(-W // width) * -(-H // height) * -(-B // images)
            left = SHARED - output_bytes(bn, 128 * sub, addends)
            for a_stages in (3, 2, 1)[:3 if boxes == 1 else 2]:  # a box goes back when the next has come
                b_stages, resident = min((left - a_stages * a_bytes) // b_bytes, MOST_B), False
                if columns == 1 and steps <= b_stages * together:
                    b_stages, resident = steps // together, True
                if resident or b_stages >= (4 if together == 1 else 3) or b_stages >= 2 and a_stages == together == 1:
                    found.append(Plan(bn, width, height, images, whole_halo, a_stages, a_bytes, b_stages, together,
                                      resident, resident and boxes <= a_stages, addends, tiles))
                    break
    return found


@functools.lru_cache(maxsize=4096)
def choose_plan(B, H, W, C, N, size, whole_halo, multiprocessors, only=None, together=None, addends=True):
    """(estimate of nanoseconds, `Plan`) with the lowest estimate; only: (BN, SUB), to choose from these tiles alone.

    together: taps of the weight in a stage, 1 or, of a 3 × 3 kernel, 3; None for either; addends: room for a bias's

    A block multiplies while its copies travel, so a tile takes the longer of the two, and a little; blocks take turns.
    """
    best = None
    for (bn, sub), taps_a_stage in itertools.product(VARIANTS, (1, 3)[:1 + (size == 3)]):
        if only not in (None, (bn, sub)) or together not in (None, taps_a_stage):
            continue
        for plan in plans(B, H, W, C, N, size, whole_halo, bn, sub, taps_a_stage, addends):
            blocks, taps = -(-C // BK), size * size
            loads = 1 if whole_halo else size
            moving = blocks * (loads * plan.a_bytes + (0 if plan.resident else taps * bn * ROW)) / BYTES_A_NS
            # A, 64 rows, crosses shared memory for each wgmma, and so does B
            tap = 8 * sub * max(bn / 2, 16 + bn / 4) / CYCLES_A_NS
            multiplied = blocks * taps * (tap + max(0.0, ROUND_NS - tap / 4) / plan.together)
            turns = -(-plan.tiles // multiprocessors)
            both = (1.3 if plan.a_stages == 1 else 1.0) * max(moving, multiplied) + 0.03 * min(moving, multiplied)
            estimate = START_NS + turns * (TILE_NS + OUTPUT_NS * plan.pixels * bn + both)
            if best is None or estimate < best[0]:
                best = estimate, plan
    if best is None:
        if only is not None or together is not None:
            raise ValueError(f"no plan with {only} (BN, SUB) and {together} taps in a stage for a {size} × {size} "
                             "convolution of these arrays.")
        raise ValueError(f"a {size} × {size} convolution does not fit into shared memory: use version=1")
    return best


def can_run(x, weight, stride):
    """Whether this rung takes these operands."""
    size, inputs = weight.shape[2:]
    return (x.backend.capability[:2] == MINIMUM_CAPABILITY and x.dtype == weight.dtype == np.float16 and stride == 1
            and inputs % 8 == 0 and weight.shape[0] % 8 == 0 and size <= 7)


def statistics_shape(y_shape):
    """The shape of the statistics of a result (B, H, W, N), or None where 8 × 8 pixels do not tile its images."""
    B, H, W, N = y_shape
    return (B, H // 8 * (W // 8), 2, N // 2) if H % 8 == W % 8 == 0 else None


def hopper_convolution(x, weight, bias, y, channel=None, residual=None, gradient=False, whole_halo=True, only=None,
                       together=None, statistics=None):
    """y = conv2d(x, weight) + …, or with `gradient` the input gradient from x = dy; launcher.py has checked them.

    statistics: of `statistics_shape`, to be written; not with `gradient`
    """
    b, h, w, c = x.shape
    n, size = y.shape[3], weight.shape[1]
    backend = x.backend

    def planned(only=None, together=None):
        return choose_plan(assumed(b), h, w, c, n, size, bool(whole_halo), backend.multiprocessors, only, together,
                           bias is not None or channel is not None)[1]

    def measured(choice):
        bn, sub, taps = choice
        return planned((bn, sub), taps)

    if only is None and together is None:
        kind = "conv2d_input_gradient v6" if gradient else "conv2d v6"
        plan = tuned_or(planned, measured, backend, kind, assumed(b), h, w, c, n, size)
    else:
        plan = planned(only, together)
    if assumed(b) != b:  # so many tiles are there in truth
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
    launch(kernels[plan.bn, plan.pixels // 128, plan.together], min(plan.tiles, backend.multiprocessors), THREADS,
           map_x, map_weight, map_y, map_residual, nothing if bias is None else bias,
           nothing if channel is None else channel.reshape(-1), b, h, w, n, -(-c // BK), size, int(plan.whole_halo),
           plan.width, plan.height, plan.images, plan.a_stages, plan.a_bytes, plan.b_stages, int(plan.resident),
           int(plan.by_turns), int(bias is not None), int(channel is not None), int(residual is not None),
           nothing if statistics is None else statistics.reshape(-1), int(statistics is not None), shared=plan.shared)
    return y


def hopper_forward(x, weight, bias, y, channel=None, residual=None, whole_halo=True, statistics=None):
    """y = conv2d(x, weight) + bias + channel + residual; of it `statistics`, if an array for them is given."""
    return hopper_convolution(x, weight, bias, y, channel, residual, whole_halo=whole_halo, statistics=statistics)


def hopper_input_gradient(dy, weight, dx, whole_halo=True):
    """dx of a convolution of stride 1."""
    return hopper_convolution(dy, weight, None, dx, gradient=True, whole_halo=whole_halo)

