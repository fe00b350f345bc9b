"""Which blocks are critical: means of blocks, their products, and the largest of each row, the same
on every engine.

WHAT IT DOES
    totals      sums over all blocks: of H and of (z, sums of k) in the forward, of A and a in the backward
    choose      P of eight blocks of queries and all blocks of keys, a thread a block of keys, whose sums come through
                shared memory, 32 channels at a time; then a warp finds the `count` largest of a
                row. It bisects the count-th largest number bit by bit: how many are at least as
                large? If they are `count`, it is done. Floats are compared as integers in which the
                order is that of the floats, the first 256 in registers. Of equal ones the first
                count.
    transpose   for each block of keys, which blocks of queries have it in their list: a warp looks it up in 32 lists at
                a time, and ballots keep the order
THE SAME ON EVERY ENGINE
    Two nearly equal P that rounding swaps would change the result by far more than rounding. So P
    is float32 in one order of sums everywhere, and its products are rounded by themselves:
    `product` is not joined with a sum into a fused multiply-add. Inputs in float64 are rounded to
    float32 first. A sum of 64 rows is multiplied by 1 / 64 instead of divided: that rounds the same
    number, so gives the same.
LAUNCH
    totals: grid (ceil(columns / 128), heads, B), 256 threads for 8 groups of blocks and 32 lanes of
    4 columns;
    choose: grid (ceil(N / 8), heads, B), 256 threads, shared memory 39 KiB and, dynamic, 32 N
    bytes;
    transpose: grid (ceil(N / 8), heads, B), a warp a block of keys.
DETERMINISM
    every sum has one order; lists rise.
COST
    H's total reads N · HS² numbers, choose N² · HS products and sums, N · HS numbers for every
    eight blocks of queries and 60 instructions of a warp for each bit and row, transpose N²
    searches: a few percent of the whole.
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
AHEAD = 8  # blocks that a thread loads at once
COLUMNS = 128  # that a block of threads sums: four a lane
THREADS = 256
ROWS = 8  # blocks of queries, one a warp, of a block of threads that chooses
MAX_HEAD = 72
CHANNELS = 32  # of a tile of means in shared memory, of which each thread takes a row
PITCH = CHANNELS + 4  # numbers from a row to the next: an odd number of 16 bytes
EIGHTH = CHANNELS // 4  # threads that fetch a row
# of it, of q's means and of the mean of k
TILE_BYTES = 4 * (THREADS * PITCH + (ROWS + 1) * MAX_HEAD)
HELD = 8  # numbers of a row in a lane's registers


class SlaProblem(NamedTuple):
    """qkv is (images, T, width); heads of q are `head_step` apart, k of a head `part` after its q,
    v as far after that. N blocks, `count` of them critical; scale: of scores; rest: 1 where the
    linear part leaves the critical blocks out, 0 where it takes all keys."""

    T: int
    width: int
    head_step: int
    part: int
    N: int
    count: int
    scale: float
    rest: int = 1


# Reference ----------------------------------------------------------------------------------------


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
        groups = groups[: len(groups) // 2] + groups[len(groups) // 2 :]
    return groups[0]


def choose_blocks(q, k, count):
    """The critical blocks of each block of queries, int32 (N, count), rising; q and k (T, HS) of
    one head."""
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
    return np.sort(np.argsort(-products, axis=-1, kind="stable")[:, :count], axis=-1).astype(
        np.int32
    )


def bits_left(critical):
    """The complement of the lists critical (…, N, count), a bit for each block of keys: int32 (…,
    N, ceil(N / 32))."""
    N = critical.shape[-2]
    left = np.ones((*critical.shape[:-1], -(-N // WARP) * WARP), np.uint8)
    np.put_along_axis(left, critical, 0, -1)
    return np.packbits(left, axis=-1, bitorder="little").view(np.int32)


# Kernels ------------------------------------------------------------------------------------------


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
    """Four neighbouring columns, from x[start], of every eighth block from `group` on; blocks are
    `size` apart. Eight are requested before the first is added."""
    a, b, c, d = float32(0), float32(0), float32(0), float32(0)
    ahead = cuda.local.array((AHEAD, 4), float32)
    whole = N // (AHEAD * GROUPS) * (AHEAD * GROUPS)
    for first in range(group, whole, AHEAD * GROUPS):
        for i in range(AHEAD):
            v = load4(x, start + (first + i * GROUPS) * size)
            ahead[i, 0], ahead[i, 1], ahead[i, 2], ahead[i, 3] = v[0], v[1], v[2], v[3]
        for i in range(AHEAD):
            a, b, c, d = a + ahead[i, 0], b + ahead[i, 1], c + ahead[i, 2], d + ahead[i, 3]
    for j in range(whole + group, N, GROUPS):
        v = load4(x, start + j * size)
        a, b, c, d = a + v[0], b + v[1], c + v[2], d + v[3]
    return a, b, c, d


@cuda.jit(launch_bounds=(THREADS, 3))
def sla_totals_kernel(x, small, total, small_total, N, size, small_size):
    """Sums over the N blocks of x (B, heads, N, size) and small (B, heads, N, small_size): both
    float32 (B, heads, …). Both sizes are multiples of 4."""
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
        a, b, c, d = (
            sums[0, lane],
            sums[0, WARP + lane],
            sums[0, 2 * WARP + lane],
            sums[0, 3 * WARP + lane],
        )
        if of_x and column < size:
            store4(total, head_number() * size + column, a, b, c, d)
        elif not of_x and column < small_size:
            store4(small_total, head_number() * small_size + column, a, b, c, d)


@cuda.jit(device=True)
def rising(x):
    """A float32 as a uint32 in which larger numbers are larger."""
    word = word_of(x)
    return uint32(word ^ (uint32(0xFFFFFFFF) if word & uint32(0x80000000) else uint32(0x80000000)))


@cuda.jit(device=True, forceinline=True)
def centred(sums, size, mean):
    """The mean of four columns of a block of keys, less the mean of all; multiplied by 1 / 64 where
    that is exact."""
    if size == BLOCK:
        share = float32(1 / BLOCK)
        return (
            product(sums[0], share) - mean[0],
            product(sums[1], share) - mean[1],
            product(sums[2], share) - mean[2],
            product(sums[3], share) - mean[3],
        )
    size = float32(size)
    return (
        sums[0] / size - mean[0],
        sums[1] / size - mean[1],
        sums[2] / size - mean[2],
        sums[3] / size - mean[3],
    )


@cuda.jit(device=True, forceinline=True)
def fetch_keys(tile, k_sums, first, channel, problem, HS):
    """The sums of the blocks of keys from `first` on, 256 or as many as there are, into a tile: the
    32 channels from `channel` on, a row of them by eight threads, each of which loads four rows
    before it stores the first."""
    t, exist = int32(cuda.threadIdx.x), int32(problem.N - first)
    c, apart, step = int32(4 * (t % EIGHTH)), int32(THREADS // EIGHTH), int32(2 * HS)
    at, last = (head_number() * problem.N + first) * step + HS + channel + c, int32(exist - 1)
    if channel + c < HS:
        for i in range(int32(t // EIGHTH), min(int32(THREADS), exist), int32(4 * apart)):
            j, k, l = int32(i + apart), int32(i + 2 * apart), int32(i + 3 * apart)
            a, b = (
                load4(k_sums, at + int32(i * step)),
                load4(k_sums, at + int32(min(j, last) * step)),
            )
            d, e = (
                load4(k_sums, at + int32(min(k, last) * step)),
                load4(k_sums, at + int32(min(l, last) * step)),
            )
            for row, v in ((i, a), (j, b), (k, d), (l, e)):
                if row < exist:
                    store4(tile, int32(row * PITCH + c), v[0], v[1], v[2], v[3])


@cuda.jit(device=True, forceinline=True)
def add_channels(parts, tile, q, k_mean, t, size, channel, channels):
    """parts[row, i] += the products of every fourth channel from i on: eight rows of q with row t
    of the tile, the sums of `size` keys."""
    for c in range(int32(0), int32(channels), int32(4)):
        k = centred(load4(tile, int32(t * PITCH + c)), size, load4(k_mean, int32(channel + c)))
        for row in range(ROWS):
            v = load4(q, int32(row * MAX_HEAD + channel + c))
            parts[row, 0] += product(v[0], k[0])
            parts[row, 1] += product(v[1], k[1])
            parts[row, 2] += product(v[2], k[2])
            parts[row, 3] += product(v[3], k[3])


@cuda.jit(device=True, forceinline=True)
def store_products(keys, tile, q, k_sums, k_mean, problem, HS):
    """P of eight blocks of queries and all blocks of keys: keys[row, j]."""
    t, N = int32(cuda.threadIdx.x), int32(problem.N)
    parts = cuda.local.array((ROWS, 4), float32)
    for first in range(int32(0), N, int32(THREADS)):
        for row in range(ROWS):
            for i in range(4):
                parts[row, i] = float32(0)
        for channel in range(int32(0), int32(HS), int32(CHANNELS)):
            cuda.syncthreads()  # q and the mean are there, and the tile is no longer read
            fetch_keys(tile, k_sums, first, channel, problem, HS)
            cuda.syncthreads()
            if first + t < N:
                size = rows_of_block(first + t, problem.T)
                add_channels(
                    parts,
                    tile,
                    q,
                    k_mean,
                    t,
                    size,
                    channel,
                    min(int32(HS - channel), int32(CHANNELS)),
                )
        if first + t < N:
            for row in range(ROWS):
                keys[row * N + first + t] = rising(
                    (parts[row, 0] + parts[row, 1]) + (parts[row, 2] + parts[row, 3])
                )


@cuda.jit(device=True, forceinline=True)
def how_many(held, keys, start, N, least, lane):
    """The number of a warp's row's elements that are at least `least`, which is not 0. The first
    256 are held in registers."""
    found = int32(0)
    for i in range(HELD):
        found = int32(found + (int32(1) if held[i] >= least else int32(0)))
    for j in range(int32(lane + HELD * WARP), N, int32(WARP)):
        found = int32(found + (int32(1) if keys[start + j] >= least else int32(0)))
    for step in (16, 8, 4, 2, 1):
        found = int32(found + cuda.shfl_xor_sync(FULL_MASK, found, step))
    return found


@cuda.jit(device=True, forceinline=True)
def threshold(keys, start, N, count, lane):
    """(least, spare): the `count` largest are those above `least`, and of those that equal it the
    first `spare`."""
    held = cuda.local.array(HELD, "uint32")
    for i in range(HELD):
        j = int32(lane + i * WARP)
        held[i] = keys[start + j] if j < N else uint32(0)
    # the largest number that `count` of them reach: the count-th largest
    least, spare = uint32(0), int32(count)
    for bit in range(int32(31), int32(-1), int32(-1)):
        higher = uint32(least | uint32(uint32(1) << uint32(bit)))
        found = how_many(held, keys, start, N, higher, lane)
        if found >= count:
            least = higher
        if found == count:  # these are they
            return uint32(higher - uint32(1)), int32(0)
    if least < uint32(0xFFFFFFFF):
        spare = int32(count - how_many(held, keys, start, N, uint32(least + uint32(1)), lane))
    return least, spare


@cuda.jit(launch_bounds=(THREADS, 3))
def sla_choose_kernel(q_mean, k_sums, k_total, critical, left, problem, HS):
    """critical (B, heads, N, count) and left, its `bits_left` (ones where the linear part takes all
    keys), from q_mean (B, heads, N, HS), k_sums (B, heads, N, 2, HS), whose second half sums k, and
    k_total, the same over all blocks."""
    keys = cuda.shared.array(0, "uint32")
    tile = cuda.shared.array((THREADS, PITCH), float32, alignment=16)
    q = cuda.shared.array((ROWS, MAX_HEAD), float32, alignment=16)
    k_mean = cuda.shared.array(MAX_HEAD, float32, alignment=16)
    N, count, t = int32(problem.N), int32(problem.count), int32(cuda.threadIdx.x)
    lane, warp, first = int32(t % WARP), int32(t // WARP), int32(cuda.blockIdx.x * ROWS)
    if t < HS:
        k_mean[t] = k_total[head_number() * 2 * HS + HS + t] / float32(problem.T)
    for c in range(lane, int32(HS), int32(WARP)):
        q[warp, c] = q_mean[(head_number() * N + min(first + warp, N - 1)) * HS + c]
    store_products(keys, tile, q, k_sums, k_mean, problem, HS)
    cuda.syncthreads()
    if first + warp < N:
        start = int32(warp * N)
        least, spare = threshold(keys, start, N, count, lane)
        row = head_number() * N + first + warp
        to, word = row * count, row * ((N + WARP - 1) // WARP)
        before = uint32((uint32(1) << uint32(lane)) - uint32(1))
        for j in range(lane, int32(N + lane), int32(WARP)):
            inside = j < N
            key = keys[start + min(j, N - 1)]
            equal = cuda.ballot_sync(FULL_MASK, inside and key == least)
            takes = inside and (
                key > least or key == least and int32(cuda.popc(uint32(equal & before))) < spare
            )
            taken = cuda.ballot_sync(FULL_MASK, takes)
            if takes:
                critical[to + cuda.popc(uint32(taken & before))] = j
            if lane == 0:
                left[word] = ~taken if problem.rest > 0 else int32(-1)
            word += 1
            to += cuda.popc(taken)
            spare = int32(spare - min(spare, int32(cuda.popc(equal))))


@cuda.jit(device=True)
def holds(critical, start, count, j):
    """Whether a rising list holds j."""
    low, high = int32(0), int32(count)
    while low < high:  # the first that is at least j is in low … high
        middle = int32((low + high) // 2)
        if critical[start + middle] < j:
            low = int32(middle + 1)
        else:
            high = middle
    return low < count and critical[start + min(low, count - 1)] == j


@cuda.jit
def sla_transpose_kernel(critical, lists, counts, N, count):
    """lists (B, heads, N, N): for each block of keys the blocks of queries for which it is
    critical, rising; counts (B, heads, N): how many. Elements behind them are not written."""
    lane, j = (
        cuda.threadIdx.x % WARP,
        cuda.blockIdx.x * (THREADS // WARP) + cuda.threadIdx.x // WARP,
    )
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
