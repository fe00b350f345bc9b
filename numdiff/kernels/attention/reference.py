"""Flash attention's reference in NumPy, and its cost.

MATHEMATICS, for each image and head, q k v y dy (T, HS), rows i over queries, columns j over keys
    forward    S_ij = q_i·k_j / √HS        L_i = ln Σ_j e^S_ij        P_ij = e^(S_ij − L_i)        y_i = Σ_j P_ij v_j
    backward   dv_j = Σ_i P_ij dy_i        dP_ij = dy_i·v_j           dS_ij = P_ij (dP_ij − D_i)
               dq_i = Σ_j dS_ij k_j / √HS                             dk_j = Σ_i dS_ij q_i / √HS
    The softmax's gradient needs D_i = Σ_j P_ij dP_ij, a sum over all keys. But Σ_j P_ij (dy_i·v_j)
    = dy_i·Σ_j P_ij v_j = dy_i·y_i: it is a dot product of two rows that are there already. And L_i,
    one number a row (`logsumexp`), is all that has to be kept of the T × T probabilities: with it
    any P_ij can be computed again from q_i and k_j alone.
THE ONLINE SOFTMAX
    Keys come in tiles. After some of them a row has m, the largest S so far, l = Σ e^(S − m) and o
    = Σ e^(S − m) v. A tile that raises the maximum to m' first multiplies l and o by e^(m − m'). In
    the end y = o / l and L = m + ln l.
SHAPES
    qkv (B, T, 3C), C = heads · HS; y, dy (B, T, C); logsumexp (B, heads, T) the channels of qkv are
    [head][q, k, v][HS] in order "legacy", [q, k, v][head][HS] in order "new"
SOURCE
    Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithms 1 and 4; the online softmax:
    Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.
READ NEXT
    heads.py; the first kernels: ../../extras/levels/attention/simple.py.
"""

import math

import numpy as np

from ...device import over_batch
from ...dtypes import in_single
from .unfused import merge_heads, split_heads

# scores in a working set: 256 KiB of float32, half of a small core's own cache
MAX_SCORES = 1 << 17


def pieces(part, heads, T):
    """Slices (images, heads, queries) that cut the scores of images `part` into working sets."""
    images = max(1, MAX_SCORES // (heads * T * T))
    some = max(1, min(heads, MAX_SCORES // (T * T)))
    rows = max(1, min(T, MAX_SCORES // T))
    return [
        (
            slice(b, min(b + images, part.stop)),
            slice(h, min(h + some, heads)),
            slice(t, min(t + rows, T)),
        )
        for b in range(part.start, part.stop, images)
        for h in range(0, heads, some)
        for t in range(0, T, rows)
    ]


@in_single(1)
def flash_attention_forward_reference(qkv, heads, order="legacy"):
    B, T, width = qkv.shape
    q, k, v = split_heads(qkv, heads, order)
    y, logsumexp = np.empty((B, T, width // 3), qkv.dtype), np.empty((B, heads, T), qkv.dtype)
    out, scale = merge_heads(y, heads), qkv.dtype.type(1 / math.sqrt(q.shape[-1]))

    def work(part):
        for b, h, t in pieces(part, heads, T):
            s = np.matmul(q[b, h, t] * scale, k[b, h].swapaxes(-1, -2))
            m = s.max(axis=-1, keepdims=True)
            s -= m
            np.exp(s, out=s)
            l = s.sum(axis=-1, keepdims=True)
            np.divide(np.matmul(s, v[b, h]), l, out=out[b, h, t])
            logsumexp[b, h, t] = (m + np.log(l))[..., 0]

    over_batch(work, B, B * heads * T * T + qkv.size)
    return y, logsumexp


@in_single()
def flash_attention_backward_reference(dy, qkv, y, logsumexp, heads, order="legacy"):
    B, T, _ = qkv.shape
    dqkv = np.empty_like(qkv)
    q, k, v = split_heads(qkv, heads, order)
    dq, dk, dv = split_heads(dqkv, heads, order)
    y, dy, scale = (
        merge_heads(y, heads),
        merge_heads(dy, heads),
        qkv.dtype.type(1 / math.sqrt(q.shape[-1])),
    )

    def work(part):
        for b, h, t in pieces(part, heads, T):
            # one column more in each operand, and the products are S − L and dP − D: two passes
            # over the scores less
            sq, g = q[b, h, t] * scale, dy[b, h, t]
            D = np.einsum("...d,...d->...", g, y[b, h, t])
            p = np.matmul(
                with_column(sq, -logsumexp[b, h, t]), with_column(k[b, h], 1).swapaxes(-1, -2)
            )
            np.exp(p, out=p)
            add_keys(dv[b, h], np.matmul(p.swapaxes(-1, -2), g), t)
            ds = np.matmul(with_column(g, -D), with_column(v[b, h], 1).swapaxes(-1, -2))
            ds *= p
            np.multiply(np.matmul(ds, k[b, h]), scale, out=dq[b, h, t])
            add_keys(dk[b, h], np.matmul(ds.swapaxes(-1, -2), sq), t)

    over_batch(work, B, B * heads * T * T + qkv.size)
    return dqkv


def with_column(x, column):
    """x (..., T, HS) with one more column."""
    wider = np.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    wider[..., :-1], wider[..., -1] = x, column
    return wider


def add_keys(total, share, queries):
    """Add some queries' part to all keys' gradients; the first queries start the sum."""
    if queries.start:
        total += share
    else:
        total[...] = share


def flash_attention_forward_cost(B, T, C, heads):
    """(bytes, FLOPs): qkv read, y and logsumexp written; two products of T × T × HS a head."""
    return 4 * (4 * B * T * C + B * heads * T), 4 * B * T * T * C


def flash_attention_backward_cost(B, T, C, heads):
    """qkv, y, dy and logsumexp read, dqkv written; five products: the scores again, dP, dv, dk and
    dq."""
    return 4 * (8 * B * T * C + B * heads * T), 10 * B * T * T * C
