"""Operators and functions on every pair of types: what the emulator makes of them, and what Numba
compiles.

`python -m tests.emulator.operators` prints where the two differ; test_operators.py is the test.
"""

import argparse
import functools
import linecache
import math
import random
import struct
import warnings
from fractions import Fraction

import numpy as np
from numba import njit, types
from numba.core.errors import NumbaError

from numdiff.emulator import Emulator
from numdiff.emulator.values import INTEGER_TYPES, Literal, scalar

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS, COMPLEX = ("float32", "float64"), ("complex64", "complex128")
TYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
ARITHMETIC = ("a + b", "a - b", "a * b", "a / b", "a == b", "a != b", "a is b", "a is not b")
REAL = (
    "a // b",
    "a % b",
    "a < b",
    "a <= b",
    "a > b",
    "a >= b",
    "min(a, b)",
    "max(a, b)",
    "divmod(a, b)[0]",
    "divmod(a, b)[1]",
    "a ** b",
    "pow(a, b)",
)
BITS = ("a & b", "a | b", "a ^ b", "a << (b & 31)", "a >> (b & 31)")
BITS_OF_BOOL = ("a & b", "a | b", "a ^ b")
ONE = ("-a", "+a", "not a", "bool(a)", "a is True", "a is not False", "a is a")
ONE_REAL = (
    "abs(a)",
    "float(a)",
    "int(a)",
    "round(a)",
    "a + 1",
    "a * 2",
    "a - 1.5",
    "a // 3",
    "a % 3",
    "a ** 2",
    "a * True",
    "complex(a)",
    "1 - a",
    "2 ** (a % 7)",
    "3 / a",
    "abs(a) ** 0.5",
    "a is 1",
    "a is not 2.0",
)
CASTS = tuple(f"{name}(a)" for name in (*INTEGERS, *FLOATS))
ONE_INTEGER = ("~a", "a << 3", "a >> 2", "a & 6", "a ^ 5", "1 << (a & 31)")


def group(name):
    return (
        "b"
        if name == "bool"
        else "i"
        if "int" in name
        else "f"
        if name in FLOATS or name == "float16"
        else "c"
    )


def expressions(one, other):
    """Those that Numba takes of two types (by name), and those of the first alone."""
    groups = group(one) + group(other)
    two = ARITHMETIC
    if "c" not in groups:
        two += REAL
    else:
        two += ("a ** b",)
    if set(groups) <= {"i"}:
        two += BITS
    elif set(groups) <= {"b", "i"}:
        two += BITS_OF_BOOL
    single = ONE
    if one != "bool" and "c" not in group(one):
        single += ONE_REAL + CASTS
    if group(one) == "i":
        single += ONE_INTEGER
    return two, single


_number = [0]


