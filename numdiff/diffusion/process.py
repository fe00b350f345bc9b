"""The diffusion process that a model is trained on: what it sees, what it is to predict, and the loss."""
import difflib
import inspect
import math
import numbers

import numpy as np

from ..device import is_device, upload
from ..errors import UsageError, shown
from ..kernels.diffusion.q_sample import q_sample_forward, velocity_forward
from ..kernels.embedding import embedding_forward
from ..nn import functional as F
from .schedule import alpha_bars

PREDICTIONS = ("eps", "v", "x_0")
LARGEST_STEPS = 100_000


def make_diffusion(options, backend=None):
    """The `Diffusion` with these options (a dict, another Diffusion, or None for the defaults); a `UsageError` for what
    is none."""
    known = [name for name in inspect.signature(Diffusion).parameters if name != "backend"]
    if isinstance(options, Diffusion):
        options = options.options
    if options is not None and not isinstance(options, dict):
        raise UsageError(f"diffusion must be a dict of {', '.join(known)}, or a Diffusion, and not {shown(options)}.")
    for name in options or {}:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(f"the diffusion has no option {name!r}{f'; did you mean {near[0]!r}?' if near else '.'}")
    return Diffusion(**(options or {}), backend=backend)


class Diffusion:
    """A noise schedule and a prediction target.

    steps: T; schedule: "linear" or "cosine"
    prediction: what the model's output means: "eps" (the noise), "x_0" (the image), or
        "v" = √ᾱ·eps - √(1-ᾱ)·x_0 (Salimans and Ho 2022, arXiv:2202.00512, appendix D)
    timestep_scale: the model sees timestep t as t · timestep_scale; 1000 / T is `rescale_timesteps` of
        improved-diffusion and guided-diffusion (the first's default)
    backend: where the tables lie (None: NumPy)
    vlb_weight: weight of the variational bound, in bits, in the loss of a learned variance. None: T / 1000, that is T
        terms times the paper's λ of 0.001, as in the public DiT and in guided-diffusion with rescale_learned_sigmas; 1:
        as in guided-diffusion without it
    """

    def __init__(self, steps: int = 1000, schedule: str = "linear", prediction: str = "eps", backend=None,
                 timestep_scale: float = 1.0, vlb_weight: float | None = None):
        if prediction not in PREDICTIONS:
            raise UsageError(f"unknown prediction {prediction!r}: use {', '.join(PREDICTIONS)}.")
        if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or not 1 <= steps <= LARGEST_STEPS:
            raise UsageError(f"diffusion steps {steps} must be a whole number from 1 to {LARGEST_STEPS:,}.")
        if not (isinstance(timestep_scale, numbers.Real) and 0 < timestep_scale < math.inf):
            raise UsageError(f"timestep_scale must be a number above 0, such as 1000 / {steps}, not "
                             f"{timestep_scale!r}.")
        self.steps, self.schedule, self.prediction = steps, schedule, prediction
        self.timestep_scale = float(timestep_scale)
        self.alpha_bar = alpha_bars(schedule, steps)  # float64, on the host
        self.tables = tuple(upload(table.astype(np.float32), backend)
                            for table in (np.sqrt(self.alpha_bar), np.sqrt(1 - self.alpha_bar)))
        seen = (np.arange(steps) * self.timestep_scale).astype(np.float32)  # by the model, at each timestep
        self.seen_timesteps = upload(seen[:, None], backend)
        self.bound_tables = tuple(upload(table.astype(np.float32), backend) for table in self._bound_tables())
        if vlb_weight is not None and not (isinstance(vlb_weight, numbers.Real) and 0 <= vlb_weight < math.inf):
            raise UsageError(f"vlb_weight {vlb_weight} must be a finite number of at least 0, or None for T / 1000.")
        self.vlb_weight = vlb_weight
        self.bound_weight = (steps / 1000 if vlb_weight is None else vlb_weight) / math.log(2)  # in bits

    @property
    def options(self) -> dict:
        """The arguments to rebuild it; timestep_scale and vlb_weight only if they differ from the values of old
        checkpoints."""
        more = {} if self.timestep_scale == 1 else {"timestep_scale": self.timestep_scale}
        if self.vlb_weight is not None:
            more["vlb_weight"] = self.vlb_weight
        return {"steps": self.steps, "schedule": self.schedule, "prediction": self.prediction, **more}

    def q_sample(self, x_0, eps, t):
        """x_t = √ᾱ_t·x_0 + √(1-ᾱ_t)·eps for timesteps t, int32 (B,). On the host they are checked."""
        if not is_device(t):
            t = self._checked(t)
        return q_sample_forward(x_0, eps, t, *self.tables)

    def _checked(self, t):
        """Check that these are timesteps of this process; NumPy would count negative ones from the end."""
        t = np.asarray(t)
        if t.dtype.kind not in "iu" or not ((t >= 0) & (t < self.steps)).all():
            raise UsageError(f"timesteps must be whole numbers from 0 to {self.steps - 1}, not "
                             f"{t[:3] if t.ndim else t}.")
        return t

    def model_timesteps(self, t):
        """What the model is given for timesteps t, int32 (B,): t itself, or float32 (B,) if they are rescaled."""
        return t if self.timestep_scale == 1 else embedding_forward(t, self.seen_timesteps).reshape(t.shape)

    def target(self, x_0, eps, t):
        """What the model should predict for x_t."""
        if self.prediction == "eps":
            return eps
        if self.prediction == "x_0":
            return x_0
        return velocity_forward(x_0, eps, t if is_device(t) else self._checked(t), *self.tables)

    def loss(self, prediction, target, x_0, t, learn_sigma=False, scale=1.0):
        """The training loss as a tensor of one value; `scale` multiplies its gradient.

        The mean squared error; with learn_sigma (the prediction then has twice the target's channels) also the
        variational bound of the learned variance, the hybrid loss of Nichol and Dhariwal 2021 (arXiv:2102.09672,
        eq. 16). Where x_0 is not in [-1, 1], as latents are not, the bound's last term still takes it for pixels.
        """
        if not learn_sigma:
            return F.mse(prediction, target, scale)
        if not is_device(t):
            t = self._checked(t)
        return F.hybrid_loss(prediction, target, x_0, t, self.bound_tables, self.bound_weight, scale)

    def _bound_tables(self):
        """(k, low, width) of kernels/diffusion/vlb.py in float64: low = log β̃_t and low + width = log β_t.

        β̃_0 is zero, so the logarithm of β̃_1 takes its place. k turns an error of the prediction into one of the
        reverse step's mean, √ᾱ_{t-1}·β_t/(1-ᾱ_t)·x_0 + …, through x_0 = (x_t - √(1-ᾱ)·eps)/√ᾱ = √ᾱ·x_t - √(1-ᾱ)·v.
        """
        now = self.alpha_bar
        before = np.concatenate(([1.0], now[:-1]))
        beta = 1 - now / before
        posterior = beta * (1 - before) / (1 - now)
        posterior[0] = posterior[1] if self.steps > 1 else beta[0]
        low, noise = np.log(posterior), np.sqrt(1 - now)
        k = np.sqrt(before) * beta / (1 - now) * {"eps": noise / np.sqrt(now), "v": noise, "x_0": -1.0}[self.prediction]
        return k, low, np.log(beta) - low
