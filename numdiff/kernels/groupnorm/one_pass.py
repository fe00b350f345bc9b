"""GroupNorm, rung 3: one kernel a pass, which keeps what it normalises in shared memory.

WHAT IS NEW, AND WHY IT PAYS
    A block owns whole groups of one sample with all their pixels, so nothing is left for other kernels to join: the
    forward is 1 launch instead of version 2's 3, the backward 1 instead of 5, and each launch that waits for the one
    before costs about 4 µs. What is read stays in shared memory for the later sweeps over it. Copies by cp.async need
    no registers on the way, so all of the block's loads are in flight at once, and the sums begin before the last have
    arrived.
    SiLU is four instructions and a product: 2ˣ and 1/x as the hardware has them. A multiprocessor starts only 16 of
    either in a cycle, an eighth of its multiply-adds, so the backward computes SiLU' once: g = dy · SiLU' takes dy's
    place.
    What a thread needs besides pixels (weights, statistics, which group) it loads while the pixels are on their way.
PARAMETER GRADIENTS
    A block leaves the sums of its channels in memory and counts itself. The last of the B blocks that share channels
    adds them up over the samples, in the order of the samples, whichever block is last: no second launch, and the same
    bits in every run. A fence on both sides of the count lets it see the others' sums. `cuda.atomic.inc` wraps, so the
    counter is 0 again for the next launch.
TILE
    `tile` neighbouring channels (whole groups, a multiple of 8) with all pixels. Pixels that do not fit in shared
    memory are read again in each sweep, most likely from the L2 cache, into which the backward prefetches them at the
    start; in its last sweep they take the places of pixels that are done.
    A thread has eight channels: 16 bytes of float16, 32 of float32. It reads only what it copied itself, so only the
    sums need barriers.
TWO ARRAYS AS ONE
    x may be a `Pair` (concat.py): two arrays whose channels are numbered consecutively, as where a UNet's skip
    connection joins. The seam is a multiple of 8, so all channels of a thread are in one of the two, which it chooses
    once, at the start; a group may have channels of both. The gradient is a Pair, too, and so is the residual. A single
    array is passed as the Pair of itself and itself, with the seam at C.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    groupnorm_forward, 32×64×64×64, 64, silu, float16
        v3*     17.4 µs    1,930 GB/s   47 % of memory   1.91 × v2   629 % of PyTorch
LAUNCH
    grid (C / tile, B), block (tile / 8, rows): whole warps, up to 512 threads. Dynamic shared memory: the sums of all
    threads (32 bytes each, backward 64), then pixels. `choose_plan` forecasts the time of every tile, takes the best.
DETERMINISM
    no atomics on numbers: a thread adds its pixels, a few threads add the threads' sums, the last block the samples',
    in an order that the plan decides, and so the shape, the type and the size of the device.
ACCURACY
    The mean first, then squares about the mean. Arithmetic is float32 for arrays of float16 too; only the g that is
    kept is rounded, once, to dy's type. Beside `math.exp` and a rounded division SiLU differs by at most 2⁻²¹ of its
    value where |z| < 16.
COST
    forward: x read and y written once; backward: x and dy (and the residual) read and dx written once. Roof: memory
    bandwidth.
SOURCE
    reference.py for the mathematics; PTX ISA, sections 9.7.3.13 (rcp.approx.ftz.f32) and 9.7.9.25.3 (cp.async);
    CUDA programming guide, "Memory Fence Functions", whose example is a last block that adds the others' sums.
READ NEXT
    one_pass_half.py, the backward that float16 takes where it fits; clusters.py.
"""
import contextlib
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, empty_like, float32, int32, launch, load4, uint32, upload
from ...device.async_copy import cp_async_commit, cp_async_wait, cp_async_wait_all
from ...device.eight import add8, copy8, fence, fetch8, load8_into, one_of, prefetch_l2, store8_from
from ...device.limits import (
    HOPPER_SHARED,
    MULTIPROCESSORS,
    REGISTERS,
    SHARED_RESERVED,
    multiprocessors_of,
    shared_limit,
)
from ...device.requires import requires, supports
from ...device.threads import kept
from ...dtypes import is_half
from ..any_batch import assumed
from ..common import divide
from ..concat import Pair, parts_of
from .clusters import BLOCKS, groupnorm_backward_clusters
from .one_pass_half import MAX_NEAR, MAX_THREADS, PART, PIXELS, HalfCut, groupnorm_backward_half
from .vectors import (
    PARTS,
    THREADS,
    VECTOR,
    WARP,
    WARP_BITS,
    WORDS,
    Affine,
    Arrays,
    BackwardWalk,
    Shape,
    Walk,
    accumulate,
    clear,
    find_groups,
    gradient8,
    lanes_sum,
    locate,
    sigmoid,
)

