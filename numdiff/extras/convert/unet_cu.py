"""The `.bin` weights of unet.cu, the CUDA program that this project's UNet started from.

    int32[256]   header: 12345678, batch, in_channels, model_channels, out_channels, height, width, max_period,
                 whether AdamW's m and v follow, whether random states follow; the rest is not set
    float32[…]   every parameter in PyTorch's module order and layout (then m, v and random states, which are not read)

The architecture is fixed in its source: channels × (1, 2, 3, 4), two blocks a level, attention on
the two lowest levels, 32 channels a head in the "new" order, pooling and nearest neighbour without
convolutions.
"""

import math
import os

import numpy as np

from ...errors import NumdiffError
from .unet import UNET_CU_OPTIONS, unet_shapes

MAGIC = 12345678
HEADER = 256  # int32 numbers


def is_unet_cu(head):
    """Whether a file that starts with these bytes is unet.cu's."""
    return head[:4] == MAGIC.to_bytes(4, "little")


def read_unet_cu(path):
    """(state dict in PyTorch's layout with guided-diffusion's names, all options of the UNet)."""
    size = os.path.getsize(path)
    header = np.fromfile(path, "<i4", HEADER)
    if len(header) < HEADER or header[0] != MAGIC:
        raise NumdiffError(
            "it does not start with unet.cu's header of 256 numbers; copy the file again"
        )
    _, _, in_channels, base, outputs, height, width, max_period, has_moments, has_random = map(
        int, header[:10]
    )
    if not (
        0 < in_channels <= 1024
        and 0 < outputs <= 1024
        and 0 < base <= 4096
        and 0 < max_period
        and height == width
        and 8 <= height <= 4096
        and height % 8 == 0
    ):
        raise NumdiffError(
            f"its header does not describe a model (channels {in_channels}, {base}, {outputs}, image "
            f"{height} × {width}, max period {max_period}); copy the file again"
        )
    options = {
        "image_size": height,
        "in_channels": in_channels,
        "model_channels": base,
        "out_channels": None if outputs == in_channels else outputs,
        "channel_mult": [1, 2, 3, 4],
        "num_res_blocks": 2,
        "attention_resolutions": [height // 4, height // 8],
        "use_scale_shift_norm": False,
        "resblock_updown": False,
        "conv_resample": False,
        "num_classes": None,
        "learn_sigma": False,
        **UNET_CU_OPTIONS,
        "max_period": float(max_period),
    }
    shapes = unet_shapes(options)
    count = sum(map(math.prod, shapes.values()))
    needed = 4 * (HEADER + count * (3 if has_moments else 1))
    if size < needed or (size > needed and not has_random):
        raise NumdiffError(
            f"it has {size:,} bytes where its header asks for {needed:,}: it is truncated, or belongs "
            "to another model; copy the file again"
        )
    values = np.fromfile(path, "<f4", count, offset=4 * HEADER)
    state_dict, position = {}, 0
    for name, shape in shapes.items():
        state_dict[name] = values[position : position + math.prod(shape)].reshape(shape)
        position += math.prod(shape)
    return state_dict, options
