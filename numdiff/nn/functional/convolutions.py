"""Convolutions."""

from ... import kernels as K
from ..parameter import Parameter
from ..tensor import Tensor, record
from .gradients import gradient_of, gradient_to_fill


def conv2d(
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None = None,
    stride: int = 1,
    channel: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: bool = False,
) -> Tensor:
    """x (B, H, W, C_in), weight (C_out, k, k, C_in), zero padding k // 2 -> (B, H/stride, W/stride,
    C_out).

    channel, residual: tensors (B, C_out) and like the result, added to it, in the same kernel if
    that supports it
    statistics: keep those of the result for a `group_norm` that will read it, if a kernel computes
    them
    """
    saved, wants_dx = x.data, x.slot is not None
    # `backward` must not keep the tensors
    wants_channel, adds = channel is not None, residual is not None

    def backward(dy, before):
        dweight, accumulate = gradient_to_fill(weight)
        gradients = K.conv2d_backward(
            dy,
            saved,
            weight.like(saved),
            dweight,
            gradient_of(bias),
            stride,
            wants_dx,
            need_channel=wants_channel,
            residual=before,
            accumulate=accumulate,
        )
        gradients = [*gradients] if wants_channel else [gradients]
        if adds:
            gradients.append(dy)
        return gradients

    left = K.channel_statistics(saved, weight.like(saved), stride) if statistics else None
    y = K.conv2d_forward(
        saved,
        weight.like(saved),
        None if bias is None else bias.data,
        stride=stride,
        channel=channel and channel.data,
        residual=residual and residual.data,
        statistics=left,
    )
    inputs = [t for t in (x, channel, residual) if t is not None]
    result = record("conv2d", y, inputs, backward, parameters=(weight, bias), adds=True)
    result.statistics = left
    return result
