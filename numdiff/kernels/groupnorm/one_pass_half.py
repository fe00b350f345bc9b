"""GroupNorm's backward in one pass, 16 bits, by parts of 16 or 32 channels: one barrier, and copies
a few turns ahead.

WHAT IS NEW, AND WHY IT PAYS
    In the one-pass backward for any tile (one_pass_backward.py) memory is idle half of the time.
    Here:
    Sums are joined once (warp_sums.py), those of g · x and of g: one barrier instead of three, and
    2 KiB of shared memory instead of 32. Groups that are in several parts of a tile are joined
    after a second barrier.
    Everything is kept. Of 64×64 pixels of x and dy all but an eighth fit in shared memory, of 16
    channels in a block's, of 32 in those of two (clusters.py), and that eighth is kept in registers
    (`near` turns of a thread, at most two): nothing is read twice, and nothing is loaded late.
    Shared memory is short then, so two warps share a place for their sums (`folded`), one after the
    other.
    Copies are issued AHEAD turns ahead, one turn's with each turn that is worked on. Were all
    issued at once, a warp would have to issue its last copy before its first sum, and stall
    wherever no more may be in flight.
    Eight SiLU' side by side. A special function takes dozens of cycles; one channel after the
    other, as ptxas arranges them when registers are few, a turn takes 8 times the latency from x to
    g. `through_silu8` takes each step for all
    eight: a thread has 128 registers for that, since a block has at most 16 warps.
    No block-level completion counter. The sums of a sample go to memory, and another launch adds up
    the samples', in a training step together with other layers' gradients (reduce/second_pass.py). Were it
    done here, the last block would end after all the
    others: a fence, the count, and two loads, one after the other.
    The residual is prefetched into the L2 cache after x and dy, which takes no registers, and then
    loaded four turns at a time. An input that three operations read (a UNet's skip: the next
    block's norm and shortcut, and a block on the way up) has two residuals:
    `groupnorm_backward_half_two` adds them to each other as they arrive, rounded, as a kernel of
    their own would.
    The mean is part of the shift: z = x · scale + shift, and the sums are of g · x, from which a
    thread takes away mean · Σg once it has seen its pixels, a few dozen. The error, 2⁻²⁴ of x, is
    far below the 2⁻¹¹ of float16 itself. dx is two products: g · scale + (x · slope + offset),
    where slope and offset contain both averages and the mean.
LAUNCH
    grid (C / tile, B, blocks of a cluster); a block has parts · team warps: warp w has part w %
    parts, and of each turn the PIXELS pixels number w // parts. Dynamic shared memory: 8 bytes for
    each warp and channel of a part, half of it where `folded`, 8 more for each channel of several
    parts, 8 more for each in a cluster, then the pixels. 128
    registers: four warps in each quarter of a multiprocessor.
DETERMINISM, ACCURACY, COST, SOURCE
    as one_pass_backward.py
READ NEXT
    clusters.py.
"""

from itertools import product
from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, int64, opaque, uint32
from ...device.approximate import reciprocal
from ...device.async_copy import cp_async_commit, cp_async_wait
from ...device.cluster import cluster_sync_relaxed
from ...device.common import divide
from ...device.eight import (
    add8,
    copy8,
    fetch8,
    load8_into,
    numbers8,
    one_of,
    prefetch_l2,
    store8_from,
    words8,
)
from ...device.limits import FULL_MASK
from ...device.requires import requires
from ...device.specialise import Constant, Variants, specialise
from .vectors import (
    AT_ONCE,
    VECTOR,
    WORDS,
    Affine,
    BackwardWalk,
    accumulate,
    clear,
    fetch_pixels,
    through_silu8,
)
from .warp_sums import (
    CHANNELS,
    CLUSTERS,
    LANES,
    MAX_THREADS,
    PART,
    has_own_channel,
    locate_pixels,
    sums_of_cluster,
    sums_of_group,
    sums_of_warps,
    this_lane,
)

MAX_NEAR = 2  # turns that a thread's registers may keep
AHEAD = 3  # turns whose copies are in flight: 48 KiB for a multiprocessor with 16 warps
TWO = Constant()  # whether there are two residuals: the second takes the place of a Pair's b


class HalfCut(NamedTuple):
    """How a block is cut.

    parts: of the tile, PART channels each; rows: pixels of a turn, PIXELS for each warp of a part;
    ring: element at which pixels start in shared memory; near: turns that registers keep (if any, P
    is a multiple of rows); folded: 1 where two warps share a place for their sums, else 0; groups:
    of a sample; sample, bias: in totals, elements from a sample's sums to the next one's, and from
    weight's to bias's
    """

    parts: int
    rows: int
    ring: int
    near: int
    folded: int
    groups: int
    sample: int
    bias: int


