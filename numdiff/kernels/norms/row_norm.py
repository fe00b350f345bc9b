"""Norms of rows: one text for LayerNorm, RMSNorm and the adaptive norms of transformers.

MATHEMATICS, for a row of C columns; averages are over the row
        mean = Σ_c x / C      rstd = 1 / √(Σ_c (x - mean)² / C + eps)      xhat = (x - mean) · rstd
        y = xhat · factor + shift
    LayerNorm (extras/layer_norm/layernorm.py): factor = weight[c], shift = bias[c].
    RMSNorm (extras/rms_norm/rmsnorm.py): mean is 0. It is not stored, read or computed, and there is no shift.
    Adaptive norms (transformer/adaln.py): factor = weight[c] · (1 + scale[b, c]), shift[b, c] of the row's image b.
    A weight and a shift may be absent: 1 and 0.
    Backward, with h = dy · factor, the gradient of xhat:
        dx = rstd · (h - average(h) - xhat · average(h · xhat))
    A row that is shifted, or scaled about its mean, keeps its xhat (but for eps). So dx has no component along 1 or
    along xhat: the two averages are those of h. RMSNorm does not subtract average(h).
    Gradients of the parameters are sums over rows of dy · xhat and of dy.
STEPS of each kernel
    load a row, compute its statistics, normalise and modulate, store. Backward: load dy and x, compute the two
    averages, store dx.
VERSIONS
    v1 block-per-row: a block of 256 threads a row. Its threads add in a tree in shared memory, nine barriers a sum.
    v2 warp-per-row: a warp a row. Its 32 lanes exchange registers (shuffles), five times a sum, without a barrier;
       16-byte loads (C a multiple of 4).
ONE TEXT
    A kernel's text branches on RMS, WEIGHTED, SHIFTED and MODULATED, which are constants of each kernel
    (device/specialise.py). The machine code has only what its norm needs.
LAUNCH
    v1 a block for every row, 1 KiB of shared memory for each sum; v2 256 threads for eight rows, none.
DETERMINISM
    no atomics: trees and shuffles have an order that the shape alone decides.
SOURCE
    Ba, Kiros, Hinton 2016, arXiv:1607.06450, eq. 4 (LayerNorm); Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4
    (RMSNorm); Yao, Yang, Wang 2025, arXiv:2501.01423 (LightningDiT: its block has RMSNorm with a weight). Shuffles: PTX
    ISA, section 9.7.9.6 (shfl.sync).
READ NEXT
    ../../extras/layer_norm/layernorm.py
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from ...device import cuda, device_inline, empty, float32, launch, load4, store4, zeros
from ...device.common import warp_sum
from ...device.limits import WARP
from ...device.specialise import Constant, Variants, specialise
from ..operation import Version, lacks_multiple
from ..reduce.second_pass import add_rows
from ..reduce.trees import BLOCK, cut, get4, put4, tree_sum

BLOCK2 = 2 * BLOCK  # shared elements for two sums a thread
ROWS = BLOCK // WARP  # a block of version 2 takes eight rows

RMS, WEIGHTED, SHIFTED = Constant(), Constant(), Constant()
MODULATED = Constant()  # whether there is a scale, and scale and shift are those of the row's image


class Norm(NamedTuple):
    """rms: RMSNorm, else LayerNorm; weighted: xhat is multiplied by a weight (C,); shifted: a shift
    is added; modulated: xhat is multiplied by 1 + scale, and scale and shift are (B, C)."""

    rms: bool = False
    weighted: bool = False
    shifted: bool = True
    modulated: bool = True

    kind = property(lambda self: "rms" if self.rms else "layer")

    def __str__(self):
        return " ".join(
            [self.kind, *["weighted"] * self.weighted, *["unshifted"] * (not self.shifted)]
        )

    @property
    def prefix(self):
        """Of the names of an adaptive norm's kernels; DiT's own has none."""
        words = str(self).removeprefix("layer").split()
        return "".join(f"{word}_" for word in words)

    def kernel(self, text, name, *constants, **others):
        """What a kernel's text becomes for this norm; constants: which of RMS, WEIGHTED, SHIFTED
        and MODULATED it knows."""
        values = dict(zip(("RMS", "WEIGHTED", "SHIFTED", "MODULATED"), self, strict=True))
        return specialise(text, name=name, **{each: values[each] for each in constants}, **others)


# the adaptive norms; LayerNorm with weight and bias and without; RMSNorm with a weight and without
NORMS = [Norm(*each) for each in itertools.product((False, True), (False, True), (True, False))]
LAYERNORMS, RMSNORMS = (
    [Norm(rms, weighted, weighted and not rms, False) for weighted in (False, True)]
    for rms in (False, True)
)


def variants(name, texts, norms, *constants):
    """{(version, norm): kernel} of the texts of versions 1 and 2."""

    def make(key):
        version, norm = key
        whole = f"{name}_kernel_v{version}"
        if norm.modulated:
            whole = f"{norm.prefix}adaln_{whole}"
        else:
            whole = f"{norm.kind}norm_{whole}{'_unweighted' * (not norm.weighted)}"
        return norm.kernel(texts[version - 1], whole, *constants)

    return Variants(itertools.product((1, 2), norms), make)


def check_norm(name, C, weight, norm="layer"):
    """A `ValueError` for a norm that there is not, or a weight that is not (C,)."""
    if norm not in ("layer", "rms"):
        raise ValueError(f"{name}: norm must be layer or rms, not {norm!r}")
    if weight is not None and tuple(weight.shape) != (C,):
        raise ValueError(
            f"{name}: weight must be ({C},), one for each channel, not {tuple(weight.shape)}"
        )


# Device functions ---------------------------------------------------------------------------------
# factors: (scale,), (scale, weight) or (weight,); without any, an array that is not read.


@device_inline
def average_of(mean, row):
    """What is subtracted from a row. RMSNorm subtracts nothing, and there is no `mean`."""
    if RMS:
        return float32(0)
    return mean[row]


@device_inline
def image_start(row, T, C):
    """Where the scale and shift of a row's image begin, of T rows each; one shift for all begins at
    0."""
    if MODULATED:
        return row // T * C
    return 0


@device_inline
def factor(factors, k, c):
    """What xhat is multiplied by: weight[c] · (1 + scale[k])."""
    if MODULATED:
        if WEIGHTED:
            return factors[1][c] * (float32(1) + factors[0][k])
        return float32(1) + factors[0][k]
    if WEIGHTED:
        return factors[0][c]
    return float32(1)


@device_inline
def scale4(factors, k):
    """scale[k …] of four columns. Zeros and ones that stand for what is absent leave no instruction
    behind."""
    zero = float32(0)
    return load4(factors[0], k) if MODULATED else (zero, zero, zero, zero)


@device_inline
def weight4(factors, c):
    """weight[c …] of four columns, or ones."""
    one = float32(1)
    return load4(factors[-1], c) if WEIGHTED else (one, one, one, one)


@device_inline
def shift4(shift, k):
    """shift[k …] of four columns, or zeros."""
    zero = float32(0)
    return load4(shift, k) if SHIFTED else (zero, zero, zero, zero)


@device_inline
def factor_of(weight, scale):
    return weight * (float32(1) + scale) if MODULATED else weight


@device_inline
def shifted(value, shift):
    return value + shift if SHIFTED else value


@cuda.jit(device=True)
def load_h_xhat(dy, x, factors, i, k, c, average, r):
    """h = dy · factor and xhat of four columns."""
    h0, h1, h2, h3 = load4(dy, i)
    x0, x1, x2, x3 = load4(x, i)
    s0, s1, s2, s3 = scale4(factors, k)
    w0, w1, w2, w3 = weight4(factors, c)
    return (
        h0 * factor_of(w0, s0),
        h1 * factor_of(w1, s1),
        h2 * factor_of(w2, s2),
        h3 * factor_of(w3, s3),
        (x0 - average) * r,
        (x1 - average) * r,
        (x2 - average) * r,
        (x3 - average) * r,
    )


@cuda.jit(device=True)
def load_dy_xhat(dy, x, i, average, r):
    """dy and xhat of four columns."""
    g0, g1, g2, g3 = load4(dy, i)
    x0, x1, x2, x3 = load4(x, i)
    return (
        g0,
        g1,
        g2,
        g3,
        (x0 - average) * r,
        (x1 - average) * r,
        (x2 - average) * r,
        (x3 - average) * r,
    )


# v1: a block a row --------------------------------------------------------------------------------
# The block's threads stride over the columns, and each sum takes a tree. The mean is subtracted
# before squares are taken: the difference of two averages, of x² and of x, would lose a large
# mean's digits.


def norm_forward_v1(x, shift, factors, y, mean, rstd, T, C, eps):
    """y, mean and rstd of a row; T: rows of an image."""
    tile = cuda.shared.array(BLOCK, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    image, average = image_start(row, T, C), float32(0)
    if not RMS:
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
    r = float32(1) / math.sqrt(tile[0] / float32(C) + eps)
    for c in range(t, C, BLOCK):
        xhat = (float32(x[row * C + c]) - average) * r
        if SHIFTED:
            y[row * C + c] = xhat * factor(factors, image + c, c) + shift[image + c]
        else:
            y[row * C + c] = xhat * factor(factors, image + c, c)
    if t == 0:
        if not RMS:
            mean[row] = average
        rstd[row] = r


def norm_backward_v1(dy, x, factors, mean, rstd, dx, T, C):
    """dx of a row: the two averages, then h without its components along 1 and xhat."""
    tile = cuda.shared.array(BLOCK2, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    image = image_start(row, T, C)
    average, r = average_of(mean, row), rstd[row]
    sum_h = sum_hx = float32(0)
    for c in range(t, C, BLOCK):
        h = float32(dy[row * C + c]) * factor(factors, image + c, c)
        sum_h += h
        sum_hx += h * (float32(x[row * C + c]) - average) * r
    tile[t], tile[BLOCK + t] = sum_h, sum_hx
    tree_sum(tile, 2, t, 1, BLOCK)
    average_h, average_hx = tile[0] / float32(C), tile[BLOCK] / float32(C)
    if RMS:
        average_h = float32(0)
    for c in range(t, C, BLOCK):
        h = float32(dy[row * C + c]) * factor(factors, image + c, c)
        dx[row * C + c] = r * (h - average_h - (float32(x[row * C + c]) - average) * r * average_hx)


def norm_sums_v1(dy, x, mean, rstd, shift_sums, scale_sums, T, C):
    """Σ dy and Σ dy · xhat over an image's T rows, a thread a column of an image: as naive as
    version 1 of the sums in reduce/trees.py.

    Modulated: dshift, and scale_sums (dscale,), or with a weight (dscale, what each image adds to
    dweight, scale, weight). Else all rows are one image's, and the sums are added to dbias and
    (dweight,).
    """
    k = cuda.grid(1)
    if k < shift_sums.size:
        b, c = (k // C, k % C) if MODULATED else (0, k)
        sum_g = sum_gx = float32(0)
        for row in range(b * T, (b + 1) * T):
            g = float32(dy[row * C + c])
            sum_g += g
            sum_gx += g * (float32(x[row * C + c]) - average_of(mean, row)) * rstd[row]
        if not MODULATED:
            scale_sums[0][c] += sum_gx
            if SHIFTED:
                shift_sums[c] += sum_g
        else:
            if SHIFTED:
                shift_sums[k] = sum_g
            if WEIGHTED:
                scale_sums[0][k] = sum_gx * scale_sums[3][c]
                scale_sums[1][k] = sum_gx * (float32(1) + scale_sums[2][k])
            else:
                scale_sums[0][k] = sum_gx


# v2: a warp a row ---------------------------------------------------------------------------------
# The lanes of a warp can read each other's registers. After five exchanges, with the lane 16, 8, 4,
# 2, 1 away, every lane has the sum of all 32, without shared memory and without waiting for other
# warps. A row is read up to three times, but only once from memory: then from the L1 cache.


def norm_forward_v2(x, shift, factors, y, mean, rstd, rows, T, C, eps):
    """y, mean and rstd of a row."""
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:  # the same for all lanes of a warp, so no shuffle misses one
        first, image, average = row * C, image_start(row, T, C), float32(0)
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
        for c in range(lane * 4, C, WARP * 4):
            x0, x1, x2, x3 = load4(x, first + c)
            s0, s1, s2, s3 = scale4(factors, image + c)
            w0, w1, w2, w3 = weight4(factors, c)
            b0, b1, b2, b3 = shift4(shift, image + c)
            store4(
                y,
                first + c,
                shifted((x0 - average) * r * factor_of(w0, s0), b0),
                shifted((x1 - average) * r * factor_of(w1, s1), b1),
                shifted((x2 - average) * r * factor_of(w2, s2), b2),
                shifted((x3 - average) * r * factor_of(w3, s3), b3),
            )
        if lane == 0:
            if not RMS:
                mean[row] = average
            rstd[row] = r


def norm_backward_v2(dy, x, factors, mean, rstd, dx, rows, T, C):
    """dx of a row."""
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:
        first, image = row * C, image_start(row, T, C)
        average, r = average_of(mean, row), rstd[row]
        sum_h = sum_hx = float32(0)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, xhat0, xhat1, xhat2, xhat3 = load_h_xhat(
                dy, x, factors, first + c, image + c, c, average, r
            )
            sum_h += (h0 + h1) + (h2 + h3)
            sum_hx += (h0 * xhat0 + h1 * xhat1) + (h2 * xhat2 + h3 * xhat3)
        average_h = float32(0)
        if not RMS:
            average_h = warp_sum(sum_h) / float32(C)
        average_hx = warp_sum(sum_hx) / float32(C)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, xhat0, xhat1, xhat2, xhat3 = load_h_xhat(
                dy, x, factors, first + c, image + c, c, average, r
            )
            store4(
                dx,
                first + c,
                r * (h0 - average_h - xhat0 * average_hx),
                r * (h1 - average_h - xhat1 * average_hx),
                r * (h2 - average_h - xhat2 * average_hx),
                r * (h3 - average_h - xhat3 * average_hx),
            )


# sums of a thread, each a plane of shared memory: Σ dy · xhat of its four columns, then Σ dy
PLANES = Constant(lambda SHIFTED: 8 if SHIFTED else 4)
TILE = Constant(lambda PLANES: PLANES * BLOCK)


@device_inline
def store_scale_sums(scale_sums, i, k, c, S):
    """What comes of S = Σ dy · xhat of four columns from c on, of the chunk whose sums are at i;
    k: of the image's scale. scale_sums: as in `norm_sums_v1`."""
    if MODULATED and WEIGHTED:
        w0, w1, w2, w3 = load4(scale_sums[3], c)
        s0, s1, s2, s3 = load4(scale_sums[2], k)
        one = float32(1)
        store4(scale_sums[0], i, S[0] * w0, S[1] * w1, S[2] * w2, S[3] * w3)
        store4(
            scale_sums[1],
            i,
            S[0] * (one + s0),
            S[1] * (one + s1),
            S[2] * (one + s2),
            S[3] * (one + s3),
        )
    else:
        store4(scale_sums[0], i, S[0], S[1], S[2], S[3])


