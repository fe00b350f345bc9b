"""Noise schedules: how much of the image is left after each step of the forward process; and the
levels that samplers visit.

    q(x_t | x_0) = N(√ᾱ_t · x_0, (1 - ᾱ_t) · I),   ᾱ_t = Π_{s ≤ t} (1 - β_s)

linear: β from 1e-4 to 0.02 for T = 1000, scaled by 1000 / T for another T (Ho et al. 2020,
arXiv:2006.11239, section 4).
cosine: ᾱ_t = f(t) / f(0), f(t) = cos²((t/T + 0.008) / 1.008 · π/2), β at most 0.999 (Nichol and
Dhariwal 2021, arXiv:2102.09672, equation 17).

The same process in the units of the samplers is x_0 + σ · eps with σ = √((1 - ᾱ) / ᾱ), for any σ
between those of the first and the last timestep. The model is then evaluated at a fractional
timestep.

Everything here is float64 on the host; `Diffusion` rounds the tables to float32 once.
"""

import itertools
import math
import numbers
import re

import numpy as np

from ..errors import UsageError, quoted, shown


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


def check_whole(name, value):
    """Raise a `UsageError` for what is no whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UsageError(f"{name} must be a whole number, and not {shown(value)}.")


def alpha_bars(name: str, steps: int) -> np.ndarray:
    """ᾱ_0 … ᾱ_{T-1} of a named schedule, float64 (steps,)."""
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {quoted(name)}: use {' or '.join(SCHEDULES)}.")
    check_whole("the number of diffusion steps", steps)
    if steps < 1:
        raise UsageError(f"the number of diffusion steps must be at least 1, not {steps}.")
    return np.cumprod(1 - SCHEDULES[name](steps))


def spaced_timesteps(total: int, count: int) -> np.ndarray:
    """`count` of the timesteps 0 … total-1, evenly spaced, the last one included, descending
    (int32)."""
    for name, value in (("the diffusion's steps", total), ("sampling steps", count)):
        check_whole(name, value)
    if not 1 <= count <= total:
        raise UsageError(
            f"sampling steps must be between 1 and the {total} steps of the diffusion, not {count}."
        )
    return np.array(_section(0, total, count)[::-1] if count > 1 else [total - 1], np.int32)


def respaced_timesteps(total, spacing):
    """The timesteps that guided-diffusion's `timestep_respacing` names, descending (int32).

    spacing: "ddim50", a stride from 0 that leaves exactly 50 (a `UsageError` if there is none);
        "10,15,20", that many in each third, evenly from its first to its last; or "250", evenly
        from all
    """
    stride = re.fullmatch(r"ddim([0-9]{1,6})", spacing)
    if stride:
        count = int(stride[1])
        steps = next(
            (steps for i in range(1, total) if len(steps := range(0, total, i)) == count), None
        )
        if steps is None:
            raise UsageError(
                f"no stride takes {count} of the {total} timesteps of the diffusion: use another number, "
                f"or {count} without the word."
            )
        return np.array(steps[::-1], np.int32)
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", spacing):
        raise UsageError(
            "sampling steps must be a number, or a respacing such as ddim50 or 10,15,20, not "
            f"{spacing[:60]!r}."
        )
    counts = [int(count) for count in spacing.split(",")]
    if len(counts) == 1:
        return spaced_timesteps(total, counts[0])
    sizes = [total // len(counts) + (i < total % len(counts)) for i in range(len(counts))]
    for count, size in zip(counts, sizes, strict=True):
        if count > size:
            raise UsageError(
                f"sampling steps {spacing!r}: a section has only {size} of the {total} timesteps of the "
                f"diffusion, not {count}."
            )
    starts = itertools.accumulate(sizes, initial=0)
    steps = [
        t
        for first, size, count in zip(starts, sizes, counts, strict=False)
        for t in _section(first, size, count)
    ]
    if not steps:
        raise UsageError(f"sampling steps {spacing!r} choose no timestep: give at least one.")
    return np.array(steps[::-1], np.int32)


def _section(first, size, count):
    """`count` whole numbers, evenly over `size` from `first`; a rounded sum of strides, as in
    guided-diffusion."""
    strides = itertools.repeat((size - 1) / (count - 1) if count > 1 else 1)
    return [
        first + round(at)
        for at in itertools.islice(itertools.accumulate(strides, initial=0.0), count)
    ]


# The levels of a sampler --------------------------------------------------------------------------

# bends Karras's levels: more of them, and shorter steps, where there is little noise (EDM, table 1)
RHO = 7
# EDM's range (table 1), as far as the schedule reaches; see `_levels`
SIGMA_MIN, SIGMA_MAX = 0.002, 80.0


def sigma_table(alpha_bar):
    """σ of every timestep, float64, ascending."""
    return np.sqrt((1 - alpha_bar) / alpha_bar)


def timestep_at(sigma, table):
    """The timestep of a σ, a float: interpolated in log σ, and exactly whole at a level of the
    table."""
    t = float(np.interp(math.log(sigma), np.log(table), np.arange(len(table))))
    return float(round(t)) if abs(t - round(t)) < 1e-6 else t


def timestep_sigmas(table, steps):
    """Levels at evenly spaced whole timesteps, as DDPM and DDIM use them."""
    return table[spaced_timesteps(len(table), steps)]


def karras_sigmas(table, steps):
    """Karras et al. 2022 (arXiv:2206.00364), eq. 5: even steps in σ^(1/ρ), ρ = 7."""
    return _levels(
        table,
        steps,
        lambda high, low, n: np.linspace(high ** (1 / RHO), low ** (1 / RHO), n) ** RHO,
    )


def logsnr_sigmas(table, steps):
    """Even steps in λ = -log σ, in which DPM-Solver is formulated: Lu et al. 2022
    (arXiv:2206.00927), section 3.4."""
    return _levels(table, steps, np.geomspace)


SPACINGS = {"timesteps": timestep_sigmas, "karras": karras_sigmas, "logsnr": logsnr_sigmas}


def sampling_sigmas(alpha_bar, spacing, steps):
    """The levels of a sampler of `steps` steps: descending, `steps` of them and the final 0, as
    Python floats.

    steps: a number; or timesteps as `respaced_timesteps` takes them, whatever the spacing
    """
    if isinstance(steps, str):
        return [*map(float, sigma_table(alpha_bar)[respaced_timesteps(len(alpha_bar), steps)]), 0.0]
    if spacing not in SPACINGS:
        raise UsageError(f"unknown spacing {quoted(spacing)}: use {', '.join(SPACINGS)}.")
    if not isinstance(steps, numbers.Integral) or isinstance(steps, bool):
        raise UsageError(f"sampling steps must be a whole number, not {steps!r}.")
    if steps < 1:
        raise UsageError(f"sampling steps must be at least 1, not {steps}.")
    return [*map(float, SPACINGS[spacing](sigma_table(alpha_bar), steps)), 0.0]


def _levels(table, steps, between):
    """`steps` levels by between(high, low, count) over EDM's range; if the schedule continues above
    it, the first level is the schedule's last.

    A sampler begins with pure noise, which is the model's input at the last timestep, but not at σ
    = 80. Images of 64×64×3 pixels with a mean of 0.5 have a length of 59 in that direction. So
    noise without them is off by 0.7 standard deviations, and every sample comes out too dark. One
    step from the top restores the mean. (With an exact denoiser of emoji64, 20 steps of
    DPM-Solver++(2M) reach a Fréchet distance of 0.25 with it and of 0.76 without.)
    """
    low, high, top = max(SIGMA_MIN, table[0]), min(SIGMA_MAX, table[-1]), table[-1]
    if top > high:
        return np.concatenate(([top], between(high, low, steps - 1) if steps > 1 else []))
    return between(high, low, steps)