class OnePassHalfAhead(NamedTuple):
    """A thread's next pixel to be copied: its number, its place in shared memory, its elements of x
    and dy."""

    p: int
    at: int
    i: int
    i_dy: int


class OnePassHalfPixel(NamedTuple):
    """A thread's next pixel to be written: its number, its place in shared memory, its element of
    dx."""

    p: int
    at: int
    i: int


class InRegisters(NamedTuple):
    """x and dy, later g, of the first pixels of a thread, as `fetch8` brings them: (MAX_NEAR,
    WORDS)."""

    x: object
    dy: object


# Residuals ----------------------------------------------------------------------------------------


@device_inline
def add_words(array, words, more, number):
    """words += more, both as `fetch8` brings them, rounded; number: eight float32 to work with."""
    numbers8(array, words, number)
    add8(array, more, number)
    words8(array, number, words)


@device_inline
def fetch_residuals(residual, pair, p, P, rows, i, step, words):
    """`fetch_pixels`; where there are two residuals, the sum with the second, pair.b, for which
    the thread has to wait.

    Two pixels at a time: registers are short.
    """
    fetch_pixels(residual, p, P, rows, i, step, words)
    if TWO:
        number, more = cuda.local.array(VECTOR, float32), cuda.local.array((2, WORDS), uint32)
        for first in range(0, AT_ONCE, 2):
            for k in range(2):
                if p + (first + k) * rows < P:
                    fetch8(pair.b, i + (first + k) * step, more[k])
            for k in range(2):
                if p + (first + k) * rows < P:
                    add_words(residual, words[first + k], more[k], number)


@device_inline
def prefetch_to_l2(residual, cut, me, walk):
    """Prefetch the residual of this thread's pixels into the L2 cache, from which the epilogue will
    load it."""
    p, i = me.row, walk.first
    while p < walk.P:
        prefetch_l2(residual, i)
        p, i = int32(p + cut.rows), i + walk.step


# The parameters of a thread's channels ------------------------------------------------------------


@device_inline
def locate_in_pair(c, row, b, P, C, seam, rows):
    """`locate_pixels`; with two residuals x is one array."""
    if TWO:
        _, first, step = locate_pixels(c, row, b, P, C, C, rows)
        return int32(-1), first, step
    return locate_pixels(c, row, b, P, C, seam, rows)


@device_inline
def load_affine(affine, rstds, weight, bias, mean, rstd, c, of_sample, width):
    """Load weight (to scales), bias (to shifts), mean and rstd for the eight channels from c on."""
    load8_into(weight, c, affine.scales)
    load8_into(bias, c, affine.shifts)
    group, before = divide(c, width)
    # channels of this group from here on
    at, left = uint32(of_sample + group), int32(width - before)
    for k in range(VECTOR):
        affine.means[k], rstds[k] = mean[at], rstd[at]
        left = int32(left - 1)
        if left == 0:
            at, left = uint32(at + 1), int32(width)


@device_inline
def fold_mean(affine, rstds):
    """z = x · scale + shift, the mean in the shift."""
    for k in range(VECTOR):
        affine.scales[k] *= rstds[k]
        affine.shifts[k] -= affine.means[k] * affine.scales[k]


# The kernel's parts -------------------------------------------------------------------------------


@device_inline
def copy_next(kept, x, dy, ahead, cut, walk):
    """Start the copies of x and dy of this thread's next pixel, if there is one, as a cp.async
    group of their own."""
    if ahead.p < walk.P:
        copy8(kept, ahead.at, x, ahead.i)
        copy8(kept, ahead.at + walk.half, dy, ahead.i_dy)
    cp_async_commit()
    return OnePassHalfAhead(
        int32(ahead.p + cut.rows),
        int32(ahead.at + walk.turn),
        int64(ahead.i + walk.step),
        int64(ahead.i_dy + walk.step_dy),
    )


@device_inline
def begin_loads(kept, near, x, dy, cut, me, walk):
    """Load x and dy of the `cut.near` turns in registers, and start the copies of the first AHEAD
    turns in `kept`."""
    for k in range(MAX_NEAR):
        if cut.near > k:
            fetch8(x, walk.first + k * walk.step, near.x[k])
            fetch8(dy, walk.first_dy + k * walk.step_dy, near.dy[k])
    ahead = OnePassHalfAhead(
        int32(me.row + cut.near * cut.rows),
        walk.own,
        int64(walk.first + cut.near * walk.step),
        int64(walk.first_dy + cut.near * walk.step_dy),
    )
    for _ in range(opaque(AHEAD)):  # a loop, past which ptxas moves no load
        ahead = copy_next(kept, x, dy, ahead, cut, walk)
    return ahead


