"""Tiles split along K in one launch (stream-K fix-up): the last-arriving block reduces the
partials.

A consumer warpgroup stores its part, one half of the rows, in the order of its registers, and
counts it. The last-arriving one adds up all parts, in their order, and continues with the epilogue.
There is no second launch, and no block waits for another. A fence on both sides of the count lets
it see the others' parts; `cuda.atomic.inc` wraps, so the counter is 0 again for the next launch.

SOURCE
    group_schedule.py; CUDA programming guide, "Memory Fence Functions", whose example is a last
    block that adds up the others' sums.
READ NEXT
    launcher.py
"""

from ....device import cuda, device_inline, float32, int32, load4, store4, uint32
from ....device.eight import array_of, fence
from ....device.limits import WARPGROUP
from ....device.mbarrier import bar_sync
from .group_schedule import of_product, parts_of
from .layout import ACCUMULATORS, BM, BN, Extent, GemmArrays, Target


@device_inline
def add_part(acc, parts, at):
    """acc += a warpgroup's part of a tile, of which this thread's numbers begin at `at`: all loads
    may be under way."""
    for i in range(ACCUMULATORS // 4):
        v0, v1, v2, v3 = load4(parts, at + 4 * WARPGROUP * i)
        acc[4 * i] += v0
        acc[4 * i + 1] += v1
        acc[4 * i + 2] += v2
        acc[4 * i + 3] += v3


@device_inline
def join_parts(acc, tile, consumer, parts, counters, staging, group):
    """Write a warpgroup's part of a split tile, and count it. Returns whether it is the
    last-arriving one, which then has the sum of all parts in its accumulators, added up in their
    order."""
    thread, barrier = int32(cuda.threadIdx.x % WARPGROUP), uint32(consumer + 1)
    number, count = int32(tile.number - group.whole), parts_of(tile.number, group)
    size = int32(BM * BN // 2)  # of a warpgroup's part
    first = int32((2 * number + consumer) * group.parts * size + 4 * thread)
    at = int32(first + tile.part * size)
    for i in range(ACCUMULATORS // 4):
        store4(
            parts,
            at + 4 * WARPGROUP * i,
            acc[4 * i],
            acc[4 * i + 1],
            acc[4 * i + 2],
            acc[4 * i + 3],
        )
    bar_sync(barrier, uint32(WARPGROUP))
    if thread == 0:
        fence()  # a warpgroup that sees this count also sees what this one has written
        before = cuda.atomic.inc(counters, int32(2 * number + consumer), uint32(count - 1))
        fence()  # nothing that is read from here on is older than the count
        staging.biases[staging.biases_at] = float32(1) if int32(before) == count - 1 else float32(0)
    bar_sync(barrier, uint32(WARPGROUP))
    last = staging.biases[staging.biases_at] == float32(1)
    if last:
        part, step = int32(1 - tile.part), int32(2)
        if count > 2:  # of two the sum is the same in either order
            for i in range(ACCUMULATORS):
                acc[i] = float32(0)
            part, step = int32(0), int32(1)
        while part < count:
            add_part(acc, parts, int32(first + part * size))
            part = int32(part + step)
    return last


@device_inline
def complete_tile(acc, tile, consumer, staging, target):
    """Whether a warpgroup has a tile's whole sum, as it was not split or is the last to have joined
    its part."""
    group, arrays = target.work, target.arrays
    return tile.number < group.whole or join_parts(
        acc, tile, consumer, arrays.partials, arrays.counters, staging, group
    )


@device_inline
def target_of_product(tile, target):
    """The `Target` of a tile's product."""
    c, group = array_of(tile.product, target.arrays.c), target.work
    size = Extent(of_product(tile.product, group.M), of_product(tile.product, group.N))
    return Target(int32(0), target.maps, GemmArrays(c, c, c, c), size, target.epilogue)
