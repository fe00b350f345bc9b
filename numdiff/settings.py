"""Every setting of a training run, each in one place: its name, type, default, help, unit, range,
whether a resumed run may change it, and its readers.

The classes below are the table: a class is a heading of help, an annotation the type (`| None`: may
be left open). From it follow the options of the command line (cli/settings.py), `TrainOptions` and
options.json and what is refused there (training/options.py), the configurations of `Trainer`,
`nn.AdamW` and `nn.Muon` (configs.py) with their checks (`configure`), and the arguments of the model
and the `DiffusionSettings` that a run builds (`arguments`). What one kind of model alone has stands in its
record, in training/kinds/, in the same form; so has what an extension adds (extensions.py).
setting.py describes a line.

A reader of a setting takes it as an argument of the same name and default, SAME, or as an
`Argument` says; a plain value is another default: Python defaults are minimal, command-line
defaults give a good run.

    python -m numdiff.settings      writes numdiff/configs.py: the typed configurations
"""

import dataclasses
import functools
import json
import math
import numbers
import os
import pathlib
import textwrap
from collections.abc import Sequence

from . import extensions
from .configs import AdamWConfig, MuonConfig, TrainerConfig
from .configuration import given_values
from .errors import UsageError, printable
from .setting import SAME, Argument, Setting, flag, say, setting, settings_in

PRECISIONS = ("auto", "fp32", "tf32", "fp16", "bf16")
TRAINING_PRECISIONS = *PRECISIONS, "fp8"
LOSS_SCALE_RULES = ("doubling", "log2")
SAMPLERS = ("ddpm", "ddim", "euler", "euler-ancestral", "heun", "dpm++2m", "euler-maruyama")
SEEDS = 2**32 - 1  # the largest seed
MAX_COUNT = 10**9  # steps, and what is counted in steps: counters on the device have 32 bits
MAX_SAMPLE_STEPS = 100_000  # of a sampler


# The table ----------------------------------------------------------------------------------------
# What a resumed run may change is how long, how often, how fast and where. `steps` moves the end of
# a cosine schedule, `microbatch` and `precision` change how numbers are rounded; the dataset may
# have moved.


class RunSettings:
    model: str = setting("unet", "Model to train.")
    preset: str | None = setting(
        None, "Where the settings that you leave out come from.", unit="NAME"
    )
    init: str | None = setting(
        None,
        "Start a new run from the weights in FILE, which the model's settings then follow: a run (its folder, its "
        "number, a checkpoint), or what `numdiff convert` reads or writes.",
        unit="FILE",
        trainer=SAME,
    )
    init_weights: str = setting(
        "ema",
        "With --init: which weights to take where the file has both, averaged or as trained.",
        choices=("ema", "raw"),
        trainer=SAME,
    )
    outdir: str = setting("runs", "Folder of the numbered run folders.", unit="DIR", resume=True)
    device: str = setting(
        "auto",
        "Where to compute; auto: the GPU if there is one.",
        choices=("auto", "cpu", "cuda", "emulator"),
        resume=True,
    )
    transport: str = setting(
        "auto",
        "How gradients travel between the ranks of mpiexec; auto: mpi between CPU ranks, on GPUs the fastest of peer "
        "(on one host, or within each), nccl (if it is installed) and mpi, as measured at the start.",
        choices=("auto", "mpi", "peer", "nccl"),
        resume=True,
    )
    shard_update: str = setting(
        "auto",
        "Whether each of several ranks updates its part of the weights alone, and holds the moments and averages of "
        "that part only (ZeRO, stage 1): less memory, the same bits; auto: on CPU ranks, and with "
        "AdamW on the GPUs of one host.",
        choices=("auto", "yes", "no"),
        resume=True,
        trainer=SAME,
    )
    rank_timeout: float = setting(
        120.0,
        "With several ranks: time after which a rank that is stopped or stuck ends the job, not counting compilation; "
        "0: never.",
        unit="SECONDS",
        low=0,
        resume=True,
    )
    precision: str = setting(
        "auto",
        "Arithmetic: fp32 is all float32; tf32, on a GPU, rounds the operands of products to 10 mantissa bits, for "
        "tensor cores; fp16, on a GPU, has activations and products in float16 on tensor cores, and scales the loss; "
        "bf16 has them in bfloat16, and scales nothing; fp8, of a DiT from 8.9 on, is fp16 with the products of "
        "the linear layers of all blocks but the first and the last in E4M3, 8 bits; "
        "auto: fp16 on a GPU, else "
        "fp32.",
        choices=TRAINING_PRECISIONS,
        resume=True,
        trainer=SAME,
    )
    fp8_promotion: bool = setting(
        True,
        "With fp8: add up products in float32 every 128 along the sum; without it sums are left to the tensor cores, "
        "which keep about 14 bits of them.",
        resume=True,
        trainer=SAME,
    )
    eager: bool = setting(
        False,
        "Launch each kernel from Python, instead of replaying a graph of them: slower, with the same bits.",
        resume=True,
        trainer=SAME,
    )
    recompute: str = setting(
        "no",
        "Keep only the inputs of the model's blocks, or of their attention or MLPs alone, for the backward pass, and "
        "recompute the rest: less memory, more time, the same bits; without a value, of the blocks.",
        choices=("no", "blocks", "attention", "mlp"),
        switch={True: "blocks", "yes": "blocks", False: "no"},
        resume=True,
        trainer=SAME,
    )
    seed: int = setting(
        0,
        "Seed of weights, data order, noise, timesteps and flips.",
        unit="N",
        low=0,
        high=SEEDS,
        trainer=SAME,
    )


