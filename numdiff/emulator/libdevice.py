"""numba.cuda.libdevice on a CPU: its functions by name, in the types that their names say.

A name that ends in f works in float32, another one in float64; _rd, _ru, _rz and _rn round down,
up, towards zero and to the nearest. Of approximate functions (fast_…) the value is that of the
exact ones, rounded once.

SOURCE
    NVIDIA, libdevice user's guide.
"""

import math
import statistics
from fractions import Fraction

import numpy as np

from . import functions
from .conversions import fma, integer_of
from .faults import Unsupported
from .values import TYPES, Int32, float32, float64

_NORMAL = statistics.NormalDist()
_INT32, _INT64, _UINT32, _UINT64 = (TYPES[name] for name in ("int32", "int64", "uint32", "uint64"))


# Functions of one and of two floats, on Python's --------------------------------------------------


def _erfcinv(y):
    if not 0 <= y <= 2:
        return math.nan
    if y in (0, 2):
        return math.inf if y == 0 else -math.inf
    x = -_NORMAL.inv_cdf(y / 2) / math.sqrt(2)
    slope = -2 / math.sqrt(math.pi) * math.exp(-x * x)
    return x - (math.erfc(x) - y) / slope if slope else x


def _erfinv(y):
    if abs(y) >= 1:
        return math.copysign(math.inf, y) if abs(y) == 1 else math.nan
    x = (
        y * math.sqrt(math.pi) / 2
        if abs(y) < 1e-4
        else -_erfcinv(y + 1)
        if y < 0
        else _erfcinv(1 - y)
    )
    return x - (math.erf(x) - y) / (2 / math.sqrt(math.pi) * math.exp(-x * x))


def _erfcx(x):
    if x < 25:
        return math.exp(x * x) * math.erfc(x)
    return (1 - 1 / (2 * x**2) + 3 / (4 * x**4) - 15 / (8 * x**6) + 105 / (16 * x**8)) / (
        x * math.sqrt(math.pi)
    )


def _round(x):
    return math.copysign(
        math.floor(abs(x) + 0.5)
        if abs(x) < 2.0**52 and abs(x) != 0.49999999999999994
        else (abs(x) if abs(x) >= 2.0**52 else 0),
        x,
    )


def _of_pi(function):
    def call(x):
        x = math.fmod(x, 2)
        if function is math.sin and x == int(x):
            return math.copysign(0.0, x)
        if function is math.cos and abs(x) in (0.5, 1.5):
            return 0.0
        return function(math.pi * x)

    return call


def _logb(x):
    return float(math.frexp(x)[1] - 1) if x and math.isfinite(x) else abs(x) if x else -math.inf


def _bessel_j(n, x):
    """By its integral over a period, to which the trapezoidal rule converges quickly."""
    count = int(200 + 4 * abs(x) + 2 * abs(n))
    angles = np.arange(count) * (2 * math.pi / count)
    return float(np.cos(n * angles - x * np.sin(angles)).mean())


def _bessel_y(n, x):
    if x <= 0:
        return -math.inf if x == 0 else math.nan
    angles = np.linspace(0, math.pi, 40001 + int(40 * x))
    t = np.linspace(0, math.asinh(745 / x) + 1, 400001)
    with np.errstate(all="ignore"):
        tail = np.exp(n * t - x * np.sinh(t)) + (-1) ** n * np.exp(-n * t - x * np.sinh(t))
        return float(
            (_simpson(np.sin(x * np.sin(angles) - n * angles), angles) - _simpson(tail, t))
            / math.pi
        )


def _simpson(y, x):
    if len(x) % 2 == 0:
        x, y = x[:-1], y[:-1]
    return (x[1] - x[0]) / 3 * (y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum())


def _inverse_root(x):
    return math.inf if x == 0 else math.nan if x < 0 else 1 / math.sqrt(x)


def _cube_root(x):
    return math.copysign(float(np.cbrt(abs(x))), x)


