"""LayerNorm. (kernels to follow)"""
import numpy as np

from ..device import is_device
from .reduce import column_sum


def layernorm_forward_reference(x, weight, bias, eps=1e-5):
    rows = x.reshape(-1, x.shape[-1])
    mean = rows.mean(1)
    y = rows - mean[:, None]
    rstd = 1 / np.sqrt(np.einsum("rc,rc->r", y, y) / x.dtype.type(x.shape[-1]) + x.dtype.type(eps))
    y *= rstd[:, None]
    if weight is not None:
        y *= weight
    if bias is not None:
        y += bias
    return y.reshape(x.shape), mean, rstd


def layernorm_backward_reference(dy, x, weight, mean, rstd, dweight, dbias):
    C = x.shape[-1]
    g, xhat = dy.reshape(-1, C), x.reshape(-1, C) - mean[:, None]
    xhat *= rstd[:, None]
    if dweight is not None:
        dweight += column_sum(g * xhat)
    if dbias is not None:
        dbias += column_sum(g)
    dx = g * (1 if weight is None else weight)
    xhat *= (np.einsum("rc,rc->r", dx, xhat) / x.dtype.type(C))[:, None]
    xhat += dx.mean(1)[:, None]
    dx -= xhat
    dx *= rstd[:, None]
    return dx.reshape(x.shape)


def layernorm_forward(x, weight, bias, eps=1e-5, version=None):
    """(y, mean (rows,), rstd (rows,)) of x (..., C)."""
    if not is_device(x):
        return layernorm_forward_reference(x, weight, bias, eps)
    raise NotImplementedError


def layernorm_backward(dy, x, weight, mean, rstd, dweight, dbias, version=None):
    """dx; the gradients of weight and bias are added into `dweight` and `dbias` (None: not wanted)."""
    if not is_device(x):
        return layernorm_backward_reference(dy, x, weight, mean, rstd, dweight, dbias)
    raise NotImplementedError
