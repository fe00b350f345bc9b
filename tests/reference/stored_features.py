"""What `make_features.py` and the tests that read its values must agree on. The counterpart of
stored.py, for networks of many weights: all are drawn from one row of 65,537 numbers, each tensor
from its own start."""

import zlib

import numpy as np

from . import stored

LENGTH = 65_537  # a prime: rows of a tensor do not repeat each other
PIXELS = 107  # side of the images; InceptionV3 leaves 2 × 2 of them
POOL = stored.uniform("features", LENGTH, 0)  # from -0.5 to 0.5
KEPT = stored.KEPT


def drawn(name, shape):
    """float32 numbers with variance one."""
    start = zlib.crc32(name.encode()) % LENGTH
    values = np.resize(np.roll(POOL, -start), int(np.prod(shape))) * np.float32(12**0.5)
    return values.reshape(shape)


def weight(name, shape):
    """A tensor of a state dict: activations keep their size, and no bias or statistic is 0."""
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    values = drawn(name, shape)
    if name in ("cls_token", "pos_embed", "mask_token"):
        return values * np.float32(0.5)
    if len(shape) > 1:
        return values * np.float32(np.sqrt(2 / np.prod(shape[1:])))
    if name.endswith(("running_var", "bn.weight", "gamma")) or "norm" in name and name[-1] == "t":
        return 1 + values * np.float32(0.25)
    return values * np.float32(0.1)


def dinov2_shapes():
    """{name: shape} of dinov2_vitb14_pretrain.pth."""
    C, shapes = 768, {}
    shapes |= {"cls_token": (1, 1, C), "pos_embed": (1, 1370, C), "mask_token": (1, C)}
    shapes |= {"patch_embed.proj.weight": (C, 3, 14, 14), "patch_embed.proj.bias": (C,)}
    for k in range(12):
        for name, shape in {
            "norm1": (C,),
            "attn.qkv": (3 * C, C),
            "attn.proj": (C, C),
            "norm2": (C,),
            "mlp.fc1": (4 * C, C),
            "mlp.fc2": (C, 4 * C),
        }.items():
            shapes[f"blocks.{k}.{name}.weight"] = shape
            shapes[f"blocks.{k}.{name}.bias"] = shape[:1]
        shapes |= {f"blocks.{k}.ls1.gamma": (C,), f"blocks.{k}.ls2.gamma": (C,)}
    return {**shapes, "norm.weight": (C,), "norm.bias": (C,)}


def pictures(name, count=2, size=PIXELS):
    """uint8 (count, size, size, 3)"""
    return ((drawn(name, (count, size, size, 3)) / 12**0.5 + 0.5) * 255).astype(np.uint8)


def samples(name, count, dimensions):
    """float32 features of two sets, (count, dimensions) each, of different means and covariances."""
    a, b = drawn(f"{name}/a", (count, dimensions)), drawn(f"{name}/b", (count, dimensions))
    mixed = drawn(f"{name}/mix", (dimensions, dimensions)) / np.float32(dimensions**0.5)
    return a, b @ mixed + np.float32(0.3)


# of sets of features: (images, dimensions); in the second the covariances are singular
DISTANCES = {"many": (256, 24), "few": (12, 40)}
