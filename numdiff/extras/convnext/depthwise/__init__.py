"""Depthwise convolution, every channel by a filter of its own. Read the files in this order.

    reference.py       the mathematics, the references, and what it costs
    naive.py       v1  one thread an output
    tiled.py       v2  tiles in shared memory, runs of pixels in registers
    mma.py         v3  16 bits on tensor cores: banded matrices of taps
    launcher.py        which of them runs
    hopper.py      v4  forward and dx by TMA, each pixel read once for all rows of taps;
    hopper_weight_gradient.py      likewise
    layernorm.py       with the LayerNorm over the channels: how a ConvNeXt block begins

READ NEXT
    reference.py
"""

from .launcher import (
    depthwise_backward,
    depthwise_forward,
    depthwise_input_gradient,
    depthwise_weight_gradient,
)
from .layernorm import (
    depthwise_layernorm_backward,
    depthwise_layernorm_forward,
    depthwise_layernorm_forward_cost,
)
from .reference import (
    depthwise_forward_cost,
    depthwise_forward_reference,
    depthwise_input_gradient_cost,
    depthwise_input_gradient_reference,
    depthwise_weight_gradient_cost,
    depthwise_weight_gradient_reference,
)

__all__ = [
    "depthwise_backward",
    "depthwise_forward",
    "depthwise_forward_cost",
    "depthwise_forward_reference",
    "depthwise_input_gradient",
    "depthwise_input_gradient_cost",
    "depthwise_input_gradient_reference",
    "depthwise_layernorm_backward",
    "depthwise_layernorm_forward",
    "depthwise_layernorm_forward_cost",
    "depthwise_weight_gradient",
    "depthwise_weight_gradient_cost",
    "depthwise_weight_gradient_reference",
]
