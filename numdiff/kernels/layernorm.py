"""LayerNorm: every row normalised by its own mean and deviation.

MATHEMATICS
        mean = Σ_c x / C          var = Σ_c (x - mean)² / C          rstd = 1 / √(var + eps)
        xhat = (x - mean) · rstd          y = xhat · weight[c] + bias[c]      (weight and bias may be absent: 1 and 0)
    Backward, with h = dy · weight and averages over the row:
        dbias[c] += Σ_rows dy          dweight[c] += Σ_rows dy · xhat
        dx = rstd · (h - average(h) - xhat · average(h · xhat))
SHAPES
    x, y, dx, dy (..., C) float32; weight, bias (C,) or None; mean, rstd (rows,): the other axes in one
VERSIONS
    v1 block-per-row: a block a row: its threads meet in a tree in shared memory, nine barriers a sum.
    v2 warp-per-row: a warp a row: its 32 threads exchange registers (shuffles), five times a sum and no barrier;
       16-byte loads.
    v3 one-pass, of the backward, up to 512 columns: a row's dy and xhat stay in a warp's registers
       between its two sums, and the sums for dweight and dbias come of the same pass, in registers,
       too: dy and x are read once, not twice, and once more by another kernel. Where what comes
       before adds a vector to each image, its gradient, sums of dx, comes of the same pass.
    Most of v1's backward time is its kernel for dweight and dbias, in which C threads, one a
    column, read both arrays; the rows' kernel does as much work as the forward. So v2's factor of
    117 (H200, 16384×768) is mostly the parameter kernel's.
LAUNCH
    v1 a block of 256 threads for every row, 1 or 2 KiB of shared memory; v2 256 threads for eight rows, none.
    Sums over rows: v1 a thread a column; v2 grid (chunks of rows, column tiles), 256 threads, 8 KiB, then reduce.py.
    v3 grid (chunks of an image's rows, images), about 512 blocks of 256 threads, a warp a row; 4 KiB.
DETERMINISM
    no atomics: trees, shuffles and partial sums have an order that the shape alone decides.
COST
    forward: 8 n bytes (a row is read three times, but from memory only once: after that it is in the L1 cache).
    backward: 12 n bytes for dx, 8 n more for dweight and dbias, in version 3 none. Roof: memory bandwidth.
SOURCE
    Ba, Kiros, Hinton 2016, arXiv:1607.06450, eq. 4. Shuffles: PTX ISA, section 9.7.9.6 (shfl.sync).
READ NEXT
    rmsnorm.py, what is left without the mean; groupnorm/groups.py, where a group is many rows and a block adds it up in
    shared memory.
"""

import math

import numpy as np

from ..device import cuda, empty, empty_like, float32, int32, launch, load4, store4, zeros
from ..device.limits import WARP
from ..device.specialise import Constant, Variants, specialise
from ..dtypes import in_single
from .common import warp_sum
from .operation import Version, lacks_multiple, operation
from .problem import Problem, half, positive, single
from .reduce import (
    BLOCK,
    GRID,
    column_sum_reference,
    cut,
    sample_sum,
    sample_sum_reference,
    tree_sum,
)
from .second_pass import add_rows

# shared elements of a block with 2, 4, 8 sums a thread
BLOCK2, BLOCK4, BLOCK8 = 2 * BLOCK, 4 * BLOCK, 8 * BLOCK
ROWS = BLOCK // WARP  # a block of version 2 takes eight rows
WIDE = 4 * WARP  # columns of a warp, four a lane
LARGEST = 512  # columns that version 3 has registers for


# References ---------------------------------------------------------------------------------------


@in_single(1, 2)
def layernorm_forward_reference(x, weight=None, bias=None, eps=1e-5):
    rows = x.reshape(-1, x.shape[-1])
    mean = rows.mean(1)
    y = rows - mean[:, None]  # centred first: its squares lose nothing
    rstd = (1 / np.sqrt(np.einsum("rc,rc->r", y, y) / rows.shape[1] + eps)).astype(
        x.dtype, copy=False
    )
    y *= rstd[:, None]
    if weight is not None:
        y *= weight
    if bias is not None:
        y += bias
    return y.reshape(x.shape), mean, rstd


