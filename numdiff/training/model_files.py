"""Models as files: numdiff's own, checkpoints and converted models. An extension reads those of
other programs (extensions.py, `foreign`).

A model file is a checkpoint with the weights alone: the buffer "parameters" and the meta that
describes it.

    {"model": its kind, "model_options": {…}, "index": [{"name", "shape", "offset"}, …],
     "diffusion": {…}, "step": …}
"""

import logging
import math
import numbers
import os
import pathlib
from dataclasses import dataclass, field

import numpy as np

from .. import extensions, schema
from ..diffusion import Diffusion
from ..errors import NumdiffError, UsageError, printable, quoted, shown
from ..files import Refused
from ..hdf5 import is_hdf5
from ..nn.model import Model, parameter_shapes
from ..nn.module import ALIGNMENT
from ..settings import COMMON
from . import kinds
from .checkpoint import INDEX, load_checkpoint, newest_checkpoint, save_checkpoint
from .inference import calibrate, inference_model
from .kinds.kind import defaults_of
from .precision import set_precision
from .run_folder import refuse_runs

MAX_IMAGE_SIZE = 4096  # as for a training run
MAX_STEPS = 100_000  # of a diffusion
COUNT, WIDTH = schema.integer(1, 1 << 16), schema.integer(1, 1 << 16)
HEADS_OR_NONE = schema.either(schema.integer(-1, -1), COUNT)
CLASSES_OR_NONE = schema.optional(schema.integer(1, 1 << 24))
SHARE = schema.number(0, 1)
OPTIONS = {  # what the options of models may be; those not named here are of their default's type
    "image_size": schema.either(
        schema.integer(1, MAX_IMAGE_SIZE), schema.items(schema.integer(1, MAX_IMAGE_SIZE), 2, 2)
    ),
    "in_channels": WIDTH,
    "out_channels": schema.optional(WIDTH),
    "model_channels": WIDTH,
    "channel_mult": schema.items(schema.number(0, 1000), 16, 1),
    "num_res_blocks": COUNT,
    "attention_resolutions": schema.items(schema.integer(0, MAX_IMAGE_SIZE), 64),
    "num_heads": COUNT,
    "num_head_channels": HEADS_OR_NONE,
    "num_heads_upsample": HEADS_OR_NONE,
    "num_classes": CLASSES_OR_NONE,
    "dropout": SHARE,
    "class_dropout": SHARE,
    "max_period": schema.number(1e-3, 1e12),
    "groups": COUNT,
    "patch_size": COUNT,
    "hidden_size": WIDTH,
    "depth": COUNT,
    "mlp_ratio": schema.number(0, 1000),
}
DIFFUSION = {
    "steps": schema.integer(1, MAX_STEPS),
    "schedule": schema.text(40),
    "prediction": schema.text(40),
    "timestep_scale": schema.number(1e-6, 1e6),
    "vlb_weight": schema.optional(schema.number(0, 1e6)),
    "path": schema.text(40),
    "loss": schema.text(40),
    "min_snr_gamma": schema.number(0, 1e6),
    "time_sampling": schema.text(40),
    "noise_mean": schema.number(-10, 10),
    "noise_std": schema.number(0, 3),
    "time_shift": schema.number(0, 100),
    "sigma_data": schema.number(0, 1e3),
}


