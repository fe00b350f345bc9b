"""GroupNorm on the CPU engine: the batch in parts that fit a core's cache, each taken through all passes.

MATHEMATICS
    that of reference.py. Sums over pixels are products with ones, by BLAS; a step overwrites what it no longer needs.
SHAPES
    as in reference.py, of any float
DETERMINISM
    an image is summed alone; the cores share the images.
SOURCE
    reference.py.
READ NEXT
    one_pass.py.
"""
import numpy as np

from ...device import over_batch
from ...dtypes import in_single

WORTH = 4  # a dozen short passes: on less than four times what is otherwise worth sharing, threads wait for each other
PART = 1 << 16  # elements of the batch at a time: 256 KiB, so that the many passes stay in a core's cache


def _for_parts(function, x):
    """Call function(slice of the batch) until all is done: the cores share the batch, a core's cache holds a part."""
    step = max(1, PART * len(x) // x.size)

    def share(samples):
        for b in range(samples.start, samples.stop, step):
            function(slice(b, min(b + step, samples.stop)))
    over_batch(share, len(x), x.size // WORTH)


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


@in_single(1, 2)
def groupnorm_forward_cpu(x, weight, bias, groups, eps=1e-5, silu=False):
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


@in_single()
def groupnorm_backward_cpu(dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu=False, residual=None):
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