@in_single(1)
def layernorm_backward_reference(dy, x, weight, mean, rstd, dweight=None, dbias=None, images=None):
    g, xhat = dy.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]) - mean[:, None]
    xhat *= rstd[:, None]
    if dweight is not None:
        dweight += column_sum_reference(g * xhat)
    if dbias is not None:
        dbias += column_sum_reference(g)
    h = g.copy() if weight is None else g * weight
    xhat *= (np.einsum("rc,rc->r", h, xhat) / x.shape[-1])[:, None]
    xhat += h.mean(1)[:, None]
    h -= xhat
    h *= rstd[:, None]
    return (
        h.reshape(x.shape)
        if images is None
        else (h.reshape(x.shape), sample_sum_reference(h.reshape(images, -1, x.shape[-1])))
    )


# v1: a block a row --------------------------------------------------------------------------------
# `affine` is 0 where there are no weight and bias; x stands in for them then, and is not read as
# such.


@cuda.jit
def layernorm_forward_kernel_v1(x, weight, bias, y, mean, rstd, C, eps, affine):
    tile = cuda.shared.array(BLOCK, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    total = float32(0)
    for c in range(t, C, BLOCK):
        total += float32(x[row * C + c])
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    average = tile[0] / float32(C)
    cuda.syncthreads()  # all have read tile[0] before it is written again
    total = float32(0)
    for c in range(t, C, BLOCK):
        d = float32(x[row * C + c]) - average
        total += d * d
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    scale = float32(1) / math.sqrt(tile[0] / float32(C) + eps)
    for c in range(t, C, BLOCK):
        xhat = (float32(x[row * C + c]) - average) * scale
        y[row * C + c] = xhat * weight[c] + bias[c] if affine else xhat
    if t == 0:
        mean[row] = average
        rstd[row] = scale


@cuda.jit
def layernorm_backward_kernel_v1(dy, x, weight, mean, rstd, dx, C, affine):
    tile = cuda.shared.array(BLOCK2, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    average, scale = mean[row], rstd[row]
    sum_h = sum_hx = float32(0)
    for c in range(t, C, BLOCK):
        h = float32(dy[row * C + c]) * weight[c] if affine else float32(dy[row * C + c])
        sum_h += h
        sum_hx += h * (float32(x[row * C + c]) - average) * scale
    tile[t], tile[BLOCK + t] = sum_h, sum_hx
    tree_sum(tile, 2, t, 1, BLOCK)
    average_h, average_hx = tile[0] / float32(C), tile[BLOCK] / float32(C)
    for c in range(t, C, BLOCK):
        h = float32(dy[row * C + c]) * weight[c] if affine else float32(dy[row * C + c])
        dx[row * C + c] = scale * (
            h - average_h - (float32(x[row * C + c]) - average) * scale * average_hx
        )


@cuda.jit
def layernorm_parameter_kernel_v1(dy, x, mean, rstd, dweight, dbias, rows, C):
    """dweight and dbias, a thread a column: as naive as version 1 of the sums in reduce.py."""
    c = cuda.grid(1)
    if c < C:
        sum_gx = sum_g = float32(0)
        for row in range(rows):
            g = float32(dy[row * C + c])
            sum_gx += g * (float32(x[row * C + c]) - mean[row]) * rstd[row]
            sum_g += g
        dweight[c] += sum_gx
        dbias[c] += sum_g


# v2: a warp a row ---------------------------------------------------------------------------------
# The lanes of a warp can read each other's registers. After five exchanges, with the lane 16, 8, 4,
# 2, 1 away, every lane has the sum of all 32, without shared memory and without waiting for other
# warps.


@cuda.jit
def layernorm_forward_kernel_v2(x, weight, bias, y, mean, rstd, rows, C, eps, affine):
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:  # the same for all lanes of a warp, so no shuffle misses one
        first = row * C
        total = float32(0)
        for c in range(lane * 4, C, WARP * 4):
            x0, x1, x2, x3 = load4(x, first + c)
            total += (x0 + x1) + (x2 + x3)
        average = warp_sum(total) / float32(C)
        total = float32(0)
        for c in range(lane * 4, C, WARP * 4):
            x0, x1, x2, x3 = load4(x, first + c)
            x0, x1, x2, x3 = x0 - average, x1 - average, x2 - average, x3 - average
            total += (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)
        scale = float32(1) / math.sqrt(warp_sum(total) / float32(C) + eps)
        for c in range(lane * 4, C, WARP * 4):
            x0, x1, x2, x3 = load4(x, first + c)
            x0, x1 = (x0 - average) * scale, (x1 - average) * scale
            x2, x3 = (x2 - average) * scale, (x3 - average) * scale
            if affine:
                w0, w1, w2, w3 = load4(weight, c)
                b0, b1, b2, b3 = load4(bias, c)
                x0, x1, x2, x3 = x0 * w0 + b0, x1 * w1 + b1, x2 * w2 + b2, x3 * w3 + b3
            store4(y, first + c, x0, x1, x2, x3)
        if lane == 0:
            mean[row] = average
            rstd[row] = scale


@cuda.jit(device=True)
def load_row(dy, x, weight, i, c, average, scale, affine):
    """h = dy · weight and xhat of four columns."""
    h0, h1, h2, h3 = load4(dy, i)
    x0, x1, x2, x3 = load4(x, i)
    if affine:
        w0, w1, w2, w3 = load4(weight, c)
        h0, h1, h2, h3 = h0 * w0, h1 * w1, h2 * w2, h3 * w3
    return (
        h0,
        h1,
        h2,
        h3,
        (x0 - average) * scale,
        (x1 - average) * scale,
        (x2 - average) * scale,
        (x3 - average) * scale,
    )


@cuda.jit
def layernorm_backward_kernel_v2(dy, x, weight, mean, rstd, dx, rows, C, affine):
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:
        first, average, scale = row * C, mean[row], rstd[row]
        sum_h = sum_hx = float32(0)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, x0, x1, x2, x3 = load_row(
                dy, x, weight, first + c, c, average, scale, affine
            )
            sum_h += (h0 + h1) + (h2 + h3)
            sum_hx += (h0 * x0 + h1 * x1) + (h2 * x2 + h3 * x3)
        a, k = warp_sum(sum_h) / float32(C), warp_sum(sum_hx) / float32(C)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, x0, x1, x2, x3 = load_row(
                dy, x, weight, first + c, c, average, scale, affine
            )
            store4(
                dx,
                first + c,
                scale * (h0 - a - x0 * k),
                scale * (h1 - a - x1 * k),
                scale * (h2 - a - x2 * k),
                scale * (h3 - a - x3 * k),
            )


@cuda.jit
def layernorm_parameter_kernel_v2(dy, x, mean, rstd, partial, rows, C, lanes, chunk):
    """Σ dy · xhat and Σ dy of every column in every chunk of rows: (2, chunks, C)."""
    tile = cuda.shared.array(BLOCK8, float32)
    t = cuda.threadIdx.x
    rows_at_once = BLOCK // lanes
    row = t // lanes
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    a0 = a1 = a2 = a3 = s0 = s1 = s2 = s3 = float32(0)
    if row < rows_at_once and c < C:
        for r in range(start + row, min(start + chunk, rows), rows_at_once):
            g0, g1, g2, g3, x0, x1, x2, x3 = load_row(dy, x, dy, r * C + c, c, mean[r], rstd[r], 0)
            a0 += g0 * x0
            a1 += g1 * x1
            a2 += g2 * x2
            a3 += g3 * x3
            s0 += g0
            s1 += g1
            s2 += g2
            s3 += g3
    tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t] = a0, a1, a2, a3
    tile[4 * BLOCK + t], tile[5 * BLOCK + t], tile[6 * BLOCK + t], tile[7 * BLOCK + t] = (
        s0,
        s1,
        s2,
        s3,
    )
    tree_sum(tile, 8, t, lanes, rows_at_once)
    if row == 0 and c < C:
        i = cuda.blockIdx.x * C + c
        store4(partial, i, tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t])
        i += cuda.gridDim.x * C
        store4(
            partial,
            i,
            tile[4 * BLOCK + t],
            tile[5 * BLOCK + t],
            tile[6 * BLOCK + t],
            tile[7 * BLOCK + t],
        )


