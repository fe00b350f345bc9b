"""GroupNorm's backward in one pass, float16, a warp for sixteen channels: one barrier, and a warp that only adds up.

WHAT IS NEW, AND WHY IT PAYS
    In the one-pass backward for any tile (one_pass_backward.py) memory idles for half of the time. Here:
    Sums are joined once. A warp has 16 channels of 16 pixels, two threads for each pixel, and each thread has 16 sums
    (two for each of its eight channels). In four steps threads exchange halves of what they have, 8 + 4 + 2 + 1
    shuffles, until lane n has the warp's sum number n: of g · xhat in lanes 0 to 15, of g in the others. Each warp then
    adds the sums of all warps for itself and gets its averages by shuffles: one barrier instead of three, and 2 KiB of
    shared memory instead of 32. Where the size of a group does not divide 16, a tile is as many sixteens (`parts`) as
    make whole groups, and a second barrier joins the groups that lie in two parts.
    Everything is kept. Of 64×64 pixels of x and dy all but an eighth now fit in shared memory, and that eighth is kept
    in registers (`near` turns of a thread, one or two): nothing is read twice, and nothing is loaded late.
    One warp only adds up. Each part has a last warp without pixels: it writes the part's sums, counts them, and if it
    is the last one of all samples, adds these up, lane n column n, while the other warps write dx. No warp waits.
    The residual is prefetched into the L2 cache after x and dy, which takes no registers, and then loaded four turns at
    a time. Of an input that three operations read (a UNet's skip: the next block's norm and shortcut, and a block on
    the way up) there are two residuals: `groupnorm_backward_half_two` adds them to each other as they arrive, rounded,
    as a kernel of their own would.
    dx is two products: g · scale + (x · slope + offset), where slope and offset contain both averages and the mean.
    From sm_90 on, up to eight blocks (a cluster) share a tile's pixels where one block has no room for them: after the
    barrier each leaves its sums where the others read them (clusters.py).
MEASURED
    NVIDIA H200, 2026-11-26, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    groupnorm_backward, 32×64×64×64, 32×64×64×64, silu, float16
        v3*     29.4 µs    1,714 GB/s   42 % of memory   2.06 × v2
LAUNCH
    grid (C / tile, B, blocks of a cluster); block parts · (team + 1) warps, those with pixels first, of each turn's 16
    pixels one after the other for all parts. Dynamic shared memory: 128 bytes for each warp with pixels, 128 more for
    each of several parts, then the pixels. 96 registers: five warps in each quarter of a multiprocessor.
DETERMINISM, ACCURACY, COST, SOURCE
    as one_pass_backward.py
READ NEXT
    clusters.py.
"""
from typing import NamedTuple

from ...device import cuda, float32, int32, opaque, uint32
from ...device.approximate import reciprocal
from ...device.async_copy import cp_async_commit, cp_async_wait
from ...device.cluster import cluster_address, cluster_sync, cluster_sync_relaxed, load_cluster_4
from ...device.eight import (
    add8,
    by_sign,
    copy8,
    fence,
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
    PARTS,
    VECTOR,
    WARP,
    WARP_BITS,
    WORDS,
    Affine,
    BackwardWalk,
    accumulate,
    clear,
    find_groups,
    gradient8,
    lanes_sum,
    locate,
)

PART = 16  # channels: 32 bytes of a pixel, as memory delivers them
PIXELS = 16  # of a warp: two threads each
MAX_THREADS = 640  # threads: with the 96 registers that each needs, a multiprocessor has room for 20 warps
MAX_NEAR = 2  # turns that registers may keep
CLUSTERS = Constant()  # whether the blocks of a cluster share a tile's pixels (clusters.py)
TWO = Constant()  # whether there are two residuals; the second lies where that of a Pair's other part would


class HalfCut(NamedTuple):
    """How a block is cut.

    parts: of the tile, sixteen channels each; rows: pixels of a turn, 16 for each warp of a part; ring: element at
    which pixels start in shared memory; share: pixels of a group of copies; near: turns that registers keep, then P is
    a multiple of the rows
    """

    parts: int
    rows: int
    ring: int
    share: int
    near: int


class Lane(NamedTuple):
    """A thread's place: its lane, its warp of the block's `warps` with pixels, which part of the tile that has, its
    first pixel, and the first of its eight channels in the part."""

    lane: int
    warp: int
    warps: int
    part: int
    row: int
    in_part: int


class Column(NamedTuple):
    """Sum number `lane` of a warp: of g · xhat, or of g (`is_bias`), of a channel. of_group: rstd's element."""

    is_bias: bool
    channel: int
    group: int
    weight: float
    rstd: float


class Near(NamedTuple):
    """x and dy, later g, of the turns that registers keep, as `fetch8` brings them."""

    x_0: object
    d_0: object
    x_1: object
    d_1: object


