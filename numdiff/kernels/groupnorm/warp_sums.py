"""Parts of GroupNorm's 16-bit kernels: warps that have a part of a tile's channels, and how their
sums are joined.

A warp has PART neighbouring channels, eight a thread. A turn of a warp is PIXELS pixels, of the
LANES threads of each:

    PART = 16      2 threads a pixel, 16 pixels a turn: 32 bytes of each, one sector of memory
    PART = 32      4 threads a pixel, 8 pixels a turn: 64 bytes of each. The L2 cache finds two sectors by one tag and
                   has half as many to look up, which is what limits reading by sectors

A tile is one part, or as many as make whole groups; a part has a team of warps, each with its
pixels of a turn.

Every thread brings two sums for each of its eight channels. In a warp the threads of one channel
exchange halves of their sums, 4 + 2 + 1 shuffles for each of the two, until each lane has both sums
of one channel: channel lane & (PART - 1) of the part, once they are in shared memory. There each
warp adds up those of all warps for itself, so one barrier is enough; where blocks of a cluster
share the pixels, those of all blocks, one exchange later.

SOURCE
    one_pass.py
READ NEXT
    one_pass_half_forward.py
"""

from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, opaque, uint32
from ...device.cluster import cluster_address, cluster_sync, load_cluster_4
from ...device.common import divide
from ...device.eight import by_sign
from ...device.limits import FULL_MASK
from ...device.mbarrier import smem_u32
from ...device.specialise import Constant
from .vectors import VECTOR, WARP, WARP_BITS, lanes_sum, locate