class DataSettings:
    data: str | None = setting(
        None,
        "Dataset, as `numdiff data import` writes it, or a folder of pictures, decoded once.  [default: emoji64.h5, "
        "installed with numdiff]",
        unit="FILE.h5",
        resume=True,
    )
    classes: tuple[str, ...] | None = setting(
        None,
        "Names of the classes to train on, separated by commas, or `all`.  [default: all]",
        unit="NAME,…",
    )
    vae: str | None = setting(
        None,
        "Autoencoder of the latents in --data, by which the run's samples are decoded to pictures; `numdiff sample` "
        "then takes it, too.",
        unit="FILE",
        resume=True,
    )
    image_size: int = setting(
        64,
        "Side of the images, or HxW, such as 48x64; must divide that of the dataset's images.  "
        "[default: with --data on a GPU, that of its images, at most 256; else the preset's]",
        unit="PX",
        sides=True,
        low=1,
        high=4096,
        model=SAME,
    )
    channels: int | None = setting(
        None, "Channels of the images.  [default: those of the dataset]", unit="N", low=1, high=4096
    )
    flip: bool = setting(False, "Mirror each image with probability one half.", trainer=True)


class ModelSettings:
    class_cond: bool = setting(False, "Tell the model the class of each image.")
    class_dropout: float | None = setting(
        None,
        "Share of the images that lose their class in training, which makes a null class, for guidance; 0: none.  "
        "[default: 0.1 for a DiT, 0 for a UNet]",
        unit="P",
        low=0,
        below=1,
        model=SAME,
    )
    learn_sigma: bool | None = setting(
        None,
        "Also learn the variance of the reverse steps.  [default: yes for a DiT other than DiT-Tiny, else no]",
        model=SAME,
    )


