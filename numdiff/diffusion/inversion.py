"""Inversion: from a picture to the noise from which a deterministic sampler makes it again.

A deterministic sampler solves the ODE dx/dσ = (x - x_0(x, σ)) / σ from the highest level of noise
down to 0 (Song et al. 2021, arXiv:2010.02502, eq. 14). The ODE has a solution in the other
direction too (section 4.3), so the same solver with ascending levels encodes a picture to its
noise (section 5.4). The model's answer enters through x_0 alone, so this holds for every path and
prediction. Both directions make the solver's error; more steps make it smaller.

The slope at level 0 cannot be evaluated: there x and x_0 are equal. The slope at the lowest level
of the sampler takes its place. For a model that predicts x_0, and whose training draws log σ from a
normal distribution, that is the lowest level within three standard deviations of the mean. Below
it the slope is an error of x_0 that was never trained, divided by σ: the noise of a UNet in flow
matching then had a standard deviation of 71 instead of about 1 (50 steps of dpm++2m).
"""

import math

import numpy as np

from ..errors import UsageError, shown
from .plan import combine
from .samplers import NOISY


def inverted(sampler, lowest=0.0):
    """The function that takes a picture up the levels by a sampler of samplers.py. Its arguments
    are the sampler's, `sigmas` descending; x is the picture, and the result is x at sigmas[0].

    lowest: levels below it are passed over
    """

    def ascend(denoise, x, sigmas, noise=None, **settings):
        first = sigmas[0]
        levels = [sigma for sigma in sigmas[-2::-1] if sigma >= lowest] or [first]
        x = combine((2.0, x), (-1.0, denoise(x, levels[0])))  # x + σ · (x - x_0) / σ
        return sampler(denoise, x, levels, noise, **settings)

    return ascend


def lowest_trained(diffusion):
    """The lowest σ that the training of a `Diffusion` practically draws, where x_0 is predicted; 0
    where t is drawn, not log σ, and for other predictions."""
    if not diffusion.normal or diffusion.prediction != "x_0":
        return 0.0
    mean, deviation = diffusion.noise
    return math.exp(mean - 3 * deviation)


def check_invert(pictures, shape, count, slerp, others):
    """The pictures of an inversion as float32 (n, H, W, C); a `UsageError` for others.

    shape: of an image of the model; count, slerp: of the `Sampling`; others: {name: value} of
    settings that exclude an inversion
    """
    for name, value in others.items():
        if value is not None:
            raise UsageError(f"invert and {name} exclude each other: leave one of them out.")
    size = "×".join(map(str, shape))
    if not isinstance(pictures, np.ndarray) or pictures.ndim != 4 or pictures.shape[1:] != shape:
        what = tuple(pictures.shape) if isinstance(pictures, np.ndarray) else shown(pictures)
        raise UsageError(f"invert must be an array of pictures of {size}, and not {what}.")
    if not np.isfinite(pictures).all():
        raise UsageError("invert holds values that are not finite: give other pictures.")
    wanted = images_of(len(pictures), slerp)
    if slerp and not wanted:
        raise UsageError("slerp goes from one picture of invert to the next: give at least two.")
    if count != wanted:
        raise UsageError(
            f"invert makes one image of each picture, or with slerp a row between each two: count must be "
            f"{wanted}, not {count}."
        )
    return np.ascontiguousarray(pictures, np.float32)


def images_of(pictures, slerp=None):
    """The number of images that an inversion makes from a number of pictures."""
    return (pictures - 1) * slerp if slerp else pictures


def check_deterministic(what, sampler, settings):
    """Raise a `UsageError` for a sampler that adds noise. what: the option that needs none."""
    if sampler == "repaint":
        raise UsageError(
            f"{what} needs a sampler that adds no noise, and inpainting, by RePaint, does: "
            "leave one of them out."
        )
    if sampler in NOISY or "s_churn" in settings or settings.get("eta", 0) > 0:
        raise UsageError(
            f"{what} needs a sampler that adds no noise, and {sampler} does: use ddim, "
            "euler, heun or dpm++2m."
        )
