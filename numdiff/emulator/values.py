"""Numba's arithmetic on a CPU: which type an operation gives, how it rounds, where it wraps.

A kernel's numbers are represented by the cheapest Python object that still knows its type:

    int64        int            (results wrap where they can leave 64 bits: products, shifts, casts, stores)
    int8 … int32 `Int8`, `Int16`, `Int32`: an int that remembers its width (clz needs it); arithmetic gives int64
    uint8 …      `UInt8`, `UInt32`, `UInt64`: arithmetic on them gives uint64, or int64 with a signed partner
    float16/32/64 NumPy's scalars: each operation rounds to the type
    bfloat16     that of ml_dtypes: each operation makes it float32
    bool         bool, numpy.bool_

The rules of promotion are Numba's, not NumPy's nor C's: int32 + int32 is int64, uint32 · uint32 is uint64, and
float32 · int32 is float64, which is how float64 creeps into a kernel. (`tests/emulator/test_values.py` checks the table
against Numba's own typing.)
"""
import functools
import math
import operator
import struct

import numpy as np

from ..dtypes import bfloat16

float16, float32, float64, boolean = np.float16, np.float32, np.float64, np.bool_
BITS64, HALF64, BITS32, HALF32 = (1 << 64) - 1, 1 << 63, (1 << 32) - 1, 1 << 31


class Int8(int):
    """int8: with float16 it gives float16, with float32 it gives float32."""
    __slots__ = ()


class Int16(int):
    """int16: with float16 and float32 it gives float32."""
    __slots__ = ()


class Int32(int):
    __slots__ = ()


class UInt8(int):
    """uint8: with float16 and float32 it gives float32."""
    __slots__ = ()


class UInt32(int):
    """uint16 or uint32: with float32 it gives float64."""
    __slots__ = ()


class UInt64(int):
    __slots__ = ()


FLOATS = frozenset((float16, float32, float64))
SIGNED = frozenset((int, Int32, Int16, Int8, bool))
UNSIGNED = frozenset((UInt8, UInt32, UInt64))
INTEGERS = SIGNED | UNSIGNED
complex64, complex128 = np.complex64, np.complex128
COMPLEX = frozenset((complex64, complex128, complex))
NARROW = frozenset((complex64, float32, float16, Int8, Int16, UInt8, bool, boolean))  # with them it stays complex64
DIRECT = frozenset((float32, float64, float16))  # operands of one such class: NumPy's operator is Numba's

_LETTER = {bool: "b", boolean: "b", Int8: "s", Int16: "m", UInt8: "t", Int32: "i", int: "i", UInt32: "u",
           UInt64: "u", float16: "h", float32: "f", float64: "d", float: "d",
           bfloat16: "f"}  # arithmetic takes a bfloat16 for the float32 that it is; its type has no other
_FLOAT = {"h": float16, "f": float32, "d": float64}


def _promote(a, b):
    """Letter of the type in which an arithmetic operation on types a and b is done."""
    if "d" in (a, b):
        return "d"
    if a in "hf" or b in "hf":
        other = {a, b} - {"h", "f"}
        if other & {"i", "u"}:
            return "d"
        return "f" if "f" in (a, b) or other & {"t", "m"} else "h"
    return "u" if a in "tu" and b in "tu" else "i"


_PROMOTED = {(a, b): _promote(a, b) for a in "bsmtiuhfd" for b in "bsmtiuhfd"}


def wrap64(value):
    """An int as int64 keeps it."""
    return value if -HALF64 <= value < HALF64 else (value + HALF64 & BITS64) - HALF64


def _complex(function, a, b):
    """`function(a, b)` of a complex number and another: complex64 only if both are as narrow."""
    if not (a.__class__ in COMPLEX or b.__class__ in COMPLEX):
        return function(a, b)  # tuples, or a mistake that Python names
    to = complex64 if a.__class__ in NARROW and b.__class__ in NARROW else complex128
    return function(to(a), to(b))


def _mixed(function, a, b):
    """`function(a, b)` in the type that Numba gives the pair."""
    ka, kb = _LETTER.get(a.__class__), _LETTER.get(b.__class__)
    if ka is None or kb is None:
        return _complex(function, a, b)
    kind = _PROMOTED[ka, kb]
    if kind == "u":
        return UInt64(function(int(a), int(b)) & BITS64)
    if kind == "i":
        return wrap64(function(int(a), int(b)))
    to = _FLOAT[kind]
    return function(to(a), to(b))


def add(a, b):
    c, d = a.__class__, b.__class__
    if c is float32 and d is float32 or c in SIGNED and d in SIGNED:
        return a + b
    return _mixed(operator.add, a, b)


