"""The options of a training run: made from the table in numdiff/settings.py and the record of the
model's kind.

`TrainOptions` holds a value for each setting, and the `options.json` of a run folder is it written
out; `resolve` fills what the user left unset from a preset, and refuses what cannot work.
"""

import math
import os
import pathlib
import shlex
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import schema
from ..diffusion.denoiser import check_interval
from ..diffusion.process import PATH_PREDICTIONS, Objective, check_objective
from ..dtypes import half_of
from ..errors import NumdiffError, UsageError, near_miss
from ..files import Refused, read_bytes, write_json
from ..settings import COMMON, check_value, flag, say
from . import kinds
from .precision import BFLOAT16_FROM, FLOAT8_FROM, SCALES_LOSS, automatic, gpu_capability
from .run_extension import extensions_of

MAX_SIZE = 256  # pixels a side that a run takes from its dataset where --image-size is not given
OPTIONS_BYTES = 1 << 20  # of an options.json
# files that distinguish a run folder from a folder of pictures
OF_RUNS = "options.json", "stats.jsonl"
# What a preset says of its path: one choice, of which nothing is taken where the user's settings
# ask for another path.
PATH = ("path", "loss", "time_sampling", "noise_mean", "noise_std", "time_shift", "sigma_data")
# for code that goes through all of them
PRESETS = {name: kind.presets for name, kind in kinds.every().items()}


def table(model=None):
    """{name: Setting} of all settings, each kind's own included: those of other kinds have their
    defaults.

    model: the kind that takes precedence where two have a setting of the same name
    """
    lines = {
        name: line for kind in reversed(kinds.every().values()) for name, line in kind.table.items()
    }
    return {**lines, **(kinds.get(model).table if model else {})}


