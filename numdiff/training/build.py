"""From the options of a run to the objects that it trains with."""

import math
import os

import numpy as np

from ..data.dataset import folders, open_dataset
from ..device import get_gpu
from ..diffusion import Diffusion
from ..distributed.communicator import current
from ..errors import UsageError
from ..nn.flops import step_flops
from ..nn.model import parameter_shapes
from ..nn.module import frozen_by
from ..progress import doing
from ..settings import arguments, config_class
from ..sizes import sides
from . import kinds
from .forecast import ForecastPlan
from .initial import check_dataset, start_of, take
from .precision import IN_TRAINING, SCALES_LOSS
from .run_extension import extensions_of
from .trainer import Trainer, optimizer_of

MAX_PARAMETERS = 2**31 - 1  # numbers of a flat buffer, which kernels count in int32


def open_data(communicator, options):
    """`build_dataset` on all ranks; the pictures of a folder are decoded by the first one, and the
    others wait."""
    with doing("opening the data"):
        communicator.first(decode_folder, options)
        return communicator.build(build_dataset, options)


def decode_folder(options):
    if options.data is not None and os.path.isdir(options.data):
        folders(options.data).decoded(options.data, options.image_size)


def build_dataset(options):
    """The dataset that the options name; a `UsageError` if its images do not suit the model."""
    dataset = open_dataset(options.data, options.image_size, options.classes)
    if options.class_cond and dataset.labels is None:
        asked = options.init is None and not kinds.get(options.model).presets.get(
            options.preset, {}
        ).get("class_cond")
        remedy = "leave --class-cond out" if asked else "give --no-class-cond"
        if options.data is not None and os.path.isdir(options.data):
            raise UsageError(
                f"--class-cond needs labels, and the folder {options.data!r} has no sub-folders: make one "
                f"for each class and move its pictures there, or {remedy}."
            )
        raise UsageError(
            f"--class-cond needs labels, and {dataset.path!r} has none: import it again with labels, or "
            f"{remedy}."
        )
    if options.class_cond is False:
        dataset.labels = None
    if options.channels not in (None, dataset.channels):
        raise UsageError(
            f"--channels {options.channels}: the images of {dataset.path!r} have {dataset.channels}; "
            "leave it out, or give other --data."
        )
    if (
        options.class_cond
        and options.num_classes is not None
        and options.num_classes < len(dataset.classes)
    ):
        raise UsageError(
            f"--num-classes {options.num_classes}: {dataset.path!r} has {len(dataset.classes)} classes; "
            "give that number or more, or --classes with the names of those to train on."
        )
    if dataset.dtype != np.uint8 and options.flip:
        raise UsageError(
            f"--flip mirrors pixels, and the images of {dataset.path!r} are {dataset.dtype}, as latents "
            "are, which do not mirror: give --no-flip."
        )
    return kinds.get(options.model).held_out(dataset, options)


def model_options(options, channels=3, num_classes=None):
    """The constructor's options of the model that a run's options describe, without device and
    seed.

    num_classes: of the dataset; the run's own number, if it has one, takes precedence.
    """
    return kinds.get(options.model).sizes(options, channels, num_classes)


def count_parameters(model, sizes):
    """(all parameters, those that are trained) of a model with these constructor's options, which
    is not built; a `UsageError` for more than the kernels can count."""
    counts = kinds.get(model).count_parameters(sizes)
    if counts[0] > MAX_PARAMETERS:
        raise UsageError(
            f"the model would have {counts[0]:,} parameters, and numdiff trains up to {MAX_PARAMETERS:,}: "
            "give it fewer channels or blocks."
        )
    return counts


def shapes_of(model, sizes):
    """{name: shape} of the parameters of a model with these constructor's options, which is not
    built."""
    return parameter_shapes(kinds.get(model).model_class, sizes)


def check_memory(options, sizes):
    """A `UsageError` for a run on the CPU that exceeds this machine's memory. Only certain bytes
    are counted: weights, gradients, moments and average, the batch, and in each layer some of the
    activations that the backward pass needs."""
    if options.device not in ("cpu", "emulator"):  # a GPU, or a stand-in for one, says so itself
        return
    microbatch, pixels = options.microbatch or options.batch, math.prod(sides(sizes["image_size"]))
    kept = kinds.get(options.model).activations(sizes)
    if options.recompute != "no":
        kept //= 8
    ranks = current()
    # of moments and averages, here
    share = ranks.local_size / ranks.size if options.shard_update != "no" else 1
    kept_by_others = 4 * sum(each.floats for each in extensions_of(options))
    weights = (8 + (8 + kept_by_others) * share) * count_parameters(options.model, sizes)[0]
    images = options.batch * pixels * sizes["in_channels"] + 4 * microbatch * kept
    if weights + images > machine_bytes():
        what = "--batch or --microbatch" if images > weights else "model"
        raise UsageError(
            f"{'--batch' if images > weights else '--model'}: this run needs at least "
            f"{(weights + images) / 2**30:,.1f} GiB of memory, and this machine has "
            f"{machine_bytes() / 2**30:,.1f}: give a smaller {what}."
        )


