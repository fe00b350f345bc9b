"""The emulator's operators against what Numba compiles, on random operands of pairs of types
(operators.py).

`numba.njit` is the reference, with NumPy's rules for divisions by zero, which are those of CUDA.
Where CUDA's results are others, tests of their own hold them against the instructions in the PTX
that Numba emits.
"""

import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from numba import types

from numdiff.device import cuda
from numdiff.device.ptx import compile_to_ptx
from numdiff.emulator import Emulator, arithmetic, functions
from numdiff.emulator.values import TYPES as CASTS
from numdiff.emulator.values import UInt32, UInt64
from tests.conftest import exhaustively
from tests.emulator import operators

PAIRS = list(itertools.product(operators.TYPES, repeat=2))
# each type on both sides; `python -m tests.emulator.operators --seeds 10` has all pairs
SOME = PAIRS[::7]
FEW = [("int8", "float32"), ("uint64", "int16")]


@pytest.mark.parametrize(
    "one, other, seeds", [(*pair, 1) for pair in FEW] + exhaustively(*((*pair, 2) for pair in SOME))
)
def test_operators_are_numbas(one, other, seeds):
    found = [
        each for seed in range(seeds) for each in operators.differences(one, other, seed, count=20)
    ]
    assert not found, found[:5]


@pytest.mark.parametrize(
    "array, value, seeds",
    [(*pair, 1) for pair in FEW] + exhaustively(*((*pair, 2) for pair in SOME)),
)
def test_augmented_assignments_are_numbas(array, value, seeds):
    if group_of_complex(value) and not group_of_complex(array):
        pytest.skip("a complex number does not become a real one")
    found = [
        each
        for seed in range(seeds)
        for each in operators.augmented_differences(array, value, seed, count=5)
    ]
    assert not found, found[:5]


def group_of_complex(name):
    return operators.group(name) == "c"


# Where CUDA differs -------------------------------------------------------------------------------


def ptx_of(function, *names):
    kinds = [
        types.Array(types.boolean if n == "bool" else getattr(types, n), 1, "C") for n in names
    ]
    return compile_to_ptx(cuda.jit(function), tuple(kinds), (8, 0))


def store(a, b):
    b[0] = a[0]


@pytest.mark.parametrize(
    "source, target, instruction",
    [
        ("float64", "int8", "cvt.rzi.s16.f64"),
        ("float32", "uint8", "cvt.rzi.u16.f32"),
        *exhaustively(
            ("float32", "int8", "cvt.rzi.s16.f32"),
            ("float64", "uint16", "cvt.rzi.u16.f64"),
            ("float32", "int32", "cvt.rzi.s32.f32"),
            ("float64", "uint32", "cvt.rzi.u32.f64"),
            ("float32", "uint64", "cvt.rzi.u64.f32"),
            ("float64", "int64", "cvt.rzi.s64.f64"),
            ("float16", "int32", "cvt.rni.s32.f16"),
            ("float16", "uint8", "cvt.rni.u8.f16"),
        ),
    ],
)
def test_ptx_of_conversions(source, target, instruction):
    assert instruction in ptx_of(store, source, target)


CONVERTED = [  # (a float, {type: what `cvt` makes of it})
    (np.float64(300.7), {"int8": 44, "uint8": 44, "int16": 300, "uint16": 300}),
    (
        np.float32(-1.5),
        {"int8": -1, "uint8": 0, "uint16": 0, "uint32": 0, "uint64": 0, "int64": -1},
    ),
    (np.float64(40000.5), {"int8": -1, "uint8": 64, "int16": 32767, "uint16": 40000}),
    (
        np.float64(1e30),
        {
            "int8": -1,
            "uint8": 255,
            "int32": 2**31 - 1,
            "uint32": 2**32 - 1,
            "int64": 2**63 - 1,
            "uint64": 2**64 - 1,
        },
    ),
    (
        np.float64(-math.inf),
        {"int8": 0, "int16": -(2**15), "int32": -(2**31), "int64": -(2**63), "uint64": 0},
    ),
    (
        np.float32(math.nan),
        {"int8": 0, "int16": 0, "int32": 0, "uint32": 0, "int64": -(2**63), "uint64": 2**63},
    ),
    (
        np.float64(math.nan),
        {
            "int8": 0,
            "int16": -(2**15),
            "uint16": 2**15,
            "int32": -(2**31),
            "uint32": 2**31,
            "int64": -(2**63),
        },
    ),
    (np.float16(2.5), {"int8": 2, "int32": 2, "uint64": 2}),
    (np.float16(3.5), {"int8": 4, "uint32": 4}),
    (np.float16(300), {"int8": 127, "uint8": 255, "int16": 300}),
    (np.float16(math.nan), {"int8": 0, "int32": 0}),
]


@pytest.mark.parametrize("value, wanted", CONVERTED, ids=[f"{v.dtype} {v}" for v, _ in CONVERTED])
def test_conversions_of_floats(value, wanted):
    """PTX ISA, section 9.7.9, `cvt`: saturates, and what NaN becomes; the instructions are those of
    the test above."""
    for name, want in wanted.items():
        assert CASTS[name](value) == want, name
        for checks in (True, False):
            y = np.zeros(1, name)
            Emulator(checks=checks, float64=True).launch(store, 1, 1, np.array([value]), y)
            assert y[0] == want, (name, checks)