class TrainOptions:
    """A value for each setting, as an attribute; `resolve` makes one that is complete and checked."""

    def __init__(self, **values):
        lines = table(values.get("model", COMMON["model"].default))
        if unknown := values.keys() - lines.keys():
            raise TypeError(f"there is no setting {sorted(unknown)[0]!r}")
        for name, line in lines.items():
            setattr(self, name, values.get(name, line.default))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __eq__(self, other):
        return vars(self) == vars(other) if isinstance(other, TrainOptions) else NotImplemented

    def __repr__(self):
        return f"TrainOptions({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"

    def changed(self, **values):
        """The same options but for these."""
        return TrainOptions(**{**vars(self), **values})

    def to_json(self):
        """A dict that JSON can represent."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def from_json(cls, values):
        """The options that `to_json` gave; settings that a newer numdiff has added keep their
        defaults."""
        schema.options(values, "it")
        unknown = values.keys() - table().keys()
        if unknown:
            raise NumdiffError(
                "the run has settings that this numdiff does not know "
                f"({', '.join(sorted(unknown))}); use the version that wrote it."
            )
        values = {"precision": "fp32", **values}  # what runs used before there was a choice
        kinds.get(values.get("model", COMMON["model"].default)).upgrade(values)
        lines = table()
        return cls(**{k: lines[k].meant(v) for k, v in values.items()})

    def save(self, path):
        write_json(path, self.to_json(), "the options")

    @classmethod
    def load(cls, path):
        """Read an options.json."""
        try:
            options = cls.from_json(schema.parse_json(read_bytes(path, OPTIONS_BYTES)))
            check(options)
            return options
        except FileNotFoundError:
            raise NumdiffError(
                f"{path} does not exist; give a run folder that `numdiff train` made."
            ) from None
        except OSError as error:
            raise NumdiffError(f"cannot read {path}: {error.strerror}.") from error
        except (Refused, UsageError) as error:
            raise NumdiffError(
                f"{path} is damaged ({str(error).rstrip('.')}); put a copy of it back, or start a new "
                "run from the weights of this one with --init "
                f"{shlex.quote(str(pathlib.Path(path).parent))}."
            ) from error


def load_options(run_dir):
    """The `TrainOptions` of a run folder."""
    return TrainOptions.load(pathlib.Path(run_dir) / "options.json")


def settings_of(model):
    """Names of the settings that a model has, in the order in which they are shown; without `model`
    itself."""
    return [name for name in kinds.get(model).table if name != "model"]


# Resolving ----------------------------------------------------------------------------------------


class Sources(NamedTuple):
    """What `fill` knows of this machine, and of the files that the settings name.

    device: "cpu", "cuda" or "emulator"; capability: of the GPU; None: of the one that is here
    start: what the file of `--init` holds, or None
    stored: the `StoredImages` of the dataset's file, which decide the size of the images and whether
        there are classes; None for a folder of pictures, and with `--init`
    """

    device: str
    capability: tuple[int, ...] | None = None
    start: Any = None
    stored: Any = None


def resolve(given, capability=None):
    """Complete, checked `TrainOptions` from {name: value} of what the user set; None counts as not
    set.

    The rest comes from the preset, then from the defaults. `device` becomes "cpu", "cuda" or
    "emulator". Files are read first, all of them (`look_up`); then the options are filled in one
    pass (`fill`), which opens none.
    capability: as on a GPU of this compute capability, whether one is here or not
    """
    given = check_given(given)
    return fill(given, look_up(given, capability))


def check_given(given):
    """What the user set, without None; a `UsageError` for a value that no setting has."""
    given = _known(given)
    model = given.get("model", COMMON["model"].default)
    kind, lines = kinds.get(model), table(model)
    for name, value in given.items():
        check_value(lines[name], value)
    for name in given:
        if owner := kinds.owner(name, model):
            raise UsageError(
                f"{flag(name)} belongs to the model {owner.name}; leave it out, or train that one."
            )
    if given.get("preset"):
        _check_preset(kind, given["preset"])
    if "init" not in given and "init_weights" in given:
        raise UsageError(
            f"--init-weights {given['init_weights']} needs --init: add it, or leave this out."
        )
    return given


def look_up(given, capability=None):
    """The `Sources` of settings that `check_given` returned. Looking for a GPU takes a second."""
    data, start, stored = given.get("data"), None, None
    if data and all(os.path.isfile(os.path.join(data, name)) for name in OF_RUNS):
        raise UsageError(
            f"--data {data} is the folder of a run, whose pictures are samples and a curve: give "
            "images, and the run as --init to start from its weights."
        )
    device = "cuda" if capability else resolve_device(given.get("device", "auto"))
    if "init" in given:
        from . import initial  # here, as it loads the readers of files

        model = given.get("model", COMMON["model"].default)
        start = initial.read_given_start(
            given, model, given.get("outdir", COMMON["outdir"].default)
        )
    elif data and not os.path.isdir(data):
        from ..data.dataset import stored_images  # here, as it loads NumPy

        stored = stored_images(data)
    return Sources(device, capability, start, stored)


def fill(given, sources):
    """`resolve`, of settings that `check_given` returned, with what `look_up` found."""
    model = given.get("model", COMMON["model"].default)
    kind, lines, asked, start = kinds.get(model), table(model), given, sources.start
    if start is not None:
        from . import initial

        given = initial.follow(given, start)
    preset = (
        given.get("preset") or kind.default_preset["cuda" if sources.device == "cuda" else "cpu"]
    )
    _check_preset(kind, preset)
    emoji = {} if given.get("data") else dict(kind.emoji.get(preset, {}))
    if "image_size" not in given and sources.stored is not None:
        given = {**given, **_size_of_data(sources, kind.presets[preset]["image_size"])}
    if sources.stored is not None and not sources.stored.labelled:
        given = {"class_cond": False, **given}
    if "num_classes" in given:  # a number of classes is wanted, not the preset's few
        emoji.pop("classes", None)
    options = TrainOptions(
        **{
            **_of_preset(kind, preset, given),
            **emoji,
            **given,
            "model": model,
            "preset": preset,
            "device": sources.device,
        }
    )
    options.precision = _precision(options.precision, sources.device, sources.capability)
    # a run made shorter than its preset keeps a warm-up in proportion
    if "warmup_steps" not in given:
        options.warmup_steps = min(options.warmup_steps, options.steps // 10)
    _resolve_objective(options, given)
    if "sample_steps" not in given and options.path == "discrete":
        options.sample_steps = min(options.sample_steps, options.diffusion_steps)
    if options.learn_sigma is None:
        options.learn_sigma = not without_variance(options) and kind.learns_sigma(options)
    if options.class_dropout is None:
        options.class_dropout = kind.class_dropout
    if given.get("class_dropout") and not options.class_cond:
        raise UsageError(
            f"--class-dropout {say(options.class_dropout)} needs --class-cond: there is no class to drop."
        )
    if "cfg_scale" not in given and not (options.class_cond and options.class_dropout):
        options.cfg_scale = None
    kind.resolve(options, given)
    for extension in extensions_of(options):
        extension.resolve(given)
    _resolve_average(options, given)
    _check_needs(options, asked, lines)
    for name, needs in (
        *((name, SCALES_LOSS) for name in ("loss_scale", "loss_scale_rule", "loss_scale_interval")),
        ("fp8_promotion", ("fp8",)),
    ):
        if (
            given.get(name, lines[name].default) != lines[name].default
            and options.precision not in needs
        ):
            setting = (
                "--no-fp8-promotion"
                if name == "fp8_promotion"
                else f"{flag(name)} {say(given[name])}"
            )
            raise UsageError(
                f"{setting} is of --precision {' and '.join(needs)}, and this run computes in "
                f"{options.precision}: leave it out."
            )
    if start is not None and "learn_sigma" not in asked:
        initial.check_variance(start, options, without_variance(options))
    check(options)
    if start is not None:
        initial.check_settings(start, options, asked)
    return options


def _size_of_data(sources, usual):
    """{"image_size": …} for the images of a dataset's file; {} where the preset's `usual` size stays.

    A GPU trains on what is stored, up to MAX_SIZE pixels a side; a CPU on no more than its preset's
    pixels.
    """
    from ..data.dataset import fitting_size

    size = fitting_size(sources.stored, MAX_SIZE if sources.device == "cuda" else usual)
    return {"image_size": size} if size else {}


def _check_needs(options, given, lines, remedy=": add it, or leave this out"):
    """Refuse a setting that was given, and means nothing without another one."""
    for name in given:
        if lines[name].needs:
            other, value = lines[name].needs
            now = getattr(options, other)
            if now != value if value is not None else not now:
                wanted = flag(other) if value is None else f"{flag(other)} {value}"
                raise UsageError(f"{flag(name)} {say(given[name])} needs {wanted}{remedy}.")


def _of_preset(kind, preset, given):
    """{setting: value} of a preset that suits what was given.

    Its path is left out where a path is given, or what only whole timesteps have, and v is
    predicted instead of a flow; a loss is of its prediction, log σ's mean and deviation of its way
    to draw t, a learning rate of its optimiser.
    """
    values = dict(kind.presets[preset])
    if values.get("path", "discrete") != "discrete":
        whole = any(
            name in given for name in ("path", "schedule", "diffusion_steps", "min_snr_gamma")
        )
        sizes = TrainOptions(**{**values, **given, "model": kind.name})
        if whole or given.get("learn_sigma", kind.learns_sigma(sizes)):
            for name in PATH:
                values.pop(name, None)
            if values["prediction"] in ("flow", "edm"):  # of its path alone
                values["prediction"] = "v"
    if given.get("prediction", values.get("prediction")) != values.get("prediction"):
        values.pop("loss", None)
    if given.get("time_sampling", "logit-normal") != "logit-normal":
        values.pop("noise_mean", None)
        values.pop("noise_std", None)
    rates = kind.rates.get(preset, {})
    if given.get("optimizer") in rates:
        values["learning_rate"] = rates[given["optimizer"]]
    return values


def _resolve_objective(options, given):
    """What a given path has of its own, where the preset's is for whole timesteps."""
    # their defaults, too
    for name, paths in (("time_sampling", ("discrete", "linear")), ("sigma_data", ("edm",))):
        if name in given and options.path not in paths:
            raise UsageError(
                f"{flag(name)} {say(given[name])} does not go with --path {options.path}: leave it out, "
                f"or give --path {paths[-1]}."
            )
    if "path" not in given or options.path == "discrete":
        return
    for name in ("schedule", "diffusion_steps"):
        if name in given:
            raise UsageError(
                f"{flag(name)} {say(given[name])} does not go with --path {options.path}, which has no "
                "whole timesteps: leave it out."
            )
    if "prediction" not in given:
        options.prediction = PATH_PREDICTIONS[options.path]
    if "learn_sigma" not in given:
        options.learn_sigma = None


