"""Attention, and what is done to its q and k before."""

import numpy as np

from ... import kernels as K
from ...device import AnyArray, is_device
from ...dtypes import is_half
from ...kernels.attention import HEAD_SIZES, WIDE_HEADS, flash_attention_supports
from ..parameter import Parameter
from ..recording import is_recording
from ..tensor import Tensor, record
from .elementwise import cast
from .gradients import gradient_of


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


def owning(x, gradient):
    """The backward of an operation on one tensor x, whose `gradient(dy)` returns a new array
    without other references."""
    slot = x.slot

    def backward(dy):
        if slot is not None:
            slot.owned = True
        return (gradient(dy),)

    return backward


def qk_norm_rope(
    qkv: Tensor,
    heads: int,
    q_weight: Parameter | None = None,
    k_weight: Parameter | None = None,
    rotation: AnyArray | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """q and k of each head of packed qkv (B, T, 3 · D), order "new": RMSNorm over the head with the
    weights (HS,), then the rotation, an array (2, T, HS) of cosines and sines, each where it is
    given. For `attention` (B, T, 3 · D).

    A qkv that comes from `linear` is overwritten, and gone afterwards: nothing else may read it.
    """
    if q_weight is None and k_weight is None and rotation is None:
        return qkv
    in_place = qkv.owned
    y, kept = K.qk_norm_rope_forward(
        qkv.data,
        heads,
        q_weight and q_weight.data,
        k_weight and k_weight.data,
        rotation,
        eps,
        in_place=in_place,
        keeps=is_recording(),
    )

    def backward(dy):
        return (
            K.qk_norm_rope_backward(
                dy,
                kept,
                heads,
                q_weight and q_weight.data,
                k_weight and k_weight.data,
                rotation,
                gradient_of(q_weight),
                gradient_of(k_weight),
                eps,
                in_place=slot.owned,
            ),
        )

    result = record("qk_norm_rope", y, (qkv,), backward, parameters=(q_weight, k_weight))
    slot = result.slot
    if in_place:
        qkv.data = None
    return result
