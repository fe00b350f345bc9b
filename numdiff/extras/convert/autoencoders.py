"""Autoencoders of other programs: diffusers' folders, and state dicts under latent diffusion's
names."""

import contextlib
import json
import pathlib

from ... import schema
from ...errors import NumdiffError, UsageError
from ...files import Refused, atomic_file, atomic_pair, cannot_write, read_bytes
from ...hdf5 import is_hdf5
from ...nn.autoencoder import Autoencoder, check_options
from ...nn.model import parameter_shapes
from ...outputs import check_apart
from ...training import autoencoders
from ...training.autoencoders import KIND, LIMITS, OF_RUN
from ...training.checkpoint import load_meta
from ...training.kinds.kind import defaults_of
from ...training.model_files import write_model_file
from .autoencoder_names import (
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
from .diffusers import CONFIG, LARGEST_CONFIG, PIPELINE, WEIGHTS, weights_file
from .files import read_weights, write_state_dict
from .kinds.weights import flag

ENDINGS = "", ".h5", ".npz", ".safetensors"
SIDES = "encoder", "decoder"  # a file of which one is missing is named as such
# options that weights do not show, for files without a config
KEPT = "scaling_factor", "shift_factor", "image_size"


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
            return load_meta(path).get("model") == KIND
        return is_autoencoder(read_weights(path, whole=True)[0])
    return False


def read_autoencoder(path):
    """(options of the `Autoencoder`, {name: array in numdiff's layout}) of another program's file or
    folder."""
    folder = find_folder(path) if path.is_dir() else None
    if path.is_dir() and folder is None:
        raise NumdiffError(
            f"{path} holds no autoencoder: give a folder of diffusers' {CLASS}, a run of `numdiff train "
            f"vae` that has drawn its {OF_RUN}, or a file."
        )
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
    if suffix not in ENDINGS:
        raise UsageError(
            f"OUT is {str(target)!r}, and must end in .h5 (numdiff), .npz or .safetensors, or have no "
            "ending (a folder in diffusers' layout)."
        )
    inside = (CONFIG, WEIGHTS)
    for path in [target] if suffix else [target, *(pathlib.Path(target, name) for name in inside)]:
        check_apart("the weights", path, source, *(pathlib.Path(source, name) for name in inside))
    options, arrays = autoencoders.read_autoencoder(source)
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
