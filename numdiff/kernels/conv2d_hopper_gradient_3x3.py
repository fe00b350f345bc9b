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
    Part 0 starts from what dweight holds, which it loads while the first pixels are on their way. So where a block
    takes all pixels its sums are the result, and the second kernel reads nothing but the parts.
WHO DOES WHAT  (512 threads: four warpgroups)
    warp 0 asks for boxes of dy and x           one stage for each chunk of 64, 128 or 256 pixels
    warps 1, 2 sum 32 of dy's columns each      while the boxes lie there anyway, for dbias, and image by image for
                                                dchannel: products with ones
    warpgroups 1, 2, 3 multiply a column of three taps each, by the whole chunk before they wait
LAUNCH
    grid (tiles of CW channels of x, of 64 of dy, parts): the pixels are shared among `parts` blocks.
DETERMINISM
    a part writes its own sums, in dweight's layout; a second kernel adds them in a fixed order. How many parts there
    are depends on the shape and the GPU's size.
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

from ..device import cuda, empty, float32, int32, launch, load4, store4, uint32
from ..device.hopper import (
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
from ..device.tensor_core import ldmatrix_x4_trans, mma_m16n8k16
from ..device.tensor_map import tensor_map
from .conv2d_hopper import BYTES_A_NS, ROW, SHARED, descriptor, no_numbers
from .im2col import divide
from .matmul.hopper_endings import ONES

MINIMUM_CAPABILITY = (9, 0)  # wgmma exists there and nowhere else
THREADS = 512
TILE = 64  # channels of dy
WIDTHS = 64, 32, 16  # of x
SIZE, TAPS = 3, 9
MOST_STAGES = 16
BARRIERS = 2 * MOST_STAGES
CHANNELS_A_WARP = 32  # of dy, whose sums a warp makes
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
def exchange(CW, begin, acc, odd):
    """A thread has two sums of row n and two of row n + 8: in pairs of lanes, four neighbours of one row instead.

    For a tap's vectors, from number `begin` on. Done twice, all is as it was.
    """
    for j in range(begin, begin + CW // 8):
        k = 4 * j
        a0, a1, a2, a3 = acc[k], acc[k + 1], acc[k + 2], acc[k + 3]
        b0 = cuda.shfl_xor_sync(0xFFFFFFFF, a0 if odd else a2, 1)
        b1 = cuda.shfl_xor_sync(0xFFFFFFFF, a1 if odd else a3, 1)
        acc[k], acc[k + 1] = b0 if odd else a0, b1 if odd else a1
        acc[k + 2], acc[k + 3] = a2 if odd else b0, a3 if odd else b1


@cuda.jit(device=True, forceinline=True)
def read_tap(CW, tap, dweight, at, acc, left):
    """What a thread's sums of one of its taps start from; left: channels from the tile's first, none beyond a row."""
    k = tap * CW // 2
    for j in range(CW // 8):
        a0 = a1 = a2 = a3 = float32(0)
        if 8 * j < left:
            a0, a1, a2, a3 = load4(dweight, at + 8 * j)
        acc[k + 4 * j], acc[k + 4 * j + 1], acc[k + 4 * j + 2], acc[k + 4 * j + 3] = a0, a1, a2, a3


@cuda.jit(device=True, forceinline=True)
def write_tap(CW, tap, out, at, acc, left):
    """A thread's sums of one of its taps."""
    k = tap * CW // 2
    for j in range(CW // 8):
        if 8 * j < left:
            store4(out, at + 8 * j, acc[k + 4 * j], acc[k + 4 * j + 1], acc[k + 4 * j + 2], acc[k + 4 * j + 3])


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
def multiply_chunk(CW, acc, dy_at, x_at, tile_w, tile_h, pitch, box_h, sub_blocks):
    """acc += the products of a chunk's sub-blocks of 8 × 8 pixels."""
    X_ROW, SWIZZLE = 2 * CW, 1 if CW == 64 else 2 if CW == 32 else 3
    dy_stride, x_stride = uint32(tile_w * ROW), uint32(pitch * X_ROW)  # from eight pixels to those below
    dy_step, x_step = np.uint64(dy_stride >> uint32(3)), np.uint64(x_stride >> uint32(3))  # 16 pixels, in descriptors
    i, j = int32(0), int32(0)  # columns and rows from the tile's first pixel to the sub-block's
    for _ in range(sub_blocks):
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
    X_ROW = 2 * CW  # bytes of a pixel in x's box

    def kernel(map_dy, map_x, dweight, dbias, out, bias_out, channel_out, images, across, down, C, N, whole_halo,
               tile_w, tile_h, tile_images, stages, x_bytes, chunks, part_chunks, has_bias, has_channel):
        """out (parts, N, taps, C), bias_out (parts, N): the parts' sums, or dweight and dbias themselves.

        channel_out (places of a chunk in an image, B, N); across, down: tiles of pixels in an image
        """
        tiles = cuda.shared.array(0, np.uint8, alignment=1024)
        barriers = cuda.shared.array(BARRIERS, np.uint64)
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
        first_chunk = int32(part * part_chunks)
        last_chunk = int32(min(first_chunk + part_chunks, chunks))
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
                if has_bias and n < N:
                    bias_out[part * N + n] = total
        else:
            consumer_registers()
            acc = cuda.local.array(ACCUMULATORS, np.float32)
            arrives = (t & 127) == 0
            tap_column = int32(warpgroup - 1)
            shift = dy_bytes + uint32(tap_column * (1 if whole_halo else copy_rows) * X_ROW)
            sub_blocks = pixels >> 6
            stage, parity = int32(0), uint32(0)

            # a thread reads and writes four neighbouring channels at a time, of row n or of row n + 8
            thread = t & 127
            odd = thread & 1
            n = int32(line * TILE + (thread >> 5) * 16 + ((thread & 31) >> 2) + odd * 8)
            first_c = int32(column * CW)
            to = int32(n * (TAPS * C) + tap_column * C + first_c + (thread & 2) * 2)
            left = int32(C - first_c if n < N else 0)
            tap_row = int32(SIZE * C)
            start = int32(left if part == 0 else 0)
            read_tap(CW, 0, dweight, to, acc, start)
            read_tap(CW, 1, dweight, to + tap_row, acc, start)
            read_tap(CW, 2, dweight, to + 2 * tap_row, acc, start)
            exchange(CW, 0, acc, odd)
            exchange(CW, CW // 8, acc, odd)
            exchange(CW, CW // 4, acc, odd)
            wait_for(CW, acc)  # no product is on its way yet: for the compilers, the sums are complete from here on

            # the first chunk, whose stage goes back with the second's
            mbarrier_wait(full0, uint32(0))
            wgmma_fence()
            multiply_chunk(CW, acc, base, base + shift, tile_w, tile_h, pitch, box_h, sub_blocks)
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
                multiply_chunk(CW, acc, at, at + shift, tile_w, tile_h, pitch, box_h, sub_blocks)
                wgmma_commit()
                wgmma_wait_1()
                if arrives:  # the stage before has been multiplied
                    mbarrier_arrive(empty0 + uint32(8) * uint32(before))
            wait_for(CW, acc)
            if arrives:
                mbarrier_arrive(empty0 + uint32(8) * uint32(stage))
            exchange(CW, 0, acc, odd)
            exchange(CW, CW // 8, acc, odd)
            exchange(CW, CW // 4, acc, odd)
            mine = np.int64(part) * int32(N * TAPS * C) + to
            write_tap(CW, 0, out, mine, acc, left)
            write_tap(CW, 1, out, mine + tap_row, acc, left)
            write_tap(CW, 2, out, mine + 2 * tap_row, acc, left)

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
    """How the work is cut: tiles of `channels` channels of x, chunks of width × height pixels of `images` images."""

    channels: int
    width: int
    height: int
    images: int
    stages: int
    x_bytes: int
    chunks: int
    part_chunks: int
    parts: int

    @property
    def shared(self):
        return self.stages * (self.width * self.height * self.images * ROW + self.x_bytes)


# what fits an H100's times: launch to first product beside the first chunk's way, and the end; a stage; the second pass
START_NS, CHUNK_NS, PASS_NS = 2000.0, 60.0, 2000.0
WRITTEN_A_NS, READ_A_NS = 3000.0, 4000.0  # bytes of the parts, through the L2 cache
PRODUCTS_A_NS = 6500.0  # FLOPs of a multiprocessor, where shared memory keeps up


@functools.lru_cache(maxsize=4096)
def choose_plan(B, H, W, C, N, whole_halo, multiprocessors, only=None):
    """(estimate of nanoseconds, `Plan`) with the lowest estimate; only: (CW, parts, pixels), None for any."""
    best, (only_width, only_parts, only_pixels) = None, only or (None, None, None)
    for channels in WIDTHS if only_width is None else (only_width,):
        tiles = -(-C // channels) * -(-N // TILE)
        # 128 bytes a cycle: a matrix of dy and three of x for each product, and what arrives
        reading = 16 + 0.75 * channels + (128 + 2.8 * channels) / 24
        slow = max(1.0, reading / (1.5 * channels))
        for width in (8, 16, 32):
            for height in (8, 16, 32):
                for pixels in (64, 128, 256) if only_pixels is None else (only_pixels,):
                    images, rest = divmod(pixels, width * height)
                    if rest or not images:
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
                    wanted = {turns * multiprocessors // tiles for turns in (1, 2, 3)} | {1, 2, 3, 4, 6, 8, 12, 16}
                    for parts in sorted(wanted) if only_parts is None else (only_parts,):
                        part_chunks = -(-chunks // max(1, min(chunks, parts)))
                        parts = -(-chunks // part_chunks)
                        rounds = -(-parts * tiles // multiprocessors)
                        estimate = START_NS + moved + rounds * part_chunks * (CHUNK_NS + chunk) + (rounds - 1) * 1500
                        written = 4 * parts * tiles * TAPS * TILE * channels
                        estimate += written / WRITTEN_A_NS
                        if parts > 1:
                            estimate += PASS_NS + (written + 4 * N * TAPS * C) / READ_A_NS
                        if best is None or estimate < best[0]:
                            best = estimate, Plan(channels, width, height, images, stages, x_bytes, chunks, part_chunks,
                                                  parts)
    return best


def hopper_weight_gradient_3x3(dy, x, dweight, dbias=None, whole_halo=True, only=None, dchannel=None):
    """dweight += …, dbias += …, dchannel = …, for arrays that conv2d.py has checked."""
    b, h, w, n = dy.shape
    c = x.shape[3]
    backend = dy.backend
    plan = choose_plan(b, h, w, c, n, bool(whole_halo), backend.multiprocessors, only)[1]
    nothing, alone = no_numbers(backend), plan.parts == 1
    across, down = -(-w // plan.width), -(-h // plan.height)
    places = across * down
    map_dy = tensor_map(dy, (TILE, plan.width, plan.height, plan.images))
    map_x = tensor_map(x, (plan.channels, plan.width + 2 * bool(whole_halo), plan.height + 2, plan.images),
                       swizzle=2 * plan.channels)
    weight_target, bias_target = dweight.reshape(-1), nothing if dbias is None else dbias
    channel_target = nothing if dchannel is None else dchannel.reshape(-1)
    out = weight_target if alone else empty((plan.parts * dweight.size,), np.float32, like=dy)
    bias_out = bias_target if alone or dbias is None else empty((plan.parts * n,), np.float32, like=dy)
    # where a chunk has all of an image, its sums are the result
    channel_out = channel_target if dchannel is None or places == 1 else empty((places * b * n,), np.float32, like=dy)
    launch(conv2d_weight_gradient_3x3_kernels_v6[plan.channels], (-(-c // plan.channels), -(-n // TILE), plan.parts),
           THREADS, map_dy, map_x, weight_target, bias_target, out, bias_out, channel_out, b, across, down, c, n,
           int(whole_halo), plan.width, plan.height, plan.images, plan.stages, plan.x_bytes, plan.chunks,
           plan.part_chunks, int(dbias is not None), int(dchannel is not None), shared=plan.shared)
    vectors = 0 if alone else dweight.size // 4
    bias_vectors = 0 if alone or dbias is None else n // 4
    channel_vectors = 0 if dchannel is None or places == 1 else b * n // 4
    if not vectors + channel_vectors:
        return
    shares = 1
    while shares < 32 and 2 * shares <= max(plan.parts, places) and 2 * shares * vectors <= ADD_WANTED:
        shares *= 2
    lanes = ADD_THREADS // shares
    blocks, bias_blocks, channel_blocks = (-(-v // lanes) for v in (vectors, bias_vectors, channel_vectors))
    launch(add_gradient_parts_kernel, blocks + bias_blocks + channel_blocks, (lanes, shares), out, weight_target,
           vectors, blocks, bias_out, bias_target, bias_vectors, bias_blocks, plan.parts, channel_out, channel_target,
           channel_vectors, places)
