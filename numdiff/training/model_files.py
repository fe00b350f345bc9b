"""Models as files: numdiff's own (checkpoints and converted models), and those of other programs through `nn.convert`.

A model file is a checkpoint with the weights alone: the buffer "parameters" and the meta that describes it.

    {"model": "unet" or "dit", "model_options": {…}, "index": [{"name", "shape", "offset"}, …], "diffusion": {…},
     "step": …}
"""
import inspect
import json
import math
import pathlib
from dataclasses import dataclass

import numpy as np

from .. import schema
from ..diffusion import Diffusion, alpha_bars
from ..diffusion.schedule import SCHEDULES
from ..errors import NumdiffError, UsageError
from ..files import Refused, atomic_file, cannot_write
from ..hdf5 import is_hdf5
from ..nn import DiT, UNet, dit, unet
from ..nn.convert import (
    check_dit_state_dict,
    check_state_dict,
    diffusers_config,
    diffusers_state_dict,
    find_diffusers,
    guess_dit_options,
    guess_unet_options,
    guided_diffusion_flags,
    is_dit,
    public_state_dict,
    read_config,
    read_weights,
    to_numdiff_layout,
    to_torch_layout,
    weights_file,
    with_convolutions,
    with_positions,
    write_state_dict,
)
from ..nn.convert.diffusers import CONFIG, REMEDY, WEIGHTS
from ..nn.model import parameter_shapes
from ..nn.module import ALIGNMENT
from .checkpoint import INDEX, load_checkpoint, newest_checkpoint, save_checkpoint
from .precision import set_precision

EXPORTS = {".npz": "npz", ".safetensors": "safetensors"}
KINDS = {"unet": UNet, "dit": DiT}
MAX_STEPS = 100_000  # of a diffusion
CHECKS = {"unet": unet.check_options, "dit": dit.check_options}
MAX_IMAGE_SIZE = 4096  # as of a training run
MAX_POSITION_BYTES = 32 << 20  # of a DiT's positions, or as many as its weights: they are not in the file
COUNT, WIDTH = schema.integer(1, 1 << 16), schema.integer(1, 1 << 16)
HEADS_OR_NONE = schema.either(schema.integer(-1, -1), COUNT)
CLASSES_OR_NONE = schema.optional(schema.integer(1, 1 << 24))
SHARE = schema.number(0, 1)
OPTIONS = {  # what the options of models may be; those that are not named here are of the kind of their default
    "image_size": schema.integer(1, MAX_IMAGE_SIZE), "in_channels": WIDTH, "out_channels": schema.optional(WIDTH),
    "model_channels": WIDTH, "channel_mult": schema.items(schema.number(0, 1000), 16, 1), "num_res_blocks": COUNT,
    "attention_resolutions": schema.items(schema.integer(0, MAX_IMAGE_SIZE), 64), "num_heads": COUNT,
    "num_head_channels": HEADS_OR_NONE, "num_heads_upsample": HEADS_OR_NONE, "num_classes": CLASSES_OR_NONE,
    "dropout": SHARE, "class_dropout": SHARE, "max_period": schema.number(1e-3, 1e12), "groups": COUNT,
    "patch_size": COUNT, "hidden_size": WIDTH, "depth": COUNT, "mlp_ratio": schema.number(0, 1000)}
DIFFUSION = {"steps": schema.integer(1, MAX_STEPS), "schedule": schema.text(40), "prediction": schema.text(40),
             "timestep_scale": schema.number(1e-6, 1e6), "vlb_weight": schema.optional(schema.number(0, 1e6))}
FREE_OPTIONS = {  # of a UNet: what the shapes of weights do not tell -> what such a value may be
    "image_size": lambda v: type(v) is int and 0 < v <= MAX_IMAGE_SIZE,
    "num_heads": lambda v: type(v) is int and 0 < v <= 1 << 16,
    "num_heads_upsample": lambda v: type(v) is int and (v == -1 or 0 < v <= 1 << 16),
    "num_head_channels": lambda v: type(v) is int and (v == -1 or 0 < v <= 1 << 16),
    "use_new_attention_order": lambda v: type(v) is bool,
    "max_period": lambda v: type(v) in (int, float) and 0 < v < math.inf,
    "dropout": lambda v: type(v) in (int, float) and 0 <= v < 1,
    "num_classes": lambda v: type(v) is int and 0 < v <= 1 << 24,
    "class_dropout": lambda v: type(v) in (int, float) and 0 <= v < 1,
}
FREE_DIT_OPTIONS = {
    "image_size": FREE_OPTIONS["image_size"],
    "num_heads": FREE_OPTIONS["num_heads"],
    "num_classes": FREE_OPTIONS["num_classes"],
    "class_dropout": FREE_OPTIONS["dropout"],
}


