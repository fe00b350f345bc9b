"""`numdiff.device` in a browser, where there is neither a GPU nor Numba: what the chapters' pages
import from it."""

import numpy as np

from numdiff.dtypes import is_half
from numdiff.emulator import Unsupported, twin


def why_no_gpu():
    return "A browser runs the emulator only."


def load4(array, index):
    """(a[i], a[i+1], a[i+2], a[i+3]) of a contiguous array; `index` must be a multiple of 4."""
    raise Unsupported("load4 is for kernels.")


def store4(array, index, a, b, c, d):
    """array[i], …, array[i+3] = a, b, c, d of a contiguous array; `index` must be a multiple of 4."""
    raise Unsupported("store4 is for kernels.")


@twin(load4)
def _load4(machine, array, index):
    values = machine.access.load_vector(array, index, 4)
    return tuple(map(np.float32, values)) if is_half(array.dtype) else values


@twin(store4)
def _store4(machine, array, index, *values):
    machine.access.store_vector(array, index, values)


def _needs_device(*arguments, **named):
    raise Unsupported("This needs numdiff to be installed.")


download = get_gpu = launch = synchronize = upload = tensor_map = _needs_device
