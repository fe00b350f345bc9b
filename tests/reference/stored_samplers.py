"""What `make_samplers.py` and the test that reads its values must agree on; NumPy only. As
stored.py."""

import numpy as np

from . import stored_objectives

SHAPE = (2, 2, 2, 3)
SIGMAS = (30.0, 9.0, 3.5, 1.2, 0.5, 0.11, 0.0)
# each number of an image is of one of two normal distributions, equally likely
CENTRES, STD = (-0.6, 0.4), 0.2
CHURN = {"s_churn": 1.5, "s_tmin": 0.3, "s_tmax": 10.0, "s_noise": 1.01}
CASES = {  # name -> (function of numdiff.diffusion.samplers, its settings)
    "ddpm_small": ("ddpm", {"variance": "small"}),
    "ddpm_large": ("ddpm", {"variance": "large"}),
    "ddpm_learned": ("ddpm", {"variance": "learned"}),
    "ddim": ("ddim", {}),
    "ddim_eta": ("ddim", {"eta": 0.6}),
    "euler": ("euler", {}),
    "euler_churn": ("euler", CHURN),
    "heun": ("heun", {}),
    "heun_churn": ("heun", CHURN),
    "heun_most_churn": ("heun", {"s_churn": 40.0}),  # more than a step takes
    "heun_in_time": ("heun_in_time", {}),
    "heun_in_time_churn": ("heun_in_time", CHURN),
    "euler_ancestral": ("euler_ancestral", {"eta": 0.7}),
    "dpm_solver_pp_2m": ("dpm_solver_pp_2m", {}),
    "euler_maruyama": ("euler_maruyama", {}),
}


def estimate(x, sigma):
    """E[x_0 | x_0 + sigma · eps = x], in closed form."""
    variance = STD**2 + sigma**2
    first, second = (
        np.exp(-((x - centre) ** 2 - np.min([(x - c) ** 2 for c in CENTRES], 0)) / (2 * variance))
        for centre in CENTRES
    )
    means = [centre + STD**2 / variance * (x - centre) for centre in CENTRES]
    return (first * means[0] + second * means[1]) / (first + second)


def fraction(x):
    """What a learned variance says, between -1 and 1; of x as the model sees it."""
    return np.cos(x)


def start():
    return SIGMAS[0] * stored_objectives.normal("samplers/start", SHAPE).astype(np.float64)


def noise(i):
    return stored_objectives.normal(f"samplers/noise/{i}", SHAPE).astype(np.float64)
