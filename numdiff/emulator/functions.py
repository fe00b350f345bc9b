"""Python's own functions and those of `math` on a CPU, as Numba types them."""

import math

import numpy as np

from .arithmetic import CLASS, FLOATS, INTEGERS, LETTER, PROMOTED, UNIFIED, convert, divided, power
from .conversions import integer_of
from .values import (
    DIRECT,
    TYPES,
    WIDTHS,
    Int8,
    Int32,
    boolean,
    complex64,
    complex128,
    float32,
    float64,
)


def choose(choice, noticed=None):
    """`min` or `max`; `noticed(name)` is called where it works in float64.

    Of two float32, or float64, it is PTX's instruction, which gives the number if one is NaN, and
    takes 0 for more than -0. All other functions Numba compares in the common type. The first
    argument stays unless a later one is less or more, so a NaN in the first place stays, and
    elsewhere it is ignored.
    """
    largest = choice is max

    def among(first, *others):
        best, *others = first if not others and first.__class__ is tuple else (first, *others)
        if len(others) == 1:
            (value,) = others
            c, d = best.__class__, value.__class__
            if c is float32 and d is float32:
                if value > best:
                    return value if largest else best
                if best > value:
                    return best if largest else value
                return _number_of(best, value, largest)
            if c in _WIDE and d in _WIDE:
                if noticed is not None:
                    noticed(choice.__name__)
                return _number_of(float64(best), float64(value), largest)
        for value in others:
            kind = UNIFIED[LETTER[best.__class__], LETTER[value.__class__]]
            if kind == "d" and noticed is not None:
                noticed(choice.__name__)
            best, value = convert(best, kind), convert(value, kind)
            if value > best if largest else value < best:
                best = value
        return best

    return among


_WIDE = frozenset((float32, float64, float))


def _number_of(a, b, largest):
    if a != a or b != b:
        return b if a != a else a
    if a == b:
        return b if bool(np.signbit(a)) == largest else a
    return a if bool(a > b) == largest else b


minimum, maximum = choose(min), choose(max)


def absolute(a):
    c = a.__class__
    if c in WIDTHS:
        return a if a >= 0 or a == -1 << WIDTHS[c] - 1 else c(-a)
    return Int8(a) if c is bool or c is boolean else abs(a)


def to_integer(a=0):
    """int(x)"""
    return a if a.__class__ in WIDTHS else TYPES["int64"](a)


def to_float(a=0):
    """float(x): float32 stays float32, integers become float64."""
    return a if LETTER.get(a.__class__) in FLOATS else float64(a)


def to_complex(real=0.0, imag=None):
    """complex(x), complex(x, y): of float32 it is complex64."""
    parts = (real,) if imag is None else (real, imag)
    return (complex64 if all(p.__class__ is float32 for p in parts) else complex128)(
        complex(*parts)
    )


def to_bool(a=False):
    return bool(a)


def rounded(a, digits=None):
    if digits is None:
        return integer_of(float64(a), 64, True, nearest=True)
    to = a.__class__ if a.__class__ in DIRECT else float64
    return to(_to_digits(to(a), int(digits)))


def _to_digits(x, digits):
    """CPython's algorithm, as Numba compiles it: in float64, by powers of ten."""
    if not math.isfinite(x):
        return x
    first, second = (
        float64(10) ** float64(min(abs(digits), 22) if digits < 0 else min(digits, 22)),
        float64(1),
    )
    if digits > 22:
        first, second = float64(10) ** float64(digits - 22), float64(1e22)
    elif digits < -22:
        first = float64(10) ** float64(-digits)
    y = float64(x) * first * second if digits >= 0 else float64(x) / first
    if math.isinf(y):
        return x
    z = float64(integer_of(y, 64, True, nearest=True))
    if abs(y - z) == 0.5:
        z = float64(2) * float64(integer_of(y / 2, 64, True, nearest=True))
    return z / second / first if digits >= 0 else z * first


BUILTINS = {
    "min": minimum,
    "max": maximum,
    "abs": absolute,
    "int": to_integer,
    "float": to_float,
    "bool": to_bool,
    "complex": to_complex,
    "round": rounded,
    "pow": power,
    "divmod": divided,
}


# math: float32 in, float32 out --------------------------------------------------------------------


def _kind_of_two(a, b):
    kind = PROMOTED[a, b]
    return "f" if kind == "h" else kind if kind in FLOATS else "d"


def _kind_of_power(a, b):
    return "f" if a in SMALL and b in "i" + SMALL or (a, b) == ("f", "v") else "d"


