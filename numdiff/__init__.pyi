from . import data, device, diffusion, evaluation, kernels, nn, training
from .diffusion import sample
from .training.model_files import load

__all__ = ["__version__", "data", "device", "diffusion", "evaluation", "kernels", "load", "nn", "sample",
           "training"]
__version__: str
