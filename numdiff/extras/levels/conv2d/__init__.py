"""A 3 × 3 convolution on Hopper in two levels, float16, one idea each. Read them after
../wgmma/.

    shifted_boxes.py        level 1  a shifted box of pixels for each tap: a matrix product with other coordinates
    halo.py                 level 2  one box with its halo, which all nine taps read in place

The models run kernels/conv2d/hopper/, which handles every shape; here its ideas come one at a time.

VERSIONS
    v1 shifted-boxes, v2 halo: the levels.
COST
    x and weight read once and y written once; 2 · 9 · C FLOPs for each of B · H · W · N results.
"""

import numpy as np

from ....device import empty
from ....kernels.conv2d import conv2d_forward_reference
from ....kernels.operation import Problem, Version, half, operation
from .halo import launch_halo
from .shifted_boxes import launch_shifted_boxes

TILE = 16, 8, 64, 128  # what H, W, C and N must be multiples of


def conv2d_level_forward_reference(x, weight):
    return conv2d_forward_reference(x, weight)


def conv2d_level_forward_cost(B, H, W, C_in, C_out):
    """(bytes, FLOPs), in float16."""
    pixels = B * H * W
    return 2 * (pixels * (C_in + C_out) + 9 * C_in * C_out), 2 * pixels * 9 * C_in * C_out


def _check(x, weight):
    N, C = len(weight), x.shape[3]
    if tuple(weight.shape) != (N, 3, 3, C) or x.dtype != weight.dtype:
        raise ValueError(
            f"x {x.shape} of {x.dtype} needs weight (N, 3, 3, {C}) of the same type, not {weight.shape} "
            f"of {weight.dtype}"
        )


def _lacks_tiles(x, weight):
    extents = (*x.shape[1:], len(weight))
    if any(n % tile for n, tile in zip(extents, TILE, strict=True)):
        return f"takes H, W, C, N in multiples of {TILE}, not {extents}"
    return None


@operation(
    reference=conv2d_level_forward_reference,
    cost=conv2d_level_forward_cost,
    check=_check,
    versions=[
        Version(name, launch, fits=_lacks_tiles, requires="9.0a", dtypes=["float16"])
        for name, launch in (("shifted-boxes", launch_shifted_boxes), ("halo", launch_halo))
    ],
    # a tile for each of two images; two across and two down, of 128 channels
    problems=[
        Problem(
            x=half(2, 16, 8, 64), weight=half(128, 3, 3, 64), once=True, fast=("shifted-boxes",)
        ),
        Problem(x=half(1, 32, 16, 128), weight=half(128, 3, 3, 128), once=True, fast=("halo",)),
        Problem(x=half(32, 32, 32, 256), weight=half(256, 3, 3, 256), measured=True),
    ],
)
def conv2d_level_forward(x, weight, version=None):
    """x (B, H, W, C) convolved with weight (N, 3, 3, C), as a new array (B, H, W, N), all float16.

    version: the level; None: the last
    """
    y = empty((*x.shape[:3], len(weight)), np.float16, like=x)
    version.kernel(x, weight, y)
    return y
