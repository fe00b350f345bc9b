"""Noise schedules: how much of the image is left after each step of the forward process.

    q(x_t | x_0) = N(√ᾱ_t · x_0, (1 - ᾱ_t) · I),   ᾱ_t = Π_{s ≤ t} (1 - β_s)

linear: β from 1e-4 to 0.02 for T = 1000, scaled by 1000 / T for another T (Ho et al. 2020, arXiv:2006.11239,
section 4).
cosine: ᾱ_t = f(t) / f(0), f(t) = cos²((t/T + 0.008) / 1.008 · π/2), β at most 0.999 (Nichol and Dhariwal 2021,
arXiv:2102.09672, equation 17).

Everything here is float64 on the host; `Diffusion` rounds the tables to float32 once.
"""
import math

import numpy as np

from ..errors import UsageError


def linear_betas(steps):
    """β_0 … β_{T-1}, float64 (steps,)."""
    scale = 1000 / steps
    return np.minimum(np.linspace(scale * 1e-4, scale * 0.02, steps), 0.999)


def cosine_betas(steps):
    """β_0 … β_{T-1}, float64 (steps,)."""
    def f(u):
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    return np.array([min(1 - f((i + 1) / steps) / f(i / steps), 0.999) for i in range(steps)])


SCHEDULES = {"linear": linear_betas, "cosine": cosine_betas}


def alpha_bars(name, steps):
    """ᾱ_0 … ᾱ_{T-1} of a named schedule, float64 (steps,)."""
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}: use {' or '.join(SCHEDULES)}.")
    if steps < 1:
        raise UsageError(f"the number of diffusion steps must be at least 1, not {steps}.")
    return np.cumprod(1 - SCHEDULES[name](steps))


def spaced_timesteps(total, count):
    """`count` of the timesteps 0 … total-1, evenly spaced, the last one included, descending (int32)."""
    if not 1 <= count <= total:
        raise UsageError(f"sampling steps must be between 1 and the {total} steps of the diffusion, not {count}.")
    return np.round(np.linspace(total - 1, 0, count) if count > 1 else np.array([total - 1])).astype(np.int32)
