"""Which blocks are critical: means of blocks, their products, and the largest of each row, the same on every engine.

WHAT IT DOES
    totals      sums over all blocks: of H and of (z, sums of k) in the forward, of A and a in the backward
    choose      P of eight blocks of queries and all blocks of keys, a thread a key block; then a warp finds the `count`
                largest of a row. It bisects the count-th largest number bit by bit: how many are at least as large?
                Floats are compared as integers in which the order is that of the floats. Of equal ones the first count.
    transpose   for each block of keys, which blocks of queries have it in their list: a warp looks it up in 32 lists at
                a time, and ballots keep the order
THE SAME ON EVERY ENGINE
    Two nearly equal P that rounding swaps would change the result by far more than rounding. So P is float32 in one
    order of sums everywhere, and its products are rounded by themselves: `product` is not joined with a sum into a
    fused multiply-add. Inputs in float64 are rounded to float32 first.
LAUNCH
    totals: grid (ceil(columns / 128), heads, B), 256 threads for 8 groups of blocks and 32 lanes of 4 columns;
    choose: grid (ceil(N / 8), heads, B), 256 threads, dynamic shared memory 32 N bytes; transpose: grid (ceil(N / 8),
    heads, B), a warp a block of keys.
DETERMINISM
    every sum has one order; lists rise.
COST
    H's total reads N · HS² numbers, choose N² · HS multiply-adds, transpose N² searches: a few percent of the whole.
SOURCE
    reference.py; means and their products: Zhang et al. 2025, arXiv:2509.24006, section 4.
READ NEXT
    simple.py
"""
from typing import NamedTuple

import numpy as np

from ....device import cuda, float32, int32, load4, product, store4, uint32
from ....device.limits import FULL_MASK, WARP
from ....device.tensor_core import word_of

BLOCK = 64  # queries, or keys
RUN = 16  # rows that are summed one after the other; their four sums in pairs
GROUPS = 8  # sums over blocks: every eighth one after the other, then in pairs
COLUMNS = 128  # that a block of threads sums: four a lane
THREADS = 256
ROWS = 8  # blocks of queries, one a warp, of a block of threads that chooses
MAX_HEAD = 72


class Problem(NamedTuple):
    """qkv is (images, T, width); heads of q lie `head_step` apart, k of a head `part` after its q, v as far after that.
    N blocks, `count` of them critical; scale: of scores."""

    T: int
    width: int
    head_step: int
    part: int
    N: int
    count: int
    scale: float


# Reference ------------------------------------------------------------------------------------------------------------

