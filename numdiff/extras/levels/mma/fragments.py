"""mma.sync, level 1: a warp multiplies 16 × 16 by 16 × 8 in one instruction, and its lanes load the
fragments.

WHAT IS NEW
    mma.sync: the 32 lanes of a warp execute it together. Each operand, a fragment, is spread over
    their registers. Lane l has, of A (16 × 16), rows l / 4 and l / 4 + 8, columns 2 · (l % 4), the
    next one, and both 8 further: four words of two float16. Of B (16 × 8) it has two words, of the
    product (16 × 8) four float32: rows l / 4 and l / 4 + 8, columns 2 · (l % 4) and the next. One
    instruction does 2,048 multiply-adds.
WHY IT PAYS
    an FFMA of 32 lanes does 32. And a fragment of A is used for eight products, one of B for four:
    a warp of 64 × 64 outputs loads 32 words a lane for 32 mma.
A STEP OF 32 ALONG k
    1. the threads load both tiles, 16 bytes at a time, and store them in shared memory;
    2. a barrier; then for each 16 of k the fragments, and 32 mma;
    3. a barrier: no thread may overwrite a tile that another warp still reads.
WHAT REMAINS
    A fragment has four loads of 4 bytes a lane. Rows are 64 bytes, so those of rows 0, 2, 4, 6 meet
    in the same banks: four turns for each load. While tiles are loaded, nothing is multiplied.
LAUNCH
    grid (N / 128, M / 128), 128 threads, 16 KiB of shared memory; M, N, K multiples of 128, 128,
    32.
SOURCE
    PTX ISA, section 9.7.14.5.8: "Matrix Fragments for mma.m16n8k16 with floating point type".
READ NEXT
    swizzle.py, where an instruction loads four times as much, without conflicts.
"""

from ....device import cuda, float32, launch
from ....device.requires import requires
from ....device.tensor_core import (
    load_word,
    load_words4,
    mma_m16n8k16_into,
    pack_half2,
    store_word,
    store_words4,
)

BM, BN, BK = 128, 128, 32  # the tile of C, and a step along k
WARP = 64  # rows and columns of a warp's outputs
THREADS = 128  # four warps, two by two
SUMS = WARP * WARP // 32  # accumulators of a thread
ROW = 2 * BK  # bytes of a row of a tile
A_BYTES, BYTES = BM * ROW, (BM + BN) * ROW


@cuda.jit(device=True, forceinline=True)
def load_tile(tiles, offset, x, first, k, K, t):
    """128 rows of x from `first` on, columns k … k + 31, to byte `offset` of shared memory."""
    for i in range(4):
        row, chunk = (t + i * THREADS) // 4, (t + i * THREADS) % 4
        w0, w1, w2, w3 = load_words4(x, (first + row) * K + k + 8 * chunk)
        store_words4(tiles, offset + row * ROW + 16 * chunk, w0, w1, w2, w3)


@cuda.jit(device=True, forceinline=True)
def fragment_a(tiles, row, k, lane):
    """16 rows of A's tile, 16 of k."""
    at = (row + lane // 4) * ROW + (k + lane % 4 * 2) * 2
    return (
        load_word(tiles, at),
        load_word(tiles, at + 8 * ROW),
        load_word(tiles, at + 16),
        load_word(tiles, at + 8 * ROW + 16),
    )


@cuda.jit(device=True, forceinline=True)
def fragments_b(tiles, column, k, lane):
    """16 columns of C, rows of B's tile: two fragments."""
    at = A_BYTES + (column + lane // 4) * ROW + (k + lane % 4 * 2) * 2
    return (
        load_word(tiles, at),
        load_word(tiles, at + 16),
        load_word(tiles, at + 8 * ROW),
        load_word(tiles, at + 8 * ROW + 16),
    )


@cuda.jit(device=True, forceinline=True)
def multiply_row(sums, i, a, b0, b1, b2, b3):
    """The sums of rows 16 · i … += a · 64 columns: eight products of four sums a lane."""
    mma_m16n8k16_into(sums, 32 * i, a, (b0[0], b0[1]))
    mma_m16n8k16_into(sums, 32 * i + 4, a, (b0[2], b0[3]))
    mma_m16n8k16_into(sums, 32 * i + 8, a, (b1[0], b1[1]))
    mma_m16n8k16_into(sums, 32 * i + 12, a, (b1[2], b1[3]))
    mma_m16n8k16_into(sums, 32 * i + 16, a, (b2[0], b2[1]))
    mma_m16n8k16_into(sums, 32 * i + 20, a, (b2[2], b2[3]))
    mma_m16n8k16_into(sums, 32 * i + 24, a, (b3[0], b3[1]))
    mma_m16n8k16_into(sums, 32 * i + 28, a, (b3[2], b3[3]))


@cuda.jit(device=True, forceinline=True)
def multiply(sums, tiles, k, warp_row, warp_column, lane):
    """sums += 16 of k of both tiles."""
    b0, b1 = fragments_b(tiles, warp_column, k, lane), fragments_b(tiles, warp_column + 16, k, lane)
    b2, b3 = (
        fragments_b(tiles, warp_column + 32, k, lane),
        fragments_b(tiles, warp_column + 48, k, lane),
    )
    multiply_row(sums, 0, fragment_a(tiles, warp_row, k, lane), b0, b1, b2, b3)
    multiply_row(sums, 1, fragment_a(tiles, warp_row + 16, k, lane), b0, b1, b2, b3)
    multiply_row(sums, 2, fragment_a(tiles, warp_row + 32, k, lane), b0, b1, b2, b3)
    multiply_row(sums, 3, fragment_a(tiles, warp_row + 48, k, lane), b0, b1, b2, b3)


@cuda.jit(device=True, forceinline=True)
def store_sums(c, sums, row, column, N, lane):
    """A warp's outputs, rounded to float16: two neighbours a lane and store."""
    row, column = row + lane // 4, column + lane % 4 * 2
    for i in range(4):
        for j in range(8):
            at, s = (row + 16 * i) * N + column + 8 * j, 32 * i + 4 * j
            store_word(c, at, pack_half2(sums[s], sums[s + 1]))
            store_word(c, at + 8 * N, pack_half2(sums[s + 2], sums[s + 3]))


@requires("7.5")
@cuda.jit(launch_bounds=(THREADS, 2))
def matmul_mma_level_kernel_v1(a, b, c, N, K):
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    sums = cuda.local.array(SUMS, "float32")
    m, n, t = cuda.blockIdx.y * BM, cuda.blockIdx.x * BN, cuda.threadIdx.x
    lane, warp_row, warp_column = t % 32, t // 64 * WARP, t // 32 % 2 * WARP
    for i in range(SUMS):
        sums[i] = float32(0)
    for k in range(0, K, BK):
        load_tile(tiles, 0, a, m, k, K, t)
        load_tile(tiles, A_BYTES, b, n, k, K, t)
        cuda.syncthreads()
        multiply(sums, tiles, 0, warp_row, warp_column, lane)
        multiply(sums, tiles, 16, warp_row, warp_column, lane)
        cuda.syncthreads()
    store_sums(c, sums, m + warp_row, n + warp_column, N, lane)


def launch_fragments(a, b, c):
    """c (M, N) = a (M, K) · b (N, K)ᵀ, all float16."""
    (M, K), N = a.shape, len(b)
    launch(
        matmul_mma_level_kernel_v1,
        (N // BN, M // BM),
        THREADS,
        a.reshape(-1),
        b.reshape(-1),
        c.reshape(-1),
        N,
        K,
        shared=BYTES,
    )
