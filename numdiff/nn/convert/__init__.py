"""Weights of other programs: their files, their names, their layout.

files.py reads and writes them, pickles.py is the reader of PyTorch's format, unet_cu.py that of unet.cu's; unet.py
knows the names and shapes of a guided-diffusion UNet, layout.py turns axes.
"""
from .files import load_state_dict, read_weights, write_state_dict
from .layout import to_numdiff_layout, to_torch_layout
from .unet import check_state_dict, guess_unet_options, unet_shapes

__all__ = ["check_state_dict", "guess_unet_options", "load_state_dict", "read_weights", "to_numdiff_layout",
           "to_torch_layout", "unet_shapes", "write_state_dict"]
