"""The emulator's arithmetic: Numba's types for every operation, and results that wrap and round as
a GPU's do."""

import math
import operator
from fractions import Fraction

import numpy as np
import pytest

from numdiff.emulator import Emulator, arithmetic, functions, values
from numdiff.emulator.conversions import fma
from numdiff.emulator.functions import MATH
from numdiff.emulator.values import TYPES, UInt8, UInt32, UInt64, scalar
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


ONE = {"USub": operator.neg, "UAdd": operator.pos, "Invert": operator.invert}
BUILTINS = {"abs": abs, "int": int, "float": float, "complex": complex, "round": round}


def test_types_of_unary_operations_are_numbas():
    ours = {**arithmetic.OPERATIONS, **functions.BUILTINS}
    for name, function in {**ONE, **BUILTINS}.items():
        for a in NAMES:
            want = numba_result(function, a)
            assert not want or kind_of(ours[name](made(a))) == want, (name, a, want)


def test_types_of_min_max_and_divmod_are_numbas():
    for a in NAMES[:12]:
        for b in NAMES[:12:2]:
            for function, ours in ((min, functions.minimum), (divmod, arithmetic.divided)):
                want = numba_result(function, a, b)
                if want:
                    got = ours(made(a), made(b))
                    got = f"UniTuple({kind_of(got[0])} x 2)" if function is divmod else kind_of(got)
                    assert got == want, (a, b, got, want)


def test_types_of_comparisons_are_numbas():
    """Both sides become the type that arithmetic.UNIFIED names: a narrower one if that is exact,
    too."""
    from numba.cuda import types
    from numba.cuda.descriptor import cuda_target

    context = cuda_target.typing_context
    context.refresh()
    letters = {name: arithmetic.LETTER[made(name).__class__] for name in NAMES}
    for a in NAMES[:12]:
        for b in NAMES[:12]:
            pair = [types.boolean if n == "bool" else getattr(types, n) for n in (a, b)]
            want = str(context.resolve_function_type(operator.lt, tuple(pair), {}).args[0]).replace(
                "boolean", "bool"
            )
            kind = arithmetic.UNIFIED[letters[a], letters[b]]
            narrower = {a, b} & {"uint8", "uint16"} and {a, b} & {"float16", "float32"}
            assert kind == letters[want] or narrower, (a, b, kind, want)


def test_types_of_math_are_numbas():
    for a in NAMES[:12]:
        for function in ("sqrt", "floor", "tanh", "fabs", "erf", "acos"):
            want = numba_result(getattr(math, function), a)
            assert kind_of(getattr(MATH, function)(made(a))) == want, (function, a)
        for b in NAMES[:12:2]:
            for function in ("pow", "atan2", "fmod"):
                want = numba_result(getattr(math, function), a, b)
                assert want in (None, kind_of(getattr(MATH, function)(made(a), made(b)))), (
                    function,
                    a,
                    b,
                    want,
                )


def test_scalars_have_numbas_types():
    assert kind_of(scalar(1.5)) == "float64" and kind_of(scalar(1)) == "int64"
    assert kind_of(scalar(np.int32(1))) == "int32" and kind_of(scalar(np.uint64(1))) == "uint64"
    assert kind_of(scalar(np.float16(1))) == "float16"


# Integers -----------------------------------------------------------------------------------------

EDGES = {
    name: sorted(
        {
            int(np.iinfo(name).min),
            int(np.iinfo(name).min) + 1,
            -7 if name[0] == "i" else 7,
            0,
            1,
            2,
            5,
            int(np.iinfo(name).max) - 1,
            int(np.iinfo(name).max),
        }
    )
    for name in INTEGERS
}


@pytest.mark.parametrize("name", INTEGERS)
def test_casts_wrap(name):
    for value in (
        0,
        1,
        -1,
        2**7,
        2**8 - 1,
        -(2**15) - 1,
        2**16,
        2**31,
        -(2**31) - 1,
        2**32 + 5,
        2**63,
        2**64 - 1,
        -(2**63),
    ):
        want = int(np.array(value & (2**64 - 1), np.uint64).astype(name))
        assert TYPES[name](value) == want, (name, value)
        assert TYPES[name](TYPES["int64"](value)) == want


@pytest.mark.parametrize("operation", ["Add", "Sub", "Mult", "BitAnd", "BitOr", "BitXor"])
def test_integer_operations_wrap_at_64_bits(operation):
    for a in INTEGERS:
        for b in INTEGERS:
            to = np.uint64 if a[0] == b[0] == "u" else np.int64
            for x in EDGES[a]:
                for y in EDGES[b]:
                    exact = BINARY[operation](x, y)
                    want = (
                        exact & 2**64 - 1
                        if to is np.uint64
                        else (exact + 2**63 & 2**64 - 1) - 2**63
                    )
                    got = arithmetic.OPERATIONS[operation](made(a, x), made(b, y))
                    assert TYPES[np.dtype(to).name](got) == want, (a, x, operation, b, y)
                    if to is np.uint64 or operation == "Mult":
                        assert got == want, (a, x, operation, b, y)


