"""Numba's numbers on a CPU: the classes of a kernel's numbers, and how one is turned into another.

A kernel's numbers are represented by the cheapest Python object that still knows its type:

    int64        int            (results wrap where they can leave 64 bits: products, shifts, casts, stores)
    int8 … int32 `Int8`, `Int16`, `Int32`: an int that remembers its width (-x and ~x need it); arithmetic gives int64
    uint8 …      `UInt8`, `UInt16`, `UInt32`, `UInt64`: arithmetic gives uint64, or int64 with a signed partner
    float16/32/64 NumPy's scalars: each operation rounds to the type
    bfloat16     that of ml_dtypes: each operation makes it float32
    bool         bool, numpy.bool_

What is done with them is in arithmetic.py (operators) and functions.py (Python's own, and those of
`math`).
"""

import functools
import struct

import numpy as np

from .conversions import integer_of

try:
    from ml_dtypes import bfloat16
except ImportError:  # without it there are no bfloat16 arrays
    bfloat16 = None

float16, float32, float64, boolean = np.float16, np.float32, np.float64, np.bool_
BITS64, HALF64 = (1 << 64) - 1, 1 << 63


class Int8(int):
    """int8: with float16 it gives float16, with float32 it gives float32."""

    __slots__ = ()


class Int16(int):
    """int16: with float16 and float32 it gives float32."""

    __slots__ = ()


class Int32(int):
    __slots__ = ()


class Literal(int):
    """An int64 that the compiler knows: a number in a call of a device function, which may be the
    size of an array."""

    __slots__ = ()


class UInt8(int):
    """uint8: with float16 and float32 it gives float32."""

    __slots__ = ()


class UInt16(int):
    """uint16: with float32 it gives float64."""

    __slots__ = ()


class UInt32(int):
    __slots__ = ()


class UInt64(int):
    __slots__ = ()


FLOATS = frozenset((float16, float32, float64))
SIGNED = frozenset((int, Int32, Int16, Int8, Literal, bool))
UNSIGNED = frozenset((UInt8, UInt16, UInt32, UInt64))
INTEGERS = SIGNED | UNSIGNED
complex64, complex128 = np.complex64, np.complex128
COMPLEX = frozenset((complex64, complex128, complex))
WIDTHS = {
    Int8: 8,
    Int16: 16,
    Int32: 32,
    int: 64,
    Literal: 64,
    UInt8: 8,
    UInt16: 16,
    UInt32: 32,
    UInt64: 64,
}
# with them it stays complex64
NARROW = frozenset((complex64, float32, float16, Int8, Int16, UInt8, bool, boolean))
# operands of one such class: NumPy's operator is Numba's
DIRECT = frozenset((float32, float64, float16))


# Types as a kernel calls them ---------------------------------------------------------------------

WORD, FLOAT = struct.Struct("<I"), struct.Struct("<f")


def float32_bits(x):
    """The bits of a float32, as an int."""
    return WORD.unpack(x if x.__class__ is float32 else float32(x))[0]


def float32_of_bits(word):
    """The float32 with these bits, an int."""
    return float32(FLOAT.unpack(WORD.pack(word))[0])


FEW = 1024  # small numbers of each class that are made in advance


class IntegerType:
    """int8 … uint64 as the dtype of an array; `cast` is the type as a kernel knows it, `int32(x)`."""

    def __init__(self, name):
        self.name, self.dtype = name, np.dtype(name)
        self.bits, self.signed = 8 * self.dtype.itemsize, self.dtype.kind == "i"
        self.kind = {
            "int8": Int8,
            "uint8": UInt8,
            "int16": Int16,
            "uint16": UInt16,
            "int32": Int32,
            "uint32": UInt32,
            "int64": int,
            "uint64": UInt64,
        }[name]
        self.whole = None if name == "int64" else self.kind  # numbers of this class are in range
        self.low = -(1 << self.bits - 1) if self.signed else 0
        self.high = self.low + (1 << self.bits)
        self.mask = (1 << self.bits) - 1
        self.cast = self._make_cast()

    def _make_cast(self):
        """A function, which Python calls faster than an object, with the attributes that a type
        has."""
        kind, whole, low, high, convert = self.kind, self.whole, self.low, self.high, self._convert
        # most are small: Python makes a number of a class slowly
        few = tuple(kind(i) for i in range(min(FEW, high)))
        end = len(few)

        def cast(value=0):
            given = value.__class__
            if given is whole:
                return value
            if given in INTEGERS:
                if 0 <= value < end:
                    return few[value]
                if low <= value < high:
                    return kind(value)
            return convert(value)

        cast.name, cast.dtype = self.name, self.dtype
        cast.__name__ = cast.__qualname__ = self.name
        return cast

    def _convert(self, value):
        """A float, or an integer that is out of range."""
        if value.__class__ in FLOATS or value.__class__ is float:
            return self.kind(integer_of(value, self.bits, self.signed))
        return self.kind((int(value) - self.low & self.mask) + self.low)

    def __repr__(self):
        return self.name


INTEGER_TYPES = {
    name: IntegerType(name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}
TYPES = {
    **{name: kind.cast for name, kind in INTEGER_TYPES.items()},
    "float16": float16,
    "float32": float32,
    "float64": float64,
    "bool": boolean,
    "complex64": complex64,
    "complex128": complex128,
}
ALIASES = {
    "boolean": "bool",
    "bool_": "bool",
    "intp": "int64",
    "uintp": "uint64",
    "intc": "int32",
    "uintc": "uint32",
    "byte": "uint8",
    "double": "float64",
    "half": "float16",
    "single": "float32",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "short": "int16",
    "ushort": "uint16",
    "int_": "int64",
    "uint": "uint64",
    "float_": "float32",
    "longlong": "int64",
    "ulonglong": "uint64",
    "long_": "int64",
}
DTYPES = {name: np.dtype(name) for name in TYPES}


def type_named(name):
    """The type of a name such as "int32", "f4" or "boolean"; None for any other name."""
    return TYPES.get(ALIASES.get(name, name))


@functools.cache
def dtype_of(kind):
    """The NumPy dtype that a kernel names by NumPy's type, Numba's, the emulator's, or a string."""
    name = getattr(kind, "name", None)
    found = DTYPES.get(ALIASES.get(name, name)) if name.__class__ is str else None
    return np.dtype(kind) if found is None else found


def scalar(value):
    """A Python or NumPy number as a kernel holds it. A Python float is float64, a Python int is
    int64, as in Numba."""
    if isinstance(value, np.generic):
        integer = INTEGER_TYPES.get(value.dtype.name)
        return integer.kind(int(value)) if integer else value
    return (
        float64(value)
        if value.__class__ is float
        else complex128(value)
        if value.__class__ is complex
        else value
    )


def literal(value):
    """A number that the compiler knows, or a tuple of them, as it is given to a device function."""
    if value.__class__ is tuple:
        return tuple(map(literal, value))
    return Literal(value) if value.__class__ is int else value


def is_numbas(module):
    """Whether the module of this name is a part of Numba, or of numba-cuda-mlir, its own tests
    aside."""
    return (
        bool(module)
        and module.split(".")[0] in ("numba", "numba_cuda_mlir")
        and ".tests." not in module
    )


def numbas_name(module):
    """The name that a module of numba-cuda-mlir has in Numba; any other name as it is."""
    return module.replace("numba_cuda_mlir.numba_cuda", "numba.cuda").replace(
        "numba_cuda_mlir", "numba"
    )


def leaves(arguments):
    """The arrays and numbers among a launch's arguments, in order, those in tuples included."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from leaves(argument)
        else:
            yield argument
