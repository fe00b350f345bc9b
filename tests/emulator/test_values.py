"""The emulator's arithmetic: Numba's types for every operation, and results that wrap and round as
a GPU's do."""

import math
import operator

import numpy as np
import pytest

from numdiff.emulator import Emulator, arithmetic, functions, values
from numdiff.emulator.functions import MATH
from numdiff.emulator.values import TYPES, UInt8, UInt32, UInt64
from tests.conftest import exhaustive

NAMES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
INTEGERS, FLOATS, COMPLEX = NAMES[1:9], NAMES[9:12], NAMES[12:]
BINARY = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "BitAnd": operator.and_,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
}
KIND = {
    bool: "bool",
    np.bool_: "bool",
    int: "int64",
    np.float16: "float16",
    np.float32: "float32",
    np.float64: "float64",
    np.complex64: "complex64",
    np.complex128: "complex128",
    **{t.kind: name for name, t in values.INTEGER_TYPES.items()},
}


def numba_result(function, *names):
    """The name of the type that Numba's typing gives, or None if it has no such operation."""
    from numba.cuda import types
    from numba.cuda.descriptor import cuda_target

    context = cuda_target.typing_context
    context.refresh()
    arguments = tuple(types.boolean if n == "bool" else getattr(types, n) for n in names)
    try:
        signature = context.resolve_function_type(function, arguments, {})
    except Exception:  # Numba's errors of typing have no common class
        return None
    return str(signature.return_type).replace("boolean", "bool") if signature else None


def made(name, value=1):
    return TYPES[name](value)


def kind_of(value):
    return KIND[value.__class__]


# Types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", BINARY)
def test_types_of_binary_operations_are_numbas(operation):
    wrong = []
    for a in NAMES:
        for b in NAMES:
            want = numba_result(BINARY[operation], a, b)
            if want is None:  # a mistake that Numba's compiler reports
                continue
            got = kind_of(arithmetic.OPERATIONS[operation](made(a), made(b)))
            if got != want:
                wrong.append(f"{a} {operation} {b}: {got}, Numba {want}")
    assert not wrong, "\n".join(wrong)


# Integers -----------------------------------------------------------------------------------------


def test_minimum_and_maximum_of_floats():
    f = np.float32
    assert functions.maximum(f(1), f(2), f(-3)) == 2 and functions.minimum(f(1), f(2), f(-3)) == -3
    # fmax and fmin ignore a NaN: PTX ISA, section 9.7.3, `max`
    for a, b in ((f("nan"), f(1)), (f(1), f("nan"))):
        assert functions.maximum(a, b) == 1 and functions.minimum(a, b) == 1
    assert functions.maximum(3, -5) == 3 and functions.minimum(UInt64(2**64 - 1), UInt64(1)) == 1
    assert functions.absolute(f(-2)) == 2 and functions.absolute(-5) == 5
    assert kind_of(functions.absolute(UInt32(5))) == "uint32"
    # a float32 and a float64 are compared, and returned, as float64
    assert kind_of(functions.minimum(f(1), np.float64(2))) == "float64"
    assert kind_of(functions.maximum(f(3), np.float64(2))) == "float64"


def test_division_and_remainder_round_down():
    for x in (-7, -1, 0, 1, 7, 2**40):
        for y in (-3, -1, 2, 3, 2**33):
            assert arithmetic.floordiv(x, y) == x // y and arithmetic.mod(x, y) == x % y
            assert arithmetic.floordiv(TYPES["int64"](x), TYPES["int64"](y)) == x // y
    assert arithmetic.floordiv(UInt64(2**64 - 1), UInt64(10)) == (2**64 - 1) // 10
    assert arithmetic.mod(UInt64(2**64 - 1), UInt64(10)) == (2**64 - 1) % 10
    assert arithmetic.floordiv(np.float32(-7), np.float32(2)) == -4
    assert arithmetic.mod(np.float32(-7), np.float32(2)) == 1


def test_shifts():
    assert (
        arithmetic.lshift(1, 63) == -(2**63)
        and arithmetic.lshift(1, 64) == 0
        and arithmetic.lshift(3, 62) == -(2**62)
    )
    assert (
        arithmetic.lshift(UInt32(1), 40) == 2**40
        and kind_of(arithmetic.lshift(UInt32(1), 40)) == "uint64"
    )
    assert arithmetic.lshift(UInt64(3), 63) == 2**63
    assert (
        arithmetic.rshift(-8, 1) == -4
        and arithmetic.rshift(-1, 70) == -1
        and arithmetic.rshift(-(2**63), 63) == -1
    )
    assert (
        arithmetic.rshift(UInt64(2**64 - 1), 63) == 1
        and arithmetic.rshift(UInt64(2**64 - 1), 64) == 0
    )
    assert arithmetic.rshift(TYPES["uint32"](-1), 4) == 2**28 - 1


