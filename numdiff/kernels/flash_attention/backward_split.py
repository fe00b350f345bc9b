"""Flash attention backward, rung 4: float32, all five products on the tensor cores, three for one.

WHAT IS NEW, AND WHY IT PAYS
    backward_half.py with the products of split.py. A warp has 16 keys, a block 128, and queries pass by in tiles of 32,
    so that S and dP of a tile are 16 numbers each in a lane. As in backward.py, each block adds its share of dq to dq
    in memory, or to its chunk's, always the same thread to the same number.
    dS goes to shared memory by rows of queries, as ldmatrix wants it; keys 2x and 2x + 1 of each eight in columns x and
    x + 4, in which order k is read beside it (split.py).
    k and v are split again in every round: their halves would take all registers. That is 8 instructions for each 12
    mma.
LAUNCH
    grid (chunks, heads, B), 8 warps. Dynamic shared memory, KiB: k and v; two stages of q, dy, L and D; dS: for HS 32,
    64, 72: 71, 119, 131.
DETERMINISM
    as backward_half.py.
SOURCE
    split.py; reference.py; the order of the loops: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithm 4.
READ NEXT
    launcher.py
"""
from ...device import cuda, float32, int32, int64
from ...device.async_copy import cp_async_4_zfill, cp_async_commit, cp_async_wait, shared_address
from ...device.tensor_core import load_words4, store_word, word_of
from .backward_half import NUMBERS, probabilities, score_gradients, write_dq
from .forward import LOG2_E
from .fragments import CHUNK, WARP, anew, by_chunk, by_row, clear
from .split import (
    add_products,
    add_sums,
    fetch_rows,
    lane_place,
    left_of_sums,
    load_left,
    multiply_rows,
    pitch_of,
    write_rows,
)

WARPS = 8
THREADS = WARP * WARPS
ROWS = 16  # keys of a warp
KEYS = ROWS * WARPS
QUERIES = 32  # of a tile
N = QUERIES // 8  # fragments of a tile's queries side by side
DS_PITCH = 4 * KEYS + CHUNK  # bytes of a query's dS: an odd number of chunks
PARTS = WARPS // 2  # of dq's columns: two warps have 16 queries each, of the tile's 32


