"""The layers of a block after its attention: two products, GELU or SwiGLU between them, in as few
kernels as there are.
"""

from ... import kernels as K
from ...kernels.operation.versions import capped
from .. import float8
from ..parameter import Parameter
from ..recording import is_recording
from ..tensor import Tensor, record
from .elementwise import gelu, swiglu
from .gradients import deferral, gradients_of
from .modulation import layer_scale, layer_scale_gradient
from .products import linear

# Channels of a token up to which GELU's result is kept: making it again lengthens a step of DiT-S/2
# (384) by 2.2 % and of B/2 (768) by 1 %, whose memory has room for it, and of XL/2 (1152) by 0.4 %
# (docs/log/kernels.md).
GELU_KEPT = 768


def bias_gelu(x: Tensor, bias: Parameter) -> Tensor:
    """GELU (tanh form) of x + bias, for a linear layer that leaves its bias (C,) to this pass."""
    saved = x.data
    return record(
        "bias_gelu",
        K.bias_gelu_forward(saved, bias.data),
        (x,),
        lambda dy: (K.bias_gelu_backward(dy, saved, bias.data, bias.grad),),
        parameters=(bias,),
    )


def gates_products(x: Tensor, gate: Tensor, *weights: Parameter) -> bool:
    """Whether `linear`, `mlp` and `swiglu_mlp` multiply by `gate` and add a residual, if their last
    product has one of these weights. Then nothing is recorded, since only `gate_adaln` has a
    backward, and the product is Hopper's."""
    return (
        not is_recording()
        and capped("epilogue", 1) == 1
        and not any(float8.layer_of(w, x) for w in weights)
        and K.linear_gate_supports(x.data, gate.data, *weights)
    )


def mlp(
    x: Tensor,
    weight: Parameter,
    bias: Parameter,
    weight_2: Parameter,
    bias_2: Parameter,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: Parameter | None = None,
) -> Tensor:
    """Two linear layers, a GELU (tanh form) between them: x (..., K), weight (N, K), weight_2 (M,
    N) -> (..., M). residual, gate: of the second, as in `linear`; with scale what comes is
    `layer_scale(residual, mlp(x), scale)`
    In 16 bits on Hopper, GELU and its derivative are fused into the neighbouring products. If x has
    more than GELU_KEPT channels, the backward keeps only the input of GELU: the product with the
    derivative computes GELU again, in its place.
    """
    given, wants_dx = x.data, x.slot is not None
    layer, layer_2 = float8.layer_of(weight, given), float8.layer_of(weight_2, given)
    if layer is None and not (
        K.linear_gelu_supports(given, weight) and K.linear_gelu_supports(given, weight_2)
    ):
        hidden = (
            bias_gelu(linear(x, weight), bias)
            if capped("epilogue", 1)
            else gelu(linear(x, weight, bias))
        )
        if scale is not None:
            return layer_scale(residual, linear(hidden, weight_2, bias_2), scale)
        return linear(hidden, weight_2, bias_2, residual, gate)
    alone = layer_2 if gate is None and scale is None else None
    u, h, kept = float8.linear_gelu_forward(given, weight, bias, layer, is_recording(), alone)
    if gate is not None:
        return linear(Tensor(h), weight_2, bias_2, residual, gate)
    z = kept_2 = None
    if scale is None:
        y, kept_2 = float8.linear_forward(h, weight_2, bias_2, layer_2)
    else:
        z, y = K.linear_layer_scale_forward(
            h, weight_2.like(h), bias_2.data, scale.data, residual.data, keeps_z=is_recording()
        )
    if layer_2 is None:
        kept_2 = h if weight.shape[1] <= GELU_KEPT else None
    aside, aside_2 = deferral(weight, bias, layer), deferral(weight_2, bias_2, layer_2)

    def backward(dy, before):
        dz = dy if scale is None else layer_scale_gradient(dy, z, scale)
        du = float8.linear_backward(
            dz,
            kept_2,
            weight_2,
            layer_2,
            gelu_of=u,
            following=layer,
            **gradients_of(weight_2, bias_2, aside_2),
        )
        dx = float8.linear_backward(
            du,
            kept,
            weight,
            layer,
            need_dx=wants_dx,
            residual=before,
            **gradients_of(weight, bias, aside),
        )
        return (dx,) if scale is None else (dx, dy)

    return record(
        "mlp",
        y,
        (x,) if scale is None else (x, residual),
        backward,
        parameters=(weight, bias, weight_2, bias_2, scale),
        adds=True,
        deferred=(aside, aside_2),
    )


def swiglu_mlp(
    x: Tensor,
    w12: Parameter,
    b12: Parameter | None,
    w3: Parameter,
    b3: Parameter | None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """A linear layer, SwiGLU, a linear layer: x (..., K), w12 (2 · H, K), w3 (M, H) -> (..., M);
    biases may be None. x and the hidden layer before and after its gate are kept for the backward.
    In 16 bits on Hopper, SwiGLU and its backward are fused into the neighbouring products.
    residual, gate: of the second layer, as in `linear`
    """
    given, wants_dx = x.data, x.slot is not None
    layer, layer_3 = float8.layer_of(w12, given), float8.layer_of(w3, given)
    if layer is None and not K.linear_swiglu_supports(given, w12, w3):
        return linear(swiglu(linear(x, w12, b12)), w3, b3, residual, gate)
    u, h, kept = float8.linear_swiglu_forward(given, w12, b12, layer, is_recording())
    if gate is not None:
        return linear(Tensor(h), w3, b3, residual, gate)
    y, kept_3 = float8.linear_forward(h, w3, b3, layer_3)
    aside, aside_3 = deferral(w12, b12, layer), deferral(w3, b3, layer_3)

    def backward(dy, before):
        du = float8.linear_backward(
            dy, kept_3, w3, layer_3, swiglu_of=u, **gradients_of(w3, b3, aside_3)
        )
        return (
            float8.linear_backward(
                du,
                kept,
                w12,
                layer,
                need_dx=wants_dx,
                residual=before,
                **gradients_of(w12, b12, aside),
            ),
        )

    return record(
        "swiglu_mlp",
        y,
        (x,),
        backward,
        parameters=(w12, b12, w3, b3),
        adds=True,
        deferred=(aside, aside_3),
    )
