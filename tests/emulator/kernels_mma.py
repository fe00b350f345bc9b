"""A matmul on the tensor cores of sm_80, complete and plain: `cp.async` in three stages,
`ldmatrix`, `mma.sync`.

MATHEMATICS  C[m, n] = Σ_k A[m, k] · B[n, k], float16 in, float32 sums and result
SHAPES  a float16 (M · K), b float16 (N · K), c float32 (M · N), all row-major; K a multiple of 8
LAUNCH  grid (ceil(N / 64), ceil(M / 64)), blocks of 128 threads, 48 KiB of shared memory

A block computes 64 × 64 of C; each of its four warps 32 × 32 of them, as 2 × 4 tensor-core tiles of
16 × 8.

SWIZZLE  A tile's row is 64 float16, 128 bytes: all 32 banks once. So 16-byte chunks of the same column are in the same
four banks for all rows, and `ldmatrix`, which reads a chunk from each of eight rows at a time, would take eight times
as long. Chunk c of row r is therefore kept at place c ^ (r % 8): eight rows, eight different places.
"""

from numdiff.device import cuda, float32, int32
from numdiff.device.async_copy import (
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    shared_address,
)
from numdiff.device.tensor_core import ldmatrix_x4, mma_m16n8k16_into

TILE = 64  # of C along m and n, and of K for each step
THREADS = 128
CHUNK = 8  # float16 in 16 bytes
CHUNKS = TILE // CHUNK  # of a tile's row
TILE_BYTES = TILE * TILE * 2
STAGES = 3
SHARED = STAGES * 2 * TILE * TILE  # float16 of shared memory: the stages of A, then those of B
PENDING = STAGES - 2  # groups that may still be in flight while a tile is multiplied


@cuda.jit(device=True)
def chunk_place(row, chunk):
    """The byte offset of a chunk within a tile."""
    return int32(row * 128 + ((chunk ^ (row & 7)) << 4))


@cuda.jit(device=True)
def fetch_tile(tile, x, first_row, first_k, rows, K, t):
    """Start this thread's copies of a 64 × 64 tile of x, zeros where x ends."""
    for i in range(TILE * CHUNKS // THREADS):
        e = int32(t + i * THREADS)
        row, chunk = int32(e // CHUNKS), int32(e % CHUNKS)
        m, k = first_row + row, first_k + CHUNK * chunk
        bytes_inside = int32(16) if m < rows and k < K else int32(0)
        cp_async_16_zfill(tile + chunk_place(row, chunk), x, int32(m * K + k), bytes_inside)


@cuda.jit(device=True)
def multiply_tiles(sums, a_tile, b_tile, warp_row, warp_column, lane):
    """sums += the warp's 32 rows of A's tile · its 32 rows of B's tile."""
    a_row = int32(warp_row + lane % 16)
    b_row = int32(warp_column + lane % 8 + lane // 16 * 8)
    for step in range(TILE // 16):
        a_chunk = int32(2 * step + lane // 16)
        b_chunk = int32(2 * step + lane // 8 % 2)
        a_upper = ldmatrix_x4(a_tile + chunk_place(a_row, a_chunk))
        a_lower = ldmatrix_x4(a_tile + chunk_place(a_row + 16, a_chunk))
        for pair in range(2):
            b = ldmatrix_x4(b_tile + chunk_place(b_row + 16 * pair, b_chunk))
            mma_m16n8k16_into(sums, 8 * pair, a_upper, (b[0], b[1]))
            mma_m16n8k16_into(sums, 8 * pair + 4, a_upper, (b[2], b[3]))
            mma_m16n8k16_into(sums, 8 * pair + 16, a_lower, (b[0], b[1]))
            mma_m16n8k16_into(sums, 8 * pair + 20, a_lower, (b[2], b[3]))


@cuda.jit(device=True)
def write_pair(c, row, column, M, N, x, y):
    if row < M:
        if column < N:
            c[row * N + column] = x
        if column + 1 < N:
            c[row * N + column + 1] = y


@cuda.jit
def matmul_mma_kernel(a, b, c, M, N, K):
    tiles = cuda.shared.array(SHARED, "float16", alignment=128)
    a_tiles = shared_address(tiles)
    b_tiles = a_tiles + STAGES * TILE_BYTES
    t = cuda.threadIdx.x
    lane, warp = int32(t % 32), int32(t // 32)
    first_row, first_column = int32(cuda.blockIdx.y * TILE), int32(cuda.blockIdx.x * TILE)
    warp_row, warp_column = int32(warp // 2 * 32), int32(warp % 2 * 32)

    sums = cuda.local.array(32, "float32")  # of 2 × 4 tiles, 4 sums each
    for i in range(32):
        sums[i] = float32(0)

    for s in range(STAGES - 1):
        fetch_tile(a_tiles + s * TILE_BYTES, a, first_row, s * TILE, M, K, t)
        fetch_tile(b_tiles + s * TILE_BYTES, b, first_column, s * TILE, N, K, t)
        cp_async_commit()
    stage = int32(0)
    for k in range(0, K, TILE):
        cp_async_wait(PENDING)  # this thread's part of tile k is there
        # so are the other threads' parts, and the tile before it is no longer read
        cuda.syncthreads()
        ahead = int32((stage + STAGES - 1) % STAGES)
        fetch_tile(a_tiles + ahead * TILE_BYTES, a, first_row, k + (STAGES - 1) * TILE, M, K, t)
        fetch_tile(b_tiles + ahead * TILE_BYTES, b, first_column, k + (STAGES - 1) * TILE, N, K, t)
        cp_async_commit()
        multiply_tiles(
            sums,
            a_tiles + stage * TILE_BYTES,
            b_tiles + stage * TILE_BYTES,
            warp_row,
            warp_column,
            lane,
        )
        stage = int32((stage + 1) % STAGES)

    row, column = first_row + warp_row + lane // 4, first_column + warp_column + 2 * (lane % 4)
    for i in range(2):
        for j in range(4):
            f = 4 * (4 * i + j)
            write_pair(c, row + 16 * i, column + 8 * j, M, N, sums[f], sums[f + 1])
            write_pair(c, row + 16 * i + 8, column + 8 * j, M, N, sums[f + 2], sums[f + 3])
