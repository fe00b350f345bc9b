"""The gradients of up to four weights in one launch of Hopper's matmul, rung 6.

    C_p (M_p, N_p) = or += A_pᵀ · B_p        A_p (K, M_p), B_p (K, N_p), 16 bits; C_p float32
    row_sums_p (M_p,) += A_p summed over K

WHY IT PAYS
    A DiT-S/2's four have 18, 6, 24 and 24 tiles of 128 × 192 for 132 multiprocessors. One by one,
    each is cut along K into 6 to 15 slices, whose float32 parts a second pass adds up. Together
    they have 108 of 128 × 128, and none is cut. A B/2's have 288 of 128 × 192: 264 are multiplied
    whole, in two waves, and 24 are cut. Where tiles nearly fill the waves that they need, as XL/2's
    648 do, none is cut (`choose`).
TILES THAT ARE CUT
    hopper/group_schedule.py says where, and hopper/parts.py how the last-arriving block reduces the
    partials.
    The row sums, whose steps along K the tiles of a row share, are added up by another launch
    (reduce/second_pass.py).
DETERMINISM
    as hopper/kernel.py and hopper/group_schedule.py: every order is fixed by the sizes and the
    number of multiprocessors, whichever block is the last.
SOURCE
    as hopper/group_schedule.py and hopper/parts.py.
READ NEXT
    linear/gradients.py
"""

import functools
import itertools

import numpy as np

from ...device import empty, lasting, launch, upload
from ...device.half import in_bfloat16
from ...device.limits import MULTIPROCESSORS
from ...device.threads import kept
from ..reduce.second_pass import Sum, add_parts
from .choice import (
    HALF_SECOND_PASS,
    HALF_TILES,
    PARTIALS_A_NS,
    START_NS,
    WRITTEN_A_NS,
)
from .hopper.group_schedule import NEVER, PRODUCTS, GemmGroup, count_parts, cut, longest
from .hopper.kernel import GROUP_KERNELS
from .hopper.launcher import map_of
from .hopper.layout import BK, BM, THREADS, GemmEpilogue, GemmMaps, GroupArrays, shared_bytes
from .hopper.row_sums import WRITE_ROW_SUMS
from .split_half import unused

WIDTHS = tuple(GROUP_KERNELS)  # of tiles
SHORTEST = 8  # steps of a slice, of BK = 64 each
OF_CUT = 1.1  # measured over estimated time of launches with tiles that are cut
# of the tiles: where more are cut, launches took up to half as long again as estimated
MOST_CUT = 1 / 8
# at least: two for each tile that is cut, of which there are fewer than multiprocessors
COUNTERS = 4 * MULTIPROCESSORS


# Launcher -----------------------------------------------------------------------------------------


def tiles_of(sizes, width):
    """[(rows, columns)]: how many tiles each product of these sizes (M, N) has."""
    return [(-(-M // BM), -(-N // width)) for M, N in sizes]


@functools.lru_cache(maxsize=4096)
def choose(sizes, K, multiprocessors):
    """(width of tiles, `Cut`, ns) with the lowest estimate for products of these sizes (M, N); few
    tiles are cut."""
    choices = []
    for width, splits in itertools.product(WIDTHS, (False, True)):
        tiles = sum(rows * columns for rows, columns in tiles_of(sizes, width))
        made = cut(tiles, -(-K // BK), multiprocessors, SHORTEST, splits)
        if tiles - made.whole <= MOST_CUT * tiles:
            choices.append((width, made, estimate(sizes, K, multiprocessors, width, made)))
    return min(choices, key=lambda found: found[2])


def estimate(sizes, K, multiprocessors, width, made):
    """The time of a launch in ns, by the model of choice.py."""
    tiles, k_tiles = sum(rows * columns for rows, columns in tiles_of(sizes, width)), -(-K // BK)
    step, results = HALF_TILES[6][BM, width]
    results += 2 * BM * width / WRITTEN_A_NS  # float32
    ns = START_NS[6] + -(-made.whole // multiprocessors) * (k_tiles * step + results)
    # a share has two parts, or three; then as long as a second pass without its launch
    if made.whole < tiles:
        ns += longest(made) * step + 2 * results + HALF_SECOND_PASS / 2
        ns += 4 * count_parts(made, tiles) * BM * width / PARTIALS_A_NS
        ns *= OF_CUT
    return ns


def four(numbers, filler):
    """A tuple of PRODUCTS numbers, or arrays: those given, then `filler`."""
    return *numbers, *[filler] * (PRODUCTS - len(numbers))


def group_of(sizes, K, width, made):
    """(`GemmGroup`, how many float32 the row sums take)."""
    tiles = tiles_of(sizes, width)
    starts = [0, *itertools.accumulate(rows * columns for rows, columns in tiles)]
    sums = [
        0,
        *itertools.accumulate(
            made.parts * columns * M for (M, _), (_, columns) in zip(sizes, tiles, strict=True)
        ),
    ]
    count = len(sizes)
    return GemmGroup(
        four([M for M, _ in sizes], 0),
        four([N for _, N in sizes], 0),
        four([m for m, _ in tiles], 0),
        four([n for _, n in tiles], 1),
        four(starts[:count], NEVER),
        four(sums[:count], 0),
        -(-K // BK),
        starts[count],
        *made[:-1],
    ), sums[-1]


@kept
def counters(backend):
    """For each half of a tile that is cut, how many of its parts have been stored; every launch
    leaves zeros."""
    with lasting(backend):
        return upload(np.zeros(max(COUNTERS, 2 * backend.multiprocessors), np.uint32), backend)


def launch_group(products):
    """Launch up to four `Product`s Aᵀ·B of matrices of one dtype and one K, all or none of which
    accumulate."""
    first = products[0].a.array
    sizes = tuple(tuple(p.c.array.shape) for p in products)
    width, made, _ = choose(sizes, len(first), first.backend.multiprocessors)
    group, size = group_of(sizes, len(first), width, made)
    nothing, row_sums = unused(first), [p.fused.row_sums for p in products]
    summed, rest = any(s is not None for s in row_sums), group.tiles - group.whole
    parts = empty((rest * group.parts * BM * width,), np.float32, like=first) if rest else nothing
    sums = empty((size,), np.float32, like=first) if summed else nothing
    a, b = (
        [map_of(x.array, False, width) for x in xs]
        for xs in zip(*((p.a, p.b) for p in products), strict=True)
    )
    results = four([p.c.array.reshape(-1) for p in products], nothing)
    launch(
        in_bfloat16(GROUP_KERNELS[width], first.dtype),
        made.blocks,
        THREADS,
        GemmMaps(four(a, a[0]), four(b, a[0]), a[0], a[0], a[0]),
        GroupArrays(results, parts, counters(first.backend), sums),
        group,
        GemmEpilogue(1.0, 0, 0, int(products[0].fused.accumulate), WRITE_ROW_SUMS * summed, 0.0),
        shared=shared_bytes(width),
    )
    if summed:
        counts = [group.parts * columns for columns in group.tiles_n]
        given = zip(row_sums, group.sums, counts, group.M, strict=False)
        add_parts(
            [
                Sum(sums[start : start + count * M], count, target, True)
                for target, start, count, M in given
                if target is not None
            ],
            waits=True,
        )
