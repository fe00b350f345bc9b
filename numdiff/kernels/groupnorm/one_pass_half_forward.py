"""GroupNorm's forward in one pass, 16 bits: sums joined by shuffles, one barrier, and pixels of 64
bytes.

WHAT IS NEW, AND WHY IT PAYS
    The one-pass forward for any tile (one_pass.py) joins its sums twice, through 32 bytes of shared
    memory a thread and four barriers, as the squares are about a mean that comes first. Here the
    squares are about one pixel of the sample, the first, which all threads know: so both sums are
    joined at once (warp_sums.py), and one barrier is enough. Tiles of 16 channels are what one
    block can keep of 64×64 pixels, but 32 bytes of each pixel are one sector, and the L2 cache,
    which looks up a tag for each, was busy for two thirds of the time while memory waited. With 32
    channels, and two blocks of a cluster that share the pixels (clusters.py), it looks up half as
    many.
    Copies are issued AHEAD turns ahead, not all at once: so a warp issues few before its first sum.
TILE
    A part, or as many as make whole groups (warp_sums.py); all pixels are kept in shared memory.
LAUNCH
    grid (C / tile, B, blocks of a cluster), parts · team warps. Dynamic shared memory: 8 bytes a
    warp for each channel of a part, 8 for each channel of several parts, 8 more for each in a
    cluster, 4 for each channel, then the pixels.
DETERMINISM, COST
    as one_pass.py
ACCURACY
    Of n pixels the squares about one of them are at most n + 1 times those about the mean, so a
    variance is off by n · 2⁻²⁴ at most, 2⁻¹² of itself for 64×64 pixels, and only where that pixel
    is √n standard deviations away. SiLU as in one_pass.py.
SOURCE
    one_pass.py
READ NEXT
    one_pass_half.py
"""

import math
from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, int64, opaque
from ...device.async_copy import cp_async_commit, cp_async_wait
from ...device.cluster import cluster_sync_relaxed
from ...device.common import divide
from ...device.eight import copy8, load8_into, one_of
from ...device.limits import FULL_MASK
from ...device.requires import requires
from ...device.specialise import Variants, specialise
from .one_pass import add_away, normalise
from .vectors import VECTOR, Affine, NormVectorWalk, clear, lanes_sum, locate
from .warp_sums import (
    CHANNELS,
    CLUSTERS,
    LANES,
    MAX_THREADS,
    PART,
    has_own_channel,
    leave_columns,
    locate_pixels,
    sums_of_cluster,
    sums_of_warps,
    this_lane,
)

AHEAD = 6  # turns whose copies are in flight: 48 KiB for a multiprocessor with 16 warps


class ForwardCut(NamedTuple):
    """How a block is cut.

    parts: of the tile, PART channels each; rows: pixels of a turn, PIXELS for each warp of a part;
    origins: where in the sums the first pixel is kept; ring: element at which pixels start in
    shared memory; folded: 0, each warp has a place for its sums; groups: of a sample
    """

    parts: int
    rows: int
    origins: int
    ring: int
    folded: int
    groups: int


class OnePassForwardAhead(NamedTuple):
    """A thread's next pixel to be copied: its number, its place in shared memory, its element of x."""

    p: int
    at: int
    i: int


@device_inline
def copy_next(kept, x, ahead, cut, walk):
    """Start the copy of this thread's next pixel, if there is one, as a cp.async group of its own."""
    if ahead.p < walk.P:
        copy8(kept, ahead.at, x, ahead.i)
    cp_async_commit()
    return OnePassForwardAhead(
        int32(ahead.p + cut.rows), int32(ahead.at + walk.turn), int64(ahead.i + walk.step)
    )


@device_inline
def begin_copies(kept, x, cut, me, walk):
    ahead = OnePassForwardAhead(me.row, walk.own, walk.first)
    for _ in range(opaque(AHEAD)):  # a loop, past which ptxas moves no load
        ahead = copy_next(kept, x, ahead, cut, walk)
    return ahead


@device_inline
def add_pixels(squares, total, origin, kept, x, ahead, cut, me, walk):
    """This thread's sums of (x - origin)² and x - origin, channel by channel, over its pixels as
    they come."""
    value = cuda.local.array(VECTOR, float32)
    clear(squares)
    clear(total)
    p, at = me.row, walk.own
    while p < walk.P:
        ahead = copy_next(kept, x, ahead, cut, walk)
        cp_async_wait(AHEAD)
        load8_into(kept, at, value)
        add_away(total, squares, origin, value)
        p, at = int32(p + cut.rows), int32(at + walk.turn)


@device_inline
def leave_origin(sums, origin, cut, me):
    """Leave the first pixel where the lane that gets a channel's sums will read it."""
    if me.warp < cut.parts and me.lane < LANES:
        at = int32(cut.origins + PART * me.part + me.in_part)
        for k in range(VECTOR):
            sums[at + k] = origin[k]


