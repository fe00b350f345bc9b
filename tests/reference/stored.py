"""What the maker of the stored values and the tests that read them must agree on; NumPy only, no
PyTorch.

Weights are not stored but drawn: each parameter from a PCG64 stream of its own, keyed by its name,
through integers only, so that every NumPy version gives the same numbers. Of a gradient with more
than `KEPT` elements, `KEPT` drawn elements and the 2-norm are stored.
"""

import json
import pathlib
import zlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent
KEPT = 192

_TINY = {
    "image_size": 8,
    "model_channels": 64,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "attention_resolutions": [4],
}
MODELS = {  # between them every option of the UNet; `attention_resolutions` in pixels
    "plain": {**_TINY, "num_head_channels": 32},
    "convolutions": {
        **_TINY,
        "num_head_channels": -1,
        "num_heads": 2,
        "num_heads_upsample": 4,
        "conv_resample": True,
        "attention_resolutions": [8, 4],
        "use_new_attention_order": True,
        "max_period": 1000.0,
    },
    "classes_updown": {
        **_TINY,
        "model_channels": 32,
        "image_size": 16,
        "attention_resolutions": [16, 8],
        "num_head_channels": 16,
        "use_scale_shift_norm": True,
        "resblock_updown": True,
        "num_classes": 5,
        "learn_sigma": True,
    },
    "updown_new_order": {
        **_TINY,
        "in_channels": 1,
        "out_channels": 3,
        "num_head_channels": 64,
        "resblock_updown": True,
        "use_new_attention_order": True,
        "attention_resolutions": [],
    },
    "three_levels": {
        "image_size": 8,
        "model_channels": 64,
        "channel_mult": [0.5, 1, 1],
        "num_res_blocks": 2,
        "in_channels": 4,
        "attention_resolutions": [8, 2],
        "num_head_channels": -1,
        "num_heads": 4,
        "use_scale_shift_norm": True,
        "num_classes": 3,
        "conv_resample": True,
    },
    "not_square": {
        **_TINY,
        "image_size": [12, 16],
        "model_channels": 32,
        "channel_mult": [1, 1, 2],
        "attention_resolutions": [8],
        "num_head_channels": 16,
        "conv_resample": True,
    },
}
TRAJECTORY = {
    "options": MODELS["plain"],
    "steps": 10,
    "batch": 4,
    "T": 1000,
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-5,
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "ema_decay": 0.9,
    "weight_seed": 7,
}
SEED_MODEL = {
    "image_size": 64,
    "in_channels": 3,
    "model_channels": 64,
    "channel_mult": [1, 2, 3, 4],
    "num_res_blocks": 2,
    "attention_resolutions": [16, 8],
    "num_head_channels": 32,
    "conv_resample": False,
}
SHAPES = {  # full-size models of which only names and shapes are stored
    "seed": SEED_MODEL,
    "seed_conv_resample": {**SEED_MODEL, "conv_resample": True},
    # the published 64×64 ImageNet weights of guided-diffusion
    "imagenet64": {
        "image_size": 64,
        "in_channels": 3,
        "model_channels": 192,
        "channel_mult": [1, 2, 3, 4],
        "num_res_blocks": 3,
        "attention_resolutions": [32, 16, 8],
        "num_head_channels": 64,
        "use_scale_shift_norm": True,
        "resblock_updown": True,
        "num_classes": 1000,
        "learn_sigma": True,
        "use_new_attention_order": True,
        "conv_resample": True,
    },
    # and its 256×256 unconditional ones
    "imagenet256_uncond": {
        "image_size": 256,
        "in_channels": 3,
        "model_channels": 256,
        "channel_mult": [1, 1, 2, 2, 4, 4],
        "num_res_blocks": 2,
        "attention_resolutions": [32, 16, 8],
        "num_head_channels": 64,
        "learn_sigma": True,
        "use_scale_shift_norm": True,
        "resblock_updown": True,
        "conv_resample": True,
    },
    # the 64×64 model of "Improved Denoising Diffusion" (heads by number, convolutions between
    # levels)
    "improved64": {
        "image_size": 64,
        "in_channels": 3,
        "model_channels": 128,
        "channel_mult": [1, 2, 3, 4],
        "num_res_blocks": 3,
        "attention_resolutions": [16, 8],
        "num_heads": 4,
        "num_head_channels": -1,
        "use_scale_shift_norm": True,
        "learn_sigma": True,
        "conv_resample": True,
    },
}


def uniform(name, count, seed):
    """`count` float32 in [-1/2, 1/2), a separate stream for every (name, seed)."""
    words = np.random.PCG64([zlib.crc32(name.encode()), seed]).random_raw(count)
    return (
        (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
    ).astype(np.float32)


def weight(name, shape, seed):
    """A parameter in PyTorch's layout: no zeros anywhere, not even where guided-diffusion starts
    with zeros."""
    u = uniform(name, int(np.prod(shape)), seed).reshape(shape)
    if len(shape) == 1:
        # a bias, or a norm's weight
        return u * np.float32(0.5) if name.endswith("bias") else np.float32(1) + u
    # attention far from uniform (at 3 the gradients are chaotic)
    gain = 1.5 if name.endswith("qkv.weight") else 1.0
    fan_in = 4 if name == "label_emb.weight" else int(np.prod(shape[1:]))
    return u * np.float32(gain * (12.0 / fan_in) ** 0.5)


def positions(name, size):
    """Flat indices of the elements of a parameter whose gradient is stored: all, or `KEPT` drawn
    ones."""
    if size <= KEPT:
        return np.arange(size)
    return (
        np.random.PCG64([zlib.crc32(name.encode()), 99]).random_raw(KEPT) % np.uint64(size)
    ).astype(np.int64)


def load(name):
    """The arrays of `<name>.npz` as a dict, its JSON entry `info` decoded."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    if "info" in arrays:
        arrays["info"] = json.loads(str(arrays["info"]))
    return arrays


def load_shapes():
    """{model: {parameter name: shape in PyTorch's layout}} of the models in `SHAPES`."""
    return {
        model: {name: tuple(shape) for name, shape in shapes.items()}
        for model, shapes in json.loads((FOLDER / "shapes.json").read_text()).items()
    }


def state_dict(shapes, seed):
    """{name: array} in PyTorch's layout for a {name: shape}."""
    return {name: weight(name, tuple(shape), seed) for name, shape in shapes.items()}
