"""GroupNorm, rung 3: one kernel a pass, which keeps what it normalises in shared memory.

WHAT IS NEW, AND WHY IT PAYS
    A block owns whole groups of one sample with all their pixels, so nothing is left for other
    kernels to join: the forward is 1 launch instead of version 2's 3, the backward 1 instead of 5,
    and each launch that waits for the one before costs about 4 µs. What is read stays in shared
    memory for the later sweeps over it. Copies by cp.async need no registers on the way, so all of
    the block's loads are in flight at once, and the sums begin before the last have arrived. In
    float32 it is as fast as version 2 (H100: 0.99 to 1.02×). It is kept for that type since the
    same text takes 16-bit images that one_pass_half.py has no plan for, and `choose_plan` compares
    the forecasts of both.
    What a thread needs besides pixels it loads while those are in flight, or while threads wait for
    each other.
TILE
    `tile` neighbouring channels (whole groups, a multiple of 8) with all pixels. Pixels that do not
    fit in shared memory are read again in each sweep, most likely from the L2 cache.
    A thread has eight channels: 16 bytes of float16, 32 of float32. It reads only what it copied
    itself, so only the sums need barriers.
TWO ARRAYS AS ONE
    x may be a `Pair` (concat.py): two arrays whose channels are numbered consecutively, as where a
    UNet's skip connection joins. The seam is a multiple of 8, so all channels of a thread are in
    one of the two, which it chooses once, at the start; a group may have channels of both. A single
    array is passed as the Pair of itself and itself, with the seam at C.
LAUNCH
    grid (C / tile, B), block (tile / 8, rows): whole warps, up to 512 threads. Dynamic shared
    memory: the sums of all threads (32 bytes each, backward 64), then pixels. `choose_plan`
    forecasts the time of every tile and takes the best (plan.py).
DETERMINISM
    no atomics on numbers: a thread adds its pixels, a few threads add the threads' sums, in an
    order that the plan decides, and so the shape, the type and the size of the device.
ACCURACY
    One sweep brings both sums: a thread adds up x less its first pixel, and the squares of that, of
    a few dozen pixels. From these follow its mean and its squares about it, and once the group's
    mean is known n · (own - mean)² is added to them (Chan et al.). Little cancels: the first pixel
    is among those whose squares are added up, so of n pixels the squares about it are at most n + 1
    times those about the mean, and n is MOST_PIXELS at most (plan.py).
    Arithmetic is float32 for arrays of float16, too. SiLU takes the hardware's approximate 2ˣ and
    1/x for float32: from what `math.exp` and a rounded division give it differs by at most 2⁻²¹ of
    its value where |z| < 16; for 16 bits its approximate tanh, by at most 2⁻¹² · |z|.
COST
    x read and y written once. Roof: memory bandwidth.
SOURCE
    reference.py for the mathematics; Chan, Golub and LeVeque 1983, "Algorithms for computing the
    sample variance", eq. 1.5 (sums of two parts joined); PTX ISA, sections 9.7.3
    (rcp.approx.ftz.f32, tanh.approx.f32) and 9.7.9.25.3 (cp.async).
READ NEXT
    one_pass_backward.py
"""

import math
from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, load4
from ...device.async_copy import cp_async_commit, cp_async_wait
from ...device.common import divide
from ...device.eight import copy8, load8_into, one_of, store8_from
from ...device.requires import requires
from .vectors import (
    PARTS,
    THREADS,
    VECTOR,
    WARP,
    WARP_BITS,
    Affine,
    NormVectorWalk,
    clear,
    find_groups,
    lanes_sum,
    locate,
    silu8,
)


class OnePassCut(NamedTuple):
    """How a block's memory is cut: see `Plan`. groups: of its channels"""

    groups: int
    ring: int
    held: int
    share: int


class OnePassThread(NamedTuple):
    """A thread's place: number t of its block's `threads`, in a row of `lanes` of its `rows`; row:
    its first pixel."""

    t: int
    row: int
    lanes: int
    rows: int
    threads: int


@device_inline
def this_thread():
    lanes, rows = int32(cuda.blockDim.x), int32(cuda.blockDim.y)
    row, threads = int32(cuda.threadIdx.y), int32(lanes * rows)
    return OnePassThread(int32(row * lanes + cuda.threadIdx.x), row, lanes, rows, threads)


