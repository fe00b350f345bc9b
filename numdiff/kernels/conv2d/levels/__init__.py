"""A 3 × 3 convolution on Hopper in two levels, float16, one idea each. Read them after ../../matmul/levels/.

    shifted_boxes.py        level 1  a shifted box of pixels for each tap: a matrix product with other coordinates
    halo.py                 level 2  one box with its halo, which all nine taps read in place

The models run ../hopper/, which handles every shape; here its ideas come one at a time.

VERSIONS
    v1 shifted-boxes, v2 halo: the levels.
COST
    x and weight read once and y written once; 2 · 9 · C FLOPs for each of B · H · W · N results.
"""
import numpy as np

from ....device import empty, is_device
from ...versions import versions_by_name
from .. import conv2d_forward_reference
from .halo import launch_halo
from .shifted_boxes import launch_shifted_boxes

LEVELS = {1: launch_shifted_boxes, 2: launch_halo}
TILE = 16, 8, 64, 128  # what H, W, C and N must be multiples of


@versions_by_name
def conv2d_level_forward(x, weight, version=None):
    """x (B, H, W, C) convolved with weight (N, 3, 3, C), as a new array (B, H, W, N), all float16.

    version: the level; None: the last
    """
    (B, H, W, C), N = x.shape, len(weight)
    if tuple(weight.shape) != (N, 3, 3, C) or x.dtype != weight.dtype:
        raise ValueError(f"x {x.shape} of {x.dtype} needs weight (N, 3, 3, {C}) of the same type, not {weight.shape} "
                         f"of {weight.dtype}")
    if not is_device(x):
        return conv2d_forward_reference(x, weight)
    if x.dtype != np.float16 or any(n % tile for n, tile in zip((H, W, C, N), TILE, strict=True)):
        raise ValueError(f"the levels take float16 and H, W, C, N in multiples of {TILE}, not {x.dtype} and "
                         f"{(H, W, C, N)}; use conv2d_forward")
    if version not in (None, *LEVELS):
        raise ValueError(f"there is no level {version}: use one of {', '.join(map(str, LEVELS))}")
    y = empty((B, H, W, N), np.float16, like=x)
    LEVELS[version or max(LEVELS)](x, weight, y)
    return y


def conv2d_level_forward_cost(B, H, W, C_in, C_out):
    """(bytes, FLOPs), in float16."""
    pixels = B * H * W
    return 2 * (pixels * (C_in + C_out) + 9 * C_in * C_out), 2 * pixels * 9 * C_in * C_out
