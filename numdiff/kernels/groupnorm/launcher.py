"""GroupNorm, with SiLU in the same pass.

MATHEMATICS
    Sample b's channels are cut into G groups of C/G neighbours; a group has m = P · C/G elements.
        mean = Σ x / m          var = Σ (x - mean)² / m          rstd = 1 / √(var + eps)
        xhat = (x - mean) · rstd          z = xhat · weight[c] + bias[c]          y = z, or SiLU(z)
    Backward. First g = dy, or dy · SiLU'(z) with z computed anew from x (cheaper than a stored z is to read). Then
        dbias[c] += Σ_{b,p} g          dweight[c] += Σ_{b,p} g · xhat
    and, because each x moves its group's mean and variance too (two averages over the group, h = g · weight),
        dx = rstd · (h - average(h) - xhat · average(h · xhat)) + what has arrived for x on other ways (`residual`)
    Both averages are weighted sums of the channel sums that dbias and dweight need, so one pass gives all four.
SHAPES
    x, y, dx, dy, residual (B, ..., C) float32 or float16, channels last, P pixels; weight, bias (C,); mean, rstd (B, G)
    x, dx and residual may be Pairs (concat.py): version 3 reads and writes two arrays, the others join them first
VERSIONS
    v1 a block a group: two passes for mean and variance, a third to normalise. But a group of C/G = 2 to 16 channels is
       only 8 to 64 bytes at each pixel: the memory delivers whole sectors of 32 bytes, whose rest another block fetches
       again.
    v2 blocks own a chunk of pixels with up to 256 channels, so all loads are whole and 16 bytes wide. Statistics of
       chunks are joined by a small kernel in between; x is read twice, y written once.
    v3 a block some groups of a sample, kept in shared memory: one kernel a pass, x read once, the last block adds the
       parameters' gradients (one_pass.py; one_pass_half.py, the float16 backward). C a multiple of 8.
       Taken where `choose_plan` forecasts less than `version_2_estimate`: not where its blocks would be too few, or
       each much larger than shared memory.
    v4 forward, where a convolution left the statistics beside its float16 result: reads and writes in turn
       (normalise.py).
LAUNCH
    v1 grid (G, B), 256 threads, 1 KiB of shared memory. v2 grid (chunks, channel tiles, B), 256 threads, 4 or 8 KiB;
    between its passes grid (G, B), 64 threads. v3: see its file.
DETERMINISM
    no atomics on numbers: sums of threads, chunks, groups and samples are added in an order that the shape and the
    size of the device decide.
COST
    n elements of s bytes. v3: forward 2·s·n bytes (x, y), backward 3·s·n (x, dy, dx); v2 reads x, and dy, twice: 3·s·n
    and 5·s·n. Roof: memory bandwidth.
    The variance is never E[x²] - E[x]², which loses all digits where the mean is large beside the deviation.
SOURCE
    Wu and He 2018, arXiv:1803.08494, eq. 1, 2, 7. Joining variances: Chan, Golub, LeVeque 1983, Am. Stat. 37, 242.
READ NEXT
    one_pass.py; then one_pass_half.py.
"""
import math

import numpy as np

from ...device import cuda, empty, empty_like, float32, is_device, launch, load4, over_batch, store4
from ..any_batch import assumed
from ..concat import Pair, parts_of
from ..elementwise import silu, silu_gradient
from ..reduce import BLOCK, add_column_sums, cut, tree_sum
from .normalise import normalise_forward, normalise_takes
from .one_pass import one_pass_backward, one_pass_forward, plan_for, version_2_estimate

BLOCK4 = 4 * BLOCK  # shared elements where a thread brings one sum for each of its four channels
BLOCK2, BLOCK8 = 2 * BLOCK, 8 * BLOCK  # two sums a thread; two for each of its four channels
SMALL_BLOCK = 64  # threads that join one group's chunks: (chunks × C/G) is 16 to 256 statistics
PART = 1 << 16  # elements that the reference takes at a time: 256 KiB, so that its many passes stay in a core's cache


# References -----------------------------------------------------------------------------------------------------------