def norm_sums_v2(dy, x, mean, rstd, scale_sums, T, C, lanes, chunk):
    """Σ dy · xhat, and if SHIFTED Σ dy, of every column in every chunk of an image's T rows: (2 or
    1, B, chunks, C), the first array of `scale_sums`; dy · xhat times the weight, where there is
    one and a scale. Not modulated, all rows are one image's."""
    tile = cuda.shared.array(TILE, float32)
    t = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = t // lanes, cuda.blockIdx.z if MODULATED else 0
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    s0 = s1 = s2 = s3 = g_sum0 = g_sum1 = g_sum2 = g_sum3 = float32(0)
    if row < rows and c < C:
        for p in range(start + row, min(start + chunk, T), rows):
            token = b * T + p
            g0, g1, g2, g3, xhat0, xhat1, xhat2, xhat3 = load_dy_xhat(
                dy, x, token * C + c, average_of(mean, token), rstd[token]
            )
            s0 += g0 * xhat0
            s1 += g1 * xhat1
            s2 += g2 * xhat2
            s3 += g3 * xhat3
            g_sum0 += g0
            g_sum1 += g1
            g_sum2 += g2
            g_sum3 += g3
    put4(tile, t, s0, s1, s2, s3)
    if SHIFTED:
        put4(tile, 4 * BLOCK + t, g_sum0, g_sum1, g_sum2, g_sum3)
    tree_sum(tile, PLANES, t, lanes, rows)
    if row == 0 and c < C:
        i = (b * cuda.gridDim.x + cuda.blockIdx.x) * C + c
        store_scale_sums(scale_sums, i, b * C + c, c, get4(tile, t))
        if SHIFTED:
            s0, s1, s2, s3 = get4(tile, 4 * BLOCK + t)
            images = cuda.gridDim.z if MODULATED else 1
            store4(scale_sums[0], i + images * cuda.gridDim.x * C, s0, s1, s2, s3)


