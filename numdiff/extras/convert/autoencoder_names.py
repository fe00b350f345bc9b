"""Names, sizes and diffusers' folder of an autoencoder (AutoencoderKL of latent diffusion).

    public      encoder.down.0.block.1.conv1, encoder.mid.attn_1.q, decoder.up.3.upsample.conv
                in a checkpoint of latent diffusion each has the prefix first_stage_model.
    diffusers   encoder.down_blocks.0.resnets.1.conv1, encoder.mid_block.attentions.0.to_q,
                decoder.up_blocks.0.upsamplers.0.conv; the decoder's levels are counted from the smallest

numdiff has the public names, with q, k and v of an attention block as one layer `qkv`.
"""

import re

import numpy as np

from ...errors import NumdiffError, UsageError, listed

CLASS = "AutoencoderKL"  # in diffusers' config.json
PREFIXES = "first_stage_model.", "autoencoder.", "vae."
# in checkpoints of training
BESIDE = re.compile(r"(loss|discriminator|model_ema|teacher)\b.*|.*\.num_batches_tracked")
GROUPS = 32
DEFAULT_SCALE = 0.18215  # of the autoencoders of Stable Diffusion 1 and 2, and of the public DiT
# in older folders
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def is_autoencoder(state_dict):
    """Whether a state dict is of an autoencoder, under the public names or those of diffusers."""
    return any("decoder.conv_in.weight" in name for name in state_dict) and any(
        "encoder.conv_in.weight" in name for name in state_dict
    )


def public_names(state_dict):
    """{public name: array} of a state dict under the public names, with a prefix or without, or
    under diffusers'."""
    start = next((p for p in PREFIXES if f"{p}encoder.conv_in.weight" in state_dict), "")
    found = {
        name.removeprefix(start): array
        for name, array in state_dict.items()
        if name.startswith(start)
    }
    if not any(name.startswith("encoder.down_blocks.") for name in found):
        return {name: array for name, array in found.items() if not BESIDE.fullmatch(name)}
    levels = 1 + max(
        int(m[1]) for name in found if (m := re.match(r"encoder\.down_blocks\.(\d+)\.", name))
    )
    return {_from_diffusers(name, levels): array for name, array in found.items()}


def _from_diffusers(name, levels):
    for old, new in OLD_ATTENTION.items():
        name = name.replace(f".attentions.0.{old}.", f".attentions.0.{new}.")
    for pattern, result in _RULES:
        name = re.sub(pattern, result, name)
    return re.sub(r"decoder\.up\.(\d+)\.", lambda m: f"decoder.up.{levels - 1 - int(m[1])}.", name)


