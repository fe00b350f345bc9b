"""GroupNorm's forward, rung 4: the statistics come with x, from the convolution that wrote it.

WHAT IS NEW, AND WHY IT PAYS
    A block of rung 3 must see all pixels of its groups before it may write the first: it reads,
    then waits, then writes, and memory idles in between. But the convolution that wrote x had every
    number in a register. It leaves the mean and the variance of each pair of channels over each 8 ×
    8 pixels (conv2d/hopper/), 1/32 of x's bytes, and now nothing keeps this kernel from streaming:
    a block loads its first pixels, joins the statistics while they are in flight, and then reads
    and writes alternately. A block may have any pixels, so all channels of a pixel are read
    together, in full lines of memory, however many pixels there are.
STATISTICS
    (B, chunks, 2, C / 2) float32, for each chunk of a sample's pixels: the means of pairs of
    neighbouring channels, then their variances. All chunks have the same number of pixels, which
    drops out:
        mean of a group = average of its chunks' means
        variance        = average of (a chunk's variance + (its mean - mean)²)
    The first chunk's mean is subtracted before numbers are summed, so that one sweep is enough and
    little cancels (as in rung 2). Each block reads all of its sample's statistics, so those of a
    large image are first joined to KEPT chunks. An upsampled image, each pixel four times, has the
    statistics of the small one. Each part of a `Pair` has statistics of its own.
LAUNCH
    grid (pixels / (turns · rows), B), block (C / 8, rows): whole warps. A thread keeps eight
    channels, as in rung 3. Dynamic shared memory: two floats for each thread, channel and group.
ACCURACY
    z = x · scale + shift, where shift contains the mean: the error of that subtraction, 2⁻²⁴ of the
    mean, is far below the 2⁻¹¹ to which x itself, in float16, is known. SiLU by the approximate
    tanh, as in rung 3.
DETERMINISM
    every block of a sample adds the chunks' statistics in the same order; the first of them writes
    mean and rstd.
COST
    x and, with each block's pixels, its sample's statistics are read, y is written. Roof: memory
    bandwidth.
SOURCE
    reference.py for the mathematics; joining variances: Chan, Golub, LeVeque 1983, Am. Stat. 37,
    242.
READ NEXT
    conv2d/hopper/, which leaves the statistics.
"""

import math
from typing import NamedTuple

import numpy as np

from ...device import cuda, device_inline, empty, float32, int32, launch, opaque, uint32
from ...device.batch_invariance import nominal_extent
from ...device.common import divide
from ...device.eight import fetch8, load8_into, numbers8, one_of, store8_from
from ...dtypes import is_half
from ..concat import Pair, parts_of
from .vectors import VECTOR, WARP, WARP_BITS, WORDS, NormVectorShape, lanes_sum, locate, silu8

THREADS = 512
CHUNK = 8  # pixels of a chunk's side
KEPT, JOIN_BLOCK = 16, 256  # chunks that `join_chunks` leaves of 65 and more; its threads
# threads at most, turns: pixels of a thread. The first if it makes enough blocks
SHAPES = (512, 8), (256, 4)
BLOCKS_A_MULTIPROCESSOR = 1.9
# eight channels are four pairs: a quarter of the rows of threads adds the statistics of each
PAIRS_A_THREAD = 4


