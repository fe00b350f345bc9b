"""A Hopper convolution's main loop: the products of all taps and channels of one tile.

WHAT ONE ROUND MULTIPLIES
    a stage of the weight, one tap or three below each other, by the pixels that its taps see, 64
    channels of both. The first tap of a column begins `shift` bytes into the box, the next ones a
    row of the box further on each, and the next column of taps one pixel to the right of the first.
ORDER OF WORK
    for each 64 input channels: for each column of taps, from left to right: from the top down. A
    stage of pixels is used up when all taps of its box have read it: all there are with the whole
    halo, otherwise one column.
RULES that ptxas enforces in silence (device/wgmma.py)
    The first products overwrite the accumulators, so they stand before the loop; and no branch
    stands among the products of one commit, which is why taps in a stage are a constant of the
    kernel.
SOURCE
    PTX ISA, section 9.7.15 (wgmma); the implicit GEMM: Chetlur et al. 2014, "cuDNN",
    arXiv:1410.0759.
READ NEXT
    convolution.py, the kernel around it.
"""

from typing import NamedTuple

from ....device import cuda, device_inline, int32, uint32
from ....device.pipeline import advance, consumer_release, consumer_wait, stage_at
from ....device.specialise import Constant
from ....device.wgmma import make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence, wgmma_wait_1
from .boxes import ROW, descriptor, row_of, u64
from .layout import STRIDED, SUB, TAPS_PER_STAGE