# v3: everything in one pass -----------------------------------------------------------------------

PLANES = 3  # of sums over rows: dy · xhat, dy, dx
CHUNKS = Constant()  # of 128 columns
NUMBERS = Constant(lambda CHUNKS: 4 * CHUNKS)
SUMS = Constant(lambda NUMBERS: PLANES * NUMBERS)


@cuda.jit(device=True, forceinline=True)
def load_gain(gain, weight, C, lane, affine):
    """The weight of a lane's columns; 1 without one."""
    for k in range(CHUNKS):
        c, at = int32(4 * lane + WIDE * k), 4 * k
        a = b = d = e = float32(1)
        if affine and c < C:
            a, b, d, e = load4(weight, c)
        gain[at], gain[at + 1], gain[at + 2], gain[at + 3] = a, b, d, e


@cuda.jit(device=True, forceinline=True)
def load_numbers(g, xhat, dy, x, first, C, lane, average, scale):
    """dy and xhat of a lane's columns of the row at `first`; zeros where there are none."""
    for k in range(CHUNKS):
        c, at = int32(4 * lane + WIDE * k), 4 * k
        for e in range(4):
            g[at + e] = xhat[at + e] = float32(0)
        if c < C:
            (
                g[at],
                g[at + 1],
                g[at + 2],
                g[at + 3],
                xhat[at],
                xhat[at + 1],
                xhat[at + 2],
                xhat[at + 3],
            ) = load_row(dy, x, dy, first + c, c, average, scale, 0)


