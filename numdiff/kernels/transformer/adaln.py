"""Adaptive norms: every token normalised, then scaled and shifted by what its image is conditioned on, in one pass.

MATHEMATICS, for token t of image b
        mean = Σ_c x / C          var = Σ_c (x - mean)² / C          rstd = 1 / √(var + eps)
        xhat = (x - mean) · rstd          y = xhat · (1 + scale[b, c]) + shift[b, c]
    Backward, with h = dy · (1 + scale) and averages over the row:
        dshift[b, c] = Σ_t dy          dscale[b, c] = Σ_t dy · xhat
        dx = rstd · (h - average(h) - xhat · average(h · xhat))
    DiT's norm has no weight and bias of its own: scale and shift are those, one pair an image.
    What today's transformers change, each on its own (`Norm`):
    RMSNorm (rmsnorm.py): mean is 0, and average(h) is not subtracted: neither is stored, read or computed.
    A weight w: y = xhat · w[c] · (1 + scale[b, c]) + shift[b, c], so h = dy · w · (1 + scale). With S = Σ_t dy · xhat
        dscale[b, c] = w[c] · S[b, c]          dweight[c] += Σ_b (1 + scale[b, c]) · S[b, c]
    both follow from the one sum over tokens that there was.
    No shift: y = xhat · (1 + scale), and no dshift.
SHAPES
    x, y, dx, dy (B, T, C) float32; shift, scale, dshift, dscale (B, C); weight, dweight (C,); mean, rstd (B · T,)
VERSIONS
    v1 block-per-row: a block a token: its threads meet in a tree in shared memory.
    v2 warp-per-row: a warp a token: shuffles instead of barriers, 16-byte loads (C a multiple of 4).
    Of each, a kernel for every `Norm`: the text branches on constants.
MEASURED
    NVIDIA H200, 2026-11-26, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    adaln_forward, 64×256×768, 64×768, float16
        v1       119 µs      425 GB/s   10 % of memory
        v2*     22.7 µs    2,236 GB/s   55 % of memory   5.26 × v1
    adaln_backward, 64×256×768, 64×256×768, float16
        v1       178 µs      427 GB/s   10 % of memory
        v2*     53.5 µs    1,423 GB/s   35 % of memory   3.33 × v1
    adaln_forward, 64×256×768, 64×768, float16 (RMSNorm)
        v1      88.6 µs      571 GB/s   14 % of memory
        v2*     19.0 µs    2,666 GB/s   65 % of memory   4.67 × v1
    adaln_backward, 64×256×768, 64×256×768, float16 (RMSNorm)
        v1       163 µs      467 GB/s   11 % of memory
        v2*     58.6 µs    1,298 GB/s   32 % of memory   2.78 × v1
    adaln_forward, 64×256×768, 64×768, float16 (RMSNorm, no shift)
        v1      83.6 µs      604 GB/s   15 % of memory
        v2*     18.2 µs    2,775 GB/s   68 % of memory   4.59 × v1
    adaln_backward, 64×256×768, 64×256×768, float16 (RMSNorm, no shift)
        v1       183 µs      415 GB/s   10 % of memory
        v2*     53.7 µs    1,414 GB/s   34 % of memory   3.41 × v1
LAUNCH
    v1 a block of 256 threads for every token, 1 or 2 KiB of shared memory; v2 256 threads for eight tokens, none.
    dshift, dscale: v1 a thread a channel of an image; v2 grid (chunks of tokens, channel tiles, B), 256 threads, 8 KiB,
    then reduce.py where there is more than one chunk.
DETERMINISM
    no atomics: trees, shuffles and partial sums have an order that the shape alone decides.
COST
    forward: 8 n bytes, where LayerNorm and then scale_shift would move 16 n. Backward: 12 n for dx, 8 n more for
    dshift and dscale; dweight costs nothing of that order. Roof: memory bandwidth.
SOURCE
    Peebles and Xie 2023, arXiv:2212.09748, section 3.2 and figure 3 (adaLN-Zero); Ba, Kiros, Hinton 2016,
    arXiv:1607.06450, eq. 4; Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4 (RMSNorm); Yao, Yang, Wang 2025,
    arXiv:2501.01423 (LightningDiT: its block has them). Shuffles: PTX ISA, section 9.7.9, shfl.sync.
READ NEXT
    gate.py, the other half of adaLN-Zero.
"""
import itertools
import math
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, empty_like, float32, is_device, launch, load4, over_batch, store4
from ...device.specialise import Constant, Variants, specialise
from ...dtypes import in_single
from ..common import warp_sum
from ..reduce import BLOCK, cut, sample_sum, tree_sum
from ..second_pass import add_rows
from ..versions import versions_by_name

