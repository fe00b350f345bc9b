"""GroupNorm, with scale, shift and SiLU in the same pass. Read the files in this order.

    launcher.py        the mathematics, v1 and v2, and which version runs
    vectors.py         16 bytes of float16 or float32 at once
    one_pass.py        v3  everything kept in shared memory
    one_pass_half.py   v3  the same for float16, eight numbers at once
    clusters.py        v4  a group shared by the blocks of a cluster
    normalise.py       v5  with statistics that the convolution left

READ NEXT
    launcher.py
"""
from .launcher import (
    groupnorm_backward,
    groupnorm_backward_cost,
    groupnorm_backward_reference,
    groupnorm_forward,
    groupnorm_forward_cost,
    groupnorm_forward_reference,
)

__all__ = ["groupnorm_backward", "groupnorm_backward_cost", "groupnorm_backward_reference", "groupnorm_forward",
           "groupnorm_forward_cost", "groupnorm_forward_reference"]
