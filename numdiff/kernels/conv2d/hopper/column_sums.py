"""The sums of dy's columns from its tiles in shared memory: a bias's gradient, by two warps during
the products.

A weight gradient reads all of dy for its products. Two warps of the producer's warpgroup, each for
32 of the 64 columns of a tile, read it once more from shared memory, and so no pass over dy is
left. They multiply by ones on the tensor
cores: additions number by number held up the products.

SOURCE
    PTX ISA, section 9.7.14.5 (mma, ldmatrix).
READ NEXT
    weight_gradient.py
"""

from ....device import device_inline, float32, int32, uint32
from ....device.tensor_core import ldmatrix_x4_trans, mma_m16n8k16, ones_half2
from .boxes import ROW

CHANNELS_A_WARP = 32  # of dy, whose sums a warp makes


@device_inline
def add_columns(box, sixty_fours, warp, lane):
    """The sum of a channel of dy over 64 pixels or more, whose box starts at a shared address.

    Of the warp's 32 channels a lane gets the sum of `column_of`, as its quad's four lanes have the
    same four.
    """
    k, half = uint32(lane & 7), uint32(lane >> 3 & 1)
    address = box + k * uint32(128) + uint32(lane >> 4) * uint32(1024)
    low = address + ((uint32(4 * warp) + half ^ k) << uint32(4))
    high = address + ((uint32(4 * warp + 2) + half ^ k) << uint32(4))
    ones, l_sums = ones_half2(), (float32(0), float32(0), float32(0), float32(0))
    h_sums = l_sums
    # all loads first: the tensor cores keep shared memory busy, so each takes long
    for _ in range(sixty_fours):
        l0, h0 = ldmatrix_x4_trans(low), ldmatrix_x4_trans(high)
        l1, h1 = ldmatrix_x4_trans(low + uint32(2048)), ldmatrix_x4_trans(high + uint32(2048))
        l2, h2 = ldmatrix_x4_trans(low + uint32(4096)), ldmatrix_x4_trans(high + uint32(4096))
        l3, h3 = ldmatrix_x4_trans(low + uint32(6144)), ldmatrix_x4_trans(high + uint32(6144))
        l_sums, h_sums = (
            mma_m16n8k16(l0, (ones, ones), l_sums),
            mma_m16n8k16(h0, (ones, ones), h_sums),
        )
        l_sums, h_sums = (
            mma_m16n8k16(l1, (ones, ones), l_sums),
            mma_m16n8k16(h1, (ones, ones), h_sums),
        )
        l_sums, h_sums = (
            mma_m16n8k16(l2, (ones, ones), l_sums),
            mma_m16n8k16(h2, (ones, ones), h_sums),
        )
        l_sums, h_sums = (
            mma_m16n8k16(l3, (ones, ones), l_sums),
            mma_m16n8k16(h3, (ones, ones), h_sums),
        )
        low += uint32(64 * ROW)
        high += uint32(64 * ROW)
    first, second = (h_sums[0], h_sums[2]) if lane & 2 else (l_sums[0], l_sums[2])
    return second if lane & 1 else first


@device_inline
def column_of(warp, lane):
    """Which of the tile's 64 columns a lane's sum of `add_columns` is."""
    return int32(CHANNELS_A_WARP * warp + (lane & 3) * 8 + (lane >> 2))