@device_inline
def statistics_of_group(sums, squares, total, cut, me, width, n, eps):
    """(mean, 1 / √(variance + eps)) of the group of a lane's channel.

    squares, total: that channel's Σ(x - origin)² and Σ(x - origin) over n pixels. All threads of
    the block call it.
    """
    own = total / n
    squares = max(squares - total * own, float32(0))  # now about the channel's mean
    own += sums[cut.origins + PART * me.part + me.channel]
    share, rest = float32(1) / float32(width), float32(0)
    if cut.parts == 1:
        mean = lanes_sum(own, width) * share
        rest = lanes_sum(squares + n * ((own - mean) * (own - mean)), width)
    else:  # groups span parts
        first, mean = leave_columns(sums, (squares, own), cut, me, width), float32(0)
        for k in range(width):
            mean += sums[first + 2 * k + 1]
        mean *= share
        for k in range(width):
            d = sums[first + 2 * k + 1] - mean
            rest += sums[first + 2 * k] + n * (d * d)
    return mean, float32(1) / math.sqrt(rest * share / n + eps)


@device_inline
def write_pixels(y, kept, i, step, affine, cut, me, walk, activate):
    """The epilogue: y = (x - mean) · scale + shift, its SiLU with `activate`, of all this thread's
    pixels."""
    value = cuda.local.array(VECTOR, float32)
    p, at = me.row, walk.own
    while p < walk.P:
        load8_into(kept, at, value)
        normalise(y, i, value, affine, activate)
        p, at, i = int32(p + cut.rows), int32(at + walk.turn), i + step


@requires("7.5")
def forward_half(x, weight, bias, y, mean, rstd, shape, cut, eps, activate):
    """y (B, P, C), mean and rstd (B, G) of x, a `Pair`, as one array (B, P, C).

    shape: a `Shape`, its P the pixels of a block; cut: a `ForwardCut`
    """
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.a.dtype.type, alignment=128)
    total = cuda.local.array(VECTOR, float32)
    squares = cuda.local.array(VECTOR, float32)
    origin = cuda.local.array(VECTOR, float32)
    affine = Affine(
        cuda.local.array(VECTOR, float32),
        cuda.local.array(VECTOR, float32),
        cuda.local.array(VECTOR, float32),
    )
    P, C, seam, width = shape
    me, threads = this_lane(cut), LANES * cut.rows * cut.parts
    first_channel = int32((cuda.blockIdx.x * cut.parts + me.part) * PART)
    c, b = int32(first_channel + me.in_part), int32(cuda.blockIdx.y)
    beyond, first, step = locate_pixels(c, me.row, b, P, C, seam, cut.rows)
    walk = NormVectorWalk(
        P, first, step, int32(cut.ring + VECTOR * int32(cuda.threadIdx.x)), int32(VECTOR * threads)
    )
    x_ = one_of(beyond, x.a, x.b)

    ahead = begin_copies(kept, x_, cut, me, walk)
    pixels = int32(P * cuda.gridDim.z) if CLUSTERS else P
    # the sample's first pixel
    load8_into(x_, locate(c, int32(0), b, pixels, C, seam, cut.rows)[1], origin)
    add_pixels(squares, total, origin, kept, x_, ahead, cut, me, walk)
    load8_into(weight, c, affine.scales)
    load8_into(bias, c, affine.shifts)
    leave_origin(sums, origin, cut, me)
    square, away = sums_of_warps(sums, squares, total, cut, me)
    if CLUSTERS:
        square, away = sums_of_cluster(sums, (square, away), cut, me)
    average, root = statistics_of_group(sums, square, away, cut, me, width, float32(pixels), eps)
    group, before = divide(int32(first_channel + me.channel), width)
    if me.warp < cut.parts and has_own_channel(me) and before == 0 and cuda.blockIdx.z == 0:
        to = b * cut.groups + group
        mean[to], rstd[to] = average, root
    for k in range(VECTOR):
        affine.means[k] = cuda.shfl_sync(FULL_MASK, average, me.in_part + k)
        affine.scales[k] *= cuda.shfl_sync(FULL_MASK, root, me.in_part + k)
    _, i_y, step_y = locate_pixels(c, me.row, b, P, C, C, cut.rows)
    write_pixels(y, kept, i_y, step_y, affine, cut, me, walk, activate)
    if CLUSTERS:
        cluster_sync_relaxed()  # no block exits while another may read its sums


FORWARD_HALF = Variants(
    CHANNELS,
    lambda part: specialise(
        forward_half,
        name=f"groupnorm_forward_half_{part}",
        launch_bounds=MAX_THREADS,
        PART=part,
        CLUSTERS=False,
    ),
)