@cuda.jit(device=True, forceinline=True)
def finish_row(sums, g, xhat, gain, dx, first, C, lane, scale):
    """dx of the row, and what its numbers add to the sums over rows."""
    sum_h = sum_hx = float32(0)
    for n in range(NUMBERS):
        h = g[n] * gain[n]
        sum_h += h
        sum_hx += h * xhat[n]
    a, b = warp_sum(sum_h) / float32(C), warp_sum(sum_hx) / float32(C)
    for n in range(NUMBERS):
        sums[n] += g[n] * xhat[n]
        sums[NUMBERS + n] += g[n]
        g[n] = scale * (g[n] * gain[n] - a - xhat[n] * b)
        sums[2 * NUMBERS + n] += g[n]
    for k in range(CHUNKS):
        c, at = int32(4 * lane + WIDE * k), 4 * k
        if c < C:
            store4(dx, first + c, g[at], g[at + 1], g[at + 2], g[at + 3])


@cuda.jit(device=True, forceinline=True)
def join_warps(tile, partial, to, sums, n, t, C, k):
    """partial[to …] = the sums n … n + 3 of 128 columns, those of chunk k, over the block's warps."""
    cuda.syncthreads()  # the previous contents are no longer read
    store4(tile, 4 * t, sums[n], sums[n + 1], sums[n + 2], sums[n + 3])
    cuda.syncthreads()
    if t < WIDE and WIDE * k + t < C:
        total = float32(0)
        for warp in range(ROWS):
            total += tile[WIDE * warp + t]
        partial[to + WIDE * k + t] = total


