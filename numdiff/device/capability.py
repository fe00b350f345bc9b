"""NUMDIFF_CAPABILITY: a GPU that acts as one of a lower compute capability, to measure what such a
card would run.

    NUMDIFF_CAPABILITY=8.0 numdiff bench step unet     launchers choose, and plan shared memory, as on an A100

Kernels are still compiled for the card that is there: its clock, its memory and its number of
multiprocessors stay.
"""

import os

from ..emulator.memory_spaces import DYNAMIC_SHARED
from ..errors import UsageError

VARIABLE = "NUMDIFF_CAPABILITY"
MINIMUM_CAPABILITY = (7, 5)  # what CUDA 13's compiler still targets


def dotted(capability):
    """(9, 0) as "9.0"."""
    return ".".join(map(str, capability[:2]))


def shared_of(capability):
    """Bytes of shared memory that a block may have on cards of a known compute capability."""
    return DYNAMIC_SHARED[capability] << 10


def acting_capability(own):
    """The compute capability that NUMDIFF_CAPABILITY names, for a card whose own is given; unset:
    its own.

    Raises a `UsageError` for a value that is malformed, unknown, below 7.5 or above the card's.
    """
    text, own = os.environ.get(VARIABLE, "").strip(), tuple(own[:2])
    if not text or text == dotted(own):
        return own
    known = {dotted(capability): capability for capability in DYNAMIC_SHARED}
    fitting = [
        name for name, capability in known.items() if MINIMUM_CAPABILITY <= capability <= own
    ]
    if text not in known:
        why = "is not a compute capability that numdiff knows"
    elif known[text] < MINIMUM_CAPABILITY:
        why = f"is below {dotted(MINIMUM_CAPABILITY)} (Turing), the lowest that numdiff supports"
    else:
        why = f"is above this GPU's own, {dotted(own)}"
    if text not in fitting:
        raise UsageError(
            f"{VARIABLE}={text[:20]} {why}: set one of {', '.join(fitting)}, or unset it."
        )
    return known[text]
