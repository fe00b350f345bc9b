"""Linear layer in FP8: what goes in and what comes back as E4M3, the weight's gradient in float16.

MATHEMATICS
    y = Q(x)·Q(w)ᵀ + bias        Q rounds to E4M3 with the tensor's scale (quantise.py)
    dx = Q(dy)·Q(w)              by a transposed copy of Q(w): 8-bit products read both operands along k
    dweight += dyᵀ·x             in float16, as linear.py: its sum runs over rows, along which neither operand lies
    dbias += Σ_r dy_rn           likewise
    With GELU or SwiGLU after the layer, or before it in the backward, as there.
SHAPES
    x (..., K), y (..., N) float16, their leading axes taken together as rows; weight (N, K) float16, for its gradient's
    shape; a `Layer8` has its bytes. N and K are multiples of 16.
KERNELS
    those of matmul/hopper_fp8.py and quantise.py. Rounding x costs a pass of 3 bytes a number, which a later version
    saves where the kernel that writes x can round it, too.
DETERMINISM
    as those.
SOURCE
    Micikevicius et al. 2022, arXiv:2209.05433; the format of gradients is E4M3, too, as DeepSeek-V3 has it
    (arXiv:2412.19437, section 3.3.2).
READ NEXT
    conv2d/levels/: back to float16, for a convolution.
"""
from typing import NamedTuple

from .linear import linear_backward
from .matmul.hopper_fp8 import (
    matmul_fp8_forward,
    matmul_fp8_gelu_backward,
    matmul_fp8_gelu_forward,
    matmul_fp8_swiglu_backward,
    matmul_fp8_swiglu_forward,
)
from .quantise import quantise_forward


class Scale8(NamedTuple):
    """scale: float32 (1,), by which the numbers of a tensor are divided; amax: uint32 (PARTIALS,), where the largest of
    them leaves its bits for the next step's scale."""

    scale: object
    amax: object


class Layer8(NamedTuple):
    """A layer in E4M3. weight (N, K), transposed (K, N): uint8, scale float32 (1,) of both; x, dy: `Scale8` of what
    goes in and what comes back; promoted: whether products are added up in float32 every 128 of k."""

    weight: object
    transposed: object
    scale: object
    x: Scale8
    dy: Scale8
    promoted: bool


def _operands(x, tensor, weight, layer):
    """What a product of Q(x) and a weight (rows, C) begins with: x's bytes, the weight's, and both scales."""
    return quantise_forward(x.reshape(-1, x.shape[-1]), *tensor), weight, tensor.scale, layer.scale


def linear_fp8_forward(x, layer, bias=None, residual=None):
    """Q(x)·Q(weight)ᵀ + bias, plus `residual` (like y) where it is given, as a new array (..., N)."""
    N = layer.weight.shape[0]
    y = matmul_fp8_forward(*_operands(x, layer.x, layer.weight, layer), bias,
                           None if residual is None else residual.reshape(-1, N), layer.promoted)
    return y.reshape(*x.shape[:-1], N)


def linear_fp8_gelu_forward(x, layer, bias, keeps_u=True):
    """(u, GELU(u)) as new arrays, u = Q(x)·Q(weight)ᵀ + bias.

    keeps_u: False where no backward will ask for u, which may then be None
    """
    u, y = matmul_fp8_gelu_forward(*_operands(x, layer.x, layer.weight, layer), bias, keeps_u, layer.promoted)
    shape = *x.shape[:-1], layer.weight.shape[0]
    return u if u is None else u.reshape(*shape), y.reshape(*shape)


def linear_fp8_swiglu_forward(x, layer, bias=None, keeps_u=True):
    """(u (..., 2 · H), SwiGLU(u) (..., H)) as new arrays, u = Q(x)·Q(weight)ᵀ + bias; keeps_u as above."""
    u, y = matmul_fp8_swiglu_forward(*_operands(x, layer.x, layer.weight, layer), bias, keeps_u, layer.promoted)
    rows = x.shape[:-1]
    return u if u is None else u.reshape(*rows, u.shape[-1]), y.reshape(*rows, y.shape[-1])


def linear_fp8_backward(dy, x, weight, layer, dweight, dbias=None, need_dx=True, residual=None, gelu_of=None,
                        swiglu_of=None, accumulate=True):
    """dx, and the parameters' gradients, as `linear_backward` (whose arguments the others are) gives them."""
    linear_backward(dy, x, weight, dweight, dbias, need_dx=False, accumulate=accumulate)
    if not need_dx:
        return None
    given, K = _operands(dy, layer.dy, layer.transposed, layer), x.shape[-1]
    if gelu_of is not None:
        return matmul_fp8_gelu_backward(*given, gelu_of.reshape(-1, K), layer.promoted).reshape(*x.shape)
    if swiglu_of is not None:
        du = matmul_fp8_swiglu_backward(*given, swiglu_of.reshape(-1, 2 * K), layer.promoted)
        return du.reshape(*swiglu_of.shape)
    residual = None if residual is None else residual.reshape(-1, K)
    return matmul_fp8_forward(*given, None, residual, layer.promoted).reshape(*x.shape)
