"""The folder layout of Hugging Face's diffusers for a DiT: config.json next to
diffusion_pytorch_model.safetensors.

`DiTTransformer2DModel.from_pretrained(folder)` reads it. The names differ from the public DiT's,
query, key and value are three layers, every block has its own copy of the embedding of timestep and
class, and the library makes the positions. The format is only for models with a null class.

One thing differs in the library, and no setting of config.json changes it: the frequencies of its
timestep embedding. They fall by 10000^(1/127) a step (`downscale_freq_shift=1`); those of the
public DiT, from which the published folders were made, fall by 10000^(1/128). So its outputs
differ, by several percent at late timesteps, until `REMEDY` has been run on the loaded model; then
both agree up to rounding (tried with diffusers 0.42).
"""

import os
import pathlib
import re

import numpy as np

from ... import schema
from ...errors import NumdiffError, UsageError, listed
from ...files import read_bytes
from ...nn.dit import EPS, PLAIN, UNPUBLISHED, position_table
from ...sizes import as_size, in_pixels

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
PICKLED_WEIGHTS = "diffusion_pytorch_model.bin"
FOLDER = (CONFIG, WEIGHTS, PICKLED_WEIGHTS)  # what a model's folder may hold
# a whole pipeline's folder, and where its model is
PIPELINE, INSIDE = "model_index.json", ("transformer", "unet")
# of these
MEMBER = re.compile(
    r"(diffusion_pytorch_model.*\.(safetensors|bin|json)|config\.json|model_index\.json)"
)
# in names
LAYERS = (
    "transformer_blocks.",
    "single_transformer_blocks.",
    "down_blocks.",
    "up_blocks.",
    "mid_block.",
)
LARGEST_CONFIG = 1 << 20  # bytes
CLASSES = ("DiTTransformer2DModel", "Transformer2DModel")  # now, and in the published folders
REMEDY = "for block in model.transformer_blocks: block.norm1.emb.time_proj.downscale_freq_shift = 0"
NUMBERS = {  # settings that give a size: diffusers' name -> its default
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": None,
    "num_layers": 28,
    "sample_size": 32,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
}
FIXED = {  # settings for which a public DiT has one value: name -> (default, accepted values)
    "activation_fn": ("gelu-approximate", ("gelu-approximate",)),
    "attention_bias": (True, (True,)),
    "norm_type": ("ada_norm_zero", ("ada_norm_zero",)),
    "norm_elementwise_affine": (False, (False,)),
    "norm_eps": (1e-5, (1e-5, EPS)),
    "upcast_attention": (False, (False, True)),
    "dropout": (0.0, (0,)),
    "norm_num_groups": (32, (32,)),  # unused
    "cross_attention_dim": (None, (None,)),
    "double_self_attention": (False, (False,)),
    "num_vector_embeds": (None, (None,)),
    "only_cross_attention": (False, (False,)),
    "use_linear_projection": (False, (False,)),
    "attention_type": ("default", ("default",)),
    "caption_channels": (None, (None,)),
    "interpolation_scale": (None, (None, 1, 1.0)),
}
POSITIONS = "pos_embed.pos_embed"  # older versions keep them
OUTSIDE = {  # names of the layers that exist once, here and in diffusers
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
SHARED = {  # exist once here, and in every block in diffusers
    "t_embedder.mlp.0": "timestep_embedder.linear_1",
    "t_embedder.mlp.2": "timestep_embedder.linear_2",
    "y_embedder.embedding_table": "class_embedder.embedding_table",
}
BLOCK = {  # layers of a block
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}


def diffusers_config(options):
    """The config.json of a DiT with these options; a `UsageError` if the format has no place for
    it."""
    if options["num_classes"] is None or options["class_dropout"] == 0:
        raise UsageError(
            "diffusers' DiT always has classes and a null class, but this model does not: write "
            ".safetensors or .npz instead."
        )
    changed = [
        name
        for name, value in PLAIN.items()
        if options.get(name, value) != value and name not in UNPUBLISHED
    ]
    if changed:
        raise UsageError(
            f"diffusers' DiT has no {changed[0]} {options[changed[0]]}, as this model has: write "
            ".safetensors or .npz instead."
        )
    if not isinstance(as_size(options["image_size"]), int):
        raise UsageError(
            f"diffusers' DiT makes squares, but this model {in_pixels(options['image_size'])}: write "
            ".safetensors or .npz instead."
        )
    if options["mlp_ratio"] != 4:
        raise UsageError(
            f"diffusers' DiT has an MLP ratio of 4, but this model has {options['mlp_ratio']:g}: write "
            ".safetensors or .npz instead."
        )
    return {
        "_class_name": "DiTTransformer2DModel",
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "attention_head_dim": options["hidden_size"] // options["num_heads"],
        "dropout": 0.0,
        "in_channels": options["in_channels"],
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "norm_num_groups": 32,
        "norm_type": "ada_norm_zero",
        "num_attention_heads": options["num_heads"],
        "num_embeds_ada_norm": options["num_classes"],
        "num_layers": options["depth"],
        "out_channels": options["in_channels"] * (2 if options["learn_sigma"] else 1),
        "patch_size": options["patch_size"],
        "sample_size": options["image_size"],
        "upcast_attention": False,
    }


def diffusers_state_dict(state_dict, depth):
    """{diffusers' name: array} of a DiT's weights in PyTorch's layout under the public names."""
    result = {}

    def copy(source, target):
        for kind in ("weight", "bias"):
            if f"{source}.{kind}" in state_dict:
                result[f"{target}.{kind}"] = state_dict[f"{source}.{kind}"]

    for source, target in OUTSIDE.items():
        copy(source, target)
    for i in range(depth):
        here, there = f"blocks.{i}", f"transformer_blocks.{i}"
        for source, target in SHARED.items():
            copy(source, f"{there}.norm1.emb.{target}")
        for source, target in BLOCK.items():
            copy(f"{here}.{source}", f"{there}.{target}")
        for kind in ("weight", "bias"):
            for letter, part in zip(
                "qkv", np.split(state_dict[f"{here}.attn.qkv.{kind}"], 3), strict=True
            ):
                result[f"{there}.attn1.to_{letter}.{kind}"] = part
    return result


def find_diffusers(path):
    """The folder of a diffusers model that a path means: itself, or a part of a pipeline's folder;
    None for others."""
    path = pathlib.Path(path)
    if (path / PIPELINE).is_file():
        return next((path / name for name in INSIDE if _holds_some(path / name)), path)
    return path if _holds_some(path) else None


def check_whole_folder(path, names=()):
    """Raise a `UsageError` for a file that is one of a diffusers folder, by its name or by the
    names of its tensors: sizes are in the config.json of its folder."""
    path = pathlib.Path(path)
    if path.is_file() and (
        MEMBER.fullmatch(path.name) or any(name.startswith(LAYERS) for name in names)
    ):
        folder = find_diffusers(path.parent)
        if folder is None or not (folder / CONFIG).is_file():
            raise UsageError(
                f"{path} is a file of diffusers, whose {CONFIG} has the sizes of the model and is not "
                "next to it: give the folder that save_pretrained wrote."
            )
        raise UsageError(
            f"{path} is one file of a diffusers folder, whose {CONFIG} has the sizes of the model: give "
            f"the folder, {folder}."
        )


def _holds_some(folder):
    return any((folder / name).is_file() for name in FOLDER)


def weights_file(folder):
    """The file of weights in a diffusers model's folder."""
    found = [folder / name for name in (WEIGHTS, PICKLED_WEIGHTS) if (folder / name).is_file()]
    if not found:
        parts = sorted(folder.glob("diffusion_pytorch_model*.index.json"))
        why = (
            f"its weights are in several files ({parts[0].name}): save it with max_shard_size='100GB'"
            if parts
            else f"it has no {WEIGHTS} next to its {CONFIG}: save it with save_pretrained"
        )
        raise NumdiffError(f"cannot use {folder}: {why}.")
    return found[0]


def read_config(folder):
    """The options of the DiT that config.json describes: image_size, in_channels, …; a
    `NumdiffError` names the first setting that no public DiT has."""
    path = folder / CONFIG
    try:
        if os.path.getsize(path) > LARGEST_CONFIG:
            raise NumdiffError(
                f"{path} is too large for a configuration: give a folder that diffusers wrote."
            )
        config = schema.parse_json(read_bytes(path, LARGEST_CONFIG))
    except FileNotFoundError:  # as where writing the folder was interrupted
        raise NumdiffError(
            f"cannot use {folder}: it has no {CONFIG}: write it again with `numdiff convert`, or save "
            "it with save_pretrained."
        ) from None
    except OSError as error:
        raise NumdiffError(f"cannot read {path}: {error.strerror}.") from error
    except schema.Mismatch:
        config = None
    if not isinstance(config, dict):
        raise NumdiffError(f"{path} is damaged, or is not a configuration: copy the folder again.")
    kind = config.get("_class_name")
    if kind not in CLASSES:
        raise NumdiffError(
            f"{path} is of a {str(kind)[:60]!r}, and of diffusers numdiff reads {CLASSES[0]} alone."
        )
    for key, value in config.items():
        if key.startswith("_"):  # its class, and the version that wrote it
            continue
        if key not in NUMBERS and key not in FIXED:
            raise NumdiffError(
                f"{path} sets {key[:60]!r}, which numdiff does not know for a DiT: it is another model."
            )
        if key in FIXED and not any(
            value == v and isinstance(value, bool) == isinstance(v, bool) for v in FIXED[key][1]
        ):
            raise NumdiffError(
                f"{path} sets {key} to {str(value)[:60]!r}, but numdiff's DiT has only "
                f"{' or '.join(map(repr, FIXED[key][1]))}: it is another model."
            )
        fits = (
            type(value) is int and 0 < value <= 1 << 24 or value is None and key == "out_channels"
        )
        if key in NUMBERS and not fits:
            raise NumdiffError(
                f"{path} sets {key} to {str(value)[:60]!r}, which must be a whole number from 1."
            )
    found = {**NUMBERS, **{key: value for key, value in config.items() if key in NUMBERS}}
    channels, outputs = found["in_channels"], found["out_channels"] or found["in_channels"]
    if outputs not in (channels, 2 * channels):
        raise NumdiffError(
            f"{path} sets out_channels to {outputs}, and a DiT of {channels} channels gives {channels} "
            f"or {2 * channels}: it is another model."
        )
    return {
        "image_size": found["sample_size"],
        "in_channels": channels,
        "patch_size": found["patch_size"],
        "hidden_size": found["num_attention_heads"] * found["attention_head_dim"],
        "depth": found["num_layers"],
        "num_heads": found["num_attention_heads"],
        "num_classes": found["num_embeds_ada_norm"],
        "learn_sigma": outputs == 2 * channels,
    }


def public_state_dict(state_dict, options):
    """{the public DiT's name: array} of weights under diffusers' names: what `diffusers_state_dict`
    undoes.

    options: from `read_config`. A `NumdiffError` if the blocks, which have an embedding each, do
    not have the same one.
    """
    depth, found = options["depth"], dict(state_dict)
    if POSITIONS in found:
        positions = np.asarray(found.pop(POSITIONS), np.float32)
        table = position_table(
            options["hidden_size"], options["image_size"] // options["patch_size"]
        )
        if positions.shape != (1, *table.shape) or not np.abs(positions[0] - table).max() < 1e-2:
            raise NumdiffError(f"{POSITIONS} is not the table of sines and cosines that a DiT has")
    if depth > len(found):  # which lists no names for an invented number
        raise NumdiffError(
            f"{CONFIG} says {depth:,} blocks, and the weights are {len(found):,} tensors in all"
        )
    result, missing = {}, [name for name in _names(depth) if name not in found]
    if missing:
        raise NumdiffError(
            f"these are not the weights that {CONFIG} describes: {listed('missing', missing)}; save the "
            "whole model"
        )

    def copy(source, target):
        for kind in _parts(target):
            result[f"{source}.{kind}"] = found.pop(f"{target}.{kind}")

    first = "transformer_blocks.0.norm1.emb."
    for i in range(1, depth):
        for target in SHARED.values():
            for kind in _parts(target):
                name = f"{target}.{kind}"
                if not np.array_equal(
                    found[first + name], found.pop(f"transformer_blocks.{i}.norm1.emb.{name}")
                ):
                    raise NumdiffError(
                        f"block {i} has another {name} than block 0: the blocks were trained with an "
                        "embedding each, as in diffusers; numdiff's blocks share one"
                    )
    for source, target in OUTSIDE.items():
        copy(source, target)
    for source, target in SHARED.items():
        copy(source, first + target)
    for i in range(depth):
        here, there = f"blocks.{i}", f"transformer_blocks.{i}"
        for source, target in BLOCK.items():
            copy(f"{here}.{source}", f"{there}.{target}")
        for kind in ("weight", "bias"):
            result[f"{here}.attn.qkv.{kind}"] = np.concatenate(
                [found.pop(f"{there}.attn1.to_{letter}.{kind}") for letter in "qkv"]
            )
    if found:
        raise NumdiffError(f"it has {listed('weights that no DiT has:', list(found))}")
    return result


def _names(depth):
    """The names of a model of this depth in diffusers, in order."""
    blocks = [
        f"transformer_blocks.{i}.{layer}"
        for i in range(depth)
        for layer in (
            *(f"norm1.emb.{layer}" for layer in SHARED.values()),
            *(f"attn1.to_{letter}" for letter in "qkv"),
            *BLOCK.values(),
        )
    ]
    return [f"{layer}.{part}" for layer in (*OUTSIDE.values(), *blocks) for part in _parts(layer)]


def _parts(layer):
    return ("weight",) if layer.endswith("embedding_table") else ("weight", "bias")