def channel_statistics_reference(y):
    """The statistics (B, chunks, 2, C / 2) of y (B, H, W, C), H and W multiples of 8."""
    B, H, W, C = y.shape
    chunks = y.reshape(B, H // CHUNK, CHUNK, W // CHUNK, CHUNK, C // 2, 2).transpose(
        0, 1, 3, 5, 2, 4, 6
    )
    chunks = chunks.reshape(B, -1, C // 2, 2 * CHUNK**2)
    return np.stack((chunks.mean(-1), chunks.var(-1)), axis=2)


@device_inline
def normalise8(y, at, value, scales, shifts, activate):
    for k in range(VECTOR):
        value[k] = value[k] * scales[k] + shifts[k]
    if activate:
        silu8(y, value)
    store8_from(y, at, value)


class StreamCut(NamedTuple):
    """chunks, chunks_2: statistics of a sample of x's parts; pixels: of a block; team: lanes that
    join a group's statistics, a power of two."""

    chunks: int
    chunks_2: int
    pixels: int
    team: int


class NormPlaces(NamedTuple):
    """The places in `sums` (registers are short) of weight and bias, and of the groups' means and
    rstd: behind two numbers of each thread."""

    weights: int
    biases: int
    averages: int
    roots: int


@device_inline
def known_mean(known, b, pair, seam, pairs, chunks, chunks_2):
    """The mean of a pair of channels over the first chunk of sample b; the first array has `seam`
    of all pairs."""
    after = int32(pair - seam)
    return (
        known.a[2 * b * chunks * seam + pair]
        if after < 0
        else known.b[2 * b * chunks_2 * (pairs - seam) + after]
    )


@device_inline
def sum_chunks(part, at, turn, columns, n, slices, chunks, origin):
    """The sums of d, and of d² + variance, of one pair of channels in every `slices`-th chunk from
    the n-th on; d: a chunk's mean minus `origin`.

    part: the statistics (B, chunks, 2, columns), at: of the n-th chunk's mean; `turn` elements
    further is the next
    """
    total, squares = float32(0), float32(0)
    while n + 3 * slices < chunks:  # four at once, as each load has a long latency
        d_0, d_1 = part[at] - origin, part[at + turn] - origin
        d_2, d_3 = part[at + 2 * turn] - origin, part[at + 3 * turn] - origin
        at += columns
        within = (part[at] + part[at + turn]) + (part[at + 2 * turn] + part[at + 3 * turn])
        total += (d_0 + d_1) + (d_2 + d_3)
        squares += (d_0 * d_0 + d_1 * d_1) + (d_2 * d_2 + d_3 * d_3) + within
        n, at = int32(n + 4 * slices), int32(at - columns + 4 * turn)
    while n < chunks:
        d = part[at] - origin
        total += d
        squares += d * d + part[at + columns]
        n, at = int32(n + slices), int32(at + turn)
    return total, squares


@cuda.jit
def join_chunks_kernel(known, joined, chunks, columns):
    """joined (B, KEPT, 2, columns): the statistics of each KEPT-th of the `chunks` in known (B,
    chunks, 2, columns), as one; a thread a pair of channels."""
    i = int32(cuda.grid(1))
    if 2 * i < joined.size:
        rest, column = divide(i, columns)
        b, n = divide(rest, KEPT)
        at, turn = int32((b * chunks + n) * 2 * columns + column), int32(2 * columns * KEPT)
        origin, share = known[at], float32(KEPT) / float32(chunks)
        total, squares = sum_chunks(known, at, turn, columns, n, int32(KEPT), chunks, origin)
        total *= share
        to = int32(rest * 2 * columns + column)
        joined[to] = origin + total
        joined[to + columns] = max(squares * share - total * total, float32(0))


def join_chunks(known):
    """Statistics of KEPT chunks for those of a large image; others as they are."""
    B, chunks, _, columns = known.shape
    if chunks <= 4 * KEPT or chunks % KEPT:
        return known
    joined = empty((B, KEPT, 2, columns), np.float32, like=known)
    threads = B * KEPT * columns
    arrays = known.reshape(-1), joined.reshape(-1)
    launch(join_chunks_kernel, -(-threads // JOIN_BLOCK), JOIN_BLOCK, *arrays, chunks, columns)
    return joined


@device_inline
def join_groups(sums, places, t, lane, warp, threads, groups, count, team, eps):
    """The groups' means and rstd, to `places`, from what the `count` threads of each brought:
    `team` lanes add it."""
    # the first group of a warp; a lane's
    of_warp, group = int32(warp * divide(WARP, team)[0]), divide(t, team)[0]
    while of_warp < groups:
        total, squares, e = float32(0), float32(0), int32(lane & (team - 1))
        while e < count and group < groups:
            total += sums[group * count + e]
            squares += sums[threads + group * count + e]
            e += team
        total, squares = lanes_sum(total, team), lanes_sum(squares, team)
        if lane & (team - 1) == 0 and group < groups:
            sums[places.averages + group] += total
            sums[places.roots + group] = float32(1) / math.sqrt(
                max(squares - total * total, float32(0)) + eps
            )
        of_warp, group = (
            int32(of_warp + divide(threads, team)[0]),
            int32(group + divide(threads, team)[0]),
        )


@device_inline
def load_affine(sums, places, c, width, scales, shifts):
    """z = x · scale + shift for the eight channels from c on, the mean in the shift."""
    load8_into(sums, places.weights + c, scales)
    load8_into(sums, places.biases + c, shifts)
    group, before = divide(c, width)
    left = int32(width - before)  # channels of this group from here on
    for k in range(VECTOR):
        scales[k] *= sums[places.roots + group]
        shifts[k] -= sums[places.averages + group] * scales[k]
        left -= int32(1)
        if left == 0:
            group, left = int32(group + 1), int32(width)


@device_inline
def fetch_four(x, p, P, rows, i, step, words):
    """Load a thread's next four pixels, all at once, so that ptxas waits once for
    all four."""
    words_0, words_1, words_2, words_3 = words
    if p < P:
        fetch8(x, i, words_0)
    if p + rows < P:
        fetch8(x, i + step, words_1)
    if p + 2 * rows < P:
        fetch8(x, i + 2 * step, words_2)
    if p + 3 * rows < P:
        fetch8(x, i + 3 * step, words_3)


@device_inline
def stream(x, y, words, p, end, rows, source, target, scales, shifts, activate):
    """The epilogue: write y of this thread's next four pixels, already loading; load the next,
    advance. source, target: the index of the first pixel in x and in y, and the step to the next
    one."""
    value = cuda.local.array(VECTOR, float32)
    words_0, words_1, words_2, words_3 = words
    (i, step), (i_y, step_y) = source, target
    while p < end:
        numbers8(x, words_0, value)
        normalise8(y, i_y, value, scales, shifts, activate)
        if p + rows < end:
            numbers8(x, words_1, value)
            normalise8(y, i_y + step_y, value, scales, shifts, activate)
        if p + 2 * rows < end:
            numbers8(x, words_2, value)
            normalise8(y, i_y + 2 * step_y, value, scales, shifts, activate)
        if p + 3 * rows < end:
            numbers8(x, words_3, value)
            normalise8(y, i_y + 3 * step_y, value, scales, shifts, activate)
        p, i, i_y = int32(p + 4 * rows), i + 4 * step, i_y + 4 * step_y
        fetch_four(x, p, end, rows, i, step, words)


@cuda.jit(launch_bounds=(THREADS, 2))
def groupnorm_forward_kernel_v4(x, known, weight, bias, y, mean, rstd, shape, cut, eps, activate):
    """y (B, P, C), mean and rstd (B, G) of x, a `Pair`, as one array; known: the statistics of its
    parts."""
    sums = cuda.shared.array(0, float32, alignment=16)
    scales = cuda.local.array(VECTOR, float32)
    shifts = cuda.local.array(VECTOR, float32)
    words = (
        cuda.local.array(WORDS, uint32),
        cuda.local.array(WORDS, uint32),
        cuda.local.array(WORDS, uint32),
        cuda.local.array(WORDS, uint32),
    )
    P, C, seam, width = shape
    lanes, rows = int32(cuda.blockDim.x), int32(cuda.blockDim.y)
    row, b, threads = int32(cuda.threadIdx.y), int32(cuda.blockIdx.y), int32(lanes * rows)
    t = int32(row * lanes + cuda.threadIdx.x)
    lane, warp = int32(t & (WARP - 1)), int32(t >> WARP_BITS)
    c, groups = int32(VECTOR * cuda.threadIdx.x), divide(C, width)[0]
    places = NormPlaces(
        int32(2 * threads),
        int32(2 * threads + C),
        int32(2 * threads + C + C),
        int32(2 * threads + C + C + groups),
    )
    p, end = (
        int32(cuda.blockIdx.x * cut.pixels + row),
        int32(min((cuda.blockIdx.x + 1) * cut.pixels, P)),
    )
    beyond, i, step = locate(c, p, b, P, C, seam, rows)
    fetch_four(one_of(beyond, x.a, x.b), p, end, rows, i, step, words)

    # of one pair of channels, every `slices`-th chunk's statistics, less the mean of the group's
    # first
    slices = rows // PAIRS_A_THREAD
    half = int32(width >> 1)
    first, pair = divide(t, C >> 1)
    group, in_group = divide(pair, half)
    origin = known_mean(known, b, group * half, seam >> 1, C >> 1, cut.chunks, cut.chunks_2)
    after = int32(pair - (seam >> 1))
    part, chunks = one_of(after, known.a, known.b), cut.chunks if after < 0 else cut.chunks_2
    columns, column = (int32(seam >> 1), pair) if after < 0 else (int32((C - seam) >> 1), after)
    at, turn = int32((b * chunks + first) * 2 * columns + column), int32(2 * columns * slices)
    own_weight, own_bias = weight[min(t, C - 1)], bias[min(t, C - 1)]
    total, squares = sum_chunks(part, at, turn, columns, first, slices, chunks, origin)
    share = float32(1) / (float32(chunks) * float32(half))
    sums[pair * slices + first], sums[threads + pair * slices + first] = (
        total * share,
        squares * share,
    )
    if first == 0 and in_group == 0:
        sums[places.averages + group] = origin
    n = t
    while n < C:
        sums[places.weights + n], sums[places.biases + n] = own_weight, own_bias
        n += threads
        if n < C:
            own_weight, own_bias = weight[n], bias[n]
    cuda.syncthreads()
    join_groups(sums, places, t, lane, warp, threads, groups, int32(slices * half), cut.team, eps)
    cuda.syncthreads()

    load_affine(sums, places, c, width, scales, shifts)
    c = opaque(c)  # what follows from it is computed again: kept, it would take ten registers
    beyond, i, step = locate(c, p, b, P, C, seam, rows)
    _, i_y, step_y = locate(c, p, b, P, C, C, rows)
    stream(
        one_of(beyond, x.a, x.b),
        y,
        words,
        p,
        end,
        rows,
        (i, step),
        (i_y, step_y),
        scales,
        shifts,
        activate,
    )
    if cuda.blockIdx.x == 0:
        n = t
        while n < groups:
            mean[b * groups + n], rstd[b * groups + n] = (
                sums[places.averages + n],
                sums[places.roots + n],
            )
            n += threads


# Launcher -----------------------------------------------------------------------------------------


def block_shape(B, P, C, multiprocessors):
    """(rows, turns) of a block's threads, or None if C / 8 of them make no block of whole warps."""
    lanes, found = C // VECTOR, None
    whole = math.lcm(PAIRS_A_THREAD, WARP // math.gcd(lanes, WARP))
    for threads, turns in SHAPES:
        rows = threads // (lanes * whole) * whole
        if rows:
            found = rows, turns
            if B * -(-P // (rows * turns)) >= BLOCKS_A_MULTIPROCESSOR * multiprocessors:
                break
    return found


def normalise_supports(x, groups, statistics):
    """Whether rung 4 takes an array, or a `Pair`, with its statistics, of a `Pair` a tuple; None:
    it has none."""
    first, _, seam = parts_of(x)
    B, C = x.shape[0], x.shape[-1]
    given = statistics if isinstance(x, Pair) else (statistics,)
    return (
        given is not None
        and None not in given
        and is_half(x.dtype)
        and C % VECTOR == seam % VECTOR == 0
        and C // groups % 2 == 0
        and x.size < B << 31
        and block_shape(B, x.size // (B * C), C, first.backend.multiprocessors) is not None
    )


def normalise_forward(x, weight, bias, groups, eps, silu, statistics):
    B, C = x.shape[0], x.shape[-1]
    first, second, seam = parts_of(x)
    if isinstance(x, Pair):
        known, known_2 = map(join_chunks, statistics)
    else:
        known = known_2 = join_chunks(statistics)
    P = x.size // (B * C)
    y = empty(x.shape, x.dtype, like=first)
    mean, rstd = (
        empty((B, groups), np.float32, like=first),
        empty((B, groups), np.float32, like=first),
    )
    rows, turns = block_shape(nominal_extent(B), P, C, first.backend.multiprocessors)
    team = min(WARP, 1 << (rows // PAIRS_A_THREAD * (C // groups // 2) - 1).bit_length())
    launch(
        groupnorm_forward_kernel_v4,
        (-(-P // (rows * turns)), B),
        (C // VECTOR, rows),
        Pair(first.reshape(-1), second.reshape(-1)),
        Pair(known.reshape(-1), known_2.reshape(-1)),
        weight,
        bias,
        y.reshape(-1),
        mean.reshape(-1),
        rstd.reshape(-1),
        NormVectorShape(P, C, seam, C // groups),
        StreamCut(known.shape[1], known_2.shape[1], rows * turns, team),
        float(eps),
        int(silu),
        shared=8 * (C // VECTOR * rows + C + groups),
    )
    return y, mean, rstd
