"""Every setting of a training run: what it means, its unit, its range; the presets; and the checks.

`TrainOptions` is the table. `numdiff train` makes its command-line options from it, the `options.json` of a run folder
is it written out, and `resolve` fills what the user left unset from a preset and refuses what cannot work.
"""
import dataclasses
import difflib
import json
import math
from dataclasses import dataclass, field

from ..errors import NumdiffError, UsageError
from .files import write_json

MODELS = ("unet",)
PRECISIONS = ("fp32",)  # "fp16" will come with tensor-core kernels
GROUPS = 32  # of every group normalisation: channels must be a multiple
SEEDS = 2**32 - 1  # the largest seed


# Presets --------------------------------------------------------------------------------------------------------------

PRESETS = {
    # The smallest UNet that draws emoji: for a laptop without a GPU, about four minutes on two cores. In so short a run
    # predicting the image itself under a cosine schedule gives the clearest pictures, one class of emoji is learnt
    # sooner than nine (`EMOJI` below), and the learning rate is high, falls to zero, and comes with an average that
    # soon forgets the beginning.
    "tiny": {
        "image_size": 32, "model_channels": 32, "channel_mult": (1, 2, 4), "num_res_blocks": 1,
        "attention_resolutions": (8,), "num_head_channels": 32, "schedule": "cosine", "prediction": "x_0", "flip": True,
        "batch": 16, "steps": 400, "learning_rate": 1e-3, "warmup_steps": 20, "lr_schedule": "cosine",
        "ema_halflife": 800.0, "sample_every": 200, "sample_count": 24, "sample_steps": 25, "checkpoint_every": 100,
        "log_every": 10,
    },
    # The UNet that unet.cu trains, 20,494,211 parameters, on 64×64 images: for one GPU with 8 GB or more.
    # 2,000 steps are enough for emoji, with the same choices as above; for a set of your own give more --steps.
    "unet64": {
        "image_size": 64, "model_channels": 64, "channel_mult": (1, 2, 3, 4), "num_res_blocks": 2,
        "attention_resolutions": (16, 8), "num_head_channels": 32, "schedule": "cosine", "prediction": "x_0",
        "flip": True, "batch": 32, "steps": 2000, "learning_rate": 5e-4, "warmup_steps": 100, "lr_schedule": "cosine",
        "ema_halflife": 4000.0, "sample_every": 500, "sample_count": 64, "sample_steps": 50, "checkpoint_every": 500,
        "log_every": 50,
    },
}
EMOJI = {"classes": ("Smileys & Emotion",)}  # what both presets fill in besides, for the default dataset alone


# The table ------------------------------------------------------------------------------------------------------------

def setting(default, group, help, unit="", low=None, high=None, above=None, below=None, choices=None, kind=None):
    """One line of the table below.

    low, high: the smallest and largest value; above, below: limits that the value itself must not touch.
    kind: type of the value where the default does not show it (None is the default); (int,) is a list of int.
    """
    kind = kind or (type(default) if not isinstance(default, tuple) else (int,))
    return field(default=default, metadata={"group": group, "help": help, "unit": unit, "low": low, "high": high,
                                            "above": above, "below": below, "choices": choices, "kind": kind})


