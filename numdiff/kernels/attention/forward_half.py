"""Flash attention forward, rung 3: float16 on the tensor cores of every GPU from sm_80 on.

WHAT IS NEW, AND WHY IT PAYS
    Both products are mma.sync, 2048 multiply-adds an instruction, float32 sums (fragments.py). A warp owns 16 or 32
    queries: q's fragments stay in its registers, and a fragment of k or v read from shared memory serves all of them.
    Probabilities never leave the registers: the sums of S are packed as the left side of P·v.
    cp.async brings the next tile of k and v into the other of two stages while this one is multiplied.
    What is left is the softmax. For each score: one multiply-add, one power of two, one addition, half a conversion;
    maxima and sums of a row go through two shuffles, for only four lanes share it.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files
    flash_attention_forward, 64×256×2304, heads 12, float16
        v3      63.3 µs    1,603 GB/s   39 % of memory   36.9 × v1    71 % of PyTorch
LAUNCH
    grid (ceil(T / queries), heads, B), 4 warps for 64 or 128 queries. Dynamic shared memory, KiB: q and two stages of
    k and v; 64 queries: 25 (HS 32) or 45; 128: 30 or 54.
ACCURACY
    q, k, v and P are float16, S, m, l and o float32.
DETERMINISM
    one warp sums a query's outputs in the order of the keys.
SOURCE
    reference.py; Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 1 and section 3.3.
READ NEXT
    backward_half.py
"""
import math

from ...device import cuda, float32, int32, opaque
from ...device.approximate import power_of_two
from ...device.async_copy import cp_async_commit, cp_async_wait, shared_address
from ...device.limits import FULL_MASK, WARP
from ...device.requires import requires
from .forward import LN_2, LOG2_E, LOWEST
from .fragments import (
    add_products,
    by_chunk,
    by_row,
    clear,
    copy_out,
    fetch_rows,
    load_left,
    multiply_rows,
    pack,
    pitch_of,
    stash,
)

WARPS = 4
THREADS = WARP * WARPS
KEYS = 64  # of a tile
N = KEYS // 8  # fragments of scores side by side


@cuda.jit(device=True, forceinline=True)
def hide_keys(s, M, N, exist, lane):
    """Scores of keys that do not exist become so low that nothing is left of them."""
    for n in range(N):
        key = int32(8 * n + lane % 4 * 2)
        for m in range(M):
            i = (m * N + n) * 4
            if key >= exist:
                s[i], s[i + 2] = LOWEST, LOWEST
            if key + 1 >= exist:
                s[i + 1], s[i + 3] = LOWEST, LOWEST


@cuda.jit(device=True, forceinline=True)
def largest_of_row(s, N, first, m):
    """Of m and a row's scores in all four lanes that share the row: s[first], s[first + 1], and so on every 4."""
    for n in range(N):
        m = max(m, max(s[first + 4 * n], s[first + 4 * n + 1]))
    m = max(m, cuda.shfl_xor_sync(FULL_MASK, m, 1))
    return max(m, cuda.shfl_xor_sync(FULL_MASK, m, 2))


@cuda.jit(device=True, forceinline=True)
def exponentials(s, N, first, c, m):
    """The row's scores become 2^(c·s − c·m); the sum of this lane's."""
    total = float32(0)
    for n in range(N):
        a, b = power_of_two(c * s[first + 4 * n] - m), power_of_two(c * s[first + 4 * n + 1] - m)
        s[first + 4 * n], s[first + 4 * n + 1] = a, b
        total += a + b
    return total


@cuda.jit(device=True, forceinline=True)
def sum_of_row(l):
    l += cuda.shfl_xor_sync(FULL_MASK, l, 1)
    return l + cuda.shfl_xor_sync(FULL_MASK, l, 2)


@cuda.jit(device=True, forceinline=True)
def online_softmax(s, o, largest, l, M, C, c):
    """The scores of M · 16 queries and a tile of keys become probabilities, and what was summed is corrected.

    largest, l: for each of a lane's 2·M queries the maximum so far, and the lane's share of the sum
    C: fragments of outputs side by side
    """
    for m in range(M):
        for half in range(2):
            first = 4 * N * m + 2 * half
            old = largest[2 * m + half]
            new = largest_of_row(s, N, first, old)
            shrink = power_of_two(c * old - c * new)
            largest[2 * m + half] = new
            l[2 * m + half] = l[2 * m + half] * shrink + exponentials(s, N, first, c, c * new)
            for n in range(C):
                at = (m * C + n) * 4 + 2 * half
                o[at], o[at + 1] = o[at] * shrink, o[at + 1] * shrink


def shared_bytes(HS, M):
    """q and two stages of k and v."""
    return (16 * M * WARPS + 4 * KEYS) * pitch_of(HS)