# A block's sums -----------------------------------------------------------------------------------


@device_inline
def pick(values, first, groups, into):
    for k in range(VECTOR):
        into[k] = values[first + groups[k]]


@device_inline
def place_of(me):
    """The place of a thread's sums among the `rows` of a channel: threads of a warp then use
    different banks."""
    apart = divide(int32(WARP), me.lanes)[0]
    return divide(int32(me.row + int32(cuda.threadIdx.x) * max(int32(1), apart)), me.rows)[1]


@device_inline
def put(sums, first, rows, place, values):
    """A thread's sums of its channels; a channel has `rows` places, one for each thread that shares
    it."""
    for k in range(VECTOR):
        sums[first + k * rows + place] = values[k]


@device_inline
def group_averages(sums, me, averages, groups, width, m, eps, roots):
    """averages[group] from the threads' sums; with `roots` 1 / √(average + eps). All threads call
    it."""
    lane, warp, warps = (
        int32(me.t & (WARP - 1)),
        int32(me.t >> WARP_BITS),
        int32(me.threads >> WARP_BITS),
    )
    cuda.syncthreads()  # all have brought their sums
    group, count = int32(warp), int32(width * me.rows)
    while group < groups:
        total = float32(0)
        e, first = int32(4 * lane), int32(group * count)
        while e < count:
            s0, s1, s2, s3 = load4(sums, first + e)
            total += (s0 + s1) + (s2 + s3)
            e += int32(4 * WARP)
        total = lanes_sum(total, WARP) / m
        if lane == 0:
            sums[averages + group] = float32(1) / math.sqrt(total + eps) if roots else total
        group += warps
    cuda.syncthreads()


# The sweeps of a thread ---------------------------------------------------------------------------
# `kept` sees the same memory as `sums`, from element `ring` on: one turn of all threads after the
# other, `held` pixels.


@device_inline
def copy_ahead(kept, part_x, cut, me, walk):
    """The producer: load this thread's pixels that shared memory keeps, in PARTS groups of copies.

    Returns the first pixel that has no room there, and its element.
    """
    p, at, i = me.row, walk.own, walk.first
    for part in range(PARTS):
        end = int32(min((part + 1) * cut.share, cut.held))
        while p < end:
            copy8(kept, at, part_x, i)
            p, at, i = int32(p + me.rows), int32(at + walk.turn), i + walk.step
        cp_async_commit()
    return p, i


@device_inline
def add_away(total, squares, origin, value):
    for k in range(VECTOR):
        d = value[k] - origin[k]
        total[k] += d
        squares[k] += d * d


@device_inline
def add_channels(total, squares, origin, kept, part_x, cut, me, walk, p, i):
    """This thread's sums of x - origin and of its square, channel by channel, first over the pixels
    from p on that have no room, then over those in shared memory, as they come. It waits for its
    own copies alone: it reads what it asked for itself."""
    value = cuda.local.array(VECTOR, float32)
    clear(total)
    clear(squares)
    while p < walk.P:
        load8_into(part_x, i, value)
        add_away(total, squares, origin, value)
        p, i = int32(p + me.rows), i + walk.step
    p, at = me.row, walk.own
    for part in range(PARTS):
        cp_async_commit()  # an empty group, so that PARTS of them may be left whichever part it is
        cp_async_wait(PARTS)
        end = int32(min((part + 1) * cut.share, cut.held))
        while p < end:
            load8_into(kept, at, value)
            add_away(total, squares, origin, value)
            p, at = int32(p + me.rows), int32(at + walk.turn)


@device_inline
def about_own_mean(away, squares, origin, whole, n):
    """From a thread's sums over n pixels: whole = Σx, squares = Σ(x - its mean)², away = its mean -
    origin."""
    share = float32(1) / max(n, float32(1))
    for k in range(VECTOR):
        total = away[k]
        away[k] = total * share
        squares[k] = max(squares[k] - total * away[k], float32(0))
        whole[k] = n * origin[k] + total


@device_inline
def about_group_mean(squares, means, origin, away, n):
    """squares = Σ(x - the group's mean)², from those about the thread's own mean, origin + away."""
    if n > 0:
        for k in range(VECTOR):
            d = (origin[k] - means[k]) + away[k]
            squares[k] += n * (d * d)