FEW_THREADS = 256, 128  # where several blocks find room
FORWARD_REGISTERS, BACKWARD_REGISTERS = 96, 128  # of a thread, as compiled for sm_80 and sm_90a, rounded up
TEAMS = 16, 8, 5, 4, 3, 2, 1  # warps with the pixels of sixteen channels, where these are taken together
HALF_REGISTERS = 96  # which leaves room for five warps in each quarter of a multiprocessor
COUNTERS = 4096  # more than there are tiles


# What the kernels are given, and where their threads are --------------------------------------------------------------

class Cut(NamedTuple):
    """How a block's memory is cut: see `Plan`. groups: of its channels"""

    groups: int
    ring: int
    held: int
    share: int


class BackwardCut(NamedTuple):
    """As `Cut`."""

    groups: int
    ring: int
    held: int
    share: int
    team_bits: int


class Thread(NamedTuple):
    """A thread's place: number t of its block's `threads`, in a row of `lanes` of its `rows`; row: its first pixel."""

    t: int
    row: int
    lanes: int
    rows: int
    threads: int


class Left(NamedTuple):
    """The first pixel of a thread that has no room in shared memory: its number, and its elements of x and dy."""

    p: int
    i: int
    i_dy: int


class Sums(NamedTuple):
    """What follows the threads' sums in `sums`: those of channels, the groups' averages, whether the block is last."""

    channels: int
    averages: int
    last: int


@cuda.jit(device=True, forceinline=True)
def this_thread():
    lanes, rows = int32(cuda.blockDim.x), int32(cuda.blockDim.y)
    row, threads = int32(cuda.threadIdx.y), int32(lanes * rows)
    return Thread(int32(row * lanes + cuda.threadIdx.x), row, lanes, rows, threads)


# Device functions -----------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def pick(values, first, groups, into):
    for k in range(VECTOR):
        into[k] = values[first + groups[k]]


@cuda.jit(device=True, forceinline=True)
def place_of(me):
    """Where a thread puts its sums among the `rows` of a channel: threads of a warp then use different banks."""
    apart = divide(int32(WARP), me.lanes)[0]
    return divide(int32(me.row + int32(cuda.threadIdx.x) * max(int32(1), apart)), me.rows)[1]


@cuda.jit(device=True, forceinline=True)
def put(sums, first, rows, place, values):
    """A thread's sums of its channels; a channel has `rows` places, one for each thread that shares it."""
    for k in range(VECTOR):
        sums[first + k * rows + place] = values[k]


@cuda.jit(device=True, forceinline=True)
def group_averages(sums, me, averages, groups, width, m, eps, roots):
    """averages[group] from the threads' sums; with `roots` 1 / √(average + eps). All threads call it."""
    lane, warp, warps = int32(me.t & (WARP - 1)), int32(me.t >> WARP_BITS), int32(me.threads >> WARP_BITS)
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


# Forward --------------------------------------------------------------------------------------------------------------
# `kept` sees the same memory as `sums`, from element `ring` on: a turn of all threads after the other, `held` pixels.