def without_variance(options):
    """The name of the first setting whose objective has no learned variance; None if it may be
    learned."""
    plain = {"path": ("discrete",), "loss": (None, options.prediction), "min_snr_gamma": (None,)}
    return next(
        (name for name, values in plain.items() if getattr(options, name) not in values), None
    )


def _resolve_average(options, given):
    """One of decay and half-life from the other, which was given."""
    decay = given.get("ema_decay")
    if decay is not None:
        if "ema_halflife" in given:
            raise UsageError("--ema-decay and --ema-halflife exclude each other: give one of them.")
        options.ema_halflife = options.batch * math.log(2) / -math.log(decay) if decay else 0.0
    if "ema_warmup" in given and not options.ema_halflife:
        without = "--ema-halflife 0" if decay is None else "--ema-decay 0"
        raise UsageError(
            f"{'--ema-warmup' if given['ema_warmup'] else '--no-ema-warmup'} is of the averaged weights, "
            f"and {without} keeps none: leave one of them out."
        )


def resolve_resumed(saved, given, run="RUN"):
    """The options of a resumed run: those it was started with, changed by `given` where that is
    allowed.

    run: its path, for a message
    """
    given = _known(given)
    if given.get("model", saved.model) != saved.model:
        own, asked = kinds.get(saved.model), kinds.get(given["model"])
        raise UsageError(
            f"the run is a {own.title}'s, and this trains a {asked.title}: continue with: numdiff train "
            f"{own.name} --resume {shlex.quote(str(run))}"
        )
    lines = table(saved.model)
    if given.get("precision") == "auto":  # the run has chosen
        del given["precision"]
    for name, value in given.items():
        old = getattr(saved, name)
        if value != old and not lines[name].resume:
            given, then = f"{flag(name)} {say(value)}", say(old)
            if isinstance(value, bool):
                given, then = (f"--{'' if on else 'no-'}{flag(name)[2:]}" for on in (value, old))
            raise UsageError(
                f"{given} does not fit the run, which was started with {then}; leave it out, or start a "
                "new run."
            )
    device = resolve_device(given.get("device", saved.device))
    options = saved.changed(**{**given, "device": device})
    _check_needs(
        options,
        given,
        lines,
        ", without which the run was started: leave it out, or start a new run",
    )
    options.precision = _precision(options.precision, device)
    check(options)
    return options