@device_inline
def normalise(y, i, value, affine, activate):
    means, scales, shifts = affine
    for k in range(VECTOR):
        value[k] = (value[k] - means[k]) * scales[k] + shifts[k]
    if activate:
        silu8(y, value)
    store8_from(y, i, value)


@device_inline
def write_normalised(y, i_y, step_y, affine, kept, part_x, cut, me, walk, rest, rest_at, activate):
    """The epilogue: y = (x - mean) · scale + shift, its SiLU with `activate`, of all this thread's
    pixels."""
    value = cuda.local.array(VECTOR, float32)
    p, at = me.row, walk.own
    while p < cut.held:
        load8_into(kept, at, value)
        normalise(y, i_y, value, affine, activate)
        p, at, i_y = int32(p + me.rows), int32(at + walk.turn), i_y + step_y
    p, i = rest, rest_at
    while p < walk.P:
        load8_into(part_x, i, value)
        normalise(y, i_y, value, affine, activate)
        p, i, i_y = int32(p + me.rows), i + walk.step, i_y + step_y


# The kernel ---------------------------------------------------------------------------------------


@requires("7.5")
@cuda.jit(launch_bounds=THREADS)
def groupnorm_forward_kernel_v3(x, weight, bias, y, mean, rstd, shape, cut, eps, activate):
    """y (B, P, C), mean and rstd (B, G) of x, a `Pair`, as one array (B, P, C); shape: a `Shape`,
    cut: a `OnePassCut`."""
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.a.dtype.type, alignment=128)
    total = cuda.local.array(VECTOR, float32)
    squares = cuda.local.array(VECTOR, float32)
    origin = cuda.local.array(VECTOR, float32)  # this thread's first pixel
    means = cuda.local.array(VECTOR, float32)
    scales = cuda.local.array(VECTOR, float32)
    shifts = cuda.local.array(VECTOR, float32)
    group = cuda.local.array(VECTOR, int32)
    P, C, seam, width = shape
    me = this_thread()
    in_tile = int32(VECTOR * cuda.threadIdx.x)
    c, b = int32(cuda.blockIdx.x * int32(VECTOR * me.lanes) + in_tile), int32(cuda.blockIdx.y)
    # of this thread, in its part of x
    beyond, first, step = locate(c, me.row, b, P, C, seam, me.rows)
    part_x = one_of(beyond, x.a, x.b)
    walk = NormVectorWalk(
        P, first, step, int32(cut.ring + VECTOR * me.t), int32(VECTOR * me.threads)
    )
    averages = int32(VECTOR * me.threads)  # of the groups: what follows the threads' sums

    rest, rest_at = copy_ahead(kept, part_x, cut, me, walk)
    clear(origin)
    if me.row < P:
        load8_into(part_x, first, origin)
    place, m = place_of(me), float32(P * width)
    # pixels of this thread
    n = float32(divide(int32(max(P - me.row, 0) + me.rows - 1), me.rows)[0])

    add_channels(total, squares, origin, kept, part_x, cut, me, walk, rest, rest_at)
    about_own_mean(total, squares, origin, means, n)
    put(sums, in_tile * me.rows, me.rows, place, means)
    group_averages(sums, me, averages, cut.groups, width, m, eps, False)
    find_groups(in_tile, width, group)
    pick(sums, averages, group, means)
    about_group_mean(squares, means, origin, total, n)
    # here, since registers are short before and threads wait for each other next
    load8_into(weight, c, scales)
    load8_into(bias, c, shifts)
    put(sums, in_tile * me.rows, me.rows, place, squares)
    group_averages(sums, me, averages + cut.groups, cut.groups, width, m, eps, True)
    for k in range(VECTOR):
        scales[k] *= sums[averages + cut.groups + group[k]]

    _, i_y, step_y = locate(c, me.row, b, P, C, C, me.rows)
    write_normalised(
        y,
        i_y,
        step_y,
        Affine(means, scales, shifts),
        kept,
        part_x,
        cut,
        me,
        walk,
        rest,
        rest_at,
        activate,
    )
    own = me.t
    while own < cut.groups:
        to = (b * cuda.gridDim.x + cuda.blockIdx.x) * cut.groups + own
        mean[to], rstd[to] = sums[averages + own], sums[averages + cut.groups + own]
        own += me.threads
