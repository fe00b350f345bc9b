"""The weight gradient of a 3 × 3 convolution on Hopper's tensor cores: three taps in one product.

MATHEMATICS
    as in conv2d_hopper_gradient.py:  dweight[n, tap, c] += Σ_p dy[p, n] · x[p + tap - 1, c],  dbias[n] += Σ_p dy[p, n]
SHAPES
    dy (B, H, W, N), x (B, H, W, C): float16; dweight (N, 3, 3, C), dbias (N,): float32, added to
    C and N multiples of 8, stride 1
WHAT IS NEW, AND WHY IT PAYS
    Three taps below each other see pixels that lie one row of x's box apart. A wgmma's descriptor says how far it is
    from one run of channels to the next (its leading dimension), so with one row as that distance a single product is
    64 channels of dy by CW channels of x for three taps: 3 · CW columns. A matrix of dy is read from shared memory once
    for three taps, so narrow tiles are fast, too: CW is 64, 32 or 16.
    Narrow tiles are what a small image needs. Its pixels must be shared among many blocks, each of which writes float32
    sums of its own that a second kernel adds: 128 blocks with 9 · 64 · 64 sums write 19 MB, with 9 · 64 · 16 only 5.
    Where the tiles alone fill the GPU a block takes all pixels, and adds to dweight itself.
WHO DOES WHAT  (512 threads: four warpgroups)
    warp 0 asks for boxes of dy and x           one stage for each chunk of 64, 128 or 256 pixels
    warps 1, 2, 3 sum dy's columns for dbias    while the boxes lie there anyway
    warpgroups 1, 2, 3 multiply a column of three taps each, by the whole chunk before they wait
LAUNCH
    grid (tiles of 64 × CW channels, parts): the pixels are shared among `parts` blocks.
DETERMINISM
    a part writes its own sums, in dweight's layout; a second kernel adds the parts to dweight in a fixed order. How
    many parts there are depends on the shape and the GPU's size.
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
def write_four(out, at, a0, a1, a2, a3, odd, inside, adds):
    """Two sums of row n and two of row n + 8, with the neighbour's, as four of one row."""
    b0 = cuda.shfl_xor_sync(0xFFFFFFFF, a0 if odd else a2, 1)
    b1 = cuda.shfl_xor_sync(0xFFFFFFFF, a1 if odd else a3, 1)
    s0, s1, s2, s3 = b0 if odd else a0, b1 if odd else a1, a2 if odd else b0, a3 if odd else b1
    if inside:
        if adds:
            c0, c1, c2, c3 = load4(out, at)
            s0, s1, s2, s3 = s0 + c0, s1 + c1, s2 + c2, s3 + c3
        store4(out, at, s0, s1, s2, s3)


