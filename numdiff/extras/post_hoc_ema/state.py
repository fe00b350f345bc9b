"""What an optimizer keeps for --ema-std: an average of the weights for each width."""

import numpy as np

from ...device import upload, zeros
from ...errors import UsageError
from .power_ema import exponents_of, power_ema_update

MAX_AVERAGED = 2**31 - 1  # numbers of all averages, which kernels count in 32 bits
PREFIX = "ema_std_"  # of the averages' names in a checkpoint


def buffer_of(std):
    """The name of an average in a checkpoint."""
    return f"{PREFIX}{std:g}"


class PowerAverages:
    """The averages of an optimizer's settings.ema_std; flat: a rank's part of the weights, float32
    (n,).

    Attribute averages: float32 (K, n)
    """

    def __init__(self, settings, flat):
        exponents, count = exponents_of(settings.ema_std), len(settings.ema_std)
        if count * flat.size > MAX_AVERAGED:
            raise UsageError(
                f"averages of {count} widths have more numbers than kernels can count: keep fewer."
            )
        self.stds = tuple(settings.ema_std)
        self.averages, self.exponents = (
            zeros((count, flat.size), np.float32, flat),
            upload(exponents, flat),
        )

    def update(self, weights, updates, gradient_norm):
        """After an update of the weights, float32 (n,); updates, gradient_norm: the optimizer's."""
        power_ema_update(self.averages, weights, updates, gradient_norm, self.exponents)

    def arrays(self):
        """{name in a checkpoint: float32 (n,)}"""
        return {
            buffer_of(std): self.averages[k : k + 1].reshape(-1) for k, std in enumerate(self.stds)
        }
