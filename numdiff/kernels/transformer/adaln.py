"""Adaptive LayerNorm: every token normalised, then scaled and shifted by what its image is conditioned on, in one pass.

MATHEMATICS, for token t of image b
        mean = Σ_c x / C          var = Σ_c (x - mean)² / C          rstd = 1 / √(var + eps)
        xhat = (x - mean) · rstd          y = xhat · (1 + scale[b, c]) + shift[b, c]
    Backward, with h = dy · (1 + scale) and averages over the row:
        dshift[b, c] = Σ_t dy          dscale[b, c] = Σ_t dy · xhat
        dx = rstd · (h - average(h) - xhat · average(h · xhat))
    The norm has no weight and bias of its own: scale and shift are those, one pair an image.
SHAPES
    x, y, dx, dy (B, T, C) float32; shift, scale, dshift, dscale (B, C); mean, rstd (B · T,)
VERSIONS
    v1 block-per-row: a block a token: its threads meet in a tree in shared memory.
    v2 warp-per-row: a warp a token: shuffles instead of barriers, 16-byte loads (C a multiple of 4).
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    adaln_forward, 64×256×768, 64×768, float16
        v1       120 µs      423 GB/s   10 % of memory
        v2*     23.0 µs    2,201 GB/s   54 % of memory   5.21 × v1
    adaln_backward, 64×256×768, 64×256×768, float16
        v1       176 µs      432 GB/s   11 % of memory
        v2*     53.1 µs    1,435 GB/s   35 % of memory   3.32 × v1
LAUNCH
    v1 a block of 256 threads for every token, 1 or 2 KiB of shared memory; v2 256 threads for eight tokens, none.
    dshift, dscale: v1 a thread a channel of an image; v2 grid (chunks of tokens, channel tiles, B), 256 threads, 8 KiB,
    then reduce.py where there is more than one chunk.
DETERMINISM
    no atomics: trees, shuffles and partial sums have an order that the shape alone decides.
COST
    forward: 8 n bytes, where LayerNorm and then scale_shift would move 16 n. Backward: 12 n for dx, 8 n more for
    dshift and dscale. Roof: memory bandwidth.
SOURCE
    Peebles and Xie 2023, arXiv:2212.09748, section 3.2 and figure 3 (adaLN-Zero); Ba, Kiros, Hinton 2016,
    arXiv:1607.06450, eq. 4. Shuffles: PTX ISA, section 9.7.9, shfl.sync.
READ NEXT
    gate.py, the other half of adaLN-Zero.
"""
import math

import numpy as np

from ...device import cuda, empty, empty_like, float32, is_device, launch, load4, over_batch, store4
from ..layernorm import warp_sum
from ..reduce import BLOCK, cut, sample_sum, tree_sum
from ..versions import versions_by_name

BLOCK2, BLOCK8 = 2 * BLOCK, 8 * BLOCK  # shared elements for two sums a thread; for two in each of its four channels
WARP = 32
ROWS = BLOCK // WARP  # a block of version 2 takes eight tokens


# References -----------------------------------------------------------------------------------------------------------

def adaln_forward_reference(x, shift, scale, eps=1e-6):
    y, mean, rstd = np.empty_like(x), np.empty(x.shape[:2], x.dtype), np.empty(x.shape[:2], x.dtype)

    def images(i):
        mean[i] = x[i].mean(2)
        np.subtract(x[i], mean[i, :, None], out=y[i])  # centred first: its squares lose nothing
        rstd[i] = 1 / np.sqrt(np.einsum("btc,btc->bt", y[i], y[i]) / x.shape[2] + eps)
        y[i] *= rstd[i, :, None]
        y[i] *= (1 + scale[i])[:, None]
        y[i] += shift[i, None]

    over_batch(images, len(x), x.size)
    return y, mean.reshape(-1), rstd.reshape(-1)


def adaln_backward_reference(dy, x, scale, mean, rstd):
    mean, rstd, C = mean.reshape(x.shape[:2]), rstd.reshape(x.shape[:2]), x.shape[2]
    dx, dshift, dscale = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)

    def images(i):
        xhat = (x[i] - mean[i, :, None]) * rstd[i, :, None]
        dy[i].sum(1, out=dshift[i])
        np.einsum("btc,btc->bc", dy[i], xhat, out=dscale[i])
        h = np.multiply(dy[i], (1 + scale[i])[:, None], out=dx[i])
        xhat *= (np.einsum("btc,btc->bt", h, xhat) / C)[..., None]
        h -= h.mean(2)[..., None]
        h -= xhat
        h *= rstd[i, :, None]

    over_batch(images, len(x), x.size)
    return dx, dshift, dscale


# v1: a block a token --------------------------------------------------------------------------------------------------