def _for_parts(function, x):
    """Call function(slice of the batch) until all is done: the cores share the batch, a core's cache holds a part."""
    step = max(1, PART * len(x) // x.size)

    def share(samples):
        for b in range(samples.start, samples.stop, step):
            function(slice(b, min(b + step, samples.stop)))
    over_batch(share, len(x), x.size)


def _sums(a):
    return (np.ones((1, a.shape[1]), a.dtype) @ a)[:, 0]  # over the pixels, by BLAS


def _average(sums, groups, P):
    """Averages over groups, (b, C), from channel sums: repeated for every channel of the group."""
    width = sums.shape[1] // groups
    return np.repeat(sums.reshape(-1, groups, width).sum(2) / (P * width), width, axis=1)


def _sigmoid(z):
    with np.errstate(over="ignore"):  # where e^-z overflows, 1 / (1 + inf) = 0 is right
        s = np.negative(z)
        np.exp(s, out=s)
    s += 1
    return np.reciprocal(s, out=s)


def groupnorm_forward_reference(x, weight, bias, groups, eps=1e-5, silu=False):
    pixels = x.reshape(len(x), -1, x.shape[-1])
    P, width = pixels.shape[1], x.shape[-1] // groups
    y, (mean, rstd) = np.empty_like(pixels), np.empty((2, len(x), groups), x.dtype)

    def part(b):
        average = _average(_sums(pixels[b]), groups, P)
        z = np.subtract(pixels[b], average[:, None], out=y[b])  # centred first: its squares lose nothing
        scale = 1 / np.sqrt(_average(np.einsum("bpc,bpc->bc", z, z), groups, P) + eps)
        mean[b], rstd[b] = average[:, ::width], scale[:, ::width]
        z *= (scale * weight)[:, None]
        z += bias
        if silu:
            z *= _sigmoid(z)
    _for_parts(part, x)
    return y.reshape(x.shape), mean, rstd


def groupnorm_backward_reference(dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu=False, residual=None):
    pixels, dpixels = (a.reshape(len(x), -1, x.shape[-1]) for a in (x, dy))
    before = None if residual is None else residual.reshape(pixels.shape)
    P, dx, (sum_g, sum_gx) = pixels.shape[1], np.empty_like(pixels), np.empty((2, len(x), x.shape[-1]), x.dtype)
    center, scale = (np.repeat(s, x.shape[-1] // groups, axis=1)[:, None] for s in (mean, rstd))

    def part(b):
        xhat, g, h = pixels[b] - center[b], dpixels[b], dx[b]
        xhat *= scale[b]
        if silu:
            z = xhat * weight
            z += bias
            s = _sigmoid(z)
            z *= 1 - s
            z += 1
            z *= s
            g = np.multiply(z, g, out=z)  # dy · s · (1 + z · (1 - s))
        sum_g[b], sum_gx[b] = _sums(g), np.einsum("bpc,bpc->bc", g, xhat)
        np.multiply(g, weight, out=h)
        h -= _average(sum_g[b] * weight, groups, P)[:, None]
        xhat *= _average(sum_gx[b] * weight, groups, P)[:, None]
        h -= xhat
        h *= scale[b]
        if before is not None:
            h += before[b]
    _for_parts(part, x)
    dweight += sum_gx.sum(0)
    dbias += sum_g.sum(0)
    return dx.reshape(x.shape)


# Device functions: the arithmetic of one element ----------------------------------------------------------------------

@cuda.jit(device=True)
def affine(xhat, weight, bias, activate):
    z = xhat * weight + bias
    return silu(z) if activate else z


@cuda.jit(device=True)
def affine_gradient(dy, xhat, weight, bias, activate):
    """Gradient of z = xhat · weight + bias."""
    return silu_gradient(dy, xhat * weight + bias) if activate else dy


# v1: a block a group --------------------------------------------------------------------------------------------------

@cuda.jit
def groupnorm_forward_kernel_v1(x, weight, bias, y, mean, rstd, P, C, width, eps, activate):
    tile = cuda.shared.array(BLOCK, float32)
    t = cuda.threadIdx.x
    group, b = cuda.blockIdx.x, cuda.blockIdx.y
    m = P * width
    total = float32(0)
    for e in range(t, m, BLOCK):  # element e of the group: pixel e // width, channel e % width
        total += float32(x[(b * P + e // width) * C + group * width + e % width])
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    average = tile[0] / float32(m)
    cuda.syncthreads()  # all have read tile[0] before it is written again
    total = float32(0)
    for e in range(t, m, BLOCK):
        d = float32(x[(b * P + e // width) * C + group * width + e % width]) - average
        total += d * d
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    scale = float32(1) / math.sqrt(tile[0] / float32(m) + eps)
    for e in range(t, m, BLOCK):
        c = group * width + e % width
        i = (b * P + e // width) * C + c
        y[i] = affine((float32(x[i]) - average) * scale, weight[c], bias[c], activate)
    if t == 0:
        mean[b * cuda.gridDim.x + group] = average
        rstd[b * cuda.gridDim.x + group] = scale


@cuda.jit
def groupnorm_backward_kernel_v1(dy, x, weight, bias, mean, rstd, residual, dx, sums, P, C, width, activate, adds):
    """dx, and the channel sums (2, B, C) of g · xhat and g."""
    tile = cuda.shared.array(BLOCK2, float32)
    t = cuda.threadIdx.x
    group, b = cuda.blockIdx.x, cuda.blockIdx.y
    average, scale = mean[b * cuda.gridDim.x + group], rstd[b * cuda.gridDim.x + group]
    average_h = average_hx = float32(0)
    for c in range(group * width, group * width + width):
        sum_gx = sum_g = float32(0)
        for p in range(t, P, BLOCK):
            i = (b * P + p) * C + c
            xhat = (float32(x[i]) - average) * scale
            g = affine_gradient(float32(dy[i]), xhat, weight[c], bias[c], activate)
            sum_gx += g * xhat
            sum_g += g
        tile[t], tile[BLOCK + t] = sum_gx, sum_g
        tree_sum(tile, 2, t, 1, BLOCK)
        average_hx += tile[0] * weight[c]
        average_h += tile[BLOCK] * weight[c]
        if t == 0:
            sums[b * C + c] = tile[0]
            sums[(cuda.gridDim.y + b) * C + c] = tile[BLOCK]
        cuda.syncthreads()  # all have read the sums before the next channel's are written
    average_h /= float32(P * width)
    average_hx /= float32(P * width)
    for e in range(t, P * width, BLOCK):
        c = group * width + e % width
        i = (b * P + e // width) * C + c
        xhat = (float32(x[i]) - average) * scale
        h = affine_gradient(float32(dy[i]), xhat, weight[c], bias[c], activate) * weight[c]
        value = scale * (h - average_h - xhat * average_hx)
        dx[i] = value + float32(residual[i]) if adds else value


# v2: a block a chunk of pixels with all their channels ----------------------------------------------------------------
# A thread keeps four neighbouring channels, so what depends on the channel alone (mean, rstd, weight, bias) is loaded
# once for all its pixels, and a warp reads up to 512 neighbouring bytes. A channel's statistics in a chunk are a mean
# and a sum of squares about that mean; any two such pairs join without cancellation, because
#     Σ (x - mean)² over everything = Σ over the parts of [their own sum of squares + count · (their mean - mean)²].

@cuda.jit(device=True)
def load_groups(values, first, c, width):
    """The values of the groups that channels c to c + 3 belong to; the sample's own begin at `first`."""
    return (values[first + c // width], values[first + (c + 1) // width], values[first + (c + 2) // width],
            values[first + (c + 3) // width])


@cuda.jit(device=True)
def mean_and_squares(first, count, s, q):
    """Mean and Σ (x - mean)² of `count` values from s = Σ (x - first) and q = Σ (x - first)².

    `first` is one of the values, therefore (first - mean)² ≤ Σ (x - mean)² and q is at most (1 + count) times the
    result: the subtraction cannot cancel more than that, whatever the mean.
    """
    return first + s / count, max(q - s * s / count, float32(0))


@cuda.jit
def groupnorm_chunk_kernel_v2(x, chunk_mean, chunk_squares, P, C, lanes, chunk):
    """Mean and sum of squares about it, of every channel in every chunk: two arrays (B, chunks, C)."""
    tile = cuda.shared.array(BLOCK4, float32)
    t = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = t // lanes, cuda.blockIdx.z
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    end = min(start + chunk, P)
    m0 = m1 = m2 = m3 = s0 = s1 = s2 = s3 = q0 = q1 = q2 = q3 = float32(0)
    count = float32(0)
    if row < rows and c < C and start + row < end:
        f0, f1, f2, f3 = load4(x, (b * P + start + row) * C + c)
        count = float32(1)
        for p in range(start + row + rows, end, rows):
            x0, x1, x2, x3 = load4(x, (b * P + p) * C + c)
            x0, x1, x2, x3 = x0 - f0, x1 - f1, x2 - f2, x3 - f3
            s0 += x0
            s1 += x1
            s2 += x2
            s3 += x3
            q0 += x0 * x0
            q1 += x1 * x1
            q2 += x2 * x2
            q3 += x3 * x3
            count += float32(1)
        m0, q0 = mean_and_squares(f0, count, s0, q0)
        m1, q1 = mean_and_squares(f1, count, s1, q1)
        m2, q2 = mean_and_squares(f2, count, s2, q2)
        m3, q3 = mean_and_squares(f3, count, s3, q3)
    tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t] = count * m0, count * m1, count * m2, count * m3
    tree_sum(tile, 4, t, lanes, rows)
    lane, pixels = t % lanes, float32(end - start)
    a0, a1, a2, a3 = tile[lane], tile[BLOCK + lane], tile[2 * BLOCK + lane], tile[3 * BLOCK + lane]
    a0, a1, a2, a3 = a0 / pixels, a1 / pixels, a2 / pixels, a3 / pixels
    cuda.syncthreads()  # all have read the sums before the tile is written again
    tile[t] = q0 + count * (m0 - a0) * (m0 - a0)
    tile[BLOCK + t] = q1 + count * (m1 - a1) * (m1 - a1)
    tile[2 * BLOCK + t] = q2 + count * (m2 - a2) * (m2 - a2)
    tile[3 * BLOCK + t] = q3 + count * (m3 - a3) * (m3 - a3)
    tree_sum(tile, 4, t, lanes, rows)
    if row == 0 and c < C:
        i = (b * cuda.gridDim.x + cuda.blockIdx.x) * C + c
        store4(chunk_mean, i, a0, a1, a2, a3)
        store4(chunk_squares, i, tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t])


@cuda.jit
def groupnorm_join_kernel_v2(chunk_mean, chunk_squares, mean, rstd, P, C, width, chunk, chunks, eps):
    """A group's mean and rstd from the statistics of its channels in all chunks."""
    tile = cuda.shared.array(SMALL_BLOCK, float32)
    t = cuda.threadIdx.x
    group, b = cuda.blockIdx.x, cuda.blockIdx.y
    m = float32(P * width)
    total = float32(0)
    for e in range(t, chunks * width, SMALL_BLOCK):  # chunk e // width, channel e % width of the group
        pixels = float32(min(chunk, P - e // width * chunk))
        total += pixels * chunk_mean[(b * chunks + e // width) * C + group * width + e % width]
    tile[t] = total
    tree_sum(tile, 1, t, 1, SMALL_BLOCK)
    average = tile[0] / m
    cuda.syncthreads()
    total = float32(0)
    for e in range(t, chunks * width, SMALL_BLOCK):
        pixels = float32(min(chunk, P - e // width * chunk))
        i = (b * chunks + e // width) * C + group * width + e % width
        d = chunk_mean[i] - average
        total += chunk_squares[i] + pixels * d * d
    tile[t] = total
    tree_sum(tile, 1, t, 1, SMALL_BLOCK)
    if t == 0:
        mean[b * cuda.gridDim.x + group] = average
        rstd[b * cuda.gridDim.x + group] = float32(1) / math.sqrt(tile[0] / m + eps)


@cuda.jit
def groupnorm_normalise_kernel_v2(x, weight, bias, mean, rstd, y, P, C, width, lanes, chunk, activate):
    t = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = t // lanes, cuda.blockIdx.z
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    if row < rows and c < C:
        m0, m1, m2, m3 = load_groups(mean, b * (C // width), c, width)
        r0, r1, r2, r3 = load_groups(rstd, b * (C // width), c, width)
        w0, w1, w2, w3 = load4(weight, c)
        v0, v1, v2, v3 = load4(bias, c)
        for p in range(start + row, min(start + chunk, P), rows):
            i = (b * P + p) * C + c
            x0, x1, x2, x3 = load4(x, i)
            store4(y, i, affine((x0 - m0) * r0, w0, v0, activate), affine((x1 - m1) * r1, w1, v1, activate),
                   affine((x2 - m2) * r2, w2, v2, activate), affine((x3 - m3) * r3, w3, v3, activate))


@cuda.jit
def groupnorm_gradient_sums_kernel_v2(dy, x, weight, bias, mean, rstd, partial, P, C, width, lanes, chunk, activate):
    """Σ g · xhat and Σ g of every channel in every chunk: (2, B, chunks, C)."""
    tile = cuda.shared.array(BLOCK8, float32)
    t = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = t // lanes, cuda.blockIdx.z
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    a0 = a1 = a2 = a3 = s0 = s1 = s2 = s3 = float32(0)
    if row < rows and c < C:
        m0, m1, m2, m3 = load_groups(mean, b * (C // width), c, width)
        r0, r1, r2, r3 = load_groups(rstd, b * (C // width), c, width)
        w0, w1, w2, w3 = load4(weight, c)
        v0, v1, v2, v3 = load4(bias, c)
        for p in range(start + row, min(start + chunk, P), rows):
            i = (b * P + p) * C + c
            x0, x1, x2, x3 = load4(x, i)
            d0, d1, d2, d3 = load4(dy, i)
            x0, x1, x2, x3 = (x0 - m0) * r0, (x1 - m1) * r1, (x2 - m2) * r2, (x3 - m3) * r3
            d0, d1 = affine_gradient(d0, x0, w0, v0, activate), affine_gradient(d1, x1, w1, v1, activate)
            d2, d3 = affine_gradient(d2, x2, w2, v2, activate), affine_gradient(d3, x3, w3, v3, activate)
            a0 += d0 * x0
            a1 += d1 * x1
            a2 += d2 * x2
            a3 += d3 * x3
            s0 += d0
            s1 += d1
            s2 += d2
            s3 += d3
    tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t] = a0, a1, a2, a3
    tile[4 * BLOCK + t], tile[5 * BLOCK + t], tile[6 * BLOCK + t], tile[7 * BLOCK + t] = s0, s1, s2, s3
    tree_sum(tile, 8, t, lanes, rows)
    if row == 0 and c < C:
        chunks = cuda.gridDim.x
        i = (b * chunks + cuda.blockIdx.x) * C + c
        store4(partial, i, tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t])
        i += cuda.gridDim.z * chunks * C
        store4(partial, i, tile[4 * BLOCK + t], tile[5 * BLOCK + t], tile[6 * BLOCK + t], tile[7 * BLOCK + t])


@cuda.jit
def groupnorm_gradient_join_kernel_v2(partial, weight, sums, averages, P, C, width, chunks):
    """Channel sums (2, B, C) over all chunks, and the group averages (2, B, G) of h · xhat and h."""
    tile = cuda.shared.array(BLOCK2, float32)
    t = cuda.threadIdx.x
    group, b = cuda.blockIdx.x, cuda.blockIdx.y
    B, groups = cuda.gridDim.y, cuda.gridDim.x
    total_hx = total_h = float32(0)
    for c in range(group * width + t, group * width + width, SMALL_BLOCK):
        sum_gx = sum_g = float32(0)
        for k in range(chunks):
            sum_gx += partial[(b * chunks + k) * C + c]
            sum_g += partial[((B + b) * chunks + k) * C + c]
        sums[b * C + c] = sum_gx
        sums[(B + b) * C + c] = sum_g
        total_hx += sum_gx * weight[c]
        total_h += sum_g * weight[c]
    tile[t], tile[BLOCK + t] = total_hx, total_h
    tree_sum(tile, 2, t, 1, SMALL_BLOCK)
    if t == 0:
        averages[b * groups + group] = tile[0] / float32(P * width)
        averages[(B + b) * groups + group] = tile[BLOCK] / float32(P * width)


@cuda.jit
def groupnorm_backward_kernel_v2(dy, x, weight, bias, mean, rstd, averages, residual, dx, P, C, width, lanes, chunk,
                                 activate, adds):
    t = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = t // lanes, cuda.blockIdx.z
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    if row < rows and c < C:
        m0, m1, m2, m3 = load_groups(mean, b * (C // width), c, width)
        r0, r1, r2, r3 = load_groups(rstd, b * (C // width), c, width)
        k0, k1, k2, k3 = load_groups(averages, b * (C // width), c, width)
        h0, h1, h2, h3 = load_groups(averages, (cuda.gridDim.z + b) * (C // width), c, width)
        w0, w1, w2, w3 = load4(weight, c)
        v0, v1, v2, v3 = load4(bias, c)
        for p in range(start + row, min(start + chunk, P), rows):
            i = (b * P + p) * C + c
            x0, x1, x2, x3 = load4(x, i)
            d0, d1, d2, d3 = load4(dy, i)
            x0, x1, x2, x3 = (x0 - m0) * r0, (x1 - m1) * r1, (x2 - m2) * r2, (x3 - m3) * r3
            d0, d1 = affine_gradient(d0, x0, w0, v0, activate), affine_gradient(d1, x1, w1, v1, activate)
            d2, d3 = affine_gradient(d2, x2, w2, v2, activate), affine_gradient(d3, x3, w3, v3, activate)
            d0, d1 = r0 * (d0 * w0 - h0 - x0 * k0), r1 * (d1 * w1 - h1 - x1 * k1)
            d2, d3 = r2 * (d2 * w2 - h2 - x2 * k2), r3 * (d3 * w3 - h3 - x3 * k3)
            if adds:
                x0, x1, x2, x3 = load4(residual, i)
                d0, d1, d2, d3 = d0 + x0, d1 + x1, d2 + x2, d3 + x3
            store4(dx, i, d0, d1, d2, d3)


# Launchers ------------------------------------------------------------------------------------------------------------

def _check(x, weight, bias, groups, version, dy=None):
    """(B, P, C, channels a group, version, version 3's plan); dy: in a backward."""
    B, C = x.shape[0], x.shape[-1]
    if C % groups:
        raise ValueError(f"groupnorm: {C} channels cannot be cut into {groups} groups; choose a divisor of {C}")
    if tuple(weight.shape) != (C,) or tuple(bias.shape) != (C,):
        raise ValueError(f"groupnorm: weight and bias must have shape ({C},), the last axis of x (channels last), "
                         f"not {tuple(weight.shape)} and {tuple(bias.shape)}")
    P, plan = x.size // (B * C), None
    if version in (2, 3) and C % 4:
        raise ValueError(f"version {version} takes four channels at a time, and {C} is not a multiple of 4; use "
                         "version=1")
    if is_device(parts_of(x)[0]) and version in (None, 3):
        plan = plan_for(x, C // groups, dy is not None) if dy is None or dy.dtype == x.dtype else None
        if version == 3 and plan is None:
            raise ValueError(f"version 3 finds no tile for groups of {C // groups} channels that a block of this "
                             "device could keep, or dy is not of x's type; use version=2")
        if version is None:
            estimate = version_2_estimate(assumed(B), P, C, x.dtype.itemsize, dy is not None)
            version = 1 if C % 4 else 3 if plan is not None and plan.ns < estimate else 2
    return B, P, C, C // groups, version, plan


def groupnorm_forward(x, weight, bias, groups, eps=1e-5, silu=False, version=None, statistics=None):
    """(y, mean (B, G), rstd (B, G)) of x (B, ..., C), or a `Pair`; with `silu`, y = SiLU of the normalised x.

    statistics: what `conv2d_forward` left beside x; of a `Pair` a tuple of both. None: nothing, of either
    """
    given = statistics is not None and is_device(parts_of(x)[0]) and normalise_takes(x, groups, statistics)
    if version == 4 and not given:
        raise ValueError("version 4 needs the statistics that a convolution left for x, float16 on a device, and "
                         "groups of an even number of channels; use version=3")
    B, P, C, width, chosen, plan = _check(x, weight, bias, groups, version)
    if given and version in (None, 4):
        return normalise_forward(x, weight, bias, groups, eps, silu, statistics)
    if isinstance(x, Pair) and (chosen != 3 or plan is None):
        return groupnorm_forward(x.joined(), weight, bias, groups, eps, silu, version)
    if not is_device(parts_of(x)[0]):
        return groupnorm_forward_reference(x, weight, bias, groups, eps, silu)
    if chosen == 3:
        return one_pass_forward(x, weight, bias, groups, eps, silu, plan)
    y, mean, rstd = empty_like(x), empty((B, groups), np.float32, like=x), empty((B, groups), np.float32, like=x)
    x_, y_, mean_, rstd_ = x.reshape(-1), y.reshape(-1), mean.reshape(-1), rstd.reshape(-1)
    if chosen == 1:
        launch(groupnorm_forward_kernel_v1, (groups, B), BLOCK, x_, weight, bias, y_, mean_, rstd_, P, C, width,
               float(eps), int(silu))
        return y, mean, rstd
    lanes, tiles, chunk, chunks = cut(assumed(B), P, C, 4)
    chunk_mean, chunk_squares = empty(B * chunks * C, np.float32, like=x), empty(B * chunks * C, np.float32, like=x)
    launch(groupnorm_chunk_kernel_v2, (chunks, tiles, B), BLOCK, x_, chunk_mean, chunk_squares, P, C, lanes, chunk)
    launch(groupnorm_join_kernel_v2, (groups, B), SMALL_BLOCK, chunk_mean, chunk_squares, mean_, rstd_, P, C, width,
           chunk, chunks, float(eps))
    launch(groupnorm_normalise_kernel_v2, (chunks, tiles, B), BLOCK, x_, weight, bias, mean_, rstd_, y_, P, C, width,
           lanes, chunk, int(silu))
    return y, mean, rstd


def groupnorm_backward(dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu=False, residual=None,
                       version=None):
    """dx; the gradients of weight and bias are added into `dweight` and `dbias`.

    residual: what has arrived for x on other ways, like dx, which is added to it; None: nothing has. For a `Pair` x dx
        is one, too.
    """
    B, P, C, width, chosen, plan = _check(x, weight, bias, groups, version, dy)
    if residual is not None and (tuple(residual.shape) != tuple(x.shape) or residual.dtype != x.dtype):
        raise ValueError(f"groupnorm: the residual, {residual.dtype}{tuple(residual.shape)}, must be an array like x, "
                         f"{x.dtype}{tuple(x.shape)}")
    if isinstance(x, Pair) and (chosen != 3 or plan is None):
        residual = None if residual is None else residual.joined()
        return x.parted(groupnorm_backward(dy, x.joined(), weight, bias, mean, rstd, dweight, dbias, groups, silu,
                                           residual, version))
    if not is_device(parts_of(x)[0]):
        return groupnorm_backward_reference(dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu, residual)
    if chosen == 3:
        return one_pass_backward(dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu, plan, residual)
    dx, sums = empty_like(x), empty((2, B, C), np.float32, like=x)
    common = dy.reshape(-1), x.reshape(-1), weight, bias, mean.reshape(-1), rstd.reshape(-1)
    adds, residual = int(residual is not None), (x if residual is None else residual).reshape(-1)  # not read without
    if chosen == 1:
        launch(groupnorm_backward_kernel_v1, (groups, B), BLOCK, *common, residual, dx.reshape(-1), sums.reshape(-1), P,
               C, width, int(silu), adds)
    else:
        lanes, tiles, chunk, chunks = cut(B, P, C, 4)
        partial, averages = (empty(2 * B * n, np.float32, like=x) for n in (chunks * C, groups))
        launch(groupnorm_gradient_sums_kernel_v2, (chunks, tiles, B), BLOCK, *common, partial, P, C, width, lanes,
               chunk, int(silu))
        launch(groupnorm_gradient_join_kernel_v2, (groups, B), SMALL_BLOCK, partial, weight, sums.reshape(-1), averages,
               P, C, width, chunks)
        launch(groupnorm_backward_kernel_v2, (chunks, tiles, B), BLOCK, *common, averages, residual, dx.reshape(-1), P,
               C, width, lanes, chunk, int(silu), adds)
    add_column_sums(sums, dweight, dbias)
    return dx


# Cost -----------------------------------------------------------------------------------------------------------------

def groupnorm_forward_cost(B, P, C, silu=False, itemsize=4):
    """(bytes, FLOPs) of version 3: x is read and y written once."""
    n = B * P * C
    return itemsize * 2 * n, n * (4 + 3 + (3 if silu else 0))


def groupnorm_backward_cost(B, P, C, silu=False, itemsize=4, residual=False):
    """(bytes, FLOPs) of version 3: x, dy and, if there is one, the residual are read and dx written once."""
    n = B * P * C
    return itemsize * (3 + residual) * n, n * (5 + 7 + (10 if silu else 0) + residual)