BLOCK2 = 2 * BLOCK  # shared elements for two sums a thread
WARP = 32
ROWS = BLOCK // WARP  # a block of version 2 takes eight tokens


# References -----------------------------------------------------------------------------------------------------------

@in_single(1, 2)
def adaln_forward_reference(x, shift, scale, eps=1e-6, weight=None, norm="layer"):
    y, rstd = np.empty_like(x), np.empty(x.shape[:2], x.dtype)
    mean = np.empty(x.shape[:2], x.dtype) if norm == "layer" else None

    def images(i):
        if mean is None:
            y[i] = x[i]
        else:
            mean[i] = x[i].mean(2)
            np.subtract(x[i], mean[i, :, None], out=y[i])  # centred first: its squares lose nothing
        rstd[i] = 1 / np.sqrt(np.einsum("btc,btc->bt", y[i], y[i]) / x.shape[2] + eps)
        y[i] *= rstd[i, :, None]
        y[i] *= factors_reference(scale[i], weight)[:, None]
        if shift is not None:
            y[i] += shift[i, None]

    over_batch(images, len(x), x.size)
    return y, None if mean is None else mean.reshape(-1), rstd.reshape(-1)


def factors_reference(scale, weight):
    """What xhat is multiplied by, (B, C)."""
    return 1 + scale if weight is None else weight * (1 + scale)


@in_single(1, 2)
def adaln_backward_reference(dy, x, scale, mean, rstd, weight=None, dweight=None, need_dshift=True):
    rstd, C = rstd.reshape(x.shape[:2]), x.shape[2]
    mean = None if mean is None else mean.reshape(x.shape[:2])
    dx, dscale, dshift = np.empty_like(x), np.empty_like(scale), np.empty_like(scale) if need_dshift else None

    def images(i):
        xhat = (x[i] if mean is None else x[i] - mean[i, :, None]) * rstd[i, :, None]
        if need_dshift:
            dy[i].sum(1, out=dshift[i])
        np.einsum("btc,btc->bc", dy[i], xhat, out=dscale[i])
        h = np.multiply(dy[i], factors_reference(scale[i], weight)[:, None], out=dx[i])
        xhat *= (np.einsum("btc,btc->bt", h, xhat) / C)[..., None]
        if mean is not None:
            h -= h.mean(2)[..., None]
        h -= xhat
        h *= rstd[i, :, None]

    over_batch(images, len(x), x.size)
    if dweight is not None:
        dweight += ((1 + scale) * dscale).sum(0)  # of dscale without the weight
    if weight is not None:
        dscale *= weight
    return dx, dshift, dscale


# Variants -------------------------------------------------------------------------------------------------------------
# One text, and a kernel for each norm: what a norm does without is not in its machine code.

RMS, WEIGHTED, SHIFTED = Constant(), Constant(), Constant()
FIRST = Constant(lambda SHIFTED: 4 if SHIFTED else 0)  # plane of Σ dy · xhat in shared memory; before it those of Σ dy
PLANES = Constant(lambda FIRST: FIRST + 4)
TILE = Constant(lambda PLANES: PLANES * BLOCK)


