"""A 3 × 3 convolution on Hopper, level 1: a matrix product whose A is a shifted box of the image
for each tap.

MATHEMATICS
    y[b, h, w, n] = Σ_r Σ_s Σ_c x[b, h + r - 1, w + s - 1, c] · weight[n, r, s, c], with x = 0
    outside of the image
WHAT IS NEW, compared with ../wgmma/producer_consumer.py
    The sum over (r, s, c) is the product's sum over k: 9 taps of C channels each. The weight (N, 3,
    3, C) is B, (N, 9 · C), without a copy. A, the pixels of each tap, is never written
    (kernels/conv2d/im2col.py writes it, nine times the size of x): for 16 × 8 pixels of y, a tap sees the same
    16 × 8 pixels of x, shifted by (r - 1, s - 1). They are a box of a four-dimensional tensor: TMA
    loads it with one instruction, with zeros outside the image, which is the padding. So the kernel
    is the matrix product's, except for the producer's coordinates and the place of a result.
THE ROWS OF A TILE are its pixels, one image row after the other: 64 of them, 8 × 8 pixels, for each
consumer.
WHAT REMAINS
    Each pixel crosses from the L2 cache to shared memory nine times, and for each tile all of its
    weights cross once.
LAUNCH
    grid (N / 128, B · H / 16 · W / 8), 384 threads, 128 KiB of dynamic shared memory; H, W, C, N
    multiples of 16, 8, 64, 128.
SOURCE
    the implicit product: Chetlur et al. 2014, "cuDNN", arXiv:1410.0759; boxes: PTX ISA, section
    9.7.9.27.
READ NEXT
    halo.py, where a pixel crosses once.
"""

from ....device import cuda, launch, pipeline
from ....device.mbarrier import smem_u32
from ....device.requires import requires
from ....device.tensor_core import pack_half2, store_word
from ....device.tensor_map import tensor_map
from ....device.tma import tma_load_2d, tma_load_4d
from ....device.wgmma import make_multiply, make_setmaxnreg, make_wgmma_wait, wgmma_wait_1

TILE_H, TILE_W = 16, 8  # pixels of a block's tile
BM, BN, BK, STAGES = TILE_H * TILE_W, 128, 64, 4
THREADS, BARRIERS, ACCUMULATORS = 384, 2 * STAGES, BN // 2
ROW = 2 * BK  # bytes of a pixel's 64 channels
A_BYTES, STAGE_BYTES = BM * ROW, (BM + BN) * ROW
multiply, wgmma_wait = make_multiply(BN), make_wgmma_wait(BN)
give_registers, take_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


@requires("9.0a")
@cuda.jit(launch_bounds=(THREADS, 1))
def conv2d_level_kernel_v1(map_x, map_weight, y, H, W, C, N):
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    ring = pipeline.make_ring(smem_u32(tiles), STAGE_BYTES, STAGES, smem_u32(barriers))
    t = cuda.threadIdx.x
    across, down, blocks = W // TILE_W, H // TILE_H, C // BK
    n, tile = cuda.blockIdx.x * BN, cuda.blockIdx.y
    w, h, image = tile % across * TILE_W, tile // across % down * TILE_H, tile // (across * down)
    pipeline.start_ring(ring, 1, 2)

    if t < 128:  # the producer's warpgroup
        give_registers()
        if t == 0:
            stage, parity = pipeline.producer_start()
            for step in range(9 * blocks):
                tap, block = step // blocks, step % blocks
                full = pipeline.producer_acquire(ring, stage, parity, STAGE_BYTES)
                a = pipeline.stage_at(ring, stage)
                tma_load_4d(a, map_x, full, block * BK, w + tap % 3 - 1, h + tap // 3 - 1, image)
                tma_load_2d(a + A_BYTES, map_weight, full, step * BK, n)
                stage, parity = pipeline.advance(ring, stage, parity)
    else:  # the consumers
        take_registers()
        acc = cuda.local.array(ACCUMULATORS, "float32")
        consumer = t // 128 - 1
        stage, parity = pipeline.consumer_start()
        pipeline.consumer_wait(ring, stage, parity)
        a = pipeline.stage_at(ring, stage)
        multiply(acc, a + consumer * 64 * ROW, a + A_BYTES, 0)
        for _ in range(1, 9 * blocks):
            previous = stage
            stage, parity = pipeline.advance(ring, stage, parity)
            pipeline.consumer_wait(ring, stage, parity)
            a = pipeline.stage_at(ring, stage)
            multiply(acc, a + consumer * 64 * ROW, a + A_BYTES, 1)
            wgmma_wait_1()
            pipeline.warpgroup_release(ring, previous)
        wgmma_wait(acc)

        # the epilogue: rows lane // 4 and 8 more of a warp's 16 are a pixel and the one below it
        pixel = (image * H + h + consumer * 8 + t % 128 // 32 * 2) * W + w + t % 32 // 4
        for j in range(BN // 8):
            column = n + 8 * j + t % 4 * 2
            store_word(y, pixel * N + column, pack_half2(acc[4 * j], acc[4 * j + 1]))
            store_word(y, (pixel + W) * N + column, pack_half2(acc[4 * j + 2], acc[4 * j + 3]))


def launch_shifted_boxes(x, weight, y):
    """y (B, H, W, N) = x (B, H, W, C) convolved with weight (N, 3, 3, C), all float16."""
    (B, H, W, C), N = x.shape, len(weight)
    launch(
        conv2d_level_kernel_v1,
        (N // BN, B * H // TILE_H * W // TILE_W),
        THREADS,
        tensor_map(x, (BK, TILE_W, TILE_H, 1)),
        tensor_map(weight.reshape(N, 9 * C), (BK, BN)),
        y.reshape(-1),
        H,
        W,
        C,
        N,
        shared=STAGES * STAGE_BYTES,
    )
