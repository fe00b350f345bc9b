"""The 3 × 3 window around a pixel: which of its taps are in the image, as bits, and where they are
in memory.

SOURCE
    ../direct.py, whose windows they are.
READ NEXT
    from_few.py
"""

from ....device import device_inline, int32
from ....device.common import divide

SIZE, TAPS = 3, 9
SLAB = 64  # wide channels of a block: eight for each of eight lanes, or 16 for each of four
GROUP = 16  # pixels of a warp's step: the rows of an mma
# narrow channels of a block, to few channels and in the gradient: 27 of 32 rows or columns are used
THREE = 3
COLUMNS = 32
OUTSIDE = 31  # stands for "no tap": no mask has this bit


@device_inline
def seen(i, j, H, W, exists):
    """Bit 3 · r + s: whether tap (r, s) of the window around pixel (i, j) is in the image."""
    rows = 0b000111000 | (0b000000111 if i > 0 else 0) | (0b111000000 if i < H - 1 else 0)
    columns = 0b010010010 | (0b001001001 if j > 0 else 0) | (0b100100100 if j < W - 1 else 0)
    return int32(rows & columns if exists else 0)


@device_inline
def tap_offset(tap, W, C):
    """Elements from a pixel's first channel to those of the pixel that a tap sees."""
    r, s = divide(tap, int32(SIZE))
    return int32(((r - 1) * W + s - 1) * C)