_ONE = {
    **{
        name: getattr(math, name)
        for name in (
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atanh",
            "cos",
            "cosh",
            "erf",
            "erfc",
            "exp",
            "expm1",
            "fabs",
            "lgamma",
            "log",
            "log10",
            "log1p",
            "log2",
            "sin",
            "sinh",
            "sqrt",
            "tan",
            "tanh",
        )
    },
    "exp2": functions.exp2,
    "exp10": lambda x: 10.0**x,
    "tgamma": math.gamma,
    "cbrt": _cube_root,
    "rcbrt": lambda x: 1 / _cube_root(x) if x else math.copysign(math.inf, x),
    "rsqrt": _inverse_root,
    "ceil": lambda x: float(np.ceil(x)),
    "floor": lambda x: float(np.floor(x)),
    "trunc": lambda x: float(np.trunc(x)),
    "rint": lambda x: float(np.rint(x)),
    "nearbyint": lambda x: float(np.rint(x)),
    "round": _round,
    "cospi": _of_pi(math.cos),
    "sinpi": _of_pi(math.sin),
    "erfinv": _erfinv,
    "erfcinv": _erfcinv,
    "erfcx": _erfcx,
    "normcdf": lambda x: math.erfc(-x / math.sqrt(2)) / 2,
    "normcdfinv": lambda p: -math.sqrt(2) * _erfcinv(2 * p),
    "logb": _logb,
    "j0": lambda x: _bessel_j(0, x),
    "j1": lambda x: _bessel_j(1, x),
    "y0": lambda x: _bessel_y(0, x),
    "y1": lambda x: _bessel_y(1, x),
    "saturate": lambda x: min(max(x, 0.0), 1.0) if x == x else 0.0,
}
_TWO = {
    **{
        name: getattr(math, name)
        for name in ("atan2", "copysign", "fmod", "hypot", "pow", "remainder", "nextafter")
    },
    "fdim": lambda a, b: a - b if a > b else 0.0 if a == a and b == b else math.nan,
}


def _in_type(function, to):
    def call(*values):
        numbers = [float(to(v)) for v in values]
        try:
            return to(function(*numbers))
        except OverflowError:
            return to(functions._overflow(function, numbers))
        except (ValueError, ZeroDivisionError):
            return to(functions._outside(function, numbers))

    return call


# Directed rounding --------------------------------------------------------------------------------


def _directed(nearest, exact, mode):
    """The neighbour of a float on the side that a mode names; exact(v): below, at or above 0 as v
    is of the result."""
    side = 0 if nearest != nearest else exact(nearest)
    down = mode == "rd" or mode == "rz" and nearest > 0
    if mode == "rn" or side == 0 or (side < 0) == down:
        return nearest
    return np.nextafter(nearest, nearest.__class__(-math.inf if down else math.inf))


def _side(value, exact):
    if math.isinf(value):
        return 1 if value > 0 else -1
    difference = Fraction(float(value)) - exact
    return (difference > 0) - (difference < 0)


def _rounded(to, mode, compute, exact):
    """A function of floats of a type, rounded as a mode says. exact(*fractions): its exact result"""

    def call(*values):
        values = [to(v) for v in values]
        nearest = to(compute(*values))
        if mode == "rn" or not all(map(math.isfinite, values)) or nearest != nearest:
            return nearest
        try:
            result = exact(*(Fraction(float(v)) for v in values))
        except ZeroDivisionError:
            return nearest
        return _directed(nearest, lambda v: _side(v, result), mode)

    return call


def _root(to, mode):
    def call(x):
        x = to(x)
        nearest = np.sqrt(x)
        if not nearest > 0 or math.isinf(nearest):
            return nearest
        exact = Fraction(float(x))
        return _directed(
            nearest,
            lambda v: (Fraction(float(v)) ** 2 > exact) - (Fraction(float(v)) ** 2 < exact),
            mode,
        )

    return call


_ARITHMETIC = {
    "add": (lambda a, b: a + b,) * 2,
    "sub": (lambda a, b: a - b,) * 2,
    "mul": (lambda a, b: a * b,) * 2,
    "div": (lambda a, b: a / b,) * 2,
    "rcp": (lambda a: a.__class__(1) / a, lambda a: 1 / a),
    "fma": (fma, lambda a, b, c: a * b + c),
}


def _to_integer(to, cast, mode):
    """A float as an integer, in a mode: the integer's own type is in the name, Numba's is signed."""

    def call(value):
        value = to(value)
        whole = {"rd": np.floor, "ru": np.ceil, "rn": np.rint, "rz": np.trunc}[mode](float64(value))
        signed = "u" not in cast
        made = integer_of(to(whole) if value == value else value, 64 if "l" in cast else 32, signed)
        return (_INT64 if "l" in cast else _INT32)(made)

    return call


def _to_float(source, to, mode):
    def call(value):
        exact = Fraction(int(source(value)))
        return _directed(to(int(exact)), lambda v: _side(v, exact), mode)

    return call