class DiffusionSettings:
    path: str = setting(
        "discrete",
        "How images become noise: discrete, in --diffusion-steps steps of a --schedule; linear, (1 - t) · image + "
        "t · noise, t in (0, 1), for flow matching and rectified flow; edm, with EDM's preconditioning.",
        choices=("discrete", "linear", "edm"),
        diffusion=SAME,
    )
    diffusion_steps: int = setting(
        1000,
        "Timesteps of the forward process.",
        unit="N",
        low=1,
        high=100000,
        diffusion=Argument(name="steps"),
    )
    schedule: str = setting(
        "linear", "How the noise grows.", choices=("linear", "cosine"), diffusion=SAME
    )
    prediction: str = setting(
        "eps",
        "What the model predicts: noise, velocity, image, the flow from image to noise, or the network of EDM's "
        "preconditioning.  [with --path linear: flow; with --path edm: edm]",
        choices=("eps", "v", "x_0", "flow", "edm"),
        diffusion=SAME,
    )
    loss: str | None = setting(
        None,
        "What the squared error is of: of --prediction, or of what follows from it; --prediction x_0 --loss flow is "
        "JiT's.  [default: what the model predicts]",
        choices=("eps", "v", "x_0", "flow", "edm"),
        diffusion=SAME,
    )
    min_snr_gamma: float | None = setting(
        None,
        "Weigh the error of the image by the signal-to-noise ratio, at most this (min-SNR-gamma; its paper has 5), "
        "instead of --loss.",
        unit="GAMMA",
        low=1e-3,
        high=1e6,
        diffusion=SAME,
    )
    time_sampling: str = setting(
        "uniform",
        "With --path linear: how t is drawn in training.",
        choices=("uniform", "logit-normal"),
        diffusion=SAME,
    )
    noise_mean: float | None = setting(
        None,
        "Mean of log sigma = logit t, for --time-sampling logit-normal and --path edm; higher is noisier (JiT's -0.8 "
        "counts from the noise: here 0.8).  [default: 0; with --path edm -1.2]",
        unit="M",
        low=-10,
        high=10,
        diffusion=SAME,
    )
    noise_std: float | None = setting(
        None,
        "Standard deviation of log sigma, likewise.  [default: 1; with --path edm 1.2]",
        unit="S",
        low=1e-3,
        high=3,
        diffusion=SAME,
    )
    time_shift: float = setting(
        1.0,
        "With --path linear: S turns t into S·t / (1 + (S-1)·t), in training and sampling; above 1: more noise, for "
        "large images.",
        unit="S",
        low=1e-2,
        high=100,
        diffusion=SAME,
    )
    sigma_data: float = setting(
        0.5,
        "With --path edm: standard deviation of the images.",
        unit="S",
        low=1e-3,
        high=1e3,
        diffusion=SAME,
    )
    rescale_timesteps: bool = setting(
        False,
        "Tell the model timestep t as t · 1000 / --diffusion-steps, as improved-diffusion does; with --path linear, t "
        "as 1000 · t.",
        diffusion=Argument(name="timestep_scale"),
    )
    vlb_weight: float | None = setting(
        None,
        "Weight of the variational bound in the loss of a learned variance; 1 is guided-diffusion without "
        "rescale_learned_sigmas.  [default: --diffusion-steps / 1000, as with it]",
        unit="W",
        low=0,
        high=1e6,
        diffusion=SAME,
    )


