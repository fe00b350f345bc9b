"""What a sampler asks: a trained model as an estimate of x_0 at any noise level, with classifier-free guidance.

A model answers for x_t = √ᾱ·(x_0 + σ·eps) and the timestep whose √((1-ᾱ)/ᾱ) is σ. What it was trained to give is linear
in x_0 and in the sampler's x = x_0 + σ·eps, so that the estimate is a·x + b·answer:

    eps   x_0 = x - σ · answer
    v     x_0 = ᾱ · x - σ·√ᾱ · answer               from v = √ᾱ·eps - √(1-ᾱ)·x_0
    x_0   x_0 = answer

Guidance (Ho and Salimans 2022, arXiv:2207.12598, eq. 6, counted so that 1 is none):

    answer = unconditional + cfg_scale · (conditional - unconditional)

For eps this is the papers' formula; v and x_0 are linear in eps at a given x_t, so it is the same guidance for them.
"""
import math

import numpy as np

from ..device import upload
from ..kernels.sampler import combine, estimate_x_0, guide
from ..nn import Tensor
from .schedule import sigma_table, timestep_at


class Denoiser:
    """denoise(x, sigma) -> x_0, for one batch.

    model: a UNet or DiT; diffusion: its `Diffusion`; labels: int32 (B,) on the model's engine, or None
    clip: keep each estimate within [-1, 1]
    cfg_scale: strength of the guidance, None or 1 for none; cfg_channels: guide only the first so many channels
    watch: called before each evaluation with x_t, in the model's units
    """

    def __init__(self, model, diffusion, labels=None, clip=True, cfg_scale=None, cfg_channels=None, watch=None):
        self.model, self.prediction, self.labels = model, diffusion.prediction, labels
        self.clip, self.watch = clip, watch
        self.table = sigma_table(diffusion.alpha_bar)
        self.cfg_scale = None if cfg_scale == 1 else cfg_scale
        self.cfg_channels = cfg_channels or model.in_channels
        if self.cfg_scale is not None:
            self.null_labels = upload(np.full(labels.shape, model.null_class, np.int32), labels)

    def __call__(self, x, sigma):
        return self.with_prediction(x, sigma)[0]

    def with_prediction(self, x, sigma):
        """(x_0, the model's whole answer): a model with learned variance has further channels."""
        alpha_bar = 1 / (1 + sigma**2)
        x_t = combine((math.sqrt(alpha_bar), x))
        if self.watch:
            self.watch(x_t)
        t = upload(np.full(x.shape[0], timestep_at(sigma, self.table), np.float32), x)
        answer = self.model(Tensor(x_t), t, self.labels).data
        if self.cfg_scale is not None:
            unconditional = self.model(Tensor(x_t), t, self.null_labels).data
            answer = guide(answer, unconditional, self.cfg_scale, self.cfg_channels)
        a, b = {"eps": (1.0, -sigma), "v": (alpha_bar, -sigma * math.sqrt(alpha_bar)), "x_0": (0.0, 1.0)}[
            self.prediction]
        return estimate_x_0(x, answer, a, b, self.clip), answer
