"""Attention of every head, straight from the packed qkv: matmul, softmax, matmul.

MATHEMATICS, for each image and head, q k v (T, HS)
    S = q·kᵀ / √HS        P = softmax(S), row by row        y = P·v
    dv = Pᵀ·dy            dP = dy·vᵀ                        dS = P ∘ (dP − rows' Σ dP ∘ P)   (softmax.py)
    dq = dS·k / √HS       dk = dSᵀ·q / √HS
SHAPES
    qkv (B, T, 3C) float32, C = heads · HS; y (B, T, C); probabilities (B, heads, T, T) the channels
    of qkv are [head][q, k, v][HS] in order "legacy", [q, k, v][head][HS] in order "new"
VERSIONS
    those of matmul/ and softmax.py. q, k and v are never taken out of qkv: the matmul kernels
    receive the address of their rows (a stride of 3C) and of the next head, and y is written as the
    next layer reads it, heads side by side.
    `single_head_attention_forward` is for inference in 16 bits with one head of any size, such as an autoencoder's of
    512 channels: q, k and v are three arrays, so that Hopper's matmul takes them. Products are summed in float32, the
    scores stay float32, and the probabilities are rounded once.
LAUNCH
    forward three launches, backward five; batch B · heads.
DETERMINISM
    as its parts.
COST
    forward 4·B·heads·T²·HS FLOPs, backward twice that; the probabilities are written, rewritten and
    read: 4·B·heads·T² bytes each time, which is the roof for small HS.
SOURCE
    Vaswani et al. 2017, arXiv:1706.03762, eq. 1. The two orders: guided-diffusion's
    QKVAttentionLegacy and QKVAttention.
READ NEXT
    reference.py, where one number a row is kept instead of T probabilities.
"""

import functools
import math

import numpy as np

from ...device import empty, over_batch
from ...dtypes import in_single
from ..matmul import Matrices, matmul_forward, matmul_strided
from ..operation import Problem, half, operation, single
from ..softmax import (
    softmax_backward,
    softmax_backward_reference,
    softmax_forward,
    softmax_forward_reference,
)

# References ---------------------------------------------------------------------------------------


def split_heads(qkv, heads, order):
    """Views of q, k and v as (B, heads, T, HS) in a packed NumPy array (B, T, 3C); nothing is
    copied."""
    B, T, width = qkv.shape
    HS = width // (3 * heads)
    if order == "legacy":
        return qkv.reshape(B, T, heads, 3, HS).transpose(3, 0, 2, 1, 4)
    return qkv.reshape(B, T, 3, heads, HS).transpose(2, 0, 3, 1, 4)