class OptimiserSettings:
    batch: int = setting(
        32,
        "Images per step, over all microbatches.",
        unit="IMAGES",
        low=1,
        high=1 << 20,
        trainer=SAME,
    )
    microbatch: int | None = setting(
        None,
        "Images per forward pass; must divide --batch.  [default: the batch]",
        unit="IMAGES",
        low=1,
        high=1 << 20,
        resume=True,
        trainer=SAME,
    )
    steps: int = setting(
        10000,
        "Optimiser steps in all.",
        unit="STEPS",
        low=1,
        high=MAX_COUNT,
        resume=True,
        trainer=Argument(0, "total_steps"),
        adamw=Argument(0, "total_steps"),
    )
    optimizer: str = setting(
        "adamw",
        "What makes a step of the gradient: adamw, or muon, which makes the steps of the blocks' weight matrices "
        "orthogonal and leaves the rest to AdamW, at the same learning rate and decay.",
        choices=("adamw", "muon"),
        trainer=SAME,
    )
    muon_momentum: float = setting(
        0.95,
        "With --optimizer muon: decay of the matrices' mean gradient.",
        unit="M",
        low=0,
        below=1,
        needs=("optimizer", "muon"),
        trainer=SAME,
        muon=Argument(name="momentum"),
    )
    learning_rate: float = setting(
        1e-4,
        "Learning rate after the warm-up.",
        unit="RATE",
        above=0,
        resume=True,
        trainer=SAME,
        adamw=SAME,
    )
    warmup_steps: int = setting(
        200,
        "Steps over which the learning rate rises.",
        unit="STEPS",
        low=0,
        high=MAX_COUNT,
        trainer=100,
        adamw=0,
    )
    lr_schedule: str = setting(
        "constant",
        "Learning rate after the warm-up: constant, or a cosine to 0 at the last step.",
        choices=("constant", "cosine"),
        resume=True,
        trainer=Argument(False, "cosine", lambda schedule: schedule == "cosine"),
        adamw=Argument(False, "cosine", lambda schedule: schedule == "cosine"),
    )
    beta1: float = setting(
        0.9,
        "AdamW's decay of the mean gradient.",
        unit="B",
        low=0,
        below=1,
        trainer=SAME,
        adamw=SAME,
    )
    beta2: float = setting(
        0.999,
        "AdamW's decay of the mean squared gradient.",
        unit="B",
        low=0,
        below=1,
        trainer=SAME,
        adamw=SAME,
    )
    adam_eps: float = setting(
        1e-8,
        "AdamW's epsilon, against division by zero.",
        unit="EPS",
        low=1e-30,
        high=1,
        trainer=SAME,
        adamw=Argument(name="eps"),
    )
    weight_decay: float = setting(
        0.0, "AdamW's decoupled weight decay.", unit="W", low=0, high=1e6, trainer=SAME, adamw=SAME
    )
    clip_norm: float = setting(
        1.0,
        "Clip the gradient to this global norm; 0: no clipping.",
        unit="NORM",
        low=0,
        high=1e30,
        trainer=SAME,
        adamw=0.0,
    )
    loss_scale: float = setting(
        2.0**16,
        "With fp16: the initial loss scale; it then adapts.",
        unit="X",
        low=2.0**-24,
        high=2.0**64,
        trainer=SAME,
    )
    loss_scale_rule: str = setting(
        "doubling",
        "How the loss scale grows: doubling after --loss-scale-interval clean steps, or log2, 2^0.001 a step; an "
        "overflow halves it.",
        choices=LOSS_SCALE_RULES,
        trainer=SAME,
    )
    loss_scale_interval: int = setting(
        2000,
        "Clean steps after which the loss scale is doubled.",
        unit="STEPS",
        low=1,
        high=MAX_COUNT,
        trainer=SAME,
    )
    freeze: tuple[str, ...] = setting(
        (),
        "Names of parameters that are not trained and keep their bits, with * for any text: 'blocks.*', '*.bias'; may "
        "be given several times.",
        unit="PATTERN",
        repeated=True,
        trainer=SAME,
    )
    ema_halflife: float = setting(
        20000.0,
        "Images after which the averaged weights have forgotten half; 0: no average.",
        unit="IMAGES",
        low=0,
        high=1e15,
        trainer=0.0,
    )
    ema_decay: float | None = setting(
        None,
        "Decay of the averaged weights per step, such as 0.9999, instead of --ema-halflife; 0: no average.",
        unit="D",
        low=0,
        below=1,
        trainer=SAME,
        adamw=0.0,
    )
    ema_warmup: bool = setting(
        True,
        "In step n the average's decay is at most (1 + n) / (10 + n), so that it quickly forgets the initial weights.",
        trainer=SAME,
        adamw=SAME,
    )


class OutputSettings:
    checkpoint_every: int = setting(
        1000,
        "Steps between checkpoints; 0: only at the end.",
        unit="STEPS",
        low=0,
        high=MAX_COUNT,
        resume=True,
    )
    keep: int = setting(
        3,
        "How many checkpoints to keep, the newest ones.",
        unit="N",
        low=1,
        high=MAX_COUNT,
        resume=True,
    )
    sample_every: int = setting(
        1000,
        "Steps between sample grids and, with or without them, drawings of loss.png; 0: only at the end.",
        unit="STEPS",
        low=0,
        high=MAX_COUNT,
        resume=True,
    )
    sample_count: int = setting(
        64, "Images of a sample grid; 0: none.", unit="IMAGES", low=0, high=4096, resume=True
    )
    sampler: str = setting(
        "ddim",
        "How samples are made, by the run and by `numdiff sample`.",
        choices=SAMPLERS,
        resume=True,
    )
    sample_steps: int = setting(
        50,
        "Model evaluations for each sample.",
        unit="STEPS",
        low=1,
        high=MAX_SAMPLE_STEPS,
        resume=True,
    )
    cfg_scale: float | None = setting(
        None,
        "Classifier-free guidance of samples, for a model with --class-dropout: 1 is no guidance, more "
        "exaggerates the class.",
        unit="SCALE",
        low=-1000,
        high=1000,
        resume=True,
    )
    cfg_interval: tuple[float, ...] | None = setting(
        None,
        "The noise levels sigma between which samples are guided, such as 0.3,5; with --path linear sigma is "
        "t / (1 - t).  [default: all]",
        unit="LOW,HIGH",
        low=0,
        resume=True,
    )
    evaluate_every: int = setting(
        0,
        "Steps between measurements of the Fréchet distance between samples and the training images, in numdiff's own "
        "features; the checkpoint of the least is kept as best.h5. 0: none.",
        unit="STEPS",
        low=0,
        high=MAX_COUNT,
        resume=True,
    )
    evaluate_count: int = setting(
        64,
        "Images sampled for such a measurement.",
        unit="IMAGES",
        low=1,
        high=100_000,
        resume=True,
    )
    log_every: int = setting(
        50, "Steps between two lines of the log.", unit="STEPS", low=1, high=MAX_COUNT, resume=True
    )


