"""GroupNorm's backward in one pass, 16 bits, sixteen channels a warp: one barrier, and copies a few turns ahead.

WHAT IS NEW, AND WHY IT PAYS
    In the one-pass backward for any tile (one_pass_backward.py) memory is idle half of the time. Here:
    Sums are joined once. In a turn a warp has 16 channels of 16 pixels, two threads a pixel, and each thread has 16
    sums (two for each of its eight channels). In four steps threads exchange halves of what they have, 8 + 4 + 2 + 1
    shuffles, until each lane has one of the warp's 32 sums; in shared memory those of g · (x - mean) come first, then
    those of g. Each warp then adds up the sums of all warps for itself and gets its averages by shuffles: one barrier
    instead of three, and 2 KiB of shared memory instead of 32. Where the size of a group does not divide 16, a tile is
    as many sixteens (`parts`) as make whole groups, and a second barrier joins the groups that lie in two parts.
    Everything is kept. Of 64×64 pixels of x and dy all but an eighth now fit in shared memory, and that eighth is kept
    in registers (`near` turns of a thread, at most two): nothing is read twice, and nothing is loaded late.
    Copies are issued AHEAD turns ahead, one turn's with each turn that is worked on. Were all issued at once, a warp
    would have to issue its last copy before its first sum, and stall wherever no more may be in flight.
    Eight SiLU' side by side. A special function takes dozens of cycles; one channel after the other, as ptxas arranges
    them when registers are few, a turn takes 8 times the latency from x to g. `through_silu8` takes each step for all
    eight: a thread has 128 registers for that, since a block has at most 16 warps.
    No block counts. The sums of a sample go to memory, and another launch adds up the samples', in a training step
    together with other layers' gradients (second_pass.py). Were it done here, the last block would end after all the
    others: a fence, the count, and two loads, one after the other.
    The residual is prefetched into the L2 cache after x and dy, which takes no registers, and then loaded four turns at
    a time. An input that three operations read (a UNet's skip: the next block's norm and shortcut, and a block on the
    way up) has two residuals: `groupnorm_backward_half_two` adds them to each other as they arrive, rounded, as a
    kernel of their own would.
    The mean is part of the shift: z = x · scale + shift, and the sums are of g · x, from which a thread takes away mean
    · Σg once it has seen its pixels, a few dozen. The error, 2⁻²⁴ of x, is far below the 2⁻¹¹ of float16 itself.
    dx is two products: g · scale + (x · slope + offset), where slope and offset contain both averages and the mean.
    From sm_90 on, up to eight blocks (a cluster) share a tile's pixels where one block has no room for them: after the
    barrier each leaves its sums in shared memory, where the others read them (clusters.py).
MEASURED
    NVIDIA H200, 2026-11-26, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    groupnorm_backward, 32×64×64×64, 32×64×64×64, silu, float16
        v3*     23.9 µs    2,109 GB/s   51 % of memory   2.39 × v2
LAUNCH
    grid (C / tile, B, blocks of a cluster); a block has parts · team warps: warp w has part w % parts, and of each turn
    the 16 pixels number w // parts. Dynamic shared memory: 128 bytes for each warp, 128 more for each of several parts,
    128 more for each part in a cluster, then the pixels. 128 registers: four warps in each quarter of a multiprocessor.
DETERMINISM, ACCURACY, COST, SOURCE
    as one_pass_backward.py
READ NEXT
    clusters.py.
"""
from typing import NamedTuple

