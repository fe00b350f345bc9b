"""What `make_dit.py` and the tests that read its values must agree on; NumPy only. The counterpart
of stored.py."""

import numpy as np

from . import stored

_TINY = {
    "image_size": 8,
    "in_channels": 4,
    "patch_size": 2,
    "hidden_size": 48,
    "depth": 2,
    "num_heads": 3,
    "mlp_ratio": 4.0,
    "num_classes": 5,
    "class_dropout": 0.1,
    "learn_sigma": True,
}
_LIGHTNING = {"norm": "rms", "qk_norm": True, "rope": True, "mlp": "swiglu", "shift": False}
MODELS = {
    "latents": _TINY,  # as the public DiT is used
    "pixels": {
        **_TINY,
        "in_channels": 3,
        "image_size": 12,
        "patch_size": 4,
        "learn_sigma": False,
        "num_heads": 2,
        "class_dropout": 0.0,
    },
    "plain": {
        **_TINY,
        "image_size": 6,
        "in_channels": 1,
        "hidden_size": 40,
        "depth": 1,
        "num_heads": 5,
        "mlp_ratio": 2.5,
        "num_classes": None,
    },
    "head_72": {**_TINY, "hidden_size": 144, "num_heads": 2, "depth": 1},  # the head size of XL
    "rms": {**_TINY, "depth": 1, "norm": "rms"},  # LightningDiT's options, each alone
    "qk_norm": {**_TINY, "depth": 1, "qk_norm": True},
    "rope": {**_TINY, "depth": 1, "rope": True},
    # 82 inside: no multiple of 8
    "swiglu": {**_TINY, "depth": 1, "mlp": "swiglu", "mlp_ratio": 2.5625},
    "no_shift": {**_TINY, "depth": 1, "shift": False},
    "sla": {
        **_TINY,
        "image_size": 20,
        "in_channels": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "depth": 1,
        "mlp_ratio": 1.0,
        "attention": "sla",
        "sla_topk": 0.5,
    },  # 100 tokens: two blocks
    "lightning": {
        **_TINY,
        "in_channels": 6,
        "image_size": 5,
        "patch_size": 1,
        "hidden_size": 72,
        "num_heads": 2,
        "learn_sigma": False,
        **_LIGHTNING,
    },  # all of them
    "not_square": {**_TINY, "image_size": [6, 10], "depth": 1, **_LIGHTNING},
}
TRAJECTORY = {**stored.TRAJECTORY, "options": _TINY}
TRAJECTORIES = {
    "trajectory": TRAJECTORY,
    "lightning_trajectory": {
        **TRAJECTORY,
        "options": {**_TINY, "in_channels": 2, "mlp_ratio": 2.5625, **_LIGHTNING},
    },
}


def state_dict(shapes, seed):
    """{name: array} in PyTorch's layout for a {name: shape}, without the fixed positions."""
    return {
        name: array
        for name, array in stored.state_dict(shapes, seed).items()
        if name != "pos_embed"
    }


def timesteps(count, T):
    """Timesteps of a trajectory's images, a few of them 0, where the loss has another form."""
    t = ((stored.uniform("dit/t", count, 0) + 0.5) * T).astype(np.int32)
    t[::7] = 0
    return t
