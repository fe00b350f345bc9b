"""Numba's operators on a CPU: which type an operation gives, how it rounds, where it wraps.

The rules of promotion are Numba's, not NumPy's nor C's. int32 + int32 is int64, uint32 · uint32 is
uint64, and float32 · int32 is float64, which is how float64 enters a kernel unnoticed.
`tests/emulator/test_operators.py` holds each operator on each pair of types against what Numba
compiles. Where CUDA differs from a CPU, it is CUDA's result:

    x // 0, x % 0 of integers     0; so are both for the least int64 and -1
    a << n, a >> n                the lowest 32 bits of n count, unsigned; more than 63 shift everything out
    x % y, x // y of floats       NVVM's remainder |x| - ⌊|x| / |y|⌋ · |y|, whose product ptxas fuses with the sum:
                                  not exact for large quotients, and NaN if y is infinite
    int64 < uint64                compared as float64; so is any signed integer with a uint64, and an integer of 64 bits
                                  with a float

A sum, difference or product of signed integers that leaves 64 bits wraps around here; LLVM leaves
it undefined.
"""

import math
import operator

import numpy as np

from .conversions import fma, integer_of
from .values import (
    BITS64,
    DIRECT,
    HALF64,
    SIGNED,
    UNSIGNED,
    WIDTHS,
    Int8,
    Int16,
    Int32,
    Literal,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
    bfloat16,
    boolean,
    complex64,
    complex128,
    float16,
    float32,
    float64,
)

# letters for the classes of numbers; arithmetic takes a bfloat16 for the float32 that it is, and
# its type has no other
LETTER = {
    bool: "b",
    boolean: "b",
    Int8: "s",
    Int16: "m",
    Int32: "i",
    int: "l",
    Literal: "l",
    UInt8: "t",
    UInt16: "v",
    UInt32: "w",
    UInt64: "u",
    float16: "h",
    bfloat16: "f",
    float32: "f",
    float64: "d",
    float: "d",
    complex64: "c",
    complex128: "z",
    complex: "z",
}
LETTERS = "bsmiltvwuhfdcz"
INTEGERS, FLOATS = "bsmiltvwu", "hfd"
CLASS = {
    "b": bool,
    "s": Int8,
    "m": Int16,
    "i": Int32,
    "l": int,
    "t": UInt8,
    "v": UInt16,
    "w": UInt32,
    "u": UInt64,
    "h": float16,
    "f": float32,
    "d": float64,
    "c": complex64,
    "z": complex128,
}
FLOAT_OF = {"h": float16, "f": float32, "d": float64}
_BITS = {"b": 1, "s": 8, "m": 16, "i": 32, "l": 64, "t": 8, "v": 16, "w": 32, "u": 64}
# what Numba makes a float of with a partner of that type
_EXACT = {"h": "bs", "f": "bsmth", "d": "bsmiltvwuhf"}


# Types of results ---------------------------------------------------------------------------------


def _promote(a, b):
    """Letter of the type in which an arithmetic operation on types a and b is done."""
    if a in INTEGERS and b in INTEGERS:
        return "u" if a in "tvwu" and b in "tvwu" else "l"
    if a in "cz" or b in "cz":
        return "c" if all(k in "chf" or k in _EXACT["f"] for k in (a, b)) else "z"
    for kind in FLOATS:
        if all(k == kind or k in _EXACT[kind] for k in (a, b)):
            return kind
    return "d"


def _unify(a, b):
    """Letter of the type that both can become: that of min and max, and of a comparison."""
    if a == b:
        return a
    if a in INTEGERS and b in INTEGERS:
        if "b" in (a, b):
            return b if a == "b" else a
        signed = {k for k in (a, b) if k in "smil"}
        if len(signed) != 1:
            return max(a, b, key=_BITS.get)
        unsigned = a if b in signed else b
        bits = max(_BITS[next(iter(signed))], 2 * _BITS[unsigned])
        return next((k for k in "smil" if _BITS[k] == bits), "d")
    if {a, b} in ({"h", "t"}, {"f", "v"}, {"h", "v"}):
        return "h" if "t" in (a, b) else "f"
    if {a, b} == {"c", "v"}:
        return "c"
    return _promote(a, b)


def _power(a, b):
    """Letter of the type of a power."""
    if a in FLOATS and b in INTEGERS:
        return "d" if a == "d" else "f"
    if (a, b) == ("b", "i"):
        return "f"
    kind = _promote(a, b)
    return "f" if kind == "h" else kind


def _real(a, b):
    """Letter of the type of // and %, which are not known in float16."""
    kind = _promote(a, b)
    return "f" if kind == "h" else kind


def _quotient(a, b):
    kind = _promote(a, b)
    return "d" if kind in "lu" else kind


def _table(rule):
    return {(a, b): rule(a, b) for a in LETTERS for b in LETTERS}


PROMOTED, UNIFIED, POWERS, REAL, QUOTIENTS = map(
    _table, (_promote, _unify, _power, _real, _quotient)
)