def load(path, device="auto", weights="ema", precision="auto"):
    """The model in a checkpoint, a run folder (its newest checkpoint) or a file of `numdiff convert`.

    device: "auto", "cpu" or "cuda"; weights: "ema" for the averaged weights where the file has them, or "raw"
    precision: "fp32", "tf32", "fp16" (a GPU's), or "auto": fp16 on GPUs from sm_80 on, else fp32
    `model.options`, `model.diffusion` and `model.meta` tell what it is and how it was trained.
    """
    options, arrays, meta = read_model_file(path, weights)
    model = KINDS[meta["model"]](**options, device=device, seed=None)
    model.load_arrays(arrays)
    model.diffusion = dict(meta.get("diffusion") or {})
    model.meta = meta
    model.precision = set_precision(model, precision)
    return model


def read_model_file(path, weights="ema"):
    """(model options, {name: array in numdiff's layout}, meta) of a checkpoint, run folder or model file."""
    path = pathlib.Path(path)
    if weights not in ("ema", "raw"):
        raise UsageError(f"unknown weights {weights!r}: use ema or raw.")
    if path.is_dir():
        newest = newest_checkpoint(path)
        if newest is None:
            raise NumdiffError(f"the folder {path} holds no checkpoint; give a run folder of `numdiff train` or a "
                               "model file.")
        path = newest
    elif path.is_file() and not _is_hdf5(path):
        raise NumdiffError(f"{path} is not a numdiff file; if it holds weights of another program, make it one with "
                           "`numdiff convert`.")
    buffers, meta = load_checkpoint(path)
    check_model_meta(path, meta)
    name = "ema" if weights == "ema" and "ema" in buffers else "parameters"
    flat, arrays = buffers.get(name), {}
    end = max((entry["offset"] + math.prod(entry["shape"]) for entry in meta["index"]), default=0)
    if flat is None or flat.ndim != 1 or flat.dtype != np.float32 or not 0 < end <= flat.size:
        raise _no_model(path, f"its buffer {name!r} is not that of its index")
    for entry in meta["index"]:
        start, count = entry["offset"], math.prod(entry["shape"])
        arrays[entry["name"]] = flat[start:start + count].reshape(entry["shape"])
    if meta.get("diffusion"):
        meta["diffusion"] = Diffusion(**meta["diffusion"]).options
    return {**defaults_of(KINDS[meta["model"]]), **meta["model_options"]}, arrays, meta


