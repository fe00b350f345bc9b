"""GroupNorm, with scale, shift and SiLU in the same pass. Read the files in this order.

    reference.py       what is computed, the derived gradients, and what it costs
    groups.py          v1  one block for each group
    chunks.py          v2  one block for each chunk of pixels, with all their channels; small kernels join the chunks
    vectors.py             what the one-pass kernels share: eight channels a thread
    one_pass.py        v3  everything kept in shared memory
    one_pass_backward.py  v3  the same backward; the last block adds the parameters' gradients
    warp_sums.py           what the kernels of 16 bits share: warps with a part of the channels
    one_pass_half_forward.py  v3  the forward of 16 bits, with one barrier
    one_pass_half.py   v3  the backward of 16 bits
    clusters.py        v3  those two, with an image shared by the blocks of a cluster
    plan.py                which tile version 3 gets, and whether it is worth it
    one_pass_launch.py     version 3's launches
    normalise.py       v4  with statistics that the convolution left
    problems.py            what the check, the tests and the benchmark run
    launcher.py        which of them runs

READ NEXT
    reference.py
"""

from .launcher import groupnorm_backward, groupnorm_forward
from .reference import (
    groupnorm_backward_cost,
    groupnorm_backward_reference,
    groupnorm_forward_cost,
    groupnorm_forward_reference,
)

__all__ = [
    "groupnorm_backward",
    "groupnorm_backward_cost",
    "groupnorm_backward_reference",
    "groupnorm_forward",
    "groupnorm_forward_cost",
    "groupnorm_forward_reference",
]