PART = Constant()  # channels of a warp, one of CHANNELS
LANES = Constant(lambda PART: PART // VECTOR)  # threads of a pixel
LANE_BITS = Constant(lambda LANES: LANES.bit_length() - 1)  # lane >> LANE_BITS is lane // LANES
PIXEL_BITS = Constant(lambda LANE_BITS: WARP_BITS - LANE_BITS)  # PIXELS is 1 << PIXEL_BITS
CLUSTERS = Constant()  # whether the blocks of a cluster share a tile's pixels (clusters.py)
CHANNELS = 16, 32  # what PART may be
MAX_THREADS = 512  # with 128 registers each a multiprocessor has room for 16 warps


class NormLane(NamedTuple):
    """A thread's place: its lane, its warp of the block's `warps`, which part of the tile that has,
    its first pixel, the first of its eight channels in the part, and the channel of the part whose
    sums it gets."""

    lane: int
    warp: int
    warps: int
    part: int
    row: int
    in_part: int
    channel: int


@device_inline
def this_lane(cut):
    t, team = int32(cuda.threadIdx.x), int32(cut.rows >> PIXEL_BITS)  # warps of a part
    lane, warp = int32(t & (WARP - 1)), int32(t >> WARP_BITS)
    of_team, part = divide(warp, cut.parts)
    row, in_part = (
        int32((of_team << PIXEL_BITS) + (lane >> LANE_BITS)),
        int32(VECTOR * (lane & (LANES - 1))),
    )
    return NormLane(
        lane, warp, int32(team * cut.parts), part, row, in_part, int32(lane & (PART - 1))
    )


@device_inline
def locate_pixels(c, row, b, P, C, seam, rows):
    """`locate` for a row of the pixels that this block of a cluster has."""
    if not CLUSTERS:
        return locate(c, row, b, P, C, seam, rows)
    mine = opaque(P)  # so that nothing of this is kept
    return locate(
        c, int32(row + mine * cuda.blockIdx.z), b, int32(mine * cuda.gridDim.z), C, seam, rows
    )


@device_inline
def halve(values, count, bit, lane):
    """values[0 … count/2 - 1] = the half of `values` that this lane keeps (by its `bit`), plus its
    partner's."""
    side, half = -int32(lane & bit), count // 2
    for k in range(half):
        mine = by_sign(side, values[k], values[half + k])
        other = by_sign(side, values[half + k], values[k])
        values[k] = mine + cuda.shfl_xor_sync(FULL_MASK, other, bit)


@device_inline
def warp_sum(values, lane):
    """The warp's sum of channel `summed_channel`, from each thread's eight."""
    halve(values, 8, 4 * LANES, lane)
    halve(values, 4, 2 * LANES, lane)
    halve(values, 2, LANES, lane)
    if LANES == 2:  # twice as many pixels as a thread has channels: two lanes get the same
        return values[0] + cuda.shfl_xor_sync(FULL_MASK, values[0], 16)
    return values[0]


@device_inline
def has_own_channel(me):
    """Whether no lane before this one has the same channel."""
    return PART == WARP or me.lane < PART


@device_inline
def put_pair(sums, at, pair, me):
    """Leave two numbers of each channel of a part in shared memory."""
    if has_own_channel(me):
        sums[at], sums[at + 1] = pair


@device_inline
def places_of(cut, me):
    """How many warps have a place for their sums: all, or half of them, if memory is short
    (`cut.folded`)."""
    return int32(me.warps >> cut.folded)


@device_inline
def columns_of(cut, me):
    """The start in `sums` of the tile's channels, two places each, if it has several parts."""
    return int32(2 * PART * places_of(cut, me))


@device_inline
def sums_of_warps(sums, first, second, cut, me):
    """Both sums of channel `me.channel` of this warp's part over all its warps, from each thread's
    eight.

    All threads of the block call it.
    """
    places = places_of(cut, me)
    # that warp_sum leaves
    channel = int32(VECTOR * (me.lane & (LANES - 1)) + ((me.lane >> LANE_BITS) & (VECTOR - 1)))
    a, b = warp_sum(first, me.lane), warp_sum(second, me.lane)
    shares = me.warp >= places
    at = int32(2 * (PART * (me.warp - places if shares else me.warp) + channel))
    if shares:
        put_pair(sums, at, (a, b), me)
    if cut.folded:
        cuda.syncthreads()
        if not shares and has_own_channel(me):
            a, b = a + sums[at], b + sums[at + 1]
    if not shares:
        put_pair(sums, at, (a, b), me)
    cuda.syncthreads()
    a, b = float32(0), float32(0)
    i, end, next_ = (
        int32(2 * (PART * me.part + me.channel)),
        int32(2 * PART * places),
        int32(2 * PART * cut.parts),
    )
    while i + 3 * next_ < end:  # four at once: none waits for the others
        j, k, n = int32(i + next_), int32(i + 2 * next_), int32(i + 3 * next_)
        a += (sums[i] + sums[j]) + (sums[k] + sums[n])
        b += (sums[i + 1] + sums[j + 1]) + (sums[k + 1] + sums[n + 1])
        i = int32(n + next_)
    while i < end:
        a, b = a + sums[i], b + sums[i + 1]
        i = int32(i + next_)
    return a, b


@device_inline
def sums_of_cluster(sums, pair, cut, me):
    """As `sums_of_warps`, over all blocks of the cluster, in the order of their rank: each part's
    first warp leaves its block's sums for all to read. No block may end before all have read:
    `cluster_sync_relaxed` at the kernel's end.
    """
    mine = int32(columns_of(cut, me) + 2 * PART * (me.part + (cut.parts if cut.parts > 1 else 0)))
    if me.warp < cut.parts:
        put_pair(sums, mine + 2 * me.channel, pair, me)
    cluster_sync()
    address = smem_u32(sums) + uint32(4 * mine + 16 * (me.channel >> 1))
    odd, a, b = -int32(me.channel & 1), float32(0), float32(0)
    for rank in range(0, cuda.gridDim.z, 2):  # two at once: a load takes several hundred cycles
        a0, b0, a1, b1 = load_cluster_4(cluster_address(address, uint32(rank)))
        c0, d0, c1, d1 = load_cluster_4(cluster_address(address, uint32(rank + 1)))
        a, b = a + by_sign(odd, a0, a1), b + by_sign(odd, b0, b1)
        a, b = a + by_sign(odd, c0, c1), b + by_sign(odd, d0, d1)
    return a, b


@device_inline
def sums_of_group(sums, pair, cut, me, width):
    """The sums of two numbers of channel `me.channel` over the channels of its group.

    Where groups span parts, all threads of the block call it.
    """
    a, b = pair
    if cut.parts == 1:
        return lanes_sum(a, width), lanes_sum(b, width)
    first = leave_columns(sums, pair, cut, me, width)
    a, b = float32(0), float32(0)
    for k in range(width):
        a, b = a + sums[first + 2 * k], b + sums[first + 2 * k + 1]
    return a, b


@device_inline
def leave_columns(sums, pair, cut, me, width):
    """Leave two numbers of each channel of the tile in shared memory: where those of the group of
    `me.channel` are."""
    columns, channel = columns_of(cut, me), int32(PART * me.part + me.channel)
    if me.warp < cut.parts:
        put_pair(sums, columns + 2 * channel, pair, me)
    cuda.syncthreads()
    return int32(columns + 2 * width * divide(channel, width)[0])
