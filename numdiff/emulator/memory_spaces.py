"""The memory of a kernel's arrays: a block's shared memory, a thread's local arrays, the constants
of a module."""

import linecache
import math
import re

import numpy as np

from .arrays import CheckedArray, checked_array, contiguous_strides, plain_array
from .faults import LaunchRefused, Unsupported
from .memory import CONSTANT, GLOBAL, LOCAL, SHARED, Memory
from .values import Literal

STATIC_SHARED = 48 << 10  # bytes of shared memory that arrays of fixed size may take
DYNAMIC_SHARED = {
    (7, 0): 96,
    (7, 2): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    # KiB a block, by capability
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}
# where shared memory begins in its address space; all of it ends below 2**18, as on a GPU
STATIC_BASE = 1 << 10
# (id of a code object, instruction) -> (the name that its line assigns to, the code object)
_NAMES = {}


class MemorySpaces:
    """The part of an `Emulator` that makes arrays and finds them again by their addresses."""

    @property
    def shared_limit(self):
        """Bytes of shared memory that a block may have."""
        return DYNAMIC_SHARED.get(self.cc, 227 if self.cc >= (9, 0) else 48) << 10

    def block_starts(self, block):
        block.static = Memory(SHARED, 0, "static", STATIC_BASE)
        # for static arrays, not yet known
        room = max(0, min(STATIC_SHARED, self.shared_limit - self.dynamic_shared))
        block.dynamic = Memory(
            SHARED, self.dynamic_shared, "dynamic", STATIC_BASE + -(-room // 1024) * 1024
        )
        block.static.met = block.dynamic.met = len(block.cluster.blocks) > 1
        if self.film is not None:
            self.film.block_starts(block)

    def shared_array(self, shape, dtype, alignment, frame):
        """The block's shared array made at this place of the code (one for all its threads, however
        often).

        In a device function there is one for each list of the types that it is called with, as
        Numba compiles it for each; a literal is a separate type.

        It has the same address in all blocks of a cluster, whichever makes it first.
        """
        block, key = self.thread.block, (frame.f_code, frame.f_lasti)
        if frame.f_code is not self.entry:
            key = *key, types_given(frame)
        made = block.shared.get(key)
        if made is not None:
            return made
        shape = tuple(int(n) for n in shape) if isinstance(shape, (tuple, list)) else (int(shape),)
        name = _assigned_name(frame)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if shape == (0,):
            memory, offset = block.dynamic, 0
            shape = (self.dynamic_shared // dtype.itemsize,)
        else:
            memory = block.static
            align = max(int(alignment or 0), 16 if size >= 16 else dtype.itemsize)
            offset = block.cluster.offsets.get(key)
            if offset is None:
                offset = block.cluster.offsets[key] = (
                    -(-(STATIC_BASE + memory.size) // align) * align - STATIC_BASE
                )
                for each in block.cluster.blocks:
                    each.static.grow(offset + size, STATIC_SHARED)
            if memory.size > STATIC_SHARED:
                raise LaunchRefused(
                    f"{self.kernel}: its shared arrays of fixed size take {memory.size} bytes with "
                    f"{name}, the limit is {STATIC_SHARED}; take them from dynamic shared memory."
                )
            if memory.size + self.dynamic_shared > self.shared_limit:
                raise LaunchRefused(
                    f"{self.kernel}: {memory.size} bytes of static and {self.dynamic_shared} of "
                    f"dynamic shared memory are more than the {self.shared_limit} of a block."
                )
        if self.checked:
            made = checked_array(self, memory, offset, shape, dtype, name=name)
            if memory is block.dynamic:
                memory.seen_as(made.itemsize)
        else:
            data = memory.bytes[
                offset : offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            ]
            if memory is block.static:  # a separate array, found again by its address
                data = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
                block.state.setdefault("static", []).append((STATIC_BASE + offset, data))
                data = data[:size]
            made = plain_array(data.view(dtype).reshape(shape))
        block.shared[key] = made
        if self.film is not None:
            self.film.array(made)
        return made

    def element_name(self, memory, offset):
        """Which element of which array of the launch a byte is; None if no array has it."""
        if memory.space == GLOBAL:
            arrays = [(array, "") for array in self._arguments]
        else:
            own = self.thread.block
            arrays = [
                (array, "" if block is own else f" of block {block.index}")
                for block in own.cluster.blocks
                for array in block.shared.values()
            ]
        for array, whose in arrays:
            if getattr(array, "memory", None) is memory:
                rest, at = offset - array.offset, [0] * array.ndim
                for axis in sorted(range(array.ndim), key=lambda k, array=array: -array.strides[k]):
                    if array.strides[axis] > 0:
                        at[axis], rest = divmod(rest, array.strides[axis])
                if 0 <= rest < array.itemsize and all(
                    0 <= i < n for i, n in zip(at, array.shape, strict=True)
                ):
                    return f"{array.name}[{', '.join(str(i) for i in at)}]{whose}"
        return None

    def is_shared(self, array):
        """Whether an array is in shared memory."""
        try:
            self.shared_address(array)
        except Unsupported:
            return False
        return not isinstance(array, CheckedArray) or array.memory.space is SHARED

    def shared_address(self, array):
        """The address of a shared array's first element in the shared state space."""
        if isinstance(array, CheckedArray):
            return array.memory.address + array.offset
        data = getattr(array, "data", array) if not isinstance(array, np.ndarray) else array
        pointer = data.ctypes.data
        block = self.thread.block
        start = block.dynamic.bytes.ctypes.data
        if start <= pointer < start + max(len(block.dynamic.bytes), 1):
            return block.dynamic.address + pointer - start
        for address, part in block.state.get("static", ()):
            if part.ctypes.data <= pointer < part.ctypes.data + len(part):
                return address + pointer - part.ctypes.data
        raise Unsupported("an address was asked of an array that is not in shared memory.")

    def shared_memory(self, address, block=None):
        """(Memory, offset) of an address in the shared state space of a block (the current one);
        None outside of it."""
        block, address = block or self.thread.block, int(address)
        if block.dynamic.address <= address:
            memory = block.dynamic
        elif self.checked:
            memory = block.static
        else:
            for start, part in block.state.get("static", ()):
                if start <= address < start + len(part):
                    memory = block.state.setdefault(
                        ("memory", start), Memory(SHARED, len(part), "", start, part, True)
                    )
                    return memory, address - start
            return None
        offset = address - memory.address
        return (memory, offset) if 0 <= offset < max(memory.size, 1) else None

    def local_array(self, shape, dtype, frame):
        """A thread's local array."""
        shape = tuple(int(n) for n in shape) if isinstance(shape, (tuple, list)) else (int(shape),)
        size = math.prod(shape) * dtype.itemsize
        if not self.checked:
            return plain_array(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape))
        memory = Memory(LOCAL, size, _assigned_name(frame))
        memory.owner = id(frame)
        made = checked_array(self, memory, 0, shape, dtype)
        if self.film is not None:
            self.film.array(made)
        return made

    def captured_array(self, name, array):
        """An array on the device that a kernel finds outside of itself."""
        made = self._captured.get(array)
        if made is None:
            made = self.argument(array, name, [])
            if self.checked:
                self._captured.put(array, made)
        return made

    def constant_array(self, name, array):
        """A NumPy array that a kernel takes from its module, frozen as Numba freezes it."""
        if not isinstance(array, np.ndarray):
            return array
        made = self._constants.get(array)
        if made is None:
            data = np.ascontiguousarray(array).copy()
            if self.checked:
                memory = Memory(
                    CONSTANT, data.nbytes, name, 0, data.reshape(-1).view(np.uint8), valid=True
                )
                made = checked_array(self, memory, 0, data.shape, data.dtype, name=name)
            else:
                data.flags.writeable = False
                made = plain_array(data)
            self._constants.put(array, made)
        return made


def types_given(frame):
    """The types of the arguments of the device function that a frame runs."""
    code, found = frame.f_code, frame.f_locals
    return tuple(
        map(_type_of, map(found.get, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]))
    )


def _type_of(value):
    kind = value.__class__
    if isinstance(value, type):
        return value
    if kind is Literal:
        return (int(value),)
    if kind is tuple:
        return tuple(map(_type_of, value))
    # threads may hold one number as different types
    if isinstance(value, (int, float, np.number, np.bool_)):
        return "real" if isinstance(value, (float, np.floating)) else "integer"
    dtype = getattr(value, "dtype", None)
    if not hasattr(value, "strides") or dtype is None:
        return kind
    if value.strides == contiguous_strides(value.shape, dtype.itemsize):
        return dtype, value.ndim, "C"
    return (
        dtype,
        value.ndim,
        "F"
        if value.strides[::-1] == contiguous_strides(value.shape[::-1], dtype.itemsize)
        else "A",
    )


def _assigned_name(frame):
    """The name to which the line of a frame assigns, for messages."""
    key = id(frame.f_code), frame.f_lasti
    if key not in _NAMES:
        found = re.match(
            r"\s*(\w+)\s*=", linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        )
        _NAMES[key] = found.group(1) if found else "array", frame.f_code
    return _NAMES[key][0]