def check(options):
    """Raise a `UsageError` that names the option and the remedy where a setting cannot work."""
    kind = kinds.get(options.model)
    for name, line in table(options.model).items():
        check_value(line, getattr(options, name))
    kind.check_options(options)
    if options.preset is not None:
        _check_preset(kind, options.preset)
    _check_run(options)


def _known(given):
    """`given` without Nones, lists as tuples; a `UsageError` for a name that is no setting."""
    lines = table()
    for name in given:
        if name not in lines:
            raise UsageError(
                f"there is no setting {name!r}{near_miss(name, lines)}: correct it, or leave it out."
            )
    return {k: lines[k].meant(v) for k, v in given.items() if v is not None}


def _precision(name, device, capability=None):
    """The name, if the device has that precision; for "auto" the one that suits it. capability: of
    its GPU, if that is not in this machine."""
    if name == "auto":
        return automatic(capability or gpu_capability() if device == "cuda" else None)
    if name == "fp16" and device == "cpu":
        raise UsageError("--precision fp16 needs a GPU; use --precision fp32 on the CPU.")
    if name == "fp8" and (
        device == "cpu"
        or device == "cuda"
        and tuple(capability or gpu_capability())[:2] < FLOAT8_FROM
    ):
        raise UsageError(
            "--precision fp8 needs a GPU of compute capability 8.9 or later; use --precision "
            f"{'fp32 on the CPU' if device == 'cpu' else 'fp16 on other GPUs'}."
        )
    if (
        name == "tf32"
        and device == "cpu"
        or name in ("tf32", "bf16")
        and device == "cuda"
        and tuple(capability or gpu_capability())[:2] < BFLOAT16_FROM
    ):
        raise UsageError(
            f"--precision {name} needs a GPU of compute capability 8.0 or later; use --precision fp32."
        )
    half_of(name)  # or what is missing for it
    return name