def sub(a, b):
    c, d = a.__class__, b.__class__
    if c is float32 and d is float32 or c in SIGNED and d in SIGNED:
        return a - b
    return _mixed(operator.sub, a, b)


def mul(a, b):
    c, d = a.__class__, b.__class__
    if c is float32 and d is float32:
        return a * b
    if c in SIGNED and d in SIGNED:
        product = a * b
        return product if -HALF64 <= product < HALF64 else wrap64(product)
    return _mixed(operator.mul, a, b)


def truediv(a, b):
    c = a.__class__
    if c is b.__class__ and c in DIRECT:
        return a / b
    kind = _PROMOTED.get((_LETTER.get(c), _LETTER.get(b.__class__)))
    if kind is None:
        return _complex(operator.truediv, a, b)
    to = _FLOAT.get(kind, float64)  # int / int is float64
    return to(a) / to(b)


def floordiv(a, b):
    if a.__class__ in SIGNED and b.__class__ in SIGNED:
        return wrap64(a) // b
    return _in_float32(operator.floordiv, a, b)


def mod(a, b):
    if a.__class__ in SIGNED and b.__class__ in SIGNED:
        return wrap64(a) % b
    return _in_float32(operator.mod, a, b)


def _in_float32(function, a, b):
    """As `_mixed`; but for float16 Numba has these operations only in float32."""
    a, b = (float32(v) if v.__class__ is float16 else v for v in (a, b))
    return _mixed(function, a, b)


def power(a, b):
    ka, kb = _LETTER.get(a.__class__), _LETTER.get(b.__class__)
    if ka is None or kb is None:
        return _complex(operator.pow, a, b)
    if kb in "bsmtiu":
        if ka in "bsmtiu":
            if b < 0:
                return 0 if abs(a) != 1 else wrap64(int(a) ** (-int(b)))
            return _mixed(operator.pow, a, b)
        to = float64 if ka == "d" else float32
        return to(np.power(to(a), to(b)))
    to = float64 if "d" in (ka, kb) or ka in "iu" else float32
    return to(np.power(to(a), to(b)))


def _bitwise(function):
    def operation(a, b):
        c, d = a.__class__, b.__class__
        if c is boolean:
            a, c = bool(a), bool
        if d is boolean:
            b, d = bool(b), bool
        if c in SIGNED and d in SIGNED:
            return function(a, b)
        if c in UNSIGNED and d in UNSIGNED:
            return UInt64(function(a, b))
        if c in UNSIGNED or d in UNSIGNED:
            return wrap64(function(int(a) & BITS64, int(b) & BITS64))
        return function(a, b)
    return operation


bitand, bitor, bitxor = _bitwise(operator.and_), _bitwise(operator.or_), _bitwise(operator.xor)


def lshift(a, b):
    """The left operand decides the sign; a shift by 64 or more bits gives 0, as in PTX."""
    by = int(b)
    if a.__class__ in UNSIGNED:
        return UInt64(int(a) << by & BITS64) if 0 <= by < 64 else UInt64(0)
    return wrap64(int(a) << by) if 0 <= by < 64 else 0


def rshift(a, b):
    """The left operand decides the sign; a shift by 64 or more bits leaves the sign alone, as in PTX."""
    by = int(b) if 0 <= b < 64 else 64
    return UInt64(int(a) >> by) if a.__class__ in UNSIGNED else wrap64(int(a)) >> by


def negative(a):
    if a.__class__ in UNSIGNED:
        return UInt64(-int(a) & BITS64)
    return -int(a) if a.__class__ in (bool, boolean) else -a


def invert(a):
    if a.__class__ in UNSIGNED:
        return UInt64(~int(a) & BITS64)
    return not a if a.__class__ in (bool, boolean) else ~a


OPERATIONS = {"Add": add, "Sub": sub, "Mult": mul, "Div": truediv, "FloorDiv": floordiv, "Mod": mod, "Pow": power,
              "BitAnd": bitand, "BitOr": bitor, "BitXor": bitxor, "LShift": lshift, "RShift": rshift,
              "USub": negative, "Invert": invert}


# Types as a kernel calls them -----------------------------------------------------------------------------------------

WORD, FLOAT = struct.Struct("<I"), struct.Struct("<f")


def float32_bits(x):
    """The bits of a float32, as an int."""
    return WORD.unpack(x if x.__class__ is float32 else float32(x))[0]


def float32_of_bits(word):
    """The float32 with these bits, an int."""
    return float32(FLOAT.unpack(WORD.pack(word))[0])