def test_negative_and_inverse():
    """In the width of the operand, before the result becomes one of 64 bits, as Numba does."""
    assert arithmetic.negative(UInt32(1)) == 2**32 - 1 and arithmetic.invert(UInt64(0)) == 2**64 - 1
    assert arithmetic.negative(TYPES["int32"](-(2**31))) == -(2**31) and arithmetic.invert(5) == -6
    assert arithmetic.invert(UInt8(1)) == 254


# Floats -------------------------------------------------------------------------------------------


def test_math_functions_at_the_edges():
    f = np.float32
    assert MATH.exp(f(1000)) == np.inf and MATH.exp(f(-1000)) == 0 and MATH.log(f(0)) == -np.inf
    assert np.isnan(MATH.log(f(-1))) and np.isnan(MATH.sqrt(f(-1))) and np.isnan(MATH.acos(f(2)))
    assert (
        MATH.floor(f("inf")) == np.inf
        and np.isnan(MATH.ceil(f("nan")))
        and MATH.floor(f(-1.5)) == -2
    )
    assert (
        MATH.trunc(f(-1.5)) == -1
        and MATH.fabs(f(-1.5)) == 1.5
        and MATH.pow(f(2), f(0.5)) == f(math.sqrt(2))
    )
    assert (
        MATH.isnan(f("nan")) is True
        and MATH.isinf(f("inf")) is True
        and MATH.isfinite(f(1)) is True
    )
    assert MATH.pow(f(0), f(-1)) == np.inf and MATH.atan2(f(1), f(-1)) == f(math.atan2(1, -1))
    assert (
        MATH.exp2(f(10)) == 1024 and MATH.exp2(f(5000)) == np.inf and MATH.fmod(f(-7), f(3)) == -1
    )
    assert np.isnan(MATH.fmod(f(1), f(0))) and MATH.ldexp(f(1.5), 3) == 12
    mantissa, exponent = MATH.frexp(f(12))
    assert (mantissa, exponent) == (0.75, 4)
    assert MATH.modf(f(-2.5)) == (-0.5, -2)


# Numbers of bits, on the machine ------------------------------------------------------------------


# The same arithmetic, compiled --------------------------------------------------------------------


def mixed(a, b, c, x, y):
    """Arithmetic in which every promotion matters; a, b, c int32, uint32, int64; x, y float32,
    float64."""
    i = a * b + c
    j = (a ^ c) - (c >> 3)
    k = b * b
    d = x * y + a
    e = d / (y * y + 1.5) - x
    m = c % 17 + a // 5
    return i + j + m, k, e, x * x + x


@exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_against_numba_on_the_cpu(seed):
    """The rewritten function gives what Numba compiles the same lines to (its CPU target has these
    rules in common)."""
    import numba

    compiled = numba.njit(mixed)
    rng = np.random.default_rng(seed)
    n = 40
    a, b = (
        rng.integers(-(2**31), 2**31, n).astype(np.int32),
        rng.integers(0, 2**32, n).astype(np.uint32),
    )
    c = rng.integers(-(2**62), 2**62, n)
    x, y = rng.normal(size=n).astype(np.float32), rng.normal(size=n)
    got = np.zeros(n, np.int64), np.zeros(n, np.uint64), np.zeros(n), np.zeros(n, np.float32)

    def kernel(a, b, c, x, y, i, k, e, s):
        for t in range(a.shape[0]):
            i[t], k[t], e[t], s[t] = mixed(a[t], b[t], c[t], x[t], y[t])

    Emulator(checks=False).launch(kernel, 1, 1, a, b, c, x, y, *got)
    for t in range(n):
        want = compiled(a[t], b[t], c[t], x[t], y[t])
        assert got[0][t] == want[0] and got[1][t] == want[1] % 2**64
        assert got[2][t] == pytest.approx(want[2], rel=1e-15) and got[3][t] == np.float32(want[3])


@pytest.mark.parametrize("kind", [values.float32, values.float64])
def test_a_power_of_a_half_is_no_square_root(kind):
    bases, want = (-np.inf, -0.0, 2.25, np.inf), [np.inf, 0, 1.5, np.inf]
    for power in arithmetic.power, MATH.pow:
        got = [power(kind(base), kind(0.5)) for base in bases]
        assert got == want and not np.signbit(got).any()
