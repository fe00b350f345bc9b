"""What training minimises: a tensor of one value."""

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


def l1(prediction: Tensor, target: AnyArray, scale: float = 1.0) -> Tensor:
    """Mean of |prediction - target|, as a tensor of one value; scale as in `mse`."""
    saved = prediction.data

    def backward(dy):
        return (K.l1_backward(saved, target, scale, dy),)

    return record("l1", K.l1_forward(saved, target), (prediction,), backward)


def posterior_sample(moments: Tensor, noise: AnyArray) -> Tensor:
    """Latents (B, h, w, C) of moments (B, h, w, 2C), mean and log variance: mean + exp(log variance
    / 2) · noise, float32."""
    saved = moments.data

    def backward(dz):
        return (K.posterior_sample_backward(dz, saved, noise),)

    return record(
        "posterior_sample", K.posterior_sample_forward(saved, noise), (moments,), backward
    )


def posterior_kl(moments: Tensor, factor: float = 1.0, scale: float = 1.0) -> Tensor:
    """factor · KL divergence of these moments from a standard normal distribution, in nats, summed
    over all latents, as a tensor of one value; scale as in `mse`."""
    saved = moments.data

    def backward(dy):
        return (K.posterior_kl_backward(saved, factor, scale, dy),)

    return record("posterior_kl", K.posterior_kl_forward(saved, factor), (moments,), backward)
