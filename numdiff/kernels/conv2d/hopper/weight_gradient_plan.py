"""How a weight gradient is cut: chunks of pixels, parts of them, and the estimate that chooses
among them.

SOURCE
    the project's own; comments next to the estimate's constants give their origin.
READ NEXT
    cluster_sums.py, then weight_gradient_3x3.py, which 3 × 3 kernels take.
"""

import functools
from typing import NamedTuple

from .boxes import ROW, SHARED, tiles_of, whole_patterns

TILE = 64  # channels of dy, and of x
TAPS = 9  # of a block, three for each consumer
SUMS = TAPS * TILE * TILE  # of a block
MAX_STAGES = 6


class ConvGradientPlan(NamedTuple):
    """How the pixels are cut: chunks of width × height pixels of `images` images, `part_chunks` of
    them to a part."""

    width: int
    height: int
    images: int
    stages: int
    x_bytes: int
    chunks: int
    part_chunks: int
    parts: int


# of a multiprocessor: from L2 to shared memory, all of them at it; wgmma
BYTES_A_NS, FLOPS_A_NS = 42.0, 6000.0
# launch to first product and to the second kernel; what a stage costs in addition
START_NS, CHUNK_NS = 3000.0, 100.0
PART_BYTES_A_NS = 3500.0  # of partial sums, written and read, through the L2 cache


@functools.lru_cache(maxsize=4096)
def choose_plan(B, H, W, C, N, size, whole_halo, multiprocessors):
    """(estimate of nanoseconds, `ConvGradientPlan`) with the lowest estimate."""
    pad, best = size // 2, None
    tiles = -(-C // TILE) * -(-N // TILE) * -(-size * size // TAPS)
    wanted = {turns * multiprocessors // tiles for turns in (1, 2, 3, 4)} | {
        1,
        2,
        3,
        4,
        6,
        8,
        12,
        16,
        24,
        32,
        48,
        64,
    }
    for width, height, images in tiles_of(64, 128, 256):
        pixels = width * height * images
        box = (width + 2 * pad * whole_halo) * (height + 2 * pad) * images
        x_bytes = whole_patterns(box * ROW * (1 if whole_halo else size))
        stages = min(SHARED // (pixels * ROW + x_bytes), MAX_STAGES)
        if stages < 2:
            continue
        chunks = -(-W // width) * -(-H // height) * -(-B // images)
        moved = (pixels * ROW + x_bytes) / BYTES_A_NS
        multiplied = 2 * pixels * TILE * TILE * TAPS / FLOPS_A_NS
        chunk = (1.2 if stages == 2 else 1.0) * max(moved, multiplied) + 0.1 * min(
            moved, multiplied
        )
        for parts in sorted(wanted):
            part_chunks = -(-chunks // max(1, min(chunks, parts)))
            parts = -(-chunks // part_chunks)
            rounds = -(-parts * tiles // multiprocessors)
            estimate = (
                START_NS
                + rounds * (part_chunks * (CHUNK_NS + chunk) + 1500)
                + parts * tiles * SUMS * 8 / PART_BYTES_A_NS
            )
            if best is None or estimate < best[0]:
                best = (
                    estimate,
                    ConvGradientPlan(
                        width, height, images, stages, x_bytes, chunks, part_chunks, parts
                    ),
                )
    if best is None:
        raise ValueError(
            f"a {size} × {size} weight gradient does not fit into shared memory: use version=1"
        )
    return best