def machine_bytes():
    """Bytes of memory that this machine has; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def build_model(options, channels=3, num_classes=None):
    """The model that the options describe."""
    sizes = model_options(options, channels, num_classes)
    check_memory(options, sizes)
    return kinds.get(options.model).model_class(**sizes, device=options.device, seed=options.seed)


def build_trainer(options, model, dataset, **more):
    """A Trainer for the model and the dataset; more: its other arguments."""
    chosen = arguments("trainer", options)
    if options.ema_decay is not None:
        del chosen["ema_halflife"]
    config = config_class("trainer")(**chosen)
    if (objective := kinds.get(options.model).objective(options)) is not None:
        return Trainer(model, dataset, config, objective=objective, **more)
    return Trainer(model, dataset, config, diffusion=diffusion_options(options), **more)


def diffusion_options(options):
    """The options of the run's `Diffusion`."""
    chosen = arguments("diffusion", options)
    whole = 1 if options.path != "discrete" else chosen["steps"]  # where t is noise alone
    return {**chosen, "timestep_scale": 1000 / whole if chosen["timestep_scale"] else 1.0}


def describe_objective(options):
    """The line on what a run minimises."""
    if own := kinds.get(options.model).describe_objective(options):
        return own
    return f"diffusion {describe_diffusion(diffusion_options(options), options.learn_sigma)}"


def describe_diffusion(diffusion, learn_sigma=False):
    """The options of a `Diffusion` in words; learn_sigma: whether its model learns the variance,
    too."""
    scale = diffusion.get("timestep_scale", 1.0)
    seen = "" if scale == 1 else f", the model sees timesteps times {scale:g}"
    weight = diffusion.get("vlb_weight")
    bound = "" if weight is None else f", variational bound times {weight:g}"
    diffusion = Diffusion(**diffusion).options
    path = diffusion.get("path", "discrete")
    how = (
        f"{diffusion['steps']} steps, {diffusion['schedule']} schedule"
        if path == "discrete"
        else f"{path} path"
    )
    if "noise_mean" in diffusion:
        how += f", log sigma drawn from N({diffusion['noise_mean']:g}, {diffusion['noise_std']:g}²)"
    elif path == "linear":
        how += ", t drawn uniform"
    if diffusion.get("time_shift", 1) != 1:
        how += f", shifted by {diffusion['time_shift']:g}"
    if path == "edm":
        how += f", sigma_data {diffusion['sigma_data']:g}"
    loss = f", loss on {diffusion['loss']}" if "loss" in diffusion else ""
    if "min_snr_gamma" in diffusion:
        loss = f", min-SNR weights with gamma {diffusion['min_snr_gamma']:g}"
    variance = " and the variance" if learn_sigma else ""
    return f"{how}, predicts {diffusion['prediction']}{variance}{loss}{seen}{bound}"


def describe_model(options, sizes):
    """One line about the model with these constructor's options, which need not have been built."""
    count_parameters(options.model, sizes)
    return kinds.get(options.model).describe(options, sizes)


def describe_preset(options):
    """One line about what of its preset's objective and optimizer a run does without; empty if it
    has them."""
    values = kinds.get(options.model).presets.get(options.preset, {})
    own = {
        "path": options.path,
        "loss": options.loss or options.prediction,
        "time_sampling": options.time_sampling,
        "optimizer": options.optimizer,
    }
    left = [
        f"{name.replace('_', ' ')} {values[name]}"
        for name in own
        if own[name] != values.get(name, own[name])
    ]
    why = ""
    if options.learn_sigma and own["path"] != values.get("path", own["path"]):
        why = ", as whole timesteps are what a learned variance needs (--no-learn-sigma keeps the path)"
    return f"{options.preset}, but without its {', '.join(left)}{why}" if left else ""


def describe_frozen(patterns, shapes):
    """One line about how many parameters are trained; patterns: of --freeze; shapes: {name: shape}
    of the model's."""
    frozen = frozen_by(patterns, shapes)
    total = sum(map(math.prod, shapes.values()))
    trained = total - sum(math.prod(shapes[name]) for name in frozen)
    return (
        f"{trained:,} of {total:,} parameters are trained; {len(frozen)} of {len(shapes)} tensors are frozen by "
        f"{', '.join(patterns)}"
    )


def describe_average(options, parameters):
    """One line about the averaged weights, and what extensions keep; parameters: their number."""
    return describe_decay(options) + "".join(
        each.describe(parameters) for each in extensions_of(options)
    )