def _narrowed(mode):
    def call(x):
        return _directed(
            float32(x), lambda v: _side(v, Fraction(float(x))) if math.isfinite(x) else 0, mode
        )

    return call


def _yes_or_no(test):
    return lambda x: Int32(bool(test(x)))


# Integers -----------------------------------------------------------------------------------------


def _of_integers(function, source, result):
    return lambda *values: result(function(*(int(source(v)) for v in values)))


def _byte_perm(a, b, selector):
    both = a | b << 32
    return sum((both >> 8 * (selector >> 4 * k & 7) & 255) << 8 * k for k in range(4))


def _low24(value, signed):
    value &= 0xFFFFFF
    return value - (1 << 24) if signed and value >> 23 else value


_WHOLE = {
    "abs": _of_integers(abs, _INT32, _INT32),
    "llabs": _of_integers(abs, _INT64, _INT64),
    "brev": _of_integers(lambda a: int(f"{a:032b}"[::-1], 2), _UINT32, _INT32),
    "brevll": _of_integers(lambda a: int(f"{a:064b}"[::-1], 2), _UINT64, _INT64),
    "byte_perm": _of_integers(_byte_perm, _UINT32, _INT32),
    "clz": _of_integers(lambda a: 32 - a.bit_length(), _UINT32, Int32),
    "clzll": _of_integers(lambda a: 64 - a.bit_length(), _UINT64, Int32),
    "ffs": _of_integers(lambda a: (a & -a).bit_length(), _UINT32, Int32),
    "ffsll": _of_integers(lambda a: (a & -a).bit_length(), _UINT64, Int32),
    "popc": _of_integers(lambda a: a.bit_count(), _UINT32, Int32),
    "popcll": _of_integers(lambda a: a.bit_count(), _UINT64, Int32),
    "hadd": _of_integers(lambda a, b: a + b >> 1, _INT32, _INT32),
    "rhadd": _of_integers(lambda a, b: a + b + 1 >> 1, _INT32, _INT32),
    "uhadd": _of_integers(lambda a, b: a + b >> 1, _UINT32, _INT32),
    "urhadd": _of_integers(lambda a, b: a + b + 1 >> 1, _UINT32, _INT32),
    "sad": lambda a, b, c: _INT32(abs(int(_INT32(a)) - int(_INT32(b))) + int(_UINT32(c))),
    "usad": _of_integers(lambda a, b, c: abs(a - b) + c, _UINT32, _INT32),
    "mul24": _of_integers(lambda a, b: _low24(a, True) * _low24(b, True), _INT32, _INT32),
    "umul24": _of_integers(lambda a, b: _low24(a, False) * _low24(b, False), _UINT32, _INT32),
    "mulhi": _of_integers(lambda a, b: a * b >> 32, _INT32, _INT32),
    "umulhi": _of_integers(lambda a, b: a * b >> 32, _UINT32, _INT32),
    "mul64hi": _of_integers(lambda a, b: a * b >> 64, _INT64, _INT64),
    "umul64hi": _of_integers(lambda a, b: a * b >> 64, _UINT64, _INT64),
    **{
        prefix + name: _of_integers(choose, source, result)
        for name, choose in (("max", max), ("min", min))
        for prefix, source, result in (
            ("", _INT32, _INT32),
            ("u", _UINT32, _INT32),
            ("ll", _INT64, _INT64),
            ("ull", _UINT64, _INT64),
        )
    },
}


# Bits and parts of floats -------------------------------------------------------------------------


def _bits(to, whole):
    return lambda x: TYPES[whole](int(to(x).view(np.uint64 if to is float64 else np.uint32)))


def _of_bits(to, unsigned, width):
    return lambda n: np.array(int(unsigned(n)), width).view(to)[()]


def _quotient_bits(to):
    def call(a, b):
        a, b = to(a), to(b)
        rest = _in_type(math.remainder, to)(a, b)
        quotient = (
            round(Fraction(float(a)) / Fraction(float(b)))
            if math.isfinite(a) and math.isfinite(b) and b
            else 0
        )
        return rest, Int32(math.copysign(abs(quotient) & 7, quotient))

    return call


def _power(to):
    from .arithmetic import power

    return lambda a, n: power(to(a), _INT32(n))