@cuda.jit
def adaln_forward_kernel_v1(x, shift, scale, y, mean, rstd, T, C, eps):
    tile = cuda.shared.array(BLOCK, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    image = row // T * C
    total = float32(0)
    for c in range(t, C, BLOCK):
        total += x[row * C + c]
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    average = tile[0] / float32(C)
    cuda.syncthreads()  # all have read tile[0] before it is written again
    total = float32(0)
    for c in range(t, C, BLOCK):
        d = x[row * C + c] - average
        total += d * d
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    r = float32(1) / math.sqrt(tile[0] / float32(C) + eps)
    for c in range(t, C, BLOCK):
        xhat = (x[row * C + c] - average) * r
        y[row * C + c] = xhat * (float32(1) + scale[image + c]) + shift[image + c]
    if t == 0:
        mean[row] = average
        rstd[row] = r


@cuda.jit
def adaln_backward_kernel_v1(dy, x, scale, mean, rstd, dx, T, C):
    tile = cuda.shared.array(BLOCK2, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    image, average, r = row // T * C, mean[row], rstd[row]
    sum_h = sum_hx = float32(0)
    for c in range(t, C, BLOCK):
        h = dy[row * C + c] * (float32(1) + scale[image + c])
        sum_h += h
        sum_hx += h * (x[row * C + c] - average) * r
    tile[t], tile[BLOCK + t] = sum_h, sum_hx
    tree_sum(tile, 2, t, 1, BLOCK)
    average_h, average_hx = tile[0] / float32(C), tile[BLOCK] / float32(C)
    for c in range(t, C, BLOCK):
        h = dy[row * C + c] * (float32(1) + scale[image + c])
        dx[row * C + c] = r * (h - average_h - (x[row * C + c] - average) * r * average_hx)


@cuda.jit
def adaln_sums_kernel_v1(dy, x, mean, rstd, dshift, dscale, T, C):
    """dshift and dscale, a thread a channel of an image."""
    k = cuda.grid(1)
    if k < dshift.size:
        b, c = k // C, k % C
        sum_g = sum_gx = float32(0)
        for row in range(b * T, (b + 1) * T):
            g = dy[row * C + c]
            sum_g += g
            sum_gx += g * (x[row * C + c] - mean[row]) * rstd[row]
        dshift[k] = sum_g
        dscale[k] = sum_gx


# v2: a warp a token ---------------------------------------------------------------------------------------------------
# Each sum takes five exchanges of registers and no barrier; a token of 1,152 channels is nine 16-byte loads a lane. It
# is read three times, but only once from memory: then it lies in the L1 cache.

@cuda.jit
def adaln_forward_kernel_v2(x, shift, scale, y, mean, rstd, rows, T, C, eps):
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:  # the same for all lanes of a warp, so no shuffle misses one
        first, image = row * C, row // T * C
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
        r = float32(1) / math.sqrt(warp_sum(total) / float32(C) + eps)
        one = float32(1)
        for c in range(lane * 4, C, WARP * 4):
            x0, x1, x2, x3 = load4(x, first + c)
            a0, a1, a2, a3 = load4(scale, image + c)
            b0, b1, b2, b3 = load4(shift, image + c)
            store4(y, first + c, (x0 - average) * r * (one + a0) + b0, (x1 - average) * r * (one + a1) + b1,
                   (x2 - average) * r * (one + a2) + b2, (x3 - average) * r * (one + a3) + b3)
        if lane == 0:
            mean[row] = average
            rstd[row] = r


@cuda.jit(device=True)
def load_token(dy, x, scale, i, k, average, r):
    """h = dy · (1 + scale) and xhat of four channels."""
    h0, h1, h2, h3 = load4(dy, i)
    x0, x1, x2, x3 = load4(x, i)
    a0, a1, a2, a3 = load4(scale, k)
    one = float32(1)
    return (h0 * (one + a0), h1 * (one + a1), h2 * (one + a2), h3 * (one + a3), (x0 - average) * r,
            (x1 - average) * r, (x2 - average) * r, (x3 - average) * r)


@cuda.jit
def adaln_backward_kernel_v2(dy, x, scale, mean, rstd, dx, rows, T, C):
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:
        first, image, average, r = row * C, row // T * C, mean[row], rstd[row]
        sum_h = sum_hx = float32(0)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, x0, x1, x2, x3 = load_token(dy, x, scale, first + c, image + c, average, r)
            sum_h += (h0 + h1) + (h2 + h3)
            sum_hx += (h0 * x0 + h1 * x1) + (h2 * x2 + h3 * x3)
        a, k = warp_sum(sum_h) / float32(C), warp_sum(sum_hx) / float32(C)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, x0, x1, x2, x3 = load_token(dy, x, scale, first + c, image + c, average, r)
            store4(dx, first + c, r * (h0 - a - x0 * k), r * (h1 - a - x1 * k), r * (h2 - a - x2 * k),
                   r * (h3 - a - x3 * k))


@cuda.jit
def adaln_sums_kernel_v2(dy, x, mean, rstd, partial, T, C, lanes, chunk):
    """Σ dy and Σ dy · xhat of every channel in every chunk of an image's tokens: (2, B, chunks, C)."""
    tile = cuda.shared.array(BLOCK8, float32)
    t = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = t // lanes, cuda.blockIdx.z
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    a0 = a1 = a2 = a3 = s0 = s1 = s2 = s3 = float32(0)
    if row < rows and c < C:
        for p in range(start + row, min(start + chunk, T), rows):
            token = b * T + p
            average, r = mean[token], rstd[token]
            g0, g1, g2, g3 = load4(dy, token * C + c)
            x0, x1, x2, x3 = load4(x, token * C + c)
            s0 += g0
            s1 += g1
            s2 += g2
            s3 += g3
            a0 += g0 * (x0 - average) * r
            a1 += g1 * (x1 - average) * r
            a2 += g2 * (x2 - average) * r
            a3 += g3 * (x3 - average) * r
    tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t] = s0, s1, s2, s3
    tile[4 * BLOCK + t], tile[5 * BLOCK + t], tile[6 * BLOCK + t], tile[7 * BLOCK + t] = a0, a1, a2, a3
    tree_sum(tile, 8, t, lanes, rows)
    if row == 0 and c < C:
        i = (b * cuda.gridDim.x + cuda.blockIdx.x) * C + c
        store4(partial, i, tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t])
        i += cuda.gridDim.z * cuda.gridDim.x * C
        store4(partial, i, tile[4 * BLOCK + t], tile[5 * BLOCK + t], tile[6 * BLOCK + t], tile[7 * BLOCK + t])