def resolve_device(name):
    """ "cpu", "cuda" or "emulator" for one of these, or for auto."""
    if name in ("cpu", "emulator"):
        return name
    from ..device import why_no_gpu

    reason = why_no_gpu()
    if name == "cuda" and reason:
        raise UsageError(f"--device cuda: no GPU can be used ({reason}); use --device cpu.")
    return "cpu" if reason else "cuda"


def _check_preset(kind, preset):
    if preset not in kind.presets:
        raise UsageError(f"--preset {preset} does not exist; use {' or '.join(kind.presets)}.")


def _check_run(o):
    if o.precision == "fp8" and not kinds.get(o.model).float8:
        raise UsageError(
            f"--precision fp8 has kernels for the blocks of a DiT, and not for a {o.model}: use "
            "--precision fp16."
        )
    if o.recompute not in ("no", "blocks", *kinds.get(o.model).parts):
        raise UsageError(
            f"--recompute {o.recompute} names no part of the blocks of a {o.model}: use "
            f"{' or '.join(('no', 'blocks', *kinds.get(o.model).parts))}."
        )
    if o.classes == ():
        raise UsageError("--classes none leaves no image to train on: name some, or leave it out.")
    if o.microbatch and o.batch % o.microbatch:
        fits = max(m for m in range(1, min(o.microbatch, o.batch) + 1) if o.batch % m == 0)
        raise UsageError(
            f"--batch {o.batch} is not divisible by --microbatch {o.microbatch}; use a --microbatch of "
            f"{fits}, or a --batch of {-(-o.batch // o.microbatch) * o.microbatch}."
        )
    for extension in extensions_of(o):
        extension.check()
    if o.warmup_steps > o.steps:
        raise UsageError(
            f"--warmup-steps {o.warmup_steps} is more than --steps {o.steps}; use fewer."
        )
    if o.vlb_weight is not None and not o.learn_sigma:
        raise UsageError(
            f"--vlb-weight {say(o.vlb_weight)} weighs the loss of a learned variance: give --learn-sigma, "
            "too."
        )
    if o.cfg_scale not in (None, 1) and not (o.class_cond and o.class_dropout != 0):
        raise UsageError(
            f"--cfg-scale {o.cfg_scale:g} guides by classes, and the model "
            + (
                "never sees an image without its class: give a --class-dropout such as 0.1, or leave "
                "--cfg-scale out."
                if o.class_cond
                else "has none: give --class-cond, or leave it out."
            )
        )
    if o.cfg_interval is not None:
        check_interval(o.cfg_interval, "--cfg-interval")
        if o.cfg_scale in (None, 1):
            raise UsageError(
                f"--cfg-interval {say(o.cfg_interval)} limits the guidance of the grids, and there is "
                "none: give a --cfg-scale other than 1, too."
            )
    objective = Objective(
        path=o.path,
        prediction=o.prediction,
        loss=o.loss,
        min_snr_gamma=o.min_snr_gamma,
        time_sampling=o.time_sampling,
        noise_mean=o.noise_mean,
        noise_std=o.noise_std,
        time_shift=o.time_shift,
        sigma_data=o.sigma_data,
        vlb_weight=o.vlb_weight,
        timestep_scale=1000.0 if o.rescale_timesteps and o.path == "edm" else 1.0,
        learn_sigma=o.learn_sigma,
    )
    check_objective(
        objective, lambda name: flag({"timestep_scale": "rescale_timesteps"}.get(name, name))
    )
    if o.path == "discrete" and o.sample_steps > o.diffusion_steps:
        raise UsageError(
            f"--sample-steps {o.sample_steps} is more than --diffusion-steps {o.diffusion_steps}; use "
            "fewer."
        )
