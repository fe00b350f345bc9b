"""mma.sync, level 3: `cp.async` copies the next tiles while one is multiplied.

WHAT IS NEW
    cp.async: a copy of 16 bytes from global to shared memory that runs by itself, and passes
    through no register. A thread's copies of one step are a group. Shared memory has STAGES pairs
    of tiles: two groups are in flight while a third pair is multiplied
    (device/async_copy.py).
    One barrier a step instead of two: it says that the copies of all threads have arrived, and that
    the stage which is refilled next is no longer read.
WHY IT PAYS
    the latency of memory is hidden by the products of two steps.
WHAT REMAINS
    Each 16 of k begins with loads of fragments on which its products wait. kernels/matmul/mma.py loads them one
    step ahead, goes from tile to tile without draining the stages, and gives eight warps a tile of
    128 × 256, of which each number that is copied is used more often.
LAUNCH
    as level 1, with 48 KiB of shared memory
SOURCE
    PTX ISA, section 9.7.9.25.3: cp.async.
READ NEXT
    kernels/matmul/mma.py
"""

from ....device import cuda, float32, launch, uint32
from ....device.async_copy import cp_async_16, cp_async_commit, cp_async_wait, shared_address
from ....device.requires import requires
from ....device.tiles import place_along_k
from .fragments import A_BYTES, BK, BM, BN, BYTES, ROW, SUMS, THREADS, WARP, store_sums
from .swizzle import multiply

STAGES = 3
PENDING = STAGES - 2  # groups in flight while a tile is multiplied


@cuda.jit(device=True, forceinline=True)
def copy_tile(base, x, first, k, K, t):
    """Start the copies of 128 rows of x from `first` on, columns k … k + 31, to a shared address,
    swizzled."""
    for i in range(4):
        row, chunk = (t + i * THREADS) // 4, (t + i * THREADS) % 4
        cp_async_16(
            uint32(base + place_along_k(row, chunk, ROW)), x, (first + row) * K + k + 8 * chunk
        )


@cuda.jit(device=True, forceinline=True)
def copy_tiles(base, a, b, m, n, k, K, t):
    """Start the copies of a step, as a group; an empty one beyond the last."""
    if k < K:
        copy_tile(base, a, m, k, K, t)
        copy_tile(base + A_BYTES, b, n, k, K, t)
    cp_async_commit()


@requires("7.5")
@cuda.jit(launch_bounds=(THREADS, 2))
def matmul_mma_level_kernel_v3(a, b, c, N, K):
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    base = shared_address(tiles)
    sums = cuda.local.array(SUMS, "float32")
    m, n, t = cuda.blockIdx.y * BM, cuda.blockIdx.x * BN, cuda.threadIdx.x
    lane, warp_row, warp_column = t % 32, t // 64 * WARP, t // 32 % 2 * WARP
    for i in range(SUMS):
        sums[i] = float32(0)
    for s in range(STAGES - 1):
        copy_tiles(base + s * BYTES, a, b, m, n, s * BK, K, t)
    for step in range(K // BK):
        cp_async_wait(PENDING)  # this thread's copies of the step have arrived
        cuda.syncthreads()
        ahead = step + STAGES - 1
        copy_tiles(base + ahead % STAGES * BYTES, a, b, m, n, ahead * BK, K, t)
        stage = base + step % STAGES * BYTES
        multiply(sums, stage, 0, warp_row, warp_column, lane)
        multiply(sums, stage, 1, warp_row, warp_column, lane)
    store_sums(c, sums, m + warp_row, n + warp_column, N, lane)


def launch_stages(a, b, c):
    """c (M, N) = a (M, K) · b (N, K)ᵀ, all float16."""
    (M, K), N = a.shape, len(b)
    launch(
        matmul_mma_level_kernel_v3,
        (N // BN, M // BM),
        THREADS,
        a.reshape(-1),
        b.reshape(-1),
        c.reshape(-1),
        N,
        K,
        shared=STAGES * BYTES,
    )
