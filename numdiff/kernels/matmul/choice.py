"""Which tile a product gets, and into how many slices its sum is cut: the lowest of estimated
times.

FLOAT32, rungs 3 and 4, in the time of one multiply-add of a multiprocessor:
        rounds · tile · work · (1 + 1 / warps) · slice length,     rounds = ceil(blocks / multiprocessors)
    where `work` is the number of instructions for each multiply-add, and a scheduler with w warps
    to choose from is assumed to be busy w / (w + 1) of the time; a split adds the time of its
    second pass. Large products get the largest tiles, small ones many small tiles, and long sums
    with small results are split.
16 BITS, rungs 5 and 6, in ns:
        rounds · (steps of a slice · time of a step + time of the epilogue) + the second pass of a
        split
    Rung 6 takes what a card's table says instead, where it has been measured (../tuning/), and
    pairs of blocks (see PAIRS in hopper/producer.py) only then.
SOURCE
    the project's own; comments next to the estimates' constants give their origin.
READ NEXT
    launcher.py
"""

import functools

from ...device.batch_invariance import nominal_extent
from ...device.limits import MULTIPROCESSORS
from ..tuning import tuned_or
from . import register_tiles, vectorised
from .hopper.layout import BK, BM, STAGES
from .hopper.work import schedule
from .mma_layout import TILES

# instructions for each multiply-add, counted for sm_90
WORK = {(128, 128): 1.20, (128, 64): 1.25, (64, 64): 1.30}
SHORTEST_SLICE = 64  # of K: below this the second pass costs more than the split saves
# multiply-adds of one multiprocessor in the time that one more launch takes, about 3 µs
SECOND_PASS = 400_000
# multiply-adds of one multiprocessor in the time that 132 write and read one partial sum
SLICE_TRAFFIC = 0.25
# 16 bits: ns of a multiprocessor for 64 of K and for the epilogue of a tile, on an H100 whose L2
# cache feeds all at
# once: 2.08 ns for each row of 64 k that comes in (0.80 µs for a step of 128 × 256), 2.5 for each
# column of a tile
HALF_TILES = {
    6: {(BM, n): (2.08 * (BM + n), 2.5 * n) for n in STAGES},
    # the blocks that a multiprocessor has at once, together (an H200:
    # docs/log/2026-11-mma.md)
    5: {(128, 256): (1100.0, 1200.0), (128, 128): (1250.0, 900.0), (64, 64): (1000.0, 600.0)},
}
# whether blocks of rung 6 work in pairs where the card's table does not say: docs/log/kernels.md
PAIRS = False
HALF_SLICE = {6: 512, 5: 256}  # of K: the shortest slice
HALF_SECOND_PASS = 3000.0  # ns of a launch more
# ns until a kernel's first tile is multiplied, and from the last one to the next kernel
HALF_START = 3000.0
NS_PER_BYTE = 1 / 2500  # of partial sums, written and read


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
    for tile_m, tile_n in tiles:
        tiles_of_c = batch * -(-M // tile_m) * -(-N // tile_n)
        splits = {1}
        if batch == 1:
            splits |= {
                max(1, min(turns * multiprocessors // tiles_of_c, K // SHORTEST_SLICE))
                for turns in range(1, 9)
            }
        for slices in sorted(splits):
            slice_length = slice_of(K, slices)
            slices = -(-K // slice_length)
            rounds = -(-tiles_of_c * slices // multiprocessors)
            # a thread has 64 outputs; a multiprocessor four schedulers
            warps_of_tile = tile_m * tile_n / 64 / 32 / 4
            warps = min(rounds * warps_of_tile, 4)  # 128 registers a thread leave room for four
            estimate = (
                rounds * tile_m * tile_n * WORK[tile_m, tile_n] * (1 + 1 / warps) * slice_length
            )
            if slices > 1:
                estimate += SECOND_PASS + SLICE_TRAFFIC * slices * M * N * 132 / multiprocessors
            if best is None or estimate < best[0]:
                best = estimate, (tile_m, tile_n), slices
    return best[1:]


def slice_of(K, slices):
    """Elements of K in each of `slices` slices but the last: a multiple of what a kernel fetches at
    a time."""
    return -(-K // (slices * register_tiles.STEP)) * register_tiles.STEP


# 16 bits ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def choose_half(version, batch, M, N, K, can_split, multiprocessors, widths=tuple(STAGES)):
    """(tile, slices of K, ns) with the lowest estimate for rung 5 or 6; widths: that a tile of rung
    6 may have."""
    best = None
    for tile, (step, epilogue) in HALF_TILES[version].items():
        if version == 6 and tile[1] not in widths:
            continue
        tiles_of_c = batch * -(-M // tile[0]) * -(-N // tile[1])
        splits, blocks = {1}, multiprocessors * (TILES[tile].blocks if version == 5 else 1)
        if can_split:
            splits |= {
                max(1, min(turns * blocks // tiles_of_c, K // HALF_SLICE[version]))
                for turns in range(1, 9)
            }
            splits.add(max(1, min(blocks // tiles_of_c + 1, K // HALF_SLICE[version])))
        for slices in sorted(splits):
            k_tiles, rounds = -(-K // 64), 1
            if version == 6:
                steps, slices, alone = schedule(tiles_of_c, slices, k_tiles, multiprocessors)
            else:
                steps, alone = -(-k_tiles // slices), 0
                slices = -(-k_tiles // steps)
            if not alone:
                rounds = -(-tiles_of_c * slices // blocks)
            estimate = HALF_START + rounds * (steps * step + epilogue)
            if alone:  # a block with several short slices has as many epilogues
                each = -(-tiles_of_c // (multiprocessors - alone))
                short = k_tiles - (slices - 1) * steps
                estimate = max(estimate, HALF_START + each * (short * step + epilogue))
            if slices > 1:
                estimate += HALF_SECOND_PASS + NS_PER_BYTE * 8 * slices * M * N
            if best is None or estimate < best[2]:
                best = tile, slices, estimate
    return best


def pairs_fit(M, batch=1):
    """Whether blocks of rung 6 can work in pairs: on one product, which has tiles one below the
    other."""
    return batch == 1 and M > BM


def half_tile(backend, version, batch, M, N, K, can_split):
    """(tile, slices of K, whether in pairs of blocks): measured on this card, or estimated."""
    multiprocessors = getattr(backend, "multiprocessors", MULTIPROCESSORS)

    def estimated():
        tile, slices, _ = choose_half(version, batch, M, N, K, can_split, multiprocessors)
        return tile, slices, PAIRS and version == 6 and pairs_fit(M, batch)

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
        return (tile_m, tile_n), slices, bool(*pairs) if pairs else PAIRS and pairs_fit(M)

    if version == 6 and batch == 1:
        return tuned_or(estimated, measured, backend, "matmul v6", M, N, K, can_split)
    return estimated()


def as_nominal(batch, M):
    """(batch, M): what grows with the model's batch is the rows of one product, or the number of
    products."""
    return (batch, nominal_extent(M)) if batch == 1 else (nominal_extent(batch), M)
