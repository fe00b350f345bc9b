"""The diffusion process that a model is trained on: what it sees, what it is asked to predict, and
the loss.

A path (paths.py) says what the model sees; a prediction defines its output; a loss, what of its
answer is measured. Each prediction is a p · x_0 + q · eps, and a loss a weight of each level:
kernels/diffusion/levels.py has both.
"""

import inspect
import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..configuration import configured_by, given_values
from ..device import AnyArray, is_device, upload
from ..errors import UsageError, near_miss, quoted, shown
from ..kernels.diffusion import levels as L
from ..kernels.diffusion.q_sample import q_sample_forward, velocity_forward
from ..kernels.embedding import embedding_forward
from ..kernels.random import PURPOSE_NOISE, PURPOSE_TIMESTEP, random_integers, random_normal
from ..nn import functional as F
from ..nn.model import check_magnitude, check_types
from ..nn.tensor import Tensor
from ..settings import say
from .paths import DiscretePath, EdmPath, LinearPath
from .schedule import alpha_bars

PREDICTIONS = ("eps", "v", "x_0", "flow", "edm")
PATHS = ("discrete", "linear", "edm")
TIME_SAMPLINGS = ("uniform", "logit-normal")
# of each path, where none is given
PATH_PREDICTIONS = {"discrete": "eps", "linear": "flow", "edm": "edm"}
# mean and standard deviation of log σ; EDM's: table 1
NOISE = {"linear": (0.0, 1.0), "edm": (-1.2, 1.2)}
LARGEST_STEPS = 100_000


def make_diffusion(options, backend=None):
    """The `Diffusion` with these options (a dict, another Diffusion, or None for the defaults); a
    `UsageError` for what is none."""
    known = [
        name
        for name in inspect.signature(Diffusion).parameters
        if name not in ("backend", "config")
    ]
    if isinstance(options, Diffusion):
        options = options.options
    if options is not None and not isinstance(options, dict):
        raise UsageError(
            f"diffusion must be a dict of {', '.join(known)}, or a Diffusion, and not {shown(options)}."
        )
    for name in options or {}:
        if name not in known:
            raise UsageError(
                f"the diffusion has no option {name!r}{near_miss(name, known)}: use some of "
                f"{', '.join(known)}."
            )
    return Diffusion(**(options or {}), backend=backend)


class Levels(NamedTuple):
    """Noise levels of the images of a step, drawn on the device; `rows` is each image's index in
    the other arrays.

    rows: int32 (B,); the others float32 (B,): x_t = signal · x_0 + noise · eps; the model's
    noise-level input; the target times its weight, as target_x_0 · x_0 + target_eps · eps; the
    weight
    """

    rows: Any
    signal: Any
    noise: Any
    seen: Any
    target_x_0: Any
    target_eps: Any
    weight: Any


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """Settings of a `Diffusion` other than its timesteps and its prediction.

    path: "discrete", whole timesteps of a schedule; "linear", x_t = (1 - t)·x_0 + t·eps, t in (0,
        1); or "edm", EDM's preconditioning of x_0 + σ·eps
    loss: what the squared error is of, one of these; None: of what is predicted. "flow" with the
        prediction "x_0" is JiT's: of (x_t - x_0) / t, t from below no less than 0.05; what other
        pairs divide by is bounded likewise (kernels/diffusion/levels.py). min_snr_gamma: instead,
        the error of x_0 times min(SNR, γ) (Hang et al. 2023, arXiv:2303.09556), whatever is
        predicted
    timestep_scale: the model sees timestep t as t · timestep_scale; 1000 / T is `rescale_timesteps`
        of improved-diffusion and guided-diffusion (the first's default), and 1000 that of the path
        linear
    time_sampling: of the path linear, how t is drawn in training: "uniform" or "logit-normal"
    noise_mean, noise_std: of log σ, which is logit t, where it is drawn from a normal distribution
        (defaults: 0 and 1; of the path edm -1.2 and 1.2). JiT's -0.8 counts from the noise's end:
        here it is 0.8
    time_shift: of the path linear, s: t becomes s·t / (1 + (s-1)·t), in training and in sampling
    sigma_data: of the path edm, standard deviation of the images
    vlb_weight: weight of the variational bound, in bits, in the loss of a learned variance. None: T
        / 1000, that is T terms times the paper's λ of 0.001, as in the public DiT and in
        guided-diffusion with rescale_learned_sigmas; 1: as in guided-diffusion without it
    """

    path: str = "discrete"
    loss: str | None = None
    min_snr_gamma: float | None = None
    time_sampling: str = "uniform"
    noise_mean: float | None = None
    noise_std: float | None = None
    time_shift: float = 1.0
    sigma_data: float = 0.5
    vlb_weight: float | None = None
    timestep_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Objective(DiffusionConfig):
    """The settings that determine what a model learns, as `Diffusion` has them, and whether the model
    learns its variance."""

    prediction: str | None
    learn_sigma: bool = False


