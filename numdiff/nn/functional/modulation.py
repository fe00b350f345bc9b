"""How a vector steers a block: the DiT's adaptive norms and gates, and ConvNeXt's learned scale."""

from ... import kernels as K
from .. import float8
from ..parameter import Parameter, trains
from ..tensor import Tensor, record
from .gradients import gradient_of


def adaln(
    x: Tensor,
    shift: Tensor | None,
    scale: Tensor,
    eps: float = 1e-6,
    weight: Parameter | None = None,
    norm: str = "layer",
) -> Tensor:
    """A norm of each token of x (B, T, C), times 1 + scale (B, C), plus shift (B, C).

    norm: "layer", or "rms", which takes away no mean; weight: a Parameter (C,) that xhat is
    multiplied by, or None
    shift: None leaves it out
    """
    saved, vectors, has_shift = x.data, (shift and shift.data, scale.data), shift is not None
    _, y, mean, rstd = K.gate_adaln_forward(
        saved, None, None, *vectors, eps, weight and weight.data, norm
    )

    def backward(dy, before):
        dx, _, _, *others = K.gate_adaln_backward(
            before,
            dy,
            saved,
            None,
            (None, *vectors),
            mean,
            rstd,
            weight and weight.data,
            gradient_of(weight),
        )
        return dx, *(others if has_shift else others[1:])

    return record(
        "adaln",
        y,
        (x, shift, scale) if has_shift else (x, scale),
        backward,
        parameters=(weight,),
        adds=True,
    )


def gate_adaln(
    x: Tensor,
    h: Tensor,
    gate: Tensor,
    shift: Tensor | None,
    scale: Tensor,
    eps: float = 1e-6,
    weight: Parameter | None = None,
    norm: str = "layer",
    writer: Parameter | None = None,
    reader: Parameter | None = None,
    keeps_x: bool = False,
) -> list[Tensor]:
    """`gate`, then `adaln` of its result: returns both, from one kernel if there is one.

    writer: the weight of the linear layer that computes h, which nothing else reads; reader: the
        weight of the only layer that reads the second result. In FP8, h's gradient and that result
        are then bytes of E4M3 for them
    keeps_x: keep x for the backward, and not the first result, which that makes again: for an x
        that another operation keeps anyway, and a result that no other does
    """
    branch, vectors, has_shift = (
        h.data,
        (gate.data, shift and shift.data, scale.data),
        shift is not None,
    )
    into, dh_into = float8.bytes_for(reader, x.data, "x"), float8.bytes_for(writer, x.data, "dy")
    z, y, mean, rstd = K.gate_adaln_forward(
        x.data, branch, *vectors, eps, weight and weight.data, norm, into=into
    )
    kept, kept_x = (None, x.data) if keeps_x else (z, None)

    def backward(gradients):
        dx, dh, dgate, *others = K.gate_adaln_backward(
            *gradients,
            kept,
            branch,
            vectors,
            mean,
            rstd,
            weight and weight.data,
            gradient_of(weight),
            dh_into=dh_into,
            x=kept_x,
        )
        return dx, dh, dgate, *(others if has_shift else others[1:])

    return record(
        "gate_adaln",
        [z, y],
        (x, h, gate, shift, scale) if has_shift else (x, h, gate, scale),
        backward,
        parameters=(weight,),
    )


def gate(x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    """x + gate (B, C) · h for x and h (B, T, C)."""
    saved, factor = h.data, gate.data
    return record(
        "gate",
        K.gate_forward(x.data, saved, factor),
        (x, h, gate),
        lambda dy: (dy, *K.gate_backward(dy, saved, factor)),
    )


def layer_scale(x: Tensor, h: Tensor, scale: Parameter) -> Tensor:
    """x + scale · h for x and h (B, ..., C) and scale (C,): Touvron et al. 2021, arXiv:2103.17239,
    equation 4."""
    C, saved = x.shape[-1], h.data
    rows, factor = saved.reshape(1, -1, C), scale.data.reshape(1, C)  # one image of all pixels
    y = K.gate_forward(x.data.reshape(1, -1, C), rows, factor).reshape(*x.shape)
    return record(
        "layer_scale",
        y,
        (x, h),
        lambda dy: (dy, layer_scale_gradient(dy, saved, scale)),
        parameters=(scale,),
    )


def layer_scale_gradient(dy, h, scale):
    """dh of `layer_scale`, whose gradient of scale is added to it."""
    C = dy.shape[-1]
    dh, dscale = K.gate_backward(
        dy.reshape(1, -1, C), h.reshape(1, -1, C), scale.data.reshape(1, C)
    )
    if trains(scale):
        K.column_sum(dscale, scale.grad)
    return dh.reshape(*dy.shape)