@dataclass
class TrainOptions:
    """The settings of a run; `resolve` makes one that is complete and checked."""

    # What to train
    model: str = setting("unet", "Run", "Model to train.", choices=MODELS)
    preset: str = setting(None, "Run", "What fills the settings that you leave out.  [default: tiny where there is "
                          "no GPU, unet64 where there is]", choices=tuple(PRESETS), kind=str)
    outdir: str = setting("runs", "Run", "Folder of the numbered run folders.", unit="DIR")
    device: str = setting("auto", "Run", "Where to compute; auto: the GPU if there is one.",
                          choices=("auto", "cpu", "cuda", "emulator"))
    precision: str = setting("fp32", "Run", "Arithmetic: fp32 is all float32.", unit="fp32")
    seed: int = setting(0, "Run", "Seed of weights, data order, noise, timesteps and flips.", unit="N", low=0,
                        high=SEEDS)

    data: str = setting(None, "Data", "Dataset, as `numdiff data import` writes it.  [default: emoji64.h5, "
                        "installed with numdiff]", unit="FILE.h5", kind=str)
    classes: tuple = setting(None, "Data", "Names of the classes to train on, with commas between.  [default: all]",
                             unit="NAME,…", kind=(str,))
    image_size: int = setting(64, "Data", "Side of the images; must divide that of the dataset's images.", unit="PX",
                              low=1, high=4096)
    flip: bool = setting(False, "Data", "Mirror each image with probability one half.")

    model_channels: int = setting(64, "Model", "Channels of the first level; a multiple of 32.", unit="N", low=1)
    channel_mult: tuple = setting((1, 2, 3, 4), "Model", "Channels of each level, in multiples of --model-channels; "
                                  "each level halves the size.", unit="N,N,…", low=1)
    num_res_blocks: int = setting(2, "Model", "Residual blocks a level.", unit="N", low=1)
    attention_resolutions: tuple = setting((16, 8), "Model", "Image sizes at which there is attention; `none` for only "
                                           "the one in the middle.", unit="PX,…", low=1)
    num_heads: int = setting(1, "Model", "Attention heads, where --num-head-channels is -1.", unit="N", low=1)
    num_head_channels: int = setting(32, "Model", "Channels of an attention head; -1: --num-heads counts.", unit="N",
                                     low=-1)
    use_scale_shift_norm: bool = setting(False, "Model", "The timestep scales and shifts the norm, instead of being "
                                         "added.")
    resblock_updown: bool = setting(False, "Model", "Residual blocks change the size.")
    conv_resample: bool = setting(False, "Model", "Convolutions change the size, instead of pooling and repetition.")
    class_cond: bool = setting(False, "Model", "Tell the model the class of each image.")
    dropout: float = setting(0.0, "Model", "Share of the activations that are dropped.", unit="P", low=0, below=1)
    use_new_attention_order: bool = setting(False, "Model", "Order of qkv as in the later of guided-diffusion's two.")
    max_period: float = setting(10000.0, "Model", "Longest period of the timestep embedding; unet.cu has 1000.",
                                unit="STEPS", above=0)

    diffusion_steps: int = setting(1000, "Diffusion", "Timesteps of the forward process.", unit="N", low=1, high=100000)
    schedule: str = setting("linear", "Diffusion", "How the noise grows.", choices=("linear", "cosine"))
    prediction: str = setting("eps", "Diffusion", "What the model predicts: noise, velocity or image.",
                              choices=("eps", "v", "x_0"))

    batch: int = setting(32, "Optimiser", "Images a step, over all microbatches.", unit="IMAGES", low=1)
    microbatch: int = setting(None, "Optimiser", "Images a forward pass; must divide --batch.  [default: the batch]",
                              unit="IMAGES", low=1, kind=int)
    steps: int = setting(10000, "Optimiser", "Optimiser steps in all.", unit="STEPS", low=1)
    learning_rate: float = setting(1e-4, "Optimiser", "Learning rate after the warm-up.", unit="RATE", above=0)
    warmup_steps: int = setting(200, "Optimiser", "Steps over which the learning rate rises.", unit="STEPS", low=0)
    lr_schedule: str = setting("constant", "Optimiser", "Learning rate after the warm-up: constant, or a cosine to 0 "
                               "at the last step.", choices=("constant", "cosine"))
    beta1: float = setting(0.9, "Optimiser", "AdamW's decay of the mean gradient.", unit="B", low=0, below=1)
    beta2: float = setting(0.999, "Optimiser", "AdamW's decay of the mean squared gradient.", unit="B", low=0, below=1)
    adam_eps: float = setting(1e-8, "Optimiser", "AdamW's term against division by zero.", unit="EPS", above=0)
    weight_decay: float = setting(0.0, "Optimiser", "AdamW's decoupled weight decay.", unit="W", low=0)
    clip_norm: float = setting(1.0, "Optimiser", "Clip the gradient to this global norm; 0: do not.", unit="NORM",
                               low=0)
    ema_halflife: float = setting(20000.0, "Optimiser", "Images after which the averaged weights have forgotten half; "
                                  "0: no average.", unit="IMAGES", low=0)

    checkpoint_every: int = setting(1000, "Output", "Steps between checkpoints; 0: only at the end.", unit="STEPS",
                                    low=0)
    keep: int = setting(3, "Output", "Checkpoints to keep, the newest.", unit="N", low=1)
    sample_every: int = setting(1000, "Output", "Steps between sample grids; 0: only at the end.", unit="STEPS", low=0)
    sample_count: int = setting(64, "Output", "Images of a sample grid; 0: none.", unit="IMAGES", low=0)
    sampler: str = setting("ddim", "Output", "How samples are made.", choices=("ddpm", "ddim"))
    sample_steps: int = setting(50, "Output", "Model evaluations for each sample.", unit="STEPS", low=1)
    log_every: int = setting(50, "Output", "Steps between two lines of the report.", unit="STEPS", low=1)

    def to_json(self):
        """A dict that JSON can say."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, values):
        """The options that `to_json` gave; settings that a newer numdiff has added keep their defaults."""
        unknown = values.keys() - FIELDS.keys()
        if unknown:
            raise NumdiffError("the run has settings that this numdiff does not know "
                               f"({', '.join(sorted(unknown))}); use the version that wrote it.")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def save(self, path):
        write_json(path, self.to_json(), "the options")

    @classmethod
    def load(cls, path):
        """Read an options.json."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_json(json.load(file))
        except FileNotFoundError:
            raise NumdiffError(f"{path} does not exist; give a run folder that `numdiff train` made.") from None
        except OSError as error:
            raise NumdiffError(f"cannot read {path}: {error.strerror}.") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise NumdiffError(f"{path} is damaged ({error}); restore it from the run's checkpoint or start a new "
                               "run.") from error


