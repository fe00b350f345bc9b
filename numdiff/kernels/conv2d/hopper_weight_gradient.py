"""The convolution's weight gradient on Hopper's tensor cores: pixels are the inner dimension.

MATHEMATICS
    dweight[n, tap, c] += Σ_p dy[p, n] · x[p + tap - pad, c]          dbias[n] += Σ_p dy[p, n]
    For each tap a matrix product: the transposed dy (n × pixels) by x (pixels × c), moved by the tap.
SHAPES
    dy (B, H, W, N), x (B, H, W, C): float16; dweight (N, kernel, kernel, C), dbias (N,): float32, added to
    C and N multiples of 8, kernel odd, stride 1
VERSIONS
    v5, v6 as in hopper.py: x comes in a box for each column of taps, or in one with its whole halo. All nine
    taps of a 3 × 3 kernel read the same boxes: dy crosses from L2 once for nine products, x 1.27 times.
WHO DOES WHAT  (512 threads: four warpgroups)
    warp 0 asks for boxes of dy and x           one stage for each group of 128 or 256 pixels
    warps 1, 2 sum 32 of dy's columns each      while the boxes lie there anyway, for dbias
    warpgroups 1, 2, 3 multiply three taps each: three times 64 × 64 sums, 96 registers of a thread
    Both matrices lie with their inner dimension, the pixels, across (eight pixels of an image row are eight rows of 128
    bytes), which a wgmma of float16 takes as it lies: nothing is transposed.
LAUNCH
    grid (tiles of 64 × 64 channels × groups of nine taps, parts): the pixels are shared among as many parts as fill the
    GPU.
DETERMINISM
    a part writes its own sums, in the order in which registers hold them (so each warp writes 512 neighbouring bytes);
    a second kernel adds the parts in a fixed order to dweight. How many parts there are depends on the shape and the
    GPU's size.
COST
    FLOPs as in direct.py; the parts cost 2 · 4 · parts · N · kernel² · C bytes, mostly in the L2 cache.
SOURCE
    PTX ISA, section 9.7.15; Chetlur et al. 2014, "cuDNN", arXiv:1410.0759.
READ NEXT
    hopper_weight_gradient_3x3.py, which 3 × 3 kernels take.
"""
import functools
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, launch, load4, store4, uint32
from ...device.mbarrier import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from ...device.requires import requires
from ...device.tensor_map import tensor_map
from ...device.tma import tma_load_4d, tma_prefetch
from ...device.wgmma import make_setmaxnreg, make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence, wgmma_wait_1
from ..common import divide, no_numbers
from ..reduce import column_sum, sample_sum
from .hopper import ROW, SHARED, descriptor, row_of
from .hopper_weight_gradient_3x3 import SIZE, add_columns, column_of, hopper_weight_gradient_3x3

THREADS = 512
TILE = 64  # channels of dy, and of x
TAPS = 9  # of a block, three for each consumer
MOST_STAGES = 6
BARRIERS = 2 * MOST_STAGES
SUMS = TAPS * TILE * TILE  # of a block
ADDED = 32  # vectors of four sums in a block of the second kernel
SHARES = 8  # threads that share the parts of each
BLOCK_SUMS = 4 * ADDED * SHARES

multiply_64 = make_wgmma(64, True, True)
wait_64 = make_wgmma_wait(64)
producer_registers, consumer_registers = make_setmaxnreg(104, False), make_setmaxnreg(136, True)


@cuda.jit(device=True, forceinline=True)
def tap_rows(tap, size, pitch, whole_halo, copy_rows):
    """Rows from the start of x's boxes to the pixels that a tap sees."""
    row, column = divide(tap, size)
    return int32(row * pitch + column * (1 if whole_halo else copy_rows))


@cuda.jit(device=True, forceinline=True)
def write_sums(partial, at, acc):
    """A thread's 32 sums of a tap, four by four, each time next to those of its neighbours."""
    for k in range(8):
        store4(partial, at + k * 512, acc[4 * k], acc[4 * k + 1], acc[4 * k + 2], acc[4 * k + 3])