class Norm(NamedTuple):
    """rms: RMSNorm, else LayerNorm; weighted: xhat is multiplied by a weight (C,); shifted: a shift is added."""

    rms: bool = False
    weighted: bool = False
    shifted: bool = True

    kind = property(lambda self: "rms" if self.rms else "layer")

    def __str__(self):
        return " ".join([self.kind, *["weighted"] * self.weighted, *["unshifted"] * (not self.shifted)])

    def kernel(self, text, name, *constants, **others):
        """What a kernel's text becomes for this norm; constants: which of RMS, WEIGHTED and SHIFTED it knows."""
        values = dict(zip(("RMS", "WEIGHTED", "SHIFTED"), self, strict=True))
        prefix = str(self).removeprefix("layer").replace(" ", "_").removeprefix("_")  # none of DiT's own
        prefix += "_" if prefix else ""
        return specialise(text, name=prefix + name, **{constant: values[constant] for constant in constants}, **others)


NORMS = [Norm(*each) for each in itertools.product((False, True), (False, True), (True, False))]


@cuda.jit(device=True, forceinline=True)
def average_of(mean, row):
    """What is taken away from a token: of RMSNorm nothing, and there is no `mean`."""
    if RMS:
        return float32(0)
    return mean[row]


@cuda.jit(device=True, forceinline=True)
def factor(scales, k, c):
    """weight[c] · (1 + scale[k]). scales: (scale,), or with a weight (scale, weight)."""
    if WEIGHTED:
        return scales[1][c] * (float32(1) + scales[0][k])
    return float32(1) + scales[0][k]


@cuda.jit(device=True, forceinline=True)
def weight4(scales, c):
    """weight[c …], or ones, which leave no instruction behind."""
    if WEIGHTED:
        return load4(scales[1], c)
    one = float32(1)
    return one, one, one, one


@cuda.jit(device=True, forceinline=True)
def shift4(shift, k):
    if SHIFTED:
        return load4(shift, k)
    zero = float32(0)
    return zero, zero, zero, zero


# v1: a block a token --------------------------------------------------------------------------------------------------

