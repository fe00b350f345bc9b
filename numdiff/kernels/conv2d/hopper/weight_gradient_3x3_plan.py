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
from .cluster_sums import CONSUMERS, SIZE, TAPS, TILE
from .plan import BYTES_A_NS

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


# what fits an H100's times: launch to first product without the first chunk's load, and the end; a
# stage; the second pass
START_NS, CHUNK_NS, PASS_NS = 2000.0, 150.0, 2000.0
WRITTEN_A_NS, READ_A_NS = 3000.0, 4000.0  # bytes of the parts, through the L2 cache
PRODUCTS_A_NS = 6500.0  # FLOPs of a multiprocessor, where shared memory keeps up
# a cluster's barriers, for each of its blocks; bytes that a block writes to its shared memory, and
# reads from another's
CLUSTER_NS, KEPT_A_NS, FETCHED_A_NS = 500.0, 200.0, 25.0
# how many clusters of each size an H100 with 132 multiprocessors runs at once
# (cuOccupancyMaxActiveClusters). Measured: one cluster more runs after the others, and the kernel
# takes twice as long
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


class Gradient3x3Cut(NamedTuple):
    """A chunk's pixels, in tiles of `channels` channels of x, and what one chunk costs in
    nanoseconds."""

    channels: int
    width: int
    height: int
    images: int
    stages: int
    x_bytes: int
    chunks: int
    moved: float
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
            moved = (pixels * ROW + rows * 2 * channels) / BYTES_A_NS
            multiplied = 2 * pixels * TILE * channels * TAPS / PRODUCTS_A_NS * slow
            yield Gradient3x3Cut(
                channels,
                width,
                height,
                images,
                stages,
                x_bytes,
                -(-W // width) * -(-H // height) * -(-B // images),
                moved,
                (1.2 if stages == 2 else 1.0) * max(moved, multiplied),
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
    ns = START_NS + 2 * cut.moved + (rounds - 1) * 1500
    ns += rounds * -(-plan.chunks // plan.parts) * (CHUNK_NS + cut.chunk)
    if plan.blocks > 1:
        fetched = 16 * CONSUMERS * plan.share * (plan.blocks - 1)
        ns += rounds * (CLUSTER_NS * plan.blocks + sums / KEPT_A_NS + fetched / FETCHED_A_NS)
    written = plan.groups * tiles * sums
    ns += written / WRITTEN_A_NS
    if plan.groups > 1:
        ns += PASS_NS + (written + 4 * N * TAPS * C) / READ_A_NS
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
