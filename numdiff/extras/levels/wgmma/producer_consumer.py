"""Hopper, level 3: warp specialisation, a warpgroup that only loads tiles by TMA, and two that only
multiply.

WHAT IS NEW
    Producer and consumers: one thread of warpgroup 0, the producer, loads tiles; warpgroups 1 and
        2, the consumers, multiply 64 rows each of a tile of 128 × 256. They never meet at a
        block-wide barrier: between them are four stages of shared memory, with two mbarriers each.
        A stage's `full` completes when TMA has delivered its bytes; the consumers wait for it. They
        arrive at `empty` when they have read the stage; the producer waits for both arrivals before
        it loads the next tiles there.
    setmaxnreg: the producer gives registers back, the consumers take them: 40 + 2 · 232 = 3 · 168.
    A step in flight: wgmma_wait_1 waits for all but the last group of products, so the step just
        issued keeps the tensor cores busy while the stage of the step before it is released.
WHY IT PAYS
    No thread waits for the whole block any more, and the tiles of up to three steps are in flight
    while one is multiplied. Two consumers share each tile of B: 48 KiB come in for a step where two
    blocks of level 2 fetch 80.
STAGE AND PARITY
    A stage is used again after four steps, in the next phase of its barriers. The consumers begin
    with parity 0 of `full`. In the first four steps the producer must not wait, as every stage is
    still empty: it begins with parity 1 of `empty`, and a wait for parity 1 of a new barrier
    returns at once.
WHAT REMAINS
    A block ends with its tile: while it writes the results, the tensor cores are idle, and the next
    block begins with empty stages.
LAUNCH
    grid (N / 256, M / 128), 384 threads, 192 KiB of dynamic shared memory; M, N, K multiples of
    128, 256, 64.
SOURCE
    PTX ISA, sections 9.7.13.15 (mbarrier) and 9.7.19.5 (setmaxnreg).
READ NEXT
    persistent.py, where a block continues with another tile.
"""

from ....device import cuda, launch
from ....device.mbarrier import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from ....device.requires import requires
from ....device.tensor_core import pack_half2, store_word
from ....device.tensor_map import tensor_map
from ....device.tma import tma_load_2d
from ....device.wgmma import make_multiply, make_setmaxnreg, make_wgmma_wait, wgmma_wait_1

BM, BN, BK, STAGES = 128, 256, 64, 4
THREADS, BARRIERS, ACCUMULATORS = 384, 2 * STAGES, BN // 2
ROW = 2 * BK  # bytes
A_BYTES, STAGE_BYTES = BM * ROW, (BM + BN) * ROW
multiply, wgmma_wait = make_multiply(BN), make_wgmma_wait(BN)
give_registers, take_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


@requires("9.0a")
# one block a multiprocessor: 168 registers a thread, which setmaxnreg moves
@cuda.jit(launch_bounds=(THREADS, 1))
def matmul_level_kernel_v3(map_a, map_b, c, N, K):
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(BARRIERS, "uint64")
    base, full = smem_u32(tiles), smem_u32(barriers)
    empty = full + 8 * STAGES
    m, n, t, steps = cuda.blockIdx.y * BM, cuda.blockIdx.x * BN, cuda.threadIdx.x, K // BK
    if t == 0:
        for stage in range(STAGES):
            mbarrier_init(full + 8 * stage, 1)  # one arrival a phase: the producer's
            mbarrier_init(empty + 8 * stage, 2)  # two: one thread of each consumer
        fence_barrier_init()  # TMA, too, sees the barriers initialised
    cuda.syncthreads()

    if t < 128:  # the producer's warpgroup
        give_registers()
        if t == 0:
            for step in range(steps):
                stage, parity = step % STAGES, step // STAGES % 2
                mbarrier_wait(empty + 8 * stage, parity ^ 1)
                mbarrier_expect_tx(full + 8 * stage, STAGE_BYTES)
                a = base + stage * STAGE_BYTES
                tma_load_2d(a, map_a, full + 8 * stage, step * BK, m)
                tma_load_2d(a + A_BYTES, map_b, full + 8 * stage, step * BK, n)
    else:  # the consumers
        take_registers()
        acc = cuda.local.array(ACCUMULATORS, "float32")
        consumer = t // 128 - 1  # 0: the upper 64 rows of the tile, 1: the lower
        mbarrier_wait(full, 0)
        # the first step overwrites the accumulators
        multiply(acc, base + consumer * 64 * ROW, base + A_BYTES, 0)
        for step in range(1, steps):
            stage, parity = step % STAGES, step // STAGES % 2
            mbarrier_wait(full + 8 * stage, parity)
            a = base + stage * STAGE_BYTES
            multiply(acc, a + consumer * 64 * ROW, a + A_BYTES, 1)
            wgmma_wait_1()  # the step before has been multiplied: its stage is free
            if t % 128 == 0:
                mbarrier_arrive(empty + 8 * ((step - 1) % STAGES))
        wgmma_wait(acc)

        # the epilogue: accumulators have the layout of one_tile.py
        row, column = m + consumer * 64 + t % 128 // 32 * 16 + t % 32 // 4, n + t % 4 * 2
        for j in range(BN // 8):
            store_word(c, row * N + column + 8 * j, pack_half2(acc[4 * j], acc[4 * j + 1]))
            store_word(
                c, (row + 8) * N + column + 8 * j, pack_half2(acc[4 * j + 2], acc[4 * j + 3])
            )


def launch_producer_consumer(a, b, c):
    """c (M, N) = a (M, K) · b (N, K)ᵀ, all float16."""
    (M, K), N = a.shape, len(b)
    launch(
        matmul_level_kernel_v3,
        (N // BN, M // BM),
        THREADS,
        tensor_map(a, (BK, BM)),
        tensor_map(b, (BK, BN)),
        c.reshape(-1),
        N,
        K,
        shared=STAGES * STAGE_BYTES,
    )