# Launchers ------------------------------------------------------------------------------------------------------------

def _check(x, version, *vectors):
    """(B, T, C, version)."""
    if x.ndim != 3:
        raise ValueError(f"adaln takes tokens (B, T, C), not {tuple(x.shape)}; reshape an image to (B, H·W, C)")
    B, T, C = x.shape
    for vector in vectors:
        if tuple(vector.shape) != (B, C):
            raise ValueError(f"adaln: shift and scale must be (B, C) = {(B, C)}, not {tuple(vector.shape)}")
    if version is None:
        version = 2 if C % 4 == 0 else 1
    if version == 2 and C % 4:
        raise ValueError(f"version 2 (warp-per-row) takes four channels at a time, and {C} is not a multiple of 4; "
                         "use version=1")
    return B, T, C, version


@versions_by_name
def adaln_forward(x, shift, scale, eps=1e-6, version=None):
    """(y, mean (B·T,), rstd (B·T,)): LayerNorm of x (B, T, C) · (1 + scale (B, C)) + shift (B, C)."""
    B, T, C, version = _check(x, version, shift, scale)
    if not is_device(x):
        return adaln_forward_reference(x, shift, scale, eps)
    y, mean, rstd = empty_like(x), empty((B * T,), np.float32, like=x), empty((B * T,), np.float32, like=x)
    arrays = x.reshape(-1), shift.reshape(-1), scale.reshape(-1), y.reshape(-1), mean, rstd
    if version == 1:
        launch(adaln_forward_kernel_v1, B * T, BLOCK, *arrays, T, C, float(eps))
    else:
        launch(adaln_forward_kernel_v2, -(-B * T // ROWS), BLOCK, *arrays, B * T, T, C, float(eps))
    return y, mean, rstd


@versions_by_name
def adaln_backward(dy, x, scale, mean, rstd, version=None):
    """(dx, dshift (B, C), dscale (B, C)) from dy and what the forward took and gave."""
    B, T, C, version = _check(x, version, scale)
    if not is_device(x):
        return adaln_backward_reference(dy, x, scale, mean, rstd)
    dx, dy_, x_ = empty_like(x), dy.reshape(-1), x.reshape(-1)
    if version == 1:
        dshift, dscale = empty((B, C), np.float32, like=x), empty((B, C), np.float32, like=x)
        launch(adaln_backward_kernel_v1, B * T, BLOCK, dy_, x_, scale.reshape(-1), mean, rstd, dx.reshape(-1), T, C)
        launch(adaln_sums_kernel_v1, -(-B * C // BLOCK), BLOCK, dy_, x_, mean, rstd, dshift.reshape(-1),
               dscale.reshape(-1), T, C)
        return dx, dshift, dscale
    launch(adaln_backward_kernel_v2, -(-B * T // ROWS), BLOCK, dy_, x_, scale.reshape(-1), mean, rstd, dx.reshape(-1),
           B * T, T, C)
    lanes, tiles, chunk, chunks = cut(B, T, C, 4)
    partial = empty((2 * B, chunks, C), np.float32, like=x)
    launch(adaln_sums_kernel_v2, (chunks, tiles, B), BLOCK, dy_, x_, mean, rstd, partial.reshape(-1), T, C, lanes,
           chunk)
    sums = partial.reshape(2 * B, C) if chunks == 1 else sample_sum(partial)
    return dx, sums[:B], sums[B:]


# Cost -----------------------------------------------------------------------------------------------------------------

def adaln_forward_cost(B, T, C):
    """(bytes, FLOPs) over B images of T tokens of C channels."""
    return 4 * (2 * B * T * C + 2 * B * C + 2 * B * T), 10 * B * T * C


def adaln_backward_cost(B, T, C):
    return 4 * (5 * B * T * C + 3 * B * C + 4 * B * T), 16 * B * T * C
