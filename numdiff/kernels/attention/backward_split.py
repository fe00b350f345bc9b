"""Flash attention backward, rung 4: float32, all five products on the tensor cores, two mma for one.

WHAT IS NEW, AND WHY IT PAYS
    backward_half.py with the products of split.py. A warp has 16 keys, a block 64, and queries pass by in tiles of 32,
    so that S and dP of a tile are 16 numbers each in a lane. As in backward.py, each block adds its share of dq to dq
    in memory, or to its chunk's, always the same thread to the same number.
    One warp alone keeps the tensor cores busy for less than half of its time: the rest goes into splitting numbers,
    barriers and waiting. So a multiprocessor gets three small blocks (four for HS 32), which are seldom at the same
    point. That asks for at most 168 registers (128) and one stage of q and dy: the next tile travels while dq is
    computed, and so does the dq that is added to.
    dS goes to shared memory by rows of queries, as ldmatrix needs it, with keys 2x and 2x + 1 of each eight in columns
    x and x + 4, the order in which k is read (split.py).
    k and v are split again for every tile: their fragments would take all registers.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    flash_attention_backward, 8×1024×512, 8×1024×1536, heads 8, float32
        v4*      756 µs  56.8 TFLOP/s   85 % of arithmetic   1.87 × v2   170 % of PyTorch
LAUNCH
    grid (chunks, heads, B), 4 warps. Dynamic shared memory, KiB: k and v; q, dy, L and D; dS: for HS 32, 64, 72:
    36, 60, 66.
DETERMINISM
    as backward_half.py.
SOURCE
    split.py; reference.py; the order of the loops: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithm 4.
READ NEXT
    launcher.py
"""
from ...device import cuda, float32, int32, int64, load4
from ...device.async_copy import cp_async_4_zfill, cp_async_commit, cp_async_wait, shared_address
from ...device.limits import WARP
from ...device.requires import requires
from ...device.tensor_core import load_words4, store_word, word_of
from .backward import head_of
from .backward_half import NUMBERS, probabilities, score_gradients
from .forward import LOG2_E
from .fragments import CHUNK, by_chunk, by_row, clear, four_neighbours, write_four
from .split import (
    add_products,
    add_sums,
    fetch_rows,
    lane_place,
    left_of_sums,
    load_left,
    multiply_rows,
    pitch_of,
    thread_anew,
    write_rows,
)

WARPS = 4
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


@cuda.jit(device=True, forceinline=True)
def fetch_queries(tile, PITCH, qkv, q_at, q_step, dy, dy_at, dy_step, logsumexp, D, numbers_at, exist, HS, t):
    """Start the copies of a tile of queries: q, dy, then L and D."""
    fetch_rows(tile, PITCH, qkv, q_at, q_step, exist, QUERIES, HS, t, THREADS)
    fetch_rows(tile + int32(QUERIES * PITCH), PITCH, dy, dy_at, dy_step, exist, QUERIES, HS, t, THREADS)
    fetch_numbers(tile + int32(2 * QUERIES * PITCH), logsumexp, D, numbers_at, exist, t)
    cp_async_commit()