def test_rounding_to_integers():
    """`round` is `cvt.rni.s64.f64`."""
    for x, want in (
        (2.5, 2),
        (3.5, 4),
        (-0.5, 0),
        (1e30, 2**63 - 1),
        (-math.inf, -(2**63)),
        (math.nan, -(2**63)),
    ):
        assert functions.rounded(np.float64(x)) == functions.rounded(np.float32(x)) == want
    for x, digits, want in (
        (2.675, 2, 2.68),
        (2.5, 0, 2.0),
        (1234.5, -2, 1200),
        (math.inf, 2, math.inf),
    ):
        assert functions.rounded(np.float64(x), digits) == want
    assert type(functions.rounded(np.float32(2.625), 2)) is np.float32


def test_shifts_take_32_bits_of_their_amount():
    def shifts(a, b, c, d):
        c[0], d[0] = a[0] << b[0], a[0] >> b[0]

    text = ptx_of(shifts, "int64", "int64", "int64", "int64")
    assert re.search(r"shl\.b64.*%r\d", text) and re.search(r"shr\.s64.*%r\d", text)
    for by, left, right in (
        (64, 0, -1),
        (1 << 32, -5, -5),
        ((1 << 32) + 1, -10, -3),
        (-1, 0, -1),
        (63, -(2**63), -1),
    ):
        for checks in (True, False):
            c, d = np.zeros(1, np.int64), np.zeros(1, np.int64)
            Emulator(checks=checks).launch(shifts, 1, 1, np.array([-5]), np.array([by]), c, d)
            assert (c[0], d[0]) == (left, right), by
    assert arithmetic.rshift(UInt32(5), 64) == 0 and arithmetic.lshift(UInt64(5), 1 << 32) == 5


def test_both_branches_of_an_expression_have_one_type():
    """float32 and a literal integer are a float64, as Numba infers it; a bare literal stays what it
    is."""

    def kernel(x, n, out):
        a = x[0] if n[0] else 0
        b = 0.0 if n[1] else x[0]
        c = n[0] if n[0] else -1
        out[0], out[1] = a * x[1], b * x[1]
        out[2], out[3] = c - 8, (1 if n[0] else 0) / 4

    x, n, out = np.array([0.1, 0.3], np.float32), np.array([7, 0], np.uint32), np.zeros(4)
    for checks in (True, False):
        Emulator(checks=checks, float64=True).launch(kernel, 1, 1, x, n, out)
        product = float(x[0]) * float(x[1])
        assert out.tolist() == [product, product, -1, 0.25] and product != float(x[0] * x[1])


def remainder(x, y):
    """NVVM's remainder, whose product and difference are rounded once, and Python's sign; of
    float32."""
    size = np.float32(abs(y))
    whole = np.floor(np.float32(abs(x)) / size)
    rest = np.float32(
        float(Fraction(float(abs(x))) - Fraction(float(whole)) * Fraction(float(size)))
    )
    rest = -rest if x < 0 else rest
    if rest == 0:
        return np.copysign(np.float32(0), y)
    return rest + y if (rest < 0) != (y < 0) else rest


def test_remainders_of_floats_are_nvvms():
    def rest(a, b, c):
        c[0] = a[0] % b[0]

    text = ptx_of(rest, "float32", "float32", "float32")
    assert re.search(
        r"div\.rn\.f32(.*\n)+.*cvt\.rmi\.f32\.f32(.*\n)+.*mul\.f32(.*\n)+.*sub\.f32", text
    )
    dice = np.random.default_rng(0)
    for x, y in zip(
        dice.normal(size=200).astype(np.float32) * 100,
        dice.normal(size=200).astype(np.float32),
        strict=True,
    ):
        assert arithmetic.mod(x, y) == remainder(x, y), (x, y)
    with np.errstate(all="ignore"):
        assert math.isnan(arithmetic.mod(np.float32(3), np.float32(math.inf)))
        assert math.isnan(arithmetic.mod(np.float32(3), np.float32(0)))
        assert arithmetic.floordiv(np.float32(3), np.float32(0)) == math.inf
        assert arithmetic.floordiv(np.float32(-7), np.float32(2)) == -4


def test_integers_divided_by_zero():
    """They give 0, and where accesses are checked a fault says so."""

    def kernel(a, b, c):
        c[0], c[1] = a[0] // b[0], a[0] % b[0]

    for kind in (np.int32, np.uint8, np.int64):
        c = np.ones(2, np.int64)
        Emulator(checks=False).launch(kernel, 1, 1, np.array([7], kind), np.zeros(1, kind), c)
        assert c.tolist() == [0, 0]
        gpu = Emulator(on_fault="collect")
        gpu.launch(kernel, 1, 1, np.array([7], kind), np.zeros(1, kind), c)
        assert [f.kind for f in gpu.faults] == [
            "division"
        ] and "floordiv 0, which gives 0" in gpu.faults[0].message
    assert arithmetic.floordiv(-(2**63), -1) == arithmetic.mod(-(2**63), -1) == 0
