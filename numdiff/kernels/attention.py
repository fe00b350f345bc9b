"""Attention of every head, straight from the packed qkv."""
import math

import numpy as np

from ..device import is_device
from .softmax import softmax_backward, softmax_forward


def split_heads(qkv, heads, order):
    """Views of q, k and v as (B, heads, T, HS) in a packed NumPy array (B, T, 3C); nothing is copied."""
    B, T, width = qkv.shape
    HS = width // (3 * heads)
    if order == "legacy":
        return qkv.reshape(B, T, heads, 3, HS).transpose(3, 0, 2, 1, 4)
    return qkv.reshape(B, T, 3, heads, HS).transpose(2, 0, 3, 1, 4)


def merge_heads(y, heads):
    """View of a NumPy array (B, T, C) as (B, heads, T, HS)."""
    B, T, C = y.shape
    return y.reshape(B, T, heads, C // heads).transpose(0, 2, 1, 3)


def attention_forward_reference(qkv, heads, order="legacy"):
    B, T, width = qkv.shape
    q, k, v = split_heads(qkv, heads, order)
    scores = q @ k.swapaxes(-1, -2)
    probabilities = softmax_forward(scores, 1 / math.sqrt(q.shape[-1]), out=scores)
    y = np.empty((B, T, width // 3), qkv.dtype)
    np.matmul(probabilities, v, out=merge_heads(y, heads))
    return y, probabilities


def attention_backward_reference(dy, qkv, probabilities, heads, order="legacy"):
    q, k, v = split_heads(qkv, heads, order)
    dqkv = np.empty_like(qkv)
    dq, dk, dv = split_heads(dqkv, heads, order)
    dy = merge_heads(dy, heads)
    dprobabilities = dy @ v.swapaxes(-1, -2)
    dscores = softmax_backward(dprobabilities, probabilities, 1 / math.sqrt(q.shape[-1]), out=dprobabilities)
    np.matmul(probabilities.swapaxes(-1, -2), dy, out=dv)
    np.matmul(dscores, k, out=dq)
    np.matmul(dscores.swapaxes(-1, -2), q, out=dk)
    return dqkv


def check(qkv, heads, order):
    if qkv.ndim != 3 or qkv.shape[2] % (3 * heads):
        raise ValueError(f"qkv {qkv.shape} must be (B, T, 3C) with C a multiple of heads = {heads}")
    if order not in ("legacy", "new"):
        raise ValueError(f"unknown order {order!r} of the qkv channels: use 'legacy' or 'new'")


def attention_forward(qkv, heads, order="legacy"):
    """(y (B, T, C), probabilities (B, heads, T, T)) of qkv (B, T, 3C)."""
    check(qkv, heads, order)
    if not is_device(qkv):
        return attention_forward_reference(qkv, heads, order)
    raise NotImplementedError


def attention_backward(dy, qkv, probabilities, heads, order="legacy"):
    """dqkv (B, T, 3C) from dy (B, T, C) and what the forward took and gave."""
    check(qkv, heads, order)
    if not is_device(qkv):
        return attention_backward_reference(dy, qkv, probabilities, heads, order)
    raise NotImplementedError
