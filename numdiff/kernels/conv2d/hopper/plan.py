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


# what the estimate of `choose_plan` is made of: nanoseconds of one multiprocessor of an H200, fitted
# to the times of all candidates of some 110 drawn convolutions (benchmark/scripts/choices.py)
BYTES_A_NS = 54.0  # from L2 to shared memory, while all multiprocessors load
# products of 64 channels of one tap, by (BN, SUB, taps in a stage)
TAP_NS = {
    (32, 1, 1): 245.0,
    (32, 1, 3): 164.0,
    (64, 1, 1): 310.0,
    (64, 1, 3): 202.0,
    (96, 1, 1): 343.0,
    (96, 1, 3): 291.0,
    (128, 1, 1): 385.0,
    (128, 1, 3): 362.0,
    (32, 2, 1): 345.0,
    (32, 2, 3): 255.0,
    (64, 2, 1): 427.0,
    (64, 2, 3): 413.0,
    (96, 2, 1): 511.0,
    (96, 2, 3): 557.0,
    (128, 2, 1): 676.0,
}
GRADIENT = 0.89  # time of an input gradient's products, three taps in a stage, of a forward's
ONE_STAGE = 1.18  # where the pixels' one stage is filled only after it has been read
START_NS, TILE_NS = 1700.0, 417.0  # launch to first load; a tile, each 128 of its pixels
EDGE_A_NS = 20.4  # bytes of the first tile's pixels, and of the last one's results
LAST_WAVE = 0.67  # time of a wave of few tiles, of that of a whole one


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


def estimate(plan, C, size, sub, multiprocessors, gradient=False):
    """Nanoseconds. A block multiplies while it loads, so a tile takes the longer of the two. The
    first tile's loads, and the last one's stores, overlap with nothing."""
    blocks, taps = -(-C // BK), size * size
    weight = 0 if plan.resident else taps * plan.bn * ROW
    moving = blocks * (plan.boxes * plan.a_bytes + weight) / BYTES_A_NS
    multiplying = blocks * taps * TAP_NS[plan.bn, sub, plan.taps_per_stage]
    multiplying *= GRADIENT if gradient and plan.taps_per_stage > 1 else 1.0
    multiplying *= ONE_STAGE if plan.a_stages == 1 else 1.0
    waves, rest = divmod(plan.tiles, multiprocessors)
    if rest:
        waves += LAST_WAVE + (1 - LAST_WAVE) * rest / multiprocessors
    edges = (plan.a_bytes + 2 * plan.pixels * plan.bn) / EDGE_A_NS
    return START_NS + edges + waves * (TILE_NS * sub + max(moving, multiplying))


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
    kind="forward",
):
    """(estimate of nanoseconds, `ConvPlan`) with the lowest estimate; only: (BN, SUB), to choose
    from these tiles alone.

    taps_per_stage: of the weight, 1 or, of a 3 × 3 kernel, 3; None for either; addends: room for a
    bias's; kind: "forward", "input_gradient", or "halved", of stride 2, one tap in a stage
    """
    best, strided = None, kind == "halved"
    variants = RESAMPLED_VARIANTS if strided or size % 2 == 0 else VARIANTS
    columns = size == 3 and not strided
    for (bn, sub), staged in itertools.product(variants, (1, 3)[: 1 + columns]):
        if only not in (None, (bn, sub)) or taps_per_stage not in (None, staged):
            continue
        for plan in plans(B, H, W, C, N, size, whole_halo, bn, sub, staged, addends, strided):
            ns = estimate(plan, C, size, sub, multiprocessors, kind == "input_gradient")
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
