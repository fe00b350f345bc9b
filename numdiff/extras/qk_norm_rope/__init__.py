"""QK-norm and rotary position embedding of the packed qkv, in one pass over q and k. Read the files
in this order.

    reference.py   what is computed, the derived gradients, and what it costs
    naive.py       v1  one thread a head
    fused.py       v2  a few lanes a head, eight channels each
    cpu.py             on the host, a token at a time
    launcher.py        which of them runs
    functional.py      as a differentiable operation

READ NEXT
    reference.py
"""

from .launcher import qk_norm_rope_backward, qk_norm_rope_forward
from .reference import (
    qk_norm_rope_backward_cost,
    qk_norm_rope_backward_reference,
    qk_norm_rope_forward_cost,
    qk_norm_rope_forward_reference,
)

__all__ = [
    "qk_norm_rope_backward",
    "qk_norm_rope_backward_cost",
    "qk_norm_rope_backward_reference",
    "qk_norm_rope_forward",
    "qk_norm_rope_forward_cost",
    "qk_norm_rope_forward_reference",
]
