"""Autoencoders as files: numdiff's own, diffusers' folders, and state dicts under latent
diffusion's names.

A numdiff file of an autoencoder is a model file (model_files.py) with `"model": "vae"`: the buffer
"parameters", the options of the `Autoencoder`, and the index.
"""

import contextlib
import json
import math
import pathlib

import numpy as np

from .. import schema
from ..data.fingerprint import hash_of
from ..device import download
from ..diffusion.sampling import to_uint8
from ..errors import NumdiffError, UsageError
from ..files import Refused, atomic_file, atomic_pair, cannot_write, read_bytes
from ..hdf5 import is_hdf5
from ..nn.autoencoder import Autoencoder, check_options
from ..nn.convert.autoencoder import (
    CLASS,
    autoencoder_config,
    diffusers_names,
    guess_autoencoder_options,
    is_autoencoder,
    numdiff_arrays,
    options_of_config,
    public_arrays,
    public_names,
)
from ..nn.convert.diffusers import CONFIG, LARGEST_CONFIG, PIPELINE, WEIGHTS, weights_file
from ..nn.convert.files import read_weights, write_state_dict
from ..nn.model import parameter_shapes
from ..outputs import check_apart
from .checkpoint import INDEX, load_checkpoint
from .kinds.weights import defaults_of, flag
from .model_files import EXPORTS, OPTIONS, ModelFile, write_model_file
from .precision import set_precision

KIND = "vae"
OF_RUN = "autoencoder.h5"  # what `numdiff train vae` leaves in its run folder
SIDES = "encoder", "decoder"  # a file of which one is missing is named as such
LIMITS = {
    **OPTIONS,
    "channel_mult": schema.items(schema.integer(1, 256), 16, 1),
    "latent_channels": schema.integer(1, 1024),
    "attention_levels": schema.items(schema.integer(0, 16), 16),
    "scaling_factor": schema.number(-1e6, 1e6),
    "shift_factor": schema.number(-1e6, 1e6),
}
# options that weights do not show, for files without a config
KEPT = "scaling_factor", "shift_factor", "image_size"
RECORD = schema.record({"model_options": schema.options, "index": INDEX}, {}, schema.anything)


def load_autoencoder(path, device="auto", precision="auto"):
    """The `Autoencoder` in a numdiff file, a folder of diffusers (itself, or a pipeline's), or a
    file of a state dict.

    precision: as of `load`. Raises a `NumdiffError` of one sentence for anything else.
    """
    options, arrays = read_autoencoder(path)
    model = Autoencoder(**options, device=device, seed=None)
    model.load_arrays(arrays)
    model.precision = set_precision(model, precision)
    return model


