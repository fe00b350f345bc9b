"""A trained model as the denoiser that samplers call: an estimate of x_0 at any noise level, with guidance.

The model is evaluated at x_t = √ᾱ·(x_0 + σ·eps) and at the timestep for which √((1-ᾱ)/ᾱ) is σ. What it was trained to
predict is linear in x_0 and in the sampler's x = x_0 + σ·eps, so the estimate is a·x + b·answer:

    eps   x_0 = x - σ · answer
    v     x_0 = ᾱ · x - σ·√ᾱ · answer               from v = √ᾱ·eps - √(1-ᾱ)·x_0
    x_0   x_0 = answer

On another path (paths.py) x_t = a · x and s = σ · a, and an answer is p · x_0 + q · eps:
x_0 = (q · a / D) · x - (s / D) · answer with D = q · a - s · p (kernels/diffusion/levels.py).

Guidance (Ho and Salimans 2022, arXiv:2207.12598, eq. 6, with the scale shifted so that 1 means no guidance):

    answer = unconditional + cfg_scale · (conditional - unconditional)

For eps this is the papers' formula; v and x_0 are linear in eps at a given x_t, so for them it is the same guidance.
"""
import copy

import numpy as np

from ..device import download, upload
from ..kernels.any_batch import evaluated
from ..kernels.diffusion.levels import target_reference, turn_reference
from ..kernels.diffusion.sampler import estimate_x_0, guide, model_input, on_engine
from ..nn import Tensor
from ..nn.model import Model


class Denoiser:
    """denoise(x, sigma) -> x_0, for one batch.

    model: a UNet or DiT; diffusion: its `Diffusion`; labels: int32 (B,) on the model's engine, or None
    clip: keep each estimate within [-1, 1]
    cfg_scale: strength of the guidance, None or 1 for none; cfg_channels: how many channels to guide, the first ones.
        Both answers are computed as one batch of 2 B: first those with the classes, then those without.
    """

    def __init__(self, model, diffusion, labels=None, clip=True, cfg_scale=None, cfg_channels=None):
        self.model, self.prediction, self.labels, self.clip = model, diffusion.prediction, labels, clip
        self.path, self.sigma_data = diffusion.path, diffusion.sigma_data
        self.cfg_scale = None if cfg_scale == 1 else cfg_scale
        self.cfg_channels = cfg_channels or model.in_channels
        if labels is not None:
            self.labels = upload(self.with_null(download(labels)), labels)

    @property
    def copies(self):
        """How many copies of each image the model is given."""
        return 1 if self.cfg_scale is None else 2

    def of(self, model):
        """The same for another model."""
        new = copy.copy(self)
        new.model = model
        return new

    def numbers(self, sigma):
        """What `estimate` needs to know of a level: the timestep as the model sees it, the image's share in x_t, and
        the factors of x and of the answer in x_0."""
        a, seen = self.path.level(sigma)
        s = sigma * a
        _, q = target_reference(self.prediction, a, s, self.sigma_data)
        turn = turn_reference(self.prediction, a, s, self.sigma_data)
        return seen, a, q * a / turn + 0.0, -s / turn  # + 0.0: no negative zero

    def __call__(self, x, sigma):
        return self.with_prediction(x, sigma)[0]

    def with_prediction(self, x, sigma):
        """(x_0, the model's whole answer): with a learned variance it has further channels."""
        return self.estimate(x, on_engine(np.array(self.numbers(sigma), np.float32), x), self.labels)

    def with_null(self, labels):
        """NumPy labels (B,) as the model takes them: with guidance (2 B,), the null class in the second half."""
        return labels if self.cfg_scale is None else np.append(labels, np.full_like(labels, self.model.null_class))

    def _answer(self, x_t, t, labels, *conditioning):
        known = {"conditioning": [Tensor(part) for part in conditioning]} if conditioning else {}
        return self.model(Tensor(x_t), t, labels, **known).data

    def estimate(self, x, numbers, labels, conditioning=()):
        """`with_prediction` at the level with these `numbers`, float32 (4,) on the engine; labels: of `with_null`;
        conditioning: arrays of the model's for this level and these labels, where it is known."""
        x_t, t = model_input(x, numbers[:2], self.copies)
        answer = evaluated(self._answer, x_t, t, labels, *conditioning, whole=not isinstance(self.model, Model))
        if self.cfg_scale is not None:
            answer = guide(answer[:len(x)], answer[len(x):], self.cfg_scale, self.cfg_channels)
        return estimate_x_0(x, answer, numbers[2:], self.clip), answer
