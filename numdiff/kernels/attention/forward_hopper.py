"""Flash attention forward, rung 5: Hopper's wgmma, fed by the copy engine (sm_90a).

WHAT IS NEW, AND WHY IT PAYS
    wgmma multiplies 64 queries by 128 keys straight from shared memory, where rung 3 gives 64 times as many mma.sync
    and loads fragments for them. Its sums lie in the registers as those of mma.sync do, so that probabilities, packed,
    are again the left side of the next product (fragments.py).
    One thread, of a warpgroup that else does nothing, asks the copy engine for q, k and v (hopper_tiles.py): for the
    next tiles, and for the next head, while this one is computed. With 256 tokens, as image models have them, memory is
    what limits this kernel, and it must never rest.
    Each of two consumers has 64 queries. While one computes a softmax the other multiplies. And within one: the scores
    of the next keys and the outputs of those before are made together, and the next softmax begins while the outputs
    are still on their way.
A UNIT is 128 queries of a head, which see k and v in tiles of 128 tokens. A block takes every gridDim-th unit.
LAUNCH
    grid min(units, multiprocessors), 384 threads; dynamic shared memory, KiB: four stages of k and v, two of q; for HS
    32, 64, 72: 80, 160, 182. Compiled for 168 registers a thread, of which the producer keeps 40 and the consumers get
    232.
NEEDS
    sm_90a; qkv and y at multiples of 16 bytes.
ACCURACY
    q, k, v and P are float16, S, m, l and o float32.
DETERMINISM
    one warpgroup sums a query's outputs in the order of the keys.
SOURCE
    reference.py; Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608, sections 3.1 and 3.2; PTX ISA, section 9.7.15.
READ NEXT
    backward_hopper.py
"""
import math