@requires("9.0a")
@cuda.jit(launch_bounds=(THREADS, 1))
def conv2d_weight_gradient_kernel_v6(map_dy, map_x, partial, bias_partial, images, height, width, C, N, size,
                                     whole_halo,
                                     tile_w, tile_h, tile_images, stages, x_bytes, chunks, part_chunks, has_bias):
    tiles = cuda.shared.array(0, np.uint8, alignment=1024)
    barriers = cuda.shared.array(BARRIERS, np.uint64)
    base, full0 = smem_u32(tiles), smem_u32(barriers)
    empty0 = full0 + uint32(8 * MOST_STAGES)
    t = int32(cuda.threadIdx.x)
    warpgroup = t >> 7

    pad = int32(size >> 1)
    pitch = int32(tile_w + 2 * pad if whole_halo else tile_w)
    box_h = int32(tile_h + 2 * pad)
    copy_rows = int32(pitch * box_h * tile_images)
    copies = int32(1 if whole_halo else size)
    pixels = int32(tile_w * tile_h * tile_images)
    dy_bytes = uint32(pixels * ROW)
    stage_bytes = dy_bytes + uint32(x_bytes)
    across, down = divide(width + tile_w - 1, tile_w)[0], divide(height + tile_h - 1, tile_h)[0]
    tiles_c = divide(C + TILE - 1, TILE)[0]
    tiles_n = divide(N + TILE - 1, TILE)[0]
    rest, column = divide(cuda.blockIdx.x, tiles_c)
    group, line = divide(rest, tiles_n)  # of nine taps
    sums_bias = has_bias != 0 and column == 0 and group == 0
    first_chunk = int32(cuda.blockIdx.y * part_chunks)
    last_chunk = int32(min(first_chunk + part_chunks, chunks))
    if t == 0:
        for stage in range(MOST_STAGES):
            mbarrier_init(full0 + uint32(8 * stage), uint32(1))
            mbarrier_init(empty0 + uint32(8 * stage), uint32(5 if sums_bias else 3))
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
                mbarrier_expect_tx(full, dy_bytes + uint32(copies * copy_rows * ROW))
                to = base + uint32(stage) * stage_bytes
                tma_load_4d(to, map_dy, full, uint32(line * TILE), uint32(w), uint32(h), image)
                for copy in range(copies):
                    tma_load_4d(to + dy_bytes + uint32(copy * copy_rows * ROW), map_x, full, uint32(column * TILE),
                                uint32(w - pad + copy), uint32(h - pad), image)
                stage += int32(1)
                if stage == stages:
                    stage, parity = int32(0), parity ^ uint32(1)
        elif t >= 32 and t < 96 and sums_bias:
            lane, warp = t & 31, int32((t >> 5) - 1)
            total = float32(0)
            stage, parity = int32(0), uint32(0)
            for _ in range(first_chunk, last_chunk):
                mbarrier_wait(full0 + uint32(8) * uint32(stage), parity)
                total += add_columns(base + uint32(stage) * stage_bytes, int32(pixels >> 6), warp, lane)
                cuda.syncwarp()
                if lane == 0:
                    mbarrier_arrive(empty0 + uint32(8) * uint32(stage))
                stage += int32(1)
                if stage == stages:
                    stage, parity = int32(0), parity ^ uint32(1)
            n = int32(line * TILE + column_of(warp, lane))
            if n < N:
                bias_partial[cuda.blockIdx.y * N + n] = total
    else:
        consumer_registers()
        acc_0 = cuda.local.array(32, np.float32)
        acc_1 = cuda.local.array(32, np.float32)
        acc_2 = cuda.local.array(32, np.float32)
        arrives = (t & 127) == 0
        taps = int32(size * size)
        tap = int32(group * TAPS + (warpgroup - 1) * 3)
        # a tap beyond the last repeats it, and nobody reads its sums
        shift_0 = uint32(tap_rows(min(tap, taps - 1), size, pitch, whole_halo, copy_rows)) * uint32(ROW) + dy_bytes
        shift_1 = uint32(tap_rows(min(tap + 1, taps - 1), size, pitch, whole_halo, copy_rows)) * uint32(ROW) + dy_bytes
        shift_2 = uint32(tap_rows(min(tap + 2, taps - 1), size, pitch, whole_halo, copy_rows)) * uint32(ROW) + dy_bytes
        dy_stride, x_stride = uint32(tile_w * ROW), uint32(pitch * ROW)  # from eight pixels to those below
        # 16 pixels, in descriptors
        dy_step, x_step = np.uint64(dy_stride >> uint32(3)), np.uint64(x_stride >> uint32(3))
        sub_blocks = pixels >> 6
        stage, parity, sub = int32(0), uint32(0), int32(0)
        at = base

        # the first 64 pixels: acc = …
        mbarrier_wait(full0, uint32(0))
        da = descriptor(at, uint32(16), dy_stride, 1)
        db_0 = descriptor(at + shift_0, uint32(16), x_stride, 1)
        db_1 = descriptor(at + shift_1, uint32(16), x_stride, 1)
        db_2 = descriptor(at + shift_2, uint32(16), x_stride, 1)
        wgmma_fence()
        multiply_64(acc_0, da, db_0, int32(0))
        multiply_64(acc_1, da, db_1, int32(0))
        multiply_64(acc_2, da, db_2, int32(0))
        for _ in range(3):
            da += dy_step
            db_0 += x_step
            db_1 += x_step
            db_2 += x_step
            multiply_64(acc_0, da, db_0, int32(1))
            multiply_64(acc_1, da, db_1, int32(1))
            multiply_64(acc_2, da, db_2, int32(1))
        wgmma_commit()

        # all others: acc += …
        for _ in range(int32(1), int32((last_chunk - first_chunk) * sub_blocks)):
            before = stage
            sub += int32(1)
            if sub == sub_blocks:
                sub = int32(0)
                stage += int32(1)
                if stage == stages:
                    stage, parity = int32(0), parity ^ uint32(1)
                at = base + uint32(stage) * stage_bytes
                mbarrier_wait(full0 + uint32(8) * uint32(stage), parity)
            x_at = at + uint32(row_of(sub, tile_w, tile_h, pitch, box_h)) * uint32(ROW)
            da = descriptor(at + uint32(row_of(sub, tile_w, tile_h, tile_w, tile_h)) * uint32(ROW), uint32(16),
                            dy_stride, 1)
            db_0 = descriptor(x_at + shift_0, uint32(16), x_stride, 1)
            db_1 = descriptor(x_at + shift_1, uint32(16), x_stride, 1)
            db_2 = descriptor(x_at + shift_2, uint32(16), x_stride, 1)
            wgmma_fence()
            for _ in range(4):
                multiply_64(acc_0, da, db_0, int32(1))
                multiply_64(acc_1, da, db_1, int32(1))
                multiply_64(acc_2, da, db_2, int32(1))
                da += dy_step
                db_0 += x_step
                db_1 += x_step
                db_2 += x_step
            wgmma_commit()
            wgmma_wait_1()
            if arrives and sub == 0:  # the stage before has been multiplied
                mbarrier_arrive(empty0 + uint32(8) * uint32(before))
        wait_64(acc_0)
        wait_64(acc_1)
        wait_64(acc_2)
        if arrives:
            mbarrier_arrive(empty0 + uint32(8) * uint32(stage))
        to = (cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x) * SUMS + (warpgroup - 1) * (SUMS // 3) + (t & 127) * 4
        write_sums(partial, to, acc_0)
        write_sums(partial, to + TILE * TILE, acc_1)
        write_sums(partial, to + 2 * TILE * TILE, acc_2)


@cuda.jit
def add_weight_gradient_kernel(partial, dweight, parts, size, C, N, taps):
    """dweight += the sum of the parts: 32 vectors of four sums a block, its rows of threads share the parts."""
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
    group, line = divide(rest, divide(N + TILE - 1, TILE)[0])
    tap = int32(group * TAPS + tap)
    for which in range(share, int32(4), shares):  # of the vector's sums; where it lies: emulator/wgmma.py
        n = int32(line * TILE + (thread >> 5) * 16 + ((thread & 31) >> 2) + (which >> 1) * 8)
        c = int32(column * TILE + k * 8 + (thread & 3) * 2 + (which & 1))
        if n < N and c < C and tap < taps:
            total = tile[which * ADDED + lane]
            for other in range(int32(1), shares):
                total += tile[(other * 4 + which) * ADDED + lane]
            dweight[(n * taps + tap) * C + c] += total


# Launchers ------------------------------------------------------------------------------------------------------------

class Plan(NamedTuple):
    """How the pixels are cut: chunks of width × height pixels of `images` images, `part_chunks` of them to a part."""

    width: int
    height: int
    images: int
    stages: int
    x_bytes: int
    chunks: int
    part_chunks: int
    parts: int


BYTES_A_NS, FLOPS_A_NS = 42.0, 6000.0  # of a multiprocessor: from L2 to shared memory, all of them at it; wgmma
START_NS, CHUNK_NS = 3000.0, 100.0  # launch to first product and to the second kernel; what a stage costs beside
PART_BYTES_A_NS = 3500.0  # of partial sums, written and read, through the L2 cache


@functools.lru_cache(maxsize=4096)
def choose_plan(B, H, W, C, N, size, whole_halo, multiprocessors):
    """(estimate of nanoseconds, `Plan`) with the lowest estimate."""
    pad, best = size // 2, None
    tiles = -(-C // TILE) * -(-N // TILE) * -(-size * size // TAPS)
    for width in (8, 16, 32):
        for height in (8, 16, 32):
            for pixels in (64, 128, 256):
                images, rest = divmod(pixels, width * height)
                if rest or not images:
                    continue
                box = (width + 2 * pad * whole_halo) * (height + 2 * pad) * images
                x_bytes = -(-box * ROW * (1 if whole_halo else size) // 1024) * 1024
                stages = min(SHARED // (pixels * ROW + x_bytes), MOST_STAGES)
                if stages < 2:
                    continue
                chunks = -(-W // width) * -(-H // height) * -(-B // images)
                moved = (pixels * ROW + x_bytes) / BYTES_A_NS
                multiplied = 2 * pixels * TILE * TILE * TAPS / FLOPS_A_NS
                chunk = (1.2 if stages == 2 else 1.0) * max(moved, multiplied) + 0.1 * min(moved, multiplied)
                wanted = {turns * multiprocessors // tiles for turns in (1, 2, 3, 4)}
                for parts in sorted(wanted | {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}):
                    part_chunks = -(-chunks // max(1, min(chunks, parts)))
                    parts = -(-chunks // part_chunks)
                    rounds = -(-parts * tiles // multiprocessors)
                    estimate = START_NS + rounds * (part_chunks * (CHUNK_NS + chunk) + 1500) + \
                        parts * tiles * SUMS * 8 / PART_BYTES_A_NS
                    if best is None or estimate < best[0]:
                        best = estimate, Plan(width, height, images, stages, x_bytes, chunks, part_chunks, parts)
    if best is None:
        raise ValueError(f"a {size} × {size} weight gradient does not fit into shared memory: use version=1")
    return best


def hopper_weight_gradient(dy, x, dweight, dbias=None, whole_halo=True, general=False, need_channel=False):
    """dweight += …, dbias += …, for arrays that launcher.py has checked; general: not by the kernels for 3 × 3 taps.

    need_channel: returns the sums of dy over each image's pixels, (B, N)
    """
    b, h, w, n = dy.shape
    c, size = x.shape[3], dweight.shape[1]
    if size == SIZE and not general:
        dchannel = empty((b, n), np.float32, like=dy) if need_channel else None
        hopper_weight_gradient_3x3(dy, x, dweight, dbias, whole_halo, dchannel=dchannel)
        return dchannel
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
    map_x = tensor_map(x, (TILE, plan.width + 2 * pad * bool(whole_halo), plan.height + 2 * pad, plan.images))
    tiles = -(-c // TILE) * -(-n // TILE) * -(-size * size // TAPS)
    partial = empty((plan.parts, tiles * SUMS), np.float32, like=dy)
    bias_partial = no_numbers(backend) if dbias is None else empty((plan.parts, n), np.float32, like=dy)
    launch(conv2d_weight_gradient_kernel_v6, (tiles, plan.parts), THREADS, map_dy, map_x, partial.reshape(-1),
           bias_partial.reshape(-1), b, h, w, c, n, size, int(whole_halo), plan.width, plan.height, plan.images,
           plan.stages,
           plan.x_bytes, plan.chunks, plan.part_chunks, int(dbias is not None),
           shared=plan.stages * (plan.width * plan.height * plan.images * ROW + plan.x_bytes))
    launch(add_weight_gradient_kernel, tiles * SUMS // 4 // ADDED, (ADDED, min(plan.parts, SHARES)),
           partial.reshape(-1), dweight.reshape(-1),
           plan.parts, tiles * SUMS, c, n, size * size)
    if dbias is not None:
        column_sum(bias_partial, dbias)
    return dchannel