@device_inline
def add_near(total_gx, total_g, kept, x_words, d_words, affine, activate):
    """`add_gradients` for a pixel in registers: g takes dy's place."""
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    numbers8(kept, x_words, value)
    numbers8(kept, d_words, d)
    through_silu8(kept, value, d, affine.scales, affine.shifts, activate)
    accumulate(value, d, total_gx, total_g)
    words8(kept, d, d_words)


@device_inline
def add_gradients(total_gx, total_g, kept, near, x, dy, ahead, affine, cut, me, walk, activate):
    """This thread's sums of g · (x - mean) and g, channel by channel, over its pixels as they come.
    g takes dy's place.

    It waits only for its own copies, as it reads only what it copied itself.
    """
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    clear(total_gx)
    clear(total_g)
    for k in range(MAX_NEAR):
        if cut.near > k:
            add_near(total_gx, total_g, kept, near.x[k], near.dy[k], affine, activate)
    p, at = int32(me.row + cut.near * cut.rows), walk.own
    while p < walk.P:
        ahead = copy_next(kept, x, dy, ahead, cut, walk)
        cp_async_wait(AHEAD)
        load8_into(kept, at, value)
        load8_into(kept, at + walk.half, d)
        through_silu8(kept, value, d, affine.scales, affine.shifts, activate)
        if activate:
            store8_from(kept, at + walk.half, d)
        accumulate(value, d, total_gx, total_g)
        p, at = int32(p + cut.rows), int32(at + walk.turn)
    for k in range(VECTOR):  # of a few pixels: little cancels
        total_gx[k] -= affine.means[k] * total_g[k]


@device_inline
def averages_of_group(sums, gx, g, weight, rstd, cut, me, width, count):
    """(the average of h · xhat, times rstd², that of h, times rstd) over the group of a lane's
    channel.

    gx, g: the channel's sums of g · xhat and of g; count: elements of a group. All threads of the
    block call it.
    """
    gx, g = sums_of_group(sums, (gx * weight, g * weight), cut, me, width)
    each = rstd * reciprocal(float32(count))
    return gx * each * rstd, g * each


@device_inline
def write_dx(dx, i, value, d, factors, before, adds):
    """dx of one pixel: x and g become g · scale + (x · slope + offset), plus the residual."""
    scales, slopes, offsets = factors
    for k in range(VECTOR):
        d[k] = d[k] * scales[k] + (value[k] * slopes[k] + offsets[k])
    if adds:
        add8(dx, before, d)
    store8_from(dx, i, d)


@device_inline
def finish_next(dx, kept, pixel, before, factors, cut, walk, adds):
    """dx of this thread's next pixel, if there is one."""
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    if pixel.p < walk.P:
        load8_into(kept, pixel.at, value)
        load8_into(kept, pixel.at + walk.half, d)
        write_dx(dx, pixel.i, value, d, factors, before, adds)
    return OnePassHalfPixel(
        int32(pixel.p + cut.rows), int32(pixel.at + walk.turn), int64(pixel.i + walk.step)
    )


@device_inline
def finish_near(dx, kept, i, x_words, d_words, before, factors, adds):
    """dx of a pixel in registers."""
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    numbers8(kept, x_words, value)
    numbers8(kept, d_words, d)
    write_dx(dx, i, value, d, factors, before, adds)


@device_inline
def write_gradients(dx, residual, pair, before, kept, near, factors, cut, me, walk, adds):
    """The epilogue: dx of this thread's pixels, four at a time; the residual of each four is loaded
    before their turn.

    before: the residual of the first four, which the caller has loaded; factors: scales, slopes,
    offsets of `finish8`
    """
    pixel = OnePassHalfPixel(
        int32(me.row + cut.near * cut.rows), walk.own, int64(walk.first + cut.near * walk.step)
    )
    while pixel.p < walk.P:
        for k in range(AT_ONCE):
            pixel = finish_next(dx, kept, pixel, before[k], factors, cut, walk, adds)
        if adds:
            fetch_residuals(residual, pair, pixel.p, walk.P, cut.rows, pixel.i, walk.step, before)
    if cut.near > 0 and adds:
        fetch_residuals(
            residual, pair, me.row, cut.near * cut.rows, cut.rows, walk.first, walk.step, before
        )
    for k in range(MAX_NEAR):
        if cut.near > k:
            i = walk.first + k * walk.step
            finish_near(dx, kept, i, near.x[k], near.dy[k], before[k], factors, adds)


