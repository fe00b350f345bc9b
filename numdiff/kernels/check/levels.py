"""Cases of the kernels that are there to be read: the Hopper levels."""
from ..conv2d.levels import conv2d_level_forward
from ..matmul.levels import matmul_level_forward
from .case import HALF_TOLERANCE, Case, one
from .half import halves


def level_cases():
    # one step; more steps than stages; two blocks with two tiles each, in groups of rows
    for first, M, N, K in ((1, 128, 256, 64), (2, 128, 256, 64 * 6), (4, 256, 512, 128)):
        yield Case("matmul_level", halves(a=(M, K), b=(N, K)), one(
            lambda a, v: matmul_level_forward(a.a, a.b, version=v)), tuple(range(first, 6)), HALF_TOLERANCE,
            f"{M} × {N} × {K}")
    # a tile for each of two images; two across and two down, of 128 channels
    for x, N in (((2, 16, 8, 64), 128), ((1, 32, 16, 128), 128)):
        yield Case("conv2d_level", halves(x=x, weight=(N, 3, 3, x[3])), one(
            lambda a, v: conv2d_level_forward(a.x, a.weight, version=v)), (1, 2), HALF_TOLERANCE,
            f"{'×'.join(map(str, x))} → {N}")
