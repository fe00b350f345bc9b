"""Convert a model: another program's weights to numdiff's model file, or the reverse."""

import pathlib
from dataclasses import dataclass

from ...errors import UsageError
from ...files import atomic_file
from ...outputs import check_apart, check_output
from ...training import kinds
from ...training.model_files import files_of, is_own, read_any, write_model_file
from .diffusers import FOLDER
from .files import write_state_dict
from .kinds import weights_of
from .kinds.weights import flag
from .layout import to_numdiff_layout, to_torch_layout

EXPORTS = {".npz": "npz", ".safetensors": "safetensors"}


@dataclass
class Conversion:
    """What `convert` did: the kind and options of the model, its number of parameters, the step it
    comes from, the options of its diffusion, and [(heading, text), …] of what is odd about the
    model, and of what users of OUT in other programs must know."""

    kind: str
    options: dict
    parameters: int
    step: int
    diffusion: dict
    notes: list


def read_source(source, weights=None, diffusion=None, free=None):
    """What `read_any` returns; a `UsageError` for options of a file that stores its own."""
    if (free or diffusion) and is_own(source):
        given = ", ".join(flag(k) for k in [*free, *diffusion])
        raise UsageError(f"{source} has options of its own: leave out {given}.")
    return read_any(source, weights, diffusion, free, "convert")


def convert(source, target, weights=None, diffusion=None, conv_resample=False, **free):
    """Make a numdiff model file of another program's weights, or the reverse.

    source: what `load_state_dict` reads, a folder of diffusers' DiT, or a numdiff checkpoint or run
    folder
    target: .h5 for a numdiff model file; .npz or .safetensors for PyTorch's layout and the names of
        guided-diffusion or the public DiT; a name without a suffix for a DiT in diffusers' folder
        layout
    weights: "ema" or "raw", of a source that has both (None: "ema"); a run's that kept no average
    has no "ema"
    diffusion: path, steps, schedule, prediction that it was trained with, and rescale_timesteps,
        whether the model sees t as t · 1000 / steps, of the path linear as 1000 · t (True or False;
        required for a UNet whose steps are not 1000)
    conv_resample: write the pooling and repetition of a UNet as the convolutions that do the same
    free: options that the weights do not determine (the keys of `Weights.free` of the kind). None
        leaves one to the source, or to the public code's default. For a UNet image_size and one of
        num_heads, num_head_channels must be known in the end; for a DiT image_size where the source
        has no positions, and num_heads where its size is not a published one.
    Returns a `Conversion`.
    """
    suffix = pathlib.Path(target).suffix
    if suffix not in ("", ".h5", *EXPORTS):
        raise UsageError(
            f"OUT is {str(target)!r}, and must end in .h5 (numdiff), .npz or .safetensors, or have no "
            "ending (a folder in diffusers' layout)."
        )
    sources = files_of(source)
    if suffix:
        check_output("the weights", target, *sources)
    else:
        for path in (target, *(pathlib.Path(target, name) for name in FOLDER)):
            check_apart("the weights", path, *sources)
    free = {k: v for k, v in free.items() if v is not None}
    diffusion = {k: v for k, v in (diffusion or {}).items() if v is not None}
    found = read_source(source, weights, diffusion, free)
    kind, options, arrays, diffusion = (
        kinds.get(found.kind),
        found.options,
        found.arrays,
        found.diffusion,
    )
    foreign, step = weights_of(kind), found.step
    kept = {name: value for name in ("classes", "pictures") if (value := getattr(found, name))}
    if conv_resample:
        state_dict, options = foreign.with_convolutions(to_torch_layout(arrays), options)
        arrays = to_numdiff_layout(state_dict)
    notes, training = found.remarks, {**({"step": step} if step else {}), **kept}
    if suffix == ".h5":
        write_model_file(
            target,
            options,
            arrays,
            diffusion,
            step,
            kind.name,
            source=pathlib.Path(source).name,
            **kept,
        )
    elif suffix == "":
        notes = notes + foreign.write_folder(
            target, options, to_torch_layout(arrays), diffusion, training
        )
    else:
        with atomic_file(target, "the weights") as file:
            state_dict = foreign.exported(
                foreign.in_their_time(to_torch_layout(arrays), diffusion), options
            )
            left = write_state_dict(file, state_dict, EXPORTS[suffix], options, diffusion, training)
        notes = notes + foreign.notes(options, diffusion)
        notes += (
            [
                (
                    "left out",
                    f"the names of {len(left['classes']):,} classes, for which an .npz has no place: "
                    ".safetensors has",
                )
            ]
            if left
            else []
        )
    return Conversion(kind.name, options, kind.count_parameters(options)[0], step, diffusion, notes)