def make_forward(HS, M):
    """The kernel for one head size and M fragments of 16 queries a warp."""
    PITCH = pitch_of(HS)
    ROWS = 16 * M  # queries of a warp
    QUERIES = ROWS * WARPS
    C = HS // 8
    LEFT = M * (HS // 16 * 4 + HS % 16 // 4)  # words of q in a lane
    SCORES, OUTPUTS, WORDS, PAIRS = M * N * 4, M * C * 4, M * 4, M * 2
    STAGE = 2 * KEYS * PITCH  # k, then v
    STAGES = QUERIES * PITCH
    BLOCKS = 2 if M == 2 else 3  # on a multiprocessor: at most 255, or 168, registers a thread

    @requires("8.0")
    def kernel(qkv, y, logsumexp, T, width, head_step, part, scale):
        shared = cuda.shared.array(0, "uint8", alignment=128)
        q_tile = shared_address(shared)
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t % WARP), int32(t // WARP)
        head, image, heads = cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.y
        first_query = int32(cuda.blockIdx.x * QUERIES)
        start = image * T * width + head * head_step  # of the head's q; its k is `part` further on
        k_start, v_start = start + part, start + 2 * part

        fetch_rows(q_tile, PITCH, qkv, start + first_query * width, width, T - first_query, QUERIES, HS, t, THREADS)
        fetch_rows(q_tile + STAGES, PITCH, qkv, k_start, width, T, KEYS, HS, t, THREADS)
        fetch_rows(q_tile + (STAGES + KEYS * PITCH), PITCH, qkv, v_start, width, T, KEYS, HS, t, THREADS)
        cp_async_commit()

        q = cuda.local.array(LEFT, "uint32")
        s = cuda.local.array(SCORES, "float32")
        o = cuda.local.array(OUTPUTS, "float32")
        p = cuda.local.array(WORDS, "uint32")
        largest = cuda.local.array(PAIRS, "float32")
        l = cuda.local.array(PAIRS, "float32")
        clear(o, OUTPUTS)
        for i in range(PAIRS):
            largest[i], l[i] = LOWEST, float32(0)
        row_place, chunk_place = by_row(lane, PITCH), by_chunk(lane, PITCH)
        c = float32(scale * LOG2_E)
        stage = int32(STAGES)
        first = int32(0)
        while first < T:
            cp_async_wait(0)  # this thread's part of the tile is there
            cuda.syncthreads()  # so is everybody's, and nobody reads the other stage any more
            ahead = int32(first + KEYS)
            if ahead < T:
                other = q_tile + int32(2 * STAGES + STAGE - stage)
                t_next = opaque(t)
                fetch_rows(other, PITCH, qkv, k_start + ahead * width, width, T - ahead, KEYS, HS, t_next, THREADS)
                fetch_rows(other + KEYS * PITCH, PITCH, qkv, v_start + ahead * width, width, T - ahead, KEYS, HS,
                           t_next, THREADS)
                cp_async_commit()
            if first_query + warp * ROWS < T:  # the warp has queries
                if first == 0:
                    load_left(q, q_tile + int32(warp * ROWS * PITCH + row_place), M, PITCH, HS)

                k_tile = q_tile + stage
                clear(s, SCORES)
                for n in range(0, N, 2):
                    rows = k_tile + n * 8 * PITCH
                    multiply_rows(s, n, N, q, rows + chunk_place, rows + row_place, M, HS)
                if ahead > T:
                    hide_keys(s, M, N, T - first, lane)
                online_softmax(s, o, largest, l, M, C, c)
                v_tile = k_tile + int32(KEYS * PITCH + row_place)
                for n in range(0, N, 2):
                    for m in range(M):
                        pack(p, m, s, (m * N + n) * 4)
                    add_products(o, p, v_tile + n * 8 * PITCH, M, HS)
            stage = int32(2 * STAGES + STAGE - stage)
            first = ahead

        # q's rows are no longer needed by the warp, and no other warp reads them: they take the outputs on their way
        cuda.syncwarp()
        t_end = opaque(t)
        lane_end, warp_end = int32(t_end % WARP), int32(t_end // WARP)
        patch = int32(warp_end * ROWS * PITCH)
        row = int32(first_query + warp_end * ROWS)  # of the warp's first query
        rows_start = (image * heads + head) * T
        for m in range(M):
            above, below = sum_of_row(l[2 * m]), sum_of_row(l[2 * m + 1])
            stash(shared, int32(patch + m * 16 * PITCH), PITCH, o, m, C, float32(1) / above, float32(1) / below,
                  lane_end)
            query = int32(row + 16 * m + lane_end // 4)
            if lane_end % 4 == 0 and query < T:
                logsumexp[rows_start + query] = scale * largest[2 * m] + LN_2 * math.log2(above)
            if lane_end % 4 == 0 and query + 8 < T:
                logsumexp[rows_start + query + 8] = scale * largest[2 * m + 1] + LN_2 * math.log2(below)
        cuda.syncwarp()
        at = ((image * T + row) * heads + head) * HS
        copy_out(shared, patch, PITCH, y, at, int32(heads * HS), int32(T - row), ROWS, HS, lane_end)

    kernel.__name__ = kernel.__qualname__ = f"flash_attention_forward_kernel_v3_{HS}_{QUERIES}"
    return cuda.jit(kernel, launch_bounds=(THREADS, BLOCKS))
