"""Every setting of a training run: what it means, its unit, its range; the presets; and the checks.

`TrainOptions` is the table. `numdiff train` makes its command-line options from it, the `options.json` of a run folder
is it written out, and `resolve` fills what the user left unset from a preset and refuses what cannot work.
"""
import dataclasses
import difflib
import math
import numbers
from dataclasses import dataclass, field

from .. import schema
from ..errors import NumdiffError, UsageError, printable
from ..files import Refused, read_bytes, write_json
from .precision import ON_TENSOR_CORES, automatic, gpu_capability

MODELS = ("unet", "dit")
ONLY = {"UNet": "unet", "DiT": "dit"}  # groups of settings that one model alone has
ARCHITECTURES = (*(f"DiT-{size}/{patch}" for size in ("S", "B", "L", "XL") for patch in (2, 4, 8)), "DiT-Tiny")
PRECISIONS = ("auto", "fp32", "tf32", "fp16")
LOSS_SCALE_RULES = ("doubling", "log2")
SAMPLERS = ("ddpm", "ddim", "euler", "euler-ancestral", "heun", "dpm++2m")
GROUPS = 32  # of every group normalisation: channels must be a multiple
OPTIONS_BYTES = 1 << 20  # of an options.json
SEEDS = 2**32 - 1  # the largest seed
MOST = 10**9  # steps, and what is counted in steps: counters on the device have 32 bits


# Presets --------------------------------------------------------------------------------------------------------------

UNET_PRESETS = {
    # The smallest UNet that draws emoji: for a laptop without a GPU, about four minutes on two cores. In so short a run
    # predicting the image itself under a cosine schedule gives the clearest pictures, one class of emoji is learnt
    # sooner than nine (`EMOJI` below), many steps of few images teach more than few of many, and the learning rate is
    # high, falls to zero, and comes with an average that soon forgets the beginning (PRESETS.md has the runs).
    "tiny": {
        "image_size": 32, "model_channels": 32, "channel_mult": (1, 2, 4), "num_res_blocks": 1,
        "attention_resolutions": (8,), "num_head_channels": 32, "schedule": "cosine", "prediction": "x_0",
        "batch": 4, "steps": 1500, "learning_rate": 1e-3, "warmup_steps": 20, "lr_schedule": "cosine", "beta2": 0.99,
        "ema_halflife": 800.0, "sample_every": 750, "sample_count": 24, "sampler": "dpm++2m", "sample_steps": 20,
        "checkpoint_every": 250, "log_every": 25,
    },
    # The UNet that unet.cu trains, 20,494,211 parameters, on 64×64 images: for one GPU with 8 GB or more. The same
    # choices as above; so many steps take an H200 less than a minute.
    "unet64": {
        "image_size": 64, "model_channels": 64, "channel_mult": (1, 2, 3, 4), "num_res_blocks": 2,
        "attention_resolutions": (16, 8), "num_head_channels": 32, "schedule": "cosine", "prediction": "x_0",
        "batch": 32, "steps": 8000, "learning_rate": 5e-4, "warmup_steps": 100, "lr_schedule": "cosine",
        "ema_halflife": 4000.0, "sample_every": 2000, "sample_count": 64, "sampler": "dpm++2m", "sample_steps": 20,
        "checkpoint_every": 2000, "log_every": 200,
    },
}
DIT_PRESETS = {
    # A small DiT that draws emoji of three kinds on request: for a laptop without a GPU. It learns slower than a UNet,
    # so the learning rate is twice as high, and AdamW forgets large gradients of the beginning sooner.
    "tiny": {
        "architecture": "DiT-Tiny", "image_size": 32, "class_cond": True, "schedule": "cosine", "prediction": "x_0",
        "batch": 8, "steps": 1400, "learning_rate": 2e-3, "warmup_steps": 20, "lr_schedule": "cosine", "beta2": 0.99,
        "ema_halflife": 1600.0, "sample_every": 700, "sample_count": 24, "sampler": "dpm++2m", "sample_steps": 20,
        "checkpoint_every": 200, "log_every": 20,
    },
    # DiT-S/4 on 64×64 pixels with a learned variance, as the paper has it, but for a minute on one GPU: it predicts v
    # under a cosine schedule, and the learning rate is ten times as high and falls to zero. Its grids are drawn with a
    # little guidance. For one GPU with 8 GB or more.
    "small64": {
        "architecture": "DiT-S/4", "image_size": 64, "class_cond": True, "schedule": "cosine", "prediction": "v",
        "batch": 64, "steps": 8000, "learning_rate": 1e-3, "warmup_steps": 200, "lr_schedule": "cosine", "beta2": 0.99,
        "ema_halflife": 20000.0, "sample_every": 2000, "sample_count": 63, "sampler": "dpm++2m", "sample_steps": 20,
        "cfg_scale": 1.5, "checkpoint_every": 2000, "log_every": 200,
    },
}
PRESETS = {"unet": UNET_PRESETS, "dit": DIT_PRESETS}
DEFAULT_PRESET = {"unet": {"cpu": "tiny", "cuda": "unet64"}, "dit": {"cpu": "tiny", "cuda": "small64"}}
SMILEYS = {"classes": ("Smileys & Emotion",), "flip": True}
EMOJI = {  # what a preset fills in besides, for the default dataset alone
    "unet": {"tiny": SMILEYS, "unet64": SMILEYS},
    "dit": {"tiny": {"classes": ("Smileys & Emotion", "Food & Drink", "Flags"), "flip": True},
            "small64": {}},  # mirrored, flags are none, and letters and figures no longer theirs
}


