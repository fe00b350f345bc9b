"""Depthwise convolution as a differentiable operation, also with the LayerNorm that follows."""

from ... import kernels as K
from ...nn.functional.arguments import checked
from ...nn.functional.gradients import gradient_of
from ...nn.parameter import Parameter
from ...nn.tensor import Tensor, record


@checked
def depthwise_conv2d(
    x: Tensor, weight: Parameter, bias: Parameter | None = None, channel: Tensor | None = None
) -> Tensor:
    """x (B, H, W, C), weight (k, k, C), zero padding k // 2 -> (B, H, W, C): each channel by
    itself.

    channel: a tensor (B, C), added to all pixels of an image in the same kernel
    """
    saved, wants_dx, wants_channel = x.data, x.slot is not None, channel is not None

    def backward(dy, before):
        gradients = K.depthwise_backward(
            dy,
            saved,
            weight.like(saved),
            gradient_of(weight),
            gradient_of(bias),
            wants_dx,
            wants_channel,
            before,
        )
        return gradients if wants_channel else (gradients,)

    y = K.depthwise_forward(
        saved, weight.like(saved), None if bias is None else bias.data, channel and channel.data
    )
    return record(
        "depthwise_conv2d",
        y,
        (x,) if channel is None else (x, channel),
        backward,
        parameters=(weight, bias),
        adds=True,
    )


@checked
def depthwise_layer_norm(
    x: Tensor,
    weight: Parameter,
    bias: Parameter,
    channel: Tensor,
    gain: Parameter,
    offset: Parameter,
    eps: float = 1e-6,
) -> Tensor:
    """`depthwise_conv2d`, then `layer_norm` with gain and offset (C,). Backward the sums for gain,
    offset, bias and channel come with the norm's own pass."""
    saved, wants_dx = x.data, x.slot is not None
    h, y, mean, rstd = K.depthwise_layernorm_forward(
        saved, weight.like(saved), bias.data, channel.data, gain.data, offset.data, eps
    )

    def backward(dy, before):
        gradients = [gradient_of(parameter) for parameter in (weight, bias, gain, offset)]
        return K.depthwise_layernorm_backward(
            dy, saved, h, weight.like(saved), gain.data, mean, rstd, gradients, wants_dx, before
        )

    return record(
        "depthwise_layer_norm",
        y,
        (x, channel),
        backward,
        parameters=(weight, bias, gain, offset),
        adds=True,
    )