FIELDS = {f.name: f for f in dataclasses.fields(TrainOptions)}

# What a resumed run may change and still be the same run: how long, how often, where. `steps` moves the end of a cosine
# schedule; `microbatch` changes the rounding of sums and nothing else; the dataset may have moved.
CHANGED_ON_RESUME = ("outdir", "device", "data", "microbatch", "steps", "checkpoint_every", "keep", "sample_every",
                     "sample_count", "sampler", "sample_steps", "log_every")


def flag(name):
    """The command line's name of a setting."""
    return "--" + name.replace("_", "-")


# Resolving ------------------------------------------------------------------------------------------------------------

def resolve(given):
    """Complete, checked `TrainOptions` from {name: value} of what the user set; None counts as not set.

    The rest comes from the preset, then from the defaults. `device` becomes "cpu", "cuda" or "emulator".
    """
    given = _known(given)
    check(TrainOptions(**given), only=given)  # before the device is looked for, which takes a second
    device = _device(given.get("device", "auto"))
    preset = given.get("preset") or ("unet64" if device == "cuda" else "tiny")
    emoji = {} if given.get("data") else EMOJI
    options = TrainOptions(**{**PRESETS[preset], **emoji, **given, "preset": preset, "device": device})
    if "warmup_steps" not in given:  # a run made shorter than its preset keeps a warm-up in proportion
        options.warmup_steps = min(options.warmup_steps, options.steps // 10)
    if "sample_steps" not in given:
        options.sample_steps = min(options.sample_steps, options.diffusion_steps)
    if "attention_resolutions" not in given:  # those of the preset that a model of another size has
        options.attention_resolutions = tuple(r for r in options.attention_resolutions if r in _sizes(options))
    check(options)
    return options


def resolve_resumed(saved, given):
    """The options of a run that goes on: those it was started with and what `given` changes, if it may be changed."""
    given = _known(given)
    for name, value in given.items():
        old = getattr(saved, name)
        if value != old and name not in CHANGED_ON_RESUME:
            raise UsageError(f"{flag(name)} {_say(value)} does not fit the run, which was started with {_say(old)}; "
                             "leave it out, or start a new run.")
    device = _device(given.get("device", saved.device))
    options = dataclasses.replace(saved, **{**given, "device": device})
    check(options)
    return options


def check(options, only=None):
    """Raise a `UsageError` that names the option and the remedy where a setting cannot work.

    only: names of the settings to look at one by one; what depends on several is then left out.
    """
    for name, spec in FIELDS.items():
        if only is None or name in only:
            _check_value(name, getattr(options, name), spec.metadata)
    if only is None:
        _check_sizes(options)
        _check_channels(options)
        _check_run(options)


def _known(given):
    """`given` without what is None, lists as tuples; a `UsageError` for a name that is no setting."""
    for name in given:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            raise UsageError(f"there is no setting {name!r}{f'; did you mean {near[0]!r}?' if near else '.'}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}


def _device(name):
    """"cpu", "cuda" or "emulator" for one of these, or for auto."""
    if name in ("cpu", "emulator"):
        return name
    from ..device import why_no_gpu
    reason = why_no_gpu()
    if name == "cuda" and reason:
        raise UsageError(f"--device cuda: no GPU can be used ({reason}); use --device cpu.")
    return "cpu" if reason else "cuda"


def _say(value):
    """A value as one writes it on the command line."""
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _check_value(name, value, spec):
    """One setting by itself: its type, its choices, its range."""
    if value is None and FIELDS[name].default is None:
        return
    kind, many = (spec["kind"][0], True) if isinstance(spec["kind"], tuple) else (spec["kind"], False)
    if isinstance(value, tuple) != many:
        raise UsageError(f"{flag(name)} {_say(value)} must be {'a list' if many else 'one value'}.")
    for v in value if many else (value,):
        number = isinstance(v, (int, float)) and not isinstance(v, bool)
        fits = {bool: isinstance(v, bool), str: isinstance(v, str), int: number and isinstance(v, int),
                float: number and math.isfinite(v)}[kind]
        if not fits:
            wanted = {bool: "yes or no", str: "text", int: "a whole number", float: "a finite number"}[kind]
            raise UsageError(f"{flag(name)} {_say(value)} must be {wanted}.")
        if spec["choices"] and v not in spec["choices"]:
            raise UsageError(f"{flag(name)} {v} does not exist; use {' or '.join(spec['choices'])}.")
        low, high, above, below = (spec[k] for k in ("low", "high", "above", "below"))
        if ((low is not None and v < low) or (above is not None and v <= above)
                or (high is not None and v > high) or (below is not None and v >= below)):
            raise UsageError(f"{flag(name)} {_say(value)} must be {range_text(spec)}.")


def range_text(spec):
    """The range of a setting in words; empty if any value goes."""
    parts = [f"{word} {spec[key]}" for word, key in (("at least", "low"), ("above", "above"), ("at most", "high"),
                                                     ("below", "below")) if spec[key] is not None]
    return " and ".join(parts)


def _sizes(o):
    """The image sizes of the model's levels."""
    return [o.image_size // 2**i for i in range(len(o.channel_mult))]


def _check_sizes(o):
    levels = len(o.channel_mult)
    if not levels:
        raise UsageError("--channel-mult must have at least one entry.")
    if o.image_size % 2 ** (levels - 1):
        raise UsageError(f"--image-size {o.image_size} cannot be halved {levels - 1} times, as the {levels} levels of "
                         f"--channel-mult {_say(o.channel_mult)} need; use a multiple of {2 ** (levels - 1)}, or fewer "
                         "levels.")
    for r in o.attention_resolutions:
        if r not in _sizes(o):
            raise UsageError(f"--attention-resolutions {_say(o.attention_resolutions)}: the model never has size {r}; "
                             f"use some of {_say(tuple(_sizes(o)))}, or none.")


def _check_channels(o):
    channels = [o.model_channels * m for m in o.channel_mult]
    if any(c % GROUPS for c in channels) or o.model_channels % GROUPS:
        raise UsageError(f"--model-channels {o.model_channels} must be a multiple of {GROUPS}, the groups of the group "
                         f"normalisation; use {max(GROUPS, round(o.model_channels / GROUPS) * GROUPS)}.")
    for c, size in zip(channels, _sizes(o), strict=True):
        if size not in o.attention_resolutions and size != _sizes(o)[-1]:  # the middle always has attention
            continue
        if o.num_head_channels == -1:
            if c % o.num_heads:
                raise UsageError(f"--num-heads {o.num_heads} does not divide the {c} channels at size {size}; use a "
                                 f"divisor of {c}.")
        elif o.num_head_channels < 1 or c % o.num_head_channels:
            raise UsageError(f"--num-head-channels {o.num_head_channels} does not divide the {c} channels at size "
                             f"{size}; use a divisor of {c}, or -1 and --num-heads.")


def _check_run(o):
    if o.precision not in PRECISIONS:
        raise UsageError(f"--precision {o.precision} is not available; use {' or '.join(PRECISIONS)}.")
    if o.microbatch and o.batch % o.microbatch:
        fits = max(m for m in range(1, min(o.microbatch, o.batch) + 1) if o.batch % m == 0)
        raise UsageError(f"--batch {o.batch} is not divisible by --microbatch {o.microbatch}; use a --microbatch of "
                         f"{fits}, or a --batch of {-(-o.batch // o.microbatch) * o.microbatch}.")
    if o.warmup_steps > o.steps:
        raise UsageError(f"--warmup-steps {o.warmup_steps} is more than --steps {o.steps}; use fewer.")
    if o.sample_steps > o.diffusion_steps:
        raise UsageError(f"--sample-steps {o.sample_steps} is more than --diffusion-steps {o.diffusion_steps}; use "
                         "fewer.")
