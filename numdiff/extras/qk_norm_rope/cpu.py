"""QK-norm and rotation on the CPU engine: loops compiled for the host, q and k of a token at a
time.

MATHEMATICS
    that of reference.py, whose dozen passes over an image are one here.
SHAPES
    as in reference.py; float32. In other types the reference itself is
    used, in float64 as what results are compared with.
LAYOUT
    q and k of a token are a row of n = 2 · heads · HS numbers. The loops go over all of it, as one
    over a head would end before it has paid for its beginning; what belongs to a head, or to the
    token, comes from rows that repeat it. rotate_half(z) · sin is the row with each two neighbours
    exchanged, times sines that have their signs. What both passes do is written out in both: a
    separate function, which must take its arrays for overlapping, takes twice as long.
DETERMINISM
    a head's sums are taken by reductions.py; those over tokens in their order, image by image. The
    cores share the images.
SOURCE
    reference.py.
READ NEXT
    naive.py
"""

import math

import numpy as np

from ...device import on_host, over_batch
from ...kernels.cpu.reductions import dot
from .reference import (
    qk_norm_rope_backward_reference,
    qk_norm_rope_forward_reference,
)

PARALLEL_THRESHOLD_FACTOR = 3  # an element is 3 times cheaper than the threshold assumes
ONE = np.float32(1)


# Loops, compiled for the host ---------------------------------------------------------------------


@on_host
def turn_tokens(x, y, weight, cos, sin, eps):
    """The forward pass of an image's tokens. x, y (T, …), whose rows begin with q and k; weight
    (n,), of each number; cos, sin (T or 0, HS), sines with their signs; eps: negative where there
    is no norm"""
    n, HS = len(weight), cos.shape[1]
    z, exchanged, rstd = np.empty(n, np.float32), np.empty(n, np.float32), np.ones(n, np.float32)
    u, v = np.empty(n, np.float32), np.empty(n, np.float32)
    for t in range(len(x)):
        a, out = x[t], y[t]
        if eps >= 0:
            for first in range(0, n, HS):
                head, own = a[first : first + HS], rstd[first : first + HS]
                r = ONE / math.sqrt(dot(head, head) / np.float32(HS) + eps)
                for c in range(HS):
                    own[c] = r
        for i in range(n):
            z[i] = a[i] * rstd[i] * weight[i]
        if len(cos):
            for first in range(0, n, HS):
                own_u, own_v = u[first : first + HS], v[first : first + HS]
                for c in range(HS):
                    own_u[c] = cos[t, c]
                    own_v[c] = sin[t, c]
            for i in range(n // 2):
                exchanged[2 * i] = z[2 * i + 1]
                exchanged[2 * i + 1] = z[2 * i]
            for i in range(n):
                z[i] = z[i] * u[i] + exchanged[i] * v[i]
        for i in range(n):
            out[i] = z[i]


@on_host
def turn_tokens_back(dy, kept, dx, weight, cos, sin, eps, of_weight):
    """The backward pass of an image's tokens, with the sines of `turn_tokens`, each two exchanged;
    adds to of_weight (n,), Σ_tokens dz · xhat."""
    n, HS = len(weight), cos.shape[1]
    g, exchanged, xhat = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.float32)
    u, v, rstd, average = np.empty((4, n), np.float32)
    for t in range(len(dy)):
        d, out = dy[t], dx[t]
        for i in range(n):
            g[i] = d[i]
        if len(cos):
            for first in range(0, n, HS):
                own_u, own_v = u[first : first + HS], v[first : first + HS]
                for c in range(HS):
                    own_u[c] = cos[t, c]
                    own_v[c] = sin[t, c]
            for i in range(n // 2):
                exchanged[2 * i] = g[2 * i + 1]
                exchanged[2 * i + 1] = g[2 * i]
            for i in range(n):
                g[i] = g[i] * u[i] + exchanged[i] * v[i]
        if eps >= 0:
            a = kept[t]
            for first in range(0, n, HS):
                head, own = a[first : first + HS], rstd[first : first + HS]
                r = ONE / math.sqrt(dot(head, head) / np.float32(HS) + eps)
                for c in range(HS):
                    own[c] = r
            for i in range(n):
                xhat[i] = a[i] * rstd[i]
                of_weight[i] += g[i] * xhat[i]
                g[i] *= weight[i]
            for first in range(0, n, HS):
                own, mean = (
                    average[first : first + HS],
                    dot(g[first : first + HS], xhat[first : first + HS]),
                )
                for c in range(HS):
                    own[c] = mean / np.float32(HS)
            for i in range(n):
                g[i] = (g[i] - xhat[i] * average[i]) * rstd[i]
        for i in range(n):
            out[i] = g[i]


# Launchers ----------------------------------------------------------------------------------------


def _given(heads, HS, weights, rotation, eps):
    """(weight, cos, sin, eps) as `turn_tokens` takes them."""
    weight = (
        np.ones(2 * heads * HS, np.float32)
        if weights is None
        else np.repeat(weights, heads, 0).reshape(-1)
    )
    cos, sin = (
        np.empty((2, 0, HS), np.float32) if rotation is None else (rotation[0], rotation[1].copy())
    )
    sin[:, 0::2] *= -1
    return weight, cos, sin, np.float32(-1 if weights is None else eps)


def _takes(*arrays):
    return all(array.dtype == np.float32 and array.flags.c_contiguous for array in arrays)


def qk_norm_rope_forward_cpu(qkv, y, heads, weights, rotation, eps):
    """Writes q and k of y, which may be qkv; weights: (2, HS) or None."""
    if not _takes(qkv, y):
        return qk_norm_rope_forward_reference(qkv, y, heads, weights, rotation, eps)
    given = _given(heads, qkv.shape[2] // (3 * heads), weights, rotation, eps)

    def images(some):
        for b in range(some.start, some.stop):
            turn_tokens(qkv[b], y[b], *given)

    over_batch(images, len(qkv), qkv.size // PARALLEL_THRESHOLD_FACTOR)


def qk_norm_rope_backward_cpu(dy, kept, dqkv, heads, weights, rotation, eps):
    """Writes dq and dk of dqkv, which may be dy; returns the gradient of weights, (2, HS)."""
    if not _takes(dy, dqkv) or weights is not None and not _takes(kept):
        return qk_norm_rope_backward_reference(dy, kept, dqkv, heads, weights, rotation, eps)
    HS = dy.shape[2] // (3 * heads)
    weight, cos, sin, eps = _given(heads, HS, weights, rotation, eps)
    sin = sin.reshape(-1, HS // 2, 2)[..., ::-1].reshape(-1, HS)  # the transpose of the rotation
    kept = dy if weights is None else kept  # without a norm it is not read
    sums = np.zeros((len(dy), len(weight)), np.float32)

    def images(some):
        for b in range(some.start, some.stop):
            turn_tokens_back(dy[b], kept[b], dqkv[b], weight, cos, sin, eps, sums[b])

    over_batch(images, len(dy), dy.size // PARALLEL_THRESHOLD_FACTOR)
    return sums.reshape(-1, 2, heads, HS).sum((0, 2))