class LatentDecoder:
    """Turns the latents that a diffusion model makes into pictures: `decoder(latents)` is uint8 (B,
    f·h, f·w, C).

    Attributes: path, vae (an `Autoencoder`), shape (of a picture), dtype
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, path, latents, device="auto", precision="auto", encoded_by=None):
        """latents: their shape (h, w, channels); encoded_by: as `Dataset.encoded_by` gives it,
        which must be the same.

        precision: of the diffusion model; an autoencoder has no fp8, and computes in fp16 then
        """
        self.path, self.vae = (
            str(path),
            load_autoencoder(path, device, "fp16" if precision == "fp8" else precision),
        )
        height, width, channels = latents
        if channels != self.vae.latent_channels:
            raise UsageError(
                f"--vae {path} decodes latents of {self.vae.latent_channels} channels, and the model "
                f"makes {channels}: give the autoencoder by which its data were encoded."
            )
        own = {
            "weights": array_hash(download(self.vae.parameters.data)),
            "scaling_factor": self.vae.scaling_factor,
            "shift_factor": self.vae.shift_factor,
        }
        changed = [name for name in own if encoded_by and encoded_by.get(name) != own[name]]
        if changed:
            raise UsageError(
                f"--vae {path} is not the autoencoder by which the data were encoded (its {changed[0]} "
                f"{'differ' if changed[0] == 'weights' else 'differs'}): give that one."
            )
        self.shape = height * self.vae.factor, width * self.vae.factor, self.vae.in_channels

    def __call__(self, latents):
        return to_uint8(self.vae.decode(self.vae.unscale(latents)))


def array_hash(array):
    """A short hash of an array."""
    return hash_of(np.ascontiguousarray(array).view(np.uint8)).hexdigest()[:12]


def find_folder(path):
    """diffusers' folder of an autoencoder that a path means: itself, or `vae` in a pipeline's; None
    for others."""
    path = pathlib.Path(path)
    inside = path / KIND if (path / PIPELINE).is_file() else path
    if not (inside / CONFIG).is_file():
        return None
    return inside if _read_config(inside).get("_class_name") == CLASS else None


def holds_autoencoder(path):
    """Whether a path is of an autoencoder, and of no diffusion model; looks at no more than it
    needs."""
    path = pathlib.Path(path)
    if path.is_dir():
        if (path / OF_RUN).is_file():
            return True
        return not (path / PIPELINE).is_file() and find_folder(path) is not None
    with contextlib.suppress(NumdiffError, OSError):
        if is_hdf5(path):
            return load_checkpoint(path)[1].get("model") == KIND
        return is_autoencoder(read_weights(path, whole=True)[0])
    return False


def read_autoencoder(path):
    """(options of the `Autoencoder`, {name: array in numdiff's layout}) of a file or folder; every
    number is finite."""
    path = pathlib.Path(path)
    if (path / OF_RUN).is_file():  # a run folder
        path = path / OF_RUN
    folder = find_folder(path) if path.is_dir() else None
    if path.is_dir() and folder is None:
        raise NumdiffError(
            f"{path} holds no autoencoder: give a folder of diffusers' {CLASS}, a run of `numdiff train "
            f"vae` that has drawn its {OF_RUN}, or a file."
        )
    if folder is None and not path.exists():
        raise NumdiffError(
            f"there is no autoencoder {path}: check the path, or make one with `numdiff convert`."
        )
    options, arrays = (
        _read_own(path) if folder is None and is_hdf5(path) else _read_foreign(path, folder)
    )
    broken = next((name for name, array in arrays.items() if not np.isfinite(array).all()), None)
    if broken:
        raise NumdiffError(
            f"{path} holds values that are not finite, first in {broken}; use another file."
        )
    return options, arrays


def read_start(path):
    """What `read_autoencoder` gives, as a `ModelFile` for `--init`."""
    options, arrays = read_autoencoder(path)
    return ModelFile(str(path), KIND, {**options, "num_classes": None}, arrays, {})


def _read_own(path):
    buffers, meta = load_checkpoint(path)
    if meta.get("model") != KIND:
        raise NumdiffError(
            f"{path} holds a {str(meta.get('model'))[:20]}, and no autoencoder: give the file of one."
        )
    try:
        schema.check(meta, RECORD, "meta")
        own = defaults_of(Autoencoder)
        options = {
            **own,
            **schema.check(meta["model_options"], schema.of_defaults(own, LIMITS), "model_options"),
        }
        shapes = {entry["name"]: tuple(entry["shape"]) for entry in meta["index"]}
        if len(options["channel_mult"]) * options["num_res_blocks"] > len(shapes) or (
            parameter_shapes(Autoencoder, options) != shapes
        ):
            raise schema.Mismatch("its index does not fit its options")
        flat = buffers.get("ema" if "ema" in buffers else "parameters")
        end = max(entry["offset"] + math.prod(entry["shape"]) for entry in meta["index"])
        if flat is None or flat.ndim != 1 or flat.dtype != np.float32 or end > flat.size:
            raise schema.Mismatch("its buffer is not that of its index")
    except (Refused, UsageError) as error:
        raise NumdiffError(
            f"{path} is a numdiff file but holds no whole autoencoder ({str(error).rstrip('.')}); use "
            "another file."
        ) from error
    return options, {
        entry["name"]: flat[entry["offset"] : entry["offset"] + math.prod(entry["shape"])].reshape(
            entry["shape"]
        )
        for entry in meta["index"]
    }


def _read_foreign(path, folder):
    file = path if folder is None else weights_file(folder)
    state_dict, stored = read_weights(file, whole=True)
    if not is_autoencoder(state_dict):
        lacks = next(
            (
                side
                for side in SIDES
                if not any(f"{side}.conv_in.weight" in name for name in state_dict)
            ),
            None,
        )
        raise NumdiffError(
            f"{file} holds no autoencoder: it has no {lacks}.conv_in.weight. Give a file of one."
        )
    state_dict = public_names(state_dict)
    try:
        options = {**defaults_of(Autoencoder), **guess_autoencoder_options(state_dict)}
        if folder is not None:
            options.update(options_of_config(_read_config(folder)))
        else:
            options.update({key: stored[key] for key in KEPT if key in stored})
        schema.check(options, schema.of_defaults(defaults_of(Autoencoder), LIMITS), "its options")
        arrays = numdiff_arrays(state_dict)
        wanted = parameter_shapes(Autoencoder, options)
    except (NumdiffError, Refused) as error:
        raise NumdiffError(f"cannot use {file}: {str(error).rstrip('.')}.") from None
    for name, shape in wanted.items():
        if name not in arrays:
            raise NumdiffError(
                f"cannot use {file}: it lacks {name}, which an autoencoder of its sizes has."
            )
        if arrays[name].shape != shape:
            raise NumdiffError(
                f"cannot use {file}: {name} has the shape {arrays[name].shape}, and {shape} is wanted."
            )
    return options, {name: arrays[name] for name in wanted}


def _read_config(folder):
    try:
        config = schema.parse_json(read_bytes(folder / CONFIG, LARGEST_CONFIG))
    except OSError as error:
        raise NumdiffError(f"cannot read {folder / CONFIG}: {error.strerror}.") from error
    except schema.Mismatch:
        config = None
    if not isinstance(config, dict):
        raise NumdiffError(
            f"{folder / CONFIG} is damaged, or is not a configuration: copy the folder again."
        )
    return config


def write_autoencoder(target, options, arrays, source=None):
    """Write an autoencoder: .h5 is numdiff's own, .npz and .safetensors have latent diffusion's
    names, and a name without an ending is a folder that diffusers' `AutoencoderKL.from_pretrained`
    reads."""
    target, suffix = pathlib.Path(target), pathlib.Path(target).suffix
    if suffix == ".h5":
        write_model_file(
            target, options, arrays, model=KIND, **({"source": source} if source else {})
        )
    elif suffix:
        kept = {key: options[key] for key in KEPT}
        with atomic_file(target, "the weights") as file:
            write_state_dict(file, public_arrays(arrays), suffix[1:], kept)
    else:
        config = json.dumps(autoencoder_config(options), indent=2, sort_keys=True).encode() + b"\n"
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write("the weights into", target, error) from error
        with atomic_pair(
            target / WEIGHTS, "the weights", target / CONFIG, "the configuration", config
        ) as file:
            write_state_dict(file, diffusers_names(public_arrays(arrays)), "safetensors")


def convert_autoencoder(source, target, factors, others=()):
    """Convert the autoencoder in `source` to `target`, as `write_autoencoder` says; yields lines
    that describe it.

    factors: {"scaling_factor", "shift_factor": number, or None for that of the source}; others:
    names of further options that were given, which are refused
    """
    if others:
        raise UsageError(f"{flag(others[0])} means nothing for an autoencoder: leave it out.")
    suffix = pathlib.Path(target).suffix
    if suffix not in ("", ".h5", *EXPORTS):
        raise UsageError(
            f"OUT is {str(target)!r}, and must end in .h5 (numdiff), .npz or .safetensors, or have no "
            "ending (a folder in diffusers' layout)."
        )
    inside = (CONFIG, WEIGHTS)
    for path in [target] if suffix else [target, *(pathlib.Path(target, name) for name in inside)]:
        check_apart("the weights", path, source, *(pathlib.Path(source, name) for name in inside))
    options, arrays = read_autoencoder(source)
    options.update({name: value for name, value in factors.items() if value is not None})
    check_options(options)
    write_autoencoder(target, options, arrays, pathlib.Path(source).name)
    levels = ", ".join(str(options["model_channels"] * m) for m in options["channel_mult"])
    yield f"{target}: an autoencoder of {sum(array.size for array in arrays.values()):,} parameters"
    factor = 2 ** (len(options["channel_mult"]) - 1)
    yield (
        f"latents     {options['latent_channels']} channels, each side divided by {factor}; a diffusion model sees "
        f"(latent - {options['shift_factor']:g}) * {options['scaling_factor']:g}"
    )
    yield f"levels      {levels} channels, {options['num_res_blocks']} blocks each"