def _others(to, f):
    """The functions of a float type that have more than one result, or another type."""

    def of(name):
        return _in_type(_ONE[name], to)

    return {
        "frexp" + f: lambda x: (
            to(math.frexp(float(to(x)))[0]),
            Int32(math.frexp(float(to(x)))[1]),
        ),
        "modf" + f: lambda x: tuple(map(to, math.modf(float(to(x))))),
        "remquo" + f: _quotient_bits(to),
        "sincos" + f: lambda x: (of("sin")(x), of("cos")(x)),
        "sincospi" + f: lambda x: (of("sinpi")(x), of("cospi")(x)),
        **dict.fromkeys(("ldexp" + f, "scalbn" + f), lambda x, n: functions.MATH.ldexp(to(x), n)),
        "ilogb" + f: lambda x: (
            Int32(_logb(float(x)))
            if x and math.isfinite(x)
            else Int32(-(2**31) if x == 0 or x != x else 2**31 - 1)
        ),
        "llrint" + f: lambda x: integer_of(to(x), 64, True, nearest=True),
        "llround" + f: lambda x: integer_of(
            to(_round(float(x))) if math.isfinite(x) else to(x), 64, True
        ),
        "jn" + f: lambda n, x: to(_bessel_j(int(n), float(to(x)))),
        "yn" + f: lambda n, x: to(_bessel_y(int(n), float(to(x)))),
        "powi" + f: _power(to),
        "fmax" + f: lambda a, b: functions.maximum(to(a), to(b)),
        "fmin" + f: lambda a, b: functions.minimum(to(a), to(b)),
        "fma" + f: lambda a, b, c: fma(to(a), to(b), to(c)),
    }


def _table():
    found = dict(_WHOLE)
    for to, f in ((float64, ""), (float32, "f")):
        for name, function in (*_ONE.items(), *_TWO.items()):
            found[name + f] = _in_type(function, to)
        found.update(_others(to, f))
        kind, letter = ("double", "d") if to is float64 else ("float", "f")
        for mode in ("rd", "rn", "ru", "rz"):
            for name, (compute, exact) in _ARITHMETIC.items():
                known = f"fma{f}_{mode}" if name == "fma" else f"{letter}{name}_{mode}"
                found[known] = _rounded(to, mode, compute, exact)
            found[f"{letter}sqrt_{mode}"] = _root(to, mode)
            for whole, source in (
                ("int", _INT32),
                ("uint", _UINT32),
                ("ll", _INT64),
                ("ull", _UINT64),
            ):
                found[f"{kind}2{whole}_{mode}"] = _to_integer(to, whole, mode)
                found[f"{whole}2{kind}_{mode}"] = _to_float(source, to, mode)
            found[f"double2float_{mode}"] = _narrowed(mode)
        for name, test in (
            ("isinf", math.isinf),
            ("isnan", math.isnan),
            ("isfinite", math.isfinite),
            ("finite", math.isfinite),
            ("signbit", np.signbit),
        ):
            found[name + letter] = _yes_or_no(test)
    for name in ("cos", "exp10", "exp", "log10", "log2", "log", "sin", "tan", "pow", "sincos"):
        found[f"fast_{name}f"] = found[name + "f"]
    found.update(
        {
            "fast_fdividef": lambda a, b: float32(a) / float32(b),
            "frsqrt_rn": found["rsqrtf"],
            "double_as_longlong": _bits(float64, "int64"),
            "float_as_int": _bits(float32, "int32"),
            "longlong_as_double": _of_bits(float64, _UINT64, np.uint64),
            "int_as_float": _of_bits(float32, _UINT32, np.uint32),
            "double2hiint": lambda x: _INT32(int(float64(x).view(np.uint64)) >> 32),
            "double2loint": lambda x: _INT32(int(float64(x).view(np.uint64))),
            "hiloint2double": lambda high, low: np.array(
                int(_UINT32(high)) << 32 | int(_UINT32(low)), np.uint64
            ).view(float64)[()],
            "float2half_rn": lambda x: TYPES["int16"](int(np.float16(x).view(np.uint16))),
            "half2float": lambda n: float32(
                np.array(int(TYPES["uint16"](n)), np.uint16).view(np.float16)[()]
            ),
        }
    )
    return found


LIBDEVICE = _table()


class Libdevice:
    """`numba.cuda.libdevice` as a kernel sees it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in LIBDEVICE:
            raise Unsupported(f"the emulator does not know numba.cuda.libdevice.{name}")
        return LIBDEVICE[name]
