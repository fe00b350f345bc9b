"""Parts of hopper.py: where its tiles lie, and what becomes of the sums once they are made.

THE TAIL OF A TILE runs on the consumers while the tensor cores wait, about 16,000 cycles of them for K = 768 and a tile
of 128 × 256. So it is kept short:

    float16         alpha · sum + bias + residual; 16 words of two results are made in registers, then stored in a tile
                    of shared memory, which the copy engine writes while the next is made
    GELU            u = sum + bias and GELU(u), two such tiles at once: about 2,600 cycles, of them 2,048 for tanh
    GELU'           sum · GELU'(u): about 4,300 cycles, of them 4,096 for an exponential and a reciprocal. u has come
                    into the tile of shared memory meanwhile, brought by an idle warp of the producer's warpgroup, and
                    the same warp takes away the results (`exchange`)
    float32         pairs of lanes exchange halves, so that each writes 16 bytes of one row
    sums of A's rows, by two more of the idle warps, beside the products: 16 mma of 16 × 16 a stage and warp

READ NEXT
    fast_gelu.py; launcher.py, which asks for all this.
"""
import numpy as np

from ...device import cuda, float32, int32, uint32
from ...device.hopper import (
    bar_sync,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_wait,
    tma_load_2d,
    tma_store_2d,
    tma_store_commit,
    tma_store_wait_0,
    tma_store_wait_read_0,
    tma_store_wait_read_1,
)
from ...device.tensor_core import (
    ldmatrix_x4_trans,
    load_word,
    mma_m16n8k16,
    pack_half2,
    store_word,
    unpack_half2,
)
from .fast_gelu import fast_gelu, fast_gelu_gradient
from .mma import write_sums

BM, BK = 128, 64  # rows of a block's tile; a step along K: 128 bytes of float16, the widest swizzle
BOX = 64  # side of a box of an operand that is contiguous along m or n, and of a tile of the epilogue
BOX_BYTES = BOX * BOX * 2
GROUP = 16  # rows of tiles that share a sweep over the columns, so that both operands of a round stay in the L2 cache


# Descriptors and places -----------------------------------------------------------------------------------------------

