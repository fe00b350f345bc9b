"""Gate, residual and the adaptive norm after it, in one pass each way. Read the files in this
order.

    reference.py   what is computed, the derived gradients, and what it costs
    forward.py     v2  a warp a token, held in registers
    backward.py    v2  a block a chunk of an image's tokens, their sums in registers
    problems.py    what the check, the tests and the benchmark run
    launcher.py        which version runs, and what it is given

READ NEXT
    reference.py
"""

from .launcher import gate_adaln_backward, gate_adaln_forward, gate_adaln_supports
from .reference import (
    gate_adaln_backward_cost,
    gate_adaln_backward_reference,
    gate_adaln_forward_cost,
    gate_adaln_forward_reference,
)

__all__ = [
    "gate_adaln_backward",
    "gate_adaln_backward_cost",
    "gate_adaln_backward_reference",
    "gate_adaln_forward",
    "gate_adaln_forward_cost",
    "gate_adaln_forward_reference",
    "gate_adaln_supports",
]
