"""What the names and shapes of a public DiT's weights reveal about it.

The counterpart of unet.py: `guess_dit_options` finds the options from a state dict, `check_dit_state_dict` checks one
against them. Names and shapes are those of facebookresearch/DiT. Shapes do not reveal the number of attention heads,
known here for the published sizes, nor, without the fixed positions, the size of the image.
"""
import math
import re

import numpy as np

from ...errors import NumdiffError
from ..dit import MODELS, dit_shapes, position_table
from .check import check_shapes, known_shape

WHAT = "public DiT"
POSITIONS = "pos_embed"  # never trained: some files leave it out
ROUNDING = 1e-2  # of positions stored as bfloat16


def is_dit(state_dict):
    """Whether the names are a DiT's."""
    return any(name.startswith(("x_embedder.", "final_layer.")) for name in state_dict)


def guess_dit_options(state_dict):
    """The options of `numdiff.nn.DiT` that shapes determine: in_channels, patch_size, hidden_size, depth, mlp_ratio,
    learn_sigma; image_size if the positions are there; num_heads for a published size; and `rows` of the class table
    (None without classes), one more than there are classes if the model was trained with class dropout."""
    hidden, channels, patch, width = known_shape(state_dict, "x_embedder.proj.weight", 4, WHAT)
    outputs = known_shape(state_dict, "final_layer.linear.weight", 2, WHAT)[0]
    inner = known_shape(state_dict, "blocks.0.mlp.fc1.weight", 2, WHAT)[0]
    if patch != width or outputs not in (patch * patch * channels, 2 * patch * patch * channels):
        raise NumdiffError(f"final_layer.linear.weight gives {outputs} numbers for a patch of {patch}×{width} pixels "
                           f"of {channels} channels, which no {WHAT} does")
    blocks = {int(match.group(1)) for name in state_dict if (match := re.match(r"blocks\.(\d{1,5})\.", name))}
    if blocks != set(range(len(blocks))):
        raise NumdiffError(f"its blocks are not numbered from 0 to {len(blocks) - 1}; save the whole model")
    options = {"in_channels": channels, "patch_size": patch, "hidden_size": hidden, "depth": len(blocks),
               "mlp_ratio": next(ratio for ratio in (inner / hidden, (inner + 0.5) / hidden)
                                 if int(hidden * ratio) == inner),
               "learn_sigma": outputs == 2 * patch * patch * channels, "rows": None}
    if "y_embedder.embedding_table.weight" in state_dict:
        options["rows"] = known_shape(state_dict, "y_embedder.embedding_table.weight", 2, WHAT)[0]
    if POSITIONS in state_dict:
        tokens = known_shape(state_dict, POSITIONS, 3, WHAT)[1]
        if math.isqrt(tokens) ** 2 != tokens:
            raise NumdiffError(f"{POSITIONS} has {tokens} tokens, which do not make a square image")
        options["image_size"] = math.isqrt(tokens) * patch
    for size in MODELS.values():
        if (size["hidden_size"], size["depth"]) == (hidden, len(blocks)):
            options["num_heads"] = size["num_heads"]
    return options


def check_dit_state_dict(state_dict, options):
    """The trained weights in module order; a `NumdiffError` names what differs from `dit_shapes(options)`.

    The positions may be missing; if they are there, they must be the fixed ones, which the model makes itself.
    """
    state_dict = check_shapes(state_dict, dit_shapes(options), "DiT", optional=(POSITIONS,))
    if POSITIONS in state_dict:
        given = np.asarray(state_dict.pop(POSITIONS), np.float32)[0]
        table = position_table(options["hidden_size"], options["image_size"] // options["patch_size"])
        difference = float(np.abs(given - table).max())
        if not difference <= ROUNDING:
            raise NumdiffError(f"{POSITIONS} is not the table of sines and cosines that a DiT has (it differs by up to "
                               f"{difference:.3g}), and numdiff's positions are fixed")
    return state_dict


def with_positions(state_dict, options):
    """The state dict with the fixed positions in first place, as in the public DiT."""
    table = position_table(options["hidden_size"], options["image_size"] // options["patch_size"])
    return {POSITIONS: table[None], **state_dict}
