"""Convolution (first draft: reference)."""
import numpy as np

from .im2col import im2col_backward_reference, im2col_forward_reference


def conv2d_forward_reference(x, weight, bias=None, stride=1):
    n, k = weight.shape[0], weight.shape[1]
    columns = im2col_forward_reference(x, k, stride)
    y = columns.reshape(*columns.shape[:3], -1) @ weight.reshape(n, -1).T
    if bias is not None:
        y += bias
    return y


def conv2d_backward_reference(dy, x, weight, dweight, dbias=None, stride=1, need_dx=True):
    n, k = weight.shape[0], weight.shape[1]
    g = dy.reshape(-1, n)
    columns = im2col_forward_reference(x, k, stride)
    dweight += (g.T @ columns.reshape(len(g), -1)).reshape(weight.shape)
    if dbias is not None:
        dbias += g.sum(0)
    if need_dx:
        dcolumns = (g @ weight.reshape(n, -1)).reshape(columns.shape)
        return im2col_backward_reference(dcolumns, x.shape, k, stride)


def conv2d_forward(x, weight, bias=None, stride=1, version=None):
    return conv2d_forward_reference(x, weight, bias, stride)


def conv2d_backward(dy, x, weight, dweight, dbias=None, stride=1, need_dx=True, version=None):
    return conv2d_backward_reference(dy, x, weight, dweight, dbias, stride, need_dx)


def conv2d_forward_cost(B, H, W, C_in, C_out, kernel, stride=1):
    pixels = B * (-(-H // stride)) * (-(-W // stride))
    return (4 * (B * H * W * C_in + pixels * C_out + C_out * kernel * kernel * C_in + C_out),
            2 * pixels * C_out * kernel * kernel * C_in)