EVERY = [*NORMS, *LAYERNORMS, *RMSNORMS]
FORWARD = variants(
    "forward",
    (norm_forward_v1, norm_forward_v2),
    EVERY,
    "RMS",
    "WEIGHTED",
    "SHIFTED",
    "MODULATED",
)
BACKWARD = variants(  # dx does not depend on a shift
    "backward",
    (norm_backward_v1, norm_backward_v2),
    [norm for norm in EVERY if norm.shifted or not norm.modulated],
    "RMS",
    "WEIGHTED",
    "MODULATED",
)
SUMS = variants(
    "sums",
    (norm_sums_v1, norm_sums_v2),
    [*NORMS, LAYERNORMS[1], RMSNORMS[1]],
    "RMS",
    "WEIGHTED",
    "SHIFTED",
    "MODULATED",
)


# Launchers ----------------------------------------------------------------------------------------


def row_versions(kernels, columns="columns"):
    """Versions 1 and 2 of an operation on x (..., C); kernels: {(version, norm): kernel}."""
    return [
        Version("block-per-row", kernels),
        Version("warp-per-row", kernels, fits=lambda x: lacks_multiple(4, x.shape[-1], columns)),
    ]


def launch_rows(version, norm, rows, T, C, arrays, *eps):
    """Launch version 1 or 2 over `rows` rows, T of an image; eps: in the forward."""
    kernel = version.kernel[version.number, norm]
    if version.name == "block-per-row":
        launch(kernel, rows, BLOCK, *arrays, T, C, *eps)
    else:
        launch(kernel, -(-rows // ROWS), BLOCK, *arrays, rows, T, C, *eps)


def add_parameter_gradients(version, dy, x, mean, rstd, *gradients):
    """Add Σ dy · xhat to dweight and, of a LayerNorm, Σ dy to dbias; one that is None is not
    wanted."""
    if all(gradient is None for gradient in gradients):
        return
    C, rms, arrays = x.shape[-1], len(gradients) == 1, (dy.reshape(-1), x.reshape(-1), mean, rstd)
    rows, kernel = x.size // C, SUMS[version.number, (RMSNORMS if rms else LAYERNORMS)[True]]
    if version.name == "block-per-row":
        sums = [zeros((C,), like=x) if g is None else g for g in gradients]
        launch(kernel, -(-C // BLOCK), BLOCK, *arrays, sums[-1], (sums[0],), rows, C)
    else:
        lanes, tiles, chunk, chunks = cut(1, rows, C, 4)
        partial = empty((len(gradients), chunks, C), np.float32, like=x)
        grid = chunks, tiles
        launch(kernel, grid, BLOCK, *arrays, (partial.reshape(-1),), rows, C, lanes, chunk)
        add_rows(partial, *gradients)
