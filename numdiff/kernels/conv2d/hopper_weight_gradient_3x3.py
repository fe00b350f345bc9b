"""The weight gradient of a 3 × 3 convolution on Hopper's tensor cores: three taps in one product.

MATHEMATICS
    as in hopper_weight_gradient.py:  dweight[n, tap, c] += Σ_p dy[p, n] · x[p + tap - 1, c],  dbias[n] += Σ_p dy[p, n]
SHAPES
    dy (B, H, W, N), x (B, H, W, C): float16; dweight (N, 3, 3, C), dbias (N,): float32, added to
    dchannel (B, N) float32: the sums of dy over each image's pixels, where a vector of its own was added to each image
    C and N multiples of 8, stride 1
WHAT IS NEW, AND WHY IT PAYS
    Three taps below each other see pixels that lie one row of x's box apart. A wgmma's descriptor says how far it is
    from one run of channels to the next (its leading dimension), so with one row as that distance a single product is
    64 channels of dy by CW channels of x for three taps: 3 · CW columns. A matrix of dy is read from shared memory once
    for three taps, so narrow tiles are fast, too: CW is 64, 32 or 16.
    Narrow tiles are what a small image needs. Its pixels must be shared among many blocks, each of which has float32
    sums of its own that must be added: of 128 blocks with 9 · 64 · 64 sums 19 MB, with 9 · 64 · 16 only 5.
    Up to eight blocks with parts of one tile's pixels are a cluster. Each leaves its sums in its shared memory, where
    the pixels were, and adds up one share of the tile from the memories of all. Where one cluster takes all pixels that
    is the result: no partial sums go through the L2 cache, and no second kernel adds them. Where more clusters share
    the pixels each writes its sums once, an eighth of what its blocks would.
    A block's sums start from what dweight holds, in the share that it will add up; it loads that while the first
    pixels are on their way.
    A chunk's products are one stretch of code without a branch, so a kernel is made for each number of pixels: see
    `multiply_chunk`.
WHO DOES WHAT  (512 threads: four warpgroups)
    warp 0 asks for boxes of dy and x           one stage for each chunk of 64, 128 or 256 pixels
    warps 1, 2 sum 32 of dy's columns each      while the boxes lie there anyway, for dbias, and image by image for
                                                dchannel: products with ones
    warpgroups 1, 2, 3 multiply a column of three taps each, by the whole chunk before they wait
    then, in a cluster                          they write their sums to shared memory, and after a barrier add up the
                                                block's share; warp 1 of the first block dbias
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    conv2d_weight_gradient, 32×64×64×64, 32×64×64×64, float16
        v5      29.0 µs   333 TFLOP/s   34 % of arithmetic   3.20 × v4   131 % of cuDNN
        v6*     28.3 µs   342 TFLOP/s   35 % of arithmetic   1.03 × v5   135 % of cuDNN
LAUNCH
    grid (tiles of CW channels of x, of 64 of dy, parts), cluster (1, 1, blocks): the pixels are shared among `parts`
    blocks, neighbours along z are a cluster. Where there is more than one cluster a tile, or an image's sums for
    dchannel come from several chunks, a second kernel adds those.
DETERMINISM
    a sum takes the blocks of its cluster in turn, from the one that adds it up; a second kernel adds the clusters' sums
    in a fixed order. How the pixels are shared depends on the shape and the GPU's size, or its table of tiles.
COST
    FLOPs as in direct.py; a cluster's blocks read 4 · (blocks - 1) · 64 · 9 · CW bytes from each other, and
    where there are several clusters a tile they cost 2 · 4 · clusters · N · 9 · C bytes, mostly in the L2 cache.
SOURCE
    PTX ISA, section 9.7.15.5.1.2 (descriptors); of clusters, device/cluster.py.
READ NEXT
    attention/hopper_tiles.py: two products with a softmax between them.
"""
import functools
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, launch, load4, store4, uint32
from ...device.cluster import cluster_address, cluster_sync, cluster_sync_relaxed, load_cluster_4
from ...device.mbarrier import (
    bar_sync,
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from ...device.requires import requires
from ...device.tensor_core import ldmatrix_x4_trans, mma_m16n8k16
from ...device.tensor_map import tensor_map
from ...device.tma import tma_load_4d, tma_prefetch
from ...device.wgmma import make_setmaxnreg, make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence, wgmma_wait_1
from ..common import divide, no_numbers
from ..tuning import tuned_or
from .hopper import BYTES_A_NS, ROW, SHARED, descriptor

THREADS = 512
TILE = 64  # channels of dy
WIDTHS = 64, 32, 16  # of x
PIXELS = 64, 128, 256  # of a chunk
SIZE, TAPS = 3, 9
CONSUMERS = 3 * 128  # threads that multiply
AT_ONCE = 3  # vectors of four sums that a thread adds up at a time: so many loads are on their way
MOST_STAGES = 16
BARRIERS = 2 * MOST_STAGES
CHANNELS_A_WARP = 32  # of dy, whose sums a warp makes
ONES = uint32(0x3C003C00)  # two float16
ADD_THREADS = 256  # of the second kernel
ADD_FLOATS = 4 * ADD_THREADS
ADD_WANTED = 132 * 2048  # threads that fill a GPU

wgmma_192, wgmma_96, wgmma_48 = (make_wgmma(3 * width, True, True) for width in WIDTHS)
wait_192, wait_96, wait_48 = (make_wgmma_wait(3 * width) for width in WIDTHS)
producer_registers, consumer_registers = make_setmaxnreg(104, False), make_setmaxnreg(136, True)


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
def exchange(a0, a1, a2, a3, odd):
    """A thread has two sums of row n and two of row n + 8: in pairs of lanes, four neighbours of one row instead.

    Done twice, all is as it was.
    """
    b0 = cuda.shfl_xor_sync(0xFFFFFFFF, a0 if odd else a2, 1)
    b1 = cuda.shfl_xor_sync(0xFFFFFFFF, a1 if odd else a3, 1)
    return b0 if odd else a0, b1 if odd else a1, a2 if odd else b0, a3 if odd else b1


@cuda.jit(device=True, forceinline=True)
def read_tap(CW, tap, dweight, at, acc, left, first, last, odd):
    """What a thread's sums of one of its taps start from: of vectors first … last - 1, dweight.

    left: channels from the tile's first, none beyond a row
    """
    for j in range(CW // 8):
        v = tap * (CW // 8) + j
        a0 = a1 = a2 = a3 = float32(0)
        if 8 * j < left and v >= first and v < last:
            a0, a1, a2, a3 = load4(dweight, at + 8 * j)
        acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3] = exchange(a0, a1, a2, a3, odd)


@cuda.jit(device=True, forceinline=True)
def write_tap(CW, tap, out, at, acc, left, odd):
    """A thread's sums of one of its taps."""
    for j in range(CW // 8):
        k = 4 * (tap * (CW // 8) + j)
        a0, a1, a2, a3 = exchange(acc[k], acc[k + 1], acc[k + 2], acc[k + 3], odd)
        if 8 * j < left:
            store4(out, at + 8 * j, a0, a1, a2, a3)


@cuda.jit(device=True, forceinline=True)
def four_of(address, exists):
    """Four sums of a block of the cluster, or zeros."""
    a0 = a1 = a2 = a3 = float32(0)
    if exists:
        a0, a1, a2, a3 = load_cluster_4(address)
    return a0, a1, a2, a3


@cuda.jit(device=True, forceinline=True)
def add_up(CW, place, rank, blocks, first, last, out, at, tap_row, left, odd):
    """out = the sums of all blocks of the cluster, of a thread's vectors first … last - 1.

    Each block begins with its own: where all began with the first block's, they would wait for its memory.
    """
    for begin in range(first, last, AT_ONCE):
        s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = u0 = u1 = u2 = u3 = float32(0)
        here = place + uint32(begin) * uint32(16 * CONSUMERS)
        for k in range(blocks):
            other = uint32(rank + k if rank + k < blocks else rank + k - blocks)
            address = cluster_address(here, other)
            a0, a1, a2, a3 = load_cluster_4(address)
            b0, b1, b2, b3 = four_of(address + uint32(16 * CONSUMERS), begin + 1 < last)
            c0, c1, c2, c3 = four_of(address + uint32(32 * CONSUMERS), begin + 2 < last)
            s0, s1, s2, s3 = s0 + a0, s1 + a1, s2 + a2, s3 + a3
            t0, t1, t2, t3 = t0 + b0, t1 + b1, t2 + b2, t3 + b3
            u0, u1, u2, u3 = u0 + c0, u1 + c1, u2 + c2, u3 + c3
        write_vector(CW, begin, last, out, at, tap_row, left, exchange(s0, s1, s2, s3, odd))
        write_vector(CW, begin + 1, last, out, at, tap_row, left, exchange(t0, t1, t2, t3, odd))
        write_vector(CW, begin + 2, last, out, at, tap_row, left, exchange(u0, u1, u2, u3, odd))


@cuda.jit(device=True, forceinline=True)
def write_vector(CW, v, last, out, at, tap_row, left, sums):
    """A thread's vector number v, where there is one."""
    tap = v // (CW // 8)
    c = (v - tap * (CW // 8)) * 8
    if v < last and c < left:
        store4(out, at + int32(tap * tap_row + c), sums[0], sums[1], sums[2], sums[3])


@cuda.jit(device=True, forceinline=True)
def add_columns(box, sixty_fours, warp, lane):
    """The sum of a channel of dy over 64 pixels or more, whose box starts at a shared address.

    Of the warp's 32 channels a lane gets the sum of `column_of`, as its quad's four lanes have the same four.
    """
    k, half = uint32(lane & 7), uint32(lane >> 3 & 1)
    address = box + k * uint32(128) + uint32(lane >> 4) * uint32(1024)
    low = address + ((uint32(4 * warp) + half ^ k) << uint32(4))
    high = address + ((uint32(4 * warp + 2) + half ^ k) << uint32(4))
    l_sums = h_sums = (float32(0), float32(0), float32(0), float32(0))
    for _ in range(sixty_fours):  # all loads first: the tensor cores keep shared memory busy, and each takes its time
        l0, h0 = ldmatrix_x4_trans(low), ldmatrix_x4_trans(high)
        l1, h1 = ldmatrix_x4_trans(low + uint32(2048)), ldmatrix_x4_trans(high + uint32(2048))
        l2, h2 = ldmatrix_x4_trans(low + uint32(4096)), ldmatrix_x4_trans(high + uint32(4096))
        l3, h3 = ldmatrix_x4_trans(low + uint32(6144)), ldmatrix_x4_trans(high + uint32(6144))
        l_sums, h_sums = mma_m16n8k16(l0, (ONES, ONES), l_sums), mma_m16n8k16(h0, (ONES, ONES), h_sums)
        l_sums, h_sums = mma_m16n8k16(l1, (ONES, ONES), l_sums), mma_m16n8k16(h1, (ONES, ONES), h_sums)
        l_sums, h_sums = mma_m16n8k16(l2, (ONES, ONES), l_sums), mma_m16n8k16(h2, (ONES, ONES), h_sums)
        l_sums, h_sums = mma_m16n8k16(l3, (ONES, ONES), l_sums), mma_m16n8k16(h3, (ONES, ONES), h_sums)
        low += uint32(64 * ROW)
        high += uint32(64 * ROW)
    first, second = (h_sums[0], h_sums[2]) if lane & 2 else (l_sums[0], l_sums[2])
    return second if lane & 1 else first


@cuda.jit(device=True, forceinline=True)
def column_of(warp, lane):
    return int32(CHANNELS_A_WARP * warp + (lane & 3) * 8 + (lane >> 2))


@cuda.jit(device=True, forceinline=True)
def place_of(sub, tile_w, tile_h, pitch, lines):
    """Pixels from a box's first to those of its sub-block number `sub`; pitch: of a line, lines: of an image."""
    line, i = divide(int32(sub), tile_w >> 3)
    image, j = divide(line, tile_h >> 3)
    return uint32((image * lines + 8 * j) * pitch + 8 * i)


@cuda.jit(device=True, forceinline=True)
def multiply_sub_block(CW, acc, a, b, dy_step, x_step):
    """acc += the products of 8 × 8 pixels."""
    multiply(CW, acc, a, b)
    multiply(CW, acc, a + dy_step, b + x_step)
    multiply(CW, acc, a + dy_step + dy_step, b + x_step + x_step)
    multiply(CW, acc, a + dy_step + dy_step + dy_step, b + x_step + x_step + x_step)


@cuda.jit(device=True, forceinline=True)
def multiply_chunk(CW, SUBS, acc, dy_at, x_at, dy_stride, x_stride, places):
    """acc += the products of a chunk's SUBS sub-blocks; the strides: bytes from eight pixels to those below.

    Without a branch: where there is one, ptxas ends the group of products, and the wait for all but the last group
    becomes a wait for this chunk.
    """
    X_ROW, SWIZZLE = 2 * CW, 1 if CW == 64 else 2 if CW == 32 else 3
    a, b = descriptor(dy_at, uint32(16), dy_stride, 1), descriptor(x_at, x_stride, x_stride, SWIZZLE)
    dy_step, x_step = np.uint64(dy_stride >> uint32(3)), np.uint64(x_stride >> uint32(3))  # 16 pixels, in descriptors
    dy_1, x_1, dy_2, x_2, dy_3, x_3 = places
    multiply_sub_block(CW, acc, a, b, dy_step, x_step)
    if SUBS > 1:
        multiply_sub_block(CW, acc, a + np.uint64(dy_1 * uint32(ROW // 16)), b + np.uint64(x_1 * uint32(X_ROW // 16)),
                           dy_step, x_step)
    if SUBS > 2:
        multiply_sub_block(CW, acc, a + np.uint64(dy_2 * uint32(ROW // 16)), b + np.uint64(x_2 * uint32(X_ROW // 16)),
                           dy_step, x_step)
        multiply_sub_block(CW, acc, a + np.uint64(dy_3 * uint32(ROW // 16)), b + np.uint64(x_3 * uint32(X_ROW // 16)),
                           dy_step, x_step)


def make_kernel(CW, SUBS):
    """The kernel for tiles of CW channels of x and chunks of SUBS sub-blocks, 64 pixels each."""
    ACCUMULATORS, VECTORS = 3 * CW // 2, 3 * CW // 8
    X_ROW = 2 * CW  # bytes of a pixel in x's box

    @requires("9.0a")
    def kernel(map_dy, map_x, dweight, dbias, out, bias_out, channel_out, images, across, down, C, N, whole_halo,
               tile_w, tile_h, tile_images, stages, x_bytes, part_chunks, more, blocks, share, has_bias, has_channel):
        """out (clusters, N, taps, C), bias_out (clusters, N): the clusters' sums, or dweight and dbias themselves.

        channel_out (places of a chunk in an image, B, N); across, down: tiles of pixels in an image
        part_chunks: chunks of a part, one more of the first `more`; blocks: of a cluster; share: vectors of four sums
        that one of them adds up in each thread
        """
        tiles = cuda.shared.array(0, np.uint8, alignment=1024)
        sums = cuda.shared.array(0, float32, alignment=1024)  # in the same place, once all is multiplied
        barriers = cuda.shared.array(BARRIERS, np.uint64)
        bias_sums = cuda.shared.array(TILE, float32)
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
        column, line, part = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
        sums_dy = (has_bias != 0 or has_channel != 0) and column == 0
        first_chunk = int32(part * part_chunks + min(part, more))
        last_chunk = int32(first_chunk + part_chunks + (1 if part < more else 0))
        group, rank = divide(part, blocks)
        if t == 0:
            tma_prefetch(map_dy)
            tma_prefetch(map_x)
            for stage in range(stages):
                mbarrier_init(full0 + uint32(8 * stage), uint32(1))
                mbarrier_init(empty0 + uint32(8 * stage), uint32(5 if sums_dy else 3))
            fence_barrier_init()
        cuda.syncthreads()

        if warpgroup == 0:
            producer_registers()
            if t == 0:
                stage, parity = int32(0), uint32(1)
                rest, i = divide(first_chunk, across)
                before, j = divide(rest, down)
                for _ in range(first_chunk, last_chunk):
                    w, h, image = int32(i * tile_w), int32(j * tile_h), uint32(before * tile_images)
                    full = full0 + uint32(8) * uint32(stage)
                    mbarrier_wait(empty0 + uint32(8) * uint32(stage), parity)
                    mbarrier_expect_tx(full, dy_bytes + uint32(copies * copy_rows * X_ROW))
                    to = base + uint32(stage) * stage_bytes
                    tma_load_4d(to, map_dy, full, uint32(line * TILE), uint32(w), uint32(h), image)
                    for copy in range(copies):
                        tma_load_4d(to + dy_bytes + uint32(copy * copy_rows * X_ROW), map_x, full, uint32(column * CW),
                                    uint32(w - 1 + copy), uint32(h - 1), image)
                    i += int32(1)
                    if i == across:
                        i, j = int32(0), int32(j + 1)
                        if j == down:
                            j, before = int32(0), int32(before + 1)
                    stage += int32(1)
                    if stage == stages:
                        stage, parity = int32(0), parity ^ uint32(1)
            elif t >= 32 and t < 96 and sums_dy:
                lane, warp = t & 31, int32((t >> 5) - 1)
                n = int32(line * TILE + column_of(warp, lane))
                sixty_fours = int32(tile_w * tile_h >> 6)
                total = float32(0)
                if has_bias and part == 0 and n < N:
                    total = dbias[n]
                stage, parity = int32(0), uint32(0)
                places = int32(across * down)
                before, place = divide(first_chunk, places)
                for _ in range(first_chunk, last_chunk):
                    mbarrier_wait(full0 + uint32(8) * uint32(stage), parity)
                    box = base + uint32(stage) * stage_bytes
                    for i in range(tile_images):
                        mine = add_columns(box, sixty_fours, warp, lane)
                        box += uint32(sixty_fours * (64 * ROW))
                        total += mine
                        image = int32(before * tile_images + i)
                        if has_channel and n < N and image < images:
                            channel_out[(place * images + image) * N + n] = mine
                    place += int32(1)
                    if place == places:
                        place, before = int32(0), int32(before + 1)
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(empty0 + uint32(8) * uint32(stage))
                    stage += int32(1)
                    if stage == stages:
                        stage, parity = int32(0), parity ^ uint32(1)
                bias_sums[column_of(warp, lane)] = total
                if has_bias and blocks == 1 and n < N:
                    bias_out[part * N + n] = total
            if blocks > 1:
                cuda.syncwarp()
                bar_sync(uint32(1), uint32(THREADS))  # the stages are free
                cluster_sync()  # all sums are there
                four = int32(4 * (t - 32))
                n = int32(line * TILE + four)
                if has_bias and column == 0 and rank == 0 and four >= 0 and four < TILE and n < N:
                    place = smem_u32(bias_sums) + uint32(4 * four)
                    s0, s1, s2, s3 = load_cluster_4(place)
                    for other in range(int32(1), blocks):
                        a0, a1, a2, a3 = load_cluster_4(cluster_address(place, uint32(other)))
                        s0, s1, s2, s3 = s0 + a0, s1 + a1, s2 + a2, s3 + a3
                    store4(bias_out, group * N + n, s0, s1, s2, s3)
                cluster_sync_relaxed()  # nobody reads any more
        else:
            consumer_registers()
            acc = cuda.local.array(ACCUMULATORS, np.float32)
            arrives = (t & 127) == 0
            tap_column = int32(warpgroup - 1)
            shift = dy_bytes + uint32(tap_column * (1 if whole_halo else copy_rows) * X_ROW)
            dy_stride, x_stride = uint32(tile_w * ROW), uint32(pitch * X_ROW)
            places = (place_of(1, tile_w, tile_h, tile_w, tile_h), place_of(1, tile_w, tile_h, pitch, box_h),
                      place_of(2, tile_w, tile_h, tile_w, tile_h), place_of(2, tile_w, tile_h, pitch, box_h),
                      place_of(3, tile_w, tile_h, tile_w, tile_h), place_of(3, tile_w, tile_h, pitch, box_h))
            stage, parity = int32(0), uint32(0)

            # a thread reads and writes four neighbouring channels at a time, of row n or of row n + 8
            thread = t & 127
            odd = thread & 1
            n = int32(line * TILE + (thread >> 5) * 16 + ((thread & 31) >> 2) + odd * 8)
            first_c = int32(column * CW)
            to = int32(n * (TAPS * C) + tap_column * C + first_c + (thread & 2) * 2)
            left = int32(C - first_c if n < N else 0)
            tap_row = int32(SIZE * C)
            first = int32(min(rank * share, VECTORS))
            last = int32(min(first + share, VECTORS))
            start = int32(left if group == 0 else 0)
            read_tap(CW, 0, dweight, to, acc, start, first, last, odd)
            read_tap(CW, 1, dweight, to + tap_row, acc, start, first, last, odd)
            read_tap(CW, 2, dweight, to + 2 * tap_row, acc, start, first, last, odd)
            wait_for(CW, acc)  # no product is on its way yet: for the compilers, the sums are complete from here on

            # the first chunk, whose stage goes back with the second's
            mbarrier_wait(full0, uint32(0))
            wgmma_fence()
            multiply_chunk(CW, SUBS, acc, base, base + shift, dy_stride, x_stride, places)
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
                multiply_chunk(CW, SUBS, acc, at, at + shift, dy_stride, x_stride, places)
                wgmma_commit()
                wgmma_wait_1()
                if arrives:  # the stage before has been multiplied
                    mbarrier_arrive(empty0 + uint32(8) * uint32(before))
            wait_for(CW, acc)
            if arrives:
                mbarrier_arrive(empty0 + uint32(8) * uint32(stage))
            mine = np.int64(group) * int32(N * TAPS * C) + to
            if blocks == 1:
                write_tap(CW, 0, out, mine, acc, left, odd)
                write_tap(CW, 1, out, mine + tap_row, acc, left, odd)
                write_tap(CW, 2, out, mine + 2 * tap_row, acc, left, odd)
            else:
                bar_sync(uint32(1), uint32(THREADS))  # the stages are free
                consumer = int32(t - 128)
                for v in range(VECTORS):
                    store4(sums, 4 * (v * CONSUMERS + consumer), acc[4 * v], acc[4 * v + 1], acc[4 * v + 2],
                           acc[4 * v + 3])
                cluster_sync()  # all sums are there
                add_up(CW, base + uint32(16 * consumer), rank, blocks, first, last, out, mine, tap_row, left, odd)
                cluster_sync_relaxed()  # nobody reads any more

    kernel.__name__ = f"conv2d_weight_gradient_3x3_kernel_v6_{CW}_{64 * SUBS}"
    return cuda.jit(kernel, launch_bounds=(THREADS, 1))


conv2d_weight_gradient_3x3_kernels_v6 = {(width, pixels): make_kernel(width, pixels // 64)
                                         for width in WIDTHS for pixels in PIXELS}


@cuda.jit(device=True, forceinline=True)
def four(array, at, exists):
    """Four neighbours, or zeros."""
    a0 = a1 = a2 = a3 = float32(0)
    if exists:
        a0, a1, a2, a3 = load4(array, at)
    return a0, a1, a2, a3


@cuda.jit
def add_gradient_parts_kernel(partial, dweight, vectors, blocks, bias_partial, dbias, bias_vectors, bias_blocks, parts,
                              channel_partial, dchannel, channel_vectors, places):
    """dweight = the sum of the parts, four by four, dbias likewise; dchannel = that of the places. One, then another.

    A block's rows share the parts.
    """
    tile = cuda.shared.array(ADD_FLOATS, float32)
    lane, share = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y)
    lanes, shares = int32(cuda.blockDim.x), int32(cuda.blockDim.y)
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
    if share == 0 and vector < count:
        for other in range(int32(1), shares):
            mine = int32((other * lanes + lane) * 4)
            s0, s1, s2, s3 = s0 + tile[mine], s1 + tile[mine + 1], s2 + tile[mine + 2], s3 + tile[mine + 3]
        store4(target, vector * 4, s0, s1, s2, s3)


# Launchers ------------------------------------------------------------------------------------------------------------

class Plan(NamedTuple):
    """How the work is cut: tiles of `channels` channels of x, chunks of width × height pixels of `images` images.

    A tile's chunks are shared among `groups` clusters of `blocks` blocks.
    """

    channels: int
    width: int
    height: int
    images: int
    stages: int
    x_bytes: int
    chunks: int
    blocks: int
    groups: int

    @property
    def parts(self):
        return self.blocks * self.groups

    @property
    def share(self):
        """Vectors of four sums that a thread adds up for its cluster."""
        return -(-3 * self.channels // 8 // self.blocks)

    @property
    def shared(self):
        staged = self.stages * (self.width * self.height * self.images * ROW + self.x_bytes)
        return max(staged, 4 * TAPS * TILE * self.channels if self.blocks > 1 else 0)


# what fits an H100's times: launch to first product beside the first chunk's way, and the end; a stage; the second pass
START_NS, CHUNK_NS, PASS_NS = 2000.0, 150.0, 2000.0
WRITTEN_A_NS, READ_A_NS = 3000.0, 4000.0  # bytes of the parts, through the L2 cache
PRODUCTS_A_NS = 6500.0  # FLOPs of a multiprocessor, where shared memory keeps up
# a cluster's barriers, for each of its blocks; bytes that a block writes to its shared memory, and reads from another's
CLUSTER_NS, KEPT_A_NS, FETCHED_A_NS = 500.0, 200.0, 25.0
# clusters of so many blocks that an H100 with 132 multiprocessors runs at once: cuOccupancyMaxActiveClusters. What one
# more would cost was measured: it runs after the others, and all takes twice as long
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


@functools.lru_cache(maxsize=4096)
def choose_plan(B, H, W, C, N, whole_halo, multiprocessors, only=None):
    """(estimate of nanoseconds, `Plan`) with the lowest estimate.

    only: (CW, parts, pixels, blocks of a cluster), None for any, or the first of them
    """
    best = None
    only_width, only_parts, only_pixels, only_blocks = (*(only or ()), None, None, None, None)[:4]
    at_once = {blocks: max(1, clusters * multiprocessors // 132) for blocks, clusters in CLUSTERS_AT_ONCE.items()}
    for channels in WIDTHS:
        if only_width not in (None, channels):
            continue
        tiles = -(-C // channels) * -(-N // TILE)
        sums = 4 * TAPS * TILE * channels  # bytes of a tile's
        # 128 bytes a cycle: a matrix of dy and three of x for each product, and what arrives
        reading = 16 + 0.75 * channels + (128 + 2.8 * channels) / 24
        slow = max(1.0, reading / (1.5 * channels))
        cuts = {(blocks, groups) for blocks, room in at_once.items()
                for groups in (1, 2, 3, 4, *(turns * room // tiles for turns in (1, 2, 3)))}
        if only_parts is not None:
            cuts = {(blocks, only_parts // blocks) for blocks in at_once if only_parts % blocks == 0}
        for width in (8, 16, 32):
            for height in (8, 16, 32):
                for pixels in PIXELS:
                    images, rest = divmod(pixels, width * height)
                    if rest or not images or only_pixels not in (None, pixels):
                        continue
                    rows = (width + 2 * whole_halo) * (height + 2) * images * (1 if whole_halo else SIZE)
                    x_bytes = -(-rows * 2 * channels // 1024) * 1024
                    stages = min(SHARED // (pixels * ROW + x_bytes), MOST_STAGES)
                    if stages < 2:
                        continue
                    chunks = -(-W // width) * -(-H // height) * -(-B // images)
                    moved = (pixels * ROW + rows * 2 * channels) / BYTES_A_NS
                    multiplied = 2 * pixels * TILE * channels * TAPS / PRODUCTS_A_NS * slow
                    chunk = (1.2 if stages == 2 else 1.0) * max(moved, multiplied)
                    for blocks, groups in sorted(cuts):
                        if not 1 <= blocks * groups <= chunks or only_blocks not in (None, blocks):
                            continue
                        plan = Plan(channels, width, height, images, stages, x_bytes, chunks, blocks, groups)
                        rounds = -(-groups * tiles // at_once[blocks])
                        estimate = START_NS + 2 * moved + (rounds - 1) * 1500
                        estimate += rounds * -(-chunks // plan.parts) * (CHUNK_NS + chunk)
                        if blocks > 1:
                            fetched = 16 * CONSUMERS * plan.share * (blocks - 1)
                            estimate += rounds * (CLUSTER_NS * blocks + sums / KEPT_A_NS + fetched / FETCHED_A_NS)
                        written = groups * tiles * sums
                        estimate += written / WRITTEN_A_NS
                        if groups > 1:
                            estimate += PASS_NS + (written + 4 * N * TAPS * C) / READ_A_NS
                        if best is None or estimate < best[0]:
                            best = estimate, plan
    if best is None:
        raise ValueError(f"no plan with {only} (channels, parts, pixels, blocks of a cluster) for these arrays.")
    return best


def hopper_weight_gradient_3x3(dy, x, dweight, dbias=None, whole_halo=True, only=None, dchannel=None):
    """dweight += …, dbias += …, dchannel = …, for arrays that launcher.py has checked."""
    b, h, w, n = dy.shape
    c = x.shape[3]
    backend = dy.backend

    def planned(only=None):
        return choose_plan(b, h, w, c, n, bool(whole_halo), backend.multiprocessors, only)[1]

    def measured(choice):
        channels, parts, pixels, blocks = choice
        return planned((channels, parts, pixels, blocks))

    if only is None and whole_halo:
        plan = tuned_or(planned, measured, backend, "conv2d_weight_gradient_3x3 v6", b, h, w, c, n)
    else:
        plan = planned(only and tuple(only))
    nothing, alone = no_numbers(backend), plan.groups == 1
    across, down = -(-w // plan.width), -(-h // plan.height)
    places = across * down
    map_dy = tensor_map(dy, (TILE, plan.width, plan.height, plan.images))
    map_x = tensor_map(x, (plan.channels, plan.width + 2 * bool(whole_halo), plan.height + 2, plan.images),
                       swizzle=2 * plan.channels)
    weight_target, bias_target = dweight.reshape(-1), nothing if dbias is None else dbias
    channel_target = nothing if dchannel is None else dchannel.reshape(-1)
    out = weight_target if alone else empty((plan.groups * dweight.size,), np.float32, like=dy)
    bias_out = bias_target if alone or dbias is None else empty((plan.groups * n,), np.float32, like=dy)
    # where a chunk has all of an image, its sums are the result
    channel_out = channel_target if dchannel is None or places == 1 else empty((places * b * n,), np.float32, like=dy)
    kernel = conv2d_weight_gradient_3x3_kernels_v6[plan.channels, plan.width * plan.height * plan.images]
    launch(kernel, (-(-c // plan.channels), -(-n // TILE), plan.parts), THREADS, map_dy, map_x, weight_target,
           bias_target, out, bias_out, channel_out, b, across, down, c, n, int(whole_halo), plan.width, plan.height,
           plan.images, plan.stages, plan.x_bytes, *divmod(plan.chunks, plan.parts), plan.blocks, plan.share,
           int(dbias is not None), int(dchannel is not None), shared=plan.shared,
           cluster=(1, 1, plan.blocks) if plan.blocks > 1 else 1)
    vectors = 0 if alone else dweight.size // 4
    bias_vectors = 0 if alone or dbias is None else n // 4
    channel_vectors = 0 if dchannel is None or places == 1 else b * n // 4
    if not vectors + channel_vectors:
        return
    shares = 1
    while shares < 32 and 2 * shares <= max(plan.groups, places) and 2 * shares * vectors <= ADD_WANTED:
        shares *= 2
    lanes = ADD_THREADS // shares
    blocks, bias_blocks, channel_blocks = (-(-v // lanes) for v in (vectors, bias_vectors, channel_vectors))
    launch(add_gradient_parts_kernel, blocks + bias_blocks + channel_blocks, (lanes, shares), out, weight_target,
           vectors, blocks, bias_out, bias_target, bias_vectors, bias_blocks, plan.groups, channel_out, channel_target,
           channel_vectors, places)
