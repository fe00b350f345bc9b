"""Make images with a model. Each image has a seed, so it does not depend on the batch that it was
made in."""

import bisect
import functools
import gc
import itertools
import math
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import extensions
from ..configuration import configured_by, given_values
from ..device import AnyArray, download, upload
from ..errors import OutOfMemoryError, TooManyElementsError, UsageError, quoted, shown
from ..kernels.diffusion.images import pixels_forward
from ..kernels.diffusion.sampler import combine
from ..nn.model import Model, check_magnitude, check_types
from ..settings import MAX_SAMPLE_STEPS, say
from ..sizes import image_shape
from .denoiser import Denoiser, check_interval
from .guidance import GUIDE_SCALE, LARGEST_SCALE, check_guidance, checked_guide
from .inversion import check_deterministic, check_invert, inverted, lowest_trained
from .memory import say_what_counts, say_what_fits
from .pictures import as_in_training
from .plan import SamplerPlan
from .process import Diffusion
from .run import SamplerRun
from .samplers import WITH_ETA, get_sampler, heun, heun_in_time, repaint
from .sampling_config import SamplingConfig

MOST_IMAGES = 10**7  # of a Sampling, whose classes are held in memory
LAST_SEED = 2**32 - 1  # a sample's counter is 32 bits wide
WITH_CHURN = ("heun", "euler")  # samplers that take EDM's churn
TYPED = (
    "sampler",
    "eta",
    "clip",
    "variance",
    "spacing",
    "cfg_scale",
    "cfg_channels",
    "jump",
    "resamples",
    "strength",
    "slerp",
    # arguments of one type
    "eager",
    "s_churn",
    "s_tmin",
    "s_tmax",
    "s_noise",
    "time_shift",
    "guide_scale",
)
VARIANCES = ("small", "large", "learned")
# grey, RGB; a model of other channels makes latents, which are not clipped to [-1, 1]
PIXEL_CHANNELS = (1, 3)


def sample(
    model: Model,
    count: int = 16,
    steps: int | str | None = None,
    sampler: str | None = None,
    eta: float | None = None,
    seed: int = 0,
    y: Any = None,
    batch: int = 16,
    clip: bool | None = None,
    progress: Callable | None = None,
    **more: Any,
) -> np.ndarray:
    """Images from a trained model, uint8 (count, H, W, C); a model of latents gives float32.

    steps, sampler, and cfg_scale where it is left out: as the run drew its own pictures that the
        model was loaded from; 50 steps of DDIM for others
    progress: called after each model evaluation. The other arguments are those of `Sampling`.
    """
    sampler, steps = as_in_training(model, sampler, steps, eta, more)
    given = {"count": count, "steps": steps, "sampler": sampler, "eta": eta, "seed": seed}
    sampling = Sampling(model, **given, y=y, batch=batch, clip=clip, **more)
    images = np.empty((count, *sampling.shape), sampling.dtype)
    for rows, made in sampling.batches(progress):
        images[rows] = made
    return images


def check_arguments(model, count, steps, seed, batch):
    """Raise a `UsageError` for what is no model, and for numbers that are none."""
    if not all(hasattr(model, name) for name in ("image_size", "in_channels", "diffusion")):
        raise UsageError(
            f"samples are made from a model, as numdiff.load gives it, and not from {shown(model)}."
        )
    for name, value in (("count", count), ("seed", seed), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise UsageError(f"{name} must be a whole number, and not {shown(value)}.")
        check_magnitude(name, value)
    check_magnitude("steps", steps)
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral | str):
        raise UsageError(
            f"steps must be a whole number or a respacing such as 'ddim50', and not {shown(steps)}."
        )


STRENGTH = 0.6  # of SDEdit, where none is given: its paper's middle