@cuda.jit(device=True, forceinline=True)
def write_tap(CW, tap, out, at, acc, odd, left, adds):
    """A thread's sums of one of its three taps; left: channels from the tile's first to the last."""
    k = tap * CW // 2
    for j in range(CW // 8):
        write_four(out, int32(at + 8 * j), acc[k + 4 * j], acc[k + 4 * j + 1], acc[k + 4 * j + 2], acc[k + 4 * j + 3],
                   odd, 8 * j < left, adds)


@cuda.jit(device=True, forceinline=True)
def put(out, at, value, adds):
    out[at] = out[at] + value if adds else value


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

    def kernel(map_dy, map_x, out, bias_out, height, width, C, N, whole_halo, tile_w, tile_h, tile_images, stages,
               x_bytes, chunks, part_chunks, has_bias, adds):
        """out: dweight where one part `adds` to it, else (parts, N, taps, C); bias_out: likewise dbias, (parts, N)."""
        tiles = cuda.shared.array(0, np.uint8, alignment=1024)
        barriers = cuda.shared.array(BARRIERS, np.uint64)
        bias_sums = cuda.shared.array(BIAS_SUMS, float32)
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
        sums_bias = has_bias != 0 and column == 0
        first_chunk = int32(cuda.blockIdx.y * part_chunks)
        last_chunk = int32(min(first_chunk + part_chunks, chunks))
        if t == 0:
            for stage in range(MOST_STAGES):
                mbarrier_init(full0 + uint32(8 * stage), uint32(1))
                mbarrier_init(empty0 + uint32(8 * stage), uint32(6 if sums_bias else 3))
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
            elif t >= 32 and sums_bias:
                # a lane has two channels; each of the three warps every third group of eight pixels
                lane, warp = t & 31, int32((t >> 5) - 1)
                low = high = float32(0)
                stage, parity = int32(0), uint32(0)
                for _ in range(first_chunk, last_chunk):
                    mbarrier_wait(full0 + uint32(8) * uint32(stage), parity)
                    at = int32(uint32(stage) * stage_bytes) + (lane & 3) * 4
                    for eight in range(warp, pixels >> 3, int32(3)):
                        for pixel in range(8):
                            a, b = unpack_half2(load_word(tiles, int32(at + eight * 1024 + pixel * 128
                                                                      + ((lane >> 2) ^ pixel) * 16)))
                            low += a
                            high += b
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(empty0 + uint32(8) * uint32(stage))
                    stage += int32(1)
                    if stage == stages:
                        stage, parity = int32(0), parity ^ uint32(1)
                bias_sums[warp * TILE + 2 * lane] = low
                bias_sums[warp * TILE + 2 * lane + 1] = high
                bar_sync(uint32(1), uint32(96))
                k = int32(t - 32)
                if k < TILE and line * TILE + k < N:
                    put(bias_out, cuda.blockIdx.y * N + line * TILE + k,
                        bias_sums[k] + bias_sums[TILE + k] + bias_sums[2 * TILE + k], adds)
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
            # lanes in pairs exchange halves, so that each writes four neighbouring channels, of row n or of row n + 8
            thread = t & 127
            odd = thread & 1
            n = int32(line * TILE + (thread >> 5) * 16 + ((thread & 31) >> 2) + odd * 8)
            first_c = int32(column * CW)
            to = int32((int32(cuda.blockIdx.y * N) + n) * (TAPS * C) + tap_column * C + first_c + (thread & 2) * 2)
            left = int32(C - first_c if n < N else 0)
            tap_row = int32(SIZE * C)
            write_tap(CW, 0, out, to, acc, odd, left, adds)
            write_tap(CW, 1, out, int32(to + tap_row), acc, odd, left, adds)
            write_tap(CW, 2, out, int32(to + 2 * tap_row), acc, odd, left, adds)

    kernel.__name__ = f"conv2d_weight_gradient_3x3_kernel_v6_{CW}"
    return cuda.jit(kernel, launch_bounds=(THREADS, 1))


conv2d_weight_gradient_3x3_kernels_v6 = {width: make_kernel(width) for width in WIDTHS}


@cuda.jit
def add_gradient_parts_kernel(partial, dweight, vectors, bias_partial, dbias, bias_vectors, parts):
    """dweight += the parts' sums, four by four; the last blocks add dbias likewise. A block's rows share the parts."""
    tile = cuda.shared.array(ADD_FLOATS, float32)
    lane, share = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y)
    lanes, shares = int32(cuda.blockDim.x), int32(cuda.blockDim.y)
    blocks = divide(vectors + lanes - 1, lanes)[0]
    of_bias = cuda.blockIdx.x >= blocks
    vector = int32((cuda.blockIdx.x - blocks if of_bias else cuda.blockIdx.x) * lanes + lane)
    count = bias_vectors if of_bias else vectors
    source = bias_partial if of_bias else partial
    s0 = s1 = s2 = s3 = float32(0)
    if vector < count:
        part = share
        at, step = (np.int64(share) * count + vector) * 4, np.int64(shares) * count * 4
        while part + 3 * shares < parts:  # four loads on their way at a time
            a0, a1, a2, a3 = load4(source, at)
            b0, b1, b2, b3 = load4(source, at + step)
            c0, c1, c2, c3 = load4(source, at + 2 * step)
            d0, d1, d2, d3 = load4(source, at + 3 * step)
            s0, s1, s2, s3 = s0 + a0 + b0 + c0 + d0, s1 + a1 + b1 + c1 + d1, s2 + a2 + b2 + c2 + d2, \
                s3 + a3 + b3 + c3 + d3
            at += 4 * step
            part = int32(part + 4 * shares)
        while part < parts:
            a0, a1, a2, a3 = load4(source, at)
            s0, s1, s2, s3 = s0 + a0, s1 + a1, s2 + a2, s3 + a3
            at += step
            part = int32(part + shares)
    mine = int32((share * lanes + lane) * 4)
    tile[mine], tile[mine + 1], tile[mine + 2], tile[mine + 3] = s0, s1, s2, s3
    cuda.syncthreads()
    if share == 0 and vector < count:
        for other in range(int32(1), shares):
            mine = int32((other * lanes + lane) * 4)
            s0, s1, s2, s3 = s0 + tile[mine], s1 + tile[mine + 1], s2 + tile[mine + 2], s3 + tile[mine + 3]
        target = dbias if of_bias else dweight
        a0, a1, a2, a3 = load4(target, vector * 4)
        store4(target, vector * 4, a0 + s0, a1 + s1, a2 + s2, a3 + s3)


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


