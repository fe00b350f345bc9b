"""`a is b` in a kernel, which Numba compiles to a comparison of types and of values.

Numbers and tuples are the same if they have one type and are equal: a boolean is True where it is
true, and an int32 is no int64. Arrays are the same if they have one type and one place. None is
itself alone. `tests/emulator/test_identity.py` compares this with what Numba compiles.
"""

import numpy as np

from .arithmetic import LETTER
from .arrays import CheckedArray, IntegerArray, RecordArray
from .values import bfloat16


def identical(a, b):
    """Whether Numba compiles `a is b` to True."""
    if a is None or b is None:
        return a is b
    kind = LETTER.get(a.__class__)
    if kind is not None:
        one_type = kind == LETTER.get(b.__class__) and bfloat16 not in {a.__class__} ^ {b.__class__}
        return one_type and bool(a == b)
    if isinstance(a, tuple):
        return a.__class__ is b.__class__ and len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, str):  # Numba compares none, and takes each for another one
        return False
    place = place_of(a)
    return a is b if place is None else place == place_of(b)


def differ(a, b):
    return not identical(a, b)


def place_of(array):
    """(memory, shape, strides, dtype) of an array as a kernel holds it; None of anything else."""
    if isinstance(array, CheckedArray):
        return (id(array.memory), array.offset), array.shape, array.strides, array.dtype
    data = array.data if isinstance(array, (IntegerArray, RecordArray)) else array
    if isinstance(data, np.ndarray):
        return data.ctypes.data, data.shape, data.strides, data.dtype
    return None


IDENTITIES = {"Is": identical, "IsNot": differ}
