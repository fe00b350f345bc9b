"""Automatic differentiation and models: tensors and the tape, operations, modules, the UNet, the optimiser."""
from . import functional
from .layers import Conv2d, Embedding, GroupNorm, LayerNorm, Linear
from .module import FlatParameters, Module, Numbered
from .optimizer import AdamW
from .tensor import Parameter, Tape, Tensor
from .unet import UNet

__all__ = ["AdamW", "Conv2d", "Embedding", "FlatParameters", "GroupNorm", "LayerNorm", "Linear", "Module", "Numbered",
           "Parameter", "Tape", "Tensor", "UNet", "functional"]
