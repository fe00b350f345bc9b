"""Linear layer in FP8: what goes in, what comes back and the weight as E4M3, in all three products.

MATHEMATICS
    y = Q(x)·Q(w)ᵀ + bias        Q rounds to E4M3 with the tensor's scale (quantise.py)
    dx = Q(dy)·Q(w)              by a transposed copy of Q(w): 8-bit products read both operands along their sum
    dweight += Q(dy)ᵀ·Q(x)       by transposed copies of both (both.py), which are made where they are rounded
    dbias += Σ_r Q(dy)_rn        there, too
    With GELU or SwiGLU after the layer, or before it in the backward, as kernels/linear/layer.py.
SHAPES
    x (..., K), y (..., N) float16, their leading axes taken together as rows; weight (N, K)
    float16, for its gradient's shape; a `Layer8` has its bytes. N and K are multiples of 16. What
    the backward needs of x is Q(x)ᵀ, a byte a number, half of what float16 keeps.
KERNELS
    those of matmul.py, both.py and quantise.py. Rounding a tensor in both orientations costs a
    pass of 4 bytes a number. Between two layers with a GELU, what goes forward and what comes back
    is rounded in the epilogue of the product before, and never exists as float16: x and dy may be
    bytes, which cost a pass of 2. So may what the norm before a layer and the gate after it give,
    kernels/transformer/gate_adaln/, if no other operation reads it.
SWITCHES
    GRADIENTS = False: dweight and dbias as kernels/linear/layer.py has them, in float16, from a float16 x that is
    kept.
    EPILOGUES = False: GELU's results are float16, and a pass rounds them: the same bits.
    NORMS = False: so are those of the norm before a layer, and of the gate after it, backward.
DETERMINISM
    as those.
SOURCE
    Micikevicius et al. 2022, arXiv:2209.05433; the format of gradients is E4M3, too, and so are the
    operands of weight gradients, as DeepSeek-V3 has it (arXiv:2412.19437, section 3.3).
READ NEXT
    layers.py
"""

from typing import NamedTuple

import numpy as np

from ...kernels.linear.layer import linear_backward
from ...kernels.reduce.second_pass import deferrable
from ...kernels.reduce.trees import column_sum
from .both import columns_of, quantise_both
from .matmul import (
    matmul_fp8_forward,
    matmul_fp8_gelu_backward,
    matmul_fp8_gelu_forward,
    matmul_fp8_gradient,
    matmul_fp8_swiglu_backward,
    matmul_fp8_swiglu_forward,
)
from .quantise import Scale8, quantise_forward

GRADIENTS = True  # whether weights' gradients are products of E4M3
# whether products with a GELU write E4M3, if with GRADIENTS no operation reads float16
EPILOGUES = True
NORMS = True  # whether kernels/transformer/gate_adaln/ does


class Layer8(NamedTuple):
    """A layer in E4M3. weight (N, K), transposed (K, N): uint8, scale float32 (1,) of both; x, dy:
    `Scale8` of what goes in and what comes back; promoted: whether products are added up in float32
    every 128 of k, as those of weights' gradients always are; evaluates: whether it is used without
    a tape, too. Of a layer that only evaluates (inference.py) transposed and dy are None."""

    weight: object
    transposed: object
    scale: object
    x: Scale8
    dy: Scale8
    promoted: bool
    evaluates: bool = False

    def rounds_norms(self):
        """Whether the norm before a layer, and the gate after it in the backward, leave bytes."""
        return GRADIENTS and NORMS


def _operands(x, layer, keeps):
    """(what the forward's product begins with: x's bytes, the weight's, both scales; what the
    backward needs of x)."""
    rows, kept = x.reshape(-1, x.shape[-1]), None
    if x.dtype == np.uint8:
        bits, kept = rows, columns_of(rows, layer.x.scale) if keeps else None
    elif keeps and GRADIENTS:
        bits, kept = quantise_both(rows, *layer.x)
    else:
        bits, kept = quantise_forward(rows, *layer.x), x if keeps else None
    return (bits, layer.weight, layer.x.scale, layer.scale), kept