START_NS, CHUNK_NS, PASS_NS = 4500.0, 100.0, 2000.0  # launch to first product, and last sums; a stage; the second pass
WRITTEN_A_NS, READ_A_NS = 3000.0, 4000.0  # bytes of the parts, through the L2 cache
PRODUCTS_A_NS = 6000.0  # FLOPs of a multiprocessor, where shared memory keeps up
SLOWEST_ROW = 64  # bytes as which the copy engine's shorter rows count


@functools.lru_cache(maxsize=4096)
def choose_plan(B, H, W, C, N, whole_halo, multiprocessors, only=None):
    """(estimate of nanoseconds, `Plan`) with the lowest estimate; only: (CW, parts), None for any."""
    best, (only_width, only_parts) = None, only or (None, None)
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
                        if parts == 1:
                            estimate += 2 * written / WRITTEN_A_NS
                        else:
                            estimate += PASS_NS + written / WRITTEN_A_NS + (written + 8 * N * TAPS * C) / READ_A_NS
                        if best is None or estimate < best[0]:
                            best = estimate, Plan(channels, width, height, images, stages, x_bytes, chunks, part_chunks,
                                                  parts)
    return best


def hopper_weight_gradient_3x3(dy, x, dweight, dbias=None, whole_halo=True, only=None):
    """dweight += …, dbias += …, for arrays that conv2d.py has checked."""
    b, h, w, n = dy.shape
    c = x.shape[3]
    backend = dy.backend
    plan = choose_plan(b, h, w, c, n, bool(whole_halo), backend.multiprocessors, only)[1]
    nothing, alone = no_numbers(backend), plan.parts == 1
    map_dy = tensor_map(dy, (TILE, plan.width, plan.height, plan.images))
    map_x = tensor_map(x, (plan.channels, plan.width + 2 * bool(whole_halo), plan.height + 2, plan.images),
                       swizzle=2 * plan.channels)
    out = dweight if alone else empty((plan.parts, dweight.size), np.float32, like=dy)
    bias_out = nothing if dbias is None else dbias if alone else empty((plan.parts, n), np.float32, like=dy)
    launch(conv2d_weight_gradient_3x3_kernels_v6[plan.channels], (-(-c // plan.channels) * -(-n // TILE), plan.parts),
           THREADS, map_dy, map_x, out.reshape(-1), bias_out.reshape(-1), h, w, c, n, int(whole_halo), plan.width,
           plan.height, plan.images, plan.stages, plan.x_bytes, plan.chunks, plan.part_chunks, int(dbias is not None),
           int(alone), shared=plan.shared)
    if alone:
        return
    vectors, shares = dweight.size // 4, 1
    while shares < 32 and 2 * shares <= plan.parts and 2 * shares * vectors <= ADD_WANTED:
        shares *= 2
    lanes = ADD_THREADS // shares
    bias_vectors = 0 if dbias is None else n // 4
    launch(add_gradient_parts_kernel, -(-vectors // lanes) + -(-bias_vectors // lanes), (lanes, shares),
           out.reshape(-1), dweight.reshape(-1), vectors, bias_out.reshape(-1), nothing if dbias is None else dbias,
           bias_vectors, plan.parts)