@cuda.jit(device=True, forceinline=True)
def copy_ahead(kept, part_x, cut, me, walk):
    """The producer: ask for this thread's pixels that shared memory keeps, in PARTS groups of copies.

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


@cuda.jit(device=True, forceinline=True)
def add_channels(total, kept, part_x, cut, me, walk, p, i):
    """total: this thread's sums of its channels, first over the pixels from p on that have no room, then over those in
    shared memory, as they come. It waits for its own copies alone: it reads what it asked for itself."""
    value = cuda.local.array(VECTOR, float32)
    clear(total)
    while p < walk.P:
        load8_into(part_x, i, value)
        for k in range(VECTOR):
            total[k] += value[k]
        p, i = int32(p + me.rows), i + walk.step
    p, at = me.row, walk.own
    for part in range(PARTS):
        cp_async_commit()  # an empty group, so that PARTS of them may be left whichever part it is
        cp_async_wait(PARTS)
        end = int32(min((part + 1) * cut.share, cut.held))
        while p < end:
            load8_into(kept, at, value)
            for k in range(VECTOR):
                total[k] += value[k]
            p, at = int32(p + me.rows), int32(at + walk.turn)


@cuda.jit(device=True, forceinline=True)
def add_squares(total, means, kept, part_x, cut, me, walk, rest, rest_at):
    """total: this thread's sums of (x - mean)², channel by channel, over all of its pixels."""
    value = cuda.local.array(VECTOR, float32)
    clear(total)
    p, at = me.row, walk.own
    while p < cut.held:
        load8_into(kept, at, value)
        for k in range(VECTOR):
            d = value[k] - means[k]
            total[k] += d * d
        p, at = int32(p + me.rows), int32(at + walk.turn)
    p, i = rest, rest_at
    while p < walk.P:
        load8_into(part_x, i, value)
        for k in range(VECTOR):
            d = value[k] - means[k]
            total[k] += d * d
        p, i = int32(p + me.rows), i + walk.step


@cuda.jit(device=True, forceinline=True)
def write_normalised(y, i_y, step_y, affine, kept, part_x, cut, me, walk, activate):
    """The epilogue: y = (x - mean) · scale + shift, its SiLU with `activate`, of all this thread's pixels."""
    value = cuda.local.array(VECTOR, float32)
    means, scales, shifts = affine
    p, at, i = me.row, walk.own, walk.first
    while p < walk.P:
        if p < cut.held:
            load8_into(kept, at, value)
        else:
            load8_into(part_x, i, value)
        for k in range(VECTOR):
            value[k] = (value[k] - means[k]) * scales[k] + shifts[k]
        if activate:
            for k in range(VECTOR):
                value[k] *= sigmoid(value[k])
        store8_from(y, i_y, value)
        p, at, i, i_y = int32(p + me.rows), int32(at + walk.turn), i + walk.step, i_y + step_y


@requires("8.0")
@cuda.jit(launch_bounds=THREADS)
def groupnorm_forward_kernel_v3(x, weight, bias, y, mean, rstd, shape, cut, eps, activate):
    """y (B, P, C), mean and rstd (B, G) of x, a `Pair`, as one array (B, P, C); shape: a `Shape`, cut: a `Cut`."""
    sums = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, x.a.dtype.type, alignment=128)
    total = cuda.local.array(VECTOR, float32)
    means = cuda.local.array(VECTOR, float32)
    scales = cuda.local.array(VECTOR, float32)
    shifts = cuda.local.array(VECTOR, float32)
    group = cuda.local.array(VECTOR, int32)
    P, C, seam, width = shape
    me = this_thread()
    in_tile = int32(VECTOR * cuda.threadIdx.x)
    c, b = int32(cuda.blockIdx.x * int32(VECTOR * me.lanes) + in_tile), int32(cuda.blockIdx.y)
    beyond, first, step = locate(c, me.row, b, P, C, seam, me.rows)  # of this thread, in its part of x
    part_x = one_of(beyond, x.a, x.b)
    walk = Walk(P, first, step, int32(cut.ring + VECTOR * me.t), int32(VECTOR * me.threads))
    averages = int32(VECTOR * me.threads)  # of the groups: what follows the threads' sums

    rest, rest_at = copy_ahead(kept, part_x, cut, me, walk)
    load8_into(weight, c, scales)
    load8_into(bias, c, shifts)
    find_groups(in_tile, width, group)
    place, m = place_of(me), float32(P * width)

    add_channels(total, kept, part_x, cut, me, walk, rest, rest_at)
    put(sums, in_tile * me.rows, me.rows, place, total)
    group_averages(sums, me, averages, cut.groups, width, m, eps, False)
    pick(sums, averages, group, means)
    add_squares(total, means, kept, part_x, cut, me, walk, rest, rest_at)
    put(sums, in_tile * me.rows, me.rows, place, total)
    group_averages(sums, me, averages + cut.groups, cut.groups, width, m, eps, True)
    for k in range(VECTOR):
        scales[k] *= sums[averages + cut.groups + group[k]]

    _, i_y, step_y = locate(c, me.row, b, P, C, C, me.rows)
    write_normalised(y, i_y, step_y, Affine(means, scales, shifts), kept, part_x, cut, me, walk, activate)
    n = me.t
    while n < cut.groups:
        to = (b * cuda.gridDim.x + cuda.blockIdx.x) * cut.groups + n
        mean[to], rstd[to] = sums[averages + n], sums[averages + cut.groups + n]
        n += me.threads


