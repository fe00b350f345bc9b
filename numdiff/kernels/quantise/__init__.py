"""Float16 rounded to E4M3, floats of 8 bits, with a scale for each tensor: what
matmul/hopper_fp8.py multiplies.

Read the files in this order:

    rounding.py      a tensor; all weights of a model, in both orientations; a scale from the largest numbers of before
    both.py          a tensor in both orientations in one pass, and its column sums

READ NEXT
    rounding.py
"""

from .both import columns_of, columns_of_cost, quantise_both, quantise_both_cost
from .rounding import (
    HISTORY,
    MAGNITUDES,
    PARTIALS,
    keep_largest,
    matrices8,
    quantise_forward,
    quantise_forward_cost,
    quantise_weights,
    quantise_weights_cost,
    scale_update,
    scale_update_cost,
    scaled,
    share_largest,
    share_largest_cost,
    store_rounded8,
)

__all__ = [
    "HISTORY",
    "MAGNITUDES",
    "PARTIALS",
    "columns_of",
    "columns_of_cost",
    "keep_largest",
    "matrices8",
    "quantise_both",
    "quantise_both_cost",
    "quantise_forward",
    "quantise_forward_cost",
    "quantise_weights",
    "quantise_weights_cost",
    "scale_update",
    "scale_update_cost",
    "scaled",
    "share_largest",
    "share_largest_cost",
    "store_rounded8",
]
