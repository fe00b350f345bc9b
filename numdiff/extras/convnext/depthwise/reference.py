"""Depthwise convolution: every channel has a filter of its own, and no arithmetic to hide the
memory behind.

MATHEMATICS
    forward   y[b,i,j,c] = bias[c] + channel[b,c] + Σ_rs x[b, i+r-pad, j+s-pad, c] · weight[r,s,c]
              x is zero outside the image, pad = kernel // 2; bias and channel may be absent
    backward  dx[b,h,w,c] = Σ_rs dy[b, h+r-pad, w+s-pad, c] · weight[kernel-1-r, kernel-1-s, c]: the same convolution,
              of dy, with the taps counted from the other end (see conv2d/direct.py)
              dweight[r,s,c] += Σ_bij dy[b,i,j,c] · x[b, i+r-pad, j+s-pad, c]
              dchannel[b,c] = Σ_ij dy[b,i,j,c]          dbias[c] += Σ_b dchannel[b,c]
SHAPES
    x, y, dx, dy (B, H, W, C) and weight (kernel, kernel, C) float32, float16 or bfloat16; kernel
    odd, stride 1; dweight, bias, dbias (C,), channel (B, C), dchannel float32
DETERMINISM
    every sum has a fixed order; where blocks share the weight's gradient, their parts are in a
    separate array, which kernels/reduce/trees.py adds up.
COST
    2·pixels·C·kernel² FLOPs for each of the three passes, 2 numbers of memory an output. With 7 × 7
    taps in float32 that is 12 FLOPs a byte and the roof is memory; in float16 it is 24.5 FLOPs a
    byte, more than the float32 units of an H200 keep up with (67 TFLOP/s and 4.8 TB/s: 14): there
    tiled.py would meet the roof of arithmetic at 57 % of the memory's rate. mma.py multiplies on
    tensor cores, and what holds it is neither roof: see its WHAT REMAINS.
SOURCE
    Chollet 2017, "Xception", arXiv:1610.02357; 7 × 7 taps as in Liu et al. 2022, "A ConvNet for the
    2020s", arXiv:2201.03545, section 2.5.
READ NEXT
    naive.py
"""

import numpy as np

from ....dtypes import in_single


def _taps(x, kernel):
    """((r, s), what tap (r, s) of each window sees, as x) of every tap."""
    (_, h, w, _), pad = x.shape, kernel // 2
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    for r, s in np.ndindex(kernel, kernel):
        yield (r, s), padded[:, r : r + h, s : s + w]


@in_single()
def depthwise_forward_reference(x, weight, bias=None, channel=None):
    y = np.zeros_like(x)
    for tap, seen in _taps(x, len(weight)):
        y += seen * weight[tap]
    addends = bias, None if channel is None else channel[:, None, None]
    return sum((a for a in addends if a is not None), y)


@in_single()
def depthwise_input_gradient_reference(dy, weight, residual=None):
    dx = depthwise_forward_reference(dy, weight[::-1, ::-1])
    return dx if residual is None else dx + residual


@in_single()
def depthwise_weight_gradient_reference(dy, x, dweight):
    for tap, seen in _taps(x, len(dweight)):
        dweight[tap] += np.einsum("bijc,bijc->c", dy, seen)


# Cost ---------------------------------------------------------------------------------------------


def depthwise_forward_cost(B, H, W, C, kernel, itemsize=4):
    """(bytes, FLOPs): x read and y written once."""
    return 2 * itemsize * B * H * W * C, 2 * B * H * W * C * kernel * kernel


def depthwise_input_gradient_cost(B, H, W, C, kernel, itemsize=4):
    return depthwise_forward_cost(B, H, W, C, kernel, itemsize)


def depthwise_weight_gradient_cost(B, H, W, C, kernel, itemsize=4):
    """(bytes, FLOPs): dy and x read once."""
    return depthwise_forward_cost(B, H, W, C, kernel, itemsize)
