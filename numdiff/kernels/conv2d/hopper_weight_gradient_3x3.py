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
    Small images need narrow tiles. Their pixels must be shared among many blocks, each of which has float32 partial
    sums that must be added: 19 MB for 128 blocks with 9 · 64 · 64 sums, only 5 MB with 9 · 64 · 16.
    Up to eight blocks with parts of one tile's pixels form a cluster. Each leaves its accumulators in its shared
    memory, where the pixels were, and adds up one share of the tile from the shared memory of all. If one cluster has
    all the pixels, that is the result: no partial sums go through the L2 cache, and no second kernel adds them. If
    several clusters share the pixels, each writes its sums once, an eighth of what its blocks would write.
    The share that a block will add up starts from what dweight holds; the block loads that while the first pixels are
    on their way.
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
        v5      27.4 µs   353 TFLOP/s   36 % of arithmetic   3.34 × v4   132 % of cuDNN
        v6*     27.0 µs   358 TFLOP/s   36 % of arithmetic   1.01 × v5   134 % of cuDNN
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
from ...device.half import in_bfloat16
from ...device.limits import FULL_MASK
from ...device.mbarrier import bar_sync, fence_barrier_init, smem_u32
from ...device.pipeline import (
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
from ...device.requires import requires
from ...device.specialise import Constant, specialise
from ...device.tensor_core import ldmatrix_x4_trans, mma_m16n8k16, ones_half2
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
AT_ONCE = 3  # vectors of four sums that a thread adds up at a time: that many loads are in flight
MAX_STAGES = 16
BARRIERS = 2 * MAX_STAGES
CHANNELS_A_WARP = 32  # of dy, whose sums a warp makes
ADD_THREADS = 256  # of the second kernel
ADD_FLOATS = 4 * ADD_THREADS
ADD_WANTED = 132 * 2048  # threads that fill a GPU

producer_registers, consumer_registers = make_setmaxnreg(104, False), make_setmaxnreg(136, True)


# Constants of a kernel ------------------------------------------------------------------------------------------------

CW = Constant()  # channels of x in a tile
SUBS = Constant()  # sub-blocks of 64 pixels in a chunk: 1, 2 or 4
ACCUMULATORS = Constant(lambda CW: 3 * CW // 2)  # of a thread: three taps
VECTORS = Constant(lambda CW: 3 * CW // 8)  # the same in fours
X_ROW = Constant(lambda CW: 2 * CW)  # bytes of a pixel in x's box
X_SWIZZLE = Constant(lambda CW: {64: 1, 32: 2, 16: 3}[CW])  # of that box, in descriptors
wgmma = Constant(lambda CW: make_wgmma(3 * CW, True, True))
wgmma_wait = Constant(lambda CW: make_wgmma_wait(3 * CW))


# Arguments ------------------------------------------------------------------------------------------------------------

class Maps(NamedTuple):
    """Tensor maps of dy and x."""

    dy: object
    x: object


class Arrays(NamedTuple):
    """All flat. out (clusters, N, taps, C), bias_out (clusters, N): the clusters' sums, or dweight and dbias
    themselves; channel_out (places of a chunk in an image, B, N)."""

    dweight: object
    dbias: object
    out: object
    bias_out: object
    channel_out: object


class Shape(NamedTuple):
    """across, down: tiles of pixels in an image."""

    images: int
    across: int
    down: int
    C: int
    N: int


class Tiling(NamedTuple):
    """How a chunk is cut, as in `Plan`; x_bytes: of x's boxes in a stage."""

    whole_halo: int
    tile_w: int
    tile_h: int
    tile_images: int
    stages: int
    x_bytes: int


class Parts(NamedTuple):
    """How the chunks are shared. part_chunks: of a part, one more of the first `more`; blocks: of a cluster; share:
    vectors of four sums that one of them adds up in each thread."""

    part_chunks: int
    more: int
    blocks: int
    share: int


@cuda.jit(device=True, forceinline=True)
def exchange(a0, a1, a2, a3, odd):
    """A thread has two sums of row n and two of row n + 8: in pairs of lanes, four neighbours of one row instead.

    Applied twice, it changes nothing.
    """
    b0 = cuda.shfl_xor_sync(FULL_MASK, a0 if odd else a2, 1)
    b1 = cuda.shfl_xor_sync(FULL_MASK, a1 if odd else a3, 1)
    return b0 if odd else a0, b1 if odd else a1, a2 if odd else b0, a3 if odd else b1


@cuda.jit(device=True, forceinline=True)
def read_tap(tap, dweight, at, acc, left, first, last, odd):
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
def write_tap(tap, out, at, acc, left, odd):
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
def add_up(place, rank, blocks, first, last, out, at, tap_row, left, odd):
    """out = the sums of all blocks of the cluster, of a thread's vectors first … last - 1.

    Each block begins with its own sums: if all began with the first block's, they would queue for its memory.
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
        write_vector(begin, last, out, at, tap_row, left, exchange(s0, s1, s2, s3, odd))
        write_vector(begin + 1, last, out, at, tap_row, left, exchange(t0, t1, t2, t3, odd))
        write_vector(begin + 2, last, out, at, tap_row, left, exchange(u0, u1, u2, u3, odd))


@cuda.jit(device=True, forceinline=True)
def write_vector(v, last, out, at, tap_row, left, sums):
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
    ones, l_sums = ones_half2(), (float32(0), float32(0), float32(0), float32(0))
    h_sums = l_sums
    for _ in range(sixty_fours):  # all loads first: the tensor cores keep shared memory busy, so each takes long
        l0, h0 = ldmatrix_x4_trans(low), ldmatrix_x4_trans(high)
        l1, h1 = ldmatrix_x4_trans(low + uint32(2048)), ldmatrix_x4_trans(high + uint32(2048))
        l2, h2 = ldmatrix_x4_trans(low + uint32(4096)), ldmatrix_x4_trans(high + uint32(4096))
        l3, h3 = ldmatrix_x4_trans(low + uint32(6144)), ldmatrix_x4_trans(high + uint32(6144))
        l_sums, h_sums = mma_m16n8k16(l0, (ones, ones), l_sums), mma_m16n8k16(h0, (ones, ones), h_sums)
        l_sums, h_sums = mma_m16n8k16(l1, (ones, ones), l_sums), mma_m16n8k16(h1, (ones, ones), h_sums)
        l_sums, h_sums = mma_m16n8k16(l2, (ones, ones), l_sums), mma_m16n8k16(h2, (ones, ones), h_sums)
        l_sums, h_sums = mma_m16n8k16(l3, (ones, ones), l_sums), mma_m16n8k16(h3, (ones, ones), h_sums)
        low += uint32(64 * ROW)
        high += uint32(64 * ROW)
    first, second = (h_sums[0], h_sums[2]) if lane & 2 else (l_sums[0], l_sums[2])
    return second if lane & 1 else first


@cuda.jit(device=True, forceinline=True)
def column_of(warp, lane):
    return int32(CHANNELS_A_WARP * warp + (lane & 3) * 8 + (lane >> 2))


# Where things lie -----------------------------------------------------------------------------------------------------

class Boxes(NamedTuple):
    """What lies in a stage. pitch: pixels in a row of x's box, height: its rows; copies: boxes of x, copy_rows: pixels
    of each; dy_bytes: of dy's box, which is the first."""

    pitch: int
    height: int
    copies: int
    copy_rows: int
    dy_bytes: int


class Own(NamedTuple):
    """A block's work: column and line of its tile, its part of the pixels; group: its cluster of those of the tile, and
    its rank there; its chunks; sums_dy: whether it sums dy's pixels, too."""

    column: int
    line: int
    part: int
    group: int
    rank: int
    first_chunk: int
    last_chunk: int
    sums_dy: bool


@cuda.jit(device=True, forceinline=True)
def boxes_of(tiling):
    """The `Boxes` of a stage."""
    pitch = int32(tiling.tile_w + 2 if tiling.whole_halo else tiling.tile_w)
    height = int32(tiling.tile_h + 2)
    pixels = int32(tiling.tile_w * tiling.tile_h * tiling.tile_images)
    return Boxes(pitch, height, int32(1 if tiling.whole_halo else SIZE), int32(pitch * height * tiling.tile_images),
                 uint32(pixels * ROW))


@cuda.jit(device=True, forceinline=True)
def own_work(parts, has_bias, has_channel):
    """The block's `Own`."""
    column, line, part = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
    first_chunk = int32(part * parts.part_chunks + min(part, parts.more))
    group, rank = divide(part, parts.blocks)
    return Own(column, line, part, group, rank, first_chunk,
               int32(first_chunk + parts.part_chunks + (1 if part < parts.more else 0)),
               (has_bias != 0 or has_channel != 0) and column == 0)


@cuda.jit(device=True, forceinline=True)
def place_of(sub, tile_w, tile_h, pitch, lines):
    """Pixels from a box's first to those of its sub-block number `sub`; pitch: of a line, lines: of an image."""
    line, i = divide(int32(sub), tile_w >> 3)
    image, j = divide(line, tile_h >> 3)
    return uint32((image * lines + 8 * j) * pitch + 8 * i)


# The producer's warpgroup ---------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def load_boxes(ring, maps, boxes, own, shape, tiling):
    """One thread asks TMA for dy's and x's boxes of all chunks of the block."""
    stage, parity = producer_start()
    rest, i = divide(own.first_chunk, shape.across)
    before, j = divide(rest, shape.down)
    for _ in range(own.first_chunk, own.last_chunk):
        w, h, image = int32(i * tiling.tile_w), int32(j * tiling.tile_h), uint32(before * tiling.tile_images)
        full = producer_acquire(ring, stage, parity, boxes.dy_bytes + uint32(boxes.copies * boxes.copy_rows * X_ROW))
        to = stage_at(ring, stage)
        tma_load_4d(to, maps.dy, full, uint32(own.line * TILE), uint32(w), uint32(h), image)
        for copy in range(boxes.copies):
            tma_load_4d(to + boxes.dy_bytes + uint32(copy * boxes.copy_rows * X_ROW), maps.x, full,
                        uint32(own.column * CW), uint32(w - 1 + copy), uint32(h - 1), image)
        i += int32(1)
        if i == shape.across:
            i, j = int32(0), int32(j + 1)
            if j == shape.down:
                j, before = int32(0), int32(before + 1)
        stage, parity = advance(ring, stage, parity)


@cuda.jit(device=True, forceinline=True)
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


@cuda.jit(device=True, forceinline=True)
def add_bias(bias_sums, bias_out, own, N, blocks, has_bias):
    """The producer's warpgroup in a cluster: warp 1 of the first block adds up all blocks' sums of dy."""
    cuda.syncwarp()
    bar_sync(uint32(1), uint32(THREADS))  # the stages are free
    cluster_sync()  # all sums are there
    four = int32(4 * (int32(cuda.threadIdx.x) - 32))
    n = int32(own.line * TILE + four)
    if has_bias and own.column == 0 and own.rank == 0 and four >= 0 and four < TILE and n < N:
        place = smem_u32(bias_sums) + uint32(4 * four)
        s0, s1, s2, s3 = load_cluster_4(place)
        for other in range(int32(1), blocks):
            a0, a1, a2, a3 = load_cluster_4(cluster_address(place, uint32(other)))
            s0, s1, s2, s3 = s0 + a0, s1 + a1, s2 + a2, s3 + a3
        store4(bias_out, own.group * N + n, s0, s1, s2, s3)
    cluster_sync_relaxed()  # nobody reads any more


# Consumers ------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def multiply_sub_block(acc, a, b, dy_step, x_step):
    """acc += the products of 8 × 8 pixels."""
    wgmma(acc, a, b, int32(1))
    wgmma(acc, a + dy_step, b + x_step, int32(1))
    wgmma(acc, a + dy_step + dy_step, b + x_step + x_step, int32(1))
    wgmma(acc, a + dy_step + dy_step + dy_step, b + x_step + x_step + x_step, int32(1))


@cuda.jit(device=True, forceinline=True)
def multiply_chunk(acc, dy_at, x_at, dy_stride, x_stride, places):
    """acc += the products of a chunk's SUBS sub-blocks; the strides: bytes from eight pixels to those below.

    It has no branch: at a branch ptxas would end the group of products, and the wait for all but the last group would
    become a wait for this chunk.
    """
    a, b = descriptor(dy_at, uint32(16), dy_stride, 1), descriptor(x_at, x_stride, x_stride, X_SWIZZLE)
    dy_step, x_step = np.uint64(dy_stride >> uint32(3)), np.uint64(x_stride >> uint32(3))  # 16 pixels, in descriptors
    dy_1, x_1, dy_2, x_2, dy_3, x_3 = places
    multiply_sub_block(acc, a, b, dy_step, x_step)
    if SUBS > 1:
        multiply_sub_block(acc, a + np.uint64(dy_1 * uint32(ROW // 16)), b + np.uint64(x_1 * uint32(X_ROW // 16)),
                           dy_step, x_step)
    if SUBS > 2:
        multiply_sub_block(acc, a + np.uint64(dy_2 * uint32(ROW // 16)), b + np.uint64(x_2 * uint32(X_ROW // 16)),
                           dy_step, x_step)
        multiply_sub_block(acc, a + np.uint64(dy_3 * uint32(ROW // 16)), b + np.uint64(x_3 * uint32(X_ROW // 16)),
                           dy_step, x_step)


@cuda.jit(device=True, forceinline=True)
def main_loop(acc, ring, x_shift, dy_stride, x_stride, places, chunks, elected):
    """acc += the products of `chunks` chunks; x_shift: bytes from a stage to the pixels of x that the taps see.

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


@cuda.jit(device=True, forceinline=True)
def consume(ring, sums, warpgroup, arrays, boxes, own, shape, tiling, parts):
    """A warpgroup multiplies a column of three taps for all chunks of the block, and writes, or adds up, the results.
    """
    acc = cuda.local.array(ACCUMULATORS, np.float32)
    thread = int32(cuda.threadIdx.x) & 127
    tap_column = int32(warpgroup - 1)
    x_shift = boxes.dy_bytes + uint32(tap_column * (1 if tiling.whole_halo else boxes.copy_rows) * X_ROW)
    dy_stride, x_stride = uint32(tiling.tile_w * ROW), uint32(boxes.pitch * X_ROW)
    w, h = tiling.tile_w, tiling.tile_h
    places = (place_of(1, w, h, w, h), place_of(1, w, h, boxes.pitch, boxes.height),
              place_of(2, w, h, w, h), place_of(2, w, h, boxes.pitch, boxes.height),
              place_of(3, w, h, w, h), place_of(3, w, h, boxes.pitch, boxes.height))

    # a thread reads and writes four neighbouring channels at a time, of row n or of row n + 8
    odd = thread & 1
    n = int32(own.line * TILE + (thread >> 5) * 16 + ((thread & 31) >> 2) + odd * 8)
    first_c = int32(own.column * CW)
    to = int32(n * (TAPS * shape.C) + tap_column * shape.C + first_c + (thread & 2) * 2)
    left = int32(shape.C - first_c if n < shape.N else 0)
    tap_row = int32(SIZE * shape.C)
    first = int32(min(own.rank * parts.share, VECTORS))
    last = int32(min(first + parts.share, VECTORS))
    start = int32(left if own.group == 0 else 0)
    read_tap(0, arrays.dweight, to, acc, start, first, last, odd)
    read_tap(1, arrays.dweight, to + tap_row, acc, start, first, last, odd)
    read_tap(2, arrays.dweight, to + 2 * tap_row, acc, start, first, last, odd)
    wgmma_wait(acc)  # no product is on its way yet: for the compilers, the accumulators are complete from here on
    main_loop(acc, ring, x_shift, dy_stride, x_stride, places, int32(own.last_chunk - own.first_chunk), thread == 0)

    mine = np.int64(own.group) * int32(shape.N * TAPS * shape.C) + to
    if parts.blocks == 1:
        write_tap(0, arrays.out, mine, acc, left, odd)
        write_tap(1, arrays.out, mine + tap_row, acc, left, odd)
        write_tap(2, arrays.out, mine + 2 * tap_row, acc, left, odd)
    else:
        bar_sync(uint32(1), uint32(THREADS))  # the stages are free
        consumer = int32(int32(cuda.threadIdx.x) - 128)
        for v in range(VECTORS):
            store4(sums, 4 * (v * CONSUMERS + consumer), acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3])
        cluster_sync()  # all sums are there
        add_up(ring.base + uint32(16 * consumer), own.rank, parts.blocks, first, last, arrays.out, mine, tap_row, left,
               odd)
        cluster_sync_relaxed()  # nobody reads any more


# The kernel -----------------------------------------------------------------------------------------------------------

@requires("9.0a")
def weight_gradient(maps, arrays, shape, tiling, parts, has_bias, has_channel):
    """maps: `Maps`, arrays: `Arrays`, shape: `Shape`, tiling: `Tiling`, parts: `Parts`."""
    tiles = cuda.shared.array(0, np.uint8, alignment=1024)
    sums = cuda.shared.array(0, float32, alignment=1024)  # in the same place, once all is multiplied
    barriers = cuda.shared.array(BARRIERS, np.uint64)
    bias_sums = cuda.shared.array(TILE, float32)
    first = smem_u32(barriers)
    boxes, own = boxes_of(tiling), own_work(parts, has_bias, has_channel)
    ring = Ring(smem_u32(tiles), uint32(boxes.dy_bytes + uint32(tiling.x_bytes)), tiling.stages, first,
                barrier_at(first, MAX_STAGES))
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
            add_bias(bias_sums, arrays.bias_out, own, shape.N, parts.blocks, has_bias)
    else:
        consumer_registers()
        consume(ring, sums, warpgroup, arrays, boxes, own, shape, tiling, parts)


conv2d_weight_gradient_3x3_kernels_v6 = {
    (width, pixels): specialise(weight_gradient, name=f"conv2d_weight_gradient_3x3_kernel_v6_{width}_{pixels}",
                                launch_bounds=(THREADS, 1), CW=width, SUBS=pixels // 64)
    for width in WIDTHS for pixels in PIXELS}


# The second kernel: adds the clusters' sums ---------------------------------------------------------------------------

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
    """dweight and dbias = the sums of their parts, dchannel = that of its places, four numbers a thread.

    The first blocks sum dweight, the next ones dbias, the last ones dchannel. A block's rows share the parts.
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
# how many clusters of each size an H100 with 132 multiprocessors runs at once (cuOccupancyMaxActiveClusters). Measured:
# one cluster more runs after the others, and the kernel takes twice as long
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
                    stages = min(SHARED // (pixels * ROW + x_bytes), MAX_STAGES)
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
    kernel = in_bfloat16(kernel, x.dtype)
    launch(kernel, (-(-c // plan.channels), -(-n // TILE), plan.parts), THREADS, Maps(map_dy, map_x),
           Arrays(weight_target, bias_target, out, bias_out, channel_out), Shape(b, across, down, c, n),
           Tiling(int(whole_halo), plan.width, plan.height, plan.images, plan.stages, plan.x_bytes),
           Parts(*divmod(plan.chunks, plan.parts), plan.blocks, plan.share), int(dbias is not None),
           int(dchannel is not None), shared=plan.shared, cluster=(1, 1, plan.blocks) if plan.blocks > 1 else 1)
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
