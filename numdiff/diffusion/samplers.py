"""Samplers: from noise to images, one pure function each, all of one signature.

    sampler(predict_x_0, x_t, timesteps, alpha_bar, noise, eta) -> x_0

predict_x_0(x_t, t): the model's estimate of the image, for a Python int t
x_t: float32 (B, H, W, C), standard normal noise; timesteps: descending ints; alpha_bar: ᾱ of every timestep, float64
noise(i): fresh standard normal noise like x_t for the i-th step; eta: how much of it DDIM adds

Both are linear in (x_t, x_0, noise), so a step is three coefficients, computed here in float64, and one kernel.
"""
import math

import numpy as np

from ..device import upload
from ..errors import UsageError
from ..kernels.sampler import ddim_step


def ddpm(predict_x_0, x_t, timesteps, alpha_bar, noise, eta=1.0):
    """Ancestral sampling: the posterior q(x_s | x_t, x_0) of Ho et al. 2020 (arXiv:2006.11239, eq. 7), s < t.

    On a subsequence of the timesteps β is that of the jump: 1 - ᾱ_t / ᾱ_s. `eta` is not used: it is always 1.
    """
    for i, (t, s) in enumerate(_pairs(timesteps)):
        now, then = alpha_bar[t], _alpha_bar_at(alpha_bar, s)
        alpha = now / then
        x_0 = predict_x_0(x_t, t)
        a = math.sqrt(alpha) * (1 - then) / (1 - now)
        b = math.sqrt(then) * (1 - alpha) / (1 - now)
        sigma = math.sqrt((1 - then) / (1 - now) * (1 - alpha))
        x_t = combine(x_t, x_0, noise(i) if sigma > 0 else None, a, b, sigma)
    return x_t


def ddim(predict_x_0, x_t, timesteps, alpha_bar, noise, eta=0.0):
    """DDIM (Song et al. 2021, arXiv:2010.02502, eq. 12 and 16); eta = 0 is deterministic, eta = 1 is `ddpm`."""
    for i, (t, s) in enumerate(_pairs(timesteps)):
        now, then = alpha_bar[t], _alpha_bar_at(alpha_bar, s)
        x_0 = predict_x_0(x_t, t)
        sigma = eta * math.sqrt((1 - then) / (1 - now)) * math.sqrt(1 - now / then)
        direction = math.sqrt(max(1 - then - sigma**2, 0.0))  # length of the step that points back to x_t
        a = direction / math.sqrt(1 - now)  # eps = (x_t - √ᾱ·x_0) / √(1-ᾱ), written out in x_t and x_0
        b = math.sqrt(then) - a * math.sqrt(now)
        x_t = combine(x_t, x_0, noise(i) if sigma > 0 else None, a, b, sigma)
    return x_t


SAMPLERS = {"ddpm": ddpm, "ddim": ddim}


def combine(x_t, x_0, noise, a, b, sigma):
    """a·x_t + b·x_0 + sigma·noise, the same for every sample of the batch."""
    everyone = upload(np.zeros(x_t.shape[0], np.int32), x_t)  # all samples read entry 0 of the three tables
    tables = [upload(np.array([c], np.float32), x_t) for c in (a, b, sigma)]
    return ddim_step(x_t, x_0, everyone, *tables, noise)


def get_sampler(name):
    if name not in SAMPLERS:
        raise UsageError(f"unknown sampler {name!r}: use {' or '.join(SAMPLERS)}.")
    return SAMPLERS[name]


def _pairs(timesteps):
    """(t, the timestep after it), None after the last."""
    timesteps = [int(t) for t in timesteps]
    return zip(timesteps, [*timesteps[1:], None], strict=True)


def _alpha_bar_at(alpha_bar, t):
    return 1.0 if t is None else alpha_bar[t]
