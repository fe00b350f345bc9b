"""Small models for tests, on the CPU unless another device is given, and their files."""

import numpy as np

from numdiff.nn import DiT, UNet
from numdiff.training.model_files import write_model_file

UNET = {
    "image_size": 8,
    "model_channels": 32,
    "channel_mult": (1,),
    "num_res_blocks": 1,
    "attention_resolutions": (),
}
DIT = {
    "image_size": 8,
    "in_channels": 3,
    "patch_size": 4,
    "hidden_size": 24,
    "depth": 1,
    "num_heads": 2,
}
# the block of LightningDiT; it was published without qk_norm, and with shift
LIGHTNING = {"norm": "rms", "qk_norm": True, "rope": True, "mlp": "swiglu", "shift": False}


def small_unet(**options):
    return UNet(**{"device": "cpu", **UNET, **options})


def small_dit(**options):
    """It has the classes of a DiT, 1,000, unless others or None are given."""
    return DiT(**{"device": "cpu", **DIT, **options})


def with_random_weights(model, scale=0.05, seed=0):
    """The model with normal weights: a new one gives zeros."""
    rng = np.random.default_rng(seed)
    model.parameters.load_flat(scale * rng.standard_normal(model.parameters.total))
    return model


def write(path, model, diffusion=None, **meta):
    """Write a model file, and return its path."""
    write_model_file(path, model.options, model.arrays(), diffusion, model=model.kind, **meta)
    return path


def without_zeros(model, scale=0.05, seed=1):
    """The model with normal weights in layers that start at zero, through which no gradient
    flows."""
    rng = np.random.default_rng(seed)
    arrays = model.arrays()
    for name, array in arrays.items():
        if not array.any():
            arrays[name] = scale * rng.standard_normal(array.shape).astype(np.float32)
    model.load_arrays(arrays)
    return model


# options of a run of the small UNet, as `resolve` takes them
RUN = {
    **UNET,
    "model": "unet",
    "device": "cpu",
    "batch": 4,
    "sample_every": 0,
    "sample_count": 0,
    "sample_steps": 2,
}
