"""Attention."""

import numpy as np

from ... import kernels as K
from ...device import is_device
from ...dtypes import is_half
from ...kernels.attention import HEAD_SIZES, WIDE_HEADS, flash_attention_supports
from ..parameter import Parameter
from ..recording import is_training
from ..tensor import Tensor, record
from .elementwise import cast
from .products import linear


def attention(qkv: Tensor, heads: int, order: str = "legacy") -> Tensor:
    """Self-attention of packed qkv (B, T, 3C) -> (B, T, C); `order`: "legacy" (head, qkv, channel)
    or "new"."""
    saved = qkv.data
    size = saved.shape[-1] // (3 * heads)
    flash = (
        size in HEAD_SIZES or size in WIDE_HEADS and is_device(saved)
    ) and flash_attention_supports(saved, heads)
    if is_half(saved.dtype) and not flash:
        return cast(attention(cast(qkv, np.float32), heads, order), saved.dtype)
    if flash:
        # keeps one number per token and head; the other way keeps T
        y, logsumexp = K.flash_attention_forward(saved, heads, order)
        return record(
            "flash_attention",
            y,
            (qkv,),
            owning(
                qkv, lambda dy: K.flash_attention_backward(dy, saved, y, logsumexp, heads, order)
            ),
        )
    y, probabilities = K.attention_forward(saved, heads, order)
    return record(
        "attention",
        y,
        (qkv,),
        owning(qkv, lambda dy: K.attention_backward(dy, saved, probabilities, heads, order)),
    )


def single_head_attention(x: Tensor, weight: Parameter, bias: Parameter) -> Tensor:
    """`attention(linear(x, weight, bias), 1)` of x (B, T, C), weight (3C, C): in 16 bits on a
    device, without a tape and where flash attention has no such heads, by products of 16 bits."""
    given, C = x.data, x.shape[2]
    flash = C in HEAD_SIZES or C in WIDE_HEADS
    if is_training() or flash or not (is_device(given) and is_half(given.dtype)):
        return attention(linear(x, weight, bias), 1)
    own = weight.like(given)
    q, k, v = (K.linear_forward(given, own[n : n + C], bias.data[n : n + C]) for n in (0, C, 2 * C))
    return Tensor(K.single_head_attention_forward(q, k, v))


def owning(x, gradient):
    """The backward of an operation on one tensor x, whose `gradient(dy)` returns a new array
    without other references."""
    slot = x.slot

    def backward(dy):
        if slot is not None:
            slot.owned = True
        return (gradient(dy),)

    return backward