@requires("7.5")
def backward_half(dy, x, vectors, statistics, residual, dx, totals, shape, cut, activate, adds):
    """dx (B, P, C), and for each sample the sums of g · xhat and g: totals (B, 2, C) or (2, B, C).

    dy (B, P, C); x, residual, dx: `Pair`s, with `TWO` residual.b is the second of two; vectors:
    weight and bias (C,), and statistics, mean and rstd (B, G): float32; shape: a `Shape`, its P the
    pixels of a block; cut: a `HalfCut`
    """
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.a.dtype.type, alignment=128)
    total_gx = cuda.local.array(VECTOR, float32)
    total_g = cuda.local.array(VECTOR, float32)
    affine = Affine(
        cuda.local.array(VECTOR, float32),
        cuda.local.array(VECTOR, float32),
        cuda.local.array(VECTOR, float32),
    )
    rstds = cuda.local.array(VECTOR, float32)
    near = InRegisters(
        cuda.local.array((MAX_NEAR, WORDS), uint32), cuda.local.array((MAX_NEAR, WORDS), uint32)
    )
    before = cuda.local.array((AT_ONCE, WORDS), uint32)
    (weight, bias), (mean, rstd), (P, C, seam, width) = vectors, statistics, shape
    me, threads = this_lane(cut), LANES * cut.rows * cut.parts
    first_channel = int32((cuda.blockIdx.x * cut.parts + me.part) * PART)
    c, b = int32(first_channel + me.in_part), int32(cuda.blockIdx.y)
    beyond, first, step = locate_in_pair(c, me.row, b, P, C, seam, cut.rows)
    _, first_dy, step_dy = locate_in_pair(c, me.row, b, P, C, C, cut.rows)
    # in `kept`: from x to dy, to the next pixel
    half, turn = int32(VECTOR * threads), int32(2 * VECTOR * threads)
    own = int32(cut.ring + VECTOR * int32(cuda.threadIdx.x))
    walk = BackwardWalk(P, first, step, first_dy, step_dy, own, turn, half)
    x_, residual_ = one_of(beyond, x.a, x.b), one_of(beyond, residual.a, residual.b)

    of_sample = int32(b * cut.groups)  # the first of its groups
    # first: every pixel needs these
    load_affine(affine, rstds, weight, bias, mean, rstd, c, of_sample, width)
    channel = int32(first_channel + me.channel)  # whose sums this lane will get
    own_weight, own_rstd = weight[channel], rstd[of_sample + divide(channel, width)[0]]
    ahead = begin_loads(kept, near, x_, dy, cut, me, walk)
    fold_mean(affine, rstds)
    add_gradients(total_gx, total_g, kept, near, x_, dy, ahead, affine, cut, me, walk, activate)
    if adds:
        if (me.lane & 1) == 0:  # two neighbours have the same sector
            prefetch_to_l2(residual_, cut, me, walk)
            if TWO:
                prefetch_to_l2(residual.b, cut, me, walk)
        kept_from = int32(cut.near * cut.rows)
        fetch_residuals(
            residual_,
            residual,
            int32(me.row + kept_from),
            P,
            cut.rows,
            first + cut.near * step,
            step,
            before,
        )
    gx, g = sums_of_warps(sums, total_gx, total_g, cut, me)
    if CLUSTERS:
        gx, g = sums_of_cluster(sums, (gx, g), cut, me)
    gx *= own_rstd  # xhat = (x - mean) · rstd
    # one block of a cluster writes
    if me.warp < cut.parts and has_own_channel(me) and cuda.blockIdx.z == 0:
        at = b * cut.sample + channel
        totals[at], totals[at + cut.bias] = gx, g
    pixels = int32(P * cuda.gridDim.z) if CLUSTERS else P
    slope, offset = averages_of_group(
        sums, gx, g, own_weight, own_rstd, cut, me, width, pixels * width
    )
    for k in range(VECTOR):
        of_k = cuda.shfl_sync(FULL_MASK, slope, me.in_part + k)
        total_gx[k] = -of_k
        total_g[k] = affine.means[k] * of_k - cuda.shfl_sync(FULL_MASK, offset, me.in_part + k)
    write_gradients(
        one_of(beyond, dx.a, dx.b),
        residual_,
        residual,
        before,
        kept,
        near,
        (affine.scales, total_gx, total_g),
        cut,
        me,
        walk,
        adds,
    )
    if CLUSTERS:
        cluster_sync_relaxed()  # no block exits while another may read its sums


BACKWARD_HALF = Variants(
    product(CHANNELS, (False, True)),
    lambda key: specialise(
        backward_half,
        name=f"groupnorm_backward_half_{key[0]}{'_two' if key[1] else ''}",
        launch_bounds=MAX_THREADS,
        # by channels of a warp, and whether there are two residuals
        PART=key[0],
        CLUSTERS=False,
        TWO=key[1],
    ),
)
