"""What an autoencoder is trained on: to give back the pictures that it encodes.

    loss = mean of |x - D(z)| (l1) or (x - D(z))² (l2) + kl_weight · KL / (values of a picture)

z is drawn from the encoder's Gaussian by reparametrisation, with counted noise; KL is that
Gaussian's divergence from a standard normal distribution, in nats, summed over the latents of a
picture. As in Rombach et al. 2022 (arXiv:2112.10752, appendix G), whose perceptual and adversarial
terms need networks with weights of others, and are left out.
"""

import numpy as np

from ..errors import UsageError, near_miss, quoted, shown
from ..kernels.random import PURPOSE_NOISE, random_normal
from ..nn import Tensor
from ..nn import functional as F

LOSSES = {"l1": F.l1, "l2": F.mse}
KL_WEIGHT = 1e-6  # as in the public latent-diffusion code


class Reconstruction:
    """The objective of an `Autoencoder`, as `Trainer` takes it.

    loss: "l1" or "l2", of the picture; kl_weight: of the divergence. Attribute options: the
    arguments to rebuild it.
    """

    def __init__(self, loss: str = "l1", kl_weight: float = KL_WEIGHT):
        if loss not in LOSSES:
            raise UsageError(
                f"unknown loss {quoted(loss)}{near_miss(str(loss), LOSSES)}: use {', '.join(LOSSES)}."
            )
        if not (isinstance(kl_weight, int | float) and 0 <= kl_weight <= 1e6):
            raise UsageError(f"kl_weight {quoted(kl_weight)} must be a number from 0 to 1e6.")
        self.options = {"loss": loss, "kl_weight": float(kl_weight)}

    def check(self, model, dataset):
        """Raise a `UsageError` for a model that is no autoencoder, and for data that are no
        pictures."""
        if not hasattr(model, "moments"):
            raise UsageError(f"a Reconstruction trains an Autoencoder, and not {shown(model)}.")
        if getattr(dataset, "dtype", np.uint8) != np.uint8:
            raise UsageError(
                f"an autoencoder is trained on pictures, and the images of {dataset.path!r} are "
                f"{dataset.dtype}, as latents are: give the pictures."
            )

    def inputs_of(self, model, x_0, random):
        """What a step draws before its forward pass: pictures x_0 (B, H, W, C) in [-1, 1], and the
        noise of their latents (B, H/f, W/f, channels), float32."""
        B, H, W, _ = x_0.shape
        shape = B, H // model.factor, W // model.factor, model.latent_channels
        noise = random_normal(
            shape, random.seed, PURPOSE_NOISE, random.step, random.samples, like=x_0
        )
        return x_0, noise

    def loss_of(self, model, inputs, labels, random, scale):
        """The loss, a tensor of one value, on the tape; scale multiplies its gradient."""
        x_0, noise = inputs
        with model.arithmetic():
            moments = model.moments(Tensor(x_0))
            made = model.reconstruct(F.posterior_sample(moments, noise))
            error = LOSSES[self.options["loss"]](made, x_0, scale)
            if not self.options["kl_weight"]:
                return error
            kl = F.posterior_kl(moments, self.options["kl_weight"] / x_0.size, scale)
            return F.add(error, kl)
