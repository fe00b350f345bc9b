"""Gate, residual, norm and modulation on the CPU engine: loops compiled for the host, a token at a
time.

MATHEMATICS
    that of transformer/gate_adaln/reference.py: all of it in one pass over a token, whose numbers
    stay in the core's first cache, where NumPy has a dozen passes over an image.
SHAPES
    as in transformer/gate_adaln/reference.py; float32, and 16 bits by way of it. In float64, which
    results are compared with, transformer/gate_adaln/reference.py itself is used. What there is not
    is an array without numbers here.
DETERMINISM
    a token's sums are taken by reductions.py; those over tokens in their order, image by image. The
    cores share the images.
SOURCE
    transformer/gate_adaln/reference.py.
READ NEXT
    transformer/gate_adaln/forward.py
"""

import math

import numpy as np

from ...device import on_host, over_batch
from ...dtypes import in_single
from ..transformer.gate_adaln.reference import (
    gate_adaln_backward_reference,
    gate_adaln_forward_reference,
)
from .reductions import dot, total

PARALLEL_THRESHOLD_FACTOR = 4  # an element is 4 times cheaper than the threshold assumes
ONE = np.float32(1)


@on_host
def modulate_tokens(x, h, gate, factor, shift, eps, centred, z, y, mean, rstd):
    """The forward pass of an image's tokens. x, h, z, y (T, C); gate, factor, shift (C,); mean,
    rstd (T,); z is written where there is a gate, and else is x"""
    count = np.float32(x.shape[1])
    for t in range(len(x)):
        a, n, out = x[t], z[t], y[t]
        if len(gate):
            branch = h[t]
            for c in range(len(a)):
                n[c] = a[c] + gate[c] * branch[c]
        if centred:
            center = total(n) / count
            mean[t] = center
            for c in range(len(a)):
                out[c] = n[c] - center  # centred first: its squares lose nothing
        else:
            for c in range(len(a)):
                out[c] = n[c]
        r = ONE / math.sqrt(dot(out, out) / count + eps)
        rstd[t] = r
        for c in range(len(a)):
            out[c] = out[c] * r * factor[c]
        if len(shift):
            for c in range(len(a)):
                out[c] += shift[c]


@on_host
def differentiate_tokens(dz, dy, z, h, gate, factor, mean, rstd, results):
    """The backward pass of an image's tokens. results: dx, dh, dgate, dshift and of_dy, Σ dy · xhat;
    to the last three, (C,), it adds. dz, dy, z, h, dx, dh (T, C); mean without numbers: of
    RMSNorm"""
    dx, dh, dgate, dshift, of_dy = results
    xhat, count = np.empty(z.shape[1], np.float32), np.float32(z.shape[1])
    for t in range(len(z)):
        a, d, g, r = z[t], dy[t], dx[t], rstd[t]
        if len(mean):
            center = mean[t]
            for c in range(len(a)):
                xhat[c] = (a[c] - center) * r
        else:
            for c in range(len(a)):
                xhat[c] = a[c] * r
        for c in range(len(a)):
            of_dy[c] += d[c] * xhat[c]
            g[c] = d[c] * factor[c]
        if len(dshift):
            for c in range(len(a)):
                dshift[c] += d[c]
        average = dot(g, xhat) / count
        if len(mean):
            center = total(g) / count
            for c in range(len(a)):
                g[c] = (g[c] - center - xhat[c] * average) * r
        else:
            for c in range(len(a)):
                g[c] = (g[c] - xhat[c] * average) * r
        if len(dz):
            before = dz[t]
            for c in range(len(a)):
                g[c] += before[c]
        if len(gate):
            branch, into = h[t], dh[t]
            for c in range(len(a)):
                into[c] = gate[c] * g[c]
                dgate[c] += g[c] * branch[c]


# Launchers ----------------------------------------------------------------------------------------


def _factors(scale, weight):
    return np.ascontiguousarray(1 + scale if weight is None else weight * (1 + scale), np.float32)


def _given(array, count, axes):
    """Contiguous; for None an empty array of `axes` axes for each of `count` images."""
    return (
        np.empty((count,) + (0,) * axes, np.float32)
        if array is None
        else np.ascontiguousarray(array)
    )


@in_single(2, 3)
def gate_adaln_forward_cpu(x, h, gate, shift, scale, eps=1e-6, weight=None, norm="layer"):
    if x.dtype != np.float32:
        return gate_adaln_forward_reference(x, h, gate, shift, scale, eps, weight, norm)
    B, T, C = x.shape
    x, h, gate, shift = (
        np.ascontiguousarray(x),
        _given(h, B, 2),
        _given(gate, B, 1),
        _given(shift, B, 1),
    )
    y, z = np.empty_like(x), np.empty_like(x) if gate.size else x
    factor, centred = _factors(scale, weight), norm == "layer"
    rstd = np.empty((B, T), np.float32)
    mean = np.empty_like(rstd) if centred else _given(None, B, 1)

    def images(some):
        for b in range(some.start, some.stop):
            modulate_tokens(
                x[b],
                h[b],
                gate[b],
                factor[b],
                shift[b],
                np.float32(eps),
                centred,
                z[b],
                y[b],
                mean[b],
                rstd[b],
            )

    over_batch(images, B, x.size // PARALLEL_THRESHOLD_FACTOR)
    return z, y, mean.reshape(-1) if centred else None, rstd.reshape(-1)


@in_single(2, 3, 4)
def gate_adaln_backward_cpu(
    dz, dy, z, h, gate, shift, scale, mean, rstd, weight=None, dweight=None
):
    if z.dtype != np.float32:
        return gate_adaln_backward_reference(
            dz, dy, z, h, gate, shift, scale, mean, rstd, weight, dweight
        )
    B, T, C = z.shape
    factor, rstd = _factors(scale, weight), rstd.reshape(B, T)
    dx, dh = np.empty(z.shape, np.float32), None if h is None else np.empty(z.shape, np.float32)
    dgate, dshift, dscale = (
        np.zeros((B, C), np.float32) if wanted else None
        for wanted in (h is not None, shift is not None, True)
    )
    tokens = [_given(array, B, 2) for array in (dz, dy, z, h)]
    vectors = (
        _given(gate, B, 1),
        factor,
        _given(None if mean is None else mean.reshape(B, T), B, 1),
        rstd,
    )
    results = dx, _given(dh, B, 2), _given(dgate, B, 1), _given(dshift, B, 1), dscale

    def images(some):
        for b in range(some.start, some.stop):
            given = (array[b] for array in (*tokens, *vectors))
            differentiate_tokens(*given, tuple(array[b] for array in results))

    over_batch(images, B, z.size // PARALLEL_THRESHOLD_FACTOR)
    if dweight is not None:
        dweight += ((1 + scale) * dscale).sum(0)  # without the weight as yet
    if weight is not None:
        dscale *= weight
    return dx, dh, dgate, dshift, dscale
