"""GroupNorm's backward by warps of sixteen channels, a tile's pixels shared by the blocks of a cluster (sm_90).

WHAT IS NEW, AND WHY IT PAYS
    one_pass_half.py keeps all pixels of its channels in one block's shared memory: 64×64 pixels of sixteen channels
    just fit. Larger images do not, nor do 64×64 where groups of six channels make a tile of 48. Two, four or eight
    blocks, each with its part of the image, have room for them and read nothing twice: 130 µs instead of 215 for
    64×64×192 with a residual, batch 32, on an H100. Where one block is enough, more are no faster.
    It costs two barriers of the cluster, and each warp reads 32 sums from every other block's shared memory, where all
    left them at the same address. All blocks add the same sums in the same order, so they get the same averages.
    The first block writes the cluster's sums.
LAUNCH
    grid (C / tile, B, blocks), cluster (1, 1, blocks); otherwise as one_pass_half.py, with 128 more bytes of shared
    memory for each part. The kernel's source is in that file, compiled with CLUSTERS set.
DETERMINISM
    the sums of a cluster's blocks are added in the order of their rank.
SOURCE
    device/cluster.py
READ NEXT
    plan.py
"""
from itertools import product

from ...device.requires import requires
from ...device.specialise import Variants, specialise
from .one_pass_half import backward_half
from .one_pass_half_forward import forward_half
from .warp_sums import CHANNELS, MAX_THREADS

BLOCKS = 2, 4, 8  # of a cluster


def _backward(key):
    part, two = key
    return requires("9.0")(specialise(
        backward_half, name=f"groupnorm_backward_clusters_{part}{'_two' if two else ''}", module=__name__,
        launch_bounds=MAX_THREADS, PART=part, CLUSTERS=True, TWO=two))


FORWARD_CLUSTERS = Variants(CHANNELS, lambda part: requires("9.0")(specialise(
    forward_half, name=f"groupnorm_forward_clusters_{part}", module=__name__, launch_bounds=MAX_THREADS, PART=part,
    CLUSTERS=True)))  # by channels of a warp
BACKWARD_CLUSTERS = Variants(product(CHANNELS, (False, True)), _backward)  # and whether there are two residuals
