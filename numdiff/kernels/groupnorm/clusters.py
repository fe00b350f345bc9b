"""GroupNorm in 16 bits with a tile's pixels shared by the blocks of a cluster (sm_90), forward and
backward.

WHAT IS NEW, AND WHY IT PAYS
    The kernels of one_pass_half_forward.py and one_pass_half.py keep all pixels of their channels
    in one block's shared
    memory: 64×64 pixels of sixteen channels just fit. Larger images do not, nor do 64×64 where
    groups of six channels make a tile of 48, nor tiles of 32 channels, which memory delivers faster
    (warp_sums.py). Two, four or eight blocks, each with its part of the image, have room for them
    and read nothing twice. On an H100, batch 32: the backward of 64×64×192 with a residual takes 92
    µs instead of version 2's 215, that of 64×64×128 by tiles of 32 instead of 16 57 µs instead of
    74.
    It costs two barriers of the cluster, and each warp reads the sums of its part from every other
    block's shared memory, where all left them at the same address. All blocks add the same sums in
    the same order, so they get the same averages. The first block writes what is the whole
    cluster's.
LAUNCH
    grid (C / tile, B, blocks), cluster (1, 1, blocks); otherwise as the files named above, compiled
    with CLUSTERS set.
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
    return requires("9.0")(
        specialise(
            backward_half,
            name=f"groupnorm_backward_clusters_{part}{'_two' if two else ''}",
            module=__name__,
            launch_bounds=MAX_THREADS,
            PART=part,
            CLUSTERS=True,
            TWO=two,
        )
    )


FORWARD_CLUSTERS = Variants(
    CHANNELS,
    lambda part: requires("9.0")(
        specialise(
            forward_half,
            name=f"groupnorm_forward_clusters_{part}",
            module=__name__,
            launch_bounds=MAX_THREADS,
            PART=part,
            CLUSTERS=True,
        )
    ),
)  # by channels of a warp
# and whether there are two residuals
BACKWARD_CLUSTERS = Variants(product(CHANNELS, (False, True)), _backward)
