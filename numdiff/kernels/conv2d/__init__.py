"""Convolution: as a matrix product of shifted pixels, from im2col to Hopper. Read the files in this order.

    im2col.py              the shifted pixels written out as rows of a matrix, and the way back
    launcher.py            the mathematics, v1 and v2, and which version runs
    winograd.py            on the CPU: four pixels for 16 products in place of 36
    implicit.py            v3  the matrix gathered on the way, never written
    narrow.py              three channels: one thread a pixel
    mma.py                 v5  float16 on the tensor cores of sm_80 and later
    tf32.py                v5  float32 on the same units, rounded to tf32
    narrow_half.py         v4  a UNet's first and last layer in float16
    hopper.py              v6  float16 on Hopper: one tile of pixels with its halo serves all nine taps
    hopper_weight_gradient.py      v6  pixels as the long inner dimension, split over blocks
    hopper_weight_gradient_3x3.py  v6  three taps in one product

READ NEXT
    im2col.py
"""
from .launcher import (
    channel_statistics,
    conv2d_backward,
    conv2d_backward_cost,
    conv2d_backward_reference,
    conv2d_forward,
    conv2d_forward_cost,
    conv2d_forward_reference,
    conv2d_input_gradient_cost,
    conv2d_weight_gradient_cost,
)

__all__ = ["channel_statistics", "conv2d_backward", "conv2d_backward_cost", "conv2d_backward_reference",
           "conv2d_forward", "conv2d_forward_cost", "conv2d_forward_reference", "conv2d_input_gradient_cost",
           "conv2d_weight_gradient_cost"]