def test_int32_loops_wrap_where_they_are_cast():
    """The linear congruential generator of Numerical Recipes, in int32 and uint32, against NumPy."""
    state = unsigned = 12345
    signed, ours = TYPES["int32"](state), TYPES["uint32"](state)
    for _ in range(100):
        unsigned = (unsigned * 1664525 + 1013904223) % 2**32
        signed = TYPES["int32"](arithmetic.add(arithmetic.mul(signed, 1664525), 1013904223))
        factor, term = TYPES["uint32"](1664525), TYPES["uint32"](1013904223)
        ours = TYPES["uint32"](arithmetic.add(arithmetic.mul(ours, factor), term))
        assert ours == unsigned and signed == int(np.uint32(unsigned).astype(np.int32))


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


def test_bits_of_truth_values():
    for yes in (True, np.bool_(True)):
        assert (
            arithmetic.bitand(yes, 6) == 0
            and arithmetic.bitand(6, yes) == 0
            and arithmetic.bitor(yes, 6) == 7
        )
        assert arithmetic.bitxor(yes, UInt32(3)) == 2
        assert arithmetic.bitand(yes, np.bool_(False)) == False and arithmetic.invert(yes) == False  # noqa: E712
        assert (
            arithmetic.add(yes, yes) == 2
            and arithmetic.negative(yes) == -1
            and arithmetic.lshift(yes, 4) == 16
        )


def test_negative_and_inverse():
    """In the width of the operand, before the result becomes one of 64 bits, as Numba does."""
    assert arithmetic.negative(UInt32(1)) == 2**32 - 1 and arithmetic.invert(UInt64(0)) == 2**64 - 1
    assert arithmetic.negative(TYPES["int32"](-(2**31))) == -(2**31) and arithmetic.invert(5) == -6
    assert arithmetic.invert(UInt8(1)) == 254


# Floats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
def test_each_operation_rounds_to_its_type(name, rng):
    to = TYPES[name]
    digits = {"float16": 11, "float32": 24, "float64": 53}[name]

    def nearest(exact):
        return rounded_to(exact, digits)

    for x, y in rng.uniform(0.5, 2, (200, 2)):
        x, y = to(x), to(y)
        for operation in ("Add", "Mult", "Div"):
            exact = BINARY[operation](Fraction(float(x)), Fraction(float(y)))
            assert Fraction(float(arithmetic.OPERATIONS[operation](x, y))) == nearest(exact)


def rounded_to(exact, digits):
    """A fraction rounded to nearest even with `digits` binary digits."""
    if exact == 0:
        return Fraction(0)
    exponent = math.floor(math.log2(abs(exact)))
    unit = Fraction(2) ** (exponent - digits + 1)
    if abs(exact) / unit >= 2**digits:
        unit *= 2
    return Fraction(round(exact / unit)) * unit


@pytest.mark.parametrize("name", FLOATS)
def test_fma_rounds_once(name, rng):
    to, digits = TYPES[name], {"float16": 11, "float32": 24, "float64": 53}[name]
    draws = [tuple(v) for v in rng.uniform(-2, 2, (300, 3))]
    eps = float(np.finfo(to).eps)
    draws += [
        (1 + eps, 1 - eps, -1.0),
        (1 + eps, 1 + eps, eps * eps / 4),
        (1 + eps, 1.0, eps / 2),
        (1 + eps, 1 + 2 * eps, -1 - 3 * eps),
        (1.0, 1.0, eps / 2),
        (1.0, 1 + eps, eps / 2),
        (0.0, 3.0, -2.0),
    ]
    for a, b, c in draws:
        a, b, c = to(a), to(b), to(c)
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        if abs(exact) >= 2.0 ** (-14 + digits if name == "float16" else -100) or exact == 0:
            got = fma(a, b, c)
            assert got.__class__ is to and Fraction(float(got)) == rounded_to(exact, digits), (
                a,
                b,
                c,
            )
    with np.errstate(all="ignore"):
        assert np.isnan(fma(to("inf"), to(0), to(1))) and np.isinf(fma(to("inf"), to(1), to(1)))


def test_float16_is_not_float32_rounded_late():
    h = TYPES["float16"]
    assert arithmetic.add(h(2048), h(1)) == 2048  # 2049 has twelve digits
    with np.errstate(over="ignore"):
        assert arithmetic.mul(h(300), h(300)) == np.inf
    total = h(0)
    for _ in range(4096):
        total = arithmetic.add(total, h(1))
    assert total == 2048


