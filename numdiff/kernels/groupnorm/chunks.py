"""GroupNorm v2: one block for each chunk of pixels, with all their channels, and small kernels that
join the chunks.

MATHEMATICS, SHAPES
    as in reference.py; C a multiple of 4
WHAT IS NEW
    A thread keeps four neighbouring channels, so what depends on the channel alone (mean, rstd,
    weight, bias) is loaded once for all its pixels, and a warp reads up to 512 neighbouring bytes.
    A channel's statistics in a chunk are a mean and a sum of squares about that mean; any two such
    pairs join without cancellation, because
        Σ (x - mean)² over everything = Σ over the parts of [their own sum of squares + count ·
        (their mean - mean)²].
VERSIONS
    v2 chunked: blocks own a chunk of pixels with up to 256 channels, so all loads are whole and 16
       bytes wide. Statistics of chunks are joined by a small kernel in between; x is read twice, y
       written once.
LAUNCH
    grid (chunks, channel tiles, B), 256 threads, 4 or 8 KiB; between its passes grid (G, B), 64
    threads
DETERMINISM
    sums of threads, chunks and groups are added in an order that the shape alone decides.
COST
    n elements of s bytes: 3·s·n bytes forward (x twice, y), 5·s·n backward (x and dy twice, dx).
    Roof: memory.
SOURCE
    joining variances: Chan, Golub, LeVeque 1983, Am. Stat. 37, 242.
READ NEXT
    one_pass.py, which reads x once.
"""

import math
from typing import NamedTuple

import numpy as np

from ...device import cuda, device_inline, empty, float32, launch, load4, store4
from ...device.batch_invariance import nominal_extent
from ...device.four import multiply4, subtract4
from ..reduce.trees import BLOCK, cut, get4, put4, tree_sum
from .groups import NormVectors, affine, affine_gradient

BLOCK4 = 4 * BLOCK  # shared elements where a thread brings one sum for each of its four channels
BLOCK2, BLOCK8 = 2 * BLOCK, 8 * BLOCK  # two sums a thread; two for each of its four channels
SMALL_BLOCK = 64  # threads that join one group's chunks: (chunks × C/G) is 16 to 256 statistics


class NormCut(NamedTuple):
    """P pixels, C channels, `width` a group; a block has `chunk` pixels, `lanes` times four
    channels side by side."""

    P: int
    C: int
    width: int
    lanes: int
    chunk: int


@device_inline
def place_of(t, lanes):
    """(rows of threads, the thread's row, the first of its four channels)"""
    return BLOCK // lanes, t // lanes, (cuda.blockIdx.y * lanes + t % lanes) * 4


