"""GroupNorm's forward, rung 4: the statistics come with x, from the convolution that wrote it.

WHAT IS NEW, AND WHY IT PAYS
    A block of rung 3 must see all pixels of its groups before it may write the first: it reads, then waits, then
    writes, and memory idles in between. The convolution that wrote x had every number in a register. It leaves the
    mean and the variance of each two channels over each 8 × 8 pixels (conv2d_hopper.py), 1/16 of x's bytes or less,
    and nothing keeps this kernel from streaming: a block asks for its first pixels, joins the statistics while they
    travel, and then reads and writes in turn. Any pixels can be a block, so that all channels of a pixel are read
    together, in full lines of memory, however many pixels there are.
STATISTICS
    (B, chunks, 2, C / 2) float32, for each chunk of a sample's pixels: means of two neighbouring channels together,
    then variances. Chunks have equally many pixels, whose number drops out:
        mean of a group = average of its chunks' means
        variance        = average of (a chunk's variance + (its mean - mean)²)
    which cancels nothing, as in rung 2. So an image that was made larger, each pixel four times, has the statistics of
    the small one, and of a `Pair`, each part its own.
LAUNCH
    grid (pixels / (turns · rows), B), block (C / 8, rows): whole warps. A thread keeps eight channels, as in rung 3.
    Dynamic shared memory: a float for each thread, two for each group.
ACCURACY
    z = x · scale + shift, where shift has the mean in it: what that cancels, 2⁻²⁴ of the mean, is far below the 2⁻¹¹
    that x itself, in float16, is known to.
DETERMINISM
    every block of a sample adds the chunks' statistics in the same order; the first of them writes mean and rstd.
COST
    x and, with each block's pixels, its sample's statistics are read, y is written. Roof: memory bandwidth.
SOURCE
    groupnorm.py for the mathematics; joining variances: Chan, Golub, LeVeque 1983, Am. Stat. 37, 242.
READ NEXT
    groupnorm_one_pass.py, for arrays that come without; layernorm.py
"""
import math

import numpy as np

from ..device import cuda, empty, float32, int32, launch, uint32
from .concat import Pair, parts_of
from .groupnorm_sixteen import ask
from .groupnorm_vectors import (
    VECTOR,
    WARP,
    WARP_BITS,
    WORDS,
    lanes_sum,
    load8,
    locate,
    numbers8,
    one_of,
    sigmoid,
    store8,
)
from .im2col import divide

THREADS = 512
CHUNK = 8  # pixels of a chunk's side
SHAPES = (512, 8), (256, 4)  # threads at most, turns: pixels of a thread. The first if it makes blocks enough
BLOCKS_A_MULTIPROCESSOR = 1.9
PAIRS_A_THREAD = 4  # of channels, so many rows share what belongs to one


