"""Models as files: numdiff's own (checkpoints and converted models), and those of other programs through `nn.convert`.

A model file is a checkpoint with the weights alone: the buffer "parameters" and the meta that describes it.

    {"model": "unet", "model_options": {…}, "index": [{"name", "shape", "offset"}, …], "diffusion": {…}, "step": …}
"""
import inspect
import math
import pathlib
from dataclasses import dataclass

import numpy as np

from ..diffusion import Diffusion
from ..errors import NumdiffError, UsageError
from ..nn import UNet
from ..nn.convert import (
    check_state_dict,
    guess_unet_options,
    read_weights,
    to_numdiff_layout,
    to_torch_layout,
    write_state_dict,
)
from ..nn.module import ALIGNMENT
from ..nn.unet import check_options
from .checkpoint import HDF5_MAGIC, load_checkpoint, newest_checkpoint, save_checkpoint
from .files import atomic_file

EXPORTS = {".npz": "npz", ".safetensors": "safetensors"}
FREE_OPTIONS = {  # what the shapes of weights do not tell -> what such a value may be
    "image_size": lambda v: type(v) is int and 0 < v <= 1 << 16,
    "num_heads": lambda v: type(v) is int and 0 < v <= 1 << 16,
    "num_heads_upsample": lambda v: type(v) is int and (v == -1 or 0 < v <= 1 << 16),
    "num_head_channels": lambda v: type(v) is int and (v == -1 or 0 < v <= 1 << 16),
    "use_new_attention_order": lambda v: type(v) is bool,
    "max_period": lambda v: type(v) in (int, float) and 0 < v < math.inf,
    "dropout": lambda v: type(v) in (int, float) and 0 <= v < 1,
}


def load(path, device="auto", weights="ema"):
    """The model in a checkpoint, a run folder (its newest checkpoint) or a file of `numdiff convert`.

    device: "auto", "cpu" or "cuda"; weights: "ema" for the averaged weights where the file has them, or "raw"
    `model.options`, `model.diffusion` and `model.meta` tell what it is and how it was trained.
    """
    options, arrays, meta = read_model_file(path, weights)
    try:
        model = UNet(**options, device=device)
    except TypeError as error:
        raise NumdiffError(f"{path} has model options that this numdiff does not know ({error}); install a newer "
                           "numdiff.") from None
    model.load_arrays(arrays)
    model.diffusion = dict(meta.get("diffusion") or {})
    model.meta = meta
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
    try:
        if meta["model"] != "unet":
            raise NumdiffError(f"{path} holds a model of the kind {meta['model']!r}, which this numdiff does not know.")
        flat = buffers["ema" if weights == "ema" and "ema" in buffers else "parameters"]
        arrays = {}
        for entry in meta["index"]:
            start, count = entry["offset"], math.prod(entry["shape"])
            arrays[entry["name"]] = flat[start:start + count].reshape(entry["shape"])
        return dict(meta["model_options"]), arrays, meta
    except (KeyError, TypeError, ValueError) as error:
        raise NumdiffError(f"{path} is a numdiff file but holds no whole model ({type(error).__name__}: {error}); use "
                           "another checkpoint.") from error


def write_model_file(path, model_options, arrays, diffusion=None, step=0, **more):
    """Write a model file atomically.

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
        "format": "numdiff-checkpoint", "version": 1, "model": "unet", "model_options": model_options, "index": index,
        "diffusion": diffusion or Diffusion().options, "step": step, **more})


@dataclass
class Conversion:
    """What `convert` did: the options of the model, its number of parameters, and the step it comes from."""

    options: dict
    parameters: int
    step: int


def convert(source, target, weights="ema", diffusion=None, **free):
    """Make a numdiff model file of another program's weights, or the reverse.

    source: what `load_state_dict` reads, or a numdiff checkpoint or run folder
    target: .h5 for a numdiff model file; .npz or .safetensors for PyTorch's layout and guided-diffusion's names
    weights: "ema" or "raw", of a source that has both
    diffusion: steps, schedule, prediction that it was trained with
    free: options of the UNet that weights do not tell (the keys of `FREE_OPTIONS`). None leaves one to the source, or
        to guided-diffusion's default; image_size and one of num_heads, num_head_channels must be known in the end.
    Returns a `Conversion`.
    """
    kind = pathlib.Path(target).suffix
    if kind != ".h5" and kind not in EXPORTS:
        raise UsageError(f"OUT is {str(target)!r}, and must end in .h5 (numdiff), .npz or .safetensors.")
    free = {k: v for k, v in free.items() if v is not None}
    diffusion = {k: v for k, v in (diffusion or {}).items() if v is not None}
    if pathlib.Path(source).is_dir() or _is_hdf5(source):
        if free or diffusion:
            given = ", ".join(flag(k) for k in [*free, *diffusion])
            raise UsageError(f"{source} tells its own options: leave out {given}.")
        options, arrays, meta = read_model_file(source, weights)
        diffusion, step = meta.get("diffusion"), meta.get("step", 0)
        kept = {"classes": meta["classes"]} if meta.get("classes") else {}
    else:
        state_dict, told = read_weights(source, weights)
        options = complete_options(source, state_dict, told, free)
        try:
            state_dict = check_state_dict(state_dict, options)
        except NumdiffError as error:
            raise NumdiffError(f"cannot use {source}: {error}.") from None
        arrays, step, kept = to_numdiff_layout(state_dict), 0, {}
        diffusion = {**Diffusion().options, **diffusion}
    broken = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if broken:
        raise NumdiffError(f"{source} holds values that are not finite, first in {broken[0]}; use another checkpoint.")
    if kind == ".h5":
        write_model_file(target, options, arrays, diffusion, step, source=pathlib.Path(source).name, **kept)
    else:
        with atomic_file(target, "the weights") as file:
            write_state_dict(file, to_torch_layout(arrays), EXPORTS[kind], options)
    return Conversion(options, sum(a.size for a in arrays.values()), step)


def complete_options(source, state_dict, told, free):
    """All options of the UNet: what shapes say, and for the rest the user (`free`), the file (`told`), the defaults."""
    told = {k: v for k, v in told.items() if k in FREE_OPTIONS and FREE_OPTIONS[k](v)}
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
    for key, value in free.items():
        if not FREE_OPTIONS[key](value):
            raise UsageError(f"{flag(key)} {value} is out of range.")
    try:
        guessed = guess_unet_options(state_dict, known["image_size"])
    except NumdiffError as error:
        raise NumdiffError(f"cannot use {source}: {error}.") from None
    defaults = {name: list(p.default) if isinstance(p.default, tuple) else p.default
                for name, p in inspect.signature(UNet).parameters.items() if name not in ("device", "seed")}
    defaults["num_head_channels"] = -1
    options = {**defaults, **guessed, **known}
    check_options(options)
    return options


def flag(option):
    """The command-line option that sets `option`."""
    names = {"use_new_attention_order": "attention_order", "steps": "diffusion_steps"}
    return "--" + names.get(option, option).replace("_", "-")


def _is_hdf5(path):
    try:
        with open(path, "rb") as file:
            return file.read(len(HDF5_MAGIC)) == HDF5_MAGIC
    except OSError:  # said better by whoever reads it next
        return False