def blocks_of(T):
    return -(-T // BLOCK)


def count_of(topk, N):
    """How many of N blocks are critical: the share `topk` of them, rounded down, at least one."""
    return min(N, max(1, int(topk * N)))


def block_sums(x):
    """The sums over each block's rows of x (T, HS), float32 (N, HS), in the kernel's order."""
    T, HS = x.shape
    N = blocks_of(T)
    filled = np.zeros((N * BLOCK, HS), np.float32)
    filled[:T] = x
    runs = filled.reshape(N, BLOCK // RUN, RUN, HS)
    total = runs[:, :, 0].copy()
    for row in range(1, RUN):
        total += runs[:, :, row]
    return (total[:, 0] + total[:, 1]) + (total[:, 2] + total[:, 3])


def sum_over_blocks(x):
    """The sum over the first axis of x (N, …), float32, in the kernel's order."""
    N = len(x)
    filled = np.zeros((-(-N // GROUPS) * GROUPS, *x.shape[1:]), np.float32)
    filled[:N] = x
    groups = np.zeros((GROUPS, *x.shape[1:]), np.float32)
    for part in filled.reshape(-1, GROUPS, *x.shape[1:]):
        groups += part
    while len(groups) > 1:
        groups = groups[:len(groups) // 2] + groups[len(groups) // 2:]
    return groups[0]


def choose_blocks(q, k, count):
    """The critical blocks of each block of queries, int32 (N, count), rising; q and k (T, HS) of one head."""
    T, HS = q.shape
    N = blocks_of(T)
    sizes = np.full((N, 1), BLOCK, np.float32)
    sizes[-1] = T - (N - 1) * BLOCK
    q_mean, k_sum = block_sums(q) / sizes, block_sums(k)
    k_mean = k_sum / sizes - sum_over_blocks(k_sum) / np.float32(T)
    parts = np.zeros((4, N, N), np.float32)
    for c in range(HS):
        parts[c % 4] += q_mean[:, None, c] * k_mean[None, :, c]
    products = (parts[0] + parts[1]) + (parts[2] + parts[3])
    return np.sort(np.argsort(-products, axis=-1, kind="stable")[:, :count], axis=-1).astype(np.int32)


# Kernels --------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True)
def head_number():
    """(image, head) counted as one."""
    return cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y


@cuda.jit(device=True)
def rows_of_block(block, T):
    """How many tokens it has."""
    return min(BLOCK, T - block * BLOCK)


@cuda.jit(device=True)
def sum_group(x, start, size, group, N):
    """Four neighbouring columns, from x[start], of every eighth block from `group` on; blocks are `size` apart."""
    a, b, c, d = float32(0), float32(0), float32(0), float32(0)
    for j in range(group, N, GROUPS):
        v = load4(x, start + j * size)
        a, b, c, d = a + v[0], b + v[1], c + v[2], d + v[3]
    return a, b, c, d


@cuda.jit
def sla_totals_kernel(x, small, total, small_total, N, size, small_size):
    """Sums over the N blocks of x (B, heads, N, size) and small (B, heads, N, small_size): both float32 (B, heads, …).
    Both sizes are multiples of 4."""
    sums = cuda.shared.array((GROUPS, COLUMNS), float32)
    lane, group = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
    parts = (size + COLUMNS - 1) // COLUMNS
    of_x = cuda.blockIdx.x < parts
    column = (cuda.blockIdx.x if of_x else cuda.blockIdx.x - parts) * COLUMNS + 4 * lane
    a, b, c, d = float32(0), float32(0), float32(0), float32(0)
    if of_x and column < size:
        a, b, c, d = sum_group(x, head_number() * N * size + column, size, group, N)
    elif not of_x and column < small_size:
        a, b, c, d = sum_group(small, head_number() * N * small_size + column, small_size, group, N)
    sums[group, lane], sums[group, WARP + lane] = a, b
    sums[group, 2 * WARP + lane], sums[group, 3 * WARP + lane] = c, d
    half = GROUPS // 2
    while half > 0:
        cuda.syncthreads()
        if group < half:
            for i in range(4):
                sums[group, i * WARP + lane] += sums[group + half, i * WARP + lane]
        half //= 2
    if group == 0:  # the last sums were its own
        a, b, c, d = sums[0, lane], sums[0, WARP + lane], sums[0, 2 * WARP + lane], sums[0, 3 * WARP + lane]
        if of_x and column < size:
            store4(total, head_number() * size + column, a, b, c, d)
        elif not of_x and column < small_size:
            store4(small_total, head_number() * small_size + column, a, b, c, d)


@cuda.jit(device=True)
def rising(x):
    """A float32 as a uint32 in which larger numbers are larger."""
    word = word_of(x)
    return uint32(word ^ (uint32(0xFFFFFFFF) if word & uint32(0x80000000) else uint32(0x80000000)))


@cuda.jit(device=True)
def store_products(keys, q_mean, k_sums, k_mean, first, j, problem, HS):
    """P of the blocks of queries from `first` on, eight or as many as there are, with block j of keys: keys[row, j]."""
    N, head = problem.N, head_number()
    parts = cuda.local.array((ROWS, 4), float32)
    for row in range(ROWS):
        for i in range(4):
            parts[row, i] = float32(0)
    size = float32(rows_of_block(j, problem.T))
    for c in range(0, HS, 4):
        s = load4(k_sums, (head * N + j) * 2 * HS + HS + c)
        k = s[0] / size - k_mean[c], s[1] / size - k_mean[c + 1], s[2] / size - k_mean[c + 2], s[3] / size - k_mean[
            c + 3]
        for row in range(ROWS):
            q = load4(q_mean, (head * N + min(first + row, N - 1)) * HS + c)
            parts[row, 0] += product(q[0], k[0])
            parts[row, 1] += product(q[1], k[1])
            parts[row, 2] += product(q[2], k[2])
            parts[row, 3] += product(q[3], k[3])
    for row in range(ROWS):
        keys[row * N + j] = rising((parts[row, 0] + parts[row, 1]) + (parts[row, 2] + parts[row, 3]))


@cuda.jit(device=True)
def how_many(keys, start, N, least, lane):
    """Of a warp's row how many are at least so large."""
    found = int32(0)
    for j in range(lane, N, WARP):
        found += int32(1) if keys[start + j] >= least else int32(0)
    for step in (16, 8, 4, 2, 1):
        found += cuda.shfl_xor_sync(FULL_MASK, found, step)
    return found


@cuda.jit
def sla_choose_kernel(q_mean, k_sums, k_total, critical, problem, HS):
    """critical (B, heads, N, count) from q_mean (B, heads, N, HS), k_sums (B, heads, N, 2, HS), whose second half sums
    k, and k_total, the same over all blocks."""
    keys = cuda.shared.array(0, "uint32")
    k_mean = cuda.shared.array(MAX_HEAD, float32)
    N, count, t = problem.N, problem.count, cuda.threadIdx.x
    lane, warp, first = t % WARP, t // WARP, cuda.blockIdx.x * ROWS
    if t < HS:
        k_mean[t] = k_total[head_number() * 2 * HS + HS + t] / float32(problem.T)
    cuda.syncthreads()
    for j in range(t, N, THREADS):
        store_products(keys, q_mean, k_sums, k_mean, first, j, problem, HS)
    cuda.syncthreads()
    if first + warp < N:
        start = warp * N
        least = uint32(0)  # the largest number that `count` of them reach: the count-th largest
        for bit in range(31, -1, -1):
            higher = uint32(least | uint32(uint32(1) << uint32(bit)))
            if how_many(keys, start, N, higher, lane) >= count:
                least = higher
        spare = count  # how many of those that equal it are taken, from the left
        if least < uint32(0xFFFFFFFF):
            spare -= how_many(keys, start, N, uint32(least + uint32(1)), lane)
        to = ((head_number() * N) + first + warp) * count
        before = uint32((uint32(1) << uint32(lane)) - uint32(1))
        for j in range(lane, N + lane, WARP):
            inside = j < N
            key = keys[start + min(j, N - 1)]
            equal = cuda.ballot_sync(FULL_MASK, inside and key == least)
            takes = inside and (key > least or key == least and cuda.popc(uint32(equal & before)) < spare)
            taken = cuda.ballot_sync(FULL_MASK, takes)
            if takes:
                critical[to + cuda.popc(uint32(taken & before))] = j
            to += cuda.popc(taken)
            spare -= min(spare, cuda.popc(equal))


@cuda.jit(device=True)
def holds(critical, start, count, j):
    """Whether a rising list holds j."""
    low, high = int32(0), int32(count)
    while low < high:  # the first that is at least j lies in low … high
        middle = int32((low + high) // 2)
        if critical[start + middle] < j:
            low = int32(middle + 1)
        else:
            high = middle
    return low < count and critical[start + min(low, count - 1)] == j


@cuda.jit
def sla_transpose_kernel(critical, lists, counts, N, count):
    """lists (B, heads, N, N): for each block of keys the blocks of queries for which it is critical, rising; counts (B,
    heads, N): how many. What lies behind them is not written."""
    lane, j = cuda.threadIdx.x % WARP, cuda.blockIdx.x * (THREADS // WARP) + cuda.threadIdx.x // WARP
    if j < N:
        head = head_number()
        start = (head * N + j) * N
        before = uint32((uint32(1) << uint32(lane)) - uint32(1))
        found = int32(0)
        for i in range(lane, N + lane, WARP):
            has = i < N and holds(critical, (head * N + min(i, N - 1)) * count, count, j)
            mask = cuda.ballot_sync(FULL_MASK, has)
            if has:
                lists[start + found + cuda.popc(uint32(mask & before))] = i
            found += cuda.popc(mask)
        if lane == 0:
            counts[head * N + j] = found
