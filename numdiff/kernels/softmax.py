"""Softmax over the last axis."""
import numpy as np

from ..device import is_device


def softmax_forward_reference(x, scale=1.0, out=None):
    y = np.multiply(x, x.dtype.type(scale), out=out)
    y -= y.max(axis=-1, keepdims=True)
    np.exp(y, out=y)
    y /= y.sum(axis=-1, keepdims=True)
    return y


def softmax_backward_reference(dy, y, scale=1.0, out=None):
    mean = np.einsum("...n,...n->...", dy, y)[..., None]  # of dy under the probabilities y
    dx = np.subtract(dy, mean, out=out)
    dx *= y
    if scale != 1.0:
        dx *= dx.dtype.type(scale)
    return dx


def softmax_forward(x, scale=1.0, out=None, version=None):
    """softmax(scale · x) over the last axis, as a new array or in `out` (which may be x itself)."""
    if not is_device(x):
        return softmax_forward_reference(x, scale, out)
    raise NotImplementedError


def softmax_backward(dy, y, scale=1.0, out=None, version=None):
    """dx from dy and the forward's result y, as a new array or in `out` (which may be dy itself)."""
    if not is_device(y):
        return softmax_backward_reference(dy, y, scale, out)
    raise NotImplementedError
