"""The scaling of pixels, folded into the first layer of a network."""

import numpy as np


def with_scaled_pixels(weight, bias, shift, scale):
    """float32 (weight, bias) of a layer that takes pixels x in place of (x - shift) / scale.

    weight: (C_out, rows, columns, channels) of a layer without padding; shift, scale: numbers, or
    one for each channel
    """
    weight, bias = np.asarray(weight, np.float64) / scale, np.asarray(bias, np.float64)
    bias = bias - (weight * shift).sum((1, 2, 3))
    return weight.astype(np.float32), bias.astype(np.float32)