def adaln_forward_v1(x, shift, scales, y, mean, rstd, T, C, eps):
    tile = cuda.shared.array(BLOCK, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    image, average = row // T * C, float32(0)
    if not RMS:
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
        if SHIFTED:
            y[row * C + c] = xhat * factor(scales, image + c, c) + shift[image + c]
        else:
            y[row * C + c] = xhat * factor(scales, image + c, c)
    if t == 0:
        if not RMS:
            mean[row] = average
        rstd[row] = r


def adaln_backward_v1(dy, x, scales, mean, rstd, dx, T, C):
    tile = cuda.shared.array(BLOCK2, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    image = row // T * C
    average, r = average_of(mean, row), rstd[row]
    sum_h = sum_hx = float32(0)
    for c in range(t, C, BLOCK):
        h = dy[row * C + c] * factor(scales, image + c, c)
        sum_h += h
        sum_hx += h * (x[row * C + c] - average) * r
    tile[t], tile[BLOCK + t] = sum_h, sum_hx
    tree_sum(tile, 2, t, 1, BLOCK)
    average_h, average_hx = tile[0] / float32(C), tile[BLOCK] / float32(C)
    if RMS:
        average_h = float32(0)
    for c in range(t, C, BLOCK):
        h = dy[row * C + c] * factor(scales, image + c, c)
        dx[row * C + c] = r * (h - average_h - (x[row * C + c] - average) * r * average_hx)


def adaln_sums_v1(dy, x, mean, rstd, dshift, dscales, T, C):
    """dshift and dscale, a thread a channel of an image.

    dscales: (dscale,), or with a weight (dscale, dweight's sum over each image, scale, weight)
    """
    k = cuda.grid(1)
    if k < dshift.size:
        b, c = k // C, k % C
        sum_g = sum_gx = float32(0)
        for row in range(b * T, (b + 1) * T):
            g = dy[row * C + c]
            sum_g += g
            d = float32(x[row * C + c])
            if not RMS:
                d -= mean[row]
            sum_gx += g * d * rstd[row]
        if SHIFTED:
            dshift[k] = sum_g
        if WEIGHTED:
            dscales[0][k] = sum_gx * dscales[3][c]
            dscales[1][k] = sum_gx * (float32(1) + dscales[2][k])
        else:
            dscales[0][k] = sum_gx


# v2: a warp a token ---------------------------------------------------------------------------------------------------
# Each sum takes five exchanges of registers and no barrier; a token of 1,152 channels is nine 16-byte loads a lane. It
# is read three times, but only once from memory: then it lies in the L1 cache.

def adaln_forward_v2(x, shift, scales, y, mean, rstd, rows, T, C, eps):
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:  # the same for all lanes of a warp, so no shuffle misses one
        first, image, average = row * C, row // T * C, float32(0)
        if not RMS:
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
            a0, a1, a2, a3 = load4(scales[0], image + c)
            w0, w1, w2, w3 = weight4(scales, c)
            b0, b1, b2, b3 = shift4(shift, image + c)
            store4(y, first + c, (x0 - average) * r * (w0 * (one + a0)) + b0,
                   (x1 - average) * r * (w1 * (one + a1)) + b1, (x2 - average) * r * (w2 * (one + a2)) + b2,
                   (x3 - average) * r * (w3 * (one + a3)) + b3)
        if lane == 0:
            if not RMS:
                mean[row] = average
            rstd[row] = r


@cuda.jit(device=True)
def load_token(dy, x, scales, i, k, c, average, r):
    """h = dy · weight · (1 + scale) and xhat of four channels."""
    h0, h1, h2, h3 = load4(dy, i)
    x0, x1, x2, x3 = load4(x, i)
    a0, a1, a2, a3 = load4(scales[0], k)
    w0, w1, w2, w3 = weight4(scales, c)
    one = float32(1)
    return (h0 * (w0 * (one + a0)), h1 * (w1 * (one + a1)), h2 * (w2 * (one + a2)), h3 * (w3 * (one + a3)),
            (x0 - average) * r, (x1 - average) * r, (x2 - average) * r, (x3 - average) * r)


def adaln_backward_v2(dy, x, scales, mean, rstd, dx, rows, T, C):
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:
        first, image = row * C, row // T * C
        average, r = average_of(mean, row), rstd[row]
        sum_h = sum_hx = float32(0)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, x0, x1, x2, x3 = load_token(dy, x, scales, first + c, image + c, c, average, r)
            sum_h += (h0 + h1) + (h2 + h3)
            sum_hx += (h0 * x0 + h1 * x1) + (h2 * x2 + h3 * x3)
        a = float32(0)
        if not RMS:
            a = warp_sum(sum_h) / float32(C)
        k = warp_sum(sum_hx) / float32(C)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, x0, x1, x2, x3 = load_token(dy, x, scales, first + c, image + c, c, average, r)
            store4(dx, first + c, r * (h0 - a - x0 * k), r * (h1 - a - x1 * k), r * (h2 - a - x2 * k),
                   r * (h3 - a - x3 * k))


@cuda.jit(device=True, forceinline=True)
def store_scale_sums(dscales, i, share, k, c, s0, s1, s2, s3):
    """From Σ dy · xhat of four channels: dscale's at i, and dweight's at `share`. dscales: as in `adaln_sums_v1`."""
    if WEIGHTED:
        w0, w1, w2, w3 = load4(dscales[3], c)
        store4(dscales[0], i, s0 * w0, s1 * w1, s2 * w2, s3 * w3)
        a0, a1, a2, a3 = load4(dscales[2], k)
        one = float32(1)
        store4(dscales[1], share, s0 * (one + a0), s1 * (one + a1), s2 * (one + a2), s3 * (one + a3))
    else:
        store4(dscales[0], i, s0, s1, s2, s3)


def adaln_sums_v2(dy, x, mean, rstd, dscales, T, C, lanes, chunk):
    """Σ dy and Σ dy · xhat, times weight, of every channel in every chunk of an image's tokens: (2, B, chunks, C).

    dscales: (those,), or with a weight (those, Σ dy · xhat · (1 + scale) (B, chunks, C), scale, weight)
    """
    tile = cuda.shared.array(TILE, float32)
    t = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = t // lanes, cuda.blockIdx.z
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    a0 = a1 = a2 = a3 = s0 = s1 = s2 = s3 = float32(0)
    if row < rows and c < C:
        for p in range(start + row, min(start + chunk, T), rows):
            token = b * T + p
            average, r = average_of(mean, token), rstd[token]
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
    if SHIFTED:
        tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t] = s0, s1, s2, s3
    k = FIRST * BLOCK + t
    tile[k], tile[BLOCK + k], tile[2 * BLOCK + k], tile[3 * BLOCK + k] = a0, a1, a2, a3
    tree_sum(tile, PLANES, t, lanes, rows)
    if row == 0 and c < C:
        share = (b * cuda.gridDim.x + cuda.blockIdx.x) * C + c
        i = share
        if SHIFTED:
            store4(dscales[0], i, tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t])
            i += cuda.gridDim.z * cuda.gridDim.x * C
        store_scale_sums(dscales, i, share, b * C + c, c, tile[k], tile[BLOCK + k], tile[2 * BLOCK + k],
                         tile[3 * BLOCK + k])


