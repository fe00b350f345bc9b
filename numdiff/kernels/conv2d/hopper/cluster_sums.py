"""Sums of a 3 × 3 weight gradient: from registers to dweight, through a cluster's shared memory, in
a fixed order.

The blocks of a cluster have summed different pixels of one tile. Each leaves its accumulators in
its shared memory, where the pixels were, and adds up one share of the tile from the shared memory
of all. Where one cluster has all the pixels, that is the result. Otherwise reduce/second_pass.py
adds the clusters' sums.
A VECTOR is four neighbouring sums of a thread, 16 bytes. wgmma gives a thread two of row n and two
    of row n + 8; `four_neighbours` makes four of one row of them, in pairs of lanes. A thread has
    CW / 8 vectors for each of its three taps; left: channels from the tile's first, none beyond a
    row.

SOURCE
    device/cluster.py; emulator/wgmma_layouts.py says which sums a thread has.
READ NEXT
    weight_gradient_3x3_layout.py
"""

from typing import NamedTuple

from ....device import cuda, device_inline, float32, int32, store4, uint32
from ....device.cluster import cluster_address, cluster_sync, cluster_sync_relaxed, load_cluster_4
from ....device.common import load4_or_zeros
from ....device.limits import FULL_MASK
from ....device.mbarrier import smem_u32
from ....device.specialise import Constant

TILE = 64  # channels of dy
SIZE, TAPS = 3, 9
CONSUMERS = 3 * 128  # threads that have sums
AT_ONCE = 3  # vectors that a thread adds up at a time: that many loads are in flight

CW = Constant()  # channels of x in a tile
VECTORS = Constant(lambda CW: 3 * CW // 8)  # of a thread


class Share(NamedTuple):
    """A thread's sums, and those of them that its block will add up.

    at: of its first in dweight, flat; tap_row: from there to the next tap's; left: channels from
    the tile's first, none beyond a row; first, last: its block's vectors; odd: whether the lane has
    row n + 8 of its pair
    """

    at: int
    tap_row: int
    left: int
    first: int
    last: int
    odd: int


# A thread's sums ----------------------------------------------------------------------------------


@device_inline
def four_neighbours(a, odd):
    """A thread has two sums of row n and two of row n + 8: in pairs of lanes, four neighbours of
    one row instead.

    Applied twice, it changes nothing.
    """
    a0, a1, a2, a3 = a
    b0 = cuda.shfl_xor_sync(FULL_MASK, a0 if odd else a2, 1)
    b1 = cuda.shfl_xor_sync(FULL_MASK, a1 if odd else a3, 1)
    return b0 if odd else a0, b1 if odd else a1, a2 if odd else b0, a3 if odd else b1


@device_inline
def vector_of(acc, v):
    """Vector v of a thread's accumulators."""
    return acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3]


@device_inline
def share_of(thread, tap_column, own, share, C, N):
    """The `Share` of a thread (0 … 127) of the warpgroup that has this column of taps; share:
    vectors of a block."""
    odd = thread & 1
    n = int32(own.line * TILE + (thread >> 5) * 16 + ((thread & 31) >> 2) + odd * 8)
    first_c = int32(own.column * CW)
    at = int32(n * (TAPS * C) + tap_column * C + first_c + (thread & 2) * 2)
    left = int32(C - first_c if n < N else 0)
    tap_row = int32(SIZE * C)
    first = int32(min(own.rank * share, VECTORS))
    return Share(at, tap_row, left, first, int32(min(first + share, VECTORS)), odd)