def merge_heads(y, heads):
    """View of a NumPy array (B, T, C) as (B, heads, T, HS)."""
    B, T, C = y.shape
    return y.reshape(B, T, heads, C // heads).transpose(0, 2, 1, 3)


@in_single()
def attention_forward_reference(qkv, heads, order="legacy"):
    B, T, width = qkv.shape
    q, k, v = split_heads(qkv, heads, order)
    y, probabilities = (
        np.empty((B, T, width // 3), qkv.dtype),
        np.empty((B, heads, T, T), qkv.dtype),
    )

    def images(i):
        scores = np.matmul(q[i], k[i].swapaxes(-1, -2), out=probabilities[i])
        softmax_forward_reference(scores, 1 / math.sqrt(q.shape[-1]), out=scores)
        np.matmul(scores, v[i], out=merge_heads(y[i], heads))

    over_batch(images, B, probabilities.size + qkv.size)
    return y, probabilities


@in_single()
def attention_backward_reference(dy, qkv, probabilities, heads, order="legacy"):
    q, k, v = split_heads(qkv, heads, order)
    dqkv = np.empty_like(qkv)
    dq, dk, dv = split_heads(dqkv, heads, order)
    dy = merge_heads(dy, heads)

    def images(i):
        p = probabilities[i]
        np.matmul(p.swapaxes(-1, -2), dy[i], out=dv[i])
        dp = np.matmul(dy[i], v[i].swapaxes(-1, -2))
        ds = softmax_backward_reference(dp, p, 1 / math.sqrt(q.shape[-1]), out=dp)
        np.matmul(ds, k[i], out=dq[i])
        np.matmul(ds.swapaxes(-1, -2), q[i], out=dk[i])

    over_batch(images, len(qkv), probabilities.size + qkv.size)
    return dqkv


# Where the matrices are ---------------------------------------------------------------------------


def qkv_matrices(qkv, heads, order):
    """q, k and v as `Matrices` (T, HS): outer batch the images, inner batch the heads."""
    _, T, width = qkv.shape
    HS = width // (3 * heads)
    head, part = (3 * HS, HS) if order == "legacy" else (HS, heads * HS)
    return [Matrices(qkv, width, 1, outer=T * width, inner=head, start=i * part) for i in range(3)]


def y_matrices(y, heads):
    """Each head's columns of y (B, T, C) as `Matrices` (T, HS)."""
    _, T, C = y.shape
    return Matrices(y, C, 1, outer=T * C, inner=C // heads)


def square_matrices(p):
    """Scores or probabilities (B, heads, T, T) as `Matrices` (T, T)."""
    _, heads, T, _ = p.shape
    return Matrices(p, T, 1, outer=heads * T * T, inner=T * T)


# Cost ---------------------------------------------------------------------------------------------


def attention_forward_cost(B, T, C, heads):
    """(bytes, FLOPs): qkv read, y written, the probabilities written, rewritten by the softmax and
    read back."""
    return 4 * (4 * B * T * C + 4 * B * heads * T * T), 4 * B * T * T * C + 5 * B * heads * T * T


def attention_backward_cost(B, T, C, heads):
    """qkv read, dy read twice, dqkv written; P read twice, dS written, rewritten and read twice."""
    return 4 * (8 * B * T * C + 7 * B * heads * T * T), 8 * B * T * T * C + 5 * B * heads * T * T


# Operations ---------------------------------------------------------------------------------------


def check(qkv, heads, order):
    if qkv.ndim != 3 or qkv.shape[2] % (3 * heads):
        raise ValueError(f"qkv {qkv.shape} must be (B, T, 3C) with C a multiple of heads = {heads}")
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r} of the qkv channels: use 'legacy' or 'new'")


ORDERS = "legacy", "new"
SMALL = {"qkv": single(1, 5, 24), "heads": 2}


def _probabilities(made, order):
    _, probabilities = attention_forward_reference(
        made["qkv"].astype(np.float64), SMALL["heads"], order
    )
    return {"probabilities": probabilities.astype(np.float32)}


@operation(
    reference=attention_forward_reference,
    cost=attention_forward_cost,
    check=check,
    problems=[
        *(Problem(order, fast=order == "legacy", **SMALL, order=order) for order in ORDERS),
        Problem(qkv=single(32, 256, 3 * 192), heads=6, measured=True),
    ],
)
def attention_forward(qkv, heads, order="legacy"):
    """(y (B, T, C), probabilities (B, heads, T, T)) of qkv (B, T, 3C)."""
    B, T, width = qkv.shape
    HS = width // (3 * heads)
    q, k, v = qkv_matrices(qkv, heads, order)
    y, probabilities = empty((B, T, width // 3), like=qkv), empty((B, heads, T, T), like=qkv)
    p = square_matrices(probabilities)
    matmul_strided(q, k.T, p, T, T, HS, B, heads)
    softmax_forward(probabilities, 1 / math.sqrt(HS), out=probabilities)
    matmul_strided(p, v, y_matrices(y, heads), T, HS, T, B, heads)
    return y, probabilities


@operation(
    reference=attention_backward_reference,
    cost=attention_backward_cost,
    check=check,
    problems=[
        *(
            Problem(
                order,
                fast=order == "legacy",
                dy=single(1, 5, 8),
                probabilities=single(1, 2, 5, 5),
                derived=functools.partial(_probabilities, order=order),
                **SMALL,
                order=order,
            )
            for order in ORDERS
        ),
        Problem(
            dy=single(32, 256, 192),
            qkv=single(32, 256, 3 * 192),
            probabilities=single(32, 6, 256, 256),
            heads=6,
            measured=True,
        ),
    ],
)
def attention_backward(dy, qkv, probabilities, heads, order="legacy"):
    """dqkv (B, T, 3C) from dy (B, T, C) and what the forward took and gave."""
    B, T, width = qkv.shape
    HS = width // (3 * heads)
    dqkv, dscores = empty(qkv.shape, like=qkv), empty(probabilities.shape, like=qkv)
    q, k, v = qkv_matrices(qkv, heads, order)
    dq, dk, dv = qkv_matrices(dqkv, heads, order)
    g, p, ds = y_matrices(dy, heads), square_matrices(probabilities), square_matrices(dscores)
    matmul_strided(p.T, g, dv, T, HS, T, B, heads)
    matmul_strided(g, v.T, ds, T, T, HS, B, heads)  # dP, which becomes dS in place
    softmax_backward(dscores, probabilities, 1 / math.sqrt(HS), out=dscores)
    matmul_strided(ds, k, dq, T, HS, T, B, heads)
    matmul_strided(ds.T, q, dk, T, HS, T, B, heads)
    return dqkv


# One head in 16 bits -------------------------------------------------------------------------------


@in_single()
def single_head_attention_reference(q, k, v):
    scores = np.matmul(q, k.swapaxes(-1, -2))
    return np.matmul(softmax_forward_reference(scores, 1 / math.sqrt(q.shape[-1]), out=scores), v)


def single_head_attention_cost(B, T, C):
    """(bytes, FLOPs): the scores are written and read in float32, the probabilities in 16 bits."""
    return 8 * B * T * C + 12 * B * T * T, 4 * B * T * T * C + 5 * B * T * T


def _check_single(q, k, v):
    if not q.shape == k.shape == v.shape or q.ndim != 3:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} must be of one shape (B, T, C)")


@operation(
    reference=single_head_attention_reference,
    cost=lambda q: single_head_attention_cost(*q.shape),
    check=_check_single,
    problems=[
        Problem(q=half(2, 24, 16), k=half(2, 24, 16), v=half(2, 24, 16), bfloat16="exhaustive"),
        Problem(
            q=half(32, 1024, 512), k=half(32, 1024, 512), v=half(32, 1024, 512), measured="not yet"
        ),
    ],
)
def single_head_attention_forward(q, k, v):
    """softmax(q·kᵀ / √C)·v, a new array (B, T, C) like q, k and v, float16 or bfloat16."""
    scores = matmul_forward(q, k, transpose_b=True, out_dtype=np.float32)  # (B, T, T)
    p = softmax_forward(
        scores, 1 / math.sqrt(q.shape[-1]), out=empty(scores.shape, q.dtype, like=q)
    )
    return matmul_forward(p, v)