from ...device import cuda, float32, int32, int64, opaque, uint32
from ...device.approximate import reciprocal
from ...device.async_copy import cp_async_commit, cp_async_wait
from ...device.cluster import cluster_address, cluster_sync, cluster_sync_relaxed, load_cluster_4
from ...device.eight import (
    add8,
    by_sign,
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
from ...device.mbarrier import smem_u32
from ...device.requires import requires
from ...device.specialise import Constant, specialise
from ..common import divide
from .vectors import (
    VECTOR,
    WARP,
    WARP_BITS,
    WORDS,
    Affine,
    BackwardWalk,
    accumulate,
    clear,
    lanes_sum,
    locate,
    through_silu8,
)

PART = 16  # channels: 32 bytes of a pixel, one sector of memory
PIXELS = 16  # of a warp: two threads each
MAX_THREADS = 512  # threads: with 128 registers each a multiprocessor has room for 16 warps
MAX_NEAR = 2  # turns that a thread's registers may keep
AHEAD = 2  # turns whose copies are in flight: 32 KiB for a multiprocessor with 16 warps
CLUSTERS = Constant()  # whether the blocks of a cluster share a tile's pixels (clusters.py)
TWO = Constant()  # whether there are two residuals: the second takes the place of a Pair's b


class HalfCut(NamedTuple):
    """How a block is cut.

    parts: of the tile, sixteen channels each; rows: pixels of a turn, 16 for each warp of a part; ring: element at
    which pixels start in shared memory; near: turns that registers keep (if any, P is a multiple of rows); groups: of a
    sample; sample, bias: in totals, elements from a sample's sums to the next one's, and from weight's to bias's
    """

    parts: int
    rows: int
    ring: int
    near: int
    groups: int
    sample: int
    bias: int


class Lane(NamedTuple):
    """A thread's place: its lane, its warp of the block's `warps`, which part of the tile that has, its first pixel,
    and the first of its eight channels in the part."""

    lane: int
    warp: int
    warps: int
    part: int
    row: int
    in_part: int


class Column(NamedTuple):
    """Sum number `lane` of a part: of g · xhat, or of g (`is_bias`), of a channel with this group, weight and rstd."""

    is_bias: bool
    channel: int
    group: int
    weight: float
    rstd: float


class Ahead(NamedTuple):
    """A thread's next pixel to be copied: its number, its place in shared memory, its elements of x and dy."""

    p: int
    at: int
    i: int
    i_dy: int


class Pixel(NamedTuple):
    """A thread's next pixel to be written: its number, its place in shared memory, its element of dx."""

    p: int
    at: int
    i: int


class Near(NamedTuple):
    """x and dy, later g, of the turns that registers keep, as `fetch8` brings them."""

    x_0: object
    d_0: object
    x_1: object
    d_1: object


@cuda.jit(device=True, forceinline=True)
def this_lane(cut):
    t, team = int32(cuda.threadIdx.x), int32(cut.rows >> 4)  # warps of a part
    lane, warp = int32(t & (WARP - 1)), int32(t >> WARP_BITS)
    of_team, part = divide(warp, cut.parts)
    row, in_part = int32(16 * of_team + (lane >> 1)), int32(VECTOR * (lane & 1))
    return Lane(lane, warp, int32(team * cut.parts), part, row, in_part)


@cuda.jit(device=True, forceinline=True)
def halve(values, count, bit, lane):
    """values[0 … count/2 - 1] = the half of `values` that this lane keeps (by its `bit`), plus its partner's."""
    side, half = -int32(lane & bit), count // 2
    for k in range(half):
        mine = by_sign(side, values[k], values[half + k])
        other = by_sign(side, values[half + k], values[k])
        values[k] = mine + cuda.shfl_xor_sync(FULL_MASK, other, bit)


@cuda.jit(device=True, forceinline=True)
def warp_sum(total_gx, total_g, lane):
    """(number, value) of the warp's sum that this lane gets; even lanes bring channels 0 to 7, odd ones 8 to 15."""
    side = -int32(lane & 16)
    for k in range(VECTOR):
        mine = by_sign(side, total_gx[k], total_g[k])
        other = by_sign(side, total_g[k], total_gx[k])
        total_gx[k] = mine + cuda.shfl_xor_sync(FULL_MASK, other, 16)
    halve(total_gx, 8, 8, lane)
    halve(total_gx, 4, 4, lane)
    halve(total_gx, 2, 2, lane)
    column = int32((lane & 16) + VECTOR * (lane & 1) + ((lane >> 1) & 7))
    return column, total_gx[0]


@cuda.jit(device=True, forceinline=True)
def ask(residual, p, P, rows, i, step, before):
    """Load the residual of a thread's next four pixels, all at once, so that ptxas waits once for all four."""
    before_0, before_1, before_2, before_3 = before
    if p < P:
        fetch8(residual, i, before_0)
    if p + rows < P:
        fetch8(residual, i + step, before_1)
    if p + 2 * rows < P:
        fetch8(residual, i + 2 * step, before_2)
    if p + 3 * rows < P:
        fetch8(residual, i + 3 * step, before_3)


@cuda.jit(device=True, forceinline=True)
def add_words(array, words, more, number):
    """words += more, both as `fetch8` brings them, rounded; number: eight float32 to work with."""
    numbers8(array, words, number)
    add8(array, more, number)
    words8(array, number, words)


@cuda.jit(device=True, forceinline=True)
def ask_both(residual, pair, p, P, rows, i, step, before):
    """`ask`; where there are two residuals, the sum with the second, pair.b, for which the thread has to wait.

    Two pixels at a time: registers are short.
    """
    ask(residual, p, P, rows, i, step, before)
    if TWO:
        number, more_0, more_1 = (cuda.local.array(VECTOR, float32), cuda.local.array(WORDS, uint32),
                                  cuda.local.array(WORDS, uint32))
        before_0, before_1, before_2, before_3 = before
        if p < P:
            fetch8(pair.b, i, more_0)
        if p + rows < P:
            fetch8(pair.b, i + step, more_1)
        if p < P:
            add_words(residual, before_0, more_0, number)
        if p + rows < P:
            add_words(residual, before_1, more_1, number)
        if p + 2 * rows < P:
            fetch8(pair.b, i + 2 * step, more_0)
        if p + 3 * rows < P:
            fetch8(pair.b, i + 3 * step, more_1)
        if p + 2 * rows < P:
            add_words(residual, before_2, more_0, number)
        if p + 3 * rows < P:
            add_words(residual, before_3, more_1, number)


@cuda.jit(device=True, forceinline=True)
def finish8(dx, i, value, d, factors, before, adds):
    """dx of one pixel."""
    scales, slopes, offsets = factors
    for k in range(VECTOR):
        d[k] = d[k] * scales[k] + (value[k] * slopes[k] + offsets[k])
    if adds:
        add8(dx, before, d)
    store8_from(dx, i, d)


@cuda.jit(device=True, forceinline=True)
def locate_pixels(c, row, b, P, C, seam, rows):
    """`locate` for a row of the pixels that this block of a cluster has; with two residuals x is one array."""
    if TWO:
        _, first, step = locate(c, row, b, P, C, C, rows)
        return int32(-1), first, step
    if not CLUSTERS:
        return locate(c, row, b, P, C, seam, rows)
    mine = opaque(P)  # so that nothing of this is kept
    return locate(c, int32(row + mine * cuda.blockIdx.z), b, int32(mine * cuda.gridDim.z), C, seam, rows)


@cuda.jit(device=True, forceinline=True)
def sum_of_blocks(address, lane, blocks):
    """Number `lane` of the 32 at a shared address of each block of the cluster, added up in order of rank."""
    total = float32(0)
    address += uint32(16 * (lane >> 2))
    for rank in range(0, blocks, 2):  # two at once: a load takes several hundred cycles
        a0, a1, a2, a3 = load_cluster_4(cluster_address(address, uint32(rank)))
        b0, b1, b2, b3 = load_cluster_4(cluster_address(address, uint32(rank + 1)))
        odd, high = -int32(lane & 1), -int32(lane & 2)
        a = by_sign(high, by_sign(odd, a0, a1), by_sign(odd, a2, a3))
        total = (total + a) + by_sign(high, by_sign(odd, b0, b1), by_sign(odd, b2, b3))
    return total


@cuda.jit(device=True, forceinline=True)
def ask_for_affine(affine, rstds, weight, bias, mean, rstd, c, of_sample, width):
    """Load weight (to scales), bias (to shifts), mean and rstd for the eight channels from c on."""
    load8_into(weight, c, affine.scales)
    load8_into(bias, c, affine.shifts)
    group, before = divide(c, width)
    at, left = uint32(of_sample + group), int32(width - before)  # channels of this group from here on
    for k in range(VECTOR):
        affine.means[k], rstds[k] = mean[at], rstd[at]
        left = int32(left - 1)
        if left == 0:
            at, left = uint32(at + 1), int32(width)


@cuda.jit(device=True, forceinline=True)
def join_affine(affine, rstds):
    """z = x · scale + shift, the mean in the shift."""
    for k in range(VECTOR):
        affine.scales[k] *= rstds[k]
        affine.shifts[k] -= affine.means[k] * affine.scales[k]


# The kernel's parts ---------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def copy_next(kept, x, dy, ahead, cut, walk):
    """Start the copies of x and dy of this thread's next pixel, if there is one, as a cp.async group of their own."""
    if ahead.p < walk.P:
        copy8(kept, ahead.at, x, ahead.i)
        copy8(kept, ahead.at + walk.half, dy, ahead.i_dy)
    cp_async_commit()
    return Ahead(int32(ahead.p + cut.rows), int32(ahead.at + walk.turn), int64(ahead.i + walk.step),
                 int64(ahead.i_dy + walk.step_dy))


@cuda.jit(device=True, forceinline=True)
def ask_for_pixels(kept, near, x, dy, cut, me, walk):
    """Load x and dy of the `cut.near` turns in registers, and start the copies of the first AHEAD turns in `kept`."""
    if cut.near > 0:
        fetch8(x, walk.first, near.x_0)
        fetch8(dy, walk.first_dy, near.d_0)
    if cut.near > 1:
        fetch8(x, walk.first + walk.step, near.x_1)
        fetch8(dy, walk.first_dy + walk.step_dy, near.d_1)
    ahead = Ahead(int32(me.row + cut.near * cut.rows), walk.own, int64(walk.first + cut.near * walk.step),
                  int64(walk.first_dy + cut.near * walk.step_dy))
    for _ in range(opaque(AHEAD)):  # a loop, past which ptxas moves no load
        ahead = copy_next(kept, x, dy, ahead, cut, walk)
    return ahead


@cuda.jit(device=True, forceinline=True)
def prefetch_to_l2(residual, cut, me, walk):
    """Prefetch the residual of this thread's pixels into the L2 cache, from which the epilogue will load it."""
    p, i = me.row, walk.first
    while p < walk.P:
        prefetch_l2(residual, i)
        p, i = int32(p + cut.rows), i + walk.step


@cuda.jit(device=True, forceinline=True)
def add_near(total_gx, total_g, kept, x_words, d_words, affine, activate):
    """`add_gradients` for a pixel in registers: g takes dy's place."""
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    numbers8(kept, x_words, value)
    numbers8(kept, d_words, d)
    through_silu8(kept, value, d, affine.scales, affine.shifts, activate)
    accumulate(value, d, total_gx, total_g)
    words8(kept, d, d_words)


@cuda.jit(device=True, forceinline=True)
def add_gradients(total_gx, total_g, kept, near, x, dy, ahead, affine, cut, me, walk, activate):
    """This thread's sums of g · (x - mean) and g, channel by channel, over its pixels as they come. g takes dy's place.

    It waits only for its own copies, as it reads only what it copied itself.
    """
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    clear(total_gx)
    clear(total_g)
    if cut.near > 0:
        add_near(total_gx, total_g, kept, near.x_0, near.d_0, affine, activate)
    if cut.near > 1:
        add_near(total_gx, total_g, kept, near.x_1, near.d_1, affine, activate)
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


@cuda.jit(device=True, forceinline=True)
def sum_of_warps(sums, cut, me):
    """Sum number `lane` over all warps of this one's part, from what `warp_sum` gave each: 32 numbers a warp."""
    total, w, parts = float32(0), me.part, cut.parts
    while w + 3 * parts < me.warps:
        s0, s1, s2, s3 = (sums[WARP * w + me.lane], sums[WARP * (w + parts) + me.lane],
                          sums[WARP * (w + 2 * parts) + me.lane], sums[WARP * (w + 3 * parts) + me.lane])
        total += (s0 + s1) + (s2 + s3)
        w = int32(w + 4 * parts)
    while w < me.warps:
        total += sums[WARP * w + me.lane]
        w = int32(w + parts)
    return total


@cuda.jit(device=True, forceinline=True)
def sum_of_cluster(sums, total, cut, me):
    """As `sum_of_warps`, over all blocks of the cluster: each part's first warp leaves its block's for all to read."""
    mine = int32(WARP * (me.warps + me.part) + (2 * PART * cut.parts if cut.parts > 1 else 0))
    if me.warp < cut.parts:
        sums[mine + me.lane] = total
    cluster_sync()
    total = sum_of_blocks(smem_u32(sums) + uint32(4 * mine), me.lane, int32(cuda.gridDim.z))
    cluster_sync_relaxed()  # nobody reads any more
    return total


@cuda.jit(device=True, forceinline=True)
def average_of_group(sums, total, column, cut, me, width, count):
    """Lane n: the average of h · xhat, times rstd² (n < 16), or of h, times rstd, over the group of its channel.

    count: elements of a group. Where groups lie across parts, all threads of the block call it.
    """
    average = total * column.weight
    if cut.parts == 1:
        average = lanes_sum(average, width)
    else:  # groups lie across parts
        columns = int32(WARP * me.warps + (PART * cut.parts if column.is_bias else 0)
                        - cuda.blockIdx.x * PART * cut.parts)
        if me.warp < cut.parts:
            sums[columns + column.channel] = average
        cuda.syncthreads()
        average = float32(0)
        for k in range(width):
            average += sums[columns + column.group * width + k]
    average *= column.rstd * reciprocal(float32(count))
    return average if column.is_bias else average * column.rstd


@cuda.jit(device=True, forceinline=True)
def finish_next(dx, kept, pixel, before, factors, cut, walk, adds):
    """dx of this thread's next pixel, if there is one."""
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    if pixel.p < walk.P:
        load8_into(kept, pixel.at, value)
        load8_into(kept, pixel.at + walk.half, d)
        finish8(dx, pixel.i, value, d, factors, before, adds)
    return Pixel(int32(pixel.p + cut.rows), int32(pixel.at + walk.turn), int64(pixel.i + walk.step))


@cuda.jit(device=True, forceinline=True)
def finish_near(dx, kept, i, x_words, d_words, before, factors, adds):
    """dx of a pixel in registers."""
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    numbers8(kept, x_words, value)
    numbers8(kept, d_words, d)
    finish8(dx, i, value, d, factors, before, adds)


@cuda.jit(device=True, forceinline=True)
def write_gradients(dx, residual, pair, before, kept, near, factors, cut, me, walk, adds):
    """The epilogue: dx of this thread's pixels, four at a time; the residual of each four is loaded before their turn.

    before: the residual of the first four, which the caller has loaded; factors: scales, slopes, offsets of `finish8`
    """
    before_0, before_1, before_2, before_3 = before
    pixel = Pixel(int32(me.row + cut.near * cut.rows), walk.own, int64(walk.first + cut.near * walk.step))
    while pixel.p < walk.P:
        pixel = finish_next(dx, kept, pixel, before_0, factors, cut, walk, adds)
        pixel = finish_next(dx, kept, pixel, before_1, factors, cut, walk, adds)
        pixel = finish_next(dx, kept, pixel, before_2, factors, cut, walk, adds)
        pixel = finish_next(dx, kept, pixel, before_3, factors, cut, walk, adds)
        if adds:
            ask_both(residual, pair, pixel.p, walk.P, cut.rows, pixel.i, walk.step, before)
    if cut.near > 0:
        if adds:
            ask_both(residual, pair, me.row, cut.near * cut.rows, cut.rows, walk.first, walk.step, before)
        finish_near(dx, kept, walk.first, near.x_0, near.d_0, before_0, factors, adds)
    if cut.near > 1:
        finish_near(dx, kept, walk.first + walk.step, near.x_1, near.d_1, before_1, factors, adds)


@requires("8.0")
def backward_half(dy, x, weight, bias, statistics, residual, dx, totals, shape, cut, activate, adds):
    """dx (B, P, C), and for each sample the sums of g · xhat and g: totals (B, 2, C) or (2, B, C).

    dy (B, P, C); x, residual, dx: `Pair`s, with `TWO` residual.b is the second of two; weight, bias (C,) and
    statistics, mean and rstd (B, G): float32; shape: a `Shape`, its P the pixels of a block; cut: a `HalfCut`
    """
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.a.dtype.type, alignment=128)
    total_gx = cuda.local.array(VECTOR, float32)
    total_g = cuda.local.array(VECTOR, float32)
    affine = Affine(cuda.local.array(VECTOR, float32), cuda.local.array(VECTOR, float32),
                    cuda.local.array(VECTOR, float32))
    rstds = cuda.local.array(VECTOR, float32)
    near = Near(cuda.local.array(WORDS, uint32), cuda.local.array(WORDS, uint32), cuda.local.array(WORDS, uint32),
                cuda.local.array(WORDS, uint32))
    before = (cuda.local.array(WORDS, uint32), cuda.local.array(WORDS, uint32), cuda.local.array(WORDS, uint32),
              cuda.local.array(WORDS, uint32))
    (mean, rstd), (P, C, seam, width) = statistics, shape
    me, threads = this_lane(cut), 2 * cut.rows * cut.parts
    first_channel = int32((cuda.blockIdx.x * cut.parts + me.part) * PART)
    c, b = int32(first_channel + me.in_part), int32(cuda.blockIdx.y)
    beyond, first, step = locate_pixels(c, me.row, b, P, C, seam, cut.rows)
    _, first_dy, step_dy = locate_pixels(c, me.row, b, P, C, C, cut.rows)
    half, turn = int32(VECTOR * threads), int32(2 * VECTOR * threads)  # in `kept`: from x to dy, to the next pixel
    own = int32(cut.ring + VECTOR * int32(cuda.threadIdx.x))
    walk = BackwardWalk(P, first, step, first_dy, step_dy, own, turn, half)
    x_, residual_ = one_of(beyond, x.a, x.b), one_of(beyond, residual.a, residual.b)

    of_sample = int32(b * cut.groups)  # the first of its groups
    ask_for_affine(affine, rstds, weight, bias, mean, rstd, c, of_sample, width)  # first: every pixel needs these
    channel = int32(first_channel + (me.lane & (PART - 1)))  # of sum number `lane`
    of_group = divide(channel, width)[0]
    mine = Column(me.lane >= PART, channel, of_group, weight[channel], rstd[of_sample + of_group])
    ahead = ask_for_pixels(kept, near, x_, dy, cut, me, walk)
    join_affine(affine, rstds)
    add_gradients(total_gx, total_g, kept, near, x_, dy, ahead, affine, cut, me, walk, activate)
    if adds:
        if (me.lane & 1) == 0:  # both threads of a pixel have the same 32 bytes
            prefetch_to_l2(residual_, cut, me, walk)
            if TWO:
                prefetch_to_l2(residual.b, cut, me, walk)
        kept_from = int32(cut.near * cut.rows)
        ask_both(residual_, residual, int32(me.row + kept_from), P, cut.rows, first + cut.near * step, step, before)
    column, total = warp_sum(total_gx, total_g, me.lane)
    sums[WARP * me.warp + column] = total
    cuda.syncthreads()

    total = sum_of_warps(sums, cut, me)
    if CLUSTERS:
        total = sum_of_cluster(sums, total, cut, me)
    if not mine.is_bias:
        total *= mine.rstd  # xhat = (x - mean) · rstd
    if me.warp < cut.parts and cuda.blockIdx.z == 0:  # a cluster's are written by its first block
        totals[b * cut.sample + (cut.bias if mine.is_bias else 0) + channel] = total
    average = average_of_group(sums, total, mine, cut, me, width, (P * cuda.gridDim.z if CLUSTERS else P) * width)
    for k in range(VECTOR):
        slope = cuda.shfl_sync(FULL_MASK, average, me.in_part + k)
        total_gx[k] = -slope
        total_g[k] = affine.means[k] * slope - cuda.shfl_sync(FULL_MASK, average, PART + me.in_part + k)
    write_gradients(one_of(beyond, dx.a, dx.b), residual_, residual, before, kept, near,
                    (affine.scales, total_gx, total_g), cut, me, walk, adds)


groupnorm_backward_half = specialise(backward_half, name="groupnorm_backward_half", launch_bounds=MAX_THREADS,
                                     CLUSTERS=False, TWO=False)
groupnorm_backward_half_two = specialise(backward_half, name="groupnorm_backward_half_two", launch_bounds=MAX_THREADS,
                                         CLUSTERS=False, TWO=True)