# Backward -------------------------------------------------------------------------------------------------------------
# In `kept` a turn of x is followed by the same turn of dy, which makes way for g.

@cuda.jit(device=True, forceinline=True)
def copy_both_ahead(kept, arrays, cut, me, walk):
    """As `copy_ahead`, for x and dy. Returns what is `Left`, and the place behind this thread's last pixel."""
    p, at, i, i_dy = me.row, walk.own, walk.first, walk.first_dy
    for part in range(PARTS):
        end = int32(min((part + 1) * cut.share, cut.held))
        while p < end:
            copy8(kept, at, arrays.x, i)
            copy8(kept, at + walk.half, arrays.dy, i_dy)
            p, at, i, i_dy = int32(p + me.rows), int32(at + walk.turn), i + walk.step, i_dy + walk.step_dy
        cp_async_commit()
    return Left(p, i, i_dy), at


@cuda.jit(device=True, forceinline=True)
def prefetch_to_l2(arrays, me, walk, left, adds):
    """Prefetch into the L2 cache what will be loaded late: pixels that shared memory has no room for, the residual."""
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


@cuda.jit(device=True, forceinline=True)
def add_gradients(total_gx, total_g, kept, arrays, affine, cut, me, walk, left, activate):
    """This thread's sums of g · (x - mean) and g, channel by channel. In shared memory g takes dy's place."""
    value = cuda.local.array(VECTOR, float32)
    d = cuda.local.array(VECTOR, float32)
    means, scales, shifts = affine
    clear(total_gx)
    clear(total_g)
    p, i, i_dy = left
    while p < walk.P:  # what has no room, while the rest is on its way
        load8_into(arrays.x, i, value)
        load8_into(arrays.dy, i_dy, d)
        gradient8(value, d, means, scales, shifts, activate)
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
            gradient8(value, d, means, scales, shifts, activate)
            if activate:
                store8_from(kept, at + walk.half, d)
            accumulate(value, d, total_gx, total_g)
            p, at = int32(p + me.rows), int32(at + walk.turn)


@cuda.jit(device=True, forceinline=True)
def sum_channels(sums, places, totals, weight, rstd, me, team_bits, tile, statistics, width, C):
    """The threads' sums become those of channels: to totals[b], and times the weight to sums[places.channels …].

    A team of 2 ** team_bits threads adds a channel's, four at a time. All have brought theirs when it is called.
    """
    first_channel, b, B = int32(cuda.blockIdx.x * tile), int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
    team = int32(1 << team_bits)
    n, of_team, turns = int32(me.t >> team_bits), int32(me.t & (team - 1)), int32(me.rows >> (team_bits + 2))
    start = divide(int32(4 * (me.t & (WARP - 1))), me.rows)[1]  # the channels of a warp start apart: all banks
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
        total = lanes_sum(total, team) * (r if n < tile else float32(1))  # xhat is r times what x is beside its mean
        if of_team == 0:
            totals[(b if n < tile else B + b) * C + first_channel + channel] = total
            sums[places.channels + n] = total * w
        n += int32(me.threads >> team_bits)
    cuda.syncthreads()