def variants(name, texts, norms, *constants):
    """{(version, norm): kernel} of the texts of versions 1 and 2."""
    return Variants(itertools.product((1, 2), norms), lambda key: key[1].kernel(texts[key[0] - 1], f"{name}{key[0]}",
                                                                               *constants))


FORWARD = variants("adaln_forward_kernel_v", (adaln_forward_v1, adaln_forward_v2), NORMS, "RMS", "WEIGHTED", "SHIFTED")
BACKWARD = variants("adaln_backward_kernel_v", (adaln_backward_v1, adaln_backward_v2),
                    [norm for norm in NORMS if norm.shifted], "RMS", "WEIGHTED")
SUMS = variants("adaln_sums_kernel_v", (adaln_sums_v1, adaln_sums_v2), NORMS, "RMS", "WEIGHTED", "SHIFTED")


# Launchers ------------------------------------------------------------------------------------------------------------

def check_norm(name, C, weight, norm="layer"):
    """A `ValueError` for a norm that there is not, or a weight that is not (C,)."""
    if norm not in ("layer", "rms"):
        raise ValueError(f"{name}: norm must be layer or rms, not {norm!r}")
    if weight is not None and tuple(weight.shape) != (C,):
        raise ValueError(f"{name}: weight must be ({C},), one for each channel, not {tuple(weight.shape)}")


def _check(x, version, *vectors):
    """(B, T, C, version)."""
    if x.ndim != 3:
        raise ValueError(f"adaln takes tokens (B, T, C), not {tuple(x.shape)}; reshape an image to (B, H·W, C)")
    B, T, C = x.shape
    for vector in vectors:
        if vector is not None and tuple(vector.shape) != (B, C):
            raise ValueError(f"adaln: shift and scale must be (B, C) = {(B, C)}, not {tuple(vector.shape)}")
    if version is None:
        version = 2 if C % 4 == 0 else 1
    if version == 2 and C % 4:
        raise ValueError(f"version 2 (warp-per-row) takes four channels at a time, and {C} is not a multiple of 4; "
                         "use version=1")
    return B, T, C, version