_RULES = [
    (r"\.conv_norm_out\.", ".norm_out."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.", ".mid.attn_1."),
    (r"\.down_blocks\.", ".down."),
    (r"\.up_blocks\.", ".up."),
    (r"\.resnets\.", ".block."),
    (r"\.attentions\.", ".attn."),
    (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"\.group_norm\.", ".norm."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".proj_out."),
]


def diffusers_names(state_dict):
    """{name in diffusers: array} of a state dict under the public names."""
    levels = 1 + max(
        int(m[1]) for name in state_dict if (m := re.match(r"encoder\.down\.(\d+)\.", name))
    )
    found = {}
    for name, array in state_dict.items():
        name = re.sub(
            r"decoder\.up\.(\d+)\.", lambda m: f"decoder.up.{levels - 1 - int(m[1])}.", name
        )
        attention = re.search(r"\.(attn|attn_1)(\.|$)", name)
        for pattern, result in (
            (r"\.norm_out\.", ".conv_norm_out."),
            (r"\.nin_shortcut\.", ".conv_shortcut."),
            (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
            (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
            (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
            (r"\.down\.", ".down_blocks."),
            (r"\.up\.", ".up_blocks."),
            (r"\.block\.", ".resnets."),
            (r"\.attn\.", ".attentions."),
            (r"\.downsample\.", ".downsamplers.0."),
            (r"\.upsample\.", ".upsamplers.0."),
        ):
            name = re.sub(pattern, result, name)
        if attention:
            name = re.sub(r"\.norm\.", ".group_norm.", re.sub(r"\.([qkv])\.", r".to_\1.", name))
            name = name.replace(".proj_out.", ".to_out.0.")
            array = array[:, :, 0, 0] if array.ndim == 4 else array
        found[name] = array
    return found


def numdiff_arrays(state_dict):
    """{numdiff's name: array in numdiff's layout} of a state dict under the public names."""
    found = {}
    for name, array in state_dict.items():
        array = np.asarray(array)
        attention = re.fullmatch(r"(.*\.attn(?:_1|\.\d+)\.)(q|k|v|proj_out)\.(weight|bias)", name)
        if attention and array.ndim == 4:
            array = array[:, :, 0, 0]
        elif array.ndim == 4:
            array = array.transpose(0, 2, 3, 1)
        if attention and attention[2] != "proj_out":
            if attention[2] == "q":
                parts = [
                    np.asarray(state_dict.get(f"{attention[1]}{part}.{attention[3]}", ()))
                    for part in "qkv"
                ]
                if len({part.shape for part in parts}) > 1:
                    raise NumdiffError(f"{attention[1]}q, k and v have different shapes")
                joined = np.concatenate(
                    [part.reshape(part.shape[:2]) if part.ndim > 2 else part for part in parts]
                )
                found[f"{attention[1]}qkv.{attention[3]}"] = np.ascontiguousarray(
                    joined, np.float32
                )
            continue
        with np.errstate(over="ignore"):
            found[name] = np.ascontiguousarray(array, np.float32)
    return found


def public_arrays(arrays):
    """{public name: array in PyTorch's layout} of {numdiff's name: array in numdiff's layout}."""
    found = {}
    for name, array in arrays.items():
        if array.ndim == 4:
            found[name] = np.ascontiguousarray(array.transpose(0, 3, 1, 2))
        elif ".qkv." in name:
            for letter, part in zip("qkv", np.split(array, 3), strict=True):
                found[name.replace(".qkv.", f".{letter}.")] = np.ascontiguousarray(
                    part[:, :, None, None] if part.ndim == 2 else part
                )
        else:
            found[name] = array[:, :, None, None] if array.ndim == 2 else array
    return found


def guess_autoencoder_options(state_dict):
    """Options of the `Autoencoder` whose weights a state dict has, under the public names; a
    `NumdiffError` for others.
    """

    def shape(name):
        if name not in state_dict:
            raise NumdiffError(f"it lacks {name}, which an autoencoder has")
        return tuple(np.shape(state_dict[name]))

    def numbers(pattern):
        return sorted({int(m[1]) for name in state_dict if (m := re.match(pattern, name))})

    levels = numbers(r"encoder\.down\.(\d+)\.block\.")
    if levels != list(range(len(levels))) or not levels:
        raise NumdiffError("the levels of its encoder are not counted from 0")
    blocks = {len(numbers(rf"encoder\.down\.{level}\.block\.(\d+)\.")) for level in levels}
    if len(blocks) > 1:
        raise NumdiffError(
            "the levels of its encoder have different numbers of blocks, which numdiff's have not"
        )
    widths = [shape(f"encoder.down.{level}.block.0.conv1.weight")[0] for level in levels]
    width, inputs = shape("encoder.conv_in.weight")[:2]
    latents = shape("decoder.conv_in.weight")[1]
    if width != widths[0] or any(w % width for w in widths):
        raise NumdiffError(
            f"its levels have {listed(map(str, widths))} channels and its first convolution {width}: "
            "numdiff's have multiples of those of the first"
        )
    if shape("encoder.conv_out.weight")[0] != 2 * latents:
        raise NumdiffError(
            f"its encoder gives {shape('encoder.conv_out.weight')[0]} channels for {latents} of a "
            "latent: numdiff reads autoencoders with a mean and a log variance (double_z)"
        )
    return {
        "in_channels": inputs,
        "model_channels": width,
        "channel_mult": [w // width for w in widths],
        "num_res_blocks": blocks.pop(),
        "latent_channels": latents,
        "attention_levels": [
            level for level in levels if numbers(rf"encoder\.down\.{level}\.attn\.(\d+)\.")
        ],
        "mid_attention": "encoder.mid.attn_1.norm.weight" in state_dict,
        "quant_convs": "quant_conv.weight" in state_dict,
        "groups": GROUPS,
    }


def options_of_config(config):
    """What diffusers' config.json says and the weights do not show; a `NumdiffError` for what
    numdiff does not have."""
    if config.get("_class_name", CLASS) != CLASS:
        raise NumdiffError(
            f"config.json is of a {config['_class_name']}, and numdiff reads a {CLASS}"
        )
    for name, wanted in (("act_fn", ("silu", "swish")), ("norm_num_groups", (GROUPS,))):
        if config.get(name, wanted[0]) not in wanted:
            raise NumdiffError(
                f"config.json says {name} {config[name]!r}, and numdiff has {wanted[0]!r}"
            )
    found = {}
    for theirs, ours, default in (
        ("scaling_factor", "scaling_factor", DEFAULT_SCALE),
        ("shift_factor", "shift_factor", 0.0),
        ("sample_size", "image_size", None),
    ):
        value = config.get(theirs)
        value = default if value is None else value
        if value is not None:
            two = type(value) is list and len(value) == 2 and ours == "image_size"
            if not all(
                type(v) in (int, float) and -1e6 < v < 1e6 for v in (value if two else [value])
            ):
                raise NumdiffError(f"config.json says {theirs} {value!r}, which is no number")
            found[ours] = value
    return found


def autoencoder_config(options):
    """diffusers' config.json of an autoencoder with these options; a `UsageError` for one that the
    library has not."""
    if options["groups"] != GROUPS:
        raise UsageError(
            f"diffusers' {CLASS} is written with {GROUPS} groups, and this autoencoder has "
            f"{options['groups']}: write .safetensors or .npz instead."
        )
    levels = range(len(options["channel_mult"]))
    attends = [level in options["attention_levels"] for level in levels]
    return {
        "_class_name": CLASS,
        "act_fn": "silu",
        "block_out_channels": [options["model_channels"] * m for m in options["channel_mult"]],
        "down_block_types": [
            "AttnDownEncoderBlock2D" if a else "DownEncoderBlock2D" for a in attends
        ],
        "force_upcast": False,
        "in_channels": options["in_channels"],
        "latent_channels": options["latent_channels"],
        "layers_per_block": options["num_res_blocks"],
        "mid_block_add_attention": options["mid_attention"],
        "norm_num_groups": GROUPS,
        "out_channels": options["in_channels"],
        "sample_size": options["image_size"],
        "scaling_factor": options["scaling_factor"],
        "shift_factor": options["shift_factor"] or None,
        "up_block_types": [
            "AttnUpDecoderBlock2D" if a else "UpDecoderBlock2D" for a in reversed(attends)
        ],
        "use_post_quant_conv": options["quant_convs"],
        "use_quant_conv": options["quant_convs"],
    }