@cuda.jit(device=True, forceinline=True)
def average_groups(sums, places, rstd, me, groups, statistics, width, per_element):
    """The groups' averages of h · xhat, then those of h, times rstd: their channels follow each other, too."""
    n = me.t
    while n < 2 * groups:
        r, total = rstd[statistics + (n if n < groups else n - groups)], float32(0)
        for k in range(width):
            total += sums[places.channels + n * width + k]
        total *= r * per_element
        sums[places.averages + n] = total * r if n < groups else total
        n += me.threads
    cuda.syncthreads()


@cuda.jit(device=True, forceinline=True)
def count_block(sums, last, counters, B):
    """One thread's: count this block among the B of its tile; sums[last] says whether it is the last of them."""
    fence()  # a block that sees this count also sees what this block has written
    before_me = cuda.atomic.inc(counters, cuda.blockIdx.x, uint32(B - 1))
    fence()  # nothing that is read from here on is older than the count
    sums[last] = float32(1) if int32(before_me) == B - 1 else float32(0)


@cuda.jit(device=True, forceinline=True)
def write_gradients(arrays, before, kept, affine, averages, cut, me, walk, own_end, left, activate, adds):
    """The epilogue: dx of all this thread's pixels. What had no room comes where those lay that are done."""
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
            rest, rest_at, rest_dy = int32(rest + me.rows), rest_at + walk.step, rest_dy + walk.step_dy
        if p < cut.held:
            for k in range(VECTOR):
                value[k] -= means[k]
        else:
            gradient8(value, d, means, scales, shifts, activate)
        for k in range(VECTOR):
            d[k] = d[k] * scales[k] - average_h[k] - value[k] * average_hx[k]  # rstd is in all three
        if adds:
            add8(arrays.dx, before, d)
            if p + me.rows < walk.P:
                fetch8(arrays.residual, i + walk.step, before)
        store8_from(arrays.dx, i, d)
        p, at, i = int32(p + me.rows), int32(at + walk.turn), i + walk.step
        if at >= own_end:
            at = walk.own


@cuda.jit(device=True, forceinline=True)
def add_samples(totals, sums, dweight, dbias, first, tile, C, B, t, threads):
    """The gradients of `tile` channels: dweight and dbias += the sums over the samples of `totals` (2, B, C)."""
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
            total += ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]))
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


