"""The diffusion process: noise schedules, targets, samplers."""
from .process import Diffusion
from .sampling import sample
from .schedule import alpha_bars, spaced_timesteps

__all__ = ["Diffusion", "alpha_bars", "sample", "spaced_timesteps"]
