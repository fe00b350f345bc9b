"""GroupNorm's backward, rung 3: x and dy are kept in shared memory, and the last block adds the
parameters' gradients.

WHAT IS NEW, AND WHY IT PAYS
    as in one_pass.py: one launch instead of five, and nothing is read twice that has room.
    A multiprocessor starts only 16 special functions in a cycle, an eighth of its multiply-adds, so
    SiLU' is computed
    once: g = dy · SiLU' takes dy's place.
    Pixels that have no room are prefetched into the L2 cache at the start; in the last sweep they
    take the places of those that are done.
PARAMETER GRADIENTS
    A block leaves the sums of its channels in memory and counts itself. The last of the B blocks
    that share channels adds them up over the samples, in the order of the samples, whichever block
    is last: no second launch, and the same bits in every run. A fence on both sides of the count
    lets it see the others' sums. `cuda.atomic.inc` wraps, so the counter is 0 again for the next
    launch. (one_pass_half.py leaves them to reduce/second_pass.py.)
TWO ARRAYS AS ONE
    as in one_pass.py; dx and the residual, which is added to dx, are Pairs like x.
LAUNCH
    as one_pass.py; the shared memory of the threads' sums is 64 bytes each.
DETERMINISM
    no atomics on numbers: threads and blocks add in an order that the plan decides, and the last
    block the samples'.
ACCURACY
    float32; only the g that is kept is rounded, once, to dy's type. SiLU' of 16 bits is made of an
    approximate tanh, of float32 of 2ˣ and 1/x (one_pass.py): its error is 2⁻¹² · (1 + |z|) at most.
COST
    x and dy (and the residual) read and dx written once. Roof: memory bandwidth.
SOURCE
    reference.py for the mathematics; CUDA programming guide, "Memory Fence Functions", whose
    example is a last block that adds the others' sums.
READ NEXT
    warp_sums.py, for the kernels that 16 bits take where they fit.
"""

from typing import NamedTuple

import numpy as np

from ...device import cuda, device_inline, float32, int32, lasting, load4, uint32, upload
from ...device.async_copy import cp_async_commit, cp_async_wait, cp_async_wait_all
from ...device.common import divide
from ...device.eight import add8, copy8, fence, fetch8, load8_into, one_of, prefetch_l2, store8_from
from ...device.requires import requires
from ...device.threads import kept
from .one_pass import pick, place_of, put, this_thread
from .vectors import (
    PARTS,
    THREADS,
    VECTOR,
    WARP,
    WORDS,
    Affine,
    BackwardWalk,
    NormVectorArrays,
    accumulate,
    clear,
    find_groups,
    gradient8,
    lanes_sum,
    locate,
)

COUNTERS = 4096  # more than there are tiles


class BackwardCut(NamedTuple):
    """As `Cut` of one_pass.py; 2 ** team_bits threads add a channel's sums."""

    groups: int
    ring: int
    held: int
    share: int
    team_bits: int


class Left(NamedTuple):
    """The first pixel of a thread that has no room in shared memory: its number, and its elements
    of x and dy."""

    p: int
    i: int
    i_dy: int


class OnePassBackwardSums(NamedTuple):
    """What follows the threads' sums in `sums`: those of channels, the groups' averages, whether
    the block is last."""

    channels: int
    averages: int
    last: int


# The first sweep: g and its sums ------------------------------------------------------------------
# In `kept` a turn of x is followed by the same turn of dy, which makes way for g.


@device_inline
def copy_both_ahead(kept, arrays, cut, me, walk):
    """As `copy_ahead`, for x and dy. Returns what is `Left`, and the place behind this thread's
    last pixel."""
    p, at, i, i_dy = me.row, walk.own, walk.first, walk.first_dy
    for part in range(PARTS):
        end = int32(min((part + 1) * cut.share, cut.held))
        while p < end:
            copy8(kept, at, arrays.x, i)
            copy8(kept, at + walk.half, arrays.dy, i_dy)
            p, at, i, i_dy = (
                int32(p + me.rows),
                int32(at + walk.turn),
                i + walk.step,
                i_dy + walk.step_dy,
            )
        cp_async_commit()
    return Left(p, i, i_dy), at


