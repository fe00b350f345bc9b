"""The arrays that a kernel sees over a memory.

Where accesses are checked, by access.py, it is a `CheckedArray`. Where they are not, it is a plain NumPy view, or an
`IntegerArray` of integers, whose elements must be Numba's, or a `RecordArray` of a structured type.
"""
import functools
import math

import numpy as np

from .faults import Unsupported
from .values import INTEGER_TYPES, dtype_of, scalar


class CheckedArray:
    """An array whose elements are read and written through the emulator's checks."""

    __slots__ = ("memory", "offset", "shape", "strides", "dtype", "itemsize", "shift", "ndim", "flat", "kind", "cast",
                 "exact", "name", "machine", "size", "rows", "columns", "row", "column")

    def __init__(self, machine, memory, offset, shape, dtype, strides=None, name=""):
        self.machine, self.memory, self.offset, self.shape, self.dtype = machine, memory, offset, shape, dtype
        self.itemsize = itemsize = dtype.itemsize
        self.ndim, self.size = len(shape), math.prod(shape)
        self.strides = strides or ((itemsize,) if len(shape) == 1 else contiguous_strides(shape, itemsize))
        self.shift = itemsize.bit_length() - 1  # sizes are powers of two
        self.rows, self.columns, self.row, self.column = 0, 0, 0, 0  # lengths and strides of one or two dimensions
        self.kind, self.cast, self.exact = _element(dtype)
        if dtype.names:
            pass  # records take the long way, through `locate`
        elif self.ndim == 1:
            (self.rows,), (self.row,) = shape, self.strides
        elif self.ndim == 2:
            (self.rows, self.columns), (self.row, self.column) = shape, self.strides
        self.flat = memory.view(dtype)
        self.name = name or memory.name

    @property
    def nbytes(self):
        return self.size * self.itemsize

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index):
        return self.machine.access.load(self, index, self.machine.site_here())

    def __setitem__(self, index, value):
        self.machine.access.store(self, index, value, self.machine.site_here())

    @property
    def T(self):
        return CheckedArray(self.machine, self.memory, self.offset, self.shape[::-1], self.dtype, self.strides[::-1],
                            self.name)

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if -1 in shape:
            shape = tuple(self.size // -math.prod(shape) if n == -1 else n for n in shape)
        return CheckedArray(self.machine, self.memory, self.offset, tuple(shape), self.dtype, None, self.name)

    def ravel(self):
        return self.reshape(self.size)

    def view(self, dtype):
        dtype = dtype_of(dtype)
        last = self.shape[-1] * self.itemsize // dtype.itemsize
        return CheckedArray(self.machine, self.memory, self.offset, (*self.shape[:-1], last), dtype, None, self.name)

    def fill(self, value):
        for index in np.ndindex(self.shape):
            self[index] = value

    def part(self, index, inside=True):
        """The view that a partial index, or one with slices, names; an IndexError where it lies outside of the array,
        unless `inside` says that only the view's shape matters."""
        index = index if isinstance(index, tuple) else (index,)
        index = tuple(slice(0, 0, 1) if i is None else i for i in index)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = index[:at] + (slice(None),) * (self.ndim - len(index) + 1) + index[at + 1:]
        offset, shape, strides = self.offset, [], []
        for axis, (n, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            i = index[axis] if axis < len(index) else slice(None)
            if isinstance(i, slice):
                start, stop, step = i.indices(n)
                offset += start * stride
                shape.append(max(0, -(-(stop - start) // step)))
                strides.append(stride * step)
            else:
                i = int(i)
                if inside and not -n <= i < n:
                    raise IndexError(f"index {i} is outside of axis {axis} of length {n}")
                offset += (i + n if i < 0 else i) * stride
        return CheckedArray(self.machine, self.memory, offset, tuple(shape), self.dtype, tuple(strides), self.name)

    def __repr__(self):
        return f"{self.memory.space} array {self.name} {self.dtype}{self.shape}"


class Record:
    """One element of a structured array: its fields are elements of their own."""

    __slots__ = ("_array", "_offset")

    def __init__(self, array, offset):
        object.__setattr__(self, "_array", array)
        object.__setattr__(self, "_offset", offset)

    def _field(self, name):
        if name not in self._array.dtype.fields:
            raise AttributeError(f"{self._array.name} has no field {name}: its fields are "
                                 f"{', '.join(self._array.dtype.names)}")
        array, (dtype, offset, *_) = self._array, self._array.dtype.fields[name]
        base, shape = dtype.subdtype or (dtype, ())
        if (self._offset + offset) % base.itemsize:
            raise Unsupported(f"the emulator does not know fields that are not aligned, as {name} of {array.name}: "
                              "make the dtype with align=True")
        return CheckedArray(array.machine, array.memory, self._offset + offset, shape, base, None,
                            f"{array.name}.{name}")

    def __getitem__(self, name):
        field = self._field(name)
        return field if field.ndim else field[()]

    def __setitem__(self, name, value):
        self._field(name)[()] = value

    def assign(self, other):
        for name in self._array.dtype.names:
            self[name] = other[name]

    __getattr__, __setattr__ = __getitem__, __setitem__


def plain_array(data):
    """NumPy memory as an unchecked kernel sees it."""
    if data.dtype.names:
        return RecordArray(data)
    return IntegerArray(data) if data.dtype.name in INTEGER_TYPES else data


class IntegerArray:
    """An array of integers in a kernel that is not checked: elements come as Numba's integers and wrap when stored."""

    __slots__ = ("data", "kind", "cast")

    def __init__(self, data):
        self.data = data
        self.kind, self.cast, _ = _element(data.dtype)

    def __getitem__(self, index):
        value = self.data[index]
        return IntegerArray(value) if value.__class__ is np.ndarray else self.kind(value)

    def __setitem__(self, index, value):
        self.data[index] = value.data if value.__class__ is IntegerArray else self.cast(value)

    def __len__(self):
        return len(self.data)

    def __getattr__(self, name):
        return getattr(self.data, name)


class RecordArray:
    """A structured array in a kernel that is not checked."""

    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data

    def __getitem__(self, index):
        value = self.data[index]
        return PlainRecord(value) if isinstance(value, np.void) else RecordArray(value)

    def __setitem__(self, index, value):
        self.data[index] = value._data if value.__class__ is PlainRecord else value

    def __len__(self):
        return len(self.data)

    def __getattr__(self, name):
        return getattr(self.data, name)


class PlainRecord:
    """One element of a structured array in a kernel that is not checked."""

    __slots__ = ("_data",)

    def __init__(self, data):
        object.__setattr__(self, "_data", data)

    def __getitem__(self, name):
        if name not in self._data.dtype.fields:
            raise AttributeError(f"the record has no field {name}: its fields are {', '.join(self._data.dtype.names)}")
        value = self._data[name]
        return plain_array(value) if isinstance(value, np.ndarray) else scalar(value)

    def __setitem__(self, name, value):
        self._data[name] = value

    __getattr__, __setattr__ = __getitem__, __setitem__


@functools.cache
def _element(dtype):
    """How an element is read, cast and stored: a `CheckedArray`'s kind, cast, exact (needs no cast)."""
    integer = INTEGER_TYPES.get(dtype.name)
    return (None, dtype.type, dtype.type) if integer is None else (integer.kind, integer.cast, integer.whole)


def contiguous_strides(shape, itemsize):
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
