"""Sparse-linear attention as a differentiable operation."""

from ... import kernels as K
from ...nn.functional.arguments import checked
from ...nn.functional.attentions import owning
from ...nn.functional.gradients import gradient_of
from ...nn.parameter import Parameter
from ...nn.recording import is_recording
from ...nn.tensor import Tensor, record


@checked
def sparse_linear_attention(
    qkv: Tensor,
    heads: int,
    topk: float,
    weight: Parameter,
    bias: Parameter,
    order: str = "legacy",
    all_keys: bool = False,
) -> Tensor:
    """Softmax attention to the share `topk` of the blocks of 64 keys, linear attention to the
    others, projected by weight (HS, HS) and bias (HS,): packed qkv (B, T, 3C) -> (B, T, C); `order`
    as in `attention`. all_keys: whether the linear part takes all keys instead."""
    saved = qkv.data
    y, kept = K.sla_forward(
        saved,
        weight.like(saved),
        bias.data,
        heads,
        topk,
        order,
        keeps=is_recording(),
        all_keys=all_keys,
    )

    def gradient(dy):
        return K.sla_backward(
            dy,
            saved,
            y,
            kept,
            weight.like(saved),
            bias.data,
            gradient_of(weight),
            gradient_of(bias),
            heads,
            order,
            all_keys=all_keys,
        )

    return record(
        "sparse_linear_attention",
        y,
        (qkv,),
        owning(qkv, gradient),
        parameters=(weight, bias),
    )
