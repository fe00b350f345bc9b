"""What a `Sampling` is made with."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..nn.model import Model


@dataclass(frozen=True, kw_only=True, eq=False)  # arrays have no one truth value
class SamplingConfig:
    """Settings of a `Sampling`.

    count: images; image i is made from the seed `seed` + i alone, whatever the batch
    steps: of the sampler; heun evaluates the model twice a step, the others once. A number, or
        guided-diffusion's respacing: "ddim50", "10,15,20" (see `respaced_timesteps`)
    sampler: a key of `SAMPLERS`; eta: noise of ddim (default 0) and euler-ancestral (default 1), 0
    to 1
    variance: of ddpm, "small", "large" or "learned" (default: learned if the model learned it, else
    small)
    spacing: of the levels, "timesteps" (default for ddpm and ddim), "karras" (for the others) or
        "logsnr"; on the path linear "time", even steps in t, in which heun then takes its mean
        (default, but for dpm++2m and euler-ancestral without a time_shift); on the path edm karras
        or logsnr
    time_shift: of the levels "time", s: t becomes s·t / (1 + (s-1)·t) (default: as the model was
    trained)
    s_churn, s_tmin, s_tmax, s_noise: for heun and euler, noise added as in EDM (see `raised` in
        samplers.py; default: s_churn 0, none)
    y: class indices (count,), or one for all, for a model with classes; None takes them in turn
    batch: images at a time; clip: keep each estimate of x_0 within [-1, 1] (default: if the model
    makes pixels)
    cfg_scale: classifier-free guidance, eps_uncond + cfg_scale · (eps_cond - eps_uncond); None or
    1: without
    cfg_channels: how many channels to guide, the first ones (default: all of the image's)
    cfg_interval: (low, high), the σ between which there is guidance, high included (default:
        everywhere). On the path linear σ is t / (1 - t)
    guide: autoguidance by another model of the same images and classes (or none), such as a smaller
        one or an earlier checkpoint; on the device of this one. guide_scale: 1 disables it
        (default: 2)
    known, mask: inpainting by RePaint: an image (H, W, C) in [-1, 1], and (H, W) with 1 where it is
        to be kept; jump, resamples: as in `repaint`
    init, strength: SDEdit (Meng et al. 2022, arXiv:2108.01073): an image (H, W, C) in [-1, 1], or
        latents, to which each image's noise is added, up to the level that `strength` of the steps
        remove: 0 returns it, 1 is sampling from noise alone (default: 0.6)
    invert: pictures (n, H, W, C) in [-1, 1], or latents, each of which is encoded to its noise and
        made again from it (inversion.py), by a sampler without noise. With slerp there is a row from
        each picture to the next, of the class of the row. count is n, or slerp · (n - 1)
    slerp: length of the rows, each of which goes from one seed's noise to the next seed's; image i
    is in row i // slerp
    schedule: learned steps, as a file of `numdiff schedule` has them, instead of steps, sampler and
    spacing
    eager: launch every kernel from Python; changes no bit. arena: device memory for the
        intermediate results of a step (default: the one that all inference shares)
    """

    count: int = 16
    steps: int | str = 50
    sampler: str = "ddim"
    eta: float | None = None
    seed: int = 0
    y: Any = None
    batch: int = 16
    clip: bool | None = None
    variance: str | None = None
    spacing: str | None = None
    cfg_scale: float | None = None
    cfg_channels: int | None = None
    known: np.ndarray | None = None
    mask: np.ndarray | None = None
    jump: int = 5
    resamples: int = 5
    init: np.ndarray | None = None
    strength: float | None = None
    slerp: int | None = None
    invert: np.ndarray | None = None
    eager: bool = False
    arena: Any = None
    s_churn: float | None = None
    s_tmin: float | None = None
    s_tmax: float | None = None
    s_noise: float | None = None
    time_shift: float | None = None
    cfg_interval: tuple[float, float] | None = None
    guide: Model | None = None
    guide_scale: float | None = None
    schedule: dict | None = None
