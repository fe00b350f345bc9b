"""Convolutions: dense ones, and depthwise ones, also with the LayerNorm that follows."""
from ... import kernels as K
from ..parameter import Parameter
from ..tensor import Tensor, record
from .gradients import gradient_of, gradient_to_fill, trains


def conv2d(x: Tensor, weight: Parameter, bias: Parameter | None = None, stride: int = 1, channel: Tensor | None = None,
           residual: Tensor | None = None, statistics: bool = False) -> Tensor:
    """x (B, H, W, C_in), weight (C_out, k, k, C_in), zero padding k // 2 -> (B, H/stride, W/stride, C_out).

    channel, residual: tensors (B, C_out) and like the result, added to it, in the same kernel if that supports it
    statistics: keep those of the result for a `group_norm` that will read it, if a kernel computes them
    """
    saved, wants_dx = x.data, x.slot is not None
    wants_channel, adds = channel is not None, residual is not None  # `backward` must not keep the tensors

    def backward(dy, before):
        dweight, accumulate = gradient_to_fill(weight)
        gradients = K.conv2d_backward(dy, saved, weight.like(saved), dweight, gradient_of(bias), stride, wants_dx,
                                      need_channel=wants_channel, residual=before, accumulate=accumulate)
        gradients = [*gradients] if wants_channel else [gradients]
        if adds:
            gradients.append(dy)
        return gradients

    left = K.channel_statistics(saved, weight.like(saved), stride) if statistics else None
    y = K.conv2d_forward(saved, weight.like(saved), None if bias is None else bias.data, stride=stride,
                         channel=channel and channel.data, residual=residual and residual.data, statistics=left)
    inputs = [t for t in (x, channel, residual) if t is not None]
    result = record("conv2d", y, inputs, backward, has_parameters=trains(weight, bias), adds=True)
    result.statistics = left
    return result


def depthwise_conv2d(x: Tensor, weight: Parameter, bias: Parameter | None = None,
                     channel: Tensor | None = None) -> Tensor:
    """x (B, H, W, C), weight (k, k, C), zero padding k // 2 -> (B, H, W, C): each channel by itself.

    channel: a tensor (B, C), added to all pixels of an image in the same kernel
    """
    saved, wants_dx, wants_channel = x.data, x.slot is not None, channel is not None

    def backward(dy, before):
        gradients = K.depthwise_backward(dy, saved, weight.like(saved), gradient_of(weight), gradient_of(bias),
                                         wants_dx, wants_channel, before)
        return gradients if wants_channel else (gradients,)

    y = K.depthwise_forward(saved, weight.like(saved), None if bias is None else bias.data, channel and channel.data)
    return record("depthwise_conv2d", y, (x,) if channel is None else (x, channel), backward,
                  has_parameters=trains(weight, bias), adds=True)


def depthwise_layer_norm(x: Tensor, weight: Parameter, bias: Parameter, channel: Tensor, gain: Parameter,
                         offset: Parameter, eps: float = 1e-6) -> Tensor:
    """`depthwise_conv2d`, then `layer_norm` with gain and offset (C,): one kernel, where that is faster. Backward
    the sums for gain, offset, bias and channel come with the norm's own pass."""
    saved, wants_dx = x.data, x.slot is not None
    h, y, mean, rstd = K.depthwise_layernorm_forward(saved, weight.like(saved), bias.data, channel.data, gain.data,
                                                     offset.data, eps)

    def backward(dy, before):
        gradients = [gradient_of(parameter) for parameter in (weight, bias, gain, offset)]
        return K.depthwise_layernorm_backward(dy, saved, h, weight.like(saved), gain.data, mean, rstd, gradients,
                                              wants_dx, before)

    return record("depthwise_layer_norm", y, (x, channel), backward,
                  has_parameters=trains(weight, bias, gain, offset), adds=True)
