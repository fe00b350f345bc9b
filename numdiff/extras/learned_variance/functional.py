"""The hybrid loss as a differentiable operation."""

from collections.abc import Sequence

from ... import kernels as K
from ...device import AnyArray
from ...nn.functional.arguments import checked
from ...nn.tensor import Tensor, record


@checked
def hybrid_loss(
    prediction: Tensor,
    target: AnyArray,
    x_0: AnyArray,
    t: AnyArray,
    tables: Sequence[AnyArray],
    weight: float,
    scale: float = 1.0,
) -> Tensor:
    """Squared error of the first half of the channels, plus weight · the variational bound of the
    learned variance.

    tables: k, low, width of the diffusion (see vlb.py); scale as in `mse`.
    """
    saved = prediction.data

    def backward(dy):
        return (K.hybrid_loss_backward(saved, target, x_0, t, *tables, weight, scale, dy),)

    return record(
        "hybrid_loss",
        K.hybrid_loss_forward(saved, target, x_0, t, *tables, weight),
        (prediction,),
        backward,
    )
