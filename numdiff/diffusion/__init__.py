"""The diffusion process: noise schedules, targets, samplers."""

from .process import Diffusion
from .samplers import SAMPLERS
from .sampling import Sampling, sample
from .sampling_config import SamplingConfig
from .schedule import alpha_bars, spaced_timesteps

__all__ = [
    "SAMPLERS",
    "Diffusion",
    "Sampling",
    "SamplingConfig",
    "alpha_bars",
    "sample",
    "spaced_timesteps",
]
