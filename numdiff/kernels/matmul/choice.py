"""Which tile a product gets, and into how many slices its sum is cut: the lowest of estimated
times.

FLOAT32, rungs 3 and 4, in ns:
        shares · products of a tile's slice / rate + the second pass of a split
    A multiprocessor has up to 16 warps at once, two to eight tiles. Together they take equal shares
    of its time; fewer hide less of each other's waits, and take longer than their shares.
16 BITS, rungs 5 and 6, in ns, for the lowest of (tile, slices of K, blocks alone or in pairs):
        start + the longer of (blocks' time, memory's time) + the second pass of a split
        blocks' time    rounds · (steps of a slice · time of a step + time of a tile's results)
        memory's time   operands once, and results, at the memory's rate
    A step of 64 of K takes as long as its products, or as its operands need to arrive. The
    constants were fitted to the times of all candidates of some 170 drawn products on an H200
    (benchmark/scripts/choices.py), where half of them chose for the other half as well as for
    themselves. A card's table (../tuning/) goes before the estimate.
SOURCE
    the project's own; comments next to the estimates' constants give their origin.
READ NEXT
    launcher.py
"""

import functools
import math
from typing import NamedTuple

from ...device.batch_invariance import nominal_extent
from ...device.limits import MULTIPROCESSORS
from ..tuning import tuned_or
from . import register_tiles, vectorised
from .hopper.layout import BK, BM, STAGES
from .hopper.work import schedule, workers_of
from .mma_layout import TILES, takes


class SingleTile(NamedTuple):
    """A tile of float32. rate: FLOPs a ns of an H200's multiprocessor; at_once: tiles that it has;
    alone: shares of its time that one takes alone"""

    rate: float
    at_once: int
    alone: float


SINGLE_TILES = {
    (128, 128): SingleTile(370.0, 2, 1.26),
    (128, 64): SingleTile(337.0, 4, 2.3),
    (64, 64): SingleTile(303.0, 8, 3.6),
}
SHORTEST_SLICE = 64  # of K
# ns of a split's second pass, and bytes a ns of its partial sums, written and read
SECOND_PASS, SLICES_A_NS = 15_000.0, 2500.0
# 16 bits, of one multiprocessor of an H200. Rung 6: FLOPs a ns by wgmma, bytes a ns from the L2
# cache to shared memory
PRODUCTS_A_NS, ARRIVING_A_NS = 5800.0, 84.0
STEP_NS = 17.0  # of 64 of K, in addition to products or copies
# a tile's results: each tile; bytes a ns of results, and of a residual
TILE_NS, WRITTEN_A_NS, ADDED_A_NS = 580.0, 46.0, 12.6
# pairs of blocks: time of their products, of those of blocks alone, and ns more for each tile
PAIRED, PAIRED_TILE_NS = 0.914, 100.0
# until a kernel's first product, and from its last to the next kernel
START_NS = {6: 2600.0, 5: 3000.0}


class MmaTile(NamedTuple):
    """What a tile of rung 5 takes. step: ns of 64 of K for a block alone on its multiprocessor;
    products: FLOPs a ns of all blocks of a multiprocessor; results: ns of a block for a tile"""

    step: float
    products: float
    results: float


MMA_TILES = {
    (128, 256): MmaTile(1130.0, math.inf, 1100.0),
    (192, 128): MmaTile(925.0, math.inf, 870.0),
    (128, 128): MmaTile(1000.0, 3320.0, 200.0),
    (64, 64): MmaTile(740.0, 1900.0, 0.0),
}
MMA_WRITTEN_A_NS = 37.5  # bytes of results
MEMORY_A_NS = 4800.0  # bytes, of the whole card
SHORTEST_HALF_SLICE = 192  # of K
SLICES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)  # and those that fill the card
MOST_UNITS = 6  # work tiles of a block, above which no sum is split
# ns of a second pass: its launch, and bytes a ns of partial sums
HALF_SECOND_PASS, PARTIALS_A_NS = 1900.0, 3000.0
# of rung 6's estimate, below which rung 5 takes a product from it: its kernel has to be compiled, too
MMA_GAIN = 0.9
# whether blocks of rung 6 work in pairs: None: by the estimate
PAIRS = None


def _wgmma_tile(width):
    """(ns of 64 of K, ns of a float16 tile's results) of rung 6."""
    products, arriving = 2 * BM * width * BK / PRODUCTS_A_NS, 2 * (BM + width) * BK / ARRIVING_A_NS
    return max(products, arriving) + STEP_NS, TILE_NS + 2 * BM * width / WRITTEN_A_NS


# ns of a multiprocessor for 64 of K and for the results of a tile
HALF_TILES = {
    6: {(BM, width): _wgmma_tile(width) for width in STAGES},
    5: {
        (m, n): (
            max(tile.step, TILES[m, n].blocks * 2 * m * n * 64 / tile.products),
            tile.results + TILES[m, n].blocks * 2 * m * n / MMA_WRITTEN_A_NS,
        )
        for (m, n), tile in MMA_TILES.items()
    },
}