@device_inline
def prefetch_to_l2(arrays, me, walk, left, adds):
    """Prefetch into the L2 cache what will be loaded late: pixels that shared memory has no room
    for, the residual."""
    p, i, i_dy = left
    while p < walk.P:
        prefetch_l2(arrays.x, i)
        prefetch_l2(arrays.dy, i_dy)
        p, i, i_dy = int32(p + me.rows), i + walk.step, i_dy + walk.step_dy
    if adds:
        p, i = me.row, walk.first
        while p < walk.P:
            prefetch_l2(arrays.residual, i)
            p, i = int32(p + me.rows), i + walk.step


@device_inline
def add_gradients(total_gx, total_g, kept, arrays, affine, cut, me, walk, left, activate):
    """This thread's sums of g · (x - mean) and g, channel by channel. In shared memory g takes dy's
    place."""
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    means, scales, shifts = affine
    clear(total_gx)
    clear(total_g)
    p, i, i_dy = left
    while p < walk.P:  # what has no room, while the rest is in flight
        load8_into(arrays.x, i, value)
        load8_into(arrays.dy, i_dy, d)
        gradient8(kept, value, d, means, scales, shifts, activate)
        accumulate(value, d, total_gx, total_g)
        p, i, i_dy = int32(p + me.rows), i + walk.step, i_dy + walk.step_dy
    p, at = me.row, walk.own
    for part in range(PARTS):
        cp_async_commit()  # an empty group, so that PARTS of them may be left whichever part it is
        cp_async_wait(PARTS)
        end = int32(min((part + 1) * cut.share, cut.held))
        while p < end:
            load8_into(kept, at, value)
            load8_into(kept, at + walk.half, d)
            gradient8(kept, value, d, means, scales, shifts, activate)
            if activate:
                store8_from(kept, at + walk.half, d)
            accumulate(value, d, total_gx, total_g)
            p, at = int32(p + me.rows), int32(at + walk.turn)


# Sums of channels, averages of groups -------------------------------------------------------------


@device_inline
def sum_channels(sums, places, totals, weight, rstd, me, team_bits, tile, statistics, width, C):
    """The threads' sums become those of channels: to totals[b], and times the weight to
    sums[places.channels …].

    A team of 2 ** team_bits threads adds a channel's, four at a time. All have brought theirs when
    it is called.
    """
    first_channel, b, B = (
        int32(cuda.blockIdx.x * tile),
        int32(cuda.blockIdx.y),
        int32(cuda.gridDim.y),
    )
    team = int32(1 << team_bits)
    n, of_team, turns = (
        int32(me.t >> team_bits),
        int32(me.t & (team - 1)),
        int32(me.rows >> (team_bits + 2)),
    )
    # the channels of a warp start apart: all banks
    start = divide(int32(4 * (me.t & (WARP - 1))), me.rows)[1]
    while n < 2 * tile:
        channel = int32(n if n < tile else n - tile)
        w, r = weight[first_channel + channel], rstd[statistics + divide(channel, width)[0]]
        total, e = float32(0), start
        for _ in range(turns):
            s0, s1, s2, s3 = load4(sums, n * me.rows + e)
            total += (s0 + s1) + (s2 + s3)
            e = int32(e + 4 * team)
            if e >= me.rows:
                e = int32(e - me.rows)
        total = lanes_sum(total, team) * (r if n < tile else float32(1))  # xhat = (x - mean) · r
        if of_team == 0:
            totals[(b if n < tile else B + b) * C + first_channel + channel] = total
            sums[places.channels + n] = total * w
        n += int32(me.threads >> team_bits)
    cuda.syncthreads()


@device_inline
def average_groups(sums, places, rstd, me, groups, statistics, width, per_element):
    """The groups' averages of h · xhat, then those of h, times rstd: their channels follow each
    other, too."""
    n = me.t
    while n < 2 * groups:
        r, total = rstd[statistics + (n if n < groups else n - groups)], float32(0)
        for k in range(width):
            total += sums[places.channels + n * width + k]
        total *= r * per_element
        sums[places.averages + n] = total * r if n < groups else total
        n += me.threads
    cuda.syncthreads()


