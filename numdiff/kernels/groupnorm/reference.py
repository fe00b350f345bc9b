"""GroupNorm, with SiLU in the same pass: what is computed, and what it costs.

MATHEMATICS
    Sample b's channels are cut into G groups of C/G neighbours; a group has m = P · C/G elements.
        mean = Σ x / m          var = Σ (x - mean)² / m          rstd = 1 / √(var + eps)
        xhat = (x - mean) · rstd          z = xhat · weight[c] + bias[c]          y = z, or SiLU(z)
    Backward. First g = dy, or dy · SiLU'(z) with z computed again from x (cheaper than reading a stored z). Then
        dbias[c] += Σ_{b,p} g          dweight[c] += Σ_{b,p} g · xhat
    and, because each x moves its group's mean and variance too (two averages over the group, h = g
        · weight), dx = rstd · (h - average(h) - xhat · average(h · xhat)) + x's gradient from
        elsewhere (`residual`)
    Both averages are weighted sums of the channel sums that dbias and dweight need, so one pass
    gives all four.
SHAPES
    x, y, dx, dy, residual (B, ..., C) float32, float16 or bfloat16, channels last, P pixels;
    weight, bias (C,); mean, rstd (B, G)
COST
    n elements of s bytes. v3: forward 2·s·n bytes (x, y), backward 3·s·n (x, dy, dx); v2 reads x,
    and dy, twice: 3·s·n and 5·s·n. Roof: memory bandwidth.
    The variance is never E[x²] - E[x]², which loses all digits where the mean is large compared
    with the deviation.
SOURCE
    Wu and He 2018, arXiv:1803.08494, eq. 1, 2, 7.
READ NEXT
    groups.py.
"""

import numpy as np

from ...dtypes import in_single


@in_single(1, 2)
def groupnorm_forward_reference(x, weight, bias, groups, eps=1e-5, silu=False):
    """(y, mean, rstd)"""
    parts = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    mean, rstd = parts.mean((1, 3)), 1 / np.sqrt(parts.var((1, 3)) + eps)
    xhat = (parts - mean[:, None, :, None]) * rstd[:, None, :, None]
    z = xhat.reshape(x.shape) * weight + bias
    return z / (1 + np.exp(-z)) if silu else z, mean, rstd


@in_single()
def groupnorm_backward_reference(
    dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu=False, residual=None
):
    """dx; the gradients of weight and bias are added into `dweight` and `dbias`."""
    cut, center, scale = (
        (len(x), -1, groups, x.shape[-1] // groups),
        mean[:, None, :, None],
        rstd[:, None, :, None],
    )
    xhat, pixels = (x.reshape(cut) - center) * scale, tuple(range(x.ndim - 1))
    z = xhat.reshape(x.shape) * weight + bias
    s = 1 / (1 + np.exp(-z))
    g = dy * s * (1 + z * (1 - s)) if silu else dy
    dbias += g.sum(pixels)
    dweight += (g * xhat.reshape(x.shape)).sum(pixels)
    h = (g * weight).reshape(cut)
    dx = scale * (h - h.mean((1, 3), keepdims=True) - xhat * (h * xhat).mean((1, 3), keepdims=True))
    return dx.reshape(x.shape) if residual is None else dx.reshape(x.shape) + residual


# Cost ---------------------------------------------------------------------------------------------


def groupnorm_forward_cost(B, P, C, silu=False, itemsize=4):
    """(bytes, FLOPs) of version 3: x is read and y written once."""
    n = B * P * C
    return itemsize * 2 * n, n * (4 + 3 + (3 if silu else 0))


def groupnorm_backward_cost(B, P, C, silu=False, itemsize=4, residual=False):
    """(bytes, FLOPs) of version 3: x, dy and, if there is one, the residual are read and dx written
    once."""
    n = B * P * C
    return itemsize * (3 + residual) * n, n * (5 + 7 + (10 if silu else 0) + residual)
