"""mma.sync, level 2: `ldmatrix` loads the fragments, from tiles that are swizzled.

WHAT IS NEW
    ldmatrix: a warp loads four matrices of 8 × 8, a fragment of A or two of B, in one instruction
    instead of four. Lane l gives the address of one row of 16 bytes, and gets the words that
    mma.sync needs.
    A swizzle: it reads eight rows at a time, and they must fall into eight different groups of four
    banks. Rows are 64 bytes, two fill all banks. So chunk c of row r stands at c ^ (r / 2 % 4)
    (device/tiles.py).
WHY IT PAYS
    a quarter of the instructions for the same words, and each takes as many cycles as its bytes
    need: no conflicts, where level 1 has four turns a load.
WHAT REMAINS
    While tiles are loaded, nothing is multiplied, and every number passes through a register.
LAUNCH
    as level 1
SOURCE
    PTX ISA, section 9.7.14.5.15: ldmatrix.
READ NEXT
    stages.py, where copies run while tiles are multiplied.
"""

from ....device import cuda, float32, launch, uint32
from ....device.async_copy import shared_address
from ....device.requires import requires
from ....device.tensor_core import ldmatrix_x4, load_words4, store_words4
from ....device.tiles import a_along_k, place_along_k
from .fragments import (
    A_BYTES,
    BK,
    BM,
    BN,
    BYTES,
    ROW,
    SUMS,
    THREADS,
    WARP,
    multiply_row,
    store_sums,
)


@cuda.jit(device=True, forceinline=True)
def load_tile(tiles, offset, x, first, k, K, t):
    """128 rows of x from `first` on, columns k … k + 31, to byte `offset` of shared memory,
    swizzled."""
    for i in range(4):
        row, chunk = (t + i * THREADS) // 4, (t + i * THREADS) % 4
        w0, w1, w2, w3 = load_words4(x, (first + row) * K + k + 8 * chunk)
        store_words4(tiles, offset + place_along_k(row, chunk, ROW), w0, w1, w2, w3)


@cuda.jit(device=True, forceinline=True)
def fragment_a(base, row, step, lane):
    """16 rows of A's tile, 16 of k."""
    return ldmatrix_x4(uint32(base + a_along_k(row, step, lane, ROW)))


@cuda.jit(device=True, forceinline=True)
def fragments_b(base, column, step, lane):
    """16 columns of C, rows of B's tile: two fragments, each 8 rows and twice 8 of k."""
    row, chunk = column + lane % 8 + lane // 16 * 8, 2 * step + lane // 8 % 2
    return ldmatrix_x4(uint32(base + A_BYTES + place_along_k(row, chunk, ROW)))


@cuda.jit(device=True, forceinline=True)
def multiply(sums, base, step, warp_row, warp_column, lane):
    """sums += k 16 · step … of both tiles."""
    b0, b1 = (
        fragments_b(base, warp_column, step, lane),
        fragments_b(base, warp_column + 16, step, lane),
    )
    b2, b3 = (
        fragments_b(base, warp_column + 32, step, lane),
        fragments_b(base, warp_column + 48, step, lane),
    )
    multiply_row(sums, 0, fragment_a(base, warp_row, step, lane), b0, b1, b2, b3)
    multiply_row(sums, 1, fragment_a(base, warp_row + 16, step, lane), b0, b1, b2, b3)
    multiply_row(sums, 2, fragment_a(base, warp_row + 32, step, lane), b0, b1, b2, b3)
    multiply_row(sums, 3, fragment_a(base, warp_row + 48, step, lane), b0, b1, b2, b3)


@requires("7.5")
@cuda.jit(launch_bounds=(THREADS, 2))
def matmul_mma_level_kernel_v2(a, b, c, N, K):
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    base = shared_address(tiles)
    sums = cuda.local.array(SUMS, "float32")
    m, n, t = cuda.blockIdx.y * BM, cuda.blockIdx.x * BN, cuda.threadIdx.x
    lane, warp_row, warp_column = t % 32, t // 64 * WARP, t // 32 % 2 * WARP
    for i in range(SUMS):
        sums[i] = float32(0)
    for k in range(0, K, BK):
        load_tile(tiles, 0, a, m, k, K, t)
        load_tile(tiles, A_BYTES, b, n, k, K, t)
        cuda.syncthreads()
        multiply(sums, base, 0, warp_row, warp_column, lane)
        multiply(sums, base, 1, warp_row, warp_column, lane)
        cuda.syncthreads()
    store_sums(c, sums, m + warp_row, n + warp_column, N, lane)


def launch_swizzle(a, b, c):
    """c (M, N) = a (M, K) · b (N, K)ᵀ, all float16."""
    (M, K), N = a.shape, len(b)
    launch(
        matmul_mma_level_kernel_v2,
        (N // BN, M // BM),
        THREADS,
        a.reshape(-1),
        b.reshape(-1),
        c.reshape(-1),
        N,
        K,
        shared=BYTES,
    )