# The last sweep: dx -------------------------------------------------------------------------------


@device_inline
def write_gradients(
    arrays, before, kept, affine, averages, cut, me, walk, own_end, left, activate, adds
):
    """The epilogue: dx of all this thread's pixels. What had no room comes where those lay that are
    done."""
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    means, scales, shifts = affine
    average_hx, average_h = averages
    rest, rest_at, rest_dy = left
    p, at, i = me.row, walk.own, walk.first
    while p < walk.P:
        if p >= cut.held:
            cp_async_wait_all()
        load8_into(kept, at, value)
        load8_into(kept, at + walk.half, d)
        if rest < walk.P:  # what had no room comes where this was
            copy8(kept, at, arrays.x, rest_at)
            copy8(kept, at + walk.half, arrays.dy, rest_dy)
            rest, rest_at, rest_dy = (
                int32(rest + me.rows),
                rest_at + walk.step,
                rest_dy + walk.step_dy,
            )
        if p < cut.held:
            for k in range(VECTOR):
                value[k] -= means[k]
        else:
            gradient8(kept, value, d, means, scales, shifts, activate)
        for k in range(VECTOR):
            # rstd is in all three
            d[k] = d[k] * scales[k] - average_h[k] - value[k] * average_hx[k]
        if adds:
            add8(arrays.dx, before, d)
            if p + me.rows < walk.P:
                fetch8(arrays.residual, i + walk.step, before)
        store8_from(arrays.dx, i, d)
        p, at, i = int32(p + me.rows), int32(at + walk.turn), i + walk.step
        if at >= own_end:
            at = walk.own


# The last block: dweight and dbias ----------------------------------------------------------------


@device_inline
def count_block(sums, last, counters, B):
    """One thread's: count this block among the B of its tile; sums[last] says whether it is the
    last of them."""
    fence()  # a block that sees this count also sees what this block has written
    before_me = cuda.atomic.inc(counters, cuda.blockIdx.x, uint32(B - 1))
    fence()  # nothing that is read from here on is older than the count
    sums[last] = float32(1) if int32(before_me) == B - 1 else float32(0)


@device_inline
def add_samples(totals, sums, dweight, dbias, first, tile, C, B, t, threads):
    """The gradients of `tile` channels: dweight and dbias += the sums over the samples of `totals`
    (2, B, C)."""
    part = cuda.local.array(VECTOR, float32)
    columns = int32(2 * tile)
    parts = max(int32(1), divide(threads, columns)[0])  # threads that share a column
    n = t
    while n < parts * columns:
        b, column = divide(n, columns)
        channel = int32(first + (column if column < tile else column - tile))
        at, turn = int32((b if column < tile else b + B) * C + channel), int32(parts * C)
        total = float32(0)
        if b == 0:
            total = dweight[channel] if column < tile else dbias[channel]
        while b + 7 * parts < B:  # eight loads in flight at once, as each has a long latency
            for k in range(VECTOR):
                part[k] = totals[at + k * turn]
            total += ((part[0] + part[1]) + (part[2] + part[3])) + (
                (part[4] + part[5]) + (part[6] + part[7])
            )
            b, at = int32(b + 8 * parts), int32(at + 8 * turn)
        while b < B:
            total += totals[at]
            b, at = int32(b + parts), int32(at + turn)
        sums[n] = total
        n += threads
    cuda.syncthreads()
    n = t
    while n < columns:
        total = float32(0)
        for k in range(parts):
            total += sums[k * columns + n]
        if n < tile:
            dweight[first + n] = total
        else:
            dbias[first + n - tile] = total
        n += threads


# The kernel ---------------------------------------------------------------------------------------


