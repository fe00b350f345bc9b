"""What the current thread is recording: its tapes, the modules that it executes, and results that
are not needed."""

import contextlib

import numpy as np

from ..device import download
from ..device.threads import ThreadStack
from ..errors import shown
from ..float8 import numbers_of
from ..kernels.concat import Pair

# the tapes that are recording in this thread, innermost last; None: nothing is recorded
tapes = ThreadStack()
# full names of the modules that this thread is executing, innermost last, to name records
scope = ThreadStack()
_unwanted = (
    ThreadStack()
)  # weights of the linear layers whose results no operation reads, innermost last


def is_recording():
    """Whether a tape of this thread is active; if not, only results are needed."""
    return bool(tapes) and tapes[-1] is not None


def is_training():
    """Whether a tape of this thread is active, or the operations of one are to be recorded later
    (recompute.py)."""
    return bool(tapes)


@contextlib.contextmanager
def unwanted_from(weight):
    """Context in which no operation reads the result of the linear layer of this weight."""
    _unwanted.append(weight)
    try:
        yield
    finally:
        _unwanted.pop()


def is_wanted(weight):
    """Whether a linear layer's result is needed: not where it is recomputed for its backward alone
    (recompute.py)."""
    return not (_unwanted and _unwanted[-1] is weight)


def scoped(name):
    """The name of an operation, after that of the module that executes it."""
    return f"{scope[-1]} {name}" if scope and scope[-1] else name


def check_played_back(records, output, gradient):
    """Raise a `ValueError` where a tape with these records cannot be played back from `output` with
    this gradient."""
    if getattr(output, "slot", None) is None:
        raise ValueError(
            "backward() needs an output that depends on a parameter or on a tensor made with "
            "requires_grad=True while the tape was active"
        )
    if not any(
        output.slot is record.output or output.slot in getattr(record.output, "slots", ())
        for record in reversed(records)
    ):
        raise ValueError(
            "this tape does not hold the operation that gave the output: a tape can be played back only "
            "once, and only from what was computed while it was active; record the forward pass again"
        )
    if gradient is not None and getattr(gradient, "shape", None) != output.shape:
        raise ValueError(
            f"the gradient that arrives at an output has its shape, {tuple(output.shape)}, and not "
            f"{getattr(gradient, 'shape', None) or 'that of ' + shown(gradient)}"
        )


def check_finite(array, name):
    """Raise a `FloatingPointError` that names the tensor if it holds an infinity or a NaN."""
    parts = [download(part) for part in (array if isinstance(array, Pair) else [array])]
    parts = [numbers_of(part) if part.dtype == np.uint8 else part for part in parts]
    bad = sum(values.size - np.count_nonzero(np.isfinite(values)) for values in parts)
    if bad:
        raise FloatingPointError(
            f"{name} is the first non-finite tensor ({bad} of {array.size} values)"
        )
