"""A trained model as the denoiser that samplers call: an estimate of x_0 at any noise level, with
guidance.

The model is evaluated at x_t = √ᾱ·(x_0 + σ·eps) and at the timestep for which √((1-ᾱ)/ᾱ) is σ. What
it was trained to predict is linear in x_0 and in the sampler's x = x_0 + σ·eps, so the estimate is
a·x + b·answer:

    eps   x_0 = x - σ · answer
    v     x_0 = ᾱ · x - σ·√ᾱ · answer               from v = √ᾱ·eps - √(1-ᾱ)·x_0
    x_0   x_0 = answer

On another path (paths.py) x_t = a · x and s = σ · a, and an answer is p · x_0 + q · eps:
x_0 = (q · a / D) · x - (s / D) · answer with D = q · a - s · p (kernels/diffusion/levels.py).

Guidance (Ho and Salimans 2022, arXiv:2207.12598, eq. 6, with the scale shifted so that 1 means no
guidance):

    answer = unconditional + cfg_scale · (conditional - unconditional)

For eps this is the papers' formula; v and x_0 are linear in eps at a given x_t, so for them it is
the same guidance.

Autoguidance (Karras et al. 2024, arXiv:2406.02507, eq. 3) takes another model of the same images
instead of the missing class, a smaller one or one trained for less long. Each may have its own path
and prediction, so estimates are mixed:

    x_0 = x_0 of the guide + guide_scale · (x_0 of the model - x_0 of the guide)

Either kind may be limited to an interval of σ (Kynkäänniemi et al. 2024, arXiv:2404.07724, eq. 6):
at levels outside of (low, high] the model answers alone, which costs one evaluation.
"""

import copy
import numbers

import numpy as np

from ..device import download, upload
from ..device.batch_invariance import evaluated
from ..errors import UsageError, shown
from ..kernels.diffusion.levels import target_reference, turn_reference
from ..kernels.diffusion.sampler import estimate_x_0, guide, model_input, on_engine
from ..nn import Tensor
from ..nn.model import Model
from ..settings import say


class Denoiser:
    """denoise(x, sigma) -> x_0, for one batch.

    model: a UNet or DiT; diffusion: its `Diffusion`; labels: int32 (B,) on the model's engine, or
    None
    clip: keep each estimate within [-1, 1]
    cfg_scale: strength of the guidance, None or 1 for none; cfg_channels: how many channels to
        guide, the first ones. Both answers are computed as one batch of 2 B: first those with the
        classes, then those without.
    guide: the `Denoiser` of the model that guides instead, which is given the same classes if it
    has any; guide_scale
    interval: (low, high), the σ between which either guides, high included; None: all
    """

    def __init__(
        self,
        model,
        diffusion,
        labels=None,
        clip=True,
        cfg_scale=None,
        cfg_channels=None,
        guide=None,
        guide_scale=None,
        interval=None,
    ):
        self.model, self.prediction, self.labels, self.clip = (
            model,
            diffusion.prediction,
            labels,
            clip,
        )
        self.path, self.sigma_data = diffusion.path, diffusion.sigma_data
        self.cfg_scale = None if cfg_scale == 1 else cfg_scale
        self.cfg_channels = cfg_channels or model.in_channels
        self.guide, self.guide_scale, self.interval = guide, guide_scale, interval
        if labels is not None:
            self.labels = upload(self.with_null(download(labels)), labels)

    @property
    def copies(self):
        """How many copies of each image the model is given."""
        return 1 if self.cfg_scale is None else 2

    def of(self, model, guide=None):
        """The same for another model; guide: another one that guides it, where one does."""
        new = copy.copy(self)
        new.model = model
        if guide is not None:
            new.guide = self.guide.of(guide)
        return new

    def guided(self, sigma):
        """Whether there is guidance at this level."""
        return (self.guide is not None or self.cfg_scale is not None) and (
            self.interval is None or self.interval[0] < sigma <= self.interval[1]
        )

    def numbers(self, sigma):
        """The numbers that `estimate` needs for a level: the model's timestep, the image's factor
        in x_t, and the factors of x and of the answer in x_0. Then the same of a guide, and the
        factors of both estimates."""
        a, seen = self.path.level(sigma)
        s = sigma * a
        _, q = target_reference(self.prediction, a, s, self.sigma_data)
        turn = turn_reference(self.prediction, a, s, self.sigma_data)
        own = seen, a, q * a / turn + 0.0, -s / turn  # + 0.0: no negative zero
        if self.guide is None or not self.guided(sigma):
            return own
        return *own, *self.guide.numbers(sigma), self.guide_scale, 1 - self.guide_scale

    def __call__(self, x, sigma):
        return self.with_prediction(x, sigma)[0]

    def with_prediction(self, x, sigma):
        """(x_0, the model's whole answer): with a learned variance it has further channels."""
        numbers = on_engine(np.array(self.numbers(sigma), np.float32), x)
        return self.estimate(x, numbers, self.labels, guided=self.guided(sigma))

    def with_null(self, labels):
        """NumPy labels (B,) as the model takes them: with guidance (2 B,), the null class in the
        second half."""
        return (
            labels
            if self.cfg_scale is None
            else np.append(labels, np.full_like(labels, self.model.null_class))
        )

    def _answer(self, x_t, t, labels, *conditioning):
        known = {"conditioning": [Tensor(part) for part in conditioning]} if conditioning else {}
        return self.model(Tensor(x_t), t, labels, **known).data

    def estimate(self, x, numbers, labels, conditioning=(), guided=True):
        """`with_prediction` at the level with these `numbers`, float32 on the engine; labels: of
        `with_null`; conditioning: arrays of the model's for this level and these labels, where it
        is known; guided: as `self.guided` says of the level."""
        doubled = guided and self.cfg_scale is not None
        x_t, t = model_input(x, numbers[:2], 2 if doubled else 1)
        if not doubled:  # the first half, where there are two
            labels, *conditioning = (
                part if part is None else part[: len(x)] for part in (labels, *conditioning)
            )
        answer = evaluated(
            self._answer, x_t, t, labels, *conditioning, whole=not isinstance(self.model, Model)
        )
        if doubled:
            answer = guide(answer[: len(x)], answer[len(x) :], self.cfg_scale, self.cfg_channels)
        if self.guide is None or not guided:
            return estimate_x_0(x, answer, numbers[2:4], self.clip), answer
        own = estimate_x_0(x, answer, numbers[2:4], False)
        other, _ = self.guide.estimate(
            x, numbers[4:8], None if self.guide.model.num_classes is None else labels
        )
        # the mean of both, weighted and clipped
        return estimate_x_0(own, other, numbers[8:], self.clip), answer


def check_interval(interval, called="cfg_interval"):
    """(low, high) as floats; a `UsageError` for what is no interval of σ. called: how a message
    calls it."""
    if not (
        isinstance(interval, tuple | list)
        and len(interval) == 2
        and all(isinstance(v, numbers.Real) and not isinstance(v, bool) for v in interval)
        and 0 <= interval[0] < interval[1] < np.inf
    ):  # a NaN, too
        said = say(tuple(interval)) if isinstance(interval, tuple | list) else shown(interval)
        raise UsageError(
            f"{called} {said} must be two noise levels sigma, LOW,HIGH, such as 0.3,5: finite, at least "
            "0, the lower one first."
        )
    return tuple(map(float, interval))
