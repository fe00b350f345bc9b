"""Hopper, level 1: a warpgroup multiplies one tile of C with wgmma; its threads have loaded the
operands.

WHAT IS NEW
    wgmma: 128 threads (four warps, a warpgroup) issue one instruction together, which multiplies a
    64 × 16 tile of A by a 16 × 256 tile of B; the tensor cores read both straight from shared
    memory. (kernels/matmul/mma.py spends an instruction on every 16 × 8 × 16, and others to load its operands
    into registers.) The 64 × 256 results are 128 float32 accumulators in each thread.
LAYOUT OF A TILE
    64 float16 along k are a row of 128 bytes, eight chunks of 16. Chunk j of row r is stored at j ^
    (r % 8), the 128-byte swizzle: the same chunk of eight neighbouring rows then covers all 32
    banks. A 64-bit descriptor gives wgmma the tile's location: its address / 16; the distance from
    eight rows to the next eight, 1024 bytes; the swizzle. The next 16 of k are 32 bytes further on.
A STEP OF 64 ALONG k
    1. the threads load both tiles, 16 bytes at a time, and store them swizzled;
    2. fence_proxy_async, because the tensor cores read shared memory through a path of their own;
       then a barrier;
    3. wgmma_fence, four wgmmas, commit, wait: wgmma is asynchronous, so the threads run on until
       they wait for it;
    4. a barrier: no thread may overwrite a tile that another warp's products still read.
    The first step stands before the loop: its first wgmma overwrites the accumulators (scale_d =
    0), and must be known to do so when the kernel is compiled.
WHAT REMAINS
    While the threads load, the tensor cores wait, and vice versa; and every number passes through a
    register.
LAUNCH
    grid (N / 256, M / 64), 128 threads, 40 KiB of dynamic shared memory; M, N, K multiples of 64,
    256, 64.
SOURCE
    PTX ISA, section 9.7.15: wgmma.mma_async, and 9.7.15.5.1 for descriptors and swizzles.
READ NEXT
    double_buffer.py, where TMA loads, one step ahead.
"""

import numpy as np

from ....device import cuda, launch
from ....device.mbarrier import smem_u32
from ....device.requires import requires
from ....device.tensor_core import load_words4, pack_half2, store_word, store_words4
from ....device.tma import fence_proxy_async
from ....device.wgmma import make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence, wgmma_wait_0

BM, BN, BK = 64, 256, 64  # the tile of C, and a step along k
THREADS, ACCUMULATORS = 128, BN // 2  # one warpgroup; float32 in each thread
ROW = 2 * BK  # bytes of a row of a tile: as far as the swizzle reaches
A_BYTES, B_BYTES = BM * ROW, BN * ROW
# 128-byte swizzle; 1024 bytes from 8 rows to the next
DESCRIPTOR = np.uint64(1 << 62 | 8 * ROW // 16 << 32 | 1 << 16)
# 16, 32, 48 of k further: 32, 64, 96 bytes / 16
K16, K32, K48 = np.uint64(2), np.uint64(4), np.uint64(6)
wgmma, wgmma_wait = make_wgmma(BN), make_wgmma_wait(BN)


@cuda.jit(device=True, forceinline=True)
def descriptor(address):
    """The matrix descriptor of a tile at a shared address; bits 0 to 13 are the address / 16."""
    return DESCRIPTOR | np.uint64((address & 0x3FFFF) >> 4)


@cuda.jit(device=True, forceinline=True)
def load_tile(tiles, offset, rows, x, first_row, k, K):
    """Rows first_row … of x, columns k … k + 63, to byte `offset` of shared memory, 16 bytes a
    thread and turn."""
    for chunk in range(cuda.threadIdx.x, rows * 8, THREADS):
        row, j = chunk // 8, chunk % 8
        w0, w1, w2, w3 = load_words4(x, (first_row + row) * K + k + 8 * j)
        store_words4(tiles, offset + row * ROW + ((j ^ (row % 8)) << 4), w0, w1, w2, w3)


@requires("9.0a")
@cuda.jit(launch_bounds=(THREADS, 1))
def matmul_level_kernel_v1(a, b, c, N, K):
    tiles = cuda.shared.array(0, "uint8", alignment=1024)
    acc = cuda.local.array(ACCUMULATORS, "float32")
    m, n, t = cuda.blockIdx.y * BM, cuda.blockIdx.x * BN, cuda.threadIdx.x
    da, db = descriptor(smem_u32(tiles)), descriptor(smem_u32(tiles) + A_BYTES)

    load_tile(tiles, 0, BM, a, m, 0, K)
    load_tile(tiles, A_BYTES, BN, b, n, 0, K)
    fence_proxy_async()
    cuda.syncthreads()
    wgmma_fence()
    wgmma(acc, da, db, 0)  # acc = A·B; from here on acc += A·B
    wgmma(acc, da + K16, db + K16, 1)
    wgmma(acc, da + K32, db + K32, 1)
    wgmma(acc, da + K48, db + K48, 1)
    wgmma_commit()
    wgmma_wait_0()
    for k in range(BK, K, BK):
        cuda.syncthreads()
        load_tile(tiles, 0, BM, a, m, k, K)
        load_tile(tiles, A_BYTES, BN, b, n, k, K)
        fence_proxy_async()
        cuda.syncthreads()
        wgmma_fence()
        wgmma(acc, da, db, 1)
        wgmma(acc, da + K16, db + K16, 1)
        wgmma(acc, da + K32, db + K32, 1)
        wgmma(acc, da + K48, db + K48, 1)
        wgmma_commit()
        wgmma_wait_0()
    wgmma_wait(acc)  # it also orders later reads of the accumulators for the compilers

    # accumulators 4j … 4j + 3: columns 8j + 2 · (lane % 4) and the next, in a row and in the one 8
    # below
    row, column = m + t // 32 * 16 + t % 32 // 4, n + t % 4 * 2
    for j in range(BN // 8):
        store_word(c, row * N + column + 8 * j, pack_half2(acc[4 * j], acc[4 * j + 1]))
        store_word(c, (row + 8) * N + column + 8 * j, pack_half2(acc[4 * j + 2], acc[4 * j + 3]))


def launch_one_tile(a, b, c):
    """c (M, N) = a (M, K) · b (N, K)ᵀ, all float16."""
    (M, K), N = a.shape, len(b)
    launch(
        matmul_level_kernel_v1,
        (N // BN, M // BM),
        THREADS,
        a.reshape(-1),
        b.reshape(-1),
        c.reshape(-1),
        N,
        K,
        shared=A_BYTES + B_BYTES,
    )
