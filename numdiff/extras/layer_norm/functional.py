"""LayerNorm as a differentiable operation."""

from ... import kernels as K
from ...nn.functional.arguments import checked
from ...nn.functional.gradients import gradient_of
from ...nn.parameter import Parameter
from ...nn.tensor import Tensor, record


@checked
def layer_norm(
    x: Tensor, weight: Parameter | None = None, bias: Parameter | None = None, eps: float = 1e-5
) -> Tensor:
    """x (..., C) normalised over its last axis; weight and bias (C,) or None."""
    saved = x.data
    y, mean, rstd = K.layernorm_forward(saved, weight and weight.data, bias and bias.data, eps)

    def backward(dy):
        return (
            K.layernorm_backward(
                dy,
                saved,
                weight and weight.data,
                mean,
                rstd,
                gradient_of(weight),
                gradient_of(bias),
            ),
        )

    return record("layer_norm", y, (x,), backward, parameters=(weight, bias))
