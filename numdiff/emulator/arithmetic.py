"""Numba's operators on a CPU: which type an operation gives, how it rounds, where it wraps.

The rules of promotion are Numba's, not NumPy's nor C's: int32 + int32 is int64, uint32 · uint32 is uint64, and
float32 · int32 is float64, which is how float64 creeps into a kernel. (`tests/emulator/test_values.py` checks the table
against Numba's own typing.)
"""
import operator

import numpy as np

from ..dtypes import bfloat16
from .values import (
    BITS64,
    COMPLEX,
    DIRECT,
    HALF64,
    NARROW,
    SIGNED,
    UNSIGNED,
    Int8,
    Int16,
    Int32,
    Literal,
    UInt8,
    UInt32,
    UInt64,
    boolean,
    complex64,
    complex128,
    float16,
    float32,
    float64,
)

# letters for the classes of numbers; arithmetic takes a bfloat16 for the float32 that it is, and its type has no other
LETTER = {bool: "b", boolean: "b", Int8: "s", Int16: "m", UInt8: "t", Int32: "i", int: "i", Literal: "i", UInt32: "u",
          UInt64: "u", float16: "h", bfloat16: "f", float32: "f", float64: "d", float: "d"}
FLOAT_OF = {"h": float16, "f": float32, "d": float64}


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


PROMOTED = {(a, b): _promote(a, b) for a in "bsmtiuhfd" for b in "bsmtiuhfd"}


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
    ka, kb = LETTER.get(a.__class__), LETTER.get(b.__class__)
    if ka is None or kb is None:
        return _complex(function, a, b)
    kind = PROMOTED[ka, kb]
    if kind == "u":
        return UInt64(function(int(a), int(b)) & BITS64)
    if kind == "i":
        return wrap64(function(int(a), int(b)))
    to = FLOAT_OF[kind]
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
    kind = PROMOTED.get((LETTER.get(c), LETTER.get(b.__class__)))
    if kind is None:
        return _complex(operator.truediv, a, b)
    to = FLOAT_OF.get(kind, float64)  # int / int is float64
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
    ka, kb = LETTER.get(a.__class__), LETTER.get(b.__class__)
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
