"""The arrays that a kernel sees over a memory.

Where accesses are checked, by access.py, it is a `CheckedArray`. Where they are not, it is a plain
NumPy view, or an `IntegerArray` of integers, whose elements must be Numba's, or a `RecordArray` of
a structured type.
"""

import functools
import math

import numpy as np

from .memory import LOCAL, READ_SITE, Memory
from .values import INTEGER_TYPES, dtype_of, scalar


class CheckedArray:
    """An array whose elements are read and written through the emulator's checks."""

    __slots__ = (
        "memory",
        "offset",
        "shape",
        "strides",
        "dtype",
        "itemsize",
        "shift",
        "ndim",
        "flat",
        "kind",
        "cast",
        "exact",
        "name",
        "machine",
        "size",
        "rows",
        "columns",
        "row",
        "column",
        "_length",
    )

    def __init__(self, machine, memory, offset, shape, dtype, strides=None, name=""):
        self.machine, self.memory, self.offset, self.shape, self.dtype = (
            machine,
            memory,
            offset,
            shape,
            dtype,
        )
        self.itemsize = itemsize = dtype.itemsize
        self.ndim, self.size = len(shape), math.prod(shape)
        self.strides = strides or (
            (itemsize,) if len(shape) == 1 else contiguous_strides(shape, itemsize)
        )
        self.shift = itemsize.bit_length() - 1  # sizes are powers of two
        # lengths and strides of one or two dimensions
        self._length, self.rows, self.columns, self.row, self.column = 0, 0, 0, 0, 0
        self.kind, self.cast, self.exact = _element(dtype)
        if dtype.names:
            pass  # records take the long way, through `locate`
        elif self.ndim == 1:
            (self._length,), (self.row,) = shape, self.strides
        elif self.ndim == 2:
            (self.rows, self.columns), (self.row, self.column) = shape, self.strides
        self.flat = memory.view(dtype)
        self.name = name or memory.name

    @property
    def nbytes(self):
        return self.size * self.itemsize

    def field(self, name):
        """The field of all records as an array; of complex numbers "real" and "imag"."""
        if self.dtype.kind == "c":
            half = self.itemsize // 2
            self.memory.seen_as(self.itemsize)
            self.memory.seen_as(half)
            return array_of(
                self,
                self.offset + half * (name == "imag"),
                self.shape,
                np.dtype(f"f{half}"),
                self.strides,
            )
        if name not in (self.dtype.fields or ()):
            raise AttributeError(
                f"{self.name} has no field {name}: its fields are "
                f"{', '.join(self.dtype.names or ())}"
            )
        dtype, offset, *_ = self.dtype.fields[name]
        base, shape = dtype.subdtype or (dtype, ())
        return array_of(
            self,
            self.offset + offset,
            (*self.shape, *shape),
            base,
            (*self.strides, *contiguous_strides(shape, base.itemsize)),
            f"{self.name}.{name}",
        )

    @property
    def real(self):
        return self if self.dtype.kind != "c" else self.field("real")

    @property
    def imag(self):
        return self.field("imag")

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index):
        return self.machine.access.load(self, index, self.machine.site_here() << READ_SITE)

    def __setitem__(self, index, value):
        self.machine.access.store(self, index, value, self.machine.site_here())

    @property
    def T(self):
        return array_of(self, self.offset, self.shape[::-1], self.dtype, self.strides[::-1])

    def transpose(self, *axes):
        axes = (
            axes[0]
            if len(axes) == 1 and isinstance(axes[0], tuple)
            else axes or range(self.ndim)[::-1]
        )
        return array_of(
            self,
            self.offset,
            tuple(self.shape[k] for k in axes),
            self.dtype,
            tuple(self.strides[k] for k in axes),
        )

    def copy(self):
        """A copy in memory that the thread allocates."""
        memory = Memory(LOCAL, self.nbytes, self.name)
        made = checked_array(self.machine, memory, 0, self.shape, self.dtype)
        made[(slice(None),) * self.ndim] = self
        return made

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if -1 in shape:
            shape = tuple(self.size // -math.prod(shape) if n == -1 else n for n in shape)
        return array_of(self, self.offset, tuple(shape), self.dtype)

    def ravel(self):
        return self.reshape(self.size)

    def view(self, dtype):
        dtype = dtype_of(dtype)
        last = self.shape[-1] * self.itemsize // dtype.itemsize
        self.memory.seen_as(self.itemsize)
        self.memory.seen_as(dtype.itemsize)
        return array_of(self, self.offset, (*self.shape[:-1], last), dtype)

    def fill(self, value):
        for index in np.ndindex(self.shape):
            self[index] = value

    def part(self, index, inside=True):
        """The view that a partial index, or one with slices, names; an IndexError if it is outside
        of the array, unless `inside` says that only the view's shape matters."""
        index = index if isinstance(index, tuple) else (index,)
        index = tuple(slice(0, 0, 1) if i is None else i for i in index)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = index[:at] + (slice(None),) * (self.ndim - len(index) + 1) + index[at + 1 :]
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
        return array_of(self, offset, tuple(shape), self.dtype, tuple(strides))

    def __repr__(self):
        return f"{self.memory.space} array {self.name} {self.dtype}{self.shape}"


class RecordsArray(CheckedArray):
    """One of records. Its class has a `__getattr__`, which makes Python look up every attribute
    more slowly."""

    __slots__ = ()

    def __getattr__(self, name):  # of what is not found: a field, for all records at once
        if name.startswith("__"):
            raise AttributeError(f"{self!r} has no {name}")
        return self.field(name)

    def __getitem__(self, index):
        found = self.machine.access.locate(self, index, self.machine.site_here(), "reads")
        return self.machine.access.outside(self, index) if found is None else found

    def __setitem__(self, index, value):
        found = self.machine.access.locate(self, index, self.machine.site_here(), "writes")
        if found.__class__ is StructureElement:
            found.assign(value)
        elif found is not None:
            for at in np.ndindex(found.shape):
                found[at] = value[at] if getattr(value, "shape", ()) else value


class PackedArray(CheckedArray):
    """One whose elements are not where their size would have them: a field of records without
    padding."""

    __slots__ = ()

    def __getitem__(self, index):
        access, site = self.machine.access, self.machine.site_here()
        offset = access.locate(self, index, site, "reads")
        if offset.__class__ is not int:
            return access.outside(self, index) if offset is None else offset
        value = (
            access.read_bytes(self.memory, offset, self.itemsize, site, self.itemsize)
            .copy()
            .view(self.dtype)[0]
        )
        return value if self.kind is None else self.kind(value)

    def __setitem__(self, index, value):
        access, site = self.machine.access, self.machine.site_here()
        offset = access.locate(self, index, site, "writes")
        if offset.__class__ is int:
            data = np.array([self.cast(value)], self.dtype).view(np.uint8)
            access.write_bytes(self.memory, offset, data, site, self.itemsize)
        elif offset is not None:
            for at in np.ndindex(offset.shape):
                offset[at] = value[at] if getattr(value, "shape", ()) else value


def array_of(array, offset, shape, dtype, strides=None, name=""):
    """Another array over an array's memory."""
    strides = contiguous_strides(shape, dtype.itemsize) if strides is None else strides
    size, places = dtype.itemsize, (offset, *strides)
    aligned = size & size - 1 == 0 and not any(place % size for place in places)
    kind = RecordsArray if dtype.names else CheckedArray if aligned else PackedArray
    return kind(array.machine, array.memory, offset, shape, dtype, strides, name or array.name)


def checked_array(machine, memory, offset, shape, dtype, strides=None, name=""):
    """The array that a kernel sees over a memory of its own, where accesses are checked."""
    return (RecordsArray if dtype.names else CheckedArray)(
        machine, memory, offset, shape, dtype, strides, name
    )


class StructureElement:
    """One element of a structured array: its fields are elements of their own."""

    __slots__ = ("_array",)

    def __init__(self, array, offset):
        object.__setattr__(self, "_array", array_of(array, offset, (), array.dtype))

    @property
    def dtype(self):
        return self._array.dtype

    def __getitem__(self, name):
        if name.__class__ is not str:  # by its number, as Numba has it of literals
            name = self._array.dtype.names[name]
        field = self._array.field(name)
        return field if field.ndim else field[()]

    def __setitem__(self, name, value):
        field = self._array.field(name if name.__class__ is str else self._array.dtype.names[name])
        field[(slice(None),) * field.ndim] = value

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
    """An array of integers in a kernel that is not checked: elements come as Numba's integers and
    wrap when stored."""

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
        return PlainRecord(value) if isinstance(value, np.void) else plain_array(value)

    def __setitem__(self, index, value):
        self.data[index] = value._data if value.__class__ is PlainRecord else value

    def __len__(self):
        return len(self.data)

    def __getattr__(self, name):
        return (
            plain_array(self.data[name])
            if name in self.data.dtype.fields
            else getattr(self.data, name)
        )


class PlainRecord:
    """One element of a structured array in a kernel that is not checked."""

    __slots__ = ("_data",)

    def __init__(self, data):
        object.__setattr__(self, "_data", data)

    @property
    def dtype(self):
        return self._data.dtype

    def _kind(self, name):
        """(the field's name, what converts a number to its type)"""
        if name.__class__ is not str:
            name = self._data.dtype.names[name]
        if name not in self._data.dtype.fields:
            raise AttributeError(
                f"the record has no field {name}: its fields are {', '.join(self._data.dtype.names)}"
            )
        dtype = self._data.dtype.fields[name][0]
        return name, None if dtype.names or dtype.subdtype else _element(dtype)[1]

    def __getitem__(self, name):
        value = self._data[self._kind(name)[0]]
        if isinstance(value, np.void):
            return PlainRecord(value)
        return plain_array(value) if isinstance(value, np.ndarray) else scalar(value)

    def __setitem__(self, name, value):
        name, cast = self._kind(name)
        value = (
            value._data
            if value.__class__ is PlainRecord
            else getattr(value, "data", value)
            if cast is None
            else cast(value)
        )
        self._data[name] = value

    __getattr__, __setattr__ = __getitem__, __setitem__


@functools.cache
def _element(dtype):
    """How an element is read, cast and stored: a `CheckedArray`'s kind, cast, exact (needs no
    cast)."""
    integer = INTEGER_TYPES.get(dtype.name)
    return (
        (None, dtype.type, dtype.type)
        if integer is None
        else (integer.kind, integer.cast, integer.whole)
    )


def contiguous_strides(shape, itemsize):
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
