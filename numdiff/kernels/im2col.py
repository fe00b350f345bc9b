"""im2col and col2im (first draft: reference)."""
import numpy as np

from ..device import is_device


def output_size(size, kernel, stride):
    return (size + 2 * (kernel // 2) - kernel) // stride + 1


def im2col_forward_reference(x, kernel, stride=1):
    b, h, w, c = x.shape
    p = kernel // 2
    ho, wo = output_size(h, kernel, stride), output_size(w, kernel, stride)
    padded = np.zeros((b, h + 2 * p, w + 2 * p, c), x.dtype)
    padded[:, p:p + h, p:p + w] = x
    columns = np.empty((b, ho, wo, kernel, kernel, c), x.dtype)
    for r in range(kernel):
        for s in range(kernel):
            columns[:, :, :, r, s] = padded[:, r:r + stride * ho:stride, s:s + stride * wo:stride]
    return columns


def im2col_backward_reference(dcolumns, x_shape, kernel, stride=1):
    b, h, w, c = x_shape
    p = kernel // 2
    ho, wo = output_size(h, kernel, stride), output_size(w, kernel, stride)
    padded = np.zeros((b, h + 2 * p, w + 2 * p, c), dcolumns.dtype)
    for r in range(kernel):
        for s in range(kernel):
            padded[:, r:r + stride * ho:stride, s:s + stride * wo:stride] += dcolumns[:, :, :, r, s]
    return np.ascontiguousarray(padded[:, p:p + h, p:p + w])


def im2col_forward(x, kernel, stride=1):
    return im2col_forward_reference(x, kernel, stride)


def im2col_backward(dcolumns, x_shape, kernel, stride=1):
    return im2col_backward_reference(dcolumns, x_shape, kernel, stride)
