"""Linear layers whose products may be computed in FP8 (extras/fp8/).

The operations of `functional/` ask `layer_of` for a weight's layer, which `FlatParameters.keep_float8`
has made. Without a tape a layer is found in models that only make samples, whose scales are
constant (extras/fp8/inference.py). Others draw their samples in float16, and nothing is counted.
"""

import numpy as np

from .. import kernels as K
from ..device import empty
from ..dtypes import is_half
from . import recording


def layer_of(weight, x):
    """The `Layer8` with which a product of x, or of x's bytes, and this weight is computed; None
    for one in x's own type: of another weight, or where no tape records, unless it `evaluates`."""
    layer = weight.float8
    if layer is None or not (recording.is_training() or layer.evaluates):
        return None
    return layer if is_half(x.dtype) or x.dtype == np.uint8 else None


def bytes_for(weight, x, which):
    """The `Scale8` by which the norm before (which: "x"), or the gate after ("dy"), this weight's
    layer rounds for it; None if float16 is wanted. x: an activation of the same dtype; weight: may
    be None."""
    layer = None if weight is None else layer_of(weight, x)
    return getattr(layer, which) if layer is not None and layer.rounds_norms() else None


def keeps(weight):
    """Whether a backward needs the input of this weight's layer."""
    return recording.is_recording() and not weight.frozen


def linear_forward(x, weight, bias, layer, residual=None):
    """(x·weightᵀ + bias + residual, what the backward needs of x) of arrays and Parameters; layer:
    as `layer_of` gave it."""
    bias = None if bias is None else bias.data
    if layer is None and not recording.is_wanted(weight):
        return empty((*x.shape[:-1], weight.shape[0]), x.dtype, like=x), x
    if layer is None:
        return K.linear_forward(
            x, weight.like(x).reshape(weight.shape[0], -1), bias, residual=residual
        ), x
    return K.linear_fp8_forward(x, layer, bias, residual, keeps(weight))


def linear_gelu_forward(x, weight, bias, layer, keeps_u, following=None):
    """(u, GELU(u), what the backward needs of x); following: the layer that alone reads GELU(u), or
    None."""
    if layer is None:
        return *K.linear_gelu_forward(x, weight.like(x), bias.data, keeps_u=keeps_u), x
    return K.linear_fp8_gelu_forward(x, layer, bias.data, keeps_u, keeps(weight), following)


def linear_swiglu_forward(x, weight, bias, layer, keeps_u):
    bias = None if bias is None else bias.data
    if layer is None:
        return *K.linear_swiglu_forward(x, weight.like(x), bias, keeps_u=keeps_u), x
    return K.linear_fp8_swiglu_forward(x, layer, bias, keeps_u, keeps(weight))


def linear_backward(dy, kept, weight, layer, dweight, dbias, following=None, **options):
    """As `kernels.linear_backward`; kept: the forward's second return value, or None; following:
    with gelu_of, the layer whose backward alone reads du, or None."""
    if layer is None:
        w = weight.like(dy if kept is None else kept).reshape(weight.shape[0], -1)
        return K.linear_backward(dy, kept, w, dweight, dbias, **options)
    return K.linear_fp8_backward(
        dy, kept, weight.half, layer, dweight, dbias, following=following, **options
    )
