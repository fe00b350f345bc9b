"""A 3 × 3 convolution on Hopper, level 2: one box of pixels with its halo serves all nine taps.

WHAT IS NEW
    For 64 channels of 16 × 8 pixels TMA loads 18 × 10 pixels once: the tile and its halo, which the
    taps at its edge reach. Each tap's matrix is read from that box: it begins r rows and s pixels
    further on. Eight pixels of an image row are one group of eight rows of the matrix, and the next
    group is one row of the box later: 10 · 128 bytes, the stride in the descriptor. No byte moves.
    A tap may begin at any pixel, even in the middle of the swizzle's pattern of eight rows: the
    hardware swizzles by the bits of the address, and TMA has stored the pixels by the same rule.
    Two pipelines: boxes of pixels, 2 stages, one for each 64 channels; the weight, 6 stages, one
    for each tap.
WHY IT PAYS
    180 pixels cross from the L2 cache where level 1 moves 9 · 128: 23 KB instead of 147, in
    addition to 147 KB of weights.
WHAT REMAINS
    kernels/conv2d/hopper/ adds tiles for other images and channels, three taps a stage, persistence, a TMA
    store of the results with bias and residual, the input gradient, and statistics for the
    GroupNorm that follows.
LAUNCH
    as level 1; 142 KiB of dynamic shared memory.
SOURCE
    PTX ISA, section 9.7.15.5.1 (descriptors).
READ NEXT
    kernels/conv2d/hopper/, the kernel that the models run.
"""

from ....device import cuda, launch, pipeline
from ....device.mbarrier import fence_barrier_init, smem_u32
from ....device.requires import requires
from ....device.tensor_core import pack_half2, store_word
from ....device.tensor_map import tensor_map
from ....device.tma import tma_load_2d, tma_load_4d
from ....device.wgmma import make_multiply, make_setmaxnreg, make_wgmma_wait, wgmma_wait_1

TILE_H, TILE_W, BN, BK = 16, 8, 128, 64
BOX_H, BOX_W = TILE_H + 2, TILE_W + 2  # with the halo
A_STAGES, B_STAGES = 2, 6
THREADS, BARRIERS, ACCUMULATORS = 384, 2 * (A_STAGES + B_STAGES), BN // 2
ROW = 2 * BK
BOX_BYTES, B_BYTES = BOX_H * BOX_W * ROW, BN * ROW
A_BYTES = -(-BOX_BYTES // 1024) * 1024  # of a stage: each begins where the swizzle's pattern begins
# eight pixels: a row of the box on
multiply, wgmma_wait = make_multiply(BN, stride_a=BOX_W * ROW), make_wgmma_wait(BN)
give_registers, take_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


@requires("9.0a")
@cuda.jit(launch_bounds=(THREADS, 1))
def conv2d_level_kernel_v2(map_x, map_weight, y, H, W, C, N):
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers, t = cuda.shared.array(BARRIERS, "uint64"), cuda.threadIdx.x
    boxes = pipeline.make_ring(smem_u32(tiles), A_BYTES, A_STAGES, smem_u32(barriers))
    taps = pipeline.make_ring(
        smem_u32(tiles) + A_STAGES * A_BYTES, B_BYTES, B_STAGES, smem_u32(barriers) + 16 * A_STAGES
    )
    across, down, blocks = W // TILE_W, H // TILE_H, C // BK
    n, tile = cuda.blockIdx.x * BN, cuda.blockIdx.y
    w, h, image = tile % across * TILE_W, tile // across % down * TILE_H, tile // (across * down)
    if t == 0:
        pipeline.init_ring(boxes, 1, 2)
        pipeline.init_ring(taps, 1, 2)
        fence_barrier_init()
    cuda.syncthreads()

    if t < 128:  # the producer's warpgroup
        give_registers()
        if t == 0:
            box, box_parity = pipeline.producer_start()
            stage, parity = pipeline.producer_start()
            for block in range(blocks):
                full = pipeline.producer_acquire(boxes, box, box_parity, BOX_BYTES)
                tma_load_4d(
                    pipeline.stage_at(boxes, box), map_x, full, block * BK, w - 1, h - 1, image
                )
                box, box_parity = pipeline.advance(boxes, box, box_parity)
                for tap in range(9):
                    full = pipeline.producer_acquire(taps, stage, parity, B_BYTES)
                    tma_load_2d(
                        pipeline.stage_at(taps, stage), map_weight, full, tap * C + block * BK, n
                    )
                    stage, parity = pipeline.advance(taps, stage, parity)
    else:  # the consumers
        take_registers()
        acc = cuda.local.array(ACCUMULATORS, "float32")
        consumer = t // 128 - 1
        box, box_parity = pipeline.consumer_start()
        stage, parity = pipeline.consumer_start()
        pipeline.consumer_wait(boxes, box, box_parity)
        pipeline.consumer_wait(taps, stage, parity)
        # this consumer's first pixel in a box: eight rows of it each
        mine = consumer * 8 * BOX_W * ROW
        multiply(acc, pipeline.stage_at(boxes, box) + mine, pipeline.stage_at(taps, stage), 0)
        for step in range(1, 9 * blocks):
            tap, previous, previous_box = step % 9, stage, box
            stage, parity = pipeline.advance(taps, stage, parity)
            if tap == 0:
                box, box_parity = pipeline.advance(boxes, box, box_parity)
                pipeline.consumer_wait(boxes, box, box_parity)
            pipeline.consumer_wait(taps, stage, parity)
            a = pipeline.stage_at(boxes, box) + mine + (tap // 3 * BOX_W + tap % 3) * ROW
            multiply(acc, a, pipeline.stage_at(taps, stage), 1)
            wgmma_wait_1()  # the tap before has been multiplied
            if t % 128 == 0:
                pipeline.consumer_release(taps, previous)
                if tap == 0:
                    pipeline.consumer_release(boxes, previous_box)
        wgmma_wait(acc)

        # the epilogue, as in shifted_boxes.py
        pixel = (image * H + h + consumer * 8 + t % 128 // 32 * 2) * W + w + t % 32 // 4
        for j in range(BN // 8):
            column = n + 8 * j + t % 4 * 2
            store_word(y, pixel * N + column, pack_half2(acc[4 * j], acc[4 * j + 1]))
            store_word(y, (pixel + W) * N + column, pack_half2(acc[4 * j + 2], acc[4 * j + 3]))


def launch_halo(x, weight, y):
    """y (B, H, W, N) = x (B, H, W, C) convolved with weight (N, 3, 3, C), all float16."""
    (B, H, W, C), N = x.shape, len(weight)
    launch(
        conv2d_level_kernel_v2,
        (N // BN, B * H // TILE_H * W // TILE_W),
        THREADS,
        tensor_map(x, (BK, BOX_W, BOX_H, 1)),
        tensor_map(weight.reshape(N, 9 * C), (BK, BN)),
        y.reshape(-1),
        H,
        W,
        C,
        N,
        shared=A_STAGES * A_BYTES + B_STAGES * B_BYTES,
    )