def describe_decay(options):
    """The averaged weights in words."""
    decay = options.ema_decay
    if decay is None:
        decay = 0.5 ** (options.batch / options.ema_halflife) if options.ema_halflife else 0.0
    if not decay:
        return "none"
    start = ", in step n at most (1 + n) / (10 + n)" if options.ema_warmup else ""
    return (
        f"decay {decay:.6g} a step, half forgotten after {options.ema_halflife:,.6g} images{start}"
    )


def describe_precision(options):
    """One line about a run's arithmetic."""
    text = f"{options.precision}: {IN_TRAINING[options.precision]}"
    if options.precision == "fp8" and not options.fp8_promotion:
        text += "; sums left to the tensor cores"
    if options.precision in SCALES_LOSS:
        grows = (
            f"doubled after {options.loss_scale_interval:,} clean steps"
            if options.loss_scale_rule == "doubling"
            else "grown by 2^0.001 a step"
        )
        text += f"; loss scale {options.loss_scale:,.0f} at first, {grows}"
    if options.recompute == "no":
        return text
    return f"{text}; {options.recompute} recomputed"


def recomputed_flops(options, sizes):
    """(FLOPs that a step of the whole batch computes once more, FLOPs of a step that recomputes
    nothing)."""
    model, shapes = kinds.get(options.model).laid_out(sizes), shapes_of(options.model, sizes)
    plain = step_flops(
        kinds.get(options.model).products(sizes), shapes, frozen_by(options.freeze, shapes)
    )
    more = model.recomputed_flops(options.recompute, options.precision == "fp8")
    return options.batch * more, options.batch * plain


def describe_recomputation(options, sizes, peaks=None):
    """One line about what `--recompute` costs and saves; peaks: a step's with and without it, in
    MiB."""
    more, plain = recomputed_flops(options, sizes)
    text = f"{options.recompute}: {more / 1e12:.3g} TFLOP more in each step, {100 * more / plain:.0f} %"
    return text + (
        f"; foreseen are {peaks[0]:,.0f} MiB instead of {peaks[1]:,.0f}" if peaks else ""
    )


def in_parts(batch, microbatch):
    """ " in N parts" where a batch has several, one after the other."""
    return f" in {batch // microbatch} parts" if microbatch and microbatch < batch else ""


def describe_without_training(options, price=None, rehearse=None):
    """The lines of a dry run. Where the options give channels and classes no dataset is opened.

    price: the module, for the memory; rehearse: of rehearsal.py, for the time where no run before
    has measured it. Without it, or without a dataset, no model is built.
    """
    channels, classes, names = options.channels, options.num_classes, ()
    start = None if options.init is None else start_of(options)
    opened = channels is None or (options.class_cond and classes is None) or start is not None
    if opened:
        with build_dataset(options) as dataset:
            if start is not None:
                check_dataset(start, dataset)
            count, height, width, channels = dataset.shape
            names = dataset.classes
            classes = len(names) if options.class_cond else None
            yield f"data      {dataset.path}: {count:,} images of {height}×{width}×{channels}"
    else:
        reason = "--channels and --num-classes say" if options.class_cond else "--channels says"
        yield f"data      not opened, as {reason} what the model takes from it"
    sizes = model_options(options, channels, classes)
    yield f"model     {describe_model(options, sizes)}"
    if start is not None:
        run = Diffusion(**diffusion_options(options)).options
        for line in take(start, shapes_of(options.model, sizes), sizes, names, run).lines:
            yield f"init      {line}"
    shapes = shapes_of(options.model, sizes)
    if options.freeze:
        yield f"frozen    {describe_frozen(options.freeze, shapes)}"
    if left := describe_preset(options):
        yield f"preset    {left}"
    products = kinds.get(options.model).products(sizes)
    flops = options.batch * step_flops(products, shapes, frozen_by(options.freeze, shapes))
    yield describe_objective(options)
    yield (
        f"step      batch {options.batch}{in_parts(options.batch, options.microbatch)}, "
        f"{flops / 1e12:.3g} TFLOP, {options.precision}; {options.steps:,} steps at learning rate "
        f"{options.learning_rate:g}"
    )
    if found := optimizer_of(options.optimizer):
        yield f"optimizer {found.describe(options, kinds.get(options.model).laid_out(sizes))}"
    parameters = count_parameters(options.model, sizes)[0]
    yield f"average   {describe_average(options, parameters)}"
    yield f"precision {describe_precision(options)}"
    if options.recompute != "no":
        peaks = (
            price.with_and_without(options, sizes, get_gpu())
            if price and options.device == "cuda"
            else None
        )
        yield f"recompute {describe_recomputation(options, sizes, peaks)}"
    gpu = get_gpu() if options.device == "cuda" else None
    base = price.base_memory() if price else 0

    def foresee():
        return price.foreseen_step(options, sizes, gpu, base) if price else (None, 0)

    plan = ForecastPlan(options, sizes, flops, parameters, gpu, foresee)
    line, measured = plan.forecast()
    if rehearse and opened and not measured:
        line = rehearse(options, plan) or line
    yield f"forecast  {line}"