def with_extensions(lines, place="settings"):
    """{name: Setting} of a table with the lines that extensions add to it, each at the end of its
    heading."""
    lines = list(lines.values())
    for name in extensions.entries(place):
        try:
            line = settings_in(extensions.find(place, name, flag(name)))[name]
        except UsageError as error:  # the option exists, and says why it cannot be used
            line = Setting(
                name, str, False, True, None, "Run", "Not available here.", missing=str(error)
            )
        after = [i for i, other in enumerate(lines) if other.group == line.group]
        lines.insert(after[-1] + 1 if after else len(lines), line)
    return {line.name: line for line in lines}


TABLES = (
    RunSettings,
    DataSettings,
    ModelSettings,
    DiffusionSettings,
    OptimiserSettings,
    OutputSettings,
)
COMMON = with_extensions(
    {name: line for table in TABLES for name, line in settings_in(table).items()}
)


CONFIGS = {"trainer": TrainerConfig, "adamw": AdamWConfig, "muon": MuonConfig}


# Readers ------------------------------------------------------------------------------------------


def arguments(reader, options, table=COMMON):
    """{argument: value} for a reader from what has the table's settings as attributes, such as
    `TrainOptions`."""
    found = {}
    for name, line in table.items():
        if reader in line.readers:
            argument, _, of = line.argument(reader)
            value = getattr(options, name)
            found[argument] = of(value) if of else value
    return found


def arguments_of(reader, table=COMMON):
    """{argument: Setting} of a reader, in the table's order. Muon takes all that AdamW takes."""
    readers = ("adamw", "muon") if reader == "muon" else (reader,)
    return {
        line.argument(name)[0]: line
        for name in readers
        for line in table.values()
        if name in line.readers
    }


def argument_of(line, reader):
    """`Setting.argument`, of Muon's settings also where they are AdamW's."""
    return line.argument(reader if reader in line.readers else "adamw")


@functools.cache
def config_class(reader):
    """The class of a reader's configuration: that of configs.py, with fields for the settings of
    extensions."""
    kind, known = CONFIGS[reader], dataclasses.fields(CONFIGS[reader])
    more = {
        name: line
        for name, line in arguments_of(reader).items()
        if name not in {field.name for field in known}
    }
    if not more:
        return kind
    fields = [
        (name, hint_of(line, reader), argument_of(line, reader)[1]) for name, line in more.items()
    ]
    namespace = {
        "__doc__": "\n".join(["", *(f"    {name}: {line.help}" for name, line in more.items())]),
        "__reduce__": lambda self: (restored_config, (reader, dict(vars(self)))),
    }
    return dataclasses.make_dataclass(
        kind.__name__, fields, bases=(kind,), namespace=namespace, frozen=True, kw_only=True
    )


def restored_config(reader, values):
    """A configuration from a pickle."""
    return config_class(reader)(**values)


def configure(reader, config, given, who):
    """The checked configuration of a reader: the caller's, with the values that are `given` by name
    in place of its own.

    config: a `TrainerConfig`, an `AdamWConfig` or a `MuonConfig`; None: the defaults
    who: the reader, in a message. Raises a `UsageError` for a setting that it does not have, and for
    a value of the wrong type or out of range.
    """
    kind, lines = config_class(reader), arguments_of(reader)
    values = given_values(CONFIGS[reader], config, given, who, kind)
    for name, value in values.items():
        line = lines[name]
        _, default, of = argument_of(line, reader)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif line.repeated and isinstance(value, str):
            value = (value,)
        value = values[name] = line.meant(value)
        if of is not None:
            if not isinstance(value, bool):
                raise UsageError(f"{name} {say(value)} must be True or False.")
        elif value is not None or default is not None:
            check_value(line, value, *(() if name == line.name else (name, False)))
    return kind(**values)