SMALL = "bsmthf"  # letters of what float32 holds
_REALS = INTEGERS + FLOATS
# functions without a float16
_WIDENED = {(a,): a if a in "fd" else "f" if a == "h" else "d" for a in _REALS}
_ONE = {(a,): a if a in FLOATS else "d" for a in _REALS}
_TWO = {(a, b): _kind_of_two(a, b) for a in _REALS for b in _REALS}
_POWER = {(a, b): _kind_of_power(a, b) for a in _REALS for b in _REALS}
_CLOSE = {(a, b): "f" if a in SMALL and b in SMALL else "d" for a in _REALS for b in _REALS}
HALF = (
    "sqrt",
    "exp",
    "exp2",
    "log",
    "log2",
    "log10",
    "sin",
    "cos",
    "floor",
    "ceil",
    "trunc",
    "fabs",
)
_KINDS = {
    **dict.fromkeys(HALF, _ONE),
    "atan2": _TWO,
    "hypot": _TWO,
    "pow": _POWER,
    **dict.fromkeys(("fmod", "copysign", "remainder", "nextafter"), _CLOSE),
}


def float_result(function, noticed=None, name=None):
    """`function` on Python floats (float64), rounded once to the type that Numba gives the
    arguments.

    `noticed(name)` is called where that type is float64.
    """
    name = name or getattr(function, "__name__", "math function")
    kinds = _KINDS.get(name, _WIDENED)

    def call(*values):
        to = float32
        for v in values:
            if v.__class__ is not float32:
                to = CLASS[kinds[tuple(LETTER[v.__class__] for v in values)]]
                break
        if to is float64 and noticed is not None:
            noticed(call.__name__)
        numbers = [float(v) for v in values]
        try:
            return to(function(*numbers))
        except OverflowError:
            return to(_overflow(function, numbers))
        except (ValueError, ZeroDivisionError):
            return to(_outside(function, numbers))

    call.__name__ = name
    return call


def _overflow(function, values):
    """The infinity where Python's math raises."""
    negative = function is math.sinh or function is math.pow and values[1] % 2 == 1
    return -math.inf if negative and values[0] < 0 else math.inf


def _outside(function, values):
    """The IEEE result where Python's math raises."""
    x = values[0]
    if any(math.isnan(v) for v in values):
        return math.nan
    if (
        function in (math.log, math.log2, math.log10)
        and x == 0
        or function is math.log1p
        and x == -1
    ):
        return -math.inf
    if function in (math.floor, math.ceil, math.trunc):
        return x
    if function is math.pow and x == 0:
        return math.inf
    return math.nan


def _whole(function):
    return lambda x: function(x) if math.isfinite(x) else x


def exp2(x):
    return 2.0**x


MATH_FUNCTIONS = (
    "sqrt",
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "atan2",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "gamma",
    "lgamma",
    "fabs",
    "copysign",
    "fmod",
    "pow",
    "hypot",
    "degrees",
    "radians",
    "remainder",
    "nextafter",
)


class EmulatedMath:
    """`math` as a kernel sees it; `noticed(name)` is called where a function works in float64."""

    pi, e, tau, inf, nan = (float64(v) for v in (math.pi, math.e, math.tau, math.inf, math.nan))

    def __init__(self, noticed=None):
        for name in MATH_FUNCTIONS:
            if hasattr(math, name):
                setattr(self, name, float_result(getattr(math, name), noticed))
        self.exp2 = float_result(exp2, noticed)
        for function in (math.floor, math.ceil, math.trunc):
            setattr(self, function.__name__, float_result(_whole(function), name=function.__name__))

    def isnan(self, x):
        return math.isnan(x)

    def isinf(self, x):
        return math.isinf(x)

    def isfinite(self, x):
        return math.isfinite(x)

    def ldexp(self, x, n):
        try:
            return _small(x)(math.ldexp(float(x), TYPES["int32"](n)))
        except OverflowError:
            return _small(x)(math.copysign(math.inf, x))

    def frexp(self, x):
        mantissa, exponent = math.frexp(float(x))
        return _small(x)(mantissa), Int32(exponent)

    def modf(self, x):
        fraction, whole = math.modf(float(x))
        to = float32 if x.__class__ is float32 else float64
        return to(fraction), to(whole)

    def gcd(self, a, b):
        return math.gcd(int(a), int(b))


def _small(x):
    """The float in which these functions work."""
    return float32 if LETTER[x.__class__] in SMALL else float64


MATH = EmulatedMath()