def load(
    path: str | os.PathLike,
    device: str = "auto",
    weights: str | None = None,
    precision: str = "auto",
    ema_std: float | None = None,
    lora: str | os.PathLike | None = None,
    inference: bool = False,
) -> Model:
    """The model in a checkpoint, a run folder (its newest checkpoint), or what `numdiff convert`
    reads or writes, where that needs no options.

    device: "auto", "cpu" or "cuda"; weights: "ema" for the averaged weights, "raw" for those of the
        last step, None for the averaged ones where the file has them
    precision: "fp32", "tf32", "fp16" (a GPU's), "bf16", or "auto": fp16 on GPUs from sm_80 on, else
    fp32; with inference on GPUs from sm_89 on also "fp8"
    ema_std: the relative width of an average that is put together from those that the run kept
    (`--ema-std`); lora: a file of adapters, such as adapter.h5 of a run, which are merged into these
    weights; inference: hold each weight once, without gradients, as `numdiff sample` does: for
    samples and predictions of the same bits, in a quarter of the memory on a GPU (nn/inference.py).
    `model.options`, `model.diffusion` and `model.meta` say what it is and how it was trained.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"numdiff.load takes the path of a checkpoint, a run folder or a model file, and not "
            f"{shown(path)}."
        )
    return load_model(path, device, weights, precision, ema_std, lora=lora, inference=inference)


def load_model(
    path,
    device="auto",
    weights=None,
    precision="auto",
    ema_std=None,
    warn=None,
    lora=None,
    inference=False,
):
    """What `load` returns; oddities of another program's file are passed to `warn(text)`."""
    warn = warn or logging.getLogger("numdiff").warning
    if lora is None:
        options, arrays, meta = read_model(path, weights, ema_std, warn)
    else:
        check_wanted(weights, ema_std)
        if ema_std is not None:
            raise UsageError("ema_std and lora exclude each other: leave one of them out.")
        options, arrays, meta = extensions.find("adapter", "lora", "lora").applied(
            lora, path, weights
        )
    kind = kinds.get(meta["model"]).model_class
    if inference:
        model = inference_model(kind, options, device, arrays, hashed=True)
    else:
        model = kind(**options, device=device, seed=None)
        model.load_arrays(arrays)
    model.diffusion = dict(meta.get("diffusion") or {})
    model.meta = meta
    model.precision = set_precision(model, precision)
    if inference:
        meta["hash"] = model.weights_hash()
        model.parameters.release()
    if model.precision == "fp8":
        calibrate(model)
    return model


def read_model(path, weights=None, ema_std=None, warn=None):
    """What `read_model_file` returns, of other programs' files, too; `warn(text)` receives their
    oddities."""
    if not is_foreign(path):
        return read_model_file(path, weights, ema_std)
    check_wanted(weights, ema_std)
    if ema_std is not None:
        raise UsageError(
            f"ema_std {ema_std:g} is of a run that kept averages, and {path} is none: leave that out, or "
            "give a checkpoint of the run."
        )
    found = read_any(path, weights, reader="load")
    for heading, text in found.remarks if warn else ():
        warn(printable(f"{path}: {heading}: {text}"))
    meta = {
        "model": found.kind,
        "model_options": found.options,
        "diffusion": found.diffusion,
        "step": found.step,
    }
    kept = {name: value for name in ("classes", "pictures") if (value := getattr(found, name))}
    return found.options, found.arrays, {**meta, **kept}


def is_own(path):
    """Whether a path is a folder or a file of HDF5, and no folder of another program's weights."""
    return folder_of(path) is None and (pathlib.Path(path).is_dir() or _is_hdf5(path))


def is_foreign(path):
    """Whether a path is of weights that numdiff has to convert: a folder of another program's, or a
    file that is not HDF5."""
    return folder_of(path) is not None or pathlib.Path(path).is_file() and not _is_hdf5(path)


def folder_of(path):
    """The folder of another program's weights that a path means; None for others."""
    found = (module.folder_of(path) for module in extensions.available("foreign").values())
    return next((folder for folder in found if folder is not None), None)


def files_of(path):
    """The paths that are read where weights are: the path, and the files in another program's
    folder."""
    modules = extensions.available("foreign").values()
    return [path, *(file for module in modules for file in module.files_of(path))]


def check_wanted(weights, ema_std):
    """Raise a `UsageError` for weights, or a width of their average, that there are not."""
    if weights not in (None, "ema", "raw"):
        raise UsageError(f"unknown weights {quoted(weights)}: use ema or raw.")
    if ema_std is not None and (isinstance(ema_std, bool) or not isinstance(ema_std, numbers.Real)):
        raise UsageError(
            f"ema_std is a number such as 0.08, the width of an average, and not {shown(ema_std)}."
        )
    if ema_std is not None and weights == "raw":
        raise UsageError(
            f"ema_std {ema_std:g} is of averaged weights, and does not go with weights {weights}: leave "
            "one of them out."
        )