@cuda.jit(device=True, forceinline=True)
def this_lane(cut):
    t, team = int32(cuda.threadIdx.x), int32(cut.rows >> 4)  # the warps of a part that have pixels
    lane, warp = int32(t & (WARP - 1)), int32(t >> WARP_BITS)
    of_team, part = divide(warp, cut.parts)
    row, in_part = int32(16 * of_team + (lane >> 1)), int32(VECTOR * (lane & 1))
    return Lane(lane, warp, int32(team * cut.parts), part, row, in_part)


@cuda.jit(device=True, forceinline=True)
def halve(values, count, bit, lane):
    """values[0 … count/2 - 1]: the half of `values` that lanes with this `bit` keep, of this lane and its partner."""
    side, half = -int32(lane & bit), count // 2
    for k in range(half):
        mine = by_sign(side, values[k], values[half + k])
        other = by_sign(side, values[half + k], values[k])
        values[k] = mine + cuda.shfl_xor_sync(FULL_MASK, other, bit)


@cuda.jit(device=True, forceinline=True)
def warp_sum(total_gx, total_g, lane):
    """Lane n: the warp's sum number n; lanes of even and odd number bring channels 0 to 7 and 8 to 15."""
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
    """`ask`; where there are two residuals, of the second, pair.b, too: the sum, for which the thread has to wait.

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
def finish8(dx, i, value, d, scales, slopes, offsets, before, adds):
    """dx of one pixel."""
    for k in range(VECTOR):
        d[k] = d[k] * scales[k] + (value[k] * slopes[k] + offsets[k])
    if adds:
        add8(dx, before, d)
    store8_from(dx, i, d)


@cuda.jit(device=True, forceinline=True)
def add_samples(totals, dweight, dbias, channel, is_bias, C, B):
    """One column: dweight or dbias of `channel` += the sums over the samples of `totals` (2, B, C)."""
    part = cuda.local.array(16, float32)
    at, b = int32(B * C + channel if is_bias else channel), int32(0)
    total = dbias[channel] if is_bias else dweight[channel]
    while b + 16 <= B:  # sixteen loads in flight at once, as each has a long latency
        for k in range(16):
            part[k] = totals[at + k * C]
        for k in range(8):
            part[k] += part[k + 8]
        for k in range(4):
            part[k] += part[k + 4]
        total += (part[0] + part[2]) + (part[1] + part[3])
        b, at = int32(b + 16), int32(at + 16 * C)
    while b < B:
        total += totals[at]
        b, at = int32(b + 1), int32(at + C)
    if is_bias:
        dbias[channel] = total
    else:
        dweight[channel] = total


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
    """Number `lane` of the 32 at a shared address of each block of the cluster, added in their order."""
    total = float32(0)
    address += uint32(16 * (lane >> 2))
    for rank in range(0, blocks, 2):  # two at once: each is several hundred cycles away
        a0, a1, a2, a3 = load_cluster_4(cluster_address(address, uint32(rank)))
        b0, b1, b2, b3 = load_cluster_4(cluster_address(address, uint32(rank + 1)))
        odd, high = -int32(lane & 1), -int32(lane & 2)
        a = by_sign(high, by_sign(odd, a0, a1), by_sign(odd, a2, a3))
        total = (total + a) + by_sign(high, by_sign(odd, b0, b1), by_sign(odd, b2, b3))
    return total


# The kernel's parts ---------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def ask_for_pixels(kept, near, x, dy, cut, me, walk):
    """The producer: ask for x and dy of this thread's pixels.

    The first `cut.near` turns come to registers, the others to `kept`, in PARTS groups of copies.
    """
    if cut.near > 0:
        fetch8(x, walk.first, near.x_0)
        fetch8(dy, walk.first_dy, near.d_0)
    if cut.near > 1:
        fetch8(x, walk.first + walk.step, near.x_1)
        fetch8(dy, walk.first_dy + walk.step_dy, near.d_1)
    p, at = int32(me.row + cut.near * cut.rows), walk.own
    i, i_dy = walk.first + cut.near * walk.step, walk.first_dy + cut.near * walk.step_dy
    for copies in range(PARTS):
        end = int32(min(cut.near * cut.rows + (copies + 1) * cut.share, walk.P))
        while p < end:
            copy8(kept, at, x, i)
            copy8(kept, at + walk.half, dy, i_dy)
            p, at, i, i_dy = int32(p + cut.rows), int32(at + walk.turn), i + walk.step, i_dy + walk.step_dy
        cp_async_commit()


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
    gradient8(value, d, affine.means, affine.scales, affine.shifts, activate)
    accumulate(value, d, total_gx, total_g)
    words8(kept, d, d_words)


@cuda.jit(device=True, forceinline=True)
def add_gradients(total_gx, total_g, kept, near, affine, cut, me, walk, activate):
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
    p, at, end = int32(me.row + cut.near * cut.rows), walk.own, int32(cut.near * cut.rows)
    for _ in range(PARTS):
        cp_async_commit()  # an empty group, so that PARTS of them may be left whichever part it is
        cp_async_wait(PARTS)
        end = int32(min(end + cut.share, walk.P))
        while p < end:
            load8_into(kept, at, value)
            load8_into(kept, at + walk.half, d)
            gradient8(value, d, affine.means, affine.scales, affine.shifts, activate)
            if activate:
                store8_from(kept, at + walk.half, d)
            accumulate(value, d, total_gx, total_g)
            p, at = int32(p + cut.rows), int32(at + walk.turn)


@cuda.jit(device=True, forceinline=True)
def sum_of_warps(sums, cut, me):
    """Sum number `lane` of all warps of this one's part, which all have brought theirs: `warp_sum`'s, 32 a warp."""
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
    """As `sum_of_warps`, of all blocks of the cluster: each part's last warp leaves the block's where all find it."""
    mine = int32(WARP * (me.warps + me.part) + (2 * PART * cut.parts if cut.parts > 1 else 0))
    if me.warp >= me.warps:
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
        if me.warp >= me.warps:
            sums[columns + column.channel] = average
        cuda.syncthreads()
        average = float32(0)
        for k in range(width):
            average += sums[columns + column.group * width + k]
    average *= column.rstd * reciprocal(float32(count))
    return average if column.is_bias else average * column.rstd


@cuda.jit(device=True, forceinline=True)
def count_part(totals, total, parameters, counters, column, first_channel, lane, C):
    """The work of a part's last warp: write its sums, count them, and if they are the last add all samples' up."""
    b, B = int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
    totals[(B + b if column.is_bias else b) * C + column.channel] = total
    before_me = int32(0)
    cuda.syncwarp()
    if lane == 0:
        fence()  # a block that sees this count also sees what the warp has written
        before_me = int32(cuda.atomic.inc(counters, first_channel >> 4, uint32(B - 1)))
        fence()  # nothing that is read from here on is older than the count
    if cuda.shfl_sync(FULL_MASK, before_me, 0) == B - 1:
        cuda.syncwarp()
        add_samples(totals, parameters[0], parameters[1], column.channel, column.is_bias, C, B)


@cuda.jit(device=True, forceinline=True)
def take(value, d, kept, at, half, x_words, d_words, in_registers):
    """x and g of a pixel, from registers or from shared memory."""
    if in_registers:
        numbers8(kept, x_words, value)
        numbers8(kept, d_words, d)
    else:
        load8_into(kept, at, value)
        load8_into(kept, at + half, d)


@cuda.jit(device=True, forceinline=True)
def write_gradients(dx, residual, pair, before, kept, near, factors, cut, me, walk, adds):
    """The epilogue: dx of this thread's pixels, four at a time, whose residual has been asked for; so has the next.

    factors: scales, slopes and offsets of `finish8`
    """
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    scales, slopes, offsets = factors
    before_0, before_1, before_2, before_3 = before
    p, at, i, in_registers = me.row, int32(walk.own - cut.near * walk.turn), walk.first, cut.near * cut.rows
    while p < walk.P:
        take(value, d, kept, at, walk.half, near.x_0, near.d_0, p < in_registers)
        finish8(dx, i, value, d, scales, slopes, offsets, before_0, adds)
        p, at, i = int32(p + cut.rows), int32(at + walk.turn), i + walk.step
        if p < walk.P:
            take(value, d, kept, at, walk.half, near.x_1, near.d_1, p < in_registers)
            finish8(dx, i, value, d, scales, slopes, offsets, before_1, adds)
        p, at, i = int32(p + cut.rows), int32(at + walk.turn), i + walk.step
        if p < walk.P:
            load8_into(kept, at, value)
            load8_into(kept, at + walk.half, d)
            finish8(dx, i, value, d, scales, slopes, offsets, before_2, adds)
        p, at, i = int32(p + cut.rows), int32(at + walk.turn), i + walk.step
        if p < walk.P:
            load8_into(kept, at, value)
            load8_into(kept, at + walk.half, d)
            finish8(dx, i, value, d, scales, slopes, offsets, before_3, adds)
        p, at, i = int32(p + cut.rows), int32(at + walk.turn), i + walk.step
        if adds:
            ask_both(residual, pair, p, walk.P, cut.rows, i, walk.step, before)


@requires("8.0")
def backward_half(dy, x, weight, bias, statistics, residual, dx, totals, parameters, counters, shape, cut,
                  activate, adds):
    """As groupnorm_backward_kernel_v3; cut: a `HalfCut`, P of the shape: pixels of a block; with `TWO` residual.b is
    the second of two."""
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.a.dtype.type, alignment=128)
    total_gx = cuda.local.array(VECTOR, float32)
    total_g = cuda.local.array(VECTOR, float32)
    affine = Affine(cuda.local.array(VECTOR, float32), cuda.local.array(VECTOR, float32),
                    cuda.local.array(VECTOR, float32))
    near = Near(cuda.local.array(WORDS, uint32), cuda.local.array(WORDS, uint32), cuda.local.array(WORDS, uint32),
                cuda.local.array(WORDS, uint32))
    before = (cuda.local.array(WORDS, uint32), cuda.local.array(WORDS, uint32), cuda.local.array(WORDS, uint32),
              cuda.local.array(WORDS, uint32))
    group = cuda.local.array(VECTOR, int32)
    (mean, rstd), (P, C, seam, width) = statistics, shape
    me, threads = this_lane(cut), 2 * cut.rows * cut.parts
    first_channel = int32((cuda.blockIdx.x * cut.parts + me.part) * PART)
    c, b = int32(first_channel + me.in_part), int32(cuda.blockIdx.y)
    beyond, first, step = locate_pixels(c, me.row, b, P, C, seam, cut.rows)
    _, first_dy, step_dy = locate_pixels(c, me.row, b, P, C, C, cut.rows)
    half, turn = int32(VECTOR * threads), int32(2 * VECTOR * threads)  # in `kept`: from x to dy, to the next pixel
    own = int32(cut.ring + VECTOR * int32(cuda.threadIdx.x))
    walk = BackwardWalk(P, first, step, first_dy, step_dy, own, turn, half)

    if me.warp < me.warps:
        ask_for_pixels(kept, near, one_of(beyond, x.a, x.b), dy, cut, me, walk)
        if adds and (int32(cuda.threadIdx.x) & 1) == 0:  # both threads of a pixel have the same 32 bytes
            prefetch_to_l2(one_of(beyond, residual.a, residual.b), cut, me, walk)
            if TWO:
                prefetch_to_l2(residual.b, cut, me, walk)
    of_sample = int32(b * divide(C, width)[0])  # the first of its groups
    find_groups(c, width, group)
    load8_into(weight, c, affine.scales)
    load8_into(bias, c, affine.shifts)
    for k in range(VECTOR):
        affine.means[k] = mean[of_sample + group[k]]
        affine.scales[k] *= rstd[of_sample + group[k]]

    if me.warp < me.warps:
        add_gradients(total_gx, total_g, kept, near, affine, cut, me, walk, activate)
        column, total = warp_sum(total_gx, total_g, me.lane)
        sums[WARP * me.warp + column] = total
        # again: kept, they would take six registers
        beyond, first, step = locate_pixels(opaque(c), me.row, b, P, C, seam, cut.rows)
        if adds:
            ask_both(one_of(beyond, residual.a, residual.b), residual, me.row, P, cut.rows, first, step, before)
    channel = int32(first_channel + (me.lane & (PART - 1)))  # of sum number `lane`
    of_group = divide(channel, width)[0]
    mine = Column(me.lane >= PART, channel, of_group, weight[channel], rstd[of_sample + of_group])
    cuda.syncthreads()

    total = sum_of_warps(sums, cut, me)
    if CLUSTERS:
        total = sum_of_cluster(sums, total, cut, me)
    if not mine.is_bias:
        total *= mine.rstd  # xhat = (x - mean) · rstd
    average = average_of_group(sums, total, mine, cut, me, width, (P * cuda.gridDim.z if CLUSTERS else P) * width)
    if me.warp >= me.warps:
        if CLUSTERS and cuda.blockIdx.z > 0:  # the cluster's first block counts for all
            return
        count_part(totals, total, parameters, counters, mine, first_channel, me.lane, C)
    else:
        for k in range(VECTOR):
            slope = cuda.shfl_sync(FULL_MASK, average, me.in_part + k)
            total_gx[k] = -slope
            total_g[k] = affine.means[k] * slope - cuda.shfl_sync(FULL_MASK, average, PART + me.in_part + k)
        beyond, first, step = locate_pixels(opaque(c), me.row, b, P, C, seam, cut.rows)
        walk = BackwardWalk(P, first, step, first_dy, step_dy, own, turn, half)
        write_gradients(one_of(beyond, dx.a, dx.b), one_of(beyond, residual.a, residual.b), residual, before, kept,
                        near, (affine.scales, total_gx, total_g), cut, me, walk, adds)


groupnorm_backward_half = specialise(backward_half, name="groupnorm_backward_half", launch_bounds=MAX_THREADS,
                                     CLUSTERS=False, TWO=False)
groupnorm_backward_half_two = specialise(backward_half, name="groupnorm_backward_half_two", launch_bounds=MAX_THREADS,
                                         CLUSTERS=False, TWO=True)