def channel_statistics_reference(y):
    """The statistics (B, chunks, 2, C / 2) of y (B, H, W, C), H and W multiples of 8."""
    B, H, W, C = y.shape
    chunks = y.reshape(B, H // CHUNK, CHUNK, W // CHUNK, CHUNK, C // 2, 2).transpose(0, 1, 3, 5, 2, 4, 6)
    chunks = chunks.reshape(B, -1, C // 2, 2 * CHUNK**2)
    return np.stack((chunks.mean(-1), chunks.var(-1)), axis=2)


@cuda.jit(device=True, forceinline=True)
def join(sums, averages, slices, pairs, groups, warp, warps, lane, eps, roots):
    """sums[averages + group]: the average of what the threads brought for a group, or 1 / √(that + eps).

    A group has slices · pairs sums, one after the other, for each of its `pairs` pairs of channels the `slices` parts
    of an average over all chunks. All threads call it.
    """
    cuda.syncthreads()  # all have brought their sums
    group, count = int32(warp), int32(slices * pairs)
    while group < groups:
        total, e = float32(0), int32(lane)
        while e < count:
            total += sums[group * count + e]
            e += int32(WARP)
        total = lanes_sum(total, WARP) / float32(pairs)
        if lane == 0:
            sums[averages + group] = float32(1) / math.sqrt(total + eps) if roots else total
        group += warps
    cuda.syncthreads()


@cuda.jit(device=True, forceinline=True)
def normalise8(y, at, value, scales, shifts, activate):
    for k in range(VECTOR):
        value[k] = value[k] * scales[k] + shifts[k]
    if activate:
        for k in range(VECTOR):
            value[k] *= sigmoid(value[k])
    store8(y, at, value)


@cuda.jit(launch_bounds=(THREADS, 2))
def groupnorm_forward_kernel_v4(x, x_2, known, known_2, weight, bias, y, mean, rstd, P, C, seam, width, chunks,
                                chunks_2, pixels, eps, activate):
    """known, known_2: the statistics of x and x_2, of `chunks` and `chunks_2` a sample; pixels: of a block."""
    sums = cuda.shared.array(0, float32)
    value = cuda.local.array(VECTOR, float32)
    scales = cuda.local.array(VECTOR, float32)
    shifts = cuda.local.array(VECTOR, float32)
    words_0 = cuda.local.array(WORDS, uint32)
    words_1 = cuda.local.array(WORDS, uint32)
    words_2 = cuda.local.array(WORDS, uint32)
    words_3 = cuda.local.array(WORDS, uint32)
    lanes, rows = int32(cuda.blockDim.x), int32(cuda.blockDim.y)
    row, b, threads = int32(cuda.threadIdx.y), int32(cuda.blockIdx.y), int32(lanes * rows)
    t = int32(row * lanes + cuda.threadIdx.x)
    lane, warp, warps = int32(t & (WARP - 1)), int32(t >> WARP_BITS), int32(threads >> WARP_BITS)
    c, groups = int32(VECTOR * cuda.threadIdx.x), divide(C, width)[0]
    averages, roots = threads, int32(threads + groups)  # where in `sums` the groups' means are, and their rstd
    p, end = int32(cuda.blockIdx.x * pixels + row), int32(min((cuda.blockIdx.x + 1) * pixels, P))
    beyond, i, step = locate(c, p, b, P, C, seam, rows)
    part_x = one_of(beyond, x, x_2)
    ask(part_x, p, end, rows, i, step, words_0, words_1, words_2, words_3)

    # the statistics of one pair of channels in every `slices`-th chunk
    slices, half = rows // PAIRS_A_THREAD, int32(width >> 1)
    first, pair = divide(t, C >> 1)
    after = int32(pair - (seam >> 1))
    part, own_chunks = one_of(after, known, known_2), chunks if after < 0 else chunks_2
    columns, column = (int32(seam >> 1), pair) if after < 0 else (int32((C - seam) >> 1), after)
    at, turn = int32((b * own_chunks + first) * 2 * columns + column), int32(2 * columns * slices)
    weight_of_chunk = float32(1) / float32(own_chunks)
    total, n, k = float32(0), first, at
    while n + 3 * slices < own_chunks:  # four at once: each takes its time
        total += (part[k] + part[k + turn]) + (part[k + 2 * turn] + part[k + 3 * turn])
        n, k = int32(n + 4 * slices), int32(k + 4 * turn)
    while n < own_chunks:
        total += part[k]
        n, k = int32(n + slices), int32(k + turn)
    sums[pair * slices + first] = total * weight_of_chunk
    join(sums, averages, slices, half, groups, warp, warps, lane, eps, False)
    average, total, n, k = sums[averages + divide(pair, half)[0]], float32(0), first, at
    while n < own_chunks:
        d = part[k] - average
        total += part[k + columns] + d * d
        n, k = int32(n + slices), int32(k + turn)
    sums[pair * slices + first] = total * weight_of_chunk
    join(sums, roots, slices, half, groups, warp, warps, lane, eps, True)

    load8(weight, c, scales)
    load8(bias, c, shifts)
    group, before = divide(c, width)
    left = int32(width - before)  # channels of this group from here on
    for k in range(VECTOR):
        scales[k] *= sums[roots + group]
        shifts[k] -= sums[averages + group] * scales[k]
        left -= int32(1)
        if left == 0:
            group, left = int32(group + 1), int32(width)
    _, i_y, step_y = locate(c, p, b, P, C, C, rows)
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
        ask(part_x, p, end, rows, i, step, words_0, words_1, words_2, words_3)
    if cuda.blockIdx.x == 0:
        n = t
        while n < groups:
            mean[b * groups + n], rstd[b * groups + n] = sums[averages + n], sums[roots + n]
            n += threads


# Launcher -------------------------------------------------------------------------------------------------------------

def block_shape(B, P, C, multiprocessors):
    """(rows, turns) of a block's threads, or None where C / 8 of them make no block of whole warps."""
    lanes, found = C // VECTOR, None
    whole = math.lcm(PAIRS_A_THREAD, WARP // math.gcd(lanes, WARP))
    for threads, turns in SHAPES:
        rows = threads // (lanes * whole) * whole
        if rows:
            found = rows, turns
            if B * -(-P // (rows * turns)) >= BLOCKS_A_MULTIPROCESSOR * multiprocessors:
                break
    return found


def normalise_takes(x, groups, statistics):
    """Whether rung 4 takes an array, or a `Pair`, with its statistics, of a `Pair` a tuple; None: it has none."""
    first, _, seam = parts_of(x)
    B, C = x.shape[0], x.shape[-1]
    given = statistics if isinstance(x, Pair) else (statistics,)
    return (given is not None and None not in given and x.dtype == np.float16 and C % VECTOR == seam % VECTOR == 0
            and C // groups % 2 == 0 and x.size < B << 31
            and block_shape(B, x.size // (B * C), C, first.backend.multiprocessors) is not None)


def normalise_forward(x, weight, bias, groups, eps, silu, statistics):
    B, C = x.shape[0], x.shape[-1]
    first, second, seam = parts_of(x)
    known, known_2 = statistics if isinstance(x, Pair) else (statistics, statistics)
    P = x.size // (B * C)
    y = empty(x.shape, x.dtype, like=first)
    mean, rstd = empty((B, groups), np.float32, like=first), empty((B, groups), np.float32, like=first)
    rows, turns = block_shape(B, P, C, first.backend.multiprocessors)
    launch(groupnorm_forward_kernel_v4, (-(-P // (rows * turns)), B), (C // VECTOR, rows), first.reshape(-1),
           second.reshape(-1), known.reshape(-1), known_2.reshape(-1), weight, bias, y.reshape(-1), mean.reshape(-1),
           rstd.reshape(-1), P, C, seam, C // groups, known.shape[1], known_2.shape[1], rows * turns, float(eps),
           int(silu), shared=4 * (C // VECTOR * rows + 2 * groups))
    return y, mean, rstd