def shared(reader, other, config, **more):
    """The configuration of another reader with the settings that both read, from the first one's
    configuration, and with `more`."""
    values = {
        argument_of(line, other)[0]: getattr(config, line.argument(reader)[0])
        for line in arguments_of(other).values()
        if reader in line.readers
    }
    return config_class(other)(**{**values, **more})


def hint_of(line, reader):
    """The type of a reader's argument, for type checkers."""
    _, default, of = argument_of(line, reader)
    kind = bool if of else bool | line.kind if line.switch else line.kind
    kind = Sequence[kind] if line.many else kind
    return kind | None if line.open and default is None else kind


# Checks -------------------------------------------------------------------------------------------


def check_value(line, value, shown=None, limits=True):
    """Raise a `UsageError` unless a value is of its setting's type and within its choices and
    range.

    shown: how a message calls it (default: its option on the command line); limits: check it
    against choices and range
    """
    shown = shown or flag(line.name)
    if value is None and line.open:
        return
    if line.missing:
        raise UsageError(line.missing)
    two = line.sides and isinstance(value, tuple)
    if isinstance(value, tuple) != line.many and not two:
        raise UsageError(f"{shown} {say(value)} must be {'a list' if line.many else 'one value'}.")
    for v in value if line.many or two else (value,):
        number = isinstance(v, numbers.Real) and not isinstance(v, bool)
        fits = {
            bool: isinstance(v, bool),
            str: isinstance(v, str),
            int: number and isinstance(v, numbers.Integral),
            float: number and -math.inf < v < math.inf,
        }[line.kind]
        if not fits:
            wanted = {
                bool: "yes or no",
                str: "text",
                int: "a whole number",
                float: "a finite number",
            }[line.kind]
            raise UsageError(f"{shown} {printable(v, 200)} must be {wanted}.")
        if limits and line.choices and v not in line.choices:
            raise UsageError(f"{shown} {say(v)} does not exist; use {' or '.join(line.choices)}.")
        if limits and (
            (line.low is not None and v < line.low)
            or (line.above is not None and v <= line.above)
            or (line.high is not None and v > line.high)
            or (line.below is not None and v >= line.below)
        ):
            raise UsageError(f"{shown} {say(value)} must be {line.range}.")


def counted(count, noun):
    """1 image, 2 images, 10,000 images."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


# The file of typed configurations -----------------------------------------------------------------

CONFIGS_FILE = pathlib.Path(__file__).with_name("configs.py")
CONFIGS_HEAD = '''"""Typed configurations of `Trainer`, `AdamW` and `Muon`, with Python's defaults.

`python -m numdiff.settings` writes this file from the table in settings.py, which has the ranges. A
setting that an extension adds is given by name: `Trainer(model, dataset, config, ema_std=(0.05,))`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
'''
OF_CLASSES = (
    ("trainer", "TrainerConfig", "Settings of a `numdiff.training.Trainer`."),
    ("adamw", "AdamWConfig", "Settings of a `numdiff.nn.AdamW`."),
    ("muon", "MuonConfig", "Settings of a `numdiff.nn.Muon`; all but the momentum are AdamW's."),
)


def configs_text():
    """The text of configs.py."""
    core = {name: line for table in TABLES for name, line in settings_in(table).items()}
    text = CONFIGS_HEAD
    for reader, kind, sentence in OF_CLASSES:
        own = {n: line for n, line in arguments_of(reader, core).items() if reader in line.readers}
        base = "(AdamWConfig)" if reader == "muon" else ""
        text += f"\n\n@dataclass(frozen=True, kw_only=True)\nclass {kind}{base}:\n"
        text += f'    """{sentence}\n\n'
        for name, line in own.items():
            text += textwrap.fill(
                f"{name}: {line.help}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8
            )
            text += "\n"
        text += '    """\n\n'
        for name, line in own.items():
            default = (
                json.dumps(value)
                if isinstance(value := line.argument(reader)[1], str)
                else repr(value)
            )
            text += f"    {name}: {_named(hint_of(line, reader))} = {default}\n"
    return text


def _named(hint):
    return str(getattr(hint, "__name__", hint) if isinstance(hint, type) else hint).replace(
        "collections.abc.", ""
    )


if __name__ == "__main__":
    CONFIGS_FILE.write_text(configs_text(), encoding="utf-8")
