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
    v1 block-per-row, v2 warp-per-row: kernels/norms/row_norm.py.
    v3 one-pass, of the backward, up to 512 columns: a row's dy and xhat stay in a warp's registers
       between its two sums, and the sums for dweight and dbias come of the same pass, in registers,
       too: dy and x are read once, not twice, and once more by another kernel. Where what comes
       before adds a vector to each image, its gradient, sums of dx, comes of the same pass.
    Most of v1's backward time is its kernel for dweight and dbias, in which C threads, one a
    column, read both arrays; the rows' kernel does as much work as the forward. So v2's factor of
    117 (H200, 16384×768) is mostly the parameter kernel's.
LAUNCH
    v1 and v2 as kernels/norms/row_norm.py. Sums over rows: v1 a thread a column; v2 grid (chunks of
    rows, column tiles), 256 threads, 8 KiB, then kernels/reduce/trees.py.
    v3 grid (chunks of an image's rows, images), about 512 blocks of 256 threads, a warp a row; 4 KiB.
DETERMINISM
    no atomics: trees, shuffles and partial sums have an order that the shape alone decides.
COST
    forward: 8 n bytes (a row is read three times, but from memory only once: after that it is in the L1 cache).
    backward: 12 n bytes for dx, 8 n more for dweight and dbias, in version 3 none. Roof: memory bandwidth.
SOURCE
    Ba, Kiros, Hinton 2016, arXiv:1607.06450, eq. 4.
READ NEXT
    kernels/groupnorm/groups.py, where a group is many rows and a block adds it up in
    shared memory.
"""

import numpy as np

from ...device import cuda, empty, empty_like, float32, int32, launch, load4, store4
from ...device.common import warp_sum
from ...device.limits import WARP
from ...device.specialise import Constant, Variants, specialise
from ...dtypes import in_single
from ...kernels.norms.row_norm import (
    BACKWARD,
    FORWARD,
    LAYERNORMS,
    add_parameter_gradients,
    launch_rows,
    load_dy_xhat,
    row_versions,
)
from ...kernels.operation import Problem, Version, half, operation, positive, single
from ...kernels.reduce.second_pass import add_rows
from ...kernels.reduce.trees import (
    BLOCK,
    GRID,
    column_sum_reference,
    sample_sum,
    sample_sum_reference,
)

BLOCK4 = 4 * BLOCK  # shared elements for a sum in each of a thread's four columns
ROWS = BLOCK // WARP  # that a block of version 3 works on at once
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
            ) = load_dy_xhat(dy, x, first + c, average, scale)


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
    versions=row_versions(FORWARD),
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
    affine, x_ = weight is not None, x.reshape(-1)
    shift, factors = (bias, (weight,)) if affine else (x_, (x_,))  # x_ is not read as such
    arrays = x_, shift, factors, y.reshape(-1), mean, rstd
    launch_rows(version, LAYERNORMS[affine], rows, rows, C, arrays, float(eps))
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


@operation(
    reference=layernorm_backward_reference,
    cost=layernorm_backward_cost,
    check=_check,
    versions=[*row_versions(BACKWARD), Version("one-pass", ONE_PASS, fits=_lacks_registers)],
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
    C, affine, x_ = x.shape[-1], weight is not None, x.reshape(-1)
    rows = x.size // C
    arrays = dy.reshape(-1), x_, (weight if affine else x_,), mean, rstd, dx.reshape(-1)
    launch_rows(version, LAYERNORMS[affine], rows, rows, C, arrays)
    add_parameter_gradients(version, dy, x, mean, rstd, dweight, dbias)
    return dx if images is None else (dx, sample_sum(dx.reshape(images, -1, x.shape[-1])))
