"""Convolutions."""

from ... import kernels as K
from ..parameter import Parameter
from ..recording import is_training
from ..tensor import Tensor, record
from .gradients import gradient_of, gradient_to_fill
from .movement import upsample, window


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


def upsampled_conv2d(
    x: Tensor, weight: Parameter, bias: Parameter, statistics: bool = False
) -> Tensor:
    """`conv2d(upsample(x), weight, bias)`, without a tape in one kernel where there is one."""
    given, own = x.data, weight.like(x.data)
    if is_training() or not K.resampled_supports(given, own):
        return conv2d(upsample(x), weight, bias, statistics=statistics)
    left = K.resampled_statistics(given, own) if statistics else None
    return Tensor(
        K.upsampled_conv2d_forward(given, own, bias.data, statistics=left), statistics=left
    )


def halved_conv2d(
    x: Tensor, weight: Parameter, bias: Parameter, statistics: bool = False
) -> Tensor:
    """3 × 3 convolution of stride 2 of x (B, H, W, C), H and W even, whose zero padding is at the
    bottom and at the right alone: (B, H / 2, W / 2, N); without a tape in one kernel where there is
    one."""
    given, own = x.data, weight.like(x.data)
    _, H, W, _ = x.shape
    if is_training() or not K.resampled_supports(given, own, True):
        # the convolution pads each side by one: two rows more at the top and the left of its
        # result's first are dropped
        y = conv2d(window(x, -1, -1, H + 2, W + 2), weight, bias, 2)  # (B, H/2 + 1, W/2 + 1, C)
        return window(y, 1, 1, H // 2, W // 2)
    left = K.resampled_statistics(given, own, True) if statistics else None
    return Tensor(K.halved_conv2d_forward(given, own, bias.data, statistics=left), statistics=left)
