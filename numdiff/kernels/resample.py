"""Average pool and nearest upsample (first draft: reference)."""
import numpy as np


def avgpool_forward(x):
    b, h, w, c = x.shape
    y = x[:, 0::2, 0::2] + x[:, 0::2, 1::2]
    y += x[:, 1::2, 0::2]
    y += x[:, 1::2, 1::2]
    y *= 0.25
    return y


def avgpool_backward(dy):
    return upsample_forward(dy * dy.dtype.type(0.25))


def upsample_forward(x):
    return x.repeat(2, axis=1).repeat(2, axis=2)


def upsample_backward(dy):
    return avgpool_forward(dy) * dy.dtype.type(4)
