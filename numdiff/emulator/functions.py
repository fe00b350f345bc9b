"""Python's own functions and those of `math` on a CPU, as Numba types them."""
import math

import numpy as np

from .arithmetic import FLOAT_OF, LETTER, PROMOTED, power
from .values import (
    FLOATS,
    NARROW,
    SIGNED,
    TYPES,
    UNSIGNED,
    Int32,
    UInt64,
    complex64,
    complex128,
    float16,
    float32,
    float64,
)


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
            a, b = LETTER[c], LETTER[d]
            kind = a if a == b else PROMOTED[a, b]
            if kind == "d" and noticed is not None:
                noticed(choice.__name__)
            if kind not in FLOAT_OF:
                best = (UInt64 if kind in "tu" else int)(choice(best, value))
            elif best != best or value != value:
                best = FLOAT_OF[kind](value if best != best else best)
            else:
                best = FLOAT_OF[kind](choice(best, value))
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

def float_result(function, noticed=None):
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
                setattr(self, name, float_result(getattr(math, name), noticed))
        self.exp2 = float_result(exp2, noticed)
        self.floor, self.ceil, self.trunc = (float_result(_whole(f)) for f in (math.floor, math.ceil, math.trunc))

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
