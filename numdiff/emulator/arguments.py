"""A launch's arguments: what the host gives a kernel, as the kernel holds it."""

import enum
import inspect

import numpy as np

from . import values
from .arrays import StructureElement, checked_array, plain_array
from .device_arrays import EmulatedArray, on_device
from .faults import LaunchRefused, Unsupported
from .memory import ALIGNMENT, GLOBAL, Memory
from .signatures import is_hint

VARARGS = inspect.CO_VARARGS


class Arguments:
    """The part of an `Emulator` that takes what a kernel is launched with."""

    def _refuse_arguments(self, kernel, python, given):
        """Raise where a kernel cannot be called so: a device function, too few arguments or too
        many."""
        if getattr(kernel, "targetoptions", {}).get("device"):
            raise LaunchRefused(
                f"{self.kernel} is a device function: launch a kernel that calls it."
            )
        code, optional = python.__code__, len(python.__defaults__ or ())
        names = code.co_varnames[: code.co_argcount]
        if not (
            len(names) - optional <= len(given)
            and (len(given) <= len(names) or code.co_flags & VARARGS)
        ):
            raise LaunchRefused(
                f"{self.kernel} takes {len(names)} argument{'s' * (len(names) != 1)} "
                f"({', '.join(names)}), {len(given)} were given."
            )

    def argument(self, value, name, back):
        """A launch argument as the kernel holds it; arrays that cannot be used in place are noted
        in `back`."""
        if is_hint(value):
            value = self._hinted(type(value).__name__, value.value, back)
        # a record; what a kernel writes into it comes back
        if type(value) is np.void and value.dtype.names:
            data = np.array(value)
            back.append((_Fields(value), data))
            array = self.argument(data, name, back)
            return array[()] if not self.checked else StructureElement(array, array.offset)
        value = on_device(value)
        refused = None if hasattr(value, "emulated_memory") else why_refused(value)
        if refused:
            raise LaunchRefused(
                f"{self.kernel}: argument {name} is {refused}; give it NumPy arrays, numbers, or "
                "tuples of them."
            )
        strides = None
        if hasattr(value, "emulated_memory"):
            memory, offset, shape, dtype, *strides = value.emulated_memory()
            strides = strides[0] if strides else None
        elif isinstance(value, np.ndarray):
            if not self.checked:
                return plain_array(value)
            memory, offset, strides = self._host_memory(value, name, back)
            shape, dtype = value.shape, value.dtype
        elif isinstance(value, tuple):
            names = getattr(value, "_fields", [name] * len(value))
            return getattr(type(value), "_make", tuple)(
                [self.argument(v, n, back) for v, n in zip(value, names, strict=True)]
            )
        elif hasattr(value, "copy_to_host"):
            raise Unsupported(
                f"argument {name} is on a real GPU; give the emulator NumPy arrays or its own."
            )
        else:
            return values.scalar(value)
        if not self.checked:
            return plain_array(np.ndarray(shape, dtype, memory.bytes, offset, strides))
        made = checked_array(self, memory, offset, tuple(shape), np.dtype(dtype), strides, name)
        memory.seen_as(made.itemsize)
        self._memories[id(memory)] = memory
        self._arguments.append(made)
        return made

    @staticmethod
    def _hinted(hint, array, back):
        """The kernel's argument for `cuda.In(array)`: a copy; of `cuda.Out(array)`: uninitialised
        memory."""
        if not isinstance(array, np.ndarray) or hint == "InOut":
            return array
        if hint == "In":
            return array.copy(order="K")
        made = EmulatedArray(array.shape, array.dtype, None, "F" if array.flags.fnc else "C")
        back.append((array, made.on_host()))
        return made

    def _host_memory(self, array, name, back):
        """(memory, offset, strides) of a NumPy array; two that share their bytes share a memory
        too."""
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        whole = owner if owner.flags.c_contiguous else owner.T
        offset = array.ctypes.data - owner.ctypes.data
        if not whole.flags.c_contiguous or any(
            n % array.itemsize for n in (offset, *array.strides)
        ):
            data = np.ascontiguousarray(array).reshape(array.shape)
            back.append((array, data))
            return (
                Memory(
                    GLOBAL,
                    data.nbytes,
                    name,
                    aligned(data),
                    data.reshape(-1).view(np.uint8),
                    True,
                ),
                0,
                None,
            )
        memory = self._hosts.get(id(owner))
        if memory is None:
            data = whole.reshape(-1).view(np.uint8)
            memory = self._hosts[id(owner)] = Memory(
                GLOBAL, data.nbytes, name, aligned(owner), data, valid=True
            )
        return memory, offset, array.strides


def aligned(array):
    """The address of a host array's copy on a GPU, which is a multiple of `ALIGNMENT`; the array's own
    address need not be."""
    return -(-array.ctypes.data // ALIGNMENT) * ALIGNMENT


class _Fields:
    """A record of the host, into which the fields of an array of one record are copied."""

    def __init__(self, record):
        self._record = record

    def __setitem__(self, index, data):
        for name in data.dtype.names:
            self._record[name] = data[()][name]


def why_refused(value):
    """The kind of a launch argument that no kernel takes, in words; None for a valid one."""
    if isinstance(value, (np.ndarray, np.generic)):
        what = "an array" if isinstance(value, np.ndarray) else "a value"
        if value.dtype.kind in "OSU":
            return f"{what} of type {value.dtype}"
        return (
            None
            if value.dtype.isnative
            else f"{what} of type {value.dtype}, whose bytes are in another order"
        )
    if isinstance(value, int) and not -values.HALF64 <= value <= values.BITS64:
        return "an integer of more than 64 bits"
    if (
        value is None
        or isinstance(value, (int, float, complex, tuple, enum.Enum))
        or any(hasattr(value, name) for name in ("copy_to_host", "__cuda_array_interface__"))
    ):
        return None
    return f"of type {type(value).__name__}"