def wrap64(value):
    """An int as int64 keeps it."""
    return value if -HALF64 <= value < HALF64 else (value + HALF64 & BITS64) - HALF64


def convert(value, kind):
    """A number in the type of a letter."""
    if kind == "l":
        return wrap64(int(value))
    if kind == "u":
        return UInt64(int(value) & BITS64)
    return CLASS[kind](value)


def _kind(table, a, b):
    return table.get((LETTER.get(a.__class__), LETTER.get(b.__class__)))


def unified(value, other):
    """A number in the type that it has in common with one of a letter."""
    mine = LETTER.get(value.__class__)
    kind = mine and UNIFIED[mine, other]
    return value if kind == mine else convert(value, kind)


# + - * / ------------------------------------------------------------------------------------------


def _mixed(function, a, b):
    """`function(a, b)` in the type that Numba gives the pair."""
    kind = _kind(PROMOTED, a, b)
    if kind is None:
        return function(a, b)  # tuples, or a mistake that Python names
    if kind == "l":
        return wrap64(function(int(a), int(b)))
    if kind == "u":
        return UInt64(function(int(a), int(b)) & BITS64)
    to = CLASS[kind]
    return function(to(a), to(b))


def add(a, b):
    c, d = a.__class__, b.__class__
    if c is float32 and d is float32:
        return a + b
    if c in SIGNED and d in SIGNED:
        total = a + b
        return total if -HALF64 <= total < HALF64 else wrap64(total)
    return _mixed(operator.add, a, b)


def sub(a, b):
    c, d = a.__class__, b.__class__
    if c is float32 and d is float32:
        return a - b
    if c in SIGNED and d in SIGNED:
        difference = a - b
        return difference if -HALF64 <= difference < HALF64 else wrap64(difference)
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
    kind = _kind(QUOTIENTS, a, b)
    if kind is None:
        return a / b
    to = CLASS[kind]
    return to(a) / to(b) if kind in FLOATS else _complex_quotient(to(a), to(b))


def _complex_quotient(a, b):
    """CPython's algorithm, as Numba compiles it, which divides by the larger part first."""
    real, imag = b.real, b.imag
    if not real and not imag:
        raise ZeroDivisionError("complex division by zero")
    if abs(real) >= abs(imag):
        ratio = imag / real
        below = real + imag * ratio
        parts = (a.real + a.imag * ratio) / below, (a.imag - a.real * ratio) / below
    elif not imag:  # the real part is NaN
        parts = np.nan, np.nan
    else:
        ratio = real / imag
        below = real * ratio + imag
        parts = (a.real * ratio + a.imag) / below, (a.imag * ratio - a.real) / below
    return _of_parts(*parts, a.__class__)


def _of_parts(real, imag, to):
    made = np.empty((), to)
    made.real, made.imag = real, imag
    return made[()]


# // % divmod --------------------------------------------------------------------------------------


def floordiv(a, b):
    c, d = a.__class__, b.__class__
    if c in SIGNED and d in SIGNED and b > 0:
        return a // b
    return _quotient_and_rest(a, b, REAL)[0]


def mod(a, b):
    c, d = a.__class__, b.__class__
    if c in SIGNED and d in SIGNED and b > 0:
        return a % b
    return _quotient_and_rest(a, b, REAL)[1]


def divided(a, b):
    """divmod(a, b), which has the type that both can become; integers those of 64 bits."""
    return _quotient_and_rest(a, b, _DIVMOD)


def _both(a, b):
    kind = UNIFIED[a, b] if a in INTEGERS and b in INTEGERS else _real(a, b)
    return "l" if kind in "bsmi" else "u" if kind in "tvw" else kind


_DIVMOD = _table(_both)