# What moves 16 bytes at a time --------------------------------------------------------------------


def by_four(matrices, neighbours, across, extent):
    """True where the matrices can be moved 16 bytes at a time along an axis of `extent` elements.

    neighbours, across: the distances along that axis and along the other one.
    """
    distances = (
        across,
        matrices.outer,
        matrices.inner,
        matrices.start + matrices.array.offset // 4,
        extent,
    )
    return neighbours == 1 and all(d % 4 == 0 for d in distances)


def operand_by_four(matrices, k_distance, other_distance, K, extent):
    """`by_four` for A or B, along k if that is where its neighbours are (the kernels decide in the
    same way)."""
    if k_distance == 1:
        return by_four(matrices, 1, other_distance, K)
    return by_four(matrices, other_distance, k_distance, extent)


def by_eight(arrays, extents):
    """True where float16 matrices with these contiguous extents can be moved 16 bytes at a time."""
    return all(n % 8 == 0 for n in extents) and all(x is None or x.offset % 16 == 0 for x in arrays)


# float32 ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def choose_tile(batch, M, N, K, multiprocessors, tiles=vectorised.TILES):
    """((tile_m, tile_n), slices of K) with the lowest estimate."""
    best = None
    for tile in tiles:
        costs, area = SINGLE_TILES[tile], tile[0] * tile[1]
        tiles_of_c = batch * -(-M // tile[0]) * -(-N // tile[1])
        fill = {max(1, turns * multiprocessors // tiles_of_c) for turns in (1, 2, 3, 4)}
        for wanted in sorted({1, 2, 4, 8, 16, 32, *fill}) if batch == 1 else (1,):
            if wanted > 1 and K // wanted < SHORTEST_SLICE:
                continue
            length = slice_of(K, wanted)
            slices = -(-K // length)
            full, rest = divmod(tiles_of_c * slices, multiprocessors * costs.at_once)
            shares = full * costs.at_once
            shares += max(-(-rest // multiprocessors), costs.alone) if rest else 0
            ns = shares * 2 * area * length / costs.rate
            if slices > 1:
                ns += SECOND_PASS + 8 * slices * M * N / SLICES_A_NS
            if best is None or ns < best[0]:
                best = ns, tile, slices
    return best[1:]


def slice_of(K, slices):
    """Elements of K in each of `slices` slices but the last: a multiple of what a kernel fetches at
    a time."""
    return -(-K // (slices * register_tiles.STEP)) * register_tiles.STEP


# 16 bits ------------------------------------------------------------------------------------------


class HalfProduct(NamedTuple):
    """`batch` products of 16 bits. nbytes: of an element of the result; added: bytes of an element
    of what is added to it; across: whether A is contiguous along m"""

    batch: int
    M: int
    N: int
    K: int
    nbytes: int = 2
    added: int = 0
    across: bool = False


def gradient_product(M, N, K):
    """The `HalfProduct` of a weight's gradient Aᵀ·B: float32 (M, N), summed over K rows."""
    return HalfProduct(1, M, N, K, nbytes=4, across=True)


def longer(a, b):
    """The longer of two times that overlap, and a little more where they are alike."""
    return (a**4 + b**4) ** 0.25


def estimate_half(version, product, tile, slices, multiprocessors, paired=False):
    """Nanoseconds of a `HalfProduct` by rung 5 or 6 with this tile and this many slices of K."""
    batch, M, N, K, nbytes, added, _ = product
    k_tiles = -(-K // 64)
    written = 4 if slices > 1 else nbytes
    rows = tile[0] * (2 if paired else 1)
    tiles = batch * -(-M // rows) * -(-N // tile[1])
    if version == 6:
        blocks, slices = _wgmma_blocks(
            tile, tiles, slices, k_tiles, multiprocessors, paired, written, added
        )
    else:
        blocks, slices = _mma_blocks(tile, tiles, slices, k_tiles, multiprocessors, written + added)
    moved = 2 * batch * (M * K + N * K) + (written * slices + added) * batch * M * N
    ns = START_NS[version] + longer(blocks, moved / MEMORY_A_NS)
    if slices > 1:
        ns += HALF_SECOND_PASS + 4 * (slices + 1) * M * N / PARTIALS_A_NS
    return ns


def _wgmma_blocks(tile, tiles, slices, k_tiles, multiprocessors, paired, written, added):
    """(ns of the blocks of rung 6, slices that there really are); tiles: or pairs of them."""
    area, workers = tile[0] * tile[1], workers_of(multiprocessors, paired)
    arriving = 2 * BK * (BM + tile[1] / (2 if paired else 1)) / ARRIVING_A_NS
    products = 2 * area * BK / PRODUCTS_A_NS * (PAIRED if paired else 1)
    step = max(products, arriving) + STEP_NS
    results = TILE_NS + area * (written / WRITTEN_A_NS + added / ADDED_A_NS)
    results += PAIRED_TILE_NS * paired
    steps, slices, alone = schedule(tiles, slices, k_tiles, workers)
    unit = steps * step + results
    if not alone:
        return -(-tiles * slices // workers) * unit, slices
    each = -(-tiles // (workers - alone))  # a block with several short slices
    short = k_tiles - (slices - 1) * steps
    return max(unit, each * (short * step + results)), slices


def _mma_blocks(tile, tiles, slices, k_tiles, multiprocessors, nbytes):
    """(ns of the blocks of rung 5, slices that there really are)."""
    area, costs, most = tile[0] * tile[1], MMA_TILES[tile], TILES[tile].blocks
    steps = -(-k_tiles // slices)
    slices = -(-k_tiles // steps)

    def round_of(blocks):  # on a multiprocessor
        step = max(costs.step, 2 * blocks * area * 64 / costs.products)
        return steps * step + costs.results + blocks * area * nbytes / MMA_WRITTEN_A_NS

    full, rest = divmod(tiles * slices, multiprocessors * most)
    return full * round_of(most) + (round_of(-(-rest // multiprocessors)) if rest else 0), slices


def slices_of(version, product, tile, multiprocessors):
    """Counts of slices of K that are worth an estimate, in order."""
    tiles = product.batch * -(-product.M // tile[0]) * -(-product.N // tile[1])
    blocks = multiprocessors * (TILES[tile].blocks if version == 5 else 1)
    fill = {turns * blocks // tiles for turns in (1, 2, 3)}
    most = min(product.K // SHORTEST_HALF_SLICE, MOST_UNITS * blocks // tiles)
    return [1, *(n for n in sorted({*SLICES, *fill}) if 1 < n <= most)]


@functools.lru_cache(maxsize=4096)
def choose_half(version, product, can_split, multiprocessors, widths=tuple(STAGES), paired=False):
    """(tile, slices of K, ns) with the lowest estimate for a `HalfProduct` by rung 5 or 6; widths:
    that a tile of rung 6 may have."""
    best = None
    for tile in HALF_TILES[version]:
        if tile[1] not in widths if version == 6 else not takes(tile, product.across):
            continue
        slices = slices_of(version, product, tile, multiprocessors) if can_split else (1,)
        for n in slices:
            ns = estimate_half(version, product, tile, n, multiprocessors, paired)
            if best is None or ns < best[2]:
                best = tile, n, ns
    return best


def pairs_fit(M, batch=1):
    """Whether blocks of rung 6 can work in pairs: on one product, which has tiles one below the
    other."""
    return batch == 1 and M > BM


def choose_half_tile(version, product, can_split, multiprocessors):
    """(tile, slices of K, whether in pairs of blocks, ns) with the lowest estimate."""
    given = version, product, can_split, multiprocessors
    tile, slices, ns = choose_half(*given)
    if version < 6 or not pairs_fit(product.M, product.batch) or PAIRS is False:
        return tile, slices, False, ns
    if PAIRS:
        return tile, slices, True, ns
    *of_pairs, ns_of_pairs = choose_half(*given, paired=True)
    return (*of_pairs, True, ns_of_pairs) if ns_of_pairs < ns else (tile, slices, False, ns)


def half_tile(backend, version, product, can_split):
    """`choose_half_tile`, or what was measured on this card."""
    multiprocessors = getattr(backend, "multiprocessors", MULTIPROCESSORS)
    batch, M, N, K, *_ = product

    def estimated():
        return choose_half_tile(version, product, can_split, multiprocessors)[:3]

    def measured(choice):
        tile_m, tile_n, slices, *pairs = choice  # older tables say nothing of pairs
        if (tile_m, tile_n) not in HALF_TILES[6] or not 1 <= slices <= (
            -(-K // BK) if can_split else 1
        ):
            raise ValueError(
                f"rung 6 has no tile {tile_m} × {tile_n}, or this product not {slices} slices of K"
            )
        if len(pairs) > 1 or pairs and pairs[0] not in range(1 + pairs_fit(M)):
            raise ValueError(f"{pairs} says whether blocks work in pairs: 0, or 1 where they can")
        return (tile_m, tile_n), slices, bool(*pairs)

    if version == 6 and batch == 1:
        return tuned_or(estimated, measured, backend, "matmul v6", M, N, K, can_split)
    return estimated()


def as_nominal(batch, M):
    """(batch, M): what grows with the model's batch is the rows of one product, or the number of
    products."""
    return (batch, nominal_extent(M)) if batch == 1 else (nominal_extent(batch), M)