def linear_fp8_forward(x, layer, bias=None, residual=None, keeps=True):
    """(y, kept): Q(x)·Q(weight)ᵀ + bias, plus `residual` (like y) where it is given, as a new array
    (..., N); what `linear_fp8_backward` needs of x, if `keeps`, else None. x may be its bytes."""
    N = layer.weight.shape[0]
    given, kept = _operands(x, layer, keeps)
    y = matmul_fp8_forward(
        *given, bias, None if residual is None else residual.reshape(-1, N), layer.promoted
    )
    return y.reshape(*x.shape[:-1], N), kept


def _into(scale):
    """The `Scale8` by which an epilogue rounds, or None."""
    return scale if GRADIENTS and EPILOGUES else None


def linear_fp8_gelu_forward(x, layer, bias, keeps_u=True, keeps=True, following=None):
    """(u, GELU(u), kept): new arrays, u = Q(x)·Q(weight)ᵀ + bias; kept, keeps as of
    `linear_fp8_forward`.

    keeps_u: False if no backward needs u, which may then be None
    following: the `Layer8` that alone reads GELU(u), which may then be its bytes; or None
    """
    given, kept = _operands(x, layer, keeps)
    u, y = matmul_fp8_gelu_forward(
        *given, bias, keeps_u, layer.promoted, _into(following and following.x)
    )
    shape = *x.shape[:-1], layer.weight.shape[0]
    return u if u is None else u.reshape(*shape), y.reshape(*shape), kept


def linear_fp8_swiglu_forward(x, layer, bias=None, keeps_u=True, keeps=True):
    """(u (..., 2 · H), SwiGLU(u) (..., H), kept), u = Q(x)·Q(weight)ᵀ + bias; as above."""
    given, kept = _operands(x, layer, keeps)
    u, y = matmul_fp8_swiglu_forward(*given, bias, keeps_u, layer.promoted)
    rows = x.shape[:-1]
    return u if u is None else u.reshape(*rows, u.shape[-1]), y.reshape(*rows, y.shape[-1]), kept


def _parameters(dy, kept, weight, layer, dweight, dbias, need_dx, accumulate):
    """dy's bytes, if they are wanted, and the parameters' gradients."""
    rows = dy.reshape(-1, dy.shape[-1])
    if not GRADIENTS and dy.dtype != np.uint8:
        if dweight is not None:
            linear_backward(dy, kept, weight, dweight, dbias, need_dx=False, accumulate=accumulate)
        elif dbias is not None:
            column_sum(rows, dbias)
        return quantise_forward(rows, *layer.dy) if need_dx else None
    if dweight is None and dbias is None:
        return rows if dy.dtype == np.uint8 else quantise_forward(rows, *layer.dy)
    if dy.dtype == np.uint8:
        bits, columns = rows, columns_of(rows, layer.dy.scale, dbias)
    else:
        bits, columns = quantise_both(rows, *layer.dy, sums=dbias)
    if dweight is not None:
        with deferrable():
            matmul_fp8_gradient(columns, kept, layer.dy.scale, layer.x.scale, dweight, accumulate)
    return bits


def linear_fp8_backward(
    dy,
    kept,
    weight,
    layer,
    dweight,
    dbias=None,
    need_dx=True,
    residual=None,
    gelu_of=None,
    swiglu_of=None,
    accumulate=True,
    following=None,
):
    """dx, and the parameters' gradients, as `linear_backward` (whose arguments the others are)
    gives them.

    dy: float16, or its bytes; kept: what the forward kept of x; None only where dweight is
    following: with gelu_of, the `Layer8` whose backward alone reads du, which may then be its
    bytes; or None
    """
    bits, K = (
        _parameters(dy, kept, weight, layer, dweight, dbias, need_dx, accumulate),
        weight.shape[-1],
    )
    if not need_dx:
        return None
    given, shape = (bits, layer.transposed, layer.dy.scale, layer.scale), (*dy.shape[:-1], K)
    if gelu_of is not None:
        du = matmul_fp8_gelu_backward(
            *given, gelu_of.reshape(-1, K), layer.promoted, _into(following and following.dy)
        )
        return du.reshape(*shape)
    if swiglu_of is not None:
        du = matmul_fp8_swiglu_backward(*given, swiglu_of.reshape(-1, 2 * K), layer.promoted)
        return du.reshape(*swiglu_of.shape)
    residual = None if residual is None else residual.reshape(-1, K)
    return matmul_fp8_forward(*given, None, residual, layer.promoted).reshape(*shape)