@cuda.jit(device=True)
def load_groups(values, first, c, width):
    """The values of the groups that channels c to c + 3 belong to; the sample's own begin at
    `first`."""
    return (
        values[first + c // width],
        values[first + (c + 1) // width],
        values[first + (c + 2) // width],
        values[first + (c + 3) // width],
    )


@device_inline
def load_affine(vectors, b, c, C, width):
    """mean, rstd, weight and bias of sample b's channels c to c + 3."""
    return (
        load_groups(vectors.mean, b * (C // width), c, width),
        load_groups(vectors.rstd, b * (C // width), c, width),
        load4(vectors.weight, c),
        load4(vectors.bias, c),
    )


@device_inline
def load_xhat(x, i, means, roots):
    return multiply4(subtract4(load4(x, i), means), roots)


@device_inline
def load_gradient(dy, x, i, of_channels, activate):
    """xhat of four channels, and the gradient of z = xhat · weight + bias."""
    means, roots, w, v = of_channels
    xhat = load_xhat(x, i, means, roots)
    d0, d1, d2, d3 = load4(dy, i)
    return xhat, (
        affine_gradient(d0, xhat[0], w[0], v[0], activate),
        affine_gradient(d1, xhat[1], w[1], v[1], activate),
        affine_gradient(d2, xhat[2], w[2], v[2], activate),
        affine_gradient(d3, xhat[3], w[3], v[3], activate),
    )


@cuda.jit(device=True)
def mean_and_squares(first, count, s, q):
    """Mean and Σ (x - mean)² of `count` values from s = Σ (x - first) and q = Σ (x - first)².

    `first` is one of the values, therefore (first - mean)² ≤ Σ (x - mean)² and q is at most (1 +
    count) times the result. So the subtraction cannot cancel more than that, for any mean.
    """
    return first + s / count, max(q - s * s / count, float32(0))


@cuda.jit
def groupnorm_chunk_kernel_v2(x, chunk_mean, chunk_squares, P, C, lanes, chunk):
    """Mean and sum of squares about it, of every channel in every chunk: two arrays (B, chunks, C)."""
    tile = cuda.shared.array(BLOCK4, float32)
    t = cuda.threadIdx.x
    (rows, row, c), b = place_of(t, lanes), cuda.blockIdx.z
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
    put4(tile, t, count * m0, count * m1, count * m2, count * m3)
    tree_sum(tile, 4, t, lanes, rows)
    lane, pixels = t % lanes, float32(end - start)
    a0, a1, a2, a3 = get4(tile, lane)
    a0, a1, a2, a3 = a0 / pixels, a1 / pixels, a2 / pixels, a3 / pixels
    cuda.syncthreads()  # all have read the sums before the tile is written again
    put4(
        tile,
        t,
        q0 + count * (m0 - a0) * (m0 - a0),
        q1 + count * (m1 - a1) * (m1 - a1),
        q2 + count * (m2 - a2) * (m2 - a2),
        q3 + count * (m3 - a3) * (m3 - a3),
    )
    tree_sum(tile, 4, t, lanes, rows)
    if row == 0 and c < C:
        i = (b * cuda.gridDim.x + cuda.blockIdx.x) * C + c
        store4(chunk_mean, i, a0, a1, a2, a3)
        store4(chunk_squares, i, *get4(tile, t))


@cuda.jit
def groupnorm_join_kernel_v2(chunk_mean, chunk_squares, mean, rstd, cut, chunks, eps):
    """A group's mean and rstd from the statistics of its channels in all chunks."""
    P, C, width, _, chunk = cut
    tile = cuda.shared.array(SMALL_BLOCK, float32)
    t = cuda.threadIdx.x
    group, b = cuda.blockIdx.x, cuda.blockIdx.y
    m = float32(P * width)
    total = float32(0)
    # chunk e // width, channel e % width of the group
    for e in range(t, chunks * width, SMALL_BLOCK):
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
def groupnorm_normalise_kernel_v2(x, vectors, y, cut, activate):
    P, C, width, lanes, chunk = cut
    t = cuda.threadIdx.x
    (rows, row, c), b = place_of(t, lanes), cuda.blockIdx.z
    start = cuda.blockIdx.x * chunk
    if row < rows and c < C:
        means, roots, w, v = load_affine(vectors, b, c, C, width)
        for p in range(start + row, min(start + chunk, P), rows):
            i = (b * P + p) * C + c
            x0, x1, x2, x3 = load_xhat(x, i, means, roots)
            store4(
                y,
                i,
                affine(x0, w[0], v[0], activate),
                affine(x1, w[1], v[1], activate),
                affine(x2, w[2], v[2], activate),
                affine(x3, w[3], v[3], activate),
            )


@cuda.jit
def groupnorm_gradient_sums_kernel_v2(dy, x, vectors, partial, cut, activate):
    """Σ g · xhat and Σ g of every channel in every chunk: (2, B, chunks, C)."""
    P, C, width, lanes, chunk = cut
    tile = cuda.shared.array(BLOCK8, float32)
    t = cuda.threadIdx.x
    (rows, row, c), b = place_of(t, lanes), cuda.blockIdx.z
    start = cuda.blockIdx.x * chunk
    a0 = a1 = a2 = a3 = s0 = s1 = s2 = s3 = float32(0)
    if row < rows and c < C:
        of_channels = load_affine(vectors, b, c, C, width)
        for p in range(start + row, min(start + chunk, P), rows):
            (x0, x1, x2, x3), (d0, d1, d2, d3) = load_gradient(
                dy, x, (b * P + p) * C + c, of_channels, activate
            )
            a0 += d0 * x0
            a1 += d1 * x1
            a2 += d2 * x2
            a3 += d3 * x3
            s0 += d0
            s1 += d1
            s2 += d2
            s3 += d3
    put4(tile, t, a0, a1, a2, a3)
    put4(tile, 4 * BLOCK + t, s0, s1, s2, s3)
    tree_sum(tile, 8, t, lanes, rows)
    if row == 0 and c < C:
        chunks = cuda.gridDim.x
        i = (b * chunks + cuda.blockIdx.x) * C + c
        store4(partial, i, *get4(tile, t))
        store4(partial, i + cuda.gridDim.z * chunks * C, *get4(tile, 4 * BLOCK + t))


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
def groupnorm_backward_kernel_v2(dy, x, vectors, averages, residual, dx, cut, activate, adds):
    P, C, width, lanes, chunk = cut
    t = cuda.threadIdx.x
    (rows, row, c), b = place_of(t, lanes), cuda.blockIdx.z
    start = cuda.blockIdx.x * chunk
    if row < rows and c < C:
        of_channels = load_affine(vectors, b, c, C, width)
        (_, r, w, _), groups = of_channels, C // width
        of_hx = load_groups(averages, b * groups, c, width)
        of_h = load_groups(averages, (cuda.gridDim.z + b) * groups, c, width)
        for p in range(start + row, min(start + chunk, P), rows):
            i = (b * P + p) * C + c
            xhat, g = load_gradient(dy, x, i, of_channels, activate)
            h = multiply4(g, w)
            d0, d1, d2, d3 = multiply4(r, subtract4(subtract4(h, of_h), multiply4(xhat, of_hx)))
            if adds:
                x0, x1, x2, x3 = load4(residual, i)
                d0, d1, d2, d3 = d0 + x0, d1 + x1, d2 + x2, d3 + x3
            store4(dx, i, d0, d1, d2, d3)


def chunks_forward(x, weight, bias, y, mean, rstd, P, groups, eps, activate):
    """y, mean (B, G) and rstd of x (B, ..., C), P pixels, for arrays that launcher.py has checked."""
    B, C = x.shape[0], x.shape[-1]
    lanes, tiles, chunk, chunks = cut(nominal_extent(B), P, C, 4)
    parts, grid = NormCut(P, C, C // groups, lanes, chunk), (chunks, tiles, B)
    means, squares = (empty(B * chunks * C, np.float32, like=x) for _ in range(2))
    x, vectors = x.reshape(-1), NormVectors(weight, bias, mean.reshape(-1), rstd.reshape(-1))
    launch(groupnorm_chunk_kernel_v2, grid, BLOCK, x, means, squares, P, C, lanes, chunk)
    launch(
        groupnorm_join_kernel_v2,
        (groups, B),
        SMALL_BLOCK,
        means,
        squares,
        vectors.mean,
        vectors.rstd,
        parts,
        chunks,
        eps,
    )
    launch(
        groupnorm_normalise_kernel_v2,
        grid,
        BLOCK,
        x,
        vectors,
        y.reshape(-1),
        parts,
        int(activate),
    )


def chunks_backward(dy, x, weight, bias, mean, rstd, residual, dx, sums, P, groups, activate):
    """dx, and the channel sums (2, B, C) of g · xhat and g. residual: None, or like dx, which is
    added to it"""
    B, C = x.shape[0], x.shape[-1]
    width = C // groups
    common = (
        dy.reshape(-1),
        x.reshape(-1),
        NormVectors(weight, bias, mean.reshape(-1), rstd.reshape(-1)),
    )
    lanes, tiles, chunk, chunks = cut(B, P, C, 4)
    parts = NormCut(P, C, width, lanes, chunk)
    partial, averages = (empty(2 * B * n, np.float32, like=x) for n in (chunks * C, groups))
    launch(
        groupnorm_gradient_sums_kernel_v2,
        (chunks, tiles, B),
        BLOCK,
        *common,
        partial,
        parts,
        int(activate),
    )
    launch(
        groupnorm_gradient_join_kernel_v2,
        (groups, B),
        SMALL_BLOCK,
        partial,
        weight,
        sums.reshape(-1),
        averages,
        P,
        C,
        width,
        chunks,
    )
    launch(
        groupnorm_backward_kernel_v2,
        (chunks, tiles, B),
        BLOCK,
        *common,
        averages,
        (x if residual is None else residual).reshape(-1),  # not read without
        dx.reshape(-1),
        parts,
        int(activate),
        int(residual is not None),
    )