@configured_by(DiffusionConfig)
class Diffusion:
    """A path from image to noise, a prediction target and a loss.

    steps: T; schedule: "linear" or "cosine"
    prediction: what the model's output means: "eps" (the noise), "x_0" (the image), "v" = √ᾱ·eps -
        √(1-ᾱ)·x_0 (Salimans and Ho 2022, arXiv:2202.00512, appendix D; of other paths a·eps -
        s·x_0), "flow" = eps - x_0, or "edm", the network F of EDM, for the path edm alone. None:
        eps, flow or edm, by the path
    backend: where the tables are (None: NumPy)
    """

    def __init__(
        self,
        steps: int = 1000,
        schedule: str = "linear",
        prediction: str | None = None,
        backend: Any = None,
        config: DiffusionConfig | None = None,
        **settings: Any,
    ):
        given = DiffusionConfig(**given_values(DiffusionConfig, config, settings, "Diffusion"))
        check_types(Diffusion.__init__, {"schedule": schedule, "prediction": prediction})
        texts = "path", "loss", "time_sampling"
        check_types(DiffusionConfig, {name: getattr(given, name) for name in texts})
        check_magnitude("vlb_weight", given.vlb_weight)
        check_objective(Objective(prediction=prediction, **vars(given)))
        path, timestep_scale = given.path, given.timestep_scale
        self.time_sampling, self.time_shift, self.sigma_data = (
            given.time_sampling,
            float(given.time_shift),
            float(given.sigma_data),
        )
        self.min_snr_gamma = given.min_snr_gamma
        self.noise = tuple(
            default if given is None else float(given)
            for given, default in zip(
                (given.noise_mean, given.noise_std), NOISE.get(path, (0.0, 1.0)), strict=True
            )
        )
        if (
            isinstance(steps, bool)
            or not isinstance(steps, numbers.Integral)
            or not 1 <= steps <= LARGEST_STEPS
        ):
            raise UsageError(
                f"diffusion steps {quoted(steps)} must be a whole number from 1 to {LARGEST_STEPS:,}."
            )
        if not (isinstance(timestep_scale, numbers.Real) and 0 < timestep_scale < 1e30):
            raise UsageError(
                f"timestep_scale must be a number above 0, as 1000 / {steps} is, not "
                f"{quoted(timestep_scale)}."
            )
        self.steps, self.schedule, self.path_name = steps, schedule, path
        self.timestep_scale = float(timestep_scale)
        self.path = {
            "discrete": lambda: DiscretePath(alpha_bars(schedule, steps), self.timestep_scale),
            "linear": lambda: LinearPath(self.timestep_scale, self.time_shift),
            "edm": lambda: EdmPath(self.sigma_data),
        }[path]()
        self.prediction = prediction or PATH_PREDICTIONS[path]
        self.measured = (
            L.MIN_SNR
            if given.min_snr_gamma is not None
            else L.PLAIN
            if given.loss in (None, self.prediction)
            else given.loss
        )
        self.vlb_weight = given.vlb_weight
        self.continuous = path != "discrete"
        if not self.continuous:
            self._tables(steps, backend)

    def _tables(self, steps, backend):
        """Tables by timestep, float32 on the device: the values that the continuous paths compute
        from their draws."""
        schedule, vlb_weight = self.schedule, self.vlb_weight
        self.alpha_bar = alpha_bars(schedule, steps)  # float64, on the host
        self.tables = tuple(
            upload(table.astype(np.float32), backend)
            for table in (np.sqrt(self.alpha_bar), np.sqrt(1 - self.alpha_bar))
        )
        # by the model, at each timestep
        seen = (np.arange(steps) * self.timestep_scale).astype(np.float32)
        self.seen_timesteps = upload(seen[:, None], backend)
        # in bits
        self.bound_weight = (steps / 1000 if vlb_weight is None else vlb_weight) / math.log(2)
        self.bound_tables = tuple(
            upload(table.astype(np.float32), backend) for table in self._bound_tables()
        )
        # what `target` has without
        if self.measured == L.PLAIN and self.prediction in ("eps", "x_0", "v"):
            self.target_tables = None
            return
        a, s = np.sqrt(self.alpha_bar), np.sqrt(1 - self.alpha_bar)
        p, q = L.target_reference(self.prediction, a, s)
        k = L.weight_reference(self._aim, a, s)
        self.target_tables = tuple(
            upload(table.astype(np.float32), backend) for table in (k * p, k * q, k)
        )

    @property
    def options(self) -> dict:
        """The arguments to rebuild it; timestep_scale and vlb_weight only if they differ from the
        values of old checkpoints."""
        more = {} if self.timestep_scale == 1 else {"timestep_scale": self.timestep_scale}
        if self.vlb_weight is not None:
            more["vlb_weight"] = self.vlb_weight
        if self.measured not in (L.PLAIN, L.MIN_SNR):
            more["loss"] = self.measured
        if self.min_snr_gamma is not None:
            more["min_snr_gamma"] = self.min_snr_gamma
        if not self.continuous:
            return {
                "steps": self.steps,
                "schedule": self.schedule,
                "prediction": self.prediction,
                **more,
            }
        more = {"path": self.path_name, "prediction": self.prediction, **more}
        if self.path_name == "linear":
            more |= {"time_sampling": self.time_sampling, "time_shift": self.time_shift}
        else:
            more["sigma_data"] = self.sigma_data
        return {
            **more,
            **({"noise_mean": self.noise[0], "noise_std": self.noise[1]} if self.normal else {}),
        }

    @property
    def _aim(self):
        """What is predicted and what the loss measures, as kernels take it."""
        return L.aim_of(
            L.LINEAR if self.path_name == "linear" else L.EDM,
            self.prediction,
            self.measured,
            self.timestep_scale,
            self.sigma_data,
            self.min_snr_gamma or 0.0,
        )

    @property
    def normal(self) -> bool:
        """Whether log σ is drawn from a normal distribution."""
        return self.path_name == "edm" or self.time_sampling == "logit-normal"

    def inputs_of(self, model: Any, x_0: AnyArray, random: Any) -> tuple:
        """What a training step draws for images x_0 before its forward pass, for `loss_of`. random:
        what counts the step's random numbers, with attributes seed, step, samples as of `draw`."""
        where = random.step, random.samples
        t = self.draw(random.seed, *where)
        eps = random_normal(x_0.shape, random.seed, PURPOSE_NOISE, *where, like=x_0)
        return x_0, self.q_sample(x_0, eps, t), self.target(x_0, eps, t), t

    def loss_of(
        self, model: Any, inputs: tuple, labels: AnyArray | None, random: Any, scale: float
    ) -> Tensor:
        """The loss of a training step, on the tape; scale multiplies its gradient."""
        x_0, x_t, target, t = inputs
        prediction = model(Tensor(x_t), self.model_timesteps(t), labels, randomness=random)
        return self.loss(prediction, target, x_0, t, model.learn_sigma, scale)

    def draw(self, seed: int, step: AnyArray, samples: AnyArray) -> AnyArray | Levels:
        """The noise levels of images in a training step: timesteps, int32 (B,), or `Levels`.
        Counted, as all randomness: seed an int, step uint32 (1,), samples uint32 (B,), in device
        memory."""
        if not self.continuous:
            return random_integers(seed, PURPOSE_TIMESTEP, step, samples, self.steps)
        levels, rows = L.levels_forward(
            seed,
            PURPOSE_TIMESTEP,
            step,
            samples,
            L.draw_of(self.normal, *self.noise, self.time_shift),
            self._aim,
        )
        return Levels(rows, *(levels[i : i + 1].reshape(-1) for i in range(6)))

    def q_sample(self, x_0: AnyArray, eps: AnyArray, t: AnyArray | Levels) -> AnyArray:
        """x_t = √ᾱ_t·x_0 + √(1-ᾱ_t)·eps for timesteps t, int32 (B,). On the host they are checked."""
        if isinstance(t, Levels):
            return q_sample_forward(x_0, eps, t.rows, t.signal, t.noise)
        if not is_device(t):
            t = self._checked(t)
        return q_sample_forward(x_0, eps, t, *self.tables)

    def _checked(self, t):
        """Check that these are timesteps of this process; NumPy would count negative ones from the
        end."""
        t = np.asarray(t)
        if t.dtype.kind not in "iu" or not ((t >= 0) & (t < self.steps)).all():
            raise UsageError(
                f"timesteps must be whole numbers from 0 to {self.steps - 1}, not "
                f"{t[:3] if t.ndim else t}."
            )
        return t

    def model_timesteps(self, t: AnyArray | Levels) -> AnyArray:
        """The model's input for timesteps t, int32 (B,): t itself, or float32 (B,) where they are
        rescaled."""
        if isinstance(t, Levels):
            return t.seen
        return (
            t
            if self.timestep_scale == 1
            else embedding_forward(t, self.seen_timesteps).reshape(t.shape)
        )

    def target(self, x_0: AnyArray, eps: AnyArray, t: AnyArray | Levels) -> AnyArray:
        """The model's target for x_t; if the loss weighs outputs, times the weight."""
        if self.measured == L.PLAIN and self.prediction == "eps":
            return eps
        if self.measured == L.PLAIN and self.prediction == "x_0":
            return x_0
        if isinstance(t, Levels):
            return q_sample_forward(x_0, eps, t.rows, t.target_x_0, t.target_eps)
        if self.measured != L.PLAIN or self.prediction != "v":
            return q_sample_forward(
                x_0, eps, t if is_device(t) else self._checked(t), *self.target_tables[:2]
            )
        return velocity_forward(x_0, eps, t if is_device(t) else self._checked(t), *self.tables)

    def loss(
        self,
        prediction: Tensor,
        target: AnyArray,
        x_0: AnyArray,
        t: AnyArray | Levels,
        learn_sigma: bool = False,
        scale: Any = 1.0,
    ) -> Tensor:
        """The training loss as a tensor of one value; `scale` multiplies its gradient.

        The mean squared error; with learn_sigma (the prediction then has twice the target's
        channels) also the variational bound of the learned variance, the hybrid loss of Nichol and
        Dhariwal 2021 (arXiv:2102.09672, eq. 16). Where x_0 is not in [-1, 1], as latents are not,
        the bound's last term still takes it for pixels.
        """
        if self.measured != L.PLAIN:
            where, weight = (
                (t.rows, t.weight)
                if isinstance(t, Levels)
                else (t if is_device(t) else self._checked(t), self.target_tables[2])
            )
            prediction = F.weigh(prediction, where, weight)
        if not learn_sigma:
            return F.mse(prediction, target, scale)
        if not is_device(t):
            t = self._checked(t)
        return F.hybrid_loss(
            prediction, target, x_0, t, self.bound_tables, self.bound_weight, scale
        )

    def _bound_tables(self):
        """(k, low, width) of extras/learned_variance/vlb.py in float64: low = log β̃_t and low + width =
        log β_t.

        β̃_0 is zero, so the logarithm of β̃_1 takes its place. k turns an error of the prediction
        into one of the reverse step's mean, √ᾱ_{t-1}·β_t/(1-ᾱ_t)·x_0 + …, through x_0 = (x_t -
        √(1-ᾱ)·eps)/√ᾱ = √ᾱ·x_t - √(1-ᾱ)·v.
        """
        now = self.alpha_bar
        before = np.concatenate(([1.0], now[:-1]))
        beta = 1 - now / before
        posterior = beta * (1 - before) / (1 - now)
        posterior[0] = posterior[1] if self.steps > 1 else beta[0]
        low, noise = np.log(posterior), np.sqrt(1 - now)
        k = (
            np.sqrt(before)
            * beta
            / (1 - now)
            * {
                "eps": noise / np.sqrt(now),
                "v": noise,
                "x_0": -1.0,
                "flow": noise / (np.sqrt(now) + noise),
            }[self.prediction]
        )
        return k, low, np.log(beta) - low