@cuda.jit(device=True, forceinline=True)
def fetch_numbers(tile, logsumexp, D, start, exist, t):
    """Start the copies of L and D of a tile's queries, as in backward_half.py."""
    query = int32(t // 2)
    size = int32(4) if query < exist else int32(0)
    if t < 2 * QUERIES:
        if t % 2:
            cp_async_4_zfill(tile + t * 4, D, start + query, size)
        else:
            cp_async_4_zfill(tile + t * 4, logsumexp, start + query, size)


def shared_bytes(HS):
    return 2 * KEYS * pitch_of(HS) + 2 * QUERIES * (2 * pitch_of(HS) + NUMBERS) + QUERIES * DS_PITCH


def make_backward(HS):
    """The kernel for one head size."""
    PITCH = pitch_of(HS)
    C = HS // 8
    TOTALS, SCORES = C * 4, N * 4
    V = KEYS * PITCH  # bytes from the start of shared memory
    STAGES = 2 * V
    G = QUERIES * PITCH  # within a stage: q comes first
    ROW_NUMBERS = 2 * G
    STAGE = ROW_NUMBERS + QUERIES * NUMBERS
    DS = STAGES + 2 * STAGE
    COLUMNS = HS // 32  # fragments of dq in a warp
    NINTH = HS == 72  # the last warps have one more
    DQ = COLUMNS * 4 + (4 if NINTH else 0)

    def kernel(dy, qkv, logsumexp, D, dqkv, dq, T, width, head_step, part, dq_row, dq_head, chunk_tiles, scale):
        shared = cuda.shared.array(0, "uint8", alignment=128)
        k_tile = shared_address(shared)
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t % WARP), int32(t // WARP)
        chunk, head, image, heads = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
        start = image * T * width + head * head_step  # of the head's q; its k is `part` further on
        dy_start, dy_step = (image * T * heads + head) * HS, int32(heads * HS)
        numbers_start = (image * heads + head) * T
        dq_start = (chunk * cuda.gridDim.z + image) * T * dq_row + head * dq_head
        c = float32(scale * LOG2_E)
        k_rows = k_tile + int32(warp * ROWS * PITCH + by_row(lane, PITCH))
        right = int32(by_chunk(lane, PITCH))
        place = int64(lane_place(lane, PITCH))
        # query 2x of the tile, and the column of key l / 4 of the warp
        ds_at = int64(DS + lane % 4 * 2 * DS_PITCH + warp * ROWS * 4 + (lane // 8 + lane // 4 % 2 * 4) * 4)

        s = cuda.local.array(SCORES, "float32")
        ds = cuda.local.array(SCORES, "float32")
        dk = cuda.local.array(TOTALS, "float32")
        dv = cuda.local.array(TOTALS, "float32")
        sums = cuda.local.array(TOTALS, "float32")  # of a tile: for dv, dk, and then dq
        first_key = int32(chunk * chunk_tiles * KEYS)
        end = int32(min(T, first_key + chunk_tiles * KEYS))
        fresh = True  # the chunk's first tile of keys finds nothing to add to
        while first_key < end:
            exist = int32(T - first_key)  # keys of the tile, or more
            at = start + part + first_key * width
            cuda.syncthreads()  # nobody needs the tiles of the round before
            t_start = anew(t)
            fetch_rows(k_tile, PITCH, qkv, at, width, exist, KEYS, HS, t_start, THREADS)
            fetch_rows(k_tile + V, PITCH, qkv, at + part, width, exist, KEYS, HS, t_start, THREADS)
            fetch_rows(k_tile + STAGES, PITCH, qkv, start, width, T, QUERIES, HS, t_start, THREADS)
            fetch_rows(k_tile + (STAGES + G), PITCH, dy, dy_start, dy_step, T, QUERIES, HS, t_start, THREADS)
            fetch_numbers(k_tile + (STAGES + ROW_NUMBERS), logsumexp, D, numbers_start, T, t_start)
            cp_async_commit()
            clear(dk, TOTALS)
            clear(dv, TOTALS)
            stage = int32(STAGES)
            first = int32(0)
            while first < T:
                cp_async_wait(0)  # this thread's part of the tile is there
                cuda.syncthreads()  # so is everybody's, and nobody reads the other stage, or dS, any more
                ahead = int32(first + QUERIES)
                if ahead < T:
                    other = k_tile + int32(2 * STAGES + STAGE - stage)
                    t_next = anew(t)
                    fetch_rows(other, PITCH, qkv, start + ahead * width, width, T - ahead, QUERIES, HS, t_next, THREADS)
                    fetch_rows(other + G, PITCH, dy, dy_start + ahead * dy_step, dy_step, T - ahead, QUERIES, HS,
                               t_next, THREADS)
                    fetch_numbers(other + ROW_NUMBERS, logsumexp, D, numbers_start + ahead, T - ahead, t_next)
                    cp_async_commit()
                if warp * ROWS < exist:
                    q_at = stage + place
                    at_numbers = int32(stage + ROW_NUMBERS + lane % 4 * 2 * NUMBERS)
                    clear(s, SCORES)
                    clear(sums, TOTALS)
                    multiply_rows(s, N, k_rows, k_tile + int32(stage + right), PITCH, HS)
                    for n in range(N):
                        probabilities(s, 4 * n, c, load_words4(shared, at_numbers + n * 8 * NUMBERS))
                        p_high, p_low = left_of_sums(s, 4 * n)
                        add_products(sums, 0, C, p_high, p_low, shared, q_at + (G + n * 8 * PITCH), PITCH)
                    add_sums(dv, sums, TOTALS)
                    clear(ds, SCORES)
                    clear(sums, TOTALS)
                    multiply_rows(ds, N, k_rows + V, k_tile + int32(stage + right) + G, PITCH, HS)
                    for n in range(N):
                        score_gradients(ds, 4 * n, s, load_words4(shared, at_numbers + n * 8 * NUMBERS))
                        to = ds_at + n * 8 * DS_PITCH
                        store_word(shared, to, word_of(ds[4 * n]))
                        store_word(shared, to + DS_PITCH, word_of(ds[4 * n + 1]))
                        store_word(shared, to + 32, word_of(ds[4 * n + 2]))
                        store_word(shared, to + (DS_PITCH + 32), word_of(ds[4 * n + 3]))
                        ds_high, ds_low = left_of_sums(ds, 4 * n)
                        add_products(sums, 0, C, ds_high, ds_low, shared, q_at + n * 8 * PITCH, PITCH)
                    add_sums(dk, sums, TOTALS)
                cuda.syncthreads()  # dS is complete

                t_dq = anew(t)
                lane_dq, group, side = int32(t_dq % WARP), int32(t_dq // WARP % 2), int32(t_dq // (2 * WARP))
                ds_rows = k_tile + int32(DS + by_row(lane_dq, DS_PITCH) + group * (16 * DS_PITCH))
                k_at = int64(lane_place(lane_dq, PITCH) + side * (COLUMNS * 32))
                if first + group * 16 < T:
                    last = NINTH and side == PARTS - 1
                    clear(sums, DQ)
                    key = int32(0)
                    while key < min(exist, int32(KEYS)):
                        a_high, a_low = load_left(ds_rows + int32(key * 4))
                        add_products(sums, 0, COLUMNS, a_high, a_low, shared, k_at + key * PITCH, PITCH)
                        if last:
                            add_products(sums, COLUMNS, 1, a_high, a_low, shared,
                                         k_at + (key * PITCH + COLUMNS * 32), PITCH)
                        key = int32(key + 8)
                    query = int32(first + group * 16 + lane_dq // 4 + lane_dq % 2 * 8)
                    at = dq_start + query * dq_row + int32(side * (COLUMNS * 8) + lane_dq % 4 // 2 * 4)
                    for n in range(COLUMNS):
                        write_dq(dq, at + 8 * n, query < T, sums, 4 * n, scale, fresh, lane_dq)
                    if last:
                        write_dq(dq, at + 8 * COLUMNS, query < T, sums, 4 * COLUMNS, scale, fresh, lane_dq)
                stage = int32(2 * STAGES + STAGE - stage)
                first = ahead

            t_end = anew(t)
            lane_end, key = int32(t_end % WARP), int32(first_key + t_end // WARP * ROWS)
            at = start + part + key * width
            write_rows(dqkv, at, width, int32(T - key), dk, C, scale, scale, lane_end)
            write_rows(dqkv, at + part, width, int32(T - key), dv, C, float32(1), float32(1), lane_end)
            first_key = int32(first_key + KEYS)
            fresh = False

    kernel.__name__ = kernel.__qualname__ = f"flash_attention_backward_kernel_v4_{HS}"
    return cuda.jit(kernel, launch_bounds=(THREADS, 1))
