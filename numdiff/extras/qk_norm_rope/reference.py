"""QK-norm and rotary position embedding: what is computed, and what it costs.

MATHEMATICS, for each token and each head of q and k, x (HS,); the norm and the rotation may each be left out
        rstd = 1 / √(Σ x² / HS + eps)        xhat = x · rstd        z = xhat · weight,   one weight for q, one for k
        y = z · cos[t] + rotate_half(z) · sin[t],   rotate_half: neighbours (z0, z1) → (-z1, z0)
    v stays as it is. Backward, with averages over the head:
        dz0 = dy0 · cos0 + dy1 · sin1        dz1 = dy1 · cos1 - dy0 · sin0        dweight += Σ_tokens, heads dz · xhat
        dx = rstd · (h - xhat · average(h · xhat)),   h = dz · weight;   dv = dy's v
SHAPES
    qkv, y, dy, dqkv (B, T, 3 · D) float16 or float32, their channels [q, k, v][head][HS], D = heads · HS, HS even;
    kept (B, T, 2 · D) like them: q and k before; weights (HS,) and rotation (2, T, HS), cosines and sines: float32
IN PLACE
    A linear layer's backward does not need its result, so q and k may change in place and v need not move: the
    caller says so (`in_place`). What the backward needs of q and k is then copied on the way, if there is a norm and a
    backward; a rotation alone needs nothing. It is not recovered from y: a weight may be 0.
COST
    in passes over q or k of n elements: forward 4 in place, 6 with q and k kept or out of place. Backward of both 6 in
    place, 8 out of it; of a rotation alone 4 and 6. Roof: memory bandwidth.
SOURCE
    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4 (RMSNorm); Dehghani et al. 2023, arXiv:2302.05442, section 2 (norm
    of q and k); Su et al. 2021, arXiv:2104.09864, eq. 34 (rotation).
READ NEXT
    cpu.py
"""

import numpy as np

from ...device import over_batch
from ...dtypes import working_type


def _q_and_k(array, heads, HS):
    """View of q and k (T, 2, heads, HS) of one image in a NumPy array whose rows start with them."""
    return array.reshape(len(array), -1, heads, HS)[:, :2]


def _turned(x, rotation):
    """x · cos + rotate_half(x) · sin."""
    cos, sin = rotation[:, :, None, None]
    y = x * cos
    y[..., 0::2] -= x[..., 1::2] * sin[..., 0::2]
    y[..., 1::2] += x[..., 0::2] * sin[..., 1::2]
    return y


def _turned_back(dy, rotation):
    """The gradient of x from that of `_turned`."""
    cos, sin = rotation[:, :, None, None]
    dx = dy * cos
    dx[..., 0::2] += dy[..., 1::2] * sin[..., 1::2]
    dx[..., 1::2] -= dy[..., 0::2] * sin[..., 0::2]
    return dx


def _normalised(x, eps):
    """(xhat, rstd (…, 1)) over the last axis."""
    rstd = 1 / np.sqrt(
        np.einsum("...c,...c->...", x, x)[..., None] / x.shape[-1] + x.dtype.type(eps)
    )
    return x * rstd, rstd


def qk_norm_rope_forward_reference(qkv, y, heads, weights, rotation, eps):
    """Writes q and k of y, which may be qkv; weights: (2, HS) or None."""
    HS = qkv.shape[2] // (3 * heads)

    def image(b):
        x = _q_and_k(qkv[b], heads, HS).astype(working_type(qkv.dtype), copy=False)
        if weights is not None:
            x, _ = _normalised(x, eps)
            x *= weights[:, None]
        _q_and_k(y[b], heads, HS)[...] = x if rotation is None else _turned(x, rotation)

    over_batch(lambda some: [image(b) for b in range(some.start, some.stop)], len(qkv), qkv.size)


def qk_norm_rope_backward_reference(dy, kept, dqkv, heads, weights, rotation, eps):
    """Writes dq and dk of dqkv, which may be dy; returns the gradient of weights, (2, HS), or 0."""
    HS = dy.shape[2] // (3 * heads)

    def image(b):
        g, sums = _q_and_k(dy[b], heads, HS).astype(working_type(dy.dtype), copy=False), 0
        if rotation is not None:
            g = _turned_back(g, rotation)
        if weights is not None:
            xhat, rstd = _normalised(_q_and_k(kept[b], heads, HS).astype(g.dtype, copy=False), eps)
            sums = np.einsum("tphc,tphc->pc", g, xhat)
            g = g * weights[:, None]
            xhat *= np.einsum("...c,...c->...", g, xhat)[..., None] / HS
            g -= xhat
            g *= rstd
        _q_and_k(dqkv[b], heads, HS)[...] = g
        return sums

    return sum(
        over_batch(
            lambda some: sum(image(b) for b in range(some.start, some.stop)), len(dy), dy.size
        )
    )


def qk_norm_rope_forward_cost(
    B, T, C, heads, itemsize=4, norms=True, rotates=True, in_place=True, keeps=True
):
    """(bytes, FLOPs) of B images of T tokens, their q of C channels."""
    n, table = B * T * C, 8 * C // heads * (T * rotates + norms)
    return itemsize * n * (4 + 2 * (keeps and norms) if in_place else 6) + table, 2 * n * (
        4 * norms + 3 * rotates
    )


def qk_norm_rope_backward_cost(B, T, C, heads, itemsize=4, norms=True, rotates=True, in_place=True):
    n, table = B * T * C, 8 * C // heads * (T * rotates + 3 * norms)
    return itemsize * n * ((4 if in_place else 6) + 2 * norms) + table, 2 * n * (
        11 * norms + 3 * rotates
    )
