"""The paths from image to noise that a model can be trained on: one small class each, which all
samplers read.

In the samplers' units every path is x = x_0 + σ·eps. A path defines three things: the model's input
x_t = a · x with a = a(σ), so that s = σ · a is its noise; the model's noise-level input; and the
range of levels.

    discrete   a = √ᾱ = 1 / √(1 + σ²)        timestep t of T, as schedule.py has them
    linear     a = 1 / (1 + σ)               t = σ / (1 + σ) in (0, 1): x_t = (1 - t) · x_0 + t · eps
    edm        a = 1 / √(σ² + σ_data²)       log(σ) / 4

What is predicted, and how a loss weighs it, stands in kernels/diffusion/levels.py, for all of them.
"""

import math
import numbers

import numpy as np

from ..errors import UsageError
from .schedule import (
    SIGMA_MAX,
    SIGMA_MIN,
    karras_sigmas,
    logsnr_sigmas,
    sampling_sigmas,
    sigma_table,
    timestep_at,
)

# Where a sampler begins on the linear path. At t = 1 itself σ is infinite; here 1e-4 of the image
# is left, a hundredth of what the linear schedule leaves.
LAST_T = 1 - 1e-4


class DiscretePath:
    """T timesteps of a schedule. table: their σ."""

    spacings = ("timesteps", "karras", "logsnr")

    def __init__(self, alpha_bar, timestep_scale=1.0):
        self.alpha_bar, self.table, self.timestep_scale = (
            alpha_bar,
            sigma_table(alpha_bar),
            timestep_scale,
        )

    def level(self, sigma):
        """(a, the model's noise-level input)."""
        return math.sqrt(1 / (1 + sigma**2)), timestep_at(sigma, self.table) * self.timestep_scale

    def start_scale(self, sigma):
        """What a sampler multiplies its noise by to begin at this level: the model sees it as it
        is, as in guided-diffusion's code, also where the first timestep is not the schedule's last.
        """
        return math.sqrt(1 + sigma**2)

    def default_spacing(self, sampler):
        return "timesteps" if sampler in ("ddpm", "ddim", "repaint") else "karras"

    def sigmas(self, spacing, steps):
        return sampling_sigmas(self.alpha_bar, spacing, steps)


class ContinuousPath:
    """The common base of the paths without whole timesteps."""

    def start_scale(self, sigma):
        """As of whole timesteps, but the noise is that of the level, as in EDM's code (algorithm 1,
        line 2)."""
        return sigma

    def sigmas(self, spacing, steps):
        """As `sampling_sigmas`: descending floats, `steps` of them and the final 0."""
        if isinstance(steps, str) or spacing == "timesteps":
            raise UsageError(
                f"the path {self.name} has no whole timesteps to sample at: give a number of steps, and "
                f"spacing {' or '.join(self.spacings)}."
            )
        if spacing not in self.spacings:
            raise UsageError(
                f"the path {self.name} has no spacing {spacing!r}: use {', '.join(self.spacings)}."
            )
        if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or steps < 1:
            raise UsageError(f"sampling steps must be a whole number of at least 1, not {steps!r}.")
        return [*map(float, self._between[spacing](self, steps)), 0.0]

    _between = {
        "karras": lambda self, steps: karras_sigmas(self.table, steps),
        "logsnr": lambda self, steps: logsnr_sigmas(self.table, steps),
    }


class LinearPath(ContinuousPath):
    """Flow matching (Lipman et al. 2023, arXiv:2210.02747) and rectified flow (Liu et al. 2023,
    arXiv:2209.03003).

    t is 0 for the image and 1 for noise (SiT and JiT count it the other way round). shift: t
    becomes shift · t / (1 + (shift - 1) · t), which is shift · σ, in training and at the levels of
    the spacing "time".
    """

    name, spacings = "linear", ("time", "karras", "logsnr")

    def __init__(self, timestep_scale=1.0, shift=1.0):
        self.timestep_scale, self.shift = timestep_scale, shift
        self.table = np.array([SIGMA_MIN, LAST_T / (1 - LAST_T)])

    def level(self, sigma):
        return 1 / (1 + sigma), sigma / (1 + sigma) * self.timestep_scale

    def default_spacing(self, sampler):
        """ "time" as in the papers of this path, but for the samplers of the others.

        Of 20 even steps in t the second is at σ = 19, but the brightness of an image of 64×64×3 is
        decided by σ = 5. With an exact denoiser of emoji64 DPM-Solver++(2M) reaches a Fréchet
        distance of 0.17 by Karras's levels, and of 0.94 by even ones.
        """
        return "karras" if sampler in ("dpm++2m", "euler-ancestral") else "time"

    def _times(self, steps):
        """Even steps from 1 to 0 in t, as the papers' samplers take them, shifted."""
        t = np.linspace(1, 0, steps + 1)[:-1]
        t = np.minimum(self.shift * t / (1 + (self.shift - 1) * t), LAST_T)
        return t / (1 - t)

    _between = {**ContinuousPath._between, "time": _times}


class EdmPath(ContinuousPath):
    """Karras et al. 2022 (arXiv:2206.00364), table 1; sigma_data: standard deviation of the images."""

    name, spacings = "edm", ("karras", "logsnr")

    def __init__(self, sigma_data=0.5):
        self.sigma_data, self.table = sigma_data, np.array([SIGMA_MIN, SIGMA_MAX])

    def level(self, sigma):
        return 1 / math.sqrt(sigma**2 + self.sigma_data**2), math.log(sigma) / 4

    def default_spacing(self, sampler):
        return "karras"
