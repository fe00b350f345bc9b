"""How a Hopper convolution is cut: tiles of pixels and channels, stages, and the estimate that
chooses among them.

SOURCE
    the project's own; comments next to the estimate's constants give their origin.
READ NEXT
    weight_gradient.py
"""

import functools
import itertools
from typing import NamedTuple

from .boxes import MAX_BOX, ROW, SHARED, SUB_BLOCK, tiles_of, whole_patterns
from .layout import BK, MAX_B, RESAMPLED_VARIANTS, VARIANTS


class ConvPlan(NamedTuple):
    """How one convolution is cut: tiles of width × height pixels of `images` images, by `bn`
    channels; its pipeline.

    resident: the whole weight stays in shared memory for all tiles; ping_pong: the consumers
    multiply by turns
    boxes: of pixels, for each 64 input channels of a tile
    addends: shared memory has room for them; tiles: how many there are
    """

    bn: int
    width: int
    height: int
    images: int
    whole_halo: bool
    boxes: int
    a_stages: int
    a_bytes: int
    b_stages: int
    taps_per_stage: int
    resident: bool
    ping_pong: bool
    addends: bool
    tiles: int

    @property
    def pixels(self):
        return self.width * self.height * self.images

    @property
    def shared(self):
        stages = self.b_stages * self.taps_per_stage * self.bn * ROW + self.a_stages * self.a_bytes
        return stages + output_bytes(self.bn, self.pixels, self.addends)


# what the estimate of `choose_plan` is made of, from measurements on an H100; nanoseconds of one
# multiprocessor
BYTES_A_NS = 52.0  # from L2 to shared memory, while all multiprocessors load
# a wgmma takes BN / 2 of them, or one for each 128 bytes that it reads from shared memory
CYCLES_A_NS = 1.55
START_NS = 4500.0  # launch to first product and last store
TILE_NS, OUTPUT_NS = 300.0, 0.107  # a tile's results: each tile, each of its numbers
# a round of the consumers' loop, less a quarter of the time of its products, which hides that much
ROUND_NS = 130.0


def output_bytes(bn, pixels, addends):
    """Shared memory for a tile's results, and for what is added to each channel of each 64 of its
    pixels."""
    return pixels * bn * 2 + (pixels // SUB_BLOCK * bn * 4 if addends else 0)


def plans(B, H, W, C, N, size, whole_halo, bn, sub, taps_per_stage, addends, strided=False):
    """Every `ConvPlan` with these tiles that fits into shared memory; the deepest pipeline for
    each. strided: B, H and W are the result's"""
    halo, found = 1 if strided else size - 1, []
    columns, steps = -(-N // bn), size * size * -(-C // BK)
    boxes = 4 if strided else 1 if whole_halo else size
    boxes_of_tile = -(-C // BK) * boxes
    b_bytes = taps_per_stage * bn * ROW
    left = SHARED - output_bytes(bn, 128 * sub, addends)
    for width, height, images in tiles_of(128 * sub):
        if max(width, height) + halo > MAX_BOX:
            continue
        a_bytes = whole_patterns((width + halo * whole_halo) * (height + halo) * images * ROW)
        tiles = columns * -(-W // width) * -(-H // height) * -(-B // images)
        # a stage is released once the next one has landed
        for a_stages in (3, 2, 1)[: 3 if boxes_of_tile == 1 else 2]:
            b_stages, resident = min((left - a_stages * a_bytes) // b_bytes, MAX_B), False
            if columns == 1 and steps <= b_stages * taps_per_stage:
                b_stages, resident = steps // taps_per_stage, True
            enough = 4 if taps_per_stage == 1 else 3
            if resident or b_stages >= enough or b_stages >= 2 and a_stages == taps_per_stage == 1:
                found.append(
                    ConvPlan(
                        bn,
                        width,
                        height,
                        images,
                        whole_halo,
                        boxes,
                        a_stages,
                        a_bytes,
                        b_stages,
                        taps_per_stage,
                        resident,
                        resident and boxes_of_tile <= a_stages,
                        addends,
                        tiles,
                    )
                )
                break
    return found


def estimate(plan, C, size, sub, multiprocessors):
    """Nanoseconds. A block multiplies while it loads, so a tile takes the longer of the two, and a
    little more."""
    blocks, taps = -(-C // BK), size * size
    weight = 0 if plan.resident else taps * plan.bn * ROW
    moving = blocks * (plan.boxes * plan.a_bytes + weight) / BYTES_A_NS
    # A, 64 rows, crosses shared memory for each wgmma, and so does B
    tap = 8 * sub * max(plan.bn / 2, 16 + plan.bn / 4) / CYCLES_A_NS
    multiplying = blocks * taps * (tap + max(0.0, ROUND_NS - tap / 4) / plan.taps_per_stage)
    both = (1.3 if plan.a_stages == 1 else 1.0) * max(moving, multiplying) + 0.03 * min(
        moving, multiplying
    )
    waves = -(-plan.tiles // multiprocessors)
    return START_NS + waves * (TILE_NS + OUTPUT_NS * plan.pixels * plan.bn + both)


@functools.lru_cache(maxsize=4096)
def choose_plan(
    B,
    H,
    W,
    C,
    N,
    size,
    whole_halo,
    multiprocessors,
    only=None,
    taps_per_stage=None,
    addends=True,
    strided=False,
):
    """(estimate of nanoseconds, `ConvPlan`) with the lowest estimate; only: (BN, SUB), to choose
    from these tiles alone.

    taps_per_stage: of the weight, 1 or, of a 3 × 3 kernel, 3; None for either; addends: room for a
    bias's; strided: of stride 2, one tap in a stage
    """
    best = None
    variants = RESAMPLED_VARIANTS if strided or size % 2 == 0 else VARIANTS
    columns = size == 3 and not strided
    for (bn, sub), staged in itertools.product(variants, (1, 3)[: 1 + columns]):
        if only not in (None, (bn, sub)) or taps_per_stage not in (None, staged):
            continue
        for plan in plans(B, H, W, C, N, size, whole_halo, bn, sub, staged, addends, strided):
            ns = estimate(plan, C, size, sub, multiprocessors)
            if best is None or ns < best[0]:
                best = ns, plan
    if best is None:
        if only is not None or taps_per_stage is not None:
            raise ValueError(
                f"no plan with {only} (BN, SUB) and {taps_per_stage} taps in a stage for a "
                f"{size} × {size} convolution of these arrays."
            )
        raise ValueError(
            f"a {size} × {size} convolution does not fit into shared memory: use version=1"
        )
    return best