def check_objective(objective, called=str):
    """Raise a `UsageError` for a value of an `Objective` that cannot be, and for two that exclude
    each other, with both named.

    called(name): how a message calls a setting
    """
    path, prediction, loss = objective.path, objective.prediction, objective.loss
    min_snr_gamma, time_sampling = objective.min_snr_gamma, objective.time_sampling
    vlb_weight = objective.vlb_weight

    def named(name, value):
        return f"{called(name)} {say(value)}"

    for name, value, known in (
        ("path", path, PATHS),
        ("prediction", prediction, PREDICTIONS),
        ("loss", loss, PREDICTIONS),
        ("time_sampling", time_sampling, TIME_SAMPLINGS),
    ):
        if value not in known and not (value is None and name in ("prediction", "loss")):
            raise UsageError(f"unknown {name} {quoted(value)}: use {', '.join(known)}.")
    for name, value, low, high in (
        ("min_snr_gamma", min_snr_gamma, 1e-3, 1e6),
        ("noise_mean", objective.noise_mean, -10, 10),
        ("noise_std", objective.noise_std, 1e-3, 3),
        ("time_shift", objective.time_shift, 1e-2, 100),
        ("sigma_data", objective.sigma_data, 1e-3, 1e3),
    ):
        if value is not None and not (
            isinstance(value, numbers.Real) and not isinstance(value, bool) and low <= value <= high
        ):  # a NaN, too
            raise UsageError(
                f"{named(name, value)} must be a finite number from {low:g} to {high:g}."
            )
    if vlb_weight is not None and not (
        isinstance(vlb_weight, numbers.Real) and 0 <= vlb_weight < math.inf
    ):
        raise UsageError(
            f"vlb_weight {say(vlb_weight)} must be a finite number of at least 0, or None for T / 1000."
        )
    for name, value in (("prediction", prediction), ("loss", loss)):
        if value == "edm" and path != "edm":
            raise UsageError(
                f"{named(name, 'edm')} is of the preconditioning of {named('path', 'edm')}, and not of "
                f"{named('path', path)}: give that path, or another {name}."
            )
    if loss is not None and min_snr_gamma is not None:
        raise UsageError(
            f"{named('loss', loss)} and {named('min_snr_gamma', min_snr_gamma)} exclude each other: both "
            "say how the error is weighed; give one of them."
        )
    for name, value, usual, paths in (
        ("time_sampling", time_sampling, "uniform", ("linear",)),
        ("time_shift", objective.time_shift, 1, ("linear",)),
        ("sigma_data", objective.sigma_data, 0.5, ("edm",)),
        ("noise_mean", objective.noise_mean, None, ("linear", "edm")),
        ("noise_std", objective.noise_std, None, ("linear", "edm")),
    ):
        if value != usual and path not in paths:
            raise UsageError(
                f"{named(name, value)} does not go with {named('path', path)}: leave it out, or give "
                f"{named('path', ' or '.join(paths))}."
            )
    for name, value in (("noise_mean", objective.noise_mean), ("noise_std", objective.noise_std)):
        if value is not None and path == "linear" and time_sampling != "logit-normal":
            raise UsageError(
                f"{named(name, value)} does not go with {named('time_sampling', time_sampling)}: give "
                f"{named('time_sampling', 'logit-normal')}, too."
            )
    if path == "edm" and objective.timestep_scale != 1:
        raise UsageError(
            f"{called('timestep_scale')} does not go with {named('path', 'edm')}, whose model sees "
            "log(sigma) / 4: leave it out."
        )
    other = (
        named("path", path)
        if path != "discrete"
        else named("loss", loss)
        if loss not in (None, prediction)
        else named("min_snr_gamma", min_snr_gamma)
        if min_snr_gamma is not None
        else None
    )
    if objective.learn_sigma and other:
        raise UsageError(
            f"{called('learn_sigma')} does not go with {other}: the variational bound of a learned "
            "variance is of whole timesteps and a plain loss; leave one of them out."
        )
    if vlb_weight is not None and path != "discrete":
        raise UsageError(
            f"{named('vlb_weight', vlb_weight)} does not go with {named('path', path)}: leave it out."
        )