def check_model_meta(path, meta):
    """Raise a `NumdiffError` unless the meta of a checkpoint describes a model that can be built from its weights.

    No more memory is taken then than the weights have: the options' own parameters are those of the index.
    """
    try:
        schema.check(meta, schema.record({"model": schema.text(), "model_options": schema.options, "index": INDEX},
                                         {}, schema.anything), "meta")
        kind, options, index = KINDS.get(meta["model"]), meta["model_options"], meta["index"]
        if kind is None:
            raise NumdiffError(f"{path} holds a model of the kind {meta['model']!r}, which this numdiff does not know.")
        for given, known in ((options, defaults_of(kind)), (meta.get("diffusion") or {}, defaults_of(Diffusion))):
            unknown = sorted(given.keys() - known.keys())
            if unknown:
                raise NumdiffError(f"{path} has options that this numdiff does not know "
                                   f"({', '.join(unknown)[:200]}); install a newer numdiff.")
        schema.check(options, schema.of_defaults(defaults_of(kind), OPTIONS), "model_options")
        schema.check(meta.get("diffusion") or {}, schema.of_defaults(defaults_of(Diffusion), DIFFUSION), "diffusion")
        options = {**defaults_of(kind), **options}
        blocks = options["depth"] if kind is DiT else options["num_res_blocks"] * len(options["channel_mult"])
        shapes = {entry["name"]: tuple(entry["shape"]) for entry in index}
        if len(shapes) < len(index) or blocks > len(index):
            raise schema.Mismatch("its index does not fit its options")
        CHECKS[meta["model"]](options)
        Diffusion(**meta.get("diffusion") or {})
        if parameter_shapes(kind, options) != shapes:
            raise NumdiffError(f"{path}: these weights are of another model than its options describe; use another "
                               "checkpoint.")
        if kind is DiT:
            tokens = (options["image_size"] // options["patch_size"]) ** 2
            weights = 4 * sum(map(math.prod, shapes.values()))
            if 4 * tokens * options["hidden_size"] > max(MAX_POSITION_BYTES, weights):
                raise schema.Mismatch(f"model_options.image_size is {options['image_size']}, {tokens:,} patches,"
                                      " too many for such a model")
    except (Refused, UsageError) as error:
        raise _no_model(path, error) from error


def _no_model(path, reason):
    return NumdiffError(f"{path} is a numdiff file but holds no whole model ({str(reason).rstrip('.')}); use another "
                        "checkpoint.")


def write_model_file(path, model_options, arrays, diffusion=None, step=0, model="unet", **more):
    """Write a model file atomically.

    model: its kind, "unet" or "dit"
    arrays: {name: array in numdiff's layout}, in module order
    diffusion: options of its `Diffusion` (None: the defaults); more: further entries of the meta
    """
    index, total = [], 0
    for name, array in arrays.items():
        index.append({"name": name, "shape": list(array.shape), "offset": total})
        total += -(-array.size // ALIGNMENT) * ALIGNMENT
    flat = np.zeros(total, np.float32)
    for entry, array in zip(index, arrays.values(), strict=True):
        flat[entry["offset"]:entry["offset"] + array.size] = array.reshape(-1)
    save_checkpoint(path, {"parameters": flat}, {
        "format": "numdiff-checkpoint", "version": 1, "model": model, "model_options": model_options, "index": index,
        "diffusion": diffusion or Diffusion().options, "step": step, **more})


@dataclass
class Conversion:
    """What `convert` did: the kind and options of the model, its number of parameters, the step it comes from, the
    options of its diffusion, and [(heading, text), …] of what whoever uses OUT elsewhere must know."""

    kind: str
    options: dict
    parameters: int
    step: int
    diffusion: dict
    notes: list


def convert(source, target, weights="ema", diffusion=None, conv_resample=False, **free):
    """Make a numdiff model file of another program's weights, or the reverse.

    source: what `load_state_dict` reads, a folder of diffusers' DiT, or a numdiff checkpoint or run folder
    target: .h5 for a numdiff model file; .npz or .safetensors for PyTorch's layout and the names of guided-diffusion or
        the public DiT; a name without a suffix for a DiT in diffusers' folder layout
    weights: "ema" or "raw", of a source that has both
    diffusion: steps, schedule, prediction that it was trained with, and rescale_timesteps, whether the model sees t as
        t · 1000 / steps (True or False; must be told of a UNet with other than 1000 steps)
    conv_resample: write the pooling and repetition of a UNet as the convolutions that do the same
    free: options that weights do not tell (the keys of `FREE_OPTIONS`, or for a DiT `FREE_DIT_OPTIONS`). None leaves
        one to the source, or to the public code's default. For a UNet image_size and one of num_heads,
        num_head_channels must be known in the end; for a DiT image_size where the source has no positions, and
        num_heads where its size is not a published one.
    Returns a `Conversion`.
    """
    suffix = pathlib.Path(target).suffix
    if suffix not in ("", ".h5", *EXPORTS):
        raise UsageError(f"OUT is {str(target)!r}, and must end in .h5 (numdiff), .npz or .safetensors, or have no "
                         "ending (a folder in diffusers' layout).")
    free = {k: v for k, v in free.items() if v is not None}
    diffusion = {k: v for k, v in (diffusion or {}).items() if v is not None}
    folder = find_diffusers(source)
    if folder is None and pathlib.Path(source).is_dir() or _is_hdf5(source):
        if free or diffusion:
            given = ", ".join(flag(k) for k in [*free, *diffusion])
            raise UsageError(f"{source} tells its own options: leave out {given}.")
        options, arrays, meta = read_model_file(source, weights)
        kind, step = meta["model"], meta.get("step", 0)
        diffusion = {**Diffusion().options, **(meta.get("diffusion") or {})}
        kept = {"classes": meta["classes"]} if meta.get("classes") else {}
    else:
        state_dict, told = read_weights(source, weights) if folder is None else read_diffusers_folder(folder, weights)
        kind = "dit" if is_dit(state_dict) else "unet"
        complete, hold = {"unet": (complete_options, check_state_dict),
                          "dit": (complete_dit_options, check_dit_state_dict)}[kind]
        options = complete(source, state_dict, told, free)
        try:
            state_dict = hold(state_dict, options)
        except NumdiffError as error:
            raise NumdiffError(f"cannot use {source}: {error}.") from None
        arrays, step, kept = to_numdiff_layout(state_dict), 0, {}
        diffusion = complete_diffusion(source, kind, told, diffusion)
    broken = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if broken:
        raise NumdiffError(f"{source} holds values that are not finite, first in {broken[0]}; use another checkpoint.")
    if conv_resample:
        if kind != "unet":
            raise UsageError("--conv-resample means nothing for a DiT: leave it out.")
        state_dict, options = with_convolutions(to_torch_layout(arrays), options)
        arrays = to_numdiff_layout(state_dict)
    notes = []
    if suffix == ".h5":
        write_model_file(target, options, arrays, diffusion, step, kind, source=pathlib.Path(source).name, **kept)
    elif suffix == "":
        write_diffusers_folder(target, kind, options, to_torch_layout(arrays), diffusion)
        notes = notes_on_diffusers(diffusion)
    else:
        state_dict = to_torch_layout(arrays)
        with atomic_file(target, "the weights") as file:
            write_state_dict(file, with_positions(state_dict, options) if kind == "dit" else state_dict,
                             EXPORTS[suffix], options, diffusion)
        notes = notes_on_export(kind, options, diffusion)
    count = dit.dit_parameter_counts(options)[0] if kind == "dit" else sum(a.size for a in arrays.values())
    return Conversion(kind, options, count, step, diffusion, notes)


def notes_on_export(kind, options, diffusion):
    """What the public code, which reads the state dict, must be told: as `Conversion.notes`."""
    if kind == "dit":
        public = diffusion == Diffusion().options
        return [] if public else [("elsewhere", "the public DiT's create_diffusion has another diffusion by default")]
    flags, missing = guided_diffusion_flags(options, diffusion)
    return [("guided-diffusion", f"its scripts need: {flags}"),
            *(("no flag there", text) for text in missing)]


def complete_diffusion(source, kind, told, given):
    """The options of the `Diffusion` of a foreign model: what the user says, the file, the defaults.

    told: as `read_weights` tells it: "diffusion", or "betas" or "alphas_cumprod", float arrays (T,)
    given: some of steps, schedule, prediction, rescale_timesteps (bool)
    Raises a `UsageError` where it must be known whether timesteps are rescaled, and is not.
    """
    given = dict(given)
    rescaled = given.pop("rescale_timesteps", None)
    try:
        schema.check(told.get("diffusion", {}), schema.of_defaults(defaults_of(Diffusion), DIFFUSION), "it")
    except schema.Mismatch as error:
        raise NumdiffError(f"the diffusion of {source} cannot be used ({error}): save the file again.") from None
    try:
        schema.check(told.get("diffusion", {}), schema.of_defaults(defaults_of(Diffusion), DIFFUSION), "its diffusion")
    except schema.Mismatch as error:
        raise NumdiffError(f"cannot use {source}: {error}; export it again.") from None
    found = {**told.get("diffusion", {}), **schedule_of_tables(source, told, given)}
    known = {**Diffusion().options, **found, **given}
    if rescaled is None and kind == "unet" and "diffusion" not in told and known["steps"] != 1000:
        raise UsageError(f"{source} does not say whether its model sees its {known['steps']} timesteps as they are: "
                         "give --rescale-timesteps where it was trained with rescale_timesteps=True, the default of "
                         "improved-diffusion, else --no-rescale-timesteps.")
    if rescaled is not None:
        known["timestep_scale"] = 1000 / known["steps"] if rescaled else 1.0
    try:
        if type(known["steps"]) is not int or known["steps"] > MAX_STEPS:
            raise UsageError(f"the diffusion has at most {MAX_STEPS:,} steps")
        return Diffusion(**known).options
    except (UsageError, TypeError, ValueError) as error:
        raise UsageError(f"the diffusion of {source} cannot be used ({error}): give other options.") from None


def schedule_of_tables(source, told, given):
    """{"steps", "schedule"} of the tables in a file, {} without; a `NumdiffError` where it is none of ours."""
    name = next((name for name in ("alphas_cumprod", "betas") if name in told), None)
    if name is None:
        return {}
    table = np.asarray(told[name], np.float64)
    if table.ndim != 1 or not 1 <= len(table) <= MAX_STEPS:
        raise NumdiffError(f"cannot use {source}: its table {name} has the shape {table.shape}.")
    bars = table if name == "alphas_cumprod" else np.cumprod(1 - table)
    fits = [name for name in SCHEDULES if np.allclose(alpha_bars(name, len(bars)), bars, rtol=1e-3, atol=1e-5)]
    if not fits:
        raise NumdiffError(f"cannot use {source}: its betas are neither those of {' nor those of '.join(SCHEDULES)}, "
                           "the schedules that numdiff has.")
    found = {"steps": len(bars), "schedule": fits[0]}
    for key, value in found.items():
        if given.get(key, value) != value:
            raise UsageError(f"{flag(key)} {given[key]}: the betas of {source} say {value}; leave it out.")
    return found


def read_diffusers_folder(folder, weights="ema"):
    """(state dict under the public DiT's names, what the folder tells), as `read_weights`; a `NumdiffError` for a
    setting in config.json that no public DiT has."""
    config = read_config(folder)
    path = weights_file(folder)
    state_dict, told = read_weights(path, weights)
    try:
        state_dict = public_state_dict(state_dict, config)
        guessed = guess_dit_options(state_dict)
        guessed["num_classes"] = guessed["rows"] - 1  # the library's models have a null class all
        for key, value in config.items():
            if guessed.get(key, value) != value and key != "num_heads":
                raise NumdiffError(f"{CONFIG} says {key} {value}, and the weights have {guessed[key]}")
    except NumdiffError as error:
        raise NumdiffError(f"cannot use {path}: {error}.") from None
    return state_dict, {"class_dropout": defaults_of(DiT)["class_dropout"], **told, **config}


def notes_on_diffusers(diffusion):
    """What whoever loads the folder in diffusers must do, to have the model that was trained: `Conversion.notes`."""
    scale = diffusion.get("timestep_scale", 1.0)
    return [("diffusers", "gives other outputs, by percents at late timesteps (its timestep embedding has other "
                          "frequencies, whatever config.json says), until this is run on the model it has loaded:"),
            ("", REMEDY if scale == 1 else f"{REMEDY}; block.norm1.emb.time_proj.scale = {scale:g}")]


def write_diffusers_folder(folder, kind, options, state_dict, diffusion):
    """Write config.json and the weights; a `UsageError` for a model that diffusers' DiT cannot be."""
    if kind != "dit":
        raise UsageError(f"OUT is {str(folder)!r}, a folder in diffusers' layout, which is for a DiT, and this is a "
                         "UNet: let it end in .safetensors or .npz.")
    config = json.dumps(diffusers_config(options), indent=2, sort_keys=True) + "\n"
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write("the weights into", folder, error) from error
    with atomic_file(folder / WEIGHTS, "the weights") as file:
        write_state_dict(file, diffusers_state_dict(state_dict, options["depth"]), "safetensors", options, diffusion)
    with atomic_file(folder / CONFIG, "the configuration") as file:
        file.write(config.encode())


def complete_options(source, state_dict, told, free):
    """All options of the UNet: what shapes say, and for the rest the user (`free`), the file (`told`), the defaults."""
    told = believed(told, free, FREE_OPTIONS, "UNet")
    if "num_heads" in free and "num_head_channels" in free and free["num_head_channels"] != -1:
        raise UsageError("--num-heads and --num-head-channels exclude each other: give the one that the model was "
                         "trained with.")
    if "num_heads" in free:
        told["num_head_channels"] = -1
    known = {**told, **free}
    if "image_size" not in known:
        raise UsageError(f"{source} does not say for which image size it was trained: give --image-size, for example "
                         "--image-size 64.")
    if known.get("num_head_channels", -1) == -1 and "num_heads" not in known:
        raise UsageError(f"{source} does not say how many attention heads the model has: give --num-head-channels (64 "
                         "for the models of guided-diffusion, 32 for unet.cu's) or --num-heads (4 for those of "
                         "improved-diffusion).")
    try:
        guessed = guess_unet_options(state_dict, known["image_size"])
    except NumdiffError as error:
        raise NumdiffError(f"cannot use {source}: {error}.") from None
    known.update(known_classes(source, guessed["num_classes"], known.get("class_dropout", 0.0),
                               free.get("num_classes")))
    options = {**defaults_of(UNet), "num_head_channels": -1, **guessed, **known}
    unet.check_options(options)
    return options


def complete_dit_options(source, state_dict, told, free):
    """All options of the DiT, likewise."""
    told = believed(told, free, FREE_DIT_OPTIONS, "DiT")
    try:
        guessed = guess_dit_options(state_dict)
    except NumdiffError as error:
        raise NumdiffError(f"cannot use {source}: {error}.") from None
    rows = guessed.pop("rows")
    heads = {key: told[key] for key in ("num_heads",) if key in told}  # those of a published size are only likely
    known = {**told, **guessed, **heads, **free}
    if "image_size" not in known:
        raise UsageError(f"{source} does not say for which image size it was trained, as it has no pos_embed: give "
                         "--image-size, for latents their side, for example --image-size 32.")
    if "num_heads" not in known:
        raise UsageError(f"{source} does not say how many attention heads the model has, and its size is no published "
                         "one: give --num-heads.")
    dropout = known.get("class_dropout", defaults_of(DiT)["class_dropout"])
    options = {**defaults_of(DiT), **known, **known_classes(source, rows, dropout, free.get("num_classes"))}
    dit.check_options(options)
    return options


def known_classes(source, rows, dropout, given):
    """{"num_classes", "class_dropout"} of a model whose class table has `rows` rows (None: it has no classes), the last
    for no class where there is dropout; given: the number of classes that the user tells, or None."""
    if rows is None:
        if given is not None:
            raise UsageError(f"--num-classes {given}: {source} has no classes; leave it out.")
        return {"num_classes": None}
    if given in (rows, rows - 1):  # the user knows whether there is a null class
        dropout = 0.0 if given == rows else dropout or defaults_of(DiT)["class_dropout"]
    classes = rows - (dropout > 0)
    if given not in (None, classes) or classes < 1:
        raise UsageError(f"--num-classes {classes if given is None else given}: the class table of {source} has {rows} "
                         f"rows, so the model has {rows - 1} classes and a null class, or {rows} and none: give one of "
                         "these numbers.")
    return {"num_classes": classes, "class_dropout": dropout}


def believed(told, free, allowed, what):
    """The options in `told` (words of a file) that may be true; refuses `free` ones that the model does not have."""
    for key, value in free.items():
        if key not in allowed:
            raise UsageError(f"{flag(key)} means nothing for a {what}: leave it out.")
        if not allowed[key](value):
            raise UsageError(f"{flag(key)} {value} is out of range.")
    return {k: v for k, v in told.items() if k in allowed and allowed[k](v)}


def defaults_of(model):
    """{option: default} of the constructor of a model or `Diffusion`, without where it computes and its seed."""
    return {name: list(p.default) if isinstance(p.default, tuple) else p.default
            for name, p in inspect.signature(model).parameters.items() if name not in ("device", "seed", "backend")}


def flag(option):
    """The command-line option that sets `option`."""
    names = {"use_new_attention_order": "attention_order", "steps": "diffusion_steps"}
    return "--" + names.get(option, option).replace("_", "-")


def _is_hdf5(path):
    try:
        return is_hdf5(path)
    except OSError:  # said better by whoever reads it next
        return False