# The table ------------------------------------------------------------------------------------------------------------

def setting(default, group, help, unit="", low=None, high=None, above=None, below=None, choices=None, kind=None):
    """One line of the table below.

    group: the heading under which help shows it; the groups "UNet" and "DiT" belong to that model alone
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
    preset: str = setting(None, "Run", "What fills the settings that you leave out.", unit="NAME", kind=str)
    outdir: str = setting("runs", "Run", "Folder of the numbered run folders.", unit="DIR")
    device: str = setting("auto", "Run", "Where to compute; auto: the GPU if there is one.",
                          choices=("auto", "cpu", "cuda", "emulator"))
    transport: str = setting("auto", "Run", "How gradients travel between the ranks of mpiexec; auto: peer on the GPUs "
                             "of one host, else nccl if it is installed, else mpi.",
                             choices=("auto", "mpi", "peer", "nccl"))
    rank_timeout: float = setting(120.0, "Run", "With several ranks: the time after which one that is stopped or stuck "
                                  "ends them all, compiling excepted; 0: never.", unit="SECONDS", low=0)
    precision: str = setting("auto", "Run", "Arithmetic: fp32 is all float32; tf32, on a GPU, rounds the operands of "
                             "products to 11 digits, for tensor cores; fp16, on a GPU, has activations and "
                             "products in float16 on tensor cores, and scales the loss; auto: fp16 on a GPU of compute "
                             "capability 8.0 or later, else fp32.", choices=PRECISIONS)
    eager: bool = setting(False, "Run", "Launch each kernel from Python, instead of replaying a graph of them: slower, "
                          "with the same bits.")
    recompute: bool = setting(False, "Run", "Keep only the inputs of the model's blocks for the backward pass, which "
                              "computes their insides again: less memory, more time, the same bits.")
    seed: int = setting(0, "Run", "Seed of weights, data order, noise, timesteps and flips.", unit="N", low=0,
                        high=SEEDS)

    data: str = setting(None, "Data", "Dataset, as `numdiff data import` writes it.  [default: emoji64.h5, "
                        "installed with numdiff]", unit="FILE.h5", kind=str)
    classes: tuple = setting(None, "Data", "Names of the classes to train on, with commas between.  [default: all]",
                             unit="NAME,…", kind=(str,))
    image_size: int = setting(64, "Data", "Side of the images; must divide that of the dataset's images.", unit="PX",
                              low=1, high=4096)
    channels: int = setting(None, "Data", "Channels of the images.  [default: those of the dataset]", unit="N", low=1,
                            high=4096, kind=int)
    flip: bool = setting(False, "Data", "Mirror each image with probability one half.")

    architecture: str = setting("DiT-B/4", "DiT", "Depth, width and patch size by name: DiT-S, -B, -L or -XL with /2, "
                                "/4 or /8, or DiT-Tiny.", unit="NAME", choices=ARCHITECTURES)
    patch_size: int = setting(None, "DiT", "Side of a token in pixels.  [default: by --model]", unit="PX", low=1,
                              high=4096, kind=int)
    hidden_size: int = setting(None, "DiT", "Channels of a token.  [default: by --model]", unit="N", low=4,
                               high=1 << 14, kind=int)
    depth: int = setting(None, "DiT", "Blocks.  [default: by --model]", unit="N", low=1, high=1024, kind=int)
    heads: int = setting(None, "DiT", "Attention heads.  [default: by --model]", unit="N", low=1, high=1 << 14,
                         kind=int)
    mlp_ratio: float = setting(4.0, "DiT", "How much wider the MLP is than a token.", unit="X", above=0, high=1024)
    num_classes: int = setting(None, "DiT", "Classes of the model.  [default: those of the dataset]", unit="N",
                               low=1, high=1 << 20, kind=int)

    model_channels: int = setting(64, "UNet", "Channels of the first level; a multiple of 32.", unit="N", low=1,
                                  high=1 << 14)
    channel_mult: tuple = setting((1, 2, 3, 4), "UNet", "Channels of each level, in multiples of --model-channels; "
                                  "each level halves the size.", unit="N,N,…", low=1, high=256)
    num_res_blocks: int = setting(2, "UNet", "Residual blocks a level.", unit="N", low=1, high=64)
    attention_resolutions: tuple = setting((16, 8), "UNet", "Image sizes at which there is attention; `none` for only "
                                           "the one in the middle.", unit="PX,…", low=1, high=4096)
    num_heads: int = setting(1, "UNet", "Attention heads, where --num-head-channels is -1.", unit="N", low=1,
                             high=1 << 14)
    num_heads_upsample: int = setting(-1, "UNet", "Attention heads on the way up, where they are others; -1: as "
                                      "--num-heads.", unit="N", low=-1, high=1 << 14)
    num_head_channels: int = setting(32, "UNet", "Channels of an attention head; -1: --num-heads counts, as it does "
                                     "where that alone is given.", unit="N", low=-1, high=1 << 14)
    use_scale_shift_norm: bool = setting(False, "UNet", "The timestep scales and shifts the norm, instead of being "
                                         "added.")
    resblock_updown: bool = setting(False, "UNet", "Residual blocks change the size.")
    conv_resample: bool = setting(False, "UNet", "Convolutions change the size, instead of pooling and repetition.")
    class_cond: bool = setting(False, "Model", "Tell the model the class of each image.")
    class_dropout: float = setting(None, "Model", "Share of the images that lose their class in training, so that "
                                   "there is a null class, for guidance; 0: none.  [default: 0.1 for a DiT, 0 for a "
                                   "UNet]", unit="P", low=0, below=1, kind=float)
    learn_sigma: bool = setting(None, "Model", "Learn the variance of the reverse steps too.  [default: yes for a DiT "
                                "other than DiT-Tiny, else no]", kind=bool)
    dropout: float = setting(0.0, "UNet", "Share of the activations that are dropped.", unit="P", low=0, below=1)
    use_new_attention_order: bool = setting(False, "UNet", "Order of qkv as in the later of guided-diffusion's two.")
    max_period: float = setting(10000.0, "UNet", "Longest period of the timestep embedding; unet.cu has 1000.",
                                unit="STEPS", low=1, high=1e30)

    diffusion_steps: int = setting(1000, "Diffusion", "Timesteps of the forward process.", unit="N", low=1, high=100000)
    schedule: str = setting("linear", "Diffusion", "How the noise grows.", choices=("linear", "cosine"))
    prediction: str = setting("eps", "Diffusion", "What the model predicts: noise, velocity or image.",
                              choices=("eps", "v", "x_0"))
    rescale_timesteps: bool = setting(False, "Diffusion", "Tell the model timestep t as t · 1000 / --diffusion-steps, "
                                      "as improved-diffusion does.")
    vlb_weight: float = setting(None, "Diffusion", "Weight of the variational bound in the loss of a learned variance; "
                                "1 as guided-diffusion without rescale_learned_sigmas.  [default: --diffusion-steps / "
                                "1000, as with it]", unit="W", low=0, high=1e6, kind=float)

    batch: int = setting(32, "Optimiser", "Images a step, over all microbatches.", unit="IMAGES", low=1,
                         high=1 << 20)
    microbatch: int = setting(None, "Optimiser", "Images a forward pass; must divide --batch.  [default: the batch]",
                              unit="IMAGES", low=1, high=1 << 20, kind=int)
    steps: int = setting(10000, "Optimiser", "Optimiser steps in all.", unit="STEPS", low=1, high=MOST)
    learning_rate: float = setting(1e-4, "Optimiser", "Learning rate after the warm-up.", unit="RATE", above=0)
    warmup_steps: int = setting(200, "Optimiser", "Steps over which the learning rate rises.", unit="STEPS", low=0,
                                high=MOST)
    lr_schedule: str = setting("constant", "Optimiser", "Learning rate after the warm-up: constant, or a cosine to 0 "
                               "at the last step.", choices=("constant", "cosine"))
    beta1: float = setting(0.9, "Optimiser", "AdamW's decay of the mean gradient.", unit="B", low=0, below=1)
    beta2: float = setting(0.999, "Optimiser", "AdamW's decay of the mean squared gradient.", unit="B", low=0, below=1)
    adam_eps: float = setting(1e-8, "Optimiser", "AdamW's term against division by zero.", unit="EPS", low=1e-30,
                              high=1)
    weight_decay: float = setting(0.0, "Optimiser", "AdamW's decoupled weight decay.", unit="W", low=0, high=1e6)
    clip_norm: float = setting(1.0, "Optimiser", "Clip the gradient to this global norm; 0: do not.", unit="NORM",
                               low=0, high=1e30)
    loss_scale: float = setting(2.0**16, "Optimiser", "With fp16: the loss scale at first; it finds its own value.",
                                unit="X", low=2.0**-24, high=2.0**64)
    loss_scale_rule: str = setting("doubling", "Optimiser", "How the loss scale grows: doubling after "
                                   "--loss-scale-interval clean steps, or log2, 2^0.001 a step; an overflow halves it.",
                                   choices=LOSS_SCALE_RULES)
    loss_scale_interval: int = setting(2000, "Optimiser", "Clean steps after which the loss scale is doubled.",
                                       unit="STEPS", low=1, high=MOST)
    ema_halflife: float = setting(20000.0, "Optimiser", "Images after which the averaged weights have forgotten half; "
                                  "0: no average.", unit="IMAGES", low=0, high=1e15)
    ema_decay: float = setting(None, "Optimiser", "Decay of the averaged weights a step, such as 0.9999, instead of "
                               "--ema-halflife; 0: no average.", unit="D", low=0, below=1, kind=float)
    ema_warmup: bool = setting(True, "Optimiser", "In step n the average's decay is at most (1 + n) / (10 + n), so "
                               "that it soon forgets the beginning.")

    checkpoint_every: int = setting(1000, "Output", "Steps between checkpoints; 0: only at the end.", unit="STEPS",
                                    low=0, high=MOST)
    keep: int = setting(3, "Output", "Checkpoints to keep, the newest.", unit="N", low=1, high=MOST)
    sample_every: int = setting(1000, "Output", "Steps between sample grids; 0: only at the end.", unit="STEPS", low=0,
                                high=MOST)
    sample_count: int = setting(64, "Output", "Images of a sample grid; 0: none.", unit="IMAGES", low=0, high=4096)
    sampler: str = setting("ddim", "Output", "How samples are made.", choices=SAMPLERS)
    sample_steps: int = setting(50, "Output", "Model evaluations for each sample.", unit="STEPS", low=1, high=100000)
    cfg_scale: float = setting(None, "Output", "Classifier-free guidance of the sample grids, for a model with "
                               "--class-dropout: 1 is plain, more exaggerates the class.", unit="SCALE", low=-1000,
                               high=1000, kind=float)
    log_every: int = setting(50, "Output", "Steps between two lines of the report.", unit="STEPS", low=1, high=MOST)

    def to_json(self):
        """A dict that JSON can say."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, values):
        """The options that `to_json` gave; settings that a newer numdiff has added keep their defaults."""
        schema.options(values, "it")
        unknown = values.keys() - FIELDS.keys()
        if unknown:
            raise NumdiffError("the run has settings that this numdiff does not know "
                               f"({', '.join(sorted(unknown))}); use the version that wrote it.")
        values = {"precision": "fp32", **values}  # what a run had before there was a choice
        if values.get("model") == "unet" and values.get("learn_sigma") is None:  # before these were a UNet's, too
            values.update(learn_sigma=False, class_dropout=0.0)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

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
            raise NumdiffError(f"{path} does not exist; give a run folder that `numdiff train` made.") from None
        except OSError as error:
            raise NumdiffError(f"cannot read {path}: {error.strerror}.") from error
        except (Refused, UsageError) as error:
            raise NumdiffError(f"{path} is damaged ({str(error).rstrip('.')}); restore it from the run's checkpoint or "
                               "start a new run.") from error