wgmma = Constant(lambda BN, TRANSPOSED: make_wgmma(BN, transpose_b=TRANSPOSED))
wgmma_wait = Constant(lambda BN: make_wgmma_wait(BN))
# The weight's descriptors, in bytes: TRANSPOSED, from a slab to the next, and from eight input
# channels to the next
B_LEADING = Constant(lambda TRANSPOSED, SLAB_BYTES: SLAB_BYTES if TRANSPOSED else 16)
B_STRIDE = Constant(lambda TRANSPOSED, COLS: 16 * COLS if TRANSPOSED else 8 * ROW)
B_SWIZZLE = Constant(lambda TRANSPOSED, COLS: 2 if TRANSPOSED and COLS == 32 else 1)
# and from one to another, where 16 bytes count 1: from a tap to the next; from 16 input channels to
# the next
B_TAP = Constant(lambda TAP_BYTES: u64(TAP_BYTES // 16))
B_STEP = Constant(lambda TRANSPOSED, COLS: 2 * COLS if TRANSPOSED else 2)


class View(NamedTuple):
    """How a consumer sees a box. rows, rows_2: bytes to its sub-blocks; stride: bytes from an image
    row to the next.

    rounds: of a tile; box_taps: taps that read one box, and size: rows of them, of a strided kernel
    the first; elected: whether this thread releases
    """

    rows: int
    rows_2: int
    stride: int
    rounds: int
    box_taps: int
    size: int
    elected: bool


@device_inline
def view_of(consumer, boxes, shape, tiling):
    """The `View` of a consumer."""
    rows = row_of(consumer * SUB, tiling.tile_w, tiling.tile_h, boxes.pitch, boxes.height)
    rows_2 = row_of(consumer * SUB + 1, tiling.tile_w, tiling.tile_h, boxes.pitch, boxes.height)
    size = shape.size
    return View(
        uint32(rows) * uint32(ROW),
        uint32(rows_2) * uint32(ROW),
        uint32(uint32(boxes.pitch) * uint32(ROW)),
        int32(shape.channel_blocks * size * (1 if TAPS_PER_STAGE == 3 else size)),
        int32(4 if STRIDED else size * size if tiling.whole_halo else size),
        int32(2) if STRIDED else size,
        (cuda.threadIdx.x & 127) == 0,
    )


@device_inline
def advance_weight(ring, stage, parity, resident):
    """As `advance`; the stages of a resident weight stay in their first phase."""
    stage = int32(stage + 1)
    if stage == ring.stages:
        stage = int32(0)
        if not resident:
            parity = uint32(parity ^ uint32(1))
    return stage, parity


@device_inline
def multiply_rest(acc, a, b):
    """acc += a tap's products, except those of the first 16 of its 64 channels; a, b: descriptors."""
    wgmma(acc, a + u64(2), b + u64(B_STEP), int32(1))
    wgmma(acc, a + u64(4), b + u64(2 * B_STEP), int32(1))
    wgmma(acc, a + u64(6), b + u64(3 * B_STEP), int32(1))


@device_inline
def multiply_first(acc, a_at, stride, b):
    """acc = a tap's products for 64 channels; a_at: address of the pixels, b: the weight's
    descriptor."""
    a = descriptor(a_at, uint32(16), stride, 1)
    wgmma(acc, a, b, int32(0))
    multiply_rest(acc, a, b)


@device_inline
def multiply_tap(acc, acc_2, a_1, a_2, stride, b):
    """acc += a tap's products for 64 channels, acc_2 likewise where a warpgroup has two sub-blocks."""
    a = descriptor(a_1, uint32(16), stride, 1)
    wgmma(acc, a, b, int32(1))
    multiply_rest(acc, a, b)
    if SUB == 2:
        a = descriptor(a_2, uint32(16), stride, 1)
        wgmma(acc_2, a, b, int32(1))
        multiply_rest(acc_2, a, b)


@device_inline
def multiply_column(acc, acc_2, a_1, a_2, stride, b):
    """The products of a stage's other two taps, below the first one, whose pixels are at a_1 and
    a_2."""
    if TAPS_PER_STAGE == 3:
        multiply_tap(acc, acc_2, a_1 + stride, a_2 + stride, stride, b + B_TAP)
        multiply_tap(
            acc, acc_2, a_1 + stride + stride, a_2 + stride + stride, stride, b + B_TAP + B_TAP
        )


@device_inline
def weight_at(ring, stage):
    """The descriptor of a stage's first tap."""
    return descriptor(stage_at(ring, stage), uint32(B_LEADING), uint32(B_STRIDE), B_SWIZZLE)


@device_inline
def main_loop(acc, acc_2, a_ring, b_ring, a_stage, a_parity, b_stage, b_parity, view, resident):
    """acc, acc_2 = a tile's products, once the first stages of pixels and weight are there; returns
    the rings' state.

    view: the consumer's `View`; resident: whether the weight stays. A stage is released when the
    next round is on its way.
    """
    stride = view.stride
    a_at = stage_at(a_ring, a_stage)
    b = weight_at(b_ring, b_stage)
    wgmma_fence()
    multiply_first(acc, a_at + view.rows, stride, b)
    if SUB == 2:
        multiply_first(acc_2, a_at + view.rows_2, stride, b)
    multiply_column(acc, acc_2, a_at + view.rows, a_at + view.rows_2, stride, b)
    wgmma_commit()

    shift = uint32(TAPS_PER_STAGE) * stride
    # taps that have read the stage, and those of the column
    used, row = TAPS_PER_STAGE, TAPS_PER_STAGE
    size, box_taps, odd = view.size, view.box_taps, int32(0)
    for _ in range(int32(1), view.rounds):
        before_a, before_b = a_stage, b_stage
        next_box = used == box_taps
        if row == size:  # the next column of taps
            row = int32(0)
            shift += uint32(ROW) - uint32(size) * stride
        if next_box:
            used, shift = int32(0), uint32(0)
            if STRIDED:  # 2 × 2 taps see even rows and columns, 2 × 1, 1 × 2 and 1 the others
                odd = int32((odd + 1) & 3)
                size = int32(2 - (odd >> 1))
                box_taps = int32(size * (2 - (odd & 1)))
            a_stage, a_parity = advance(a_ring, a_stage, a_parity)
            consumer_wait(a_ring, a_stage, a_parity)
            a_at = stage_at(a_ring, a_stage)
        b_stage, b_parity = advance_weight(b_ring, b_stage, b_parity, resident)
        consumer_wait(b_ring, b_stage, b_parity)
        wgmma_fence()
        a_1, a_2 = a_at + view.rows + shift, a_at + view.rows_2 + shift
        b = weight_at(b_ring, b_stage)
        multiply_tap(acc, acc_2, a_1, a_2, stride, b)
        multiply_column(acc, acc_2, a_1, a_2, stride, b)
        wgmma_commit()
        shift += uint32(TAPS_PER_STAGE) * stride
        used += TAPS_PER_STAGE
        row += TAPS_PER_STAGE
        wgmma_wait_1()
        if view.elected:
            if not resident:
                consumer_release(b_ring, before_b)
            if next_box:
                consumer_release(a_ring, before_a)
    return a_stage, a_parity, b_stage, b_parity
