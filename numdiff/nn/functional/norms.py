"""Norms over groups of channels, and the softmax."""

from ... import kernels as K
from ..parameter import Parameter
from ..slots import TWO
from ..tensor import Tensor, record


def group_norm(
    x: Tensor,
    weight: Parameter,
    bias: Parameter,
    groups: int,
    eps: float = 1e-5,
    silu: bool = False,
) -> Tensor:
    """x (B, ..., C) normalised over each group of C / groups channels, scaled, shifted; with SiLU
    in the same pass."""
    saved = x.data
    y, mean, rstd = K.groupnorm_forward(
        saved, weight.data, bias.data, groups, eps, silu=silu, statistics=x.statistics
    )

    def backward(dy, before, second):
        return (
            K.groupnorm_backward(
                dy,
                saved,
                weight.data,
                bias.data,
                mean,
                rstd,
                weight.grad,
                bias.grad,
                groups,
                silu=silu,
                residual=before if second is None else (before, second),
            ),
        )

    return record("group_norm", y, (x,), backward, parameters=(weight, bias), adds=TWO)


def softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    """softmax(scale · x) over the last axis."""
    y = K.softmax_forward(x.data, scale)
    return record("softmax", y, (x,), lambda dy: (K.softmax_backward(dy, y, scale),))