def _to_int(value):
    """A number as an int: floats are truncated, as by `cvt.rzi`; NaN is 0."""
    if value.__class__ in FLOATS or value.__class__ is float:
        if math.isnan(value):
            return 0
        if math.isinf(value):
            return HALF64 - 1 if value > 0 else -HALF64
        return int(value)
    return int(value)


FEW = 1024  # small numbers of each class that are made in advance


class IntegerType:
    """int8 … uint64 as the dtype of an array; `cast` is the type as a kernel knows it, `int32(x)`."""

    def __init__(self, name):
        self.name, self.dtype = name, np.dtype(name)
        self.bits, self.signed = 8 * self.dtype.itemsize, self.dtype.kind == "i"
        self.kind = {"int8": Int8, "uint8": UInt8, "int16": Int16, "uint16": UInt32, "int32": Int32, "uint32": UInt32,
                     "int64": int, "uint64": UInt64}[name]
        self.whole = None if name in ("uint16", "int64") else self.kind  # numbers of this class are in range
        self.low = -(1 << self.bits - 1) if self.signed else 0
        self.high = self.low + (1 << self.bits)
        self.mask = (1 << self.bits) - 1
        self.cast = self._make_cast()

    def _make_cast(self):
        """A function, which Python calls faster than an object, with the attributes that a type has."""
        kind, whole, low, high, convert = self.kind, self.whole, self.low, self.high, self._convert
        few = tuple(kind(i) for i in range(min(FEW, high)))  # most are small: Python makes a number of a class slowly
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
        was_float = value.__class__ in FLOATS
        value = _to_int(value)
        if not self.low <= value < self.high:
            if was_float:  # cvt saturates
                value = min(max(value, self.low), self.high - 1)
            else:
                value = (value - self.low & self.mask) + self.low
        return self.kind(value)

    def __repr__(self):
        return self.name


INTEGER_TYPES = {name: IntegerType(name) for name in ("int8", "int16", "int32", "int64",
                                                      "uint8", "uint16", "uint32", "uint64")}
TYPES = {**{name: kind.cast for name, kind in INTEGER_TYPES.items()}, "float16": float16, "float32": float32,
         "float64": float64, "bool": boolean, "complex64": complex64, "complex128": complex128}
ALIASES = {"boolean": "bool", "bool_": "bool", "intp": "int64", "uintp": "uint64", "intc": "int32", "uintc": "uint32",
           "byte": "uint8", "double": "float64", "half": "float16", "single": "float32", "f2": "float16",
           "f4": "float32", "f8": "float64", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "u1": "uint8",
           "u2": "uint16", "u4": "uint32", "u8": "uint64", "short": "int16", "ushort": "uint16", "int_": "int64",
           "uint": "uint64", "float_": "float32", "longlong": "int64", "ulonglong": "uint64", "long_": "int64"}
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
    """A Python or NumPy number as a kernel holds it. A Python float is float64, a Python int is int64, as in Numba."""
    if isinstance(value, np.generic):
        integer = INTEGER_TYPES.get(value.dtype.name)
        return integer.kind(int(value)) if integer else value
    return float64(value) if value.__class__ is float else complex128(value) if value.__class__ is complex else value


