"""GroupNorm on the CPU engine: loops compiled for the host, an image at a time, where NumPy has a
dozen passes.

MATHEMATICS
    that of groupnorm/reference.py.
SHAPES
    as in groupnorm/reference.py; float32, and 16 bits by way of it. In float64, which results are
    compared with, groupnorm/reference.py itself is used.
LAYOUT
    An image is a row of numbers of which every C-th belongs to the same channel. The inner loops go
    over SPAN of them, a whole number of pixels, and take what belongs to a channel from a row that
    repeats it as often: with 32 channels a loop over one pixel would end before it has paid for its
    beginning.
DETERMINISM
    an image is summed alone, in float64; the cores share the images.
SOURCE
    groupnorm/reference.py.
READ NEXT
    groupnorm/one_pass.py.
"""

import math

import numpy as np

from ...device import on_host, over_batch
from ...dtypes import in_single
from ..groupnorm.reference import groupnorm_backward_reference, groupnorm_forward_reference
from .exp import sigmoid

SPAN = 512  # numbers of an inner loop
# how many times less time a number takes than what is otherwise worth sharing
FORWARD, BACKWARD = 2, 1
ONE = np.float32(1)


# Loops, compiled for the host ---------------------------------------------------------------------


@on_host
def averages(total, channels, count, found):
    """Of the sums that `total`, a span, holds, those of each group (or channel) over `count`, into
    `found`."""
    width = channels // len(found)
    for g in range(len(found)):
        of_group = 0.0
        for pixel in range(0, len(total), channels):
            for i in range(pixel + g * width, pixel + (g + 1) * width):
                of_group += total[i]
        found[g] = of_group / count


@on_host
def spread(values, channels, span):
    """`values`, of the groups or of the channels, for each number of a span."""
    result, width = np.empty(span, np.float32), channels // len(values)
    for pixel in range(0, span, channels):
        for k in range(len(values)):
            for i in range(pixel + k * width, pixel + (k + 1) * width):
                result[i] = values[k]
    return result


@on_host
def normalise_images(x, weight, bias, eps, silu, y, mean, rstd):
    """The forward pass of these images. x, y (b, P · C); mean, rstd (b, groups)"""
    channels, numbers = len(weight), x.shape[1]
    span, count = channels * max(1, SPAN // channels), numbers // mean.shape[1]
    scale, shift = spread(weight, channels, span), spread(bias, channels, span)
    for b in range(len(x)):
        total = np.zeros(span)
        for start in range(0, numbers, span):
            a = x[b, start : start + span]
            for i in range(len(a)):
                total[i] += a[i]
        averages(total, channels, count, mean[b])
        center, total = spread(mean[b], channels, span), np.zeros(span)
        for start in range(0, numbers, span):
            a = x[b, start : start + span]
            for i in range(len(a)):
                d = a[i] - center[i]  # centred first: its squares lose nothing
                total[i] += d * d
        averages(total, channels, count, rstd[b])
        for g in range(rstd.shape[1]):
            rstd[b, g] = 1 / math.sqrt(rstd[b, g] + eps)
        factor = spread(rstd[b], channels, span)
        for start in range(0, numbers, span):
            a, z = x[b, start : start + span], y[b, start : start + span]
            for i in range(len(a)):
                z[i] = (a[i] - center[i]) * factor[i] * scale[i] + shift[i]
            if silu:
                for i in range(len(z)):
                    z[i] *= sigmoid(z[i])


@on_host
def differentiate_images(dy, x, weight, bias, mean, rstd, residual, silu, dx, sum_g, sum_gx):
    """The backward pass of these images. dy, x, dx, residual (b, P · C), the last empty where there
    is none; sum_g, sum_gx (b, C): the sums over pixels of g and g · xhat"""
    channels, numbers, groups = len(weight), x.shape[1], mean.shape[1]
    span, count = channels * max(1, SPAN // channels), numbers // groups
    scale, shift, xhat = (
        spread(weight, channels, span),
        spread(bias, channels, span),
        np.empty(span, np.float32),
    )
    average = np.empty(groups, np.float32)
    for b in range(len(x)):
        center, deviation = spread(mean[b], channels, span), spread(rstd[b], channels, span)
        of_g, of_gx = np.zeros(span), np.zeros(span)
        for start in range(0, numbers, span):
            a, d, g = (
                x[b, start : start + span],
                dy[b, start : start + span],
                dx[b, start : start + span],
            )
            for i in range(len(a)):
                xhat[i] = (a[i] - center[i]) * deviation[i]
                g[i] = d[i]
            if silu:
                for i in range(len(a)):
                    z = xhat[i] * scale[i] + shift[i]
                    s = sigmoid(z)
                    g[i] *= s * (ONE + z * (ONE - s))
            for i in range(len(a)):
                of_g[i] += g[i]
                of_gx[i] += g[i] * xhat[i]
        averages(of_g, channels, 1, sum_g[b])
        averages(of_gx, channels, 1, sum_gx[b])
        for i in range(span):
            of_g[i] *= scale[i]
            of_gx[i] *= scale[i]
        averages(of_g, channels, count, average)
        h = spread(average, channels, span)
        averages(of_gx, channels, count, average)
        h_xhat = spread(average, channels, span)
        for start in range(0, numbers, span):
            a, g = x[b, start : start + span], dx[b, start : start + span]
            for i in range(len(a)):
                g[i] = (
                    g[i] * scale[i] - h[i] - (a[i] - center[i]) * deviation[i] * h_xhat[i]
                ) * deviation[i]
            if len(residual):
                before = residual[b, start : start + span]
                for i in range(len(g)):
                    g[i] += before[i]


# Launchers ----------------------------------------------------------------------------------------


def _images(array):
    return np.ascontiguousarray(array).reshape(len(array), -1)


@in_single(1, 2)
def groupnorm_forward_cpu(x, weight, bias, groups, eps=1e-5, silu=False):
    if x.dtype != np.float32:
        return groupnorm_forward_reference(x, weight, bias, groups, eps, silu)
    pixels, (mean, rstd) = _images(x), np.empty((2, len(x), groups), np.float32)
    y = np.empty_like(pixels)
    over_batch(
        lambda some: normalise_images(
            pixels[some], weight, bias, float(eps), silu, y[some], mean[some], rstd[some]
        ),
        len(x),
        x.size // FORWARD,
    )
    return y.reshape(x.shape), mean, rstd


@in_single()
def groupnorm_backward_cpu(
    dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu=False, residual=None
):
    if x.dtype != np.float32:
        return groupnorm_backward_reference(
            dy, x, weight, bias, mean, rstd, dweight, dbias, groups, silu, residual
        )
    pixels, dpixels = _images(x), _images(dy)
    dx, (sum_g, sum_gx) = np.empty_like(pixels), np.empty((2, len(x), x.shape[-1]), np.float32)
    before = dx[:0] if residual is None else _images(residual)
    over_batch(
        lambda some: differentiate_images(
            dpixels[some],
            pixels[some],
            weight,
            bias,
            mean[some],
            rstd[some],
            before[some],
            silu,
            dx[some],
            sum_g[some],
            sum_gx[some],
        ),
        len(x),
        x.size // BACKWARD,
    )
    dweight += sum_gx.sum(0)
    dbias += sum_g.sum(0)
    return dx.reshape(x.shape)
