"""Products of Hopper's matmul that are symmetric: half of the tiles, and each result stored twice.

WHICH: X·Xᵀ, A·A of a symmetric A, A·B of two that commute (polynomials of one matrix). Only tiles
    that reach the diagonal or are below it are multiplied; of a matrix of 768 rows 12 of 18 where
    tiles have 256 columns, 21 of 36 where they have 128.
EPILOGUE
    alpha · accumulator + residual, and diagonal where row == column, so that a polynomial's a·I
    costs no pass and reads no matrix. A block of 64 × 64 on the diagonal is stored as it is; one
    below it also as its transpose, at the mirrored place; one above it is not stored: another tile
    has it. So each number is written once, and the two halves have the same bits (but for the
    diagonal blocks, whose bits are those of the sums as they were made).
THE TRANSPOSE is made in registers: lanes 4 apart hold neighbouring rows of one pair of columns.
    Each gives the other the number that it lacks, and has two neighbours of a column then, which
    are a word of the transposed tile. The 32 words of a warp fall into 32 different banks, as those
    of the tile itself.
SOURCE
    PTX ISA, section 9.7.9, shfl.sync.
READ NEXT
    extras/fp8/epilogues.py; symmetric.py, the caller.
"""

from ...device import cuda, float32, int32, uint32
from ...device.limits import FULL_MASK
from ...device.mbarrier import bar_sync
from ...device.specialise import Variants
from ...device.tensor_core import load_word, pack_half2, store_word, unpack_half2
from ...device.tma import fence_proxy_async, tma_store_2d, tma_store_commit, tma_store_wait_read_0
from ...kernels.matmul.hopper.epilogue import EpilogueParts
from ...kernels.matmul.hopper.kernel import kernel_for
from ...kernels.matmul.hopper.layout import BM, BN, BOX_BYTES
from ...kernels.matmul.hopper.producer import BATCH
from ...kernels.matmul.hopper.staging import prefetch_nothing, stage_nothing, word_place
from ...kernels.matmul.hopper.work import PLAIN, slice_of_tile


def tiles_of(n, width):
    """Tiles of BM × width of a symmetric n × n matrix that reach its diagonal or are below it."""
    return sum((row * BM + BM - 1) // width + 1 for row in range(n // BM))


@cuda.jit(device=True, forceinline=True)
def symmetric_place(tile, width):
    """(row, column) of a matrix's tile, in tiles: row by row, each up to the diagonal."""
    row, columns = int32(0), int32((BM - 1) // width + 1)
    while tile >= columns:
        tile, row = int32(tile - columns), int32(row + 1)
        columns = int32((row * BM + BM - 1) // width + 1)
    return row, tile


@cuda.jit(device=True, forceinline=True)
def transposed_word(v0, v1, lane):
    """Rows r and r + 1 of a column, r even, from pairs of columns of which lanes hold one row; odd
    rows get the next column."""
    odd = lane & 4
    other = cuda.shfl_xor_sync(FULL_MASK, v0 if odd else v1, 4)
    return pack_half2(other if odd else v0, v1 if odd else other)


@cuda.jit(device=True, forceinline=True)
def transposed_place(tile, thread_row, lane, j, half):
    """Byte of `transposed_word` in the transposed tile: its row is column 8 · j + 2 · (lane % 4),
    or the next."""
    row = int32(8 * j + lane % 4 * 2 + (lane >> 2 & 1))
    chunk = int32((thread_row >> 3) + half)
    return int32(tile + row * 128 + ((chunk ^ (row & 7)) << 4) + (lane >> 3) * 4)


@cuda.jit(device=True, forceinline=True)
def write_symmetric(block, turn, amax, acc, gates, place, staging, target):
    """alpha · accumulator + residual + diagonal of a block on the diagonal or below it, and its
    transpose above."""
    maps, work, epilogue = target.maps, target.work, target.epilogue
    residual = target.arrays.residual
    first_row, first_column, thread_row, lane = place
    N, tiles, base = work.N, staging.tiles, staging.base
    column = int32(first_column + 64 * block)
    # the first of this matrix
    matrix_row = int32(uint32(first_row) // uint32(work.matrices.rows) * uint32(work.matrices.rows))
    above = int32(first_row - matrix_row)  # rows of the matrix above this block
    if column <= above:  # the same for the whole warpgroup
        warpgroup = cuda.threadIdx.x // 128
        elected = cuda.threadIdx.x % 128 == 0
        diagonal = epilogue.diagonal if column == above else float32(0)
        words, mirrored = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        if epilogue.has_residual:
            for j in range(8):
                for half in range(2):
                    words[2 * j + half] = load_word(
                        residual,
                        (first_row + thread_row + 8 * half) * N + column + 8 * j + lane % 4 * 2,
                    )
        for j in range(8):
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                v0, v1 = epilogue.alpha * acc[i], epilogue.alpha * acc[i + 1]
                if epilogue.has_residual:
                    r0, r1 = unpack_half2(words[2 * j + half])
                    v0, v1 = v0 + r0, v1 + r1
                # of the diagonal's column in this row
                offset = int32(thread_row + 8 * half - 8 * j - lane % 4 * 2)
                v0 += diagonal if offset == 0 else float32(0)
                v1 += diagonal if offset == 1 else float32(0)
                words[2 * j + half] = pack_half2(v0, v1)
                mirrored[2 * j + half] = transposed_word(v0, v1, lane)
        if elected:
            tma_store_wait_read_0()  # the tiles of the block before
        bar_sync(uint32(warpgroup), uint32(128))
        for j in range(8):
            for half in range(2):
                store_word(
                    tiles, word_place(staging.at, thread_row, lane, j, half), words[2 * j + half]
                )
                if column < above:
                    store_word(
                        tiles,
                        transposed_place(staging.at + BOX_BYTES, thread_row, lane, j, half),
                        mirrored[2 * j + half],
                    )
        fence_proxy_async()
        bar_sync(uint32(warpgroup), uint32(128))
        if elected:
            tma_store_2d(base + uint32(staging.at), maps.c, uint32(column), uint32(first_row))
            if column < above:
                tma_store_2d(
                    base + uint32(staging.at + BOX_BYTES),
                    maps.c,
                    uint32(above),
                    uint32(matrix_row + column),
                )
            tma_store_commit()
    return turn, amax


# Symmetric: the tiles on and below the diagonal of each matrix ------------------------------------


@cuda.jit(device=True, forceinline=True)
def symmetric_tile(unit, walk, work):
    per_slice = int32(work.tiles_m * work.tiles_n)
    part = int32(uint32(unit) // uint32(per_slice))
    matrix = int32(uint32(unit) // uint32(work.tiles_n))
    row, column = symmetric_place(int32(unit - matrix * work.tiles_n), BN)
    row = int32(row + matrix * (work.matrices.rows // BM))
    return slice_of_tile(part, row, column, work)


SYMMETRIC = PLAIN._replace(tile_at=symmetric_tile)
SYMMETRIC_WIDTHS = 128, 256  # 192 takes as many tiles of a symmetric matrix as 256, or more
SYMMETRIC_KERNELS = Variants(
    [(BN, across, across) for BN in SYMMETRIC_WIDTHS for across in (False, True)],
    lambda key: kernel_for(
        *key,
        "symmetric",
        BATCH,
        SYMMETRIC,
        module=__name__,
        parts=EpilogueParts(write_symmetric, prefetch=prefetch_nothing, stage=stage_nothing),
    ),
)
