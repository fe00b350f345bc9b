"""RMSNorm as a differentiable operation."""

from ... import kernels as K
from ...nn.functional.arguments import checked
from ...nn.functional.gradients import gradient_of
from ...nn.parameter import Parameter
from ...nn.tensor import Tensor, record


@checked
def rms_norm(x: Tensor, weight: Parameter | None = None, eps: float = 1e-6) -> Tensor:
    """x (..., C) divided by the root of its mean square over its last axis; weight (C,) or None."""
    saved = x.data
    y, rstd = K.rmsnorm_forward(saved, weight and weight.data, eps)

    def backward(dy):
        return (K.rmsnorm_backward(dy, saved, weight and weight.data, rstd, gradient_of(weight)),)

    return record("rms_norm", y, (x,), backward, parameters=(weight,))