def read_model_file(path, weights=None, ema_std=None, base=None):
    """(model options, {name: array in numdiff's layout}, meta) of a checkpoint, run folder or model
    file.

    weights, ema_std: as in `load`; the meta then describes in "averaged" how the weights were
    averaged; base: of a file of adapters, the path of the model that they adapt (default: where it
    was in the training)
    """
    path = pathlib.Path(path)
    check_wanted(weights, ema_std)
    if path.is_dir():
        newest = newest_checkpoint(path)
        if newest is None:
            refuse_runs(path)
            raise NumdiffError(
                f"the folder {path} holds no checkpoint; give a run folder of `numdiff train` or a "
                "model file."
            )
        path = newest
    elif path.is_file() and not _is_hdf5(path):
        raise NumdiffError(
            f"{path} is not a numdiff file; if it holds weights of another program, make it one with "
            "`numdiff convert`."
        )
    buffers, meta = load_checkpoint(path)
    check_model_meta(path, meta)
    if "parameters" not in buffers:
        for weights_of in extensions.available("weights").values():
            weights_of.refuse(path, buffers)
    if weights == "raw" and "averaged" in meta:
        raise UsageError(
            f"{path} holds averaged weights alone, and none as trained, which weights raw asks for: leave "
            "that out, or give a checkpoint of the run."
        )
    # of a run
    if weights == "ema" and ema_std is None and len(buffers) > 1 and "ema" not in buffers:
        raise UsageError(
            f"{path} holds no averaged weights, as its run kept none (--ema-halflife 0): give weights "
            "raw, or leave that out."
        )
    name = "ema" if weights != "raw" and "ema" in buffers else "parameters"
    flat, arrays = buffers.get(name), {}
    if ema_std is not None:
        flat, error, kept = extensions.find("weights", "ema_std", "ema_std").weights_of(
            path, ema_std, buffers, meta
        )
        meta["averaged"] = {"std": float(ema_std), "error": error, "stored": len(kept)}
    end = max((entry["offset"] + math.prod(entry["shape"]) for entry in meta["index"]), default=0)
    if flat is None or flat.ndim != 1 or flat.dtype != np.float32 or not 0 < end <= flat.size:
        raise _no_model(path, f"its buffer {name!r} is not that of its index")
    for entry in meta["index"]:
        start, count = entry["offset"], math.prod(entry["shape"])
        arrays[entry["name"]] = flat[start : start + count].reshape(entry["shape"])
    if (adapter := adapter_of(meta)) is not None:
        arrays = adapter.merged(path, arrays, meta, base)
    if meta.get("diffusion"):
        meta["diffusion"] = Diffusion(**meta["diffusion"]).options
    if "v" in buffers:  # a moment, whatever the optimizer: of a run, and not of a converted file
        meta["weights"] = "ema" if name == "ema" else "raw"
    return (
        {**defaults_of(kinds.get(meta["model"]).model_class), **meta["model_options"]},
        arrays,
        meta,
    )


def check_model_meta(path, meta, known=None):
    """Raise a `NumdiffError` unless the meta of a checkpoint describes a model that can be built
    from its weights.

    So building it takes no more memory than the weights: the parameters that the options imply are
    those of the index. known: {name: record} of the kinds that will do (default: diffusion models)
    """
    known = known or kinds.KINDS
    try:
        schema.check(
            meta,
            schema.record(
                {"model": schema.text(), "model_options": schema.options, "index": INDEX},
                {},
                schema.anything,
            ),
            "meta",
        )
        kind, options, index = known.get(meta["model"]), meta["model_options"], meta["index"]
        if kind is None and meta["model"] in kinds.every():
            raise NumdiffError(
                f"{path} holds an {kinds.get(meta['model']).title}, and no diffusion model: give it as --vae "
                "to `numdiff data encode`, `numdiff train` or `numdiff sample`."
            )
        if kind is None:
            raise NumdiffError(
                f"{path} holds a model of the kind {meta['model']!r}, which this numdiff does not know."
            )
        own = defaults_of(kind.model_class)
        for given, taken in ((options, own), (meta.get("diffusion") or {}, defaults_of(Diffusion))):
            unknown = sorted(given.keys() - taken.keys())
            if unknown:
                raise NumdiffError(
                    f"{path} has options that this numdiff does not know "
                    f"({', '.join(unknown)[:200]}); install a newer numdiff."
                )
        schema.check(options, schema.of_defaults(own, OPTIONS), "model_options")
        schema.check(
            meta.get("diffusion") or {},
            schema.of_defaults(defaults_of(Diffusion), DIFFUSION),
            "diffusion",
        )
        options = {**own, **options}
        shapes = {entry["name"]: tuple(entry["shape"]) for entry in index}
        if len(shapes) < len(index) or kind.blocks(options) > len(index):
            raise schema.Mismatch("its index does not fit its options")
        kind.check_sizes(options)
        check_names(meta.get("classes"), options)
        Diffusion(**meta.get("diffusion") or {})
        wanted = parameter_shapes(kind.model_class, options)
        if (adapter := adapter_of(meta)) is not None:
            wanted = adapter.shapes(wanted, meta)
        if wanted != shapes:
            raise NumdiffError(
                f"{path}: these weights belong to another model than its options describe; use another "
                "checkpoint."
            )
        kind.check_file(options, 4 * sum(map(math.prod, shapes.values())))
    except (Refused, UsageError) as error:
        raise _no_model(path, error) from error