@versions_by_name
def adaln_forward(x, shift, scale, eps=1e-6, weight=None, norm="layer", version=None):
    """(y, mean (B·T,), rstd (B·T,)): the norm of x (B, T, C) · weight (C,) · (1 + scale (B, C)) + shift (B, C).

    shift, weight: None where there is none; norm: "layer", or "rms", which has no mean: None
    """
    B, T, C, version = _check(x, version, shift, scale)
    check_norm("adaln", C, weight, norm)
    if not is_device(x):
        return adaln_forward_reference(x, shift, scale, eps, weight, norm)
    which = Norm(norm == "rms", weight is not None, shift is not None)
    y, rstd = empty_like(x), empty((B * T,), np.float32, like=x)
    mean = None if which.rms else empty((B * T,), np.float32, like=x)
    scales = (scale.reshape(-1),) if weight is None else (scale.reshape(-1), weight)
    arrays = (x.reshape(-1), shift.reshape(-1) if which.shifted else scales[0], scales, y.reshape(-1),
              rstd if which.rms else mean, rstd)  # what stands for an absent array is not looked at
    if version == 1:
        launch(FORWARD[1, which], B * T, BLOCK, *arrays, T, C, float(eps))
    else:
        launch(FORWARD[2, which], -(-B * T // ROWS), BLOCK, *arrays, B * T, T, C, float(eps))
    return y, mean, rstd


@versions_by_name
def adaln_backward(dy, x, scale, mean, rstd, weight=None, dweight=None, need_dshift=True, version=None):
    """(dx, dshift (B, C), dscale (B, C)) from dy and what the forward took and gave; mean None: of RMSNorm.

    The gradient of the weight is added into `dweight` (None: not wanted). need_dshift: False where there is no shift;
    dshift is None then.
    """
    B, T, C, version = _check(x, version, scale)
    check_norm("adaln", C, weight)
    if not is_device(x):
        return adaln_backward_reference(dy, x, scale, mean, rstd, weight, dweight, need_dshift)
    which = Norm(mean is None, weight is not None, need_dshift)
    dx, dy_, x_, scale_ = empty_like(x), dy.reshape(-1), x.reshape(-1), scale.reshape(-1)
    scales, given = (scale_,) if weight is None else (scale_, weight), (rstd if which.rms else mean, rstd)
    lanes, tiles, chunk, chunks = cut(B, T, C, 4) if version == 2 else (0, 0, T, 1)
    kinds = 2 if need_dshift else 1
    sums = empty((kinds * B, chunks, C), np.float32, like=x)
    dscales = sums if version == 2 or not need_dshift else sums[B:]
    dscales, shares = (dscales.reshape(-1),), None
    if weight is not None:
        shares = empty((B * chunks, C), np.float32, like=x)
        dscales = *dscales, shares.reshape(-1), scale_, weight
    launch_dx = BACKWARD[version, which._replace(shifted=True)]
    if version == 1:
        launch(launch_dx, B * T, BLOCK, dy_, x_, scales, *given, dx.reshape(-1), T, C)
        launch(SUMS[1, which], -(-B * C // BLOCK), BLOCK, dy_, x_, *given, sums[:B].reshape(-1), dscales, T, C)
    else:
        launch(launch_dx, -(-B * T // ROWS), BLOCK, dy_, x_, scales, *given, dx.reshape(-1), B * T, T, C)
        launch(SUMS[2, which], (chunks, tiles, B), BLOCK, dy_, x_, *given, dscales, T, C, lanes, chunk)
    if dweight is not None and shares is not None:
        add_rows(shares, dweight)
    sums = sums.reshape(kinds * B, C) if chunks == 1 else sample_sum(sums)
    return dx, sums[:B] if need_dshift else None, sums[-B:] if need_dshift else sums


# Cost -----------------------------------------------------------------------------------------------------------------

def adaln_forward_cost(B, T, C):
    """(bytes, FLOPs) over B images of T tokens of C channels."""
    return 4 * (2 * B * T * C + 2 * B * C + 2 * B * T), 10 * B * T * C


def adaln_backward_cost(B, T, C):
    return 4 * (5 * B * T * C + 3 * B * C + 4 * B * T), 16 * B * T * C