@cuda.jit(device=True, forceinline=True)
def multiply_tiles(s, keys, queries, PITCH, HS, t):
    """s = the warp's rows of a tile of keys · (a tile of queries)ᵀ; keys, queries: their addresses."""
    t_now = thread_anew(t)
    lane, warp = int32(t_now % WARP), int32(t_now // WARP)
    clear(s, 4 * N)
    multiply_rows(s, N, keys + int32(warp * ROWS * PITCH + by_row(lane, PITCH)),
                  queries + int32(by_chunk(lane, PITCH)), PITCH, HS)


@cuda.jit(device=True, forceinline=True)
def load_old(old, first, N, dq, at):
    """N fragments of dq, from the tiles of keys before."""
    for i in range(first, first + 4 * N, 4):
        old[i], old[i + 1], old[i + 2], old[i + 3] = load4(dq, at + 2 * i)


@cuda.jit(device=True, forceinline=True)
def write_dq(dq, at, exists, sums, old, first, N, f, lane):
    """N fragments of dq, or its share, onto what was there."""
    for i in range(first, first + 4 * N, 4):
        v = four_neighbours(sums[i], sums[i + 1], sums[i + 2], sums[i + 3], lane)
        write_four(dq, at + 2 * i, (f * v[0] + old[i], f * v[1] + old[i + 1], f * v[2] + old[i + 2],
                                    f * v[3] + old[i + 3]), float32(1), exists)


def shared_bytes(HS):
    return 2 * KEYS * pitch_of(HS) + QUERIES * (2 * pitch_of(HS) + NUMBERS + DS_PITCH)


def make_backward(HS):
    """The kernel for one head size."""
    PITCH = pitch_of(HS)
    C = HS // 8
    TOTALS, SCORES = C * 4, N * 4
    BLOCKS = 4 if HS == 32 else 3  # on a multiprocessor: at most 128 registers a thread, or 168
    V = KEYS * PITCH  # bytes from the start of shared memory
    Q = 2 * V
    G = Q + QUERIES * PITCH
    ROW_NUMBERS = G + QUERIES * PITCH
    DS = ROW_NUMBERS + QUERIES * NUMBERS
    COLUMNS = HS // 8 // PARTS  # fragments of dq in a warp
    NINTH = HS == 72  # the last warps have one more
    DQ = COLUMNS * 4 + (4 if NINTH else 0)

    @requires("8.0")
    def kernel(dy, qkv, logsumexp, D, dqkv, dq, problem):
        T, width, head_step, part, dq_row, dq_head, chunk_tiles, scale = problem
        shared = cuda.shared.array(0, "uint8", alignment=128)
        k_tile = shared_address(shared)
        t = int32(cuda.threadIdx.x)
        chunk, head, image = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        start, dy_start, dy_step, numbers_start = head_of(problem, HS)
        dq_start = (chunk * cuda.gridDim.z + image) * T * dq_row + head * dq_head
        c = float32(scale * LOG2_E)
        place = int64(lane_place(int32(t % WARP), PITCH))

        s = cuda.local.array(SCORES, "float32")
        ds = cuda.local.array(SCORES, "float32")
        dk = cuda.local.array(TOTALS, "float32")
        dv = cuda.local.array(TOTALS, "float32")
        sums = cuda.local.array(TOTALS, "float32")  # of a tile: for dv, dk, and then dq
        old = cuda.local.array(DQ, "float32")
        turn = int32(0)
        first_key = int32(chunk * chunk_tiles * KEYS)
        while turn < chunk_tiles and first_key < T:
            exist = int32(T - first_key)  # keys of the tile, or more
            at = start + part + first_key * width
            cuda.syncthreads()  # nobody needs the tiles of the round before
            t_start = thread_anew(t)
            fetch_rows(k_tile, PITCH, qkv, at, width, exist, KEYS, HS, t_start, THREADS)
            fetch_rows(k_tile + V, PITCH, qkv, at + part, width, exist, KEYS, HS, t_start, THREADS)
            fetch_queries(k_tile + Q, PITCH, qkv, start, width, dy, dy_start, dy_step, logsumexp, D, numbers_start, T,
                          HS, t_start)
            clear(dk, TOTALS)
            clear(dv, TOTALS)
            first = int32(0)
            while first < T:
                cp_async_wait(0)  # this thread's part of the tile is there
                cuda.syncthreads()  # so is everybody's, and nobody reads dS any more
                if thread_anew(t) // WARP * ROWS < exist:
                    multiply_tiles(s, k_tile, k_tile + Q, PITCH, HS, t)
                    clear(sums, TOTALS)
                    at_numbers = int32(ROW_NUMBERS + thread_anew(t) % 4 * 2 * NUMBERS)
                    for n in range(N):
                        probabilities(s, 4 * n, c, load_words4(shared, at_numbers + n * 8 * NUMBERS))
                        p, p_both = left_of_sums(s, 4 * n)
                        add_products(sums, 0, C, p, p_both, shared, place + (G + n * 8 * PITCH), PITCH)
                    add_sums(dv, sums, TOTALS)
                    multiply_tiles(ds, k_tile + V, k_tile + G, PITCH, HS, t)
                    clear(sums, TOTALS)
                    t_ds = thread_anew(t)  # dS: query 2x of the tile, and the column of key l / 4 of the warp
                    ds_at = int64(DS + t_ds % 4 * 2 * DS_PITCH + t_ds // WARP * ROWS * 4
                                  + (t_ds // 8 % 4 + t_ds // 4 % 2 * 4) * 4)
                    for n in range(N):
                        score_gradients(ds, 4 * n, s, load_words4(shared, at_numbers + n * 8 * NUMBERS))
                        to = ds_at + n * 8 * DS_PITCH
                        store_word(shared, to, word_of(ds[4 * n]))
                        store_word(shared, to + DS_PITCH, word_of(ds[4 * n + 1]))
                        store_word(shared, to + 32, word_of(ds[4 * n + 2]))
                        store_word(shared, to + (DS_PITCH + 32), word_of(ds[4 * n + 3]))
                    for n in range(N):
                        left, left_both = left_of_sums(ds, 4 * n)
                        add_products(sums, 0, C, left, left_both, shared, place + (Q + n * 8 * PITCH), PITCH)
                    add_sums(dk, sums, TOTALS)
                cuda.syncthreads()  # dS is complete, and nobody reads the queries any more
                ahead = int32(first + QUERIES)
                if ahead < T:
                    fetch_queries(k_tile + Q, PITCH, qkv, start + ahead * width, width, dy, dy_start + ahead * dy_step,
                                  dy_step, logsumexp, D, numbers_start + ahead, T - ahead, HS, thread_anew(t))

                t_dq = thread_anew(t)
                lane_dq, group, side = int32(t_dq % WARP), int32(t_dq // WARP % 2), int32(t_dq // (2 * WARP))
                if first + group * 16 < T:
                    last = NINTH and side == PARTS - 1
                    query = int32(first + group * 16 + lane_dq // 4 + lane_dq % 2 * 8)
                    at = dq_start + query * dq_row + int32(side * (COLUMNS * 8) + lane_dq % 4 // 2 * 4)
                    clear(old, DQ)
                    if turn > 0 and query < T:  # the chunk's first tile of keys finds nothing to add to
                        load_old(old, 0, COLUMNS, dq, at)
                        if last:
                            load_old(old, COLUMNS * 4, 1, dq, at)
                    ds_rows = k_tile + int32(DS + by_row(lane_dq, DS_PITCH) + group * (16 * DS_PITCH))
                    k_at = int64(lane_place(lane_dq, PITCH) + side * (COLUMNS * 32))
                    clear(sums, DQ)
                    key = int32(0)
                    while key < min(exist, int32(KEYS)):
                        for half in range(0, ROWS, 8):
                            a, a_both = load_left(ds_rows + int32((key + half) * 4))
                            k_row = k_at + int32((key + half) * PITCH)
                            add_products(sums, 0, COLUMNS, a, a_both, shared, k_row, PITCH)
                            if last:
                                add_products(sums, COLUMNS, 1, a, a_both, shared, k_row + COLUMNS * 32, PITCH)
                        key = int32(key + ROWS)
                    write_dq(dq, at, query < T, sums, old, 0, COLUMNS, scale, lane_dq)
                    if last:
                        write_dq(dq, at, query < T, sums, old, COLUMNS * 4, 1, scale, lane_dq)
                first = ahead

            t_end = thread_anew(t)
            lane_end, key = int32(t_end % WARP), int32(first_key + t_end // WARP * ROWS)
            at = start + part + key * width
            write_rows(dqkv, at, width, int32(T - key), dk, C, scale, scale, lane_end)
            write_rows(dqkv, at + part, width, int32(T - key), dv, C, float32(1), float32(1), lane_end)
            turn = int32(turn + 1)
            first_key = int32(first_key + KEYS)

    kernel.__name__ = kernel.__qualname__ = f"flash_attention_backward_kernel_v4_{HS}"
    return cuda.jit(kernel, launch_bounds=(THREADS, BLOCKS))