def _quotient_and_rest(a, b, table):
    kind = _kind(table, a, b)
    if kind is None:
        return divmod(a, b)
    if kind in "cz":
        raise TypeError(f"Numba knows no // and % of complex numbers: {a!r} and {b!r}")
    a, b = convert(a, kind), convert(b, kind)
    if kind in FLOATS:
        return _divided_floats(a, b)
    if b == 0 or b == -1 and a == -HALF64:
        return a.__class__(0), a.__class__(0)
    return a.__class__(a // b), a.__class__(a % b)


def _divided_floats(x, y):
    """(x // y, x % y) as CPython has them, with NVVM's remainder."""
    to, zero = x.__class__, x.__class__(0)
    size = abs(y)
    rest = fma(-np.floor(abs(x) / size), size, abs(x))
    rest = -rest if x < 0 else rest
    if y == 0:
        return x / y, rest
    quotient = (x - rest) / y
    if rest == 0:
        rest = -zero if y < 0 else zero
    elif (y < 0) != (rest < 0):
        quotient, rest = quotient - to(1), rest + y
    if quotient != 0 and quotient == quotient:
        whole = np.floor(quotient)
        return whole + to(1) if quotient - whole > to(0.5) else whole, rest
    return quotient * quotient * x / y, rest


# ** -----------------------------------------------------------------------------------------------

FAR = 0x10000  # an exponent beyond which Numba calls math.pow


def power(a, b):
    kind = _kind(POWERS, a, b)
    if kind is None:
        return operator.pow(a, b)
    if kind in "cz":
        return _complex_power(CLASS[kind](a), CLASS[kind](b))
    if b.__class__ in SIGNED or b.__class__ in UNSIGNED or b.__class__ is boolean:
        if a.__class__ in DIRECT:
            return _float_power(CLASS[kind](a), int(b))
        if kind in "lu":
            return _integer_power(convert(a, kind), int(b), kind)
    to = CLASS[kind]
    a, b = to(a), to(b)
    if b == 0.5:  # NumPy takes the square root, which differs for -0.0 and -infinity
        a = to(math.inf) if a == -math.inf else a + to(0)
    return to(np.power(a, b))


def _integer_power(a, b, kind):
    if b < 0:
        if a == 0:
            return convert(-HALF64, kind)
        if abs(a) != 1:
            return convert(0, kind)
        b = -b
    if b > FAR:
        return convert(integer_of(np.power(float64(a), float64(b)), 64, kind == "l"), kind)
    return convert(pow(int(a), b, 1 << 64), kind)


def _float_power(a, b):
    """By squares, as Numba does it for an exponent that is an integer."""
    to, exponent = a.__class__, abs(b)
    if exponent > FAR:
        return to(np.power(float64(a), float64(b)))
    result = to(1)
    while exponent:
        if exponent & 1:
            result *= a
        exponent >>= 1
        a = a * a
    return to(float64(1) / float64(result)) if b < 0 else result


def _complex_power(a, b):
    """CPython's algorithm, which numba-cuda compiles."""
    to = a.__class__
    part = a.real.__class__
    if b == 0:
        return to(1)
    if a.real == 0 and b.real == 0:
        return to(0)
    size = np.hypot(a.real, a.imag)
    length, angle = np.power(size, b.real), np.arctan2(a.imag, a.real)
    phase = angle * b.real
    if b.imag != 0:
        length = length / np.exp(angle * b.imag)
        phase = phase + b.imag * np.log(size)
    return to(_of_parts(part(length), part(0), to) * _of_parts(np.cos(phase), np.sin(phase), to))


# bits ---------------------------------------------------------------------------------------------


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
LOW = (1 << 32) - 1  # the bits of a shift's amount that count


def lshift(a, b):
    """The left operand decides the sign."""
    by = int(b) & LOW
    if a.__class__ in UNSIGNED:
        return UInt64(int(a) << by & BITS64) if by < 64 else UInt64(0)
    return wrap64(int(a) << by) if by < 64 else 0


def rshift(a, b):
    """The left operand decides the sign; a signed number keeps its sign."""
    by = min(int(b) & LOW, 64)
    return UInt64(int(a) >> by) if a.__class__ in UNSIGNED else wrap64(int(a)) >> by


# one operand --------------------------------------------------------------------------------------


def negative(a):
    """The sign of an integer changes in its own width, before it becomes one of 64 bits."""
    c = a.__class__
    if c in WIDTHS:
        bits = WIDTHS[c]
        if c in UNSIGNED:
            return UInt64(-int(a) & (1 << bits) - 1)
        return int(a) if a == -1 << bits - 1 else -int(a)
    return -int(a) if c is bool or c is boolean else -a


def positive(a):
    c = a.__class__
    if c in UNSIGNED:
        return UInt64(a)
    return int(a) if c in SIGNED or c is boolean else a


def invert(a):
    """The bits of an integer change in its own width, before it becomes one of 64 bits."""
    c = a.__class__
    if c in UNSIGNED:
        return UInt64(~int(a) & (1 << WIDTHS[c]) - 1)
    return not a if c is bool or c is boolean else ~int(a)


# comparisons --------------------------------------------------------------------------------------


def _comparison(function):
    def compare(a, b):
        c, d = a.__class__, b.__class__
        if c is d:
            return function(a, b)
        kind = UNIFIED.get((LETTER.get(c), LETTER.get(d)))
        if kind is None or kind in INTEGERS:  # no numbers; integers that both fit into one type
            return function(a, b)
        to = CLASS[kind]
        return function(to(a), to(b))

    return compare


OPERATIONS = {
    "Add": add,
    "Sub": sub,
    "Mult": mul,
    "Div": truediv,
    "FloorDiv": floordiv,
    "Mod": mod,
    "Pow": power,
    "BitAnd": bitand,
    "BitOr": bitor,
    "BitXor": bitxor,
    "LShift": lshift,
    "RShift": rshift,
    "USub": negative,
    "UAdd": positive,
    "Invert": invert,
}
COMPARISONS = {
    "Eq": _comparison(operator.eq),
    "NotEq": _comparison(operator.ne),
    "Lt": _comparison(operator.lt),
    "LtE": _comparison(operator.le),
    "Gt": _comparison(operator.gt),
    "GtE": _comparison(operator.ge),
}
