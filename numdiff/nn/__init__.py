"""Automatic differentiation and models: tensors and the tape, operations, modules, UNet and DiT,
the optimiser."""

from .. import extensions
from ..configs import AdamWConfig, MuonConfig
from . import functional
from .dit import DiT, DiTConfig
from .layers import Conv2d, Embedding, GroupNorm, LayerNorm, Linear
from .model import Model
from .module import FlatParameters, Module, Numbered
from .optimizer import AdamW
from .parameter import Parameter
from .tensor import Tape, Tensor
from .unet import UNet, UNetConfig

__all__ = [
    "AdamW",
    "AdamWConfig",
    "Conv2d",
    "DiT",
    "DiTConfig",
    "Embedding",
    "FlatParameters",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "Model",
    "Module",
    "Muon",
    "MuonConfig",
    "Numbered",
    "Parameter",
    "Tape",
    "Tensor",
    "UNet",
    "UNetConfig",
    "functional",
]


def __getattr__(name):
    return extensions.attribute_of(__name__, "nn_names", name)
