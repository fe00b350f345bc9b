"""Weights of other programs: their files, their names, their layout.

files.py reads and writes them, pickles.py is the reader of PyTorch's format, unet_cu.py that of
unet.cu's. containers.py finds the model in a training checkpoint. unet.py and dit.py know the names
and shapes of a guided-diffusion UNet and of a public DiT, guided.py the flags of guided-diffusion's
scripts. diffusers.py knows the folder layout of that library, layout.py permutes axes.
"""

from .diffusers import (
    check_whole_folder,
    diffusers_config,
    diffusers_state_dict,
    find_diffusers,
    public_state_dict,
    read_config,
    weights_file,
)
from .dit import (
    check_dit_state_dict,
    guess_dit_options,
    is_dit,
    with_padding,
    with_positions,
    without_padding,
)
from .files import load_state_dict, read_weights, write_state_dict
from .guided import guided_diffusion_flags, with_convolutions
from .layout import to_numdiff_layout, to_torch_layout
from .unet import check_state_dict, guess_unet_options, unet_shapes

__all__ = [
    "check_dit_state_dict",
    "check_state_dict",
    "check_whole_folder",
    "diffusers_config",
    "diffusers_state_dict",
    "find_diffusers",
    "guess_dit_options",
    "guess_unet_options",
    "guided_diffusion_flags",
    "is_dit",
    "load_state_dict",
    "public_state_dict",
    "read_config",
    "read_weights",
    "to_numdiff_layout",
    "to_torch_layout",
    "unet_shapes",
    "weights_file",
    "with_convolutions",
    "with_padding",
    "with_positions",
    "without_padding",
    "write_state_dict",
]
