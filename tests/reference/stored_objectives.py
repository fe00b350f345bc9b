"""What `make_objectives.py` and the tests that read its values must agree on; NumPy only. As
stored.py."""

import numpy as np

from . import stored, stored_dit

SHAPE = (7, 4, 4, 3)  # of the images of a single loss, channels last
GAMMA = 5.0
OBJECTIVES = {  # options of the `Diffusion`
    "sit": {"path": "linear"},
    "sit_1000": {"path": "linear", "timestep_scale": 1000.0},
    "jit": {
        "path": "linear",
        "prediction": "x_0",
        "loss": "flow",
        "time_sampling": "logit-normal",
        "noise_mean": 0.8,
        "noise_std": 0.8,
    },
    "edm": {"path": "edm"},
    "edm_wide": {"path": "edm", "sigma_data": 1.5},
    "min_snr_eps": {"prediction": "eps", "min_snr_gamma": GAMMA},
    "min_snr_v": {"prediction": "v", "min_snr_gamma": GAMMA},
    "min_snr_x_0": {"prediction": "x_0", "min_snr_gamma": GAMMA},
}
TRAJECTORIES = ("sit_1000", "jit", "edm", "min_snr_v")
TRAJECTORY = {
    **stored_dit.TRAJECTORY,
    "options": {**stored_dit.TRAJECTORY["options"], "learn_sigma": False},
}


def normal(name, shape):
    """float32 numbers with variance one."""
    return (stored.uniform(name, int(np.prod(shape)), 0) * np.float32(12**0.5)).reshape(shape)


def images(name, count):
    """(x_0, eps, classes) of `count` images, channels last."""
    size, channels = (TRAJECTORY["options"][key] for key in ("image_size", "in_channels"))
    shape = (count, size, size, channels)
    return (
        normal(f"objectives/{name}/x_0", shape) / 2,
        normal(f"objectives/{name}/eps", shape),
        np.arange(count, dtype=np.int32) % (TRAJECTORY["options"]["num_classes"] + 1),
    )


def levels(name, count):
    """Noise levels, float64: timesteps of 1000 (whole), t in (0, 1) or σ; the first two are extreme
    ones."""
    share = stored.uniform(f"objectives/{name}/t", count, 0).astype(np.float64) + 0.5
    share[:2] = 0.004, 0.995
    path = OBJECTIVES[name].get("path")
    if path == "edm":
        return np.exp(-5 + 8 * share)
    return 0.001 + 0.998 * share if path == "linear" else np.floor(1000 * share)