def leaves(arguments):
    """The arrays and numbers among a launch's arguments, in order, those in tuples included."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from leaves(argument)
        else:
            yield argument


# Python's own functions, as Numba types them --------------------------------------------------------------------------

def choose(choice, noticed=None):
    """`min` or `max`; `noticed(name)` is called where it works in float64."""
    def among(first, *others):
        best, *others = first if not others and first.__class__ is tuple else (first, *others)
        for value in others:
            c, d = best.__class__, value.__class__
            if c is float32 and d is float32:  # PTX's max and min give the operand that is not NaN
                best = value if best != best else best if value != value else choice(best, value)
                continue
            if c is not d and (c is UInt64 and d in SIGNED or d is UInt64 and c in SIGNED):
                best = float64(choice(best, value))  # the type that Numba gives the pair int64 and uint64
                continue
            a, b = _LETTER[c], _LETTER[d]
            kind = a if a == b else _PROMOTED[a, b]
            if kind == "d" and noticed is not None:
                noticed(choice.__name__)
            if kind not in _FLOAT:
                best = (UInt64 if kind in "tu" else int)(choice(best, value))
            elif best != best or value != value:
                best = _FLOAT[kind](value if best != best else best)
            else:
                best = _FLOAT[kind](choice(best, value))
        return best
    return among


minimum, maximum = choose(min), choose(max)


def absolute(a):
    return a if a.__class__ in UNSIGNED else abs(a)


def to_integer(a=0):
    """int(x)"""
    return a if a.__class__ in SIGNED or a.__class__ in UNSIGNED else TYPES["int64"](a)


def to_float(a=0):
    """float(x): float32 stays float32, integers become float64."""
    return a if a.__class__ in FLOATS else float64(a)


def to_complex(real=0.0, imag=None):
    """complex(x), complex(x, y): of float32 it is complex64."""
    parts = (real,) if imag is None else (real, imag)
    return (complex64 if all(p.__class__ in NARROW for p in parts) else complex128)(complex(*parts))


def to_bool(a=False):
    return bool(a)


def rounded(a, digits=None):
    if digits is None:
        return int(round(float(a)))
    return a.__class__(round(float(a), int(digits)))


BUILTINS = {"min": minimum, "max": maximum, "abs": absolute, "int": to_integer, "float": to_float, "bool": to_bool,
            "complex": to_complex,
            "round": rounded, "pow": power}


# math: float32 in, float32 out ----------------------------------------------------------------------------------------

def _float_result(function, noticed=None):
    """`function` on Python floats (float64), rounded once to the type of the arguments.

    `noticed(name)` is called where that type is float64.
    """
    def call(*values):
        to = float16 if all(v.__class__ is float16 for v in values) else float32
        for v in values:
            if v.__class__ is not float32 and v.__class__ is not float16:
                to = float64  # an integer or a float64 among them
        if to is float64 and noticed is not None:
            noticed(call.__name__)
        try:
            return to(function(*[float(v) for v in values]))
        except OverflowError:
            return to(math.inf)
        except (ValueError, ZeroDivisionError):
            return to(_outside(function, [float(v) for v in values]))
    call.__name__ = getattr(function, "__name__", "math function")
    return call


def _outside(function, values):
    """What IEEE arithmetic gives where Python's math raises."""
    x = values[0]
    if any(math.isnan(v) for v in values):
        return math.nan
    if function in (math.log, math.log2, math.log10) and x == 0 or function is math.log1p and x == -1:
        return -math.inf
    if function in (math.floor, math.ceil, math.trunc):
        return x
    if function is math.pow and x == 0:
        return math.inf
    return math.nan


def _whole(function):
    return lambda x: function(x) if math.isfinite(x) else x


def exp2(x):
    return 2.0 ** x


MATH_FUNCTIONS = ("sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan",
                  "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "gamma", "lgamma", "fabs",
                  "copysign", "fmod", "pow", "hypot", "degrees", "radians", "remainder", "nextafter")


class EmulatedMath:
    """`math` as a kernel sees it; `noticed(name)` is called where a function works in float64."""

    pi, e, tau, inf, nan = (float64(v) for v in (math.pi, math.e, math.tau, math.inf, math.nan))

    def __init__(self, noticed=None):
        for name in MATH_FUNCTIONS:
            if hasattr(math, name):
                setattr(self, name, _float_result(getattr(math, name), noticed))
        self.exp2 = _float_result(exp2, noticed)
        self.floor, self.ceil, self.trunc = (_float_result(_whole(f)) for f in (math.floor, math.ceil, math.trunc))

    def isnan(self, x):
        return math.isnan(x)

    def isinf(self, x):
        return math.isinf(x)

    def isfinite(self, x):
        return math.isfinite(x)

    def ldexp(self, x, n):
        return x.__class__(math.ldexp(float(x), int(n)))

    def frexp(self, x):
        mantissa, exponent = math.frexp(float(x))
        return x.__class__(mantissa), Int32(exponent)

    def modf(self, x):
        fraction, whole = math.modf(float(x))
        return x.__class__(fraction), x.__class__(whole)

    def gcd(self, a, b):
        return math.gcd(int(a), int(b))


MATH = EmulatedMath()


def fma(a, b, c):
    """a·b + c, rounded once to the arguments' type.

    float32: the product is exact in float64; the sum is computed in float64 with rounding to odd, after which rounding
        to float32 is correct (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums").
    """
    kind = a.__class__
    if kind is float64:
        from fractions import Fraction
        if not all(math.isfinite(v) for v in (a, b, c)):
            return a * b + c
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        return float64(exact.numerator / exact.denominator) if exact else a * b + c
    product, addend = float(a) * float(b), float(c)
    total = product + addend
    if math.isfinite(total):
        back = total - product
        error = (product - (total - back)) + (addend - back)
        if error and not int(np.float64(total).view(np.uint64)) & 1:
            total = math.nextafter(total, math.inf if error > 0 else -math.inf)
    return kind(total)
