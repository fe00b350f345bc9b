"""What training minimises: a tensor of one value."""

from collections.abc import Sequence

from ... import kernels as K
from ...device import AnyArray
from ..tensor import Tensor, record


def mse(prediction: Tensor, target: AnyArray, scale: float = 1.0) -> Tensor:
    """Mean of (prediction - target)² over the target's channels, as a tensor of one value.

    scale multiplies the gradient only, not the value: a step of several microbatches passes 1 /
    their number.
    """
    saved = prediction.data

    def backward(dy):
        return (K.mse_backward(saved, target, scale, dy),)

    return record("mse", K.mse_forward(saved, target), (prediction,), backward)


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

    tables: k, low, width of the diffusion (see kernels/diffusion/vlb.py); scale as in `mse`.
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
