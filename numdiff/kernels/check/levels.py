"""Cases of the kernels that are there to be read: the Hopper levels."""
from ..conv2d.levels import conv2d_level_forward
from .case import HALF_TOLERANCE, Case, one
from .half import halves


def level_cases():
    # a tile for each of two images; two across and two down, of 128 channels
    for x, N in (((2, 16, 8, 64), 128), ((1, 32, 16, 128), 128)):
        yield Case("conv2d_level", halves(x=x, weight=(N, 3, 3, x[3])), one(
            lambda a, v: conv2d_level_forward(a.x, a.weight, version=v)), (1, 2), HALF_TOLERANCE,
            f"{'×'.join(map(str, x))} → {N}")
