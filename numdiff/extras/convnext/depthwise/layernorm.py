"""Depthwise convolution, then the LayerNorm over its channels: how a ConvNeXt block begins.

MATHEMATICS
    h = the depthwise convolution of x, plus bias[c] and channel[b,c] (reference.py) y = (h - mean)
    · rstd · gain[c] + offset[c], mean and rstd of each pixel over its channels
    (extras/layer_norm/layernorm.py) The backward is that of both: dh from extras/layer_norm/layernorm.py, whose pass
    also adds it up over each image, which is the gradient of channel; dx and the parameters'
    gradients from reference.py.
SHAPES
    x, h, y (B, H, W, C); weight (kernel, kernel, C) like x; bias, gain, offset (C,), channel (B,
    C), mean, rstd (B · H · W,) float32
WHY IT IS NOT ONE KERNEL
    A kernel of both has to convolve all channels of a tile before it can normalise a pixel. With
    the products of mma.py it took 30.8 µs on an H200 for 32×32×32×128, where the two kernels take
    25.0: its blocks wait for each slice of channels, and reading h again, which it saves, takes 3
    µs.
COST
    2·pixels·C·kernel² FLOPs and 8 more for each number of the norm; x read, h written and read, y
    written.
SOURCE
    Liu et al. 2022, "A ConvNet for the 2020s", arXiv:2201.03545, figure 4.
READ NEXT
    ../block.py
"""

from .... import kernels as K
from ....kernels.operation import Problem, filled, half, operation, single
from .launcher import depthwise_backward, depthwise_forward
from .reference import depthwise_forward_cost


def depthwise_layernorm_forward_cost(B, H, W, C, kernel, itemsize=2):
    """(bytes, FLOPs): x read, h and y written."""
    moved, flops = depthwise_forward_cost(B, H, W, C, kernel, itemsize)
    return moved + itemsize * B * H * W * C, flops + 8 * B * H * W * C


@operation(
    cost=depthwise_layernorm_forward_cost,
    problems=[
        Problem(
            # the means of the channels are results, too: none is nearly 0
            x=half(1, 1, 17, 8),
            weight=half(7, 7, 8),
            bias=filled((8,), lambda rng: 4 + rng.standard_normal(8)),
            channel=single(1, 8),
            gain=single(8),
            offset=single(8),
            once=True,
        )
    ],
)
def depthwise_layernorm_forward(x, weight, bias, channel, gain, offset, eps=1e-6):
    """(h, y, mean, rstd): h the depthwise convolution of x (B, H, W, C) with weight (kernel,
    kernel, C), plus bias (C,) and channel (B, C), or None; y its LayerNorm over the channels with
    gain and offset (C,); mean and rstd (pixels,).
    """
    h = depthwise_forward(x, weight, bias, channel)
    return h, *K.layernorm_forward(h, gain, offset, eps)


def depthwise_layernorm_backward(
    dy, x, h, weight, gain, mean, rstd, gradients, need_dx=True, residual=None
):
    """(dx, or None unless `need_dx`, and the gradient (B, C) of `channel`) from what the forward
    took and gave.

    gradients: of weight, bias, gain and offset, which are added to (None: not wanted); residual:
    like x, added to dx
    """
    dweight, dbias, dgain, doffset = gradients
    dh, dchannel = K.layernorm_backward(dy, h, gain, mean, rstd, dgain, doffset, images=len(x))
    return depthwise_backward(dh, x, weight, dweight, dbias, need_dx, True, residual, dchannel)
