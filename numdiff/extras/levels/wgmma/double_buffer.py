"""Hopper, level 2: TMA loads the tiles, one step ahead of the products.

WHAT IS NEW
    TMA: one thread requests a box of a matrix, and the tensor memory accelerator copies it to
        shared memory, swizzled. No thread computes an address, and no register holds data in
        flight. The tensor map, made by the host, says where the matrix is and how large a box is.
    mbarrier: what threads wait for. It counts arrivals and bytes: the requesting thread arrives and
        says how many bytes to expect (expect_tx); TMA counts them as they come. A phase ends when
        all have arrived and all bytes have come; then the next begins. Phases have parity 0, 1, 0,
        1 …, and a thread waits for the phase of a parity to end.
    Double buffer: while step k is multiplied, the tiles of step k + 1 are in flight to the other
        half of shared memory.
    multiply: the descriptors, fence, wgmmas and commit of level 1, in one word from here on
    (device/wgmma.py).
WHY IT PAYS
    Loading and multiplying overlap, and the warpgroup's instructions are products and little else.
WHAT REMAINS
    The same threads load tiles and multiply them. So all 128 meet at a barrier after each step,
    before its tiles may be overwritten, and meanwhile the tensor cores are idle.
LAUNCH
    grid (N / 256, M / 64), 128 threads, 80 KiB of dynamic shared memory; M, N, K multiples of 64,
    256, 64.
SOURCE
    PTX ISA, sections 9.7.9.27 (cp.async.bulk.tensor) and 9.7.13.15 (mbarrier).
READ NEXT
    producer_consumer.py, where some threads only ask and the others only multiply.
"""

from ....device import cuda, launch
from ....device.mbarrier import (
    fence_barrier_init,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from ....device.requires import requires
from ....device.tensor_core import pack_half2, store_word
from ....device.tensor_map import tensor_map
from ....device.tma import tma_load_2d
from ....device.wgmma import make_multiply, make_wgmma_wait, wgmma_wait_0

BM, BN, BK = 64, 256, 64
THREADS, ACCUMULATORS = 128, BN // 2
ROW = 2 * BK  # bytes
A_BYTES, STAGE_BYTES = BM * ROW, (BM + BN) * ROW  # of a stage: a tile of A, and behind it one of B
multiply, wgmma_wait = make_multiply(BN), make_wgmma_wait(BN)


@cuda.jit(device=True, forceinline=True)
def fetch(step, base, full, map_a, map_b, m, n):
    """Load the tiles of a step by TMA; called by one thread."""
    stage = step % 2
    a = base + stage * STAGE_BYTES
    mbarrier_expect_tx(full + 8 * stage, STAGE_BYTES)
    tma_load_2d(a, map_a, full + 8 * stage, step * BK, m)
    tma_load_2d(a + A_BYTES, map_b, full + 8 * stage, step * BK, n)


@requires("9.0a")
@cuda.jit(launch_bounds=(THREADS, 1))
def matmul_level_kernel_v2(map_a, map_b, c, N, K):
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    barriers = cuda.shared.array(2, "uint64")
    acc = cuda.local.array(ACCUMULATORS, "float32")
    m, n, t = cuda.blockIdx.y * BM, cuda.blockIdx.x * BN, cuda.threadIdx.x
    base, full, steps = smem_u32(tiles), smem_u32(barriers), K // BK
    if t == 0:
        mbarrier_init(full, 1)  # one arrival a phase: of the requesting thread
        mbarrier_init(full + 8, 1)
        fence_barrier_init()
        fetch(0, base, full, map_a, map_b, m, n)
        if steps > 1:
            fetch(1, base, full, map_a, map_b, m, n)
    cuda.syncthreads()

    mbarrier_wait(full, 0)
    multiply(acc, base, base + A_BYTES, 0)
    wgmma_wait_0()
    for step in range(1, steps):
        cuda.syncthreads()  # all have read the stage of the step before
        if t == 0 and step + 1 < steps:
            fetch(step + 1, base, full, map_a, map_b, m, n)
        mbarrier_wait(full + 8 * (step % 2), step // 2 % 2)
        a = base + step % 2 * STAGE_BYTES
        multiply(acc, a, a + A_BYTES, 1)
        wgmma_wait_0()
    wgmma_wait(acc)

    row, column = m + t // 32 * 16 + t % 32 // 4, n + t % 4 * 2
    for j in range(BN // 8):
        store_word(c, row * N + column + 8 * j, pack_half2(acc[4 * j], acc[4 * j + 1]))
        store_word(c, (row + 8) * N + column + 8 * j, pack_half2(acc[4 * j + 2], acc[4 * j + 3]))


def launch_double_buffer(a, b, c):
    """c (M, N) = a (M, K) · b (N, K)ᵀ, all float16."""
    (M, K), N = a.shape, len(b)
    launch(
        matmul_level_kernel_v2,
        (N // BN, M // BM),
        THREADS,
        tensor_map(a, (BK, BM)),
        tensor_map(b, (BK, BN)),
        c.reshape(-1),
        N,
        K,
        shared=2 * STAGE_BYTES,
    )