@device_inline
def read_tap(tap, dweight, at, acc, left, first, last, odd):
    """The initial values of a thread's sums of one of its taps: of vectors first … last - 1,
    dweight.

    left: channels from the tile's first, none beyond a row
    """
    for j in range(CW // 8):
        v = tap * (CW // 8) + j
        sums = load4_or_zeros(dweight, at + 8 * j, 8 * j < left and v >= first and v < last)
        acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3] = four_neighbours(sums, odd)


@device_inline
def write_tap(tap, out, at, acc, left, odd):
    """A thread's sums of one of its taps."""
    for j in range(CW // 8):
        sums = four_neighbours(vector_of(acc, tap * (CW // 8) + j), odd)
        if 8 * j < left:
            store4(out, at + 8 * j, *sums)


@device_inline
def read_sums(acc, dweight, mine, left):
    """The initial values of a thread's sums: those that its block will add up from dweight, all
    others from 0."""
    read_tap(0, dweight, mine.at, acc, left, mine.first, mine.last, mine.odd)
    read_tap(1, dweight, mine.at + mine.tap_row, acc, left, mine.first, mine.last, mine.odd)
    read_tap(2, dweight, mine.at + 2 * mine.tap_row, acc, left, mine.first, mine.last, mine.odd)


@device_inline
def write_sums(out, at, acc, mine):
    """All of a thread's sums, where its block is alone."""
    write_tap(0, out, at, acc, mine.left, mine.odd)
    write_tap(1, out, at + mine.tap_row, acc, mine.left, mine.odd)
    write_tap(2, out, at + 2 * mine.tap_row, acc, mine.left, mine.odd)


# In a cluster -------------------------------------------------------------------------------------


@device_inline
def four_of(address, exists):
    """Four sums of a block of the cluster, or zeros."""
    a0 = a1 = a2 = a3 = float32(0)
    if exists:
        a0, a1, a2, a3 = load_cluster_4(address)
    return a0, a1, a2, a3


@device_inline
def leave_sums(sums, consumer, acc):
    """All of a thread's sums go to its block's shared memory."""
    for v in range(VECTORS):
        store4(sums, 4 * (v * CONSUMERS + consumer), *vector_of(acc, v))


@device_inline
def write_vector(v, out, at, mine, sums):
    """A thread's vector number v, where there is one."""
    tap = v // (CW // 8)
    c = (v - tap * (CW // 8)) * 8
    if v < mine.last and c < mine.left:
        store4(out, at + int32(tap * mine.tap_row + c), *sums)


@device_inline
def add_up(place, rank, blocks, out, at, mine):
    """out = the sums of all blocks of the cluster, of a thread's vectors of the block's share.

    Each block begins with its own sums: if all began with the first block's, they would queue for
    its memory.
    """
    for begin in range(mine.first, mine.last, AT_ONCE):
        s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = u0 = u1 = u2 = u3 = float32(0)
        here = place + uint32(begin) * uint32(16 * CONSUMERS)
        for k in range(blocks):
            other = uint32(rank + k if rank + k < blocks else rank + k - blocks)
            address = cluster_address(here, other)
            a0, a1, a2, a3 = load_cluster_4(address)
            b0, b1, b2, b3 = four_of(address + uint32(16 * CONSUMERS), begin + 1 < mine.last)
            c0, c1, c2, c3 = four_of(address + uint32(32 * CONSUMERS), begin + 2 < mine.last)
            s0, s1, s2, s3 = s0 + a0, s1 + a1, s2 + a2, s3 + a3
            t0, t1, t2, t3 = t0 + b0, t1 + b1, t2 + b2, t3 + b3
            u0, u1, u2, u3 = u0 + c0, u1 + c1, u2 + c2, u3 + c3
        write_vector(begin, out, at, mine, four_neighbours((s0, s1, s2, s3), mine.odd))
        write_vector(begin + 1, out, at, mine, four_neighbours((t0, t1, t2, t3), mine.odd))
        write_vector(begin + 2, out, at, mine, four_neighbours((u0, u1, u2, u3), mine.odd))


@device_inline
def add_bias(bias_sums, bias_out, own, N, blocks, has_bias):
    """The producer's warpgroup in a cluster: warp 1 of the first block adds up all blocks' sums of
    dy."""
    cluster_sync()  # all sums are there
    four = int32(4 * (int32(cuda.threadIdx.x) - 32))
    n = int32(own.line * TILE + four)
    if has_bias and own.column == 0 and own.rank == 0 and four >= 0 and four < TILE and n < N:
        place = smem_u32(bias_sums) + uint32(4 * four)
        s0, s1, s2, s3 = load_cluster_4(place)
        for other in range(int32(1), blocks):
            a0, a1, a2, a3 = load_cluster_4(cluster_address(place, uint32(other)))
            s0, s1, s2, s3 = s0 + a0, s1 + a1, s2 + a2, s3 + a3
        store4(bias_out, own.group * N + n, s0, s1, s2, s3)
    cluster_sync_relaxed()  # all reads are complete