FIELDS = {f.name: f for f in dataclasses.fields(TrainOptions)}
ARCHITECTURE_SETTINGS = {"patch_size": "patch_size", "hidden_size": "hidden_size", "depth": "depth",
                         "heads": "num_heads"}  # setting -> option of the DiT

# What a resumed run may change and still be the same run: how long, how often, where. `steps` moves the end of a cosine
# schedule; `microbatch` and `precision` change how numbers are rounded; the dataset may have moved.
CHANGED_ON_RESUME = ("outdir", "device", "transport", "rank_timeout", "precision", "eager", "recompute", "data",
                     "microbatch", "steps", "checkpoint_every", "keep", "sample_every", "sample_count", "sampler",
                     "sample_steps", "cfg_scale", "log_every")


def flag(name):
    """The command line's name of a setting."""
    return "--model" if name == "architecture" else "--" + name.replace("_", "-")


def settings_of(model):
    """Names of the settings that a model has, in the table's order; without `model` itself."""
    return [name for name, spec in FIELDS.items()
            if name != "model" and ONLY.get(spec.metadata["group"], model) == model]


# Resolving ------------------------------------------------------------------------------------------------------------

def resolve(given, capability=None):
    """Complete, checked `TrainOptions` from {name: value} of what the user set; None counts as not set.

    The rest comes from the preset, then from the defaults. `device` becomes "cpu", "cuda" or "emulator".
    capability: as on a GPU of this compute capability, whether one is here or not
    """
    given = _known(given)
    check(TrainOptions(**given), only=given)  # before the device is looked for, which takes a second
    model = given.get("model", "unet")
    for name in given:
        only = ONLY.get(FIELDS[name].metadata["group"], model)
        if only != model:
            raise UsageError(f"{flag(name)} belongs to the model {only}; leave it out, or train that one.")
    device = "cuda" if capability else resolve_device(given.get("device", "auto"))
    preset = given.get("preset") or DEFAULT_PRESET[model]["cuda" if device == "cuda" else "cpu"]
    _check_preset(model, preset)
    emoji = {} if given.get("data") else dict(EMOJI[model][preset])
    if "num_classes" in given:  # so many classes are wanted, not those few
        emoji.pop("classes", None)
    options = TrainOptions(**{**PRESETS[model][preset], **emoji, **given, "model": model, "preset": preset,
                              "device": device})
    options.precision = _precision(options.precision, device, capability)
    if "warmup_steps" not in given:  # a run made shorter than its preset keeps a warm-up in proportion
        options.warmup_steps = min(options.warmup_steps, options.steps // 10)
    if "sample_steps" not in given:
        options.sample_steps = min(options.sample_steps, options.diffusion_steps)
    if model == "unet" and "attention_resolutions" not in given:  # those of the preset that a model of this size has
        options.attention_resolutions = tuple(r for r in options.attention_resolutions if r in _sizes(options))
    if model == "dit":
        _fill_architecture(options)
    if options.learn_sigma is None:  # short runs on laptops have no use for a variance
        options.learn_sigma = model == "dit" and options.architecture != "DiT-Tiny"
    if options.class_dropout is None:
        options.class_dropout = 0.1 if model == "dit" else 0.0
    if given.get("class_dropout") and not options.class_cond:
        raise UsageError(f"--class-dropout {options.class_dropout} needs --class-cond: there is no class to drop.")
    if "cfg_scale" not in given and not (options.class_cond and options.class_dropout):
        options.cfg_scale = None
    _resolve_heads(options, given)
    _resolve_average(options, given)
    check(options)
    return options


def _fill_architecture(options):
    """What the architecture's name says, where it was not set by itself."""
    from ..nn.dit import MODELS as SIZES  # here, as it loads the kernels
    for name, key in ARCHITECTURE_SETTINGS.items():
        if getattr(options, name) is None:
            setattr(options, name, SIZES[options.architecture][key])


def _resolve_heads(options, given):
    """A number of heads that was given counts; a `UsageError` where their size was given as well."""
    numbers_given = [name for name in ("num_heads", "num_heads_upsample") if given.get(name, -1) != -1]
    if numbers_given and given.get("num_head_channels", -1) != -1:
        raise UsageError(f"{flag(numbers_given[0])} and --num-head-channels exclude each other: give one of them.")
    if numbers_given:
        options.num_head_channels = -1


def _resolve_average(options, given):
    """One of decay and half-life from the other, which was given."""
    decay = given.get("ema_decay")
    if decay is None:
        return
    if "ema_halflife" in given:
        raise UsageError("--ema-decay and --ema-halflife exclude each other: give one of them.")
    options.ema_halflife = options.batch * math.log(2) / -math.log(decay) if decay else 0.0


def resolve_resumed(saved, given):
    """The options of a run that goes on: those it was started with and what `given` changes, if it may be changed."""
    given = _known(given)
    if given.get("precision") == "auto":  # the run has chosen
        del given["precision"]
    for name, value in given.items():
        old = getattr(saved, name)
        if value != old and name not in CHANGED_ON_RESUME:
            given, then = f"{flag(name)} {_say(value)}", _say(old)
            if isinstance(value, bool):
                given, then = (f"--{'' if on else 'no-'}{flag(name)[2:]}" for on in (value, old))
            raise UsageError(f"{given} does not fit the run, which was started with {then}; leave it out, or start a "
                             "new run.")
    device = resolve_device(given.get("device", saved.device))
    options = dataclasses.replace(saved, **{**given, "device": device})
    options.precision = _precision(options.precision, device)
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
        if options.model == "unet":
            _check_sizes(options)
            _check_channels(options)
        else:
            _check_tokens(options)
        if options.preset is not None:
            _check_preset(options.model, options.preset)
        _check_run(options)


def check_values(given):
    """Raise a `UsageError` for the first of {name: value} that is of the wrong type or out of its setting's range."""
    for name, value in given.items():
        _check_value(name, value, FIELDS[name].metadata)


def _known(given):
    """`given` without what is None, lists as tuples; a `UsageError` for a name that is no setting."""
    for name in given:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            raise UsageError(f"there is no setting {name!r}{f'; did you mean {near[0]!r}?' if near else '.'}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}


def _precision(name, device, capability=None):
    """The name, if the device has that precision; for "auto" the one that suits it. capability: of its GPU, where that
    is not here."""
    if name == "auto":
        return automatic(capability or gpu_capability() if device == "cuda" else None)
    if name == "fp16" and device == "cpu":
        raise UsageError("--precision fp16 needs a GPU; use --precision fp32 on the CPU.")
    if name == "tf32" and (device == "cpu" or device == "cuda"
                           and automatic(capability or gpu_capability()) != ON_TENSOR_CORES):
        raise UsageError("--precision tf32 needs a GPU of compute capability 8.0 or later; use --precision fp32.")
    return name


def resolve_device(name):
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
    return printable(",".join(map(str, value)) or "none" if isinstance(value, tuple) else value, 200)


def _check_value(name, value, spec):
    """One setting by itself: its type, its choices, its range."""
    if value is None and FIELDS[name].default is None:
        return
    kind, many = (spec["kind"][0], True) if isinstance(spec["kind"], tuple) else (spec["kind"], False)
    if isinstance(value, tuple) != many:
        raise UsageError(f"{flag(name)} {_say(value)} must be {'a list' if many else 'one value'}.")
    for v in value if many else (value,):
        number = isinstance(v, numbers.Real) and not isinstance(v, bool)
        fits = {bool: isinstance(v, bool), str: isinstance(v, str), int: number and isinstance(v, numbers.Integral),
                float: number and -math.inf < v < math.inf}[kind]
        if not fits:
            wanted = {bool: "yes or no", str: "text", int: "a whole number", float: "a finite number"}[kind]
            raise UsageError(f"{flag(name)} {_say(value)} must be {wanted}.")
        if spec["choices"] and v not in spec["choices"]:
            raise UsageError(f"{flag(name)} {_say(v)} does not exist; use {' or '.join(spec['choices'])}.")
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
            for name in ("num_heads", "num_heads_upsample"):
                heads = getattr(o, name)
                if heads == 0 or heads > 0 and c % heads:
                    raise UsageError(f"{flag(name)} {heads} does not divide the {c} channels at size {size}; use a "
                                     f"divisor of {c}.")
        elif o.num_head_channels < 1 or c % o.num_head_channels:
            raise UsageError(f"--num-head-channels {o.num_head_channels} does not divide the {c} channels at size "
                             f"{size}; use a divisor of {c}, or -1 and --num-heads.")


def _check_tokens(o):
    patch, hidden = o.patch_size, o.hidden_size
    if None in (patch, hidden, o.heads):  # not resolved yet: the name decides, and its parts fit
        return
    if o.image_size % patch:
        fits = [str(p) for p in (8, 4, 2) if o.image_size % p == 0]
        raise UsageError(f"--image-size {o.image_size} is not divisible by the {patch} pixels of a patch; use a "
                         f"multiple of {patch}{', or patches of ' + ' or '.join(fits) if fits else ''}.")
    if hidden % o.heads or hidden % 4:
        raise UsageError(f"--hidden-size {hidden} must be a multiple of 4 and of --heads {o.heads}; use "
                         f"{max(1, round(hidden / math.lcm(4, o.heads))) * math.lcm(4, o.heads)}.")
    if int(hidden * o.mlp_ratio) < 1:
        raise UsageError(f"--mlp-ratio {o.mlp_ratio} leaves the MLP no channel; use a larger one.")
    if o.num_classes is not None and not o.class_cond:
        raise UsageError("--num-classes needs --class-cond; leave it out, or turn the classes on.")


def _check_preset(model, preset):
    if preset not in PRESETS[model]:
        raise UsageError(f"--preset {preset} does not exist; use {' or '.join(PRESETS[model])}.")


def _check_run(o):
    if o.microbatch and o.batch % o.microbatch:
        fits = max(m for m in range(1, min(o.microbatch, o.batch) + 1) if o.batch % m == 0)
        raise UsageError(f"--batch {o.batch} is not divisible by --microbatch {o.microbatch}; use a --microbatch of "
                         f"{fits}, or a --batch of {-(-o.batch // o.microbatch) * o.microbatch}.")
    if o.warmup_steps > o.steps:
        raise UsageError(f"--warmup-steps {o.warmup_steps} is more than --steps {o.steps}; use fewer.")
    if o.vlb_weight is not None and not o.learn_sigma:
        raise UsageError(f"--vlb-weight {o.vlb_weight} is of the loss of a learned variance: give --learn-sigma, too.")
    if o.cfg_scale not in (None, 1) and not (o.class_cond and o.class_dropout != 0):
        raise UsageError(f"--cfg-scale {o.cfg_scale:g} guides by classes, and the model "
                         + ("never sees an image without its class: give a --class-dropout such as 0.1, or leave "
                            "--cfg-scale out." if o.class_cond else "has none: give --class-cond, or leave it out."))
    if o.sample_steps > o.diffusion_steps:
        raise UsageError(f"--sample-steps {o.sample_steps} is more than --diffusion-steps {o.diffusion_steps}; use "
                         "fewer.")