@requires("8.0")
@cuda.jit(launch_bounds=THREADS)
def groupnorm_backward_kernel_v3(dy, x, weight, bias, statistics, residual, dx, totals, parameters, counters, shape,
                                 cut, activate, adds):
    """dx (B, P, C), and the gradients of weight and bias added to.

    x, residual, dx: `Pair`s; statistics: mean and rstd (B, G); totals: for the sums of g · xhat and g of each sample,
    (2, B, C); parameters: dweight and dbias (C,); shape: a `Shape`, cut: a `BackwardCut`
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
    (mean, rstd), (dweight, dbias), (P, C, seam, width) = statistics, parameters, shape
    me = this_thread()
    in_tile, tile = int32(VECTOR * cuda.threadIdx.x), int32(VECTOR * me.lanes)
    first_channel = int32(cuda.blockIdx.x * tile)
    c, b, B = int32(first_channel + in_tile), int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
    beyond, first, step = locate(c, me.row, b, P, C, seam, me.rows)  # of this thread, in its parts of x and dx
    _, first_dy, step_dy = locate(c, me.row, b, P, C, C, me.rows)
    arrays = Arrays(one_of(beyond, x.a, x.b), dy, one_of(beyond, residual.a, residual.b), one_of(beyond, dx.a, dx.b))
    half = int32(VECTOR * me.threads)
    walk = BackwardWalk(P, first, step, first_dy, step_dy, int32(cut.ring + VECTOR * me.t), int32(2 * half), half)
    places = Sums(int32(2 * half), int32(2 * half + 2 * tile), int32(2 * half + 2 * tile + 2 * cut.groups))

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
    average_groups(sums, places, rstd, me, cut.groups, of_block, width, float32(1) / float32(P * width))
    if me.t == me.threads - 1:  # while the others go on
        count_block(sums, places.last, counters, B)
    find_groups(in_tile, width, group)  # again: kept, it would take eight registers
    pick(sums, places.averages, group, total_gx)
    pick(sums, places.averages + cut.groups, group, total_g)

    write_gradients(arrays, before, kept, affine, (total_gx, total_g), cut, me, walk, own_end, left, activate, adds)
    cuda.syncthreads()
    if sums[places.last] == float32(1):
        add_samples(totals, sums, dweight, dbias, first_channel, tile, C, B, me.t, me.threads)


# Which tile -----------------------------------------------------------------------------------------------------------
# A forecast in nanoseconds. Version 2's follows what an H100 needs for the UNet's shapes. Version 3's: a block reads,
# then writes, and what of its arithmetic neither of these hides comes on top, half of it where no other block fills in.

MEMORY = 2600  # arrays that the L2 cache does not hold
L2 = 4500
L2_BYTES = 40 << 20
ONE_MULTIPROCESSOR = 34  # what one of them can take, however idle the others are
SECTOR = 32  # bytes that memory delivers together
LAUNCH = 2500  # from the end of one kernel to the start of the next, filling and draining included
FORWARD_LATENCY, BACKWARD_LATENCY = 2500, 3500  # of a block: first bytes, barriers, last bytes; being counted
HALF_LATENCY = 2500  # its warps do not wait for the one that counts
CLUSTER_LATENCY = 1500  # two barriers of a cluster, and sums from its other blocks
FORWARD_ELEMENT, BACKWARD_ELEMENT = 0.1, 0.14  # of a multiprocessor's arithmetic: 2ˣ and 1/x, then the rest
FORWARD_TURN, BACKWARD_TURN = 200, 220  # of a thread with eight channels of a pixel, were it alone
DISTANT_TURN = 900  # if it asks for them only when their turn has come
VERSION_2_LAUNCH, VERSION_2_MEMORY = 4400, 2000


@dataclass(frozen=True)
class Plan:
    """How the blocks of version 3 are cut.

    ns: the forecast; ring: element at which the pixels start; held: pixels that shared memory keeps; share: pixels of a
    part of them; team_bits: log2 of how many threads add a channel's sums; shared: bytes
    """

    ns: float
    tile: int
    rows: int
    ring: int
    held: int
    share: int
    team_bits: int
    shared: int
    near: int | None = None  # turns that registers keep, where one_pass_half.py's kernel does the work
    blocks: int = 1  # of a cluster, which share a sample's pixels (clusters.py)


def pixel_sectors(tile, itemsize):
    """Sectors that `tile` channels of a pixel touch, on average over the tiles of an array."""
    nbytes = tile * itemsize
    starts = range(0, nbytes * SECTOR // math.gcd(nbytes, SECTOR), nbytes)
    return sum(-(-(s % SECTOR + nbytes) // SECTOR) for s in starts) / len(starts)


def make_plan(B, P, C, width, itemsize, backward, tile, threads, limit, multiprocessors):
    """The `Plan` of one tile, or None if it does not fit."""
    arrays, sweeps = (2, 2) if backward else (1, 3)
    lanes = tile // VECTOR
    whole = max(4, WARP // math.gcd(lanes, WARP))  # rows of threads that make whole warps, and words of four
    if lanes * whole > threads:
        return None
    rows = min(threads // (lanes * whole), -(-P // whole)) * whole
    threads, groups = lanes * rows, tile // width
    floats = arrays * VECTOR * threads + 2 * groups + (2 * tile + 1 if backward else 0)
    ring = -(-4 * floats // 16) * 16  # bytes
    turn = arrays * VECTOR * itemsize * threads
    turns = -(-P // rows)
    kept = min(turns, (limit - ring) // turn)
    if kept <= 0:
        return None
    team_bits = 0
    while 2 << team_bits <= min(WARP, threads // (2 * tile)) and rows % (8 << team_bits) == 0:
        team_bits += 1
    shared, blocks = ring + kept * turn, B * (C // tile)
    ns = forecast(blocks, P, tile, itemsize, arrays, arrays * (sweeps - 1) * (1 - kept / turns), turns, turns - kept,
                  shared, threads, limit, multiprocessors, backward)
    return Plan(ns, tile, rows, ring // itemsize, min(P, kept * rows), -(-kept // PARTS) * rows, team_bits,
                shared)


def make_plan_half(B, P, C, width, itemsize, team, limit, multiprocessors, cluster=1):
    """The `Plan` of a backward by one_pass_half.py with `team` warps for 16 channels; None: it does not fit.

    cluster: how many blocks share a sample's pixels
    """
    tile = math.lcm(width, PART)
    if P % cluster:
        return None
    P //= cluster
    parts, team = tile // PART, min(team, -(-P // PIXELS))
    if itemsize != 2 or C % tile or (team + 1) * parts * WARP > MAX_THREADS:
        return None
    rows, threads = PIXELS * team, WARP * team * parts
    turns, turn = -(-P // rows), 2 * VECTOR * itemsize * threads
    ring = 4 * (threads + (2 * tile if parts > 1 else 0) + (2 * tile if cluster > 1 else 0))  # bytes
    near = max(0, turns - (limit - ring) // turn)
    if near > MAX_NEAR or near == turns or near and P % rows:
        return None
    kept = turns - near
    shared = ring + kept * turn
    latency = HALF_LATENCY + (CLUSTER_LATENCY if cluster > 1 else 0)
    ns = forecast(B * (C // tile) * cluster, P, tile, itemsize, 2, 0, turns, 0, shared, threads + WARP * parts, limit,
                  multiprocessors, True, (HALF_REGISTERS, latency, BACKWARD_ELEMENT, BACKWARD_TURN))
    return Plan(ns, tile, rows, ring // itemsize, P, -(-kept // PARTS) * rows, 0, shared, near, cluster)


def forecast(blocks, P, tile, itemsize, arrays, again, turns, distant, shared, threads, limit, multiprocessors,
             backward, kernel=None):
    """Nanoseconds; again: arrays' worth of second readings; distant: turns of a thread that are not in `kept`."""
    registers, latency, element, chain = kernel or (
        (BACKWARD_REGISTERS, BACKWARD_LATENCY, BACKWARD_ELEMENT, BACKWARD_TURN) if backward else
        (FORWARD_REGISTERS, FORWARD_LATENCY, FORWARD_ELEMENT, FORWARD_TURN))
    resident = max(1, min((limit + SHARED_RESERVED) // (shared + SHARED_RESERVED), REGISTERS // (registers * threads),
                          32))
    waves, each = -(-blocks // (resident * multiprocessors)), -(-blocks // multiprocessors)
    nbytes, sectors = P * tile * itemsize, P * SECTOR * pixel_sectors(tile, itemsize)
    total = blocks * (arrays + 1) * nbytes
    memory = max((total + blocks * again * nbytes) / (MEMORY if total > L2_BYTES else L2),
                 each * (arrays + again + 1) * sectors / ONE_MULTIPROCESSOR)
    alone = turns * chain + distant * (1 if backward else 3) * DISTANT_TURN
    arithmetic = max(each * P * tile * element, waves * alone)
    exposed = min(memory, arithmetic) / (2 * min(resident, waves))
    return LAUNCH + max(memory, arithmetic) + exposed + waves * latency


@functools.cache
def choose_plan(B, P, C, width, itemsize, backward, limit=HOPPER_SHARED, multiprocessors=MULTIPROCESSORS,
                clusters=True):
    """The `Plan` with the shortest forecast (of equals the one with more blocks), or None if no tile fits.

    clusters: whether the device has them
    """
    unit = math.lcm(width, VECTOR)
    tiles = [n for n in range(unit, min(C, VECTOR * THREADS) + 1, unit) if C % n == 0]
    plans = [make_plan(B, P, C, width, itemsize, backward, tile, threads, limit, multiprocessors)
             for tile in tiles for threads in (*FEW_THREADS, THREADS)]
    if backward:
        for cluster in (1, *BLOCKS) if clusters else (1,):  # no more blocks than are needed to keep everything
            sixteens = [make_plan_half(B, P, C, width, itemsize, team, limit, multiprocessors, cluster)
                        for team in TEAMS]
            if any(sixteens):
                plans += sixteens
                break
    return min((p for p in plans if p is not None), key=lambda p: p.ns, default=None)


def version_2_estimate(B, P, C, itemsize, backward):
    """Nanoseconds of version 2: its launches wait for each other, and x (and dy) is read twice."""
    launches, passes = (4, 5) if backward else (3, 3)
    return launches * VERSION_2_LAUNCH + passes * B * P * C * itemsize / VERSION_2_MEMORY


def plan_for(x, width, backward):
    """`choose_plan` for an array or a `Pair`, None too where version 3 does not exist."""
    first, _, seam = parts_of(x)
    B, C = x.shape[0], x.shape[-1]
    if (C % VECTOR or seam % VECTOR or not (is_half(x.dtype) or x.dtype == np.float32) or x.size >= B << 31
            or not supports(first, groupnorm_forward_kernel_v3)):
        return None
    return choose_plan(assumed(B), x.size // (B * C), C, width, x.dtype.itemsize, backward, shared_limit(first),
                       multiprocessors_of(first),
                       supports(first, groupnorm_backward_clusters))


# Launchers ------------------------------------------------------------------------------------------------------------

@kept
def counters(backend):
    """For each tile of channels, how many of its blocks are done; every launch leaves zeros."""
    with backend.within(backend.arenas[0]) if hasattr(backend, "arenas") else contextlib.nullcontext():
        return upload(np.zeros(COUNTERS, np.uint32), backend)


def one_pass_forward(x, weight, bias, groups, eps, silu, plan):
    B, C = x.shape[0], x.shape[-1]
    first, second, seam = parts_of(x)
    y = empty(x.shape, x.dtype, like=first)
    mean, rstd = empty((B, groups), np.float32, like=first), empty((B, groups), np.float32, like=first)
    launch(groupnorm_forward_kernel_v3, (C // plan.tile, B), (plan.tile // VECTOR, plan.rows),
           Pair(first.reshape(-1), second.reshape(-1)), weight, bias, y.reshape(-1), mean.reshape(-1), rstd.reshape(-1),
           Shape(x.size // (B * C), C, seam, C // groups),
           Cut(plan.tile * groups // C, plan.ring, plan.held, plan.share), float(eps), int(silu), shared=plan.shared)
    return y, mean, rstd


def one_pass_backward(dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu, plan, residual=None):
    B, C = x.shape[0], x.shape[-1]
    dx = Pair(*map(empty_like, x)) if isinstance(x, Pair) else empty_like(x)
    totals, seam = empty((2, B, C), np.float32, like=dy), parts_of(x)[2]
    x_, residual_, dx_ = (Pair(*(part.reshape(-1) for part in parts_of(a)[:2]))
                          for a in (x, x if residual is None else residual, dx))
    arguments = (dy.reshape(-1), x_, weight, bias, (mean.reshape(-1), rstd.reshape(-1)), residual_, dx_,
                 totals.reshape(-1), (dweight, dbias), counters(dy.backend),
                 Shape(x.size // (B * C * plan.blocks), C, seam, C // groups))
    last = int(silu), int(residual is not None)
    if plan.near is not None:
        parts = plan.tile // PART
        kernel = groupnorm_backward_half if plan.blocks == 1 else groupnorm_backward_clusters
        launch(kernel, (C // plan.tile, B, plan.blocks), parts * (2 * plan.rows + WARP), *arguments,
               HalfCut(parts, plan.rows, plan.ring, plan.share, plan.near), *last, shared=plan.shared,
               cluster=(1, 1, plan.blocks) if plan.blocks > 1 else 1)
    else:
        launch(groupnorm_backward_kernel_v3, (C // plan.tile, B), (plan.tile // VECTOR, plan.rows), *arguments,
               BackwardCut(plan.tile * groups // C, plan.ring, plan.held, plan.share, plan.team_bits), *last,
               shared=plan.shared)
    return dx