from ...device import cuda, float32, int32, launch, uint32
from ...device.approximate import power_of_two
from ...device.mbarrier import (
    bar_sync,
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from ...device.tensor_core import store_word
from ...device.tma import fence_proxy_async, tma_prefetch, tma_store_commit, tma_store_wait_0, tma_store_wait_read_0
from ...device.wgmma import (
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_a_registers,
    make_wgmma_wait,
    wgmma_commit,
    wgmma_fence,
)
from ..common import divide
from .forward import LN_2, LOG2_E, LOWEST
from .forward_half import exponentials, hide_keys, largest_of_row, sum_of_row
from .fragments import clear, pack
from .hopper_tiles import (
    CHUNK,
    fetch_tile,
    maps_of,
    matrix_at,
    ninth_across,
    ninth_along,
    row_bytes,
    stash,
    tile_bytes,
    u64,
    write_tile,
)

MINIMUM_CAPABILITY = (9, 0)
THREADS = 384  # a producer and two consumer warpgroups
ROWS = 64  # queries of a consumer
QUERIES = 2 * ROWS
KEYS = 128  # of a tile
N = KEYS // 8  # groups of eight scores side by side
SCORES, WORDS = KEYS // 2, KEYS // 4  # of a thread
STAGES = 4
BARRIERS = 2 * STAGES + 4

wgmma_scores = make_wgmma(KEYS)
wgmma_values_8, wgmma_values_32, wgmma_values_64 = (make_wgmma_a_registers(n, transpose_b=True) for n in (8, 32, 64))
wait_scores, wait_scores_1 = make_wgmma_wait(KEYS, pin=False), make_wgmma_wait(KEYS, pending=1, pin=False)
wait_8, wait_32, wait_64 = (make_wgmma_wait(n, pin=False) for n in (8, 32, 64))
producer_registers, consumer_registers = make_setmaxnreg(40, False), make_setmaxnreg(232, True)


# Products -------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def multiply_rows(HS, s, q, q_ninth, k, k_ninth, zeros):
    """s = q · kᵀ for 64 queries and 128 keys; shared addresses of the first and the ninth parts."""
    a, b = matrix_at(HS, q), matrix_at(HS, k)
    wgmma_scores(s, a, b, int32(0))
    wgmma_scores(s, a + u64(2), b + u64(2), int32(1))
    if HS > 32:
        wgmma_scores(s, a + u64(4), b + u64(4), int32(1))
        wgmma_scores(s, a + u64(6), b + u64(6), int32(1))
    if HS == 72:
        wgmma_scores(s, ninth_along(q_ninth, zeros), ninth_along(k_ninth, zeros), int32(1))


@cuda.jit(device=True, forceinline=True)
def add_values(HS, o, o_ninth, words, v, v_ninth):
    """o += P · v for 128 keys; words: P, as the left side of a product."""
    b = matrix_at(HS, v)
    for i in range(KEYS // 16):
        p = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
        if HS == 32:
            wgmma_values_32(o, p, b + u64(64 * i), int32(1))
        else:
            wgmma_values_64(o, p, b + u64(128 * i), int32(1))
    if HS == 72:
        b = ninth_across(v_ninth)
        for i in range(KEYS // 16):
            p = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
            wgmma_values_8(o_ninth, p, b + u64(16 * i), int32(1))


@cuda.jit(device=True, forceinline=True)
def wait_for_outputs(HS, o, o_ninth):
    if HS == 32:
        wait_32(o)
    else:
        wait_64(o)
    if HS == 72:
        wait_8(o_ninth)


# Softmax --------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def probabilities(s, largest, l, c):
    """A thread's scores of two queries become 2^(c·(s − m)); what is to be done to the outputs so far, for each."""
    new_0, new_1 = largest_of_row(s, N, 0, largest[0]), largest_of_row(s, N, 2, largest[1])
    shrink_0, shrink_1 = power_of_two(c * largest[0] - c * new_0), power_of_two(c * largest[1] - c * new_1)
    l[0] = l[0] * shrink_0 + exponentials(s, N, 0, c, c * new_0)
    l[1] = l[1] * shrink_1 + exponentials(s, N, 2, c, c * new_1)
    largest[0], largest[1] = new_0, new_1
    return shrink_0, shrink_1


@cuda.jit(device=True, forceinline=True)
def pack_all(words, s):
    for i in range(KEYS // 16):
        pack(words, i, s, 8 * i)


@cuda.jit(device=True, forceinline=True)
def scale_rows(o, columns, f_0, f_1):
    for j in range(columns // 8):
        o[4 * j], o[4 * j + 1] = o[4 * j] * f_0, o[4 * j + 1] * f_0
        o[4 * j + 2], o[4 * j + 3] = o[4 * j + 2] * f_1, o[4 * j + 3] * f_1


# The kernel -----------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def place_of(unit, tiles, heads):
    """(image, head, tile of queries) of a unit: neighbours share their keys."""
    rest, tile = divide(unit, tiles)
    image, head = divide(rest, heads)
    return image, head, tile


def shared_bytes(HS):
    """Stages of k and v, two buffers of q, and the zeros behind a ninth part."""
    return STAGES * 2 * tile_bytes(HS, KEYS) + 2 * tile_bytes(HS, QUERIES) + (CHUNK * KEYS if HS == 72 else 0)


def make_forward(HS):
    """The kernel for one head size."""
    ROW, COLUMNS, OUTPUTS = row_bytes(HS), min(HS, 64), min(HS, 64) // 2
    TILE, Q_TILE = tile_bytes(HS, KEYS), tile_bytes(HS, QUERIES)
    STAGE = 2 * TILE  # k, then v
    Q_FIRST = STAGES * STAGE  # bytes from the start of shared memory
    ZEROS = Q_FIRST + 2 * Q_TILE
    NINTH, Q_NINTH = KEYS * ROW, QUERIES * ROW  # within a tile
    ZERO_WORDS = CHUNK * KEYS // 4

    def kernel(map_q, map_q_ninth, map_y, map_y_ninth, logsumexp, T, heads, head_step, part, tiles, units, scale):
        shared = cuda.shared.array(0, "uint8", alignment=1024)
        barriers = cuda.shared.array(BARRIERS, "uint64")
        base, full_0 = smem_u32(shared), smem_u32(barriers)
        empty_0, q_full_0 = full_0 + uint32(8 * STAGES), full_0 + uint32(16 * STAGES)
        q_empty_0 = q_full_0 + uint32(16)
        t = int32(cuda.threadIdx.x)
        warpgroup = int32(t >> 7)
        if t == 0:
            for s in range(STAGES):
                mbarrier_init(full_0 + uint32(8 * s), uint32(1))
                mbarrier_init(empty_0 + uint32(8 * s), uint32(2))
            for s in range(2):
                mbarrier_init(q_full_0 + uint32(8 * s), uint32(1))
                mbarrier_init(q_empty_0 + uint32(8 * s), uint32(2))
            fence_barrier_init()
            tma_prefetch(map_q)
            tma_prefetch(map_y)
        if HS == 72:
            for i in range((ZERO_WORDS + THREADS - 1) // THREADS):
                if t + i * THREADS < ZERO_WORDS:
                    store_word(shared, int32(ZEROS + (t + i * THREADS) * 4), uint32(0))
            fence_proxy_async()
        cuda.syncthreads()
        stage, buffer, unit = int32(0), int32(0), int32(cuda.blockIdx.x)
        if warpgroup == 0:
            producer_registers()
            if t == 0:
                parity, q_parity = int32(1), int32(1)  # fresh barriers let the first round through
                while unit < units:
                    image, head, tile = place_of(unit, tiles, heads)
                    column = int32(head * head_step)
                    q_full = q_full_0 + uint32(8) * uint32(buffer)
                    mbarrier_wait(q_empty_0 + uint32(8) * uint32(buffer), uint32(q_parity))
                    mbarrier_expect_tx(q_full, uint32(Q_TILE))
                    fetch_tile(HS, QUERIES, base + uint32(Q_FIRST) + uint32(buffer) * uint32(Q_TILE), map_q,
                               map_q_ninth, q_full, column, int32(tile * QUERIES), image)
                    buffer = int32(buffer ^ 1)
                    if buffer == 0:
                        q_parity = int32(q_parity ^ 1)
                    first = int32(0)
                    while first < T:
                        full, k = full_0 + uint32(8) * uint32(stage), base + uint32(stage) * uint32(STAGE)
                        mbarrier_wait(empty_0 + uint32(8) * uint32(stage), uint32(parity))
                        mbarrier_expect_tx(full, uint32(STAGE))
                        fetch_tile(HS, KEYS, k, map_q, map_q_ninth, full, int32(column + part), first, image)
                        fetch_tile(HS, KEYS, k + uint32(TILE), map_q, map_q_ninth, full, int32(column + 2 * part),
                                   first, image)
                        stage = int32(stage + 1)
                        if stage == STAGES:
                            stage, parity = int32(0), int32(parity ^ 1)
                        first = int32(first + KEYS)
                    unit = int32(unit + cuda.gridDim.x)
        else:
            consumer_registers()
            s = cuda.local.array(SCORES, "float32")
            o = cuda.local.array(OUTPUTS, "float32")
            o_ninth = cuda.local.array(4, "float32")
            words = cuda.local.array(WORDS, "uint32")
            largest = cuda.local.array(2, "float32")
            l = cuda.local.array(2, "float32")
            consumer, thread, lane = int32(warpgroup - 1), int32(t & 127), int32(t & 31)
            elected, zeros = thread == 0, base + uint32(ZEROS)
            c = float32(scale * LOG2_E)
            parity, q_parity = int32(0), int32(0)
            while unit < units:
                image, head, tile = place_of(unit, tiles, heads)
                q_at = int32(Q_FIRST + buffer * Q_TILE + consumer * (ROWS * ROW))  # bytes from the start
                q_ninth_at = int32(Q_FIRST + buffer * Q_TILE + (Q_NINTH + consumer * (ROWS * CHUNK)))
                q, q_ninth = base + uint32(q_at), base + uint32(q_ninth_at)
                clear(o, OUTPUTS)
                clear(o_ninth, 4)
                largest[0], largest[1], l[0], l[1] = LOWEST, LOWEST, float32(0), float32(0)

                mbarrier_wait(q_full_0 + uint32(8) * uint32(buffer), uint32(q_parity))
                mbarrier_wait(full_0 + uint32(8) * uint32(stage), uint32(parity))
                k = base + uint32(stage) * uint32(STAGE)
                wgmma_fence()
                multiply_rows(HS, s, q, q_ninth, k, k + uint32(NINTH), zeros)
                wgmma_commit()
                wait_scores(s)
                if T < KEYS:
                    hide_keys(s, 1, N, T, lane)
                probabilities(s, largest, l, c)
                pack_all(words, s)
                first = int32(KEYS)
                while first < T:
                    v, v_stage = k + uint32(TILE), stage
                    stage = int32(stage + 1)
                    if stage == STAGES:
                        stage, parity = int32(0), int32(parity ^ 1)
                    if first == KEYS:  # later ones have been waited for below
                        mbarrier_wait(full_0 + uint32(8) * uint32(stage), uint32(parity))
                    k = base + uint32(stage) * uint32(STAGE)
                    wgmma_fence()
                    multiply_rows(HS, s, q, q_ninth, k, k + uint32(NINTH), zeros)
                    wgmma_commit()
                    add_values(HS, o, o_ninth, words, v, v + uint32(NINTH))
                    wgmma_commit()
                    wait_scores_1(s)
                    if T - first < KEYS:
                        hide_keys(s, 1, N, int32(T - first), lane)
                    shrink_0, shrink_1 = probabilities(s, largest, l, c)
                    first = int32(first + KEYS)
                    if first < T:  # here, so that ptxas cannot put the wait for the outputs before the softmax
                        ahead = int32(stage + 1) if stage + 1 < STAGES else int32(0)
                        mbarrier_wait(full_0 + uint32(8) * uint32(ahead), uint32(parity if ahead > 0 else parity ^ 1))
                    wait_for_outputs(HS, o, o_ninth)
                    if elected:
                        mbarrier_arrive(empty_0 + uint32(8) * uint32(v_stage))
                    scale_rows(o, COLUMNS, shrink_0, shrink_1)
                    scale_rows(o_ninth, HS - COLUMNS, shrink_0, shrink_1)
                    pack_all(words, s)
                wgmma_fence()
                add_values(HS, o, o_ninth, words, k + uint32(TILE), k + uint32(TILE + NINTH))
                wgmma_commit()
                above, below = sum_of_row(l[0]), sum_of_row(l[1])
                query = int32(tile * QUERIES + consumer * ROWS + (thread >> 5) * 16 + (lane >> 2))
                rows_at = (image * heads + head) * T
                if lane & 3 == 0 and query < T:
                    logsumexp[rows_at + query] = scale * largest[0] + LN_2 * math.log2(above)
                if lane & 3 == 0 and query + 8 < T:
                    logsumexp[rows_at + query + 8] = scale * largest[1] + LN_2 * math.log2(below)
                wait_for_outputs(HS, o, o_ninth)
                if elected:
                    mbarrier_arrive(empty_0 + uint32(8) * uint32(stage))
                stage = int32(stage + 1)
                if stage == STAGES:
                    stage, parity = int32(0), int32(parity ^ 1)

                # nobody needs the consumer's rows of q any more: they take the outputs on their way
                stash(HS, shared, q_at, q_ninth_at, o, o_ninth, float32(1) / above, float32(1) / below)
                fence_proxy_async()
                bar_sync(uint32(warpgroup), uint32(128))
                if elected:
                    row = int32(tile * QUERIES + consumer * ROWS)
                    if row < T:
                        write_tile(HS, q, q_ninth, map_y, map_y_ninth, int32(head * HS), row, image)
                        tma_store_commit()
                        tma_store_wait_read_0()
                    mbarrier_arrive(q_empty_0 + uint32(8) * uint32(buffer))
                buffer = int32(buffer ^ 1)
                if buffer == 0:
                    q_parity = int32(q_parity ^ 1)
                unit = int32(unit + cuda.gridDim.x)
            if elected:
                tma_store_wait_0()

    kernel.__name__ = kernel.__qualname__ = f"flash_attention_forward_kernel_v5_{HS}"
    return cuda.jit(kernel, launch_bounds=(THREADS, 1))


forward_kernels_v5 = {HS: make_forward(HS) for HS in (32, 64, 72)}


def launch_forward(qkv, y, logsumexp, heads, HS, head_step, part, multiprocessors):
    """y (B, T, C) and logsumexp (B, heads, T) of qkv (B, T, 3C)."""
    B, T, _ = qkv.shape
    tiles = -(-T // QUERIES)
    units = B * heads * tiles
    launch(forward_kernels_v5[HS], min(units, multiprocessors), THREADS, *maps_of(qkv, HS, QUERIES),
           *maps_of(y, HS, ROWS), logsumexp.reshape(-1), T, heads, head_step, part, tiles, units, 1 / math.sqrt(HS),
           shared=shared_bytes(HS))
