"""Convolution: as a matrix product of shifted pixels, from im2col to Hopper. Read the files in this
order.

    direct.py            the mathematics and the reference; v1 straight from the formula, v2 by im2col and matmul
    im2col.py            the shifted pixels written out as rows of a matrix, and the way back
    tiles.py             what the float32 rungs by tiles share
    flip.py              the weight of an input gradient
    implicit.py      v3  the matrix is gathered while loading and never written
    implicit_weight_gradient.py  v3  the same for dweight: pixels are the inner dimension
    narrow.py        v3  three channels: one thread a pixel
    mma.py           v4  float16 on the tensor cores of sm_80 and later
    mma_halo.py      v4  3 × 3 taps of stride 1: one tile of pixels with its halo serves all nine
    mma_halo_gradient.py  v4  the same for dweight
    narrow_half/     v3  a UNet's first and last layer in float16
    ../../extras/levels/conv2d/  v6's ideas, one at a time
    hopper/          v5, v6  float16 on Hopper: one tile of pixels with its halo serves all nine taps
    resampled.py         after upsampling, and of stride 2, on Hopper: two operations of their own
    problems.py          what the check, the tests and the benchmark run
    launcher.py      which of them runs

READ NEXT
    direct.py
"""

from .direct import (
    conv2d_backward_cost,
    conv2d_backward_reference,
    conv2d_forward_cost,
    conv2d_forward_reference,
    conv2d_input_gradient_cost,
    conv2d_weight_gradient_cost,
)
from .launcher import (
    channel_statistics,
    conv2d_backward,
    conv2d_forward,
    conv2d_input_gradient,
    conv2d_weight_gradient,
)
from .resampled import (
    halved_conv2d_forward,
    resampled_statistics,
    resampled_supports,
    upsampled_conv2d_forward,
)

__all__ = [
    "channel_statistics",
    "conv2d_backward",
    "conv2d_backward_cost",
    "conv2d_backward_reference",
    "conv2d_forward",
    "conv2d_forward_cost",
    "conv2d_forward_reference",
    "conv2d_input_gradient",
    "conv2d_input_gradient_cost",
    "conv2d_weight_gradient",
    "conv2d_weight_gradient_cost",
    "halved_conv2d_forward",
    "resampled_statistics",
    "resampled_supports",
    "upsampled_conv2d_forward",
]
