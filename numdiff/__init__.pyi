from . import data, device, diffusion, emulator, evaluation, kernels, nn, training
from .diffusion import sample
from .training.model_files import load

__all__ = [
    "__version__",
    "data",
    "device",
    "diffusion",
    "emulator",
    "evaluation",
    "kernels",
    "load",
    "nn",
    "sample",
    "training",
]
__version__: str