@configured_by(SamplingConfig)
class Sampling:
    """The checked settings of a set of samples; `batches` makes them, as often as it is called.

    On a GPU each kind of step is recorded as a CUDA graph at its second run and replayed from then
    on. The bits are the same as launched one by one, in a fraction of the time. The object keeps
    the graphs: keep the object to sample again from the same model with the same options. Weights
    may change in place, as in training; weights at another address are recorded again.

    model: a UNet or DiT with `model.diffusion` set (the options of its Diffusion), as
    `numdiff.load` gives it
    Raises `UsageError` for options that do not fit the model or each other. `batches` raises
    `OutOfMemoryError`, which says which batch would fit.
    """

    def __init__(self, model: Model, config: SamplingConfig | None = None, **settings: Any):
        self.config = c = SamplingConfig(
            **given_values(SamplingConfig, config, settings, "Sampling")
        )
        check_arguments(model, c.count, c.steps, c.seed, c.batch)
        check_types(SamplingConfig, {name: getattr(c, name) for name in TYPED})
        # NumPy's integers, too
        count, seed, batch, steps = int(c.count), int(c.seed), int(c.batch), c.steps
        self.model, self.count, self.seed, self.slerp = model, count, seed, c.slerp
        self.cfg_scale, self.cfg_channels = c.cfg_scale, c.cfg_channels
        self.cfg_interval = None if c.cfg_interval is None else check_interval(c.cfg_interval)
        self.guide_scale = (
            GUIDE_SCALE if c.guide is not None and c.guide_scale is None else c.guide_scale
        )
        self.guide = checked_guide(c.guide, self.guide_scale, model, c.cfg_scale)
        outputs = getattr(model, "out_channels", model.in_channels)
        if outputs < model.in_channels:
            raise UsageError(
                f"the model takes {model.in_channels} channels and gives {outputs}: some of its input is "
                "not noise but given, such as the low-resolution picture of super-resolution, which no "
                "sampler here supports; sample a model with as many outputs as inputs, or call "
                "model.predict."
            )
        self.sampler = c.sampler if c.known is None else "repaint"
        self.function = get_sampler(c.sampler) if c.known is None else repaint
        self.shape = image_shape(model)
        self.pixels = model.in_channels in PIXEL_CHANNELS
        self.dtype = np.uint8 if self.pixels else np.float32
        self.clip = self.pixels if c.clip is None else c.clip
        self.diffusion = Diffusion(**model.diffusion, backend=model.backend)
        steps = (
            int(steps)
            if isinstance(steps, str) and steps.isascii() and steps.isdecimal()
            else steps
        )
        if not isinstance(steps, str) and steps > MAX_SAMPLE_STEPS:
            raise UsageError(
                f"steps must be at most {MAX_SAMPLE_STEPS:,}, not {steps:,}: 20 to 250 make a good image."
            )
        own = len(c.schedule.get("sigmas", ())) if isinstance(c.schedule, dict) else 0
        if own and steps == 50:  # the default, which a diffusion of fewer timesteps does not have
            steps = own
        self.respacing = steps if isinstance(steps, str) else None
        if self.respacing and c.spacing not in (None, "timesteps"):
            raise UsageError(
                f"steps {steps!r} already choose the timesteps: leave spacing {c.spacing} out."
            )
        shifted = c.time_shift is not None and self.diffusion.path_name == "linear"
        self.spacing = c.spacing or (
            "timesteps"
            if self.respacing
            else "time"
            if shifted
            else self.diffusion.path.default_spacing(self.sampler)
        )
        self.sigmas = descending_sigmas(self._path(c.time_shift), self.spacing, steps)
        self.init, self.strength = self._check_init(c.init, c.strength, c.known, c.schedule)
        self.invert = None
        if c.invert is not None:
            others = {"known": c.known, "init": c.init, "schedule": c.schedule}
            self.invert = check_invert(c.invert, self.shape, count, c.slerp, others)
        if self.function is heun and self.spacing == "time":
            self.function = heun_in_time
        self.steps = len(self.sigmas) - 1
        if count < 1 or batch < 1:
            raise UsageError("count and batch must be at least 1.")
        if count > MOST_IMAGES:
            raise UsageError(
                f"count must be at most {MOST_IMAGES:,}, and not {count:,}: make the others with another "
                "seed."
            )
        self.batch = min(batch, count)
        churn = {"s_churn": c.s_churn, "s_tmin": c.s_tmin, "s_tmax": c.s_tmax, "s_noise": c.s_noise}
        self.settings = self._settings(
            c.eta, c.variance, {k: v for k, v in churn.items() if v is not None}
        )
        if c.schedule is not None:
            self._take(c.schedule, own, c.spacing, c.time_shift)
        self._check_slerp()
        check_guidance(model, c.cfg_scale, c.cfg_channels, self.cfg_interval, self.guide)
        last = seed + (count - 1 if c.slerp is None else count // c.slerp)
        if not 0 <= seed <= LAST_SEED - (last - seed):
            raise UsageError(
                f"the {count} images would need the seeds {seed} to {last}, which must be between 0 and "
                f"{LAST_SEED}."
            )
        self.seeds = (seed, last)
        self.labels = class_labels(model, c.y, count, c.slerp)
        self.inpainted = (
            {} if c.known is None else self._check_inpainting(c.known, c.mask, c.jump, c.resamples)
        )
        guided_by = self.guide and Denoiser(
            self.guide, Diffusion(**self.guide.diffusion, backend=model.backend), None, False
        )
        self.denoiser = Denoiser(
            model,
            self.diffusion,
            None,
            self.clip,
            c.cfg_scale,
            c.cfg_channels,
            guided_by,
            self.guide_scale,
            self.cfg_interval,
        )
        self.plan = SamplerPlan(
            self.function,
            self.denoiser.numbers,
            self.sigmas,
            self.settings,
            self.inpainted,
            self.denoiser.guided,
            self.diffusion.path.start_scale(self.sigmas[0]),
        )
        self.inversion = self._plan_inversion()
        if self.cfg_interval and not self.guided_evaluations:
            raise UsageError(
                "cfg_interval {:g},{:g} holds none of the noise levels at which the {} steps evaluate the "
                "model, from {:g} down to {:g}: widen it, or leave it out.".format(
                    *self.cfg_interval, self.steps, self.sigmas[0], self.sigmas[-2]
                )
            )
        self._check_churn()
        self.eager, self.arena = c.eager, c.arena
        self._run = functools.cache(self.new_run)

    def _plan_inversion(self):
        """The `SamplerPlan` that takes pictures to noise, or None."""
        if self.invert is None:
            return None
        check_deterministic("invert", self.sampler, self.settings)
        return SamplerPlan(
            inverted(self.function, lowest_trained(self.diffusion)),
            self.denoiser.numbers,
            self.sigmas,
            self.settings,
            guided=self.denoiser.guided,
            start_scale=1.0,
        )

    def _path(self, time_shift):
        """The path of the levels: that of the training, or one with another shift."""
        self.time_shift = time_shift
        if time_shift is None:
            return self.diffusion.path
        if self.spacing != "time":
            raise UsageError(
                f"time_shift {say(time_shift)} shifts the levels of spacing time, which this model's path "
                f"{self.diffusion.path_name} has not: leave it out."
                if self.diffusion.path_name != "linear"
                else f"time_shift {say(time_shift)} does not go with spacing {self.spacing}: leave one of them "
                "out."
            )
        return Diffusion(**{**self.diffusion.options, "time_shift": time_shift}).path

    def _take(self, schedule, own, spacing, time_shift):
        """Learned steps instead of a sampler's. own: their number."""
        given = [
            (self.steps not in (50, own) or self.respacing) and "steps",
            self.sampler != "ddim" and ("inpainting" if self.function is repaint else "sampler"),
            self.settings != {"eta": 0.0} and "eta",
            spacing and "spacing",
            time_shift and "time_shift",
            self.guide is not None and "guide",
        ]
        if any(given):
            raise UsageError(
                "a schedule has steps of its own, and leaves nothing to say by "
                f"{next(filter(None, given))}: leave that out, or the schedule."
            )
        steps = extensions.find("steps", "learned steps", "schedule")
        steps.check_schedule(schedule, self)
        self.function, self.sampler, self.spacing = steps.learned, "learned", "learned"
        self.sigmas = [*schedule["sigmas"], 0.0]
        self.steps, self.settings = len(self.sigmas) - 1, {"weights": schedule["weights"]}

    @property
    def evaluations(self) -> int:
        """How often the model is evaluated for each batch (with guidance, for both answers at
        once)."""
        return 0 if self.strength == 0 else sum(step.asks for step in self.plan.steps)

    @property
    def inversion_evaluations(self) -> int:
        """How often the model is evaluated, for a batch at most, before the first image is begun."""
        if self.inversion is None:
            return 0
        batches = sum(1 for _ in self._ends())
        return batches * sum(step.asks for step in self.inversion.steps)

    @property
    def guided_evaluations(self) -> int:
        """How many of them are with guidance; the others are half the work."""
        return (
            sum(step.guided for step in self.plan.steps)
            if self.guide or self.denoiser.cfg_scale is not None
            else 0
        )

    @property
    def options(self) -> dict[str, Any]:
        """The settings that determine the images besides the model and their classes, as values for
        JSON."""
        more = {} if self.cfg_interval is None else {"cfg_interval": list(self.cfg_interval)}
        settings = dict(self.settings)
        if self.sampler == "learned":  # "weights" are the model's where samples are described
            more |= {"sigmas": self.sigmas[:-1], "step_weights": settings.pop("weights")}
        if self.guide is not None:
            more["guide_scale"] = self.guide_scale
        if self.strength is not None:
            more["strength"] = self.strength
        if self.invert is not None:
            more["inverted_pictures"] = len(self.invert)
        return {
            "sampler": self.sampler,
            "steps": self.steps,
            "spacing": self.spacing,
            "seed": self.seed,
            **({"respacing": self.respacing} if self.respacing else {}),
            **({"time_shift": self.time_shift} if self.time_shift is not None else {}),
            "count": self.count,
            **settings,
            "cfg_scale": self.cfg_scale,
            "cfg_channels": self.cfg_channels,
            "clip": self.clip,
            "slerp": self.slerp,
            **more,
        }

    def batches(
        self,
        progress: Callable | None = None,
        watch: Callable | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields (slice, images), batch by batch: uint8 (n, H, W, C), or float32 for a model of
        latents.

        progress: called after each model evaluation; watch: called as watch(slice, k, x_t) before
        the k-th
        rank, ranks: make only every `ranks`-th batch, from the `rank`-th on
        """
        if progress is not None and not callable(progress):
            raise UsageError(
                f"progress is a function to call, and not {shown(progress)}: how many images a Sampling "
                "makes is its argument count."
            )
        noises = None
        for start in range(rank * self.batch, self.count, ranks * self.batch):
            rows = slice(start, min(start + self.batch, self.count))
            arenas = self._arenas()
            try:
                if noises is None:
                    noises = self._noises(progress)
                made = self._make(rows, noises, progress, watch)
            except (OutOfMemoryError, TooManyElementsError):
                made = None
            if made is None:  # here, where the arrays of the failed attempt are freed
                self._run.cache_clear()
                gc.collect()  # a run and its replays refer to each other
                for arena, before in arenas:  # its pieces would not suit a smaller batch's arrays
                    self.model.backend.trim(arena, before)
                raise OutOfMemoryError(say_what_fits(self, self.arena))
            yield rows, made

    def _arenas(self):
        """[(arena that a batch takes memory from, addresses of what it has so far)]."""
        gpu = self.model.backend
        arenas = {gpu.arenas[0], self.arena or gpu.inference_arena} if hasattr(gpu, "trim") else ()
        return [(arena, arena.segments()) for arena in arenas]

    def rehearse(self) -> None:
        """Launch every kind of step once, kernel by kernel, and read nothing back: to record the
        kernels on a planning device, and to compile them on a real one."""
        sizes = {
            min(self.batch, self.count - start)
            for start in (0, (self.count - 1) // self.batch * self.batch)
        }
        try:
            for run in map(self._run, sizes):
                self._started(run, run.noise(np.zeros(run.shape[0], np.uint32)))
                run.rehearse()
                self.finished(run.kept[0])
            for ends in self._ends():
                self._inversion_run(len(ends)).rehearse()
        except TooManyElementsError:
            raise UsageError(say_what_counts(self)) from None

    def new_run(
        self, size: int, model: Model | None = None, guide: Model | None = None
    ) -> SamplerRun:
        """The `SamplerRun` of a batch of `size` images; model, guide: twins of this Sampling's, for
        instance on another device."""
        denoiser = self.denoiser if model is None else self.denoiser.of(model, guide)
        return SamplerRun(
            self.plan, denoiser, size, self.shape, self.inpainted, self.eager, self.arena
        )

    def _ends(self):
        """Yields the pictures to invert, batch by batch, as [(picture, the image whose class it
        takes)]: one for each image, or with slerp the first and the last of each row."""
        if self.invert is None:
            return
        rows = range(self.count // self.slerp) if self.slerp else ()
        ends = [(row + i, row * self.slerp) for row in rows for i in (0, 1)]
        ends = ends or [(i, i) for i in range(self.count)]
        for start in range(0, len(ends), self.batch):
            yield ends[start : start + self.batch]

    def _inversion_run(self, size):
        return SamplerRun(
            self.inversion, self.denoiser, size, self.shape, (), self.eager, self.arena
        )

    def _noises(self, progress=None):
        """The starting noise of the pictures of `_ends`, float32 (n, H, W, C); () without an
        inversion."""
        made, runs = [], functools.cache(self._inversion_run)
        for ends in self._ends():
            which, images = map(list, zip(*ends, strict=True))
            start = upload(self.invert[which], self.model.backend)
            labels = None if self.labels is None else self.labels[images]
            seeds = np.zeros(len(ends), np.uint32)  # of noise that no step adds
            x = runs(len(ends))(start, seeds, labels, after=progress)
            made.append(download(combine((1 / self.plan.start_scale, x))))
        return np.concatenate(made) if made else ()

    def _make(self, rows, noises, progress, watch):
        run, count = self._run(rows.stop - rows.start), 0
        first, second, share = self._seeds(rows)
        if self.slerp:
            if self.invert is None:
                start, end = download(run.noise(first)), download(run.noise(second))
            else:
                row = np.arange(rows.start, rows.stop) // self.slerp
                start, end = noises[2 * row], noises[2 * row + 1]
            noise = upload(spherical_mean(start, end, share), self.model.backend)
        elif self.invert is None:
            noise = run.noise(first)
        else:
            noise = upload(noises[rows], self.model.backend)

        def seen(x, numbers):
            nonlocal count
            watch(rows, count, combine((numbers[1], x)))
            count += 1

        if self.strength == 0:
            return download(self.finished(self._given(run)))
        noise = self._started(run, noise)
        labels = None if self.labels is None else self.labels[rows]
        return download(self.finished(run(noise, first, labels, watch and seen, progress)))

    def _given(self, run):
        """`init` for each image of a batch, on the device."""
        return upload(np.broadcast_to(self.init, run.shape), self.model.backend)

    def _started(self, run, noise):
        """What a batch starts from: noise, or for SDEdit the image and noise, which times the plan's
        start_scale are x_0 + σ · noise."""
        if self.init is None or self.strength == 1:
            return noise
        scale = self.plan.start_scale
        return combine((1 / scale, self._given(run)), (self.sigmas[0] / scale, noise))

    def _check_init(self, init, strength, known, schedule):
        """(image as float32 (H, W, C), strength) of SDEdit, or Nones; leaves the levels of the steps
        that are done."""
        if init is None:
            if strength is not None:
                raise UsageError(
                    f"strength {say(strength)} says how much of an image changes: give init, too."
                )
            return None, None
        strength = STRENGTH if strength is None else float(strength)
        if not 0 <= strength <= 1:
            raise UsageError(
                f"strength must be between 0 (the image) and 1 (none of it), not {say(strength)}."
            )
        if known is not None or schedule is not None:
            other = "known, of inpainting," if known is not None else "a schedule"
            raise UsageError(f"init and {other} exclude each other: leave one of them out.")
        if not isinstance(init, np.ndarray) or tuple(init.shape) != self.shape:
            size = "×".join(map(str, self.shape))
            what = tuple(init.shape) if isinstance(init, np.ndarray) else shown(init)
            raise UsageError(f"init must be an array of {size}, and not {what}.")
        if not np.isfinite(init).all():
            raise UsageError("init holds values that are not finite: give another image.")
        steps = len(self.sigmas) - 1
        self.sigmas = self.sigmas[steps - max(1, round(strength * steps)) :]
        return np.ascontiguousarray(init, np.float32), strength

    def finished(self, x: AnyArray) -> AnyArray:
        """The images of a batch, as `batches` gives them, on the device."""
        return pixels_forward(x) if self.pixels else x

    def _seeds(self, rows):
        """(seeds, next seeds, share of the latter) of the images; the last two are for slerp only."""
        i = np.arange(rows.start, rows.stop)
        if not self.slerp:
            return (self.seed + i).astype(np.uint32), None, None
        row = (self.seed + i // self.slerp).astype(np.uint32)
        return row, row + np.uint32(1), (i % self.slerp) / (self.slerp - 1)

    def _settings(self, eta, variance, churn):
        """Keyword arguments of the sampler, which depend on it."""
        name, learned = self.sampler, bool(self.model.options.get("learn_sigma"))
        if eta is not None and name not in WITH_ETA:
            raise UsageError(
                f"eta belongs to {' and '.join(WITH_ETA)}, and {name} takes none: leave eta out, or use "
                "ddim."
            )
        if eta is not None and not 0 <= eta <= 1:
            raise UsageError(f"eta must be between 0 (deterministic) and 1, not {say(eta)}.")
        if variance is not None and name != "ddpm":
            raise UsageError(f"variance belongs to ddpm, and {name} takes none: leave it out.")
        if variance not in (None, *VARIANCES):
            raise UsageError(f"unknown variance {quoted(variance)}: use {', '.join(VARIANCES)}.")
        if variance == "learned" and not learned:
            raise UsageError(
                "the model did not learn a variance: use small or large, or a model trained with "
                "learn_sigma."
            )
        if churn and name not in WITH_CHURN:
            raise UsageError(
                f"{next(iter(churn))} belongs to {' and '.join(WITH_CHURN)}, and {name} takes none: leave "
                "it out, or use heun."
            )
        for key, value in churn.items():
            if not 0 <= value < math.inf:
                raise UsageError(f"{key} must be a finite number of at least 0, not {say(value)}.")
        if churn.get("s_noise", 1) > LARGEST_SCALE:
            raise UsageError(
                f"s_noise must be at most {LARGEST_SCALE}, not {say(churn['s_noise'])}: about 1."
            )
        if churn and not churn.get("s_churn"):
            for key in churn.keys() - {"s_churn"}:
                raise UsageError(
                    f"{key} only affects the noise that s_churn adds: give an s_churn above 0, too."
                )
        elif churn:
            if churn.get("s_tmin", 0) > churn.get("s_tmax", math.inf):
                raise UsageError(
                    f"s_tmin {churn['s_tmin']:g} is above s_tmax {churn['s_tmax']:g}, so that s_churn "
                    "would add no noise: give the lower level as s_tmin."
                )
            return {key: float(value) for key, value in churn.items()}
        if name in WITH_ETA:
            return {"eta": float(WITH_ETA[name] if eta is None else eta)}
        return (
            {"variance": variance or ("learned" if learned else "small")} if name == "ddpm" else {}
        )

    def _check_churn(self):
        low, high = self.settings.get("s_tmin", 0.0), self.settings.get("s_tmax", math.inf)
        if self.settings.get("s_churn") and not any(
            low <= sigma <= high for sigma in self.sigmas[:-1]
        ):
            name = "s_tmin" if low > self.sigmas[-2] else "s_tmax"
            raise UsageError(
                f"{name} {self.settings[name]:g} leaves s_churn none of the noise levels of the "
                f"{self.steps} steps, from {self.sigmas[0]:g} down to {self.sigmas[-2]:g}: widen the "
                "range, or leave it out."
            )

    def _check_slerp(self):
        if self.slerp is None:
            return
        if self.slerp < 2 or self.count % self.slerp:
            raise UsageError(
                f"slerp needs whole rows of at least 2 images, and {self.count} images do not make rows "
                f"of {self.slerp}: change the count or the length of the rows."
            )
        check_deterministic("slerp", self.sampler, self.settings)

    def _check_inpainting(self, known, mask, jump, resamples):
        """{"known", "mask"} as float32 (H, W, C)."""
        if jump < 1 or resamples < 1:
            raise UsageError("jump and resamples must be at least 1.")
        if resamples * self.steps > MAX_SAMPLE_STEPS:
            raise UsageError(
                f"resamples {resamples:,} times {self.steps:,} steps are more than {MAX_SAMPLE_STEPS:,}: "
                "give fewer."
            )
        for name, value in (("known", known), ("mask", mask)):
            if value is not None and not isinstance(value, np.ndarray):
                raise UsageError(f"{name} must be a NumPy array, and not {shown(value)}.")
        if tuple(known.shape) != self.shape or mask is None or tuple(mask.shape) != self.shape[:2]:
            size = "×".join(map(str, self.shape))
            raise UsageError(
                f"inpainting needs a picture of {size} and a mask of its height and width, not "
                f"{tuple(known.shape)} and {None if mask is None else tuple(mask.shape)}."
            )
        self.settings.update(jump=jump, resamples=resamples)
        return {
            "known": known.astype(np.float32),
            "mask": np.broadcast_to((mask > 0)[..., None], self.shape).astype(np.float32),
        }


def descending_sigmas(path, spacing, steps):
    """A path's levels of noise; a `UsageError` if some would be equal, between which no sampler can
    step."""

    def levels(count):
        sigmas = path.sigmas(spacing, count)
        return sigmas, all(then < now for now, then in itertools.pairwise(sigmas))

    sigmas, descend = levels(steps)
    if descend:
        return sigmas
    most = bisect.bisect_left(range(2, steps), True, key=lambda count: not levels(count)[1]) + 1
    raise UsageError(
        f"steps {steps} would repeat noise levels, of which spacing {spacing} has at most {most} here: "
        f"use {most}."
    )


def class_labels(model, y, count, slerp=None):
    """int32 (count,) for a model with classes, else None; a `UsageError` for an index it does not
    have."""
    if model.num_classes is None:
        if y is not None:
            raise UsageError("this model was trained without classes: leave the class out.")
        return None
    labels = np.arange(count) // (slerp or 1) % model.num_classes if y is None else np.atleast_1d(y)
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape not in ((1,), (count,)):
        raise UsageError(f"y must be one class index, or one for each of the {count} images.")
    if labels.min() < 0 or labels.max() >= model.num_classes:
        raise UsageError(
            f"class {labels.max() if labels.max() >= model.num_classes else labels.min()} does not exist: "
            f"the model has classes 0 to {model.num_classes - 1}."
        )
    return np.resize(labels, count).astype(np.int32)


def spherical_mean(a, b, share):
    """From a (share 0) to b (share 1) along the great circle through both, sample by sample
    (Shoemake 1985, slerp). A linear mix of two normal samples is too short for the model; on the
    circle it keeps the length of noise.
    """
    u, v = a.reshape(len(a), -1).astype(np.float64), b.reshape(len(b), -1).astype(np.float64)
    cosine = (u * v).sum(1) / np.sqrt((u * u).sum(1) * (v * v).sum(1))
    angle = np.maximum(np.arccos(np.clip(cosine, -1, 1)), 1e-6)  # where both are the same, too
    first, second = (
        np.sin((1 - share) * angle) / np.sin(angle),
        np.sin(share * angle) / np.sin(angle),
    )
    return (first[:, None] * u + second[:, None] * v).astype(a.dtype).reshape(a.shape)


def to_uint8(x):
    """[-1, 1] -> 0 … 255, rounded and clipped."""
    return pixels_forward(x)