def layernorm_backward_kernel_v3(dy, x, weight, mean, rstd, dx, partial, P, C, chunk, affine):
    """partial (3, images, chunks, C): the sums of dy · xhat, dy and dx over each chunk of an
    image's P rows."""
    tile = cuda.shared.array(BLOCK4, float32, alignment=16)
    t = int32(cuda.threadIdx.x)
    lane, warp = int32(t % WARP), int32(t // WARP)
    sums, gain = cuda.local.array(SUMS, "float32"), cuda.local.array(NUMBERS, "float32")
    g, xhat = cuda.local.array(NUMBERS, "float32"), cuda.local.array(NUMBERS, "float32")
    for n in range(SUMS):
        sums[n] = float32(0)
    load_gain(gain, weight, C, lane, affine)
    start = cuda.blockIdx.x * chunk
    for p in range(start + warp, min(start + chunk, P), ROWS):  # the same for all lanes of a warp
        row = cuda.blockIdx.y * P + p
        load_numbers(g, xhat, dy, x, row * C, C, lane, mean[row], rstd[row])
        finish_row(sums, g, xhat, gain, dx, row * C, C, lane, rstd[row])
    for plane in range(PLANES):
        to = ((plane * cuda.gridDim.y + cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x) * C
        for k in range(CHUNKS):
            join_warps(tile, partial, to, sums, 4 * (plane * CHUNKS + k), t, C, k)


ONE_PASS = Variants(
    range(1, LARGEST // WIDE + 1),
    lambda chunks: specialise(layernorm_backward_kernel_v3, launch_bounds=BLOCK, CHUNKS=chunks),
)


# Cost ---------------------------------------------------------------------------------------------


def layernorm_forward_cost(M, C):
    """(bytes, FLOPs) over M rows of C columns."""
    return 4 * 2 * M * C, 8 * M * C


def layernorm_backward_cost(M, C, parameters=True):
    """(bytes, FLOPs): dx from dy and x, and the sums for dweight and dbias, which read both again."""
    n = M * C
    return 4 * (5 if parameters else 3) * n, n * (15 if parameters else 10)


# Operations ---------------------------------------------------------------------------------------


def _check(x, weight):
    C = x.shape[-1]
    if weight is not None and tuple(weight.shape) != (C,):
        raise ValueError(
            f"layernorm: weight must have shape ({C},), x's last axis, not {tuple(weight.shape)}"
        )


def _check_both(x, weight, bias):
    _check(x, weight)
    if (weight is None) != (bias is None):
        raise ValueError(
            "layernorm takes weight and bias together or neither; pass ones or zeros for the missing one"
        )


def _lacks_fours(x):
    """What v2 needs and x lacks; None if its rows are made of fours."""
    return lacks_multiple(4, x.shape[-1], "columns")


def _lacks_registers(x, dweight, dbias, images):
    """What v3 needs and a call lacks; None if rows fit into registers, and there is something to
    add up."""
    C = x.shape[-1]
    if C % 4 or C > LARGEST:
        return f"takes a multiple of 4 columns up to {LARGEST}, not {C}"
    return (
        "adds up gradients, and none is requested" if dweight is dbias is images is None else None
    )


def _statistics(arrays):
    """mean and rstd of the rows of a problem's x."""
    _, mean, rstd = layernorm_forward_reference(arrays["x"])
    return {"mean": mean, "rstd": rstd}


def backward_problem(*shape, weighted=True, array=single, **more):
    """A problem of the backward; both gradients are added to numbers that are there."""
    vector = single(shape[-1])
    return Problem(
        dy=array(*shape),
        x=array(*shape),
        weight=vector if weighted else None,
        dweight=vector,
        dbias=vector,
        derived=_statistics,
        **more,
    )


# of a DiT, for the benchmark
TOKENS, ROWS_OF_TOKENS, WIDTH = half(64 * 256, 768), positive(64 * 256), single(768)
PIXELS, ROWS_OF_PIXELS = half(32, 1024, 128), positive(32 * 1024)  # of a ConvNeXt block


@operation(
    reference=layernorm_forward_reference,
    cost=layernorm_forward_cost,
    check=_check_both,
    versions=[
        Version("block-per-row", layernorm_forward_kernel_v1),
        Version("warp-per-row", layernorm_forward_kernel_v2, fits=_lacks_fours),
    ],
    problems=[
        Problem(x=single(5, 36), weight=single(36), bias=single(36)),
        Problem(x=single(3, 12)),
        Problem(x=single(2, 5, 33), weight=single(33), bias=single(33)),
        Problem(x=half(3, 12), weight=single(12), bias=single(12)),
        Problem(x=single(7, 1156), weight=single(1156), bias=single(1156), fast=False),
        Problem(x=TOKENS, weight=WIDTH, bias=WIDTH, measured=True),
    ],
)
def layernorm_forward(x, weight=None, bias=None, eps=1e-5, version=None):
    """(y, mean (rows,), rstd (rows,)) of x (..., C); weight and bias are both given or both None."""
    C, rows = x.shape[-1], x.size // x.shape[-1]
    y, mean, rstd = (
        empty_like(x),
        empty((rows,), np.float32, like=x),
        empty((rows,), np.float32, like=x),
    )
    affine, x_, y_ = int(weight is not None), x.reshape(-1), y.reshape(-1)
    weight, bias = (weight, bias) if affine else (x_, x_)
    if version.name == "block-per-row":
        launch(version.kernel, rows, BLOCK, x_, weight, bias, y_, mean, rstd, C, float(eps), affine)
    else:
        launch(
            version.kernel,
            -(-rows // ROWS),
            BLOCK,
            x_,
            weight,
            bias,
            y_,
            mean,
            rstd,
            rows,
            C,
            float(eps),
            affine,
        )
    return y, mean, rstd


def _in_one_pass(dy, x, weight, mean, rstd, dx, dweight, dbias, images):
    """dx and the parameters' gradients; the sums of dx over each image, where there are `images`."""
    C, B, affine = x.shape[-1], images or 1, int(weight is not None)
    P = x.size // (B * C)
    chunk = max(ROWS, -(-P // max(1, GRID // B)))
    chunks = -(-P // chunk)
    partial, x_ = empty((PLANES, B, chunks, C), np.float32, like=x), x.reshape(-1)
    launch(
        ONE_PASS[-(-C // WIDE)],
        (chunks, B),
        BLOCK,
        dy.reshape(-1),
        x_,
        weight if affine else x_,
        mean,
        rstd,
        dx.reshape(-1),
        partial.reshape(-1),
        P,
        C,
        chunk,
        affine,
    )
    add_rows(partial[:2], dweight, dbias)
    return None if images is None else sample_sum(partial[2:].reshape(B, chunks, C))


def _in_two_passes(version, dy, x, weight, mean, rstd, dx, dweight, dbias):
    """dx, then the parameters' gradients."""
    C, affine = x.shape[-1], int(weight is not None)
    rows, dy_, x_, dx_ = x.size // C, dy.reshape(-1), x.reshape(-1), dx.reshape(-1)
    weight = weight if affine else x_
    if version.name == "block-per-row":
        launch(version.kernel, rows, BLOCK, dy_, x_, weight, mean, rstd, dx_, C, affine)
    else:
        launch(
            version.kernel,
            -(-rows // ROWS),
            BLOCK,
            dy_,
            x_,
            weight,
            mean,
            rstd,
            dx_,
            rows,
            C,
            affine,
        )
    if dweight is None and dbias is None:
        return
    if version.name == "block-per-row":
        dweight, dbias = (zeros((C,), like=x) if a is None else a for a in (dweight, dbias))
        launch(
            version.parameters, -(-C // BLOCK), BLOCK, dy_, x_, mean, rstd, dweight, dbias, rows, C
        )
    else:
        lanes, tiles, chunk, chunks = cut(1, rows, C, 4)
        partial = empty((2, chunks, C), np.float32, like=x)
        launch(
            version.parameters,
            (chunks, tiles),
            BLOCK,
            dy_,
            x_,
            mean,
            rstd,
            partial.reshape(-1),
            rows,
            C,
            lanes,
            chunk,
        )
        add_rows(partial, dweight, dbias)


@operation(
    reference=layernorm_backward_reference,
    cost=layernorm_backward_cost,
    check=_check,
    versions=[
        Version(
            "block-per-row", layernorm_backward_kernel_v1, parameters=layernorm_parameter_kernel_v1
        ),
        Version(
            "warp-per-row",
            layernorm_backward_kernel_v2,
            parameters=layernorm_parameter_kernel_v2,
            fits=_lacks_fours,
        ),
        Version("one-pass", ONE_PASS, fits=_lacks_registers),
    ],
    problems=[
        backward_problem(5, 36),
        backward_problem(3, 12, weighted=False),
        backward_problem(2, 5, 33),
        backward_problem(3, 12, array=half),
        backward_problem(2, 10, 8, images=2),
        backward_problem(2, 9, 132, images=2, versions=("one-pass",)),
        backward_problem(1, 260, images=1, fast=False, versions=("one-pass",)),
        backward_problem(1, 388, images=1, fast=False, versions=("one-pass",)),
        backward_problem(2, 18, 512, images=2, fast=False, versions=("one-pass",)),
        Problem(
            dy=TOKENS,
            x=TOKENS,
            weight=WIDTH,
            mean=single(64 * 256),
            rstd=ROWS_OF_TOKENS,
            dweight=WIDTH,
            dbias=WIDTH,
            measured=True,
        ),
        Problem(
            dy=PIXELS,
            x=PIXELS,
            weight=single(128),
            mean=single(32 * 1024),
            rstd=ROWS_OF_PIXELS,
            dweight=single(128),
            dbias=single(128),
            images=32,
            measured=True,
        ),
    ],
    writes=("dweight", "dbias"),
)
def layernorm_backward(
    dy, x, weight, mean, rstd, dweight=None, dbias=None, images=None, version=None
):
    """dx; the gradients of weight and bias are added into `dweight` and `dbias` (None: not wanted).

    images: returns (dx, its sums (images, C) over the rows of each of `images` images), float32
    """
    dx = empty_like(x)
    if version.name == "one-pass":
        sums = _in_one_pass(dy, x, weight, mean, rstd, dx, dweight, dbias, images)
        return dx if images is None else (dx, sums)
    _in_two_passes(version, dy, x, weight, mean, rstd, dx, dweight, dbias)
    return dx if images is None else (dx, sample_sum(dx.reshape(images, -1, x.shape[-1])))