# a swizzle of 128 bytes, 1024 bytes from one group of eight rows to the next, BOX_BYTES from one box to the next
DESCRIPTOR = np.uint64(1 << 62 | 1024 // 16 << 32 | BOX_BYTES // 16 << 16)
LOW_ADDRESS, ADDRESS_UNIT = uint32(0x3FFFF), uint32(4)


@cuda.jit(device=True, forceinline=True)
def descriptor(address):
    """wgmma's name for the matrix that starts at a shared address."""
    return DESCRIPTOR | np.uint64((address & LOW_ADDRESS) >> ADDRESS_UNIT)


@cuda.jit(device=True, forceinline=True)
def tile_place(tile, tiles_m, tiles_n):
    """(row, column) of a tile, in tiles: GROUP rows sweep over the columns together."""
    group = uint32(tile) // uint32(GROUP * tiles_n)
    first = int32(group * GROUP)
    rows = int32(min(int32(GROUP), int32(tiles_m - first)))
    inside = uint32(tile - first * tiles_n)
    return int32(first + int32(inside % uint32(rows))), int32(inside // uint32(rows))


# Epilogues ------------------------------------------------------------------------------------------------------------

# They work on 64 × 64 outputs of a warpgroup, 32 accumulators a thread, which become 16 words of two float16. First all
# loads, then the arithmetic, last all stores: the compilers move no load past a store, and nothing would overlap. What
# is beyond the edges is computed from the last row or columns that there are, and never written.
#     place: the warpgroup's first row and column, the thread's first row within those 64, its lane
# Chunk j of row r of a tile in shared memory lies at j ^ (r % 8), as the copy engine expects it.

@cuda.jit(device=True, forceinline=True)
def two_of_bias(bias, column, lane, j, N):
    n = uint32(min(int32(column + 8 * j + lane % 4 * 2), int32(N - 2)))
    return bias[n], bias[n + uint32(1)]


@cuda.jit(device=True, forceinline=True)
def word_place(tile, thread_row, lane, j, half):
    """Byte in a tile of the columns 8 · j + 2 · (lane % 4) and the next, in the thread's row or the one 8 below."""
    return int32(tile + thread_row * 128 + 1024 * half + ((j ^ (lane >> 2)) << 4) + lane % 4 * 4)


@cuda.jit(device=True, forceinline=True)
def finish_half(block, turn, staging, tiles, base, map_c, acc, place, M, N, bias, residual, alpha, has_bias,
                has_residual):
    """alpha · sum + bias + residual by way of a tile in shared memory; the next turn.

    turn: counts the tiles, which go through the two buffers in turns
    """
    first_row, first_column, thread_row, lane = place
    column = int32(first_column + 64 * block)
    if column < N and first_row < M:  # the same for the whole warpgroup
        warpgroup = cuda.threadIdx.x // 128
        elected = cuda.threadIdx.x % 128 == 0
        words = cuda.local.array(16, "uint32")
        if has_residual:
            for j in range(8):
                n = min(int32(column + 8 * j + lane % 4 * 2), int32(N - 2))
                for half in range(2):
                    row = min(int32(first_row + thread_row + 8 * half), int32(M - 1))
                    words[2 * j + half] = load_word(residual, row * N + n)
        for j in range(8):
            b0 = b1 = float32(0)
            if has_bias:
                b0, b1 = two_of_bias(bias, column, lane, j, N)
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                v0, v1 = alpha * acc[i] + b0, alpha * acc[i + 1] + b1
                if has_residual:
                    r0, r1 = unpack_half2(words[2 * j + half])
                    v0, v1 = v0 + r0, v1 + r1
                words[2 * j + half] = pack_half2(v0, v1)
        if elected:
            tma_store_wait_read_1()  # the tile that this buffer held two blocks ago has been read
        bar_sync(uint32(warpgroup), uint32(128))
        tile = int32(staging + (turn & 1) * BOX_BYTES)
        for j in range(8):
            for half in range(2):
                store_word(tiles, word_place(tile, thread_row, lane, j, half), words[2 * j + half])
        fence_proxy_async()
        bar_sync(uint32(warpgroup), uint32(128))
        if elected:
            tma_store_2d(base + uint32(tile), map_c, uint32(column), uint32(first_row))
            tma_store_commit()
        turn = int32(turn + 1)
    return turn


@cuda.jit(device=True, forceinline=True)
def finish_gelu(block, staging, tiles, base, map_c, map_d, acc, place, M, N, bias):
    """u = sum + bias and GELU(u), by way of a tile in shared memory for each.

    The arithmetic comes before the wait: meanwhile the copy engine reads the tiles of the block before.
    """
    first_row, first_column, thread_row, lane = place
    column = int32(first_column + 64 * block)
    if column < N and first_row < M:
        warpgroup = cuda.threadIdx.x // 128
        elected = cuda.threadIdx.x % 128 == 0
        words, activated = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        for j in range(8):
            b0, b1 = two_of_bias(bias, column, lane, j, N)
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                u0, u1 = acc[i] + b0, acc[i + 1] + b1
                words[2 * j + half] = pack_half2(u0, u1)
                activated[2 * j + half] = pack_half2(fast_gelu(u0), fast_gelu(u1))
        if elected:
            tma_store_wait_read_0()
        bar_sync(uint32(warpgroup), uint32(128))
        for j in range(8):
            for half in range(2):
                at = word_place(staging, thread_row, lane, j, half)
                store_word(tiles, at, words[2 * j + half])
                store_word(tiles, at + BOX_BYTES, activated[2 * j + half])
        fence_proxy_async()
        bar_sync(uint32(warpgroup), uint32(128))
        if elected:
            tma_store_2d(base + uint32(staging), map_c, uint32(column), uint32(first_row))
            tma_store_2d(base + uint32(staging + BOX_BYTES), map_d, uint32(column), uint32(first_row))
            tma_store_commit()


@cuda.jit(device=True, forceinline=True)
def finish_gelu_gradient(block, turn, staging, tiles, loaded, ready, acc, place, M, N):
    """sum · GELU'(u), in the tile that holds u; the next turn.

    loaded, ready: the first of the warpgroup's two barriers on which u comes and the results go, see `exchange`
    """
    first_row, first_column, thread_row, lane = place
    if int32(first_column + 64 * block) < N and first_row < M:
        buffer = int32(turn & 1)
        tile = int32(staging + buffer * BOX_BYTES)
        mbarrier_wait(loaded + uint32(8) * uint32(buffer), uint32(turn >> 1 & 1))
        words = cuda.local.array(16, "uint32")
        for j in range(8):
            for half in range(2):
                words[2 * j + half] = load_word(tiles, word_place(tile, thread_row, lane, j, half))
        for j in range(8):
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                u0, u1 = unpack_half2(words[2 * j + half])
                words[2 * j + half] = pack_half2(acc[i] * fast_gelu_gradient(u0), acc[i + 1] * fast_gelu_gradient(u1))
        for j in range(8):
            for half in range(2):
                store_word(tiles, word_place(tile, thread_row, lane, j, half), words[2 * j + half])
        fence_proxy_async()
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(ready + uint32(8) * uint32(buffer))
        turn = int32(turn + 1)
    return turn


@cuda.jit(device=True, forceinline=True)
def exchange(consumer, columns, unit, units, stride, tile_rows, tile_columns, base, staging, loaded, ready, map_in,
             map_out, M, N):
    """One thread brings the tiles of `map_in` that a consumer needs at its end, and takes its results to `map_out`.

    A tile waits in one of two buffers while the sums are made; the consumer overwrites it, and as soon as it has been
    written to memory from there the next but one follows. No consumer waits for a store.
    """
    turn = int32(0)
    x_1 = y_1 = x_2 = y_2 = int32(0)  # where the last tile and the one before it belong
    while unit < units:
        tile_m, tile_n = tile_place(unit, tile_rows, tile_columns)
        y = int32(tile_m * BM + consumer * 64)
        for i in range(columns):
            x = int32(tile_n * (64 * columns) + 64 * i)
            if y < M and x < N:
                buffer = uint32(turn & 1)
                tile = base + uint32(staging) + buffer * uint32(BOX_BYTES)
                if turn >= 2:
                    mbarrier_wait(ready + uint32(8) * buffer, uint32((turn >> 1) + 1 & 1))
                    tma_store_2d(tile, map_out, uint32(x_2), uint32(y_2))
                    tma_store_commit()
                    tma_store_wait_read_0()
                mbarrier_expect_tx(loaded + uint32(8) * buffer, uint32(BOX_BYTES))
                tma_load_2d(tile, map_in, loaded + uint32(8) * buffer, uint32(x), uint32(y))
                x_2, y_2, x_1, y_1 = x_1, y_1, x, y
                turn = int32(turn + 1)
        unit = int32(unit + stride)
    for last in range(2):
        if turn + last >= 2:
            buffer = uint32(turn + last & 1)
            mbarrier_wait(ready + uint32(8) * buffer, uint32((turn + last >> 1) + 1 & 1))
            tma_store_2d(base + uint32(staging) + buffer * uint32(BOX_BYTES), map_out, uint32(x_2), uint32(y_2))
        x_2, y_2 = x_1, y_1
    tma_store_commit()
    tma_store_wait_0()


@cuda.jit(device=True, forceinline=True)
def finish_float(block, c, start, acc, place, M, N, bias, alpha, has_bias, accumulate):
    """64 × 64 outputs of a warpgroup as float32, 16 bytes a lane; c from `start` on."""
    first_row, first_column, thread_row, lane = place
    column = int32(first_column + 64 * block)
    if column < N and first_row < M:
        for j in range(8):
            i = 32 * block + 4 * j
            write_sums(c, start, acc[i], acc[i + 1], acc[i + 2], acc[i + 3], int32(first_row + thread_row),
                       int32(column + 8 * j), lane, M, N, bias, alpha, has_bias, accumulate)


# Row sums of A --------------------------------------------------------------------------------------------------------
# A row's sum is its product with ones, which the tensor cores make as a by-product: 16 rows and 16 of k an instruction,
# eight times the same sum. (Additions one by one, with their conversions, kept the consumers waiting.)

ONES = uint32(0x3C003C00)  # two float16


@cuda.jit(device=True, forceinline=True)
def add_tile(address, chunk, first, second):
    """Add 64 of k of 16 rows of A to two sums: of row lane // 4, and of that + 8."""
    sums = first, first, second, second
    for i in range(4):  # 16 of k are 16 lines of 128 bytes
        sums = mma_m16n8k16(ldmatrix_x4_trans(address + chunk + uint32(2048 * i)), (ONES, ONES), sums)
    return sums[0], sums[2]


@cuda.jit(device=True, forceinline=True)
def add_rows(box, lane, sums):
    """Add a box (64 k × 64 rows of A, swizzled, at a shared address) to a warp's sums of its rows.

    sums: of rows 16·i + lane // 4 and 16·i + 8 + lane // 4, for i = 0 … 3
    """
    k, half = uint32(lane & 7), uint32(lane >> 3 & 1)
    address = box + k * uint32(128) + uint32(lane >> 4) * uint32(1024)
    s0, s1 = add_tile(address, (half ^ k) << uint32(4), sums[0], sums[1])
    s2, s3 = add_tile(address, (uint32(2) + half ^ k) << uint32(4), sums[2], sums[3])
    s4, s5 = add_tile(address, (uint32(4) + half ^ k) << uint32(4), sums[4], sums[5])
    s6, s7 = add_tile(address, (uint32(6) + half ^ k) << uint32(4), sums[6], sums[7])
    return s0, s1, s2, s3, s4, s5, s6, s7


@cuda.jit(device=True, forceinline=True)
def write_rows(row_sums, start, row, M, lane, sums, add):
    """A warp's 64 sums, from `row` on: of the four lanes that have the same, each writes two."""
    tile = lane & 3
    first, second = sums[0], sums[1]
    if tile == 1:
        first, second = sums[2], sums[3]
    elif tile == 2:
        first, second = sums[4], sums[5]
    elif tile == 3:
        first, second = sums[6], sums[7]
    row = int32(row + tile * 16 + (lane >> 2))
    if row < M:
        row_sums[start + row] = row_sums[start + row] + first if add else first
    if row + 8 < M:
        row_sums[start + row + 8] = row_sums[start + row + 8] + second if add else second