def function_of(texts):
    """A function of a and b that gives a tuple of these expressions; its source can be found."""
    _number[0] += 1
    name = f"<expressions {_number[0]}>"
    lines = [f"    r{k} = {text}\n" for k, text in enumerate(texts)]
    results = "".join(f"r{k}, " for k in range(len(texts)))
    source = f"def expressions(a, b):\n{''.join(lines)}    return ({results})\n"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    space = {"math": math, **{t: getattr(np, t) for t in TYPES if t != "bool"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # `is` with a number
        exec(compile(source, name, "exec"), space)
    return space["expressions"]


@functools.cache
def compiled(texts, one, other):
    """(the texts that Numba compiles for these types, function, names of the results' types)."""
    signature = tuple(getattr(types, "boolean" if t == "bool" else t) for t in (one, other))
    try:
        function = njit([signature], error_model="numpy")(function_of(texts))
    except NumbaError:
        texts = [text for text in texts if takes(text, one, other)]
        function = njit([signature], error_model="numpy")(function_of(texts))
    names = [str(t) for t in function.nopython_signatures[0].return_type]
    return texts, function, names


_takes = {}


def takes(text, one, other):
    key = text, group(one), group(other)
    if key not in _takes:
        _takes[key] = True
        try:
            njit([tuple(getattr(types, "boolean" if t == "bool" else t) for t in (one, other))])(
                function_of([text])
            )
        except NumbaError:
            _takes[key] = False
    return _takes[key]


def operand(name, dice):
    """A number of a type: a special one, a small one, or any."""
    if name == "bool":
        return np.bool_(dice.random() < 0.5)
    dtype = np.dtype(name)
    if dtype.kind in "iu":
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        kind = dice.randrange(4)
        if kind == 0:
            value = dice.choice((0, 1, 2, 3, low, high, low + 1, high - 1, -1, -2))
        elif kind == 1:
            value = dice.randint(-12, 12)
        elif kind == 2:
            value = (1 << dice.randrange(dtype.itemsize * 8)) + dice.randint(-1, 1)
        else:
            value = dice.randint(low, high)
        return dtype.type(min(max(value, low), high) if value >= 0 or low < 0 else -value)
    if dtype.kind == "c":
        part = "float32" if name == "complex64" else "float64"
        return dtype.type(complex(float(operand(part, dice)), float(operand(part, dice))))
    kind = dice.randrange(5)
    if kind == 0:
        value = dice.choice(
            (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 0.5, -0.5, 1.5, 2.5, -2.5)
        )
    elif kind == 1:
        value = float(dice.randint(-12, 12))
    elif kind == 2:
        value = (
            dice.choice((-1, 1)) * 2.0 ** dice.uniform(-30, 70)
            if name != "float16"
            else dice.uniform(-1000, 1000)
        )
    elif kind == 3:
        value = dice.uniform(-9, 9)
    else:
        bits = {2: "<e", 4: "<f", 8: "<d"}[dtype.itemsize]
        (value,) = struct.unpack(bits, dice.randbytes(dtype.itemsize))
    with np.errstate(all="ignore"):
        return dtype.type(value)


NAMES = {
    **{kind.kind: name for name, kind in INTEGER_TYPES.items()},
    Literal: "int64",
    bool: "bool",
    np.bool_: "bool",
    float: "float64",
    complex: "complex128",
}


def type_name(value):
    return NAMES.get(type(value), type(value).__name__)


def same(text, name, got, want, operands):
    """Whether a result has the type and the value that Numba gives it; None if the two need not
    agree."""
    if type_name(got) != ("bool" if name == "boolean" else name):
        return False
    a, b = operands
    # of floats see test_conversions_of_floats
    if ("round" in text or "int" in text) and text.endswith("(a)"):
        if group(type_name(a)) != "f":
            return int(got) == int(want) if "int" in text or abs(int(a)) < 1 << 62 else None
        low, high = (
            (0, 127)
            if "int8" in text
            else (0, 2**15 - 1)
            if "int16" in text
            else (0, 2**31 - 1)
            if ("int32" in text)
            else (0 if "u" in text.replace("round", "") else -(2**63), 2**63 - 1)
        )
        if not low <= a <= high:
            return None
    if "m" in text[:3] and (a != a or b != b or a == b == 0) and group(name) == "f":
        return None  # PTX's min and max: test_min_and_max_of_floats
    if "**" in text or "pow" in text:
        if group(name) == "i" and abs(int(b)) > 0x10000:
            return None  # Numba's limit, after which it converts a float, which saturates on a GPU
        if name.startswith("complex"):  # numba-cuda has an algorithm of its own, for squares too
            return (
                abs(got - want) <= (1e-4 if name == "complex64" else 1e-12) * abs(want)
                if abs(b) < 8 and (np.isfinite(got) and np.isfinite(want) and 1e-30 < abs(want))
                else None
            )
    if name.startswith(("int", "uint", "bool")):
        return int(got) == int(want)
    if name.startswith("float") and ("%" in text or "//" in text or "divmod" in text):
        b = 7.0 if "7" in text else 3.0 if "3" in text else float(b)
        if not 0 < abs(b) < math.inf or not math.isfinite(float(a)):
            return None  # NVVM's remainder of an infinite divisor is NaN: test_remainders
        quotient = Fraction(float(a)) / Fraction(b)
        if abs(quotient) > 1 << 18 or abs(quotient - round(quotient)) < Fraction(1, 1 << 18) * max(
            1, abs(quotient)
        ):
            return None  # where NVVM's remainder is not exact
        return (
            abs(float(got) - float(want)) <= 1e-6 * abs(b)
            or "//" in text
            and float(got) == float(want)
            or (abs(float(got) - float(want)) <= 1e-6 * abs(float(want)))
        )
    parts = ("real", "imag") if name.startswith("complex") else ("real",)
    kind = np.float32 if name in ("float32", "complex64") else np.float64
    approximate = (
        "**" in text
        or "pow" in text
        or name.startswith("complex")
        and ("/" in text or "*" in text or "abs" in text)
    )
    with np.errstate(all="ignore"):
        for part in parts:
            x, y = kind(getattr(got, part)), kind(getattr(want, part))
            if np.isnan(x) and np.isnan(y):
                continue
            if approximate and np.isclose(x, y, rtol=4e-7 if kind is np.float32 else 1e-15, atol=0):
                continue
            if x.tobytes() != y.tobytes():
                return False
    return True


def differences(one, other, seed, count=40, machines=None):
    """[(expression, operands, the emulator's result, Numba's)] of two types."""
    two, single = expressions(one, other)
    texts, function, names = compiled((*two, *(single if one == other else ())), one, other)
    dice, found = random.Random(f"{one} {other} {seed}"), []
    with np.errstate(all="ignore"):
        for _ in range(count):
            a, b = operand(one, dice), operand(other, dice)
            try:
                want = function(a, b)
            # the least int64 as an exponent; complex numbers by 0
            except (OverflowError, ZeroDivisionError):
                continue
            for machine, emulated in machines or ways():
                for text, name, w in zip(texts, names, want, strict=True):
                    if text not in emulated:
                        emulated[text] = machine.function(function_of([text]))
                    try:
                        (got,) = emulated[text](scalar(a), scalar(b))
                    except Exception as error:
                        found.append((text, (a, b), error, (name, w)))
                        continue
                    if same(text, name, got, w, (a, b)) is False:
                        found.append((text, (a, b), (type_name(got), got), (name, w)))
    return found


def ways():
    """The emulator with no checks and with some, whose operations differ."""
    checked = Emulator(checks=("bounds",))
    checked.float64_is_meant, checked.report = True, lambda *arguments: None  # of divisions by zero
    return [(Emulator(checks=False), {}), (checked, {})]


# Augmented assignments into arrays ----------------------------------------------------------------

AUGMENTED = ("+=", "-=", "*=", "/=", "//=", "%=", "&=", "|=", "^=", "<<=", ">>=", "=")


def augmented(array, value):
    """The source of a function that does each of these to an element of x, as far as Numba takes
    them, and how many."""
    signs = [
        s
        for s in AUGMENTED
        if not (
            {"f", "c"} & {group(array), group(value)}
            and s[0] in "&|^<>"
            or "c" in group(value)
            and group(array) != "c"
            or "c" in (group(array), group(value))
            and s[0] in "/%"
            and s != "/="
        )
    ]
    lines = "".join(
        f"    x[{k}] {sign} {'b & 15' if '<' in sign or '>' in sign else 'b'}\n"
        for k, sign in enumerate(signs)
    )
    return "def augment(x, b):\n" + lines, signs


def augmented_differences(array, value, seed, count=20):
    """[(operation, operands, the emulator's element, Numba's)] of x[k] += b and the like."""
    source, signs = augmented(array, value)
    _number[0] += 1
    name, space = f"<augmented {_number[0]}>", {}
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # `is` with a number
        exec(compile(source, name, "exec"), space)
    types_of = [getattr(types, "boolean" if t == "bool" else t) for t in (array, value)]
    function = njit([(types.Array(types_of[0], 1, "C"), types_of[1])], error_model="numpy")(
        space["augment"]
    )
    dice, found = random.Random(f"{array} {value} {seed}"), []
    with np.errstate(all="ignore"):
        for _ in range(count):
            x, b = np.array([operand(array, dice) for _ in signs]), operand(value, dice)
            want = x.copy()
            try:
                function(want, b)
            except (OverflowError, ZeroDivisionError):
                continue
            for checks in (True, False):
                got = x.copy()
                machine = Emulator(checks=checks, float64=True, on_fault="collect")
                machine.launch(space["augment"], 1, 1, got, b)
                for sign, before, g, w in zip(signs, x, got, want, strict=True):
                    if not _same_element(sign, before, b, g, w):
                        found.append((sign, (before, b), g, w))
    return found


def _same_element(sign, before, b, got, want):
    if got.tobytes() == want.tobytes() or got != got and want != want:
        return True
    kind = got.dtype.kind
    if kind in "iu" and (group(type_name(b)) == "f" or sign == "/="):
        return True  # a float that is converted: test_conversions_of_floats
    if kind == "b" and group(type_name(b)) == "f" and sign in ("//=", "%="):
        # NaN, which is true, where the divisor is infinite: test_remainders_of_floats_are_nvvms
        return True
    if kind in "fc" and sign in ("//=", "%="):
        return same(f"a {sign[:-1]} b", got.dtype.name, got, want, (before, b)) is not False
    return kind == "c" and np.isclose(got, want, rtol=1e-6)


def main(seeds=(0,), chosen=None):
    machines, pairs, differing = ways(), 0, 0
    for one in TYPES:
        for other in TYPES:
            if chosen and not {one, other} <= set(chosen):
                continue
            pairs, shown = pairs + 1, {}
            for seed in seeds:
                for text, operands, got, want in differences(one, other, seed, machines=machines):
                    shown.setdefault(text, []).append((operands, got, want))
            differing += len(shown)
            for text, each in shown.items():
                print(f"{one:10} {other:10} {text:24} {len(each):3} {each[0]}", flush=True)
    print(f"{differing} differences in {pairs} pairs of types, {len(seeds)} seeds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Compare the emulator's operators with numba.njit."
    )
    parser.add_argument("types", nargs="*", help="only pairs of these types")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    main(range(given.first, given.first + given.seeds), given.types)