def adapter_of(meta):
    """The module of the extension whose adapters a file with this description holds in place of a
    model's weights; None for other files."""
    name = next((name for name in extensions.entries("adapter") if name in meta), None)
    return name and extensions.find("adapter", name, f"a file with {name}")


def check_names(classes, options):
    """Raise a `Mismatch` where a file names more classes than its model has; of some it may know no
    name."""
    count = options.get("num_classes")
    if count is not None and len(classes or ()) > count:
        raise schema.Mismatch(f"it names {len(classes):,} classes, and its model has {count:,}")


def _no_model(path, reason):
    return NumdiffError(
        f"{path} is a numdiff file but holds no whole model ({str(reason).rstrip('.')}); use another "
        "checkpoint."
    )


def write_model_file(
    path, model_options, arrays, diffusion=None, step=0, model=COMMON["model"].default, **more
):
    """Write a model file atomically.

    model: the name of its kind
    arrays: {name: array in numdiff's layout}, in module order
    diffusion: options of its `Diffusion` (None: the defaults); more: further entries of the meta
    """
    index, total = [], 0
    for name, array in arrays.items():
        index.append({"name": name, "shape": list(array.shape), "offset": total})
        total += -(-array.size // ALIGNMENT) * ALIGNMENT
    flat = np.zeros(total, np.float32)
    for entry, array in zip(index, arrays.values(), strict=True):
        flat[entry["offset"] : entry["offset"] + array.size] = array.reshape(-1)
    save_checkpoint(
        path,
        {"parameters": flat},
        {
            "format": "numdiff-checkpoint",
            "version": 1,
            "model": model,
            "model_options": model_options,
            "index": index,
            "diffusion": diffusion or Diffusion().options,
            "step": step,
            **more,
        },
    )


@dataclass
class ModelFile:
    """What a file of weights holds. kind: its name; options: of the model; arrays: {name: array in
    numdiff's layout}; diffusion: its options; step: after which it was saved; classes: their names,
    if the file has them; weights: "ema" or "raw" where it is of a run, and pictures: how that drew
    its own; remarks: [(heading, text)] of what is odd about the model."""

    path: str
    kind: str
    options: dict
    arrays: dict
    diffusion: dict
    step: int = 0
    classes: list | None = None
    weights: str | None = None
    pictures: dict | None = None
    remarks: list = field(default_factory=list)


def read_any(source, weights=None, diffusion=None, free=None, reader="load"):
    """The `ModelFile` of a numdiff checkpoint, run folder or model file, or of another program's
    weights, which an extension reads; every number in it is finite.

    diffusion, free: options of the diffusion and of the model for what another program's file does
        not store; reader: what reads it, "load", "train" or "convert"
    """
    if is_own(source):
        options, arrays, meta = read_model_file(source, weights)
        found = ModelFile(
            source,
            meta["model"],
            options,
            arrays,
            meta.get("diffusion") or Diffusion().options,
            meta.get("step", 0),
            meta.get("classes"),
            meta.get("weights"),
            meta.get("pictures"),
        )
    else:
        foreign = extensions.find("foreign", "weights", str(source))
        found = foreign.read(source, weights or "ema", diffusion or {}, free or {}, reader)
    broken = [name for name, array in found.arrays.items() if not np.isfinite(array).all()]
    if broken:
        raise NumdiffError(
            f"{source} holds values that are not finite, first in {broken[0]}; use another checkpoint."
        )
    return found


def objective(diffusion):
    """What a model predicts, in words."""
    path = diffusion.get("path", "discrete")
    how = (
        f"{diffusion['steps']} steps of the {diffusion['schedule']} schedule"
        if path == "discrete"
        else f"the path {path}"
    )
    return f"predicts {diffusion['prediction']} in {how}"


def _is_hdf5(path):
    try:
        return is_hdf5(path)
    except OSError:  # its reader reports it better
        return False