def test_casts_between_floats_and_integers():
    int32, uint32, int64 = TYPES["int32"], TYPES["uint32"], TYPES["int64"]
    assert int32(np.float32(-2.9)) == -2 and int32(np.float32(2.9)) == 2  # towards zero
    # cvt saturates
    assert int32(np.float32(3e9)) == 2**31 - 1 and int32(np.float32(-3e9)) == -(2**31)
    assert uint32(np.float32(-1)) == 0 and uint32(np.float32(1e10)) == 2**32 - 1
    assert int64(np.float64(1e300)) == 2**63 - 1 and int64(np.float32("-inf")) == -(2**63)
    assert int32(np.float32("nan")) == 0
    assert (
        functions.to_integer(np.float32(-7.5)) == -7
        and functions.to_integer(np.float32(1e30)) == 2**63 - 1
    )
    assert TYPES["float32"](2**24 + 1) == 2**24 and functions.to_bool(np.float32(0.5)) is True


def test_minimum_and_maximum_of_floats():
    f = np.float32
    assert functions.maximum(f(1), f(2), f(-3)) == 2 and functions.minimum(f(1), f(2), f(-3)) == -3
    # fmax and fmin ignore a NaN: PTX ISA, section 9.7.3, `max`
    for a, b in ((f("nan"), f(1)), (f(1), f("nan"))):
        assert functions.maximum(a, b) == 1 and functions.minimum(a, b) == 1
    assert functions.maximum(3, -5) == 3 and functions.minimum(UInt64(2**64 - 1), UInt64(1)) == 1
    assert functions.absolute(f(-2)) == 2 and functions.absolute(-5) == 5
    assert kind_of(functions.absolute(UInt32(5))) == "uint32"


def test_round():
    f = np.float32
    assert [functions.rounded(f(x)) for x in (0.5, 1.5, 2.5, -0.5, -1.5, 2.4)] == [
        0,
        2,
        2,
        0,
        -2,
        2,
    ]
    assert functions.rounded(f(2.345), 2) == f(2.35) or functions.rounded(f(2.345), 2) == f(2.34)
    assert functions.rounded(np.float64(1234.5678), -2) == 1200


@pytest.mark.parametrize(
    "name",
    [
        "sqrt",
        "exp",
        "log",
        "sin",
        "cos",
        "tan",
        "tanh",
        "atan",
        "erf",
        "erfc",
        "log1p",
        "expm1",
        "asinh",
        "lgamma",
        "log2",
        "log10",
    ],
)
def test_math_functions_round_to_their_argument(name, rng):
    for x in rng.uniform(0.1, 3, 20):
        for to in (np.float32, np.float64):
            got = getattr(MATH, name)(to(x))
            assert got.__class__ is to and got == to(getattr(math, name)(float(to(x))))


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


def test_power():
    f = np.float32
    assert arithmetic.power(f(3), 2) == 9 and kind_of(arithmetic.power(f(3), 2)) == "float32"
    assert arithmetic.power(3, 4) == 81 and arithmetic.power(2, 63) == -(2**63)  # int64 wraps
    assert (
        arithmetic.power(f(2), f(-1)) == 0.5
        and kind_of(arithmetic.power(f(2), np.float64(0.5))) == "float64"
    )
    assert kind_of(arithmetic.power(2, f(2))) == "float64"


# Numbers of bits, on the machine ------------------------------------------------------------------


def bits_kernel(cuda):
    def kernel(x, out):
        i = cuda.grid(1)
        if i < x.shape[0]:
            out[i, 0] = cuda.popc(x[i])
            out[i, 1] = cuda.clz(x[i])
            out[i, 2] = cuda.ffs(x[i])
            out[i, 3] = cuda.brev(x[i])

    return kernel


@pytest.mark.parametrize("name", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("checks", [True, False])
def test_functions_of_bits_by_width(name, checks):
    from numdiff.device import cuda

    width = int(name[-2:])
    x = np.array(
        [0, 1, 2, 5, 2 ** (width - 2) + 12, 2 ** (width - 1) - 1, -1, -(2 ** (width - 1))]
    ).astype(object)
    x = np.array([int(v) % 2**width for v in x], np.uint64).astype(f"uint{width}").view(name)
    out = np.zeros((len(x), 4), np.int64)
    Emulator(checks=checks).launch(bits_kernel(cuda), 1, 8, x, out)
    for value, (popc, clz, ffs, brev) in zip(x, out.tolist(), strict=True):
        bits = f"{int(value) % 2**width:0{width}b}"
        assert (
            popc == bits.count("1")
            and clz == (bits + "1").index("1")
            and ffs == (bits[::-1] + "1").index("1") + 1 - (width + 1) * ("1" not in bits)
        ), (value, popc, clz, ffs)
        reverse = int(bits[::-1], 2)
        assert brev % 2**64 % 2**width == reverse


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
