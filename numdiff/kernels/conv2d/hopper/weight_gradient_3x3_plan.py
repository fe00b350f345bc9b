"""How a 3 × 3 weight gradient is cut: chunks of pixels, clusters, and the estimate that chooses
among them.

SOURCE
    the project's own; comments next to the estimate's constants give their origin.
READ NEXT
    ../../attention/hopper_tiles.py: two products with a softmax between them.
"""

import functools
from typing import NamedTuple

from .boxes import ROW, SHARED, tiles_of, whole_patterns
from .cluster_sums import SIZE, TAPS, TILE

WIDTHS = 64, 32, 16  # of x
PIXELS = 64, 128, 256  # of a chunk
MAX_STAGES = 16


class Gradient3x3Plan(NamedTuple):
    """How the work is cut: tiles of `channels` channels of x, chunks of width × height pixels of
    `images` images.

    A tile's chunks are shared among `groups` clusters of `blocks` blocks.
    """

    channels: int
    width: int
    height: int
    images: int
    stages: int
    x_bytes: int
    chunks: int
    blocks: int
    groups: int

    @property
    def parts(self):
        return self.blocks * self.groups

    @property
    def share(self):
        """Vectors of four sums that a thread adds up for its cluster."""
        return -(-3 * self.channels // 8 // self.blocks)

    @property
    def shared(self):
        staged = self.stages * (self.width * self.height * self.images * ROW + self.x_bytes)
        return max(staged, 4 * TAPS * TILE * self.channels if self.blocks > 1 else 0)


# nanoseconds of one multiprocessor of an H200, fitted to the times of all candidates of some 50 drawn
# gradients (benchmark/scripts/choices.py). Launch to first product, and bytes of the first chunk's
# load; a stage, and each line of x in its box
START_NS, FIRST_A_NS, CHUNK_NS, LINE_NS = 3600.0, 130.0, 75.0, 12.7
# FLOPs where shared memory keeps up; the time of narrow tiles, of what that gives
PRODUCTS_A_NS, NARROW = 6000.0, {64: 1.0, 32: 1.03, 16: 0.85}
TWO_STAGES = 1.1  # the time of chunks of which only two are in flight
# the second pass, bytes of the parts and of dweight
PASS_NS, SUMMED_A_NS = 2600.0, 5200.0
# a cluster's barriers, for each of its blocks; bytes of a block's sums, written to shared memory and
# read from others'
CLUSTER_NS, KEPT_A_NS = 140.0, 47.0
# how many clusters of each size an H100 with 132 multiprocessors runs at once
# (cuOccupancyMaxActiveClusters). Measured: one cluster more runs after the others, and the kernel
# takes twice as long
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


class Gradient3x3Cut(NamedTuple):
    """A chunk's pixels, in tiles of `channels` channels of x, and what the first chunk's load and
    each chunk cost in nanoseconds."""

    channels: int
    width: int
    height: int
    images: int
    stages: int
    x_bytes: int
    chunks: int
    first: float
    chunk: float


def cuts(B, H, W, channels, whole_halo, only_pixels):
    """Every `Gradient3x3Cut` that fits into shared memory twice or more."""
    # 128 bytes a cycle: a matrix of dy and three of x for each product, and what arrives
    reading = 16 + 0.75 * channels + (128 + 2.8 * channels) / 24
    slow = max(1.0, reading / (1.5 * channels))
    for width, height, images in tiles_of(*(n for n in PIXELS if only_pixels in (None, n))):
        pixels = width * height * images
        rows = (width + 2 * whole_halo) * (height + 2) * images * (1 if whole_halo else SIZE)
        x_bytes = whole_patterns(rows * 2 * channels)
        stages = min(SHARED // (pixels * ROW + x_bytes), MAX_STAGES)
        if stages >= 2:
            products = 2 * pixels * TILE * channels * TAPS * slow * NARROW[channels] / PRODUCTS_A_NS
            lines = (height + 2) * images * (1 if whole_halo else SIZE)
            yield Gradient3x3Cut(
                channels,
                width,
                height,
                images,
                stages,
                x_bytes,
                -(-W // width) * -(-H // height) * -(-B // images),
                (pixels * ROW + rows * 2 * channels) / FIRST_A_NS,
                CHUNK_NS + LINE_NS * lines + (TWO_STAGES if stages == 2 else 1.0) * products,
            )


def shares(tiles, at_once, only_parts, only_blocks):
    """Every (blocks of a cluster, clusters of a tile) that is worth a look, in order."""
    found = {
        (blocks, groups)
        for blocks, room in at_once.items()
        for groups in (1, 2, 3, 4, *(turns * room // tiles for turns in (1, 2, 3)))
    }
    if only_parts is not None:
        found = {(blocks, only_parts // blocks) for blocks in at_once if only_parts % blocks == 0}
    return sorted((blocks, groups) for blocks, groups in found if only_blocks in (None, blocks))


def estimate(plan, cut, C, N, tiles, at_once):
    """Nanoseconds: the chunks of a block one after the other, then the sums through the cluster and
    the second pass."""
    sums = 4 * TAPS * TILE * plan.channels  # bytes of a tile's
    rounds = -(-plan.groups * tiles // at_once)
    ns = START_NS + cut.first + rounds * -(-plan.chunks // plan.parts) * cut.chunk
    if plan.blocks > 1:
        ns += rounds * (CLUSTER_NS * plan.blocks + sums / KEPT_A_NS)
    if plan.groups > 1:
        ns += PASS_NS + (plan.groups * tiles * sums + 4 * N * TAPS * C) / SUMMED_A_NS
    return ns


@functools.lru_cache(maxsize=4096)
def choose_plan(B, H, W, C, N, whole_halo, multiprocessors, only=None):
    """(estimate of nanoseconds, `Gradient3x3Plan`) with the lowest estimate.

    only: (CW, parts, pixels, blocks of a cluster), None for any, or the first of them
    """
    best = None
    only_width, only_parts, only_pixels, only_blocks = (*(only or ()), None, None, None, None)[:4]
    at_once = {
        blocks: max(1, clusters * multiprocessors // 132)
        for blocks, clusters in CLUSTERS_AT_ONCE.items()
    }
    for channels in (n for n in WIDTHS if only_width in (None, n)):
        tiles = -(-C // channels) * -(-N // TILE)
        for cut in cuts(B, H, W, channels, whole_halo, only_pixels):
            for blocks, groups in shares(tiles, at_once, only_parts, only_blocks):
                if 1 <= blocks * groups <= cut.chunks:
                    plan = Gradient3x3Plan(*cut[:7], blocks, groups)
                    ns = estimate(plan, cut, C, N, tiles, at_once[blocks])
                    if best is None or ns < best[0]:
                        best = ns, plan
    if best is None:
        raise ValueError(
            f"no plan with {only} (channels, parts, pixels, blocks of a cluster) for these arrays."
        )
    return best
