"""How the backward pass is scheduled on a GPU: hooks that the tape calls, which change no result.

Small weight-gradient kernels run on a side stream, concurrently with the backward pass
(device/side_stream.py). Second passes of split sums are deferred and run together
(kernels/reduce/second_pass.py). Weight gradients that several layers share are deferred until the last of
them (deferred_gradients.py).
"""

import contextlib

from ..device.side_stream import wait_for, wait_if_full
from ..kernels.reduce.second_pass import deferred_reductions
from .deferred_gradients import flushed_at_end


@contextlib.contextmanager
def backward_pass():
    """Context of a backward pass: when it ends, every gradient of a parameter is complete."""
    with deferred_reductions(), flushed_at_end():
        yield


def before_operation(arrived):
    """Wait for the gradients that the next operation of the backward pass reads."""
    wait_if_full()
    wait_for(arrived if isinstance(arrived, list) else (arrived,))