@requires("7.5")
@cuda.jit(launch_bounds=THREADS)
def groupnorm_backward_kernel_v3(
    dy,
    x,
    vectors,
    statistics,
    residual,
    dx,
    totals,
    gradients,
    shape,
    cut,
    activate,
    adds,
):
    """dx (B, P, C), and the gradients of weight and bias added to.

    x, residual, dx: `Pair`s; vectors: weight and bias (C,); statistics: mean and rstd (B, G);
    totals: for the sums of g · xhat and g of each sample, (2, B, C); gradients: dweight and dbias
    (C,), and `counters`; shape: a `Shape`, cut: a `BackwardCut`
    """
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.a.dtype.type, alignment=128)
    total_gx = cuda.local.array(VECTOR, float32)
    total_g = cuda.local.array(VECTOR, float32)
    means = cuda.local.array(VECTOR, float32)
    scales = cuda.local.array(VECTOR, float32)
    shifts = cuda.local.array(VECTOR, float32)
    group = cuda.local.array(VECTOR, int32)
    before = cuda.local.array(WORDS, uint32)
    (weight, bias), (mean, rstd), (P, C, seam, width) = vectors, statistics, shape
    dweight, dbias, counters = gradients
    me = this_thread()
    in_tile, tile = int32(VECTOR * cuda.threadIdx.x), int32(VECTOR * me.lanes)
    first_channel = int32(cuda.blockIdx.x * tile)
    c, b, B = int32(first_channel + in_tile), int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
    # of this thread, in its parts of x and dx
    beyond, first, step = locate(c, me.row, b, P, C, seam, me.rows)
    _, first_dy, step_dy = locate(c, me.row, b, P, C, C, me.rows)
    arrays = NormVectorArrays(
        one_of(beyond, x.a, x.b),
        dy,
        one_of(beyond, residual.a, residual.b),
        one_of(beyond, dx.a, dx.b),
    )
    half = int32(VECTOR * me.threads)
    walk = BackwardWalk(
        P, first, step, first_dy, step_dy, int32(cut.ring + VECTOR * me.t), int32(2 * half), half
    )
    places = OnePassBackwardSums(
        int32(2 * half), int32(2 * half + 2 * tile), int32(2 * half + 2 * tile + 2 * cut.groups)
    )

    left, own_end = copy_both_ahead(kept, arrays, cut, me, walk)
    load8_into(weight, c, scales)
    load8_into(bias, c, shifts)
    find_groups(in_tile, width, group)
    of_block = int32((b * cuda.gridDim.x + cuda.blockIdx.x) * cut.groups)  # the first of its groups
    pick(mean, of_block, group, means)
    for k in range(VECTOR):
        scales[k] *= rstd[of_block + group[k]]
    if adds and me.row < P:
        fetch8(arrays.residual, first, before)
    place = place_of(me)
    prefetch_to_l2(arrays, me, walk, left, adds)

    affine = Affine(means, scales, shifts)
    add_gradients(total_gx, total_g, kept, arrays, affine, cut, me, walk, left, activate)
    put(sums, in_tile * me.rows, me.rows, place, total_gx)
    put(sums, half + in_tile * me.rows, me.rows, place, total_g)
    cuda.syncthreads()
    sum_channels(sums, places, totals, weight, rstd, me, cut.team_bits, tile, of_block, width, C)
    average_groups(
        sums, places, rstd, me, cut.groups, of_block, width, float32(1) / float32(P * width)
    )
    if me.t == me.threads - 1:  # while the others continue
        count_block(sums, places.last, counters, B)
    find_groups(in_tile, width, group)  # again: kept, it would take eight registers
    pick(sums, places.averages, group, total_gx)
    pick(sums, places.averages + cut.groups, group, total_g)

    write_gradients(
        arrays,
        before,
        kept,
        affine,
        (total_gx, total_g),
        cut,
        me,
        walk,
        own_end,
        left,
        activate,
        adds,
    )
    cuda.syncthreads()
    if sums[places.last] == float32(1):
        add_samples(totals, sums, dweight, dbias, first_channel, tile, C, B, me.t, me.threads)


@kept
def counters(backend):
    """For each tile of channels, how many of its blocks are done; every launch leaves zeros."""
    with lasting(backend):
        return upload(np.zeros(COUNTERS, np.uint32), backend)
