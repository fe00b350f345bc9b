"""The diffusion process: noise schedules, targets, samplers."""

from .process import Diffusion
from .samplers import SAMPLERS
from .sampling import Sampling, sample
from .schedule import alpha_bars, spaced_timesteps

__all__ = ["SAMPLERS", "Diffusion", "Sampling", "alpha_bars", "sample", "spaced_timesteps"]
