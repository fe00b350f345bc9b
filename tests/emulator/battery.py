"""A battery of small kernels over all of Numba's CUDA Python, one a row: what Numba compiles must
run rightly.

A row has a name, the lines of a kernel, what its array `o` must hold in the end, and its arrays.
`i` is the thread's number in a grid of one dimension; a block has a thread for each element of `o`
unless the row says otherwise. test_battery.py runs all rows in the emulator, and in the exhaustive
part compiles each to PTX with Numba.

The families are functions that give rows: mathematics, atomics, warps, language, arrays, memory,
half precision, libdevice, random numbers, vector types. LIMITS names rows that Numba compiles and
the emulator does not run, with the reason.
"""

import enum
import functools
import itertools
import linecache
import math
from collections import namedtuple
from typing import NamedTuple

import numba
import numpy as np
from numba import cuda
from numba.cuda import libdevice
from numba.cuda.random import xoroshiro128p_dtype

F2, F4, F8, C8, C16 = np.float16, np.float32, np.float64, np.complex64, np.complex128
I1, I2, I4, I8 = np.int8, np.int16, np.int32, np.int64
U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
B1 = np.bool_
LIMITS = {}  # name of a row -> why the emulator refuses it
FULL = 0xFFFFFFFF


class Row(NamedTuple):
    """One kernel.

    want: an array, or a function of the inputs; close: relative and absolute tolerance, 0 for the
    same bits
    names: {name that the kernel finds outside of itself: a function that makes it}
    """

    name: str
    body: str
    want: object
    arrays: dict
    close: float = 0
    grid: object = 1
    block: object = None
    shared: int = 0
    names: dict = {}
    checks: object = True


def row(
    name, body, want, o, close=0, grid=1, block=None, shared=0, names=None, checks=True, **arrays
):
    return Row(
        name, body, want, {"o": o, **arrays}, close, grid, block, shared, names or {}, checks
    )


# What kernels find outside of themselves ----------------------------------------------------------


class Colour(enum.IntEnum):
    RED, GREEN = 3, 5


class Mood(enum.Enum):
    GLAD, SAD = 1, 2


Point = namedtuple("Point", "x y")
TABLE = np.arange(10, dtype=F4) * 2
MATRIX = np.arange(6, dtype=I4).reshape(2, 3)
SIZES, SCALE, EIGHT = (2, 3, 4), 3, 8
RECORD = np.dtype([("a", I4), ("b", F4), ("c", F8)], align=True)
NESTED = np.dtype([("v", F4, (3,)), ("n", I4)], align=True)
INNER = np.dtype([("p", RECORD), ("q", I4)], align=True)
CONSTANT_RECORDS = np.array([(1, 2, 3), (4, 5, 6)], RECORD)


@cuda.jit(device=True)
def twice(x):
    return x + x


@cuda.jit(device=True)
def scaled(x, factor=3, offset=0):
    return x * factor + offset


@cuda.jit(device=True)
def both(x, y):
    return x + y, x - y


@cuda.jit(device=True)
def fill(array, value):
    for k in range(array.shape[0]):
        array[k] = value


@cuda.jit(device=True)
def scratch(n):
    a = cuda.local.array(4, numba.int32)
    for k in range(4):
        a[k] = n + k
    return a[0] + a[1] + a[2] + a[3]


def multiplier(factor):
    @cuda.jit(device=True)
    def times(x):
        return x * factor

    return times


times_7 = multiplier(7)
pipeline = (twice, times_7)
OUTSIDE = {name: value for name, value in globals().items() if not name.startswith("_")}


# Building and running -----------------------------------------------------------------------------


@functools.cache
def _source(name, body, parameters):
    lines = [f"def kernel({', '.join(parameters)}):", "    i = cuda.grid(1)"]
    lines += ["    " + line for line in body.strip("\n").split("\n")]
    file = f"<battery: {name}>"
    text = "\n".join(lines) + "\n"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    return compile(text, file, "exec")


def kernel_of(row):
    """The function of a row's kernel, not yet under `cuda.jit`."""
    space = {**OUTSIDE, **{name: make() for name, make in row.names.items()}}
    exec(_source(row.name, row.body, tuple(row.arrays)), space)
    return space["kernel"]


def arrays_of(row):
    return {
        name: value.copy() if isinstance(value, np.ndarray) else value
        for name, value in row.arrays.items()
    }


def launch(row, launcher):
    """The array `o` after the row's kernel, which `launcher(kernel, grid, block, *arrays,
    shared=…)` runs."""
    given = arrays_of(row)
    block = row.block or max(1, given["o"].size)
    launcher(cuda.jit(kernel_of(row)), row.grid, block, *given.values(), shared=row.shared)
    return given["o"]


def wanted(row):
    if not callable(row.want):
        return np.broadcast_to(np.asarray(row.want, row.arrays["o"].dtype), row.arrays["o"].shape)
    with np.errstate(all="ignore"):
        inputs = [value for name, value in arrays_of(row).items() if name != "o"]
        return np.broadcast_to(
            np.asarray(row.want(*inputs)).astype(row.arrays["o"].dtype), row.arrays["o"].shape
        )


def types_of(row):
    """Numba's types of the arguments, to compile the kernel for."""
    return tuple(
        numba.typeof(value)
        if not isinstance(value, np.ndarray)
        else numba.types.Array(
            numba.from_dtype(value.dtype),
            value.ndim,
            "C" if value.flags.c_contiguous else "F" if value.flags.f_contiguous else "A",
        )
        for value in row.arrays.values()
    )


# Mathematics --------------------------------------------------------------------------------------


def mathematics():
    unit, positive = (
        np.array([-0.9, -0.3, 0.0, 0.2, 0.7, 0.95]),
        np.array([0.1, 0.5, 1.0, 2.5, 7.0, 30.0]),
    )
    wide = np.array([-30.0, -2.5, -0.5, 0.25, 1.5, 9.0])
    one = {
        "acos": unit,
        "asin": unit,
        "atan": wide,
        "atanh": unit,
        "acosh": positive + 1,
        "asinh": wide,
        "ceil": wide,
        "cos": wide,
        "cosh": unit,
        "degrees": wide,
        "erf": unit,
        "erfc": unit,
        "exp": unit,
        "expm1": unit,
        "fabs": wide,
        "floor": wide,
        "gamma": positive[:5],
        "lgamma": positive,
        "log": positive,
        "log10": positive,
        "log1p": positive,
        "log2": positive,
        "radians": wide,
        "sin": wide,
        "sinh": unit,
        "sqrt": positive,
        "tan": unit,
        "tanh": wide,
        "trunc": wide,
    }
    for name, values in one.items():
        function = np.vectorize(getattr(math, name))
        for kind, close in ((F4, 3e-6), (F8, 1e-13)):
            yield row(
                f"math.{name} {kind.__name__}",
                f"o[i] = math.{name}(x[i])",
                lambda x, f=function: f(x.astype(F8)),
                np.zeros(len(values), kind),
                close,
                x=values.astype(kind),
            )
    for name in ("sqrt", "exp", "sin", "log"):
        yield row(
            f"math.{name} int32",
            f"o[i] = math.{name}(x[i])",
            lambda x, n=name: getattr(np, n)(x.astype(F8)),
            np.zeros(4, F8),
            1e-13,
            x=np.arange(1, 5, dtype=I4),
        )
    special = np.array([0.0, 1.0, np.inf, -np.inf, np.nan])
    for name in ("isnan", "isinf", "isfinite"):
        for kind in (F4, F8):
            yield row(
                f"math.{name} {kind.__name__}",
                f"o[i] = math.{name}(x[i])",
                lambda x, n=name: getattr(np, n)(x),
                np.zeros(5, B1),
                x=special.astype(kind),
            )
    for name, function in (
        ("atan2", np.arctan2),
        ("copysign", np.copysign),
        ("fmod", np.fmod),
        ("hypot", np.hypot),
        ("pow", lambda x, y: np.abs(x) ** y),
    ):
        text = "math.pow(abs(x[i]), y[i])" if name == "pow" else f"math.{name}(x[i], y[i])"
        for kind, close in ((F4, 1e-5), (F8, 1e-12)):
            yield row(
                f"math.{name} {kind.__name__}",
                f"o[i] = {text}",
                lambda x, y, f=function: f(x.astype(F8), y),
                np.zeros(6, kind),
                close,
                x=wide.astype(kind),
                y=positive.astype(kind),
            )
    yield row(
        "math.frexp",
        "m, e = math.frexp(x[i])\no[i] = m + e",
        lambda x: sum(np.frexp(x)),
        np.zeros(6),
        x=wide,
    )
    yield row("math.ldexp", "o[i] = math.ldexp(x[i], 3)", lambda x: x * 8, np.zeros(6), x=wide)
    yield row(
        "math.modf",
        "a, b = math.modf(x[i])\no[i] = a * 100 + b",
        lambda x: np.modf(x)[0] * 100 + np.modf(x)[1],
        np.zeros(6),
        1e-14,
        x=wide,
    )
    for name in ("pi", "e", "tau", "inf"):
        yield row(f"math.{name}", f"o[i] = math.{name}", getattr(math, name), np.zeros(1))
    yield row("math.nan", "o[i] = math.isnan(math.nan)", True, np.zeros(1, B1))
    for name in (
        "sin",
        "cos",
        "log",
        "tanh",
        "arctan",
        "log2",
        "log10",
        "deg2rad",
        "rad2deg",
        "arcsin",
    ):
        for kind, close in ((F4, 3e-6), (F8, 1e-13)):
            values = positive if name.startswith("log") else unit if name == "arcsin" else wide / 4
            yield row(
                f"np.{name} {kind.__name__}",
                f"o[i] = np.{name}(x[i])",
                lambda x, n=name: getattr(np, n)(x.astype(F8)),
                np.zeros(6, kind),
                close,
                x=values.astype(kind),
            )
    for name in (
        "divide",
        "maximum",
        "minimum",
        "arctan2",
        "hypot",
        "less",
        "greater_equal",
        "logical_and",
        "fmax",
    ):
        yield row(
            f"np.{name}",
            f"o[i] = np.{name}(x[i], y[i])",
            lambda x, y, n=name: getattr(np, n)(x, y),
            np.zeros(6),
            1e-13,
            x=positive,
            y=np.abs(wide),
        )
    z = np.array([1 + 2j, -1.5 + 0.5j, 3j, 2 - 1j])
    for text, want in (
        ("z * z", z * z),
        ("z / (1 + 1j)", z / (1 + 1j)),
        ("z.conjugate()", z.conj()),
        ("-z", -z),
        ("z + 1", z + 1),
        ("complex(z.imag, z.real)", z.imag + 1j * z.real),
        ("abs(z)", np.abs(z)),
        ("z == 3j", z == 3j),
        ("z ** 2", z**2),
    ):
        for kind, close in ((C8, 2e-6), (C16, 1e-13)):
            yield row(
                f"{text} {kind.__name__}",
                f"z = x[i]\no[i] = {text}",
                want.astype(kind),
                np.zeros(4, kind),
                close,
                x=z.astype(kind),
            )
    import cmath

    for name in ("exp", "sqrt", "phase", "log", "sin", "cosh", "isnan"):
        yield row(
            f"cmath.{name}",
            f"o[i] = cmath.{name}(x[i])",
            np.array([getattr(cmath, name)(v) for v in z]),
            np.zeros(4, C16),
            1e-12,
            x=z,
            names={"cmath": lambda: cmath},
        )


# Atomics ------------------------------------------------------------------------------------------


def atomics():
    for kind in (I4, U4, I8, U8, F4, F8):
        x = np.array([3, 9, 1, 7, 5, 2, 8, 4], kind)
        for name, want in (("add", x.sum()), ("max", 9), ("min", 1)):
            start = 100 if name == "min" else 0
            yield row(
                f"atomic.{name} {kind.__name__}",
                f"cuda.atomic.{name}(o, 0, x[i])",
                want + (name == "add") * start,
                np.full(1, start, kind),
                block=8,
                x=x,
            )
        yield row(
            f"atomic.sub {kind.__name__}",
            "cuda.atomic.sub(o, 0, x[i])",
            100 - x.sum(),
            np.full(1, 100, kind),
            block=8,
            x=x,
        )
        yield row(
            f"atomic.add old {kind.__name__}",
            "o[i] = cuda.atomic.add(x, i, 1)",
            x,
            np.zeros(8, kind),
            x=x,
        )
        yield row(
            f"atomic.add shared {kind.__name__}",
            "s = cuda.shared.array(1, x.dtype)\nif i == 0:\n    s[0] = 0\ncuda.syncthreads()\n"
            "cuda.atomic.add(s, 0, x[i])\ncuda.syncthreads()\nif i == 0:\n    o[0] = s[0]",
            x.sum(),
            np.zeros(1, kind),
            block=8,
            x=x,
        )
        yield row(
            f"atomic.add 2d {kind.__name__}",
            "cuda.atomic.add(o, (i // 4, 1), x[i])",
            [[0, x[:4].sum()], [0, x[4:].sum()]],
            np.zeros((2, 2), kind),
            block=8,
            x=x,
        )
    for kind in (I4, U4, I8, U8):
        x = np.array([1, 2, 4, 8], kind)
        yield row(
            f"atomic.exch {kind.__name__}",
            "cuda.atomic.exch(o, i, x[i])",
            x,
            np.zeros(4, kind),
            x=x,
        )
        for name, start, want in (("and_", 15, 0), ("or_", 0, 15), ("xor", 1, 14)):
            yield row(
                f"atomic.{name} {kind.__name__}",
                f"cuda.atomic.{name}(o, 0, x[i])",
                want,
                np.full(1, start, kind),
                block=4,
                x=x,
            )
        yield row(
            f"atomic.cas {kind.__name__}",
            "o[i] = cuda.atomic.cas(x, i, 2, 9) + x[i] * 10",
            [11, 92, 44, 88],
            np.zeros(4, kind),
            x=x,
        )
        yield row(
            f"atomic.compare_and_swap {kind.__name__}",
            "cuda.atomic.compare_and_swap(o, 7, x[0])",
            1,
            np.full(1, 7, kind),
            block=1,
            x=x,
        )
    for kind in (U4, U8):
        yield row(
            f"atomic.inc {kind.__name__}", "cuda.atomic.inc(o, 0, 5)", 2, np.zeros(1, kind), block=8
        )
        yield row(
            f"atomic.dec {kind.__name__}", "cuda.atomic.dec(o, 0, 5)", 4, np.zeros(1, kind), block=8
        )
    for kind in (F4, F8):
        x = np.array([np.nan, 3, -2, np.nan], kind)
        yield row(
            f"atomic.nanmax {kind.__name__}",
            "cuda.atomic.nanmax(o, 0, x[i])",
            3,
            np.zeros(1, kind),
            block=4,
            x=x,
        )
        yield row(
            f"atomic.nanmin {kind.__name__}",
            "cuda.atomic.nanmin(o, 0, x[i])",
            -2,
            np.zeros(1, kind),
            block=4,
            x=x,
        )
    yield row(
        "atomic histogram",
        "cuda.atomic.add(o, x[i], 1)",
        [2, 0, 3, 1],
        np.zeros(4, I4),
        block=6,
        x=np.array([0, 2, 2, 3, 0, 2], I4),
    )
    yield row(
        "atomic of a float16",
        "cuda.atomic.add(o, 0, x[i])",
        4,
        np.zeros(1, F4),
        block=4,
        x=np.ones(4, F4),
    )


# Warps --------------------------------------------------------------------------------------------


def warps():
    lane = np.arange(32)
    for kind in (I4, I8, F4, F8):
        x = (lane * 3 + 1).astype(kind)
        for text, source in (
            ("shfl_sync(M, x[i], 5)", np.full(32, 5)),
            ("shfl_sync(M, x[i], i ^ 3)", lane ^ 3),
            ("shfl_up_sync(M, x[i], 2)", np.where(lane < 2, lane, lane - 2)),
            ("shfl_down_sync(M, x[i], 4)", np.where(lane + 4 > 31, lane, lane + 4)),
            ("shfl_xor_sync(M, x[i], 16)", lane ^ 16),
        ):
            yield row(
                f"{text} {kind.__name__}",
                f"o[i] = cuda.{text.replace('M', '0xffffffff')}",
                x[source],
                np.zeros(32, kind),
                x=x,
            )
    x = (lane % 5 == 0).astype(I4)
    bits = int(sum(1 << k for k in range(32) if k % 5 == 0))
    for text, want in (
        ("ballot_sync(M, x[i])", bits),
        ("all_sync(M, x[i])", 0),
        ("any_sync(M, x[i])", 1),
        ("eq_sync(M, x[i])", 0),
        ("activemask()", FULL),
        ("lanemask_lt()", (1 << lane.astype(U8)) - 1),
        ("laneid", lane),
        ("warpsize", 32),
    ):
        yield row(
            f"cuda.{text}",
            f"o[i] = cuda.{text.replace('M', '0xffffffff')}",
            want,
            np.zeros(32, U4),
            x=x,
        )
    yield row(
        "match_any_sync",
        "o[i] = cuda.match_any_sync(0xffffffff, x[i])",
        np.where(x, bits, FULL ^ bits),
        np.zeros(32, U4),
        x=x,
    )
    yield row(
        "match_all_sync",
        "m, p = cuda.match_all_sync(0xffffffff, 7)\no[i] = m if p else 0",
        FULL,
        np.zeros(32, U4),
    )
    yield row(
        "reduce by shuffles",
        "v = x[i]\nk = 16\nwhile k > 0:\n    v += cuda.shfl_down_sync(0xffffffff, v, k)\n"
        "    k //= 2\nif i == 0:\n    o[0] = v",
        496,
        np.zeros(1, I4),
        block=32,
        x=lane.astype(I4),
    )
    yield row(
        "scan by shuffles",
        "v = x[i]\nk = 1\nwhile k < 32:\n    w = cuda.shfl_up_sync(0xffffffff, v, k)\n"
        "    if i >= k:\n        v += w\n    k *= 2\no[i] = v",
        np.cumsum(lane),
        np.zeros(32, I4),
        x=lane.astype(I4),
    )
    yield row(
        "shuffle in half a warp",
        "if i < 16:\n    o[i] = cuda.shfl_xor_sync(0xffff, x[i], 1)\nelse:\n    o[i] = -1",
        np.where(lane < 16, lane ^ 1, -1),
        np.zeros(32, I4),
        x=lane.astype(I4),
    )
    yield row(
        "syncwarp",
        "s = cuda.shared.array(32, numba.int32)\ns[i] = x[i]\ncuda.syncwarp()\no[i] = s[31 - i]",
        lane[::-1],
        np.zeros(32, I4),
        x=lane.astype(I4),
    )
    for kind, values in (
        (I4, [1, -1, 12, 0, 1 << 30]),
        (U4, [1, FULL, 12, 0, 1 << 31]),
        (I8, [1, -1, 12, 0, 1 << 62]),
    ):
        x, width = np.array(values, kind), 64 if kind is I8 else 32
        words = [int(v) & (1 << width) - 1 for v in values]
        text = [f"{w:0{width}b}" for w in words]
        for name, want in (
            ("popc", [t.count("1") for t in text]),
            ("clz", [width - len(t.lstrip("0")) for t in text]),
            ("ffs", [t[::-1].find("1") + 1 for t in text]),
        ):
            yield row(
                f"{name} {kind.__name__}", f"o[i] = cuda.{name}(x[i])", want, np.zeros(5, I8), x=x
            )
        yield row(
            f"brev {kind.__name__}",
            "o[i] = cuda.brev(x[i])",
            np.array([int(t[::-1], 2) for t in text], U8).astype(kind),
            np.zeros(5, kind),
            x=x,
        )
    for name, want in (("count", 3), ("and", 0), ("or", 1)):
        yield row(
            f"syncthreads_{name}",
            f"o[i] = cuda.syncthreads_{name}(x[i])",
            want,
            np.zeros(4, I4),
            x=np.array([1, 1, 0, 1], I4),
        )
    yield row(
        "fma",
        "o[i] = cuda.fma(x[i], x[i], x[i])",
        lambda x: x * x + x,
        np.zeros(3),
        x=np.array([0.5, 2, 3]),
    )
    yield row(
        "cbrt", "o[i] = cuda.cbrt(x[i])", np.cbrt, np.zeros(3), 1e-14, x=np.array([-8, 2, 27.0])
    )
    yield row(
        "selp",
        "o[i] = cuda.selp(x[i] > 1, 10, 20)",
        [20, 10, 10],
        np.zeros(3, I4),
        x=np.array([0.5, 2, 3]),
    )
    yield row("nanosleep", "cuda.nanosleep(100)\no[i] = i", [0, 1], np.zeros(2, I4))


# The language -------------------------------------------------------------------------------------


def language():
    n = np.arange(6, dtype=I4)
    x = np.array([1.5, -2.5, 3.0, 0.0, 7.25, -1.0])
    texts = {
        "if elif else": (
            "if n[i] < 2:\n    o[i] = 1\nelif n[i] < 4:\n    o[i] = 2\nelse:\n    o[i] = 3",
            [1, 1, 2, 2, 3, 3],
        ),
        "while": ("k = 0\nwhile k * k < n[i]:\n    k += 1\no[i] = k", [0, 1, 2, 2, 2, 3]),
        "while else": (
            "k = 0\nwhile k < n[i]:\n    k += 2\nelse:\n    k += 100\no[i] = k",
            [100, 102, 102, 104, 104, 106],
        ),
        "for break else": (
            "r = -1\nfor k in range(4):\n    if k == n[i]:\n        r = k * 10\n        break\nelse:\n"
            "    r = 7\n"
            "o[i] = r",
            [0, 10, 20, 30, 7, 7],
        ),
        "continue": (
            "r = 0\nfor k in range(6):\n    if k % 2:\n        continue\n    r += k\no[i] = r",
            6,
        ),
        "nested loops": (
            "r = 0\nfor a in range(n[i]):\n    for b in range(a):\n        r += b\no[i] = r",
            [0, 0, 0, 1, 4, 10],
        ),
        "range down": (
            "r = 0\nfor k in range(n[i], 0, -1):\n    r = r * 2 + k\no[i] = r",
            [0, 1, 5, 17, 49, 129],
        ),
        "range of three": ("r = 0\nfor k in range(1, 10, 4):\n    r += k\no[i] = r", 15),
        "ternary": ("o[i] = 1 if n[i] % 2 else 2", [2, 1, 2, 1, 2, 1]),
        "chained comparison": ("o[i] = 1 < n[i] <= 4", [0, 0, 1, 1, 1, 0]),
        "and or not": ("o[i] = (n[i] > 1 and n[i] < 4) or not n[i]", [1, 0, 1, 1, 0, 0]),
        "and gives a value": ("o[i] = n[i] and 9", [0, 9, 9, 9, 9, 9]),
        "or gives a value": ("o[i] = n[i] or 9", [9, 1, 2, 3, 4, 5]),
        "augmented": (
            "v = n[i]\nv += 3\nv *= 2\nv -= 1\nv //= 2\nv %= 5\nv <<= 2\nv |= 1\nv ^= 3\nv &= 30\no[i] = v",
            lambda n, x: ((((((n + 3) * 2 - 1) // 2 % 5) << 2) | 1) ^ 3) & 30,
        ),
        "augmented element": (
            "o[i] = n[i]\no[i] += 5\no[i] *= 2\no[i] -= 1\no[i] **= 2",
            (2 * (n + 5) - 1) ** 2,
        ),
        "floor division": ("o[i] = (n[i] - 3) // 2", (n - 3) // 2),
        "modulo": ("o[i] = (n[i] - 3) % 4", (n - 3) % 4),
        "divmod": (
            "q, r = divmod(n[i] - 3, 2)\no[i] = q * 10 + r",
            (n - 3) // 2 * 10 + (n - 3) % 2,
        ),
        "power": ("o[i] = n[i] ** 3", n**3),
        "pow of three": ("o[i] = pow(n[i], 2)", n**2),
        "true division": ("o[i] = n[i] / 2 * 2", n),
        "shifts": ("o[i] = (n[i] << 4) >> 2", n * 4),
        "bits": ("o[i] = (n[i] & 3) | (n[i] ^ 5) + ~n[i]", (n & 3) | (n ^ 5) + ~n),
        "unary": ("o[i] = -n[i] + (+n[i]) * 3", 2 * n),
        "tuple": ("t = (n[i], 2, 3)\no[i] = t[0] + t[1] * t[2] + len(t)", n + 9),
        "tuple of two types": ("t = (n[i], 2.5)\no[i] = t[0] + t[1] * 2", n + 5),
        "tuple sliced": ("t = (n[i], 2, 3, 4)\nu = t[1:3]\no[i] = u[0] + u[1] + len(u)", 7),
        "tuple negative index": ("t = (1, 2, n[i])\no[i] = t[-1]", n),
        "tuple added": ("t = (n[i], 1) + (2,)\no[i] = t[0] + t[2]", n + 2),
        "tuple compared": ("o[i] = (n[i], 1) == (2, 1)", n == 2),
        "tuple iterated": ("r = 0\nfor v in (1, 2, 3):\n    r += v * n[i]\no[i] = r", 6 * n),
        "tuple contains": ("o[i] = n[i] in (1, 3, 5)", n % 2 == 1),
        "tuple swapped": ("a, b = n[i], 10\na, b = b, a\no[i] = a - b", 10 - n),
        "tuple nested": (
            "t = ((n[i], 1), (2, 3))\n(a, b), (c, d) = t\no[i] = a + b * c * d",
            n + 6,
        ),
        "tuple unpacked in part": ("a, _, c = (n[i], 5, 7)\no[i] = a + c", n + 7),
        "tuple of globals": ("o[i] = SIZES[0] + SIZES[2] * n[i]", 2 + 4 * n),
        "tuple index varies": ("o[i] = SIZES[n[i] % 3]", np.array([2, 3, 4])[n % 3]),
        "namedtuple": ("p = Point(n[i], 2)\no[i] = p.x + p.y * p[1]", n + 4),
        "enumerate": ("r = 0\nfor k, v in enumerate((3, 4, 5)):\n    r += k * v\no[i] = r", 14),
        "enumerate from": (
            "r = 0\nfor k, v in enumerate(n, 10):\n    r += k * v\no[i] = r",
            (np.arange(10, 16) * n).sum(),
        ),
        "zip": ("r = 0.0\nfor a, b in zip(n, x):\n    r += a * b\no[i] = r * 4", (n * x).sum() * 4),
        "iterate an array": ("r = 0\nfor v in n:\n    r += v\no[i] = r", 15),
        "global number": ("o[i] = SCALE * n[i]", 3 * n),
        "IntEnum": ("o[i] = Colour.GREEN + n[i]", n + 5),
        "Enum compared": ("m = Mood.SAD if n[i] > 2 else Mood.GLAD\no[i] = m == Mood.SAD", n > 2),
        "None": ("v = None\no[i] = v is None", 1),
        "True and False": ("f = n[i] > 2\no[i] = f == True", n > 2),
        "device function": ("o[i] = twice(n[i]) + twice(1.5)", 2 * n + 3),
        "default arguments": ("o[i] = scaled(n[i])", 3 * n),
        "named arguments": ("o[i] = scaled(n[i], offset=2)", 3 * n + 2),
        "named in another order": ("o[i] = scaled(offset=1, x=n[i], factor=2)", 2 * n + 1),
        "several results": ("a, b = both(n[i], 2)\no[i] = a * b", (n + 2) * (n - 2)),
        "closure over a number": ("o[i] = times_7(n[i])", 7 * n),
        "inner function": ("def inner(v):\n    return v * 2 + 1\no[i] = inner(n[i])", 2 * n + 1),
        "inner function over a variable": (
            "k = n[i]\ndef inner(v):\n    return v * k\no[i] = inner(3)",
            3 * n,
        ),
        "lambda": ("f = lambda v: v + 4\no[i] = f(n[i])", n + 4),
        "device function fills a local array": (
            "a = cuda.local.array(3, numba.int32)\nfill(a, n[i])\no[i] = a[0] + a[2]",
            2 * n,
        ),
        "device function with a local array": ("o[i] = scratch(n[i])", 4 * n + 6),
        "abs": ("o[i] = abs(n[i] - 3) + abs(-1.5) * 2", abs(n - 3) + 3),
        "min max": (
            "o[i] = min(n[i], 3) + max(n[i], 2) * 10 + min(4, 3, 5)",
            np.minimum(n, 3) + np.maximum(n, 2) * 10 + 3,
        ),
        "round": ("o[i] = round(x[i])", lambda n, x: np.rint(x)),
        "round to digits": ("o[i] = round(x[i], 1) * 10", lambda n, x: np.round(x, 1) * 10),
        "int float bool": (
            "o[i] = int(x[i]) + float(n[i]) + bool(n[i])",
            lambda n, x: np.trunc(x) + n + (n != 0),
        ),
        "len": ("o[i] = len(n) + len(x)", 12),
        "types cast": ("o[i] = np.int8(n[i] * 100)", (n * 100).astype(I8).astype(I1)),
        "numba types cast": ("o[i] = numba.uint8(n[i] - 1)", (n - 1).astype(U1)),
        "float32 literal": ("o[i] = np.float32(0.1) * 10 == 1.0", 0),
        "variable of two types": ("v = 0\nfor k in range(3):\n    v = v + 0.5\no[i] = v * 2", 3),
        "early return": ("if n[i] % 2:\n    return\no[i] = 5", [5, 0, 5, 0, 5, 0]),
        "pass and docstring": ('"""Says nothing."""\nif n[i]:\n    pass\no[i] = 1', 1),
        "assert": ("assert n[i] >= 0\no[i] = 1", 1),
        "while true break": (
            "k = 0\nwhile True:\n    k += 1\n    if k > n[i]:\n        break\no[i] = k",
            n + 1,
        ),
        "annotated": ("v: int = n[i]\no[i] = v", n),
        "string compared": ("s = 'ab'\no[i] = s == 'ab'", 1),
        "multiple targets": ("a = b = n[i]\no[i] = a + b", 2 * n),
        "conditional import": ("o[i] = math.floor(x[i])", lambda n, x: np.floor(x)),
        "integer overflow of int32 stays int64": (
            "v = n[i] + 2147483647\no[i] = v > 2147483647",
            n > 0,
        ),
        "hexadecimal and underscores": ("o[i] = 0xff + 1_000 + 0b11", 1258),
        "print": ("if n[i] > 100:\n    print('value', n[i])\no[i] = 1", 1),
        "bool arithmetic": ("o[i] = (n[i] > 2) + (n[i] > 3)", (n > 2) * 1 + (n > 3)),
        "is in a loop with several exits": (
            "r = 0\nfor k in range(10):\n    if k > n[i]:\n        break\n"
            "    if k == 3:\n"
            "        r = -1\n        break\n    r += k\no[i] = r",
            [0, 1, 3, -1, -1, -1],
        ),
    }
    for name, entry in texts.items():
        yield row(name, entry[0], entry[1], np.zeros(6), n=n, x=x)
    yield row(
        "signature of a device function",
        "o[i] = f(n[i]) * 2",
        n,
        np.zeros(6),
        n=n,
        names={"f": lambda: cuda.jit("float32(float32)", device=True)(lambda v: v / 2)},
    )
    yield row(
        "signature of a device function casts",
        "o[i] = f(n[i] + 0.75)",
        n,
        np.zeros(6),
        n=n,
        names={"f": lambda: cuda.jit("int32(int32)", device=True)(lambda v: v)},
    )


# Arrays -------------------------------------------------------------------------------------------


def arrays():
    a, v = np.arange(12, dtype=F4).reshape(3, 4), np.arange(8, dtype=I4)
    f = np.asfortranarray(a)
    for name, body, want in (
        ("shape", "o[i] = a.shape[0] * 10 + a.shape[1]", 34),
        ("size ndim", "o[i] = a.size + a.ndim", 14),
        ("strides", "o[i] = a.strides[0] + a.strides[1]", 20),
        ("itemsize nbytes", "o[i] = a.itemsize + a.nbytes", 52),
        ("len of a matrix", "o[i] = len(a)", 3),
        ("two indices", "o[i] = a[2, 3] + a[0, 1]", 12),
        ("row", "r = a[1]\no[i] = r[2] + len(r)", 10),
        ("row of a row", "o[i] = a[1][2]", 6),
        ("column", "c = a[:, 1]\no[i] = c[2] + c.shape[0]", 12),
        ("slice", "s = v[2:6]\no[i] = s[1] + len(s)", 7),
        ("slice step", "s = v[1::3]\no[i] = s[2] + len(s)", 10),
        ("slice down", "s = v[::-1]\no[i] = s[0]", 7),
        ("slice of a slice", "s = v[2:][1:3]\no[i] = s[0] * 10 + len(s)", 32),
        ("submatrix", "s = a[1:, 1:3]\no[i] = s[1, 1] * 10 + s.shape[0] + s.shape[1]", 104),
        ("ellipsis", "o[i] = a[..., 1][2]", 9),
        ("tuple as an index", "at = (1, 2)\no[i] = a[at]", 6),
        ("transposed", "t = a.T\no[i] = t[3, 1] * 10 + t.shape[0]", 74),
        ("transpose()", "t = a.transpose()\no[i] = t[3, 1]", 7),
        ("reshape", "t = v.reshape(2, 4)\no[i] = t[1, 2]", 6),
        ("reshape of a tuple", "t = v.reshape((4, 2))\no[i] = t[3, 0]", 6),
        ("flatten index", "o[i] = a.flat[5]", 5),
        ("view", "t = v.view(np.uint8)\no[i] = t[4] + len(t)", 33),
        ("iterate rows", "r = 0.0\nfor q in a:\n    r += q[0]\no[i] = r", 12),
        ("sum", "o[i] = a.sum()", 66),
        ("mean", "o[i] = v.mean()", 3.5),
        ("argmax argmin", "o[i] = v.argmax() * 10 + v.argmin()", 70),
        ("prod", "o[i] = v[1:4].prod()", 6),
        ("np.sum", "o[i] = np.sum(v)", 28),
        ("var std", "o[i] = round(v.var() * 100 + v.std())", 527),
        ("all any", "o[i] = v.any() + v.all() * 10", 1),
        (
            "np.ndindex",
            "r = 0\nfor p in np.ndindex((2, 3)):\n    r += p[0] * 10 + p[1]\no[i] = r",
            36,
        ),
        ("dtype", "t = cuda.local.array(2, v.dtype)\nt[0] = 2.7\no[i] = t[0]", 2),
        ("negative index written down", "o[i] = v[-1] + v[-2]", 13),
        ("bool of an element", "o[i] = bool(v[0]) + bool(v[1])", 1),
        ("contiguous", "o[i] = a.size if a.shape[0] == 3 else 0", 12),
    ):
        yield row(f"array: {name}", body, want, np.zeros(2), a=a, v=v)
        if "strides" not in name and "flat" not in name:
            yield row(f"array in Fortran's order: {name}", body, want, np.zeros(2), a=f, v=v)
    yield row("store a slice", "if i == 0:\n    o[2:5] = 7", [0, 0, 7, 7, 7, 0], np.zeros(6, I4))
    yield row(
        "store through a view", "o[1::2][i] = i + 1", [0, 1, 0, 2, 0, 3], np.zeros(6, I4), block=3
    )
    yield row("store all", "if i == 0:\n    o[:] = 3", 3, np.zeros(4, I4))
    yield row(
        "three dimensions",
        "o[i] = x[1, i, 2] + x.shape[2]",
        [11, 14],
        np.zeros(2, I4),
        x=np.arange(12, dtype=I4).reshape(2, 2, 3),
    )
    yield row("no dimension", "o[i] = x[()] * 2", 6, np.zeros(2), x=np.array(3.0))
    yield row(
        "grid(2)",
        "r, c = cuda.grid(2)\nif r < o.shape[0] and c < o.shape[1]:\n    o[r, c] = r * 10 + c",
        np.add.outer(np.arange(3) * 10, np.arange(4)),
        np.zeros((3, 4), I4),
        grid=(2, 2),
        block=(2, 2),
    )
    yield row(
        "grid(3)",
        "a, b, c = cuda.grid(3)\no[a, b, c] = a * 100 + b * 10 + c",
        [[[0, 1], [10, 11]], [[100, 101], [110, 111]]],
        np.zeros((2, 2, 2), I4),
        grid=(1, 1, 2),
        block=(2, 2, 1),
    )
    yield row(
        "gridsize",
        "for k in range(cuda.grid(1), o.size, cuda.gridsize(1)):\n    o[k] = k",
        np.arange(20),
        np.zeros(20, I4),
        grid=2,
        block=3,
    )
    yield row(
        "indices",
        "o[i] = cuda.threadIdx.x + cuda.blockIdx.x * 10 + cuda.blockDim.x * 100 + cuda.gridDim.x * 1000",
        [2200, 2201, 2210, 2211],
        np.zeros(4, I4),
        grid=2,
        block=2,
    )
    for kind in (I1, U1, I2, U2, I4, U4, I8, U8, F2, F4, F8, B1):
        x = np.array([0, 1, 1, 0]).astype(kind)
        yield row(f"copy {kind.__name__}", "o[i] = x[i]", x, np.zeros(4, kind), x=x)
    for kind, big in (
        (I1, 200),
        (U1, 300),
        (I2, 40000),
        (U2, 70000),
        (I4, 2**31 + 5),
        (U4, 2**32 + 5),
    ):
        yield row(
            f"store wraps {kind.__name__}",
            "o[i] = x[i]",
            np.array([big]).astype(kind),
            np.zeros(1, kind),
            x=np.array([big], I8),
        )
    z = np.array([1 + 2j, 3 - 4j])
    yield row(
        "real and imag of an array",
        "o[i] = x.real[i] + 10 * x.imag[i]",
        [21, -37],
        np.zeros(2),
        x=z,
    )
    yield row("complex element's parts", "o[i] = x[i].real * x[i].imag", [2, -12], np.zeros(2), x=z)
    r = np.array([(1, 2.5, 3.25), (4, 5.5, 6.75)], RECORD)
    for name, body, want in (
        ("attribute", "o[i] = r[i].a + r[i].b", [3.5, 9.5]),
        ("key", "o[i] = r[i]['c']", [3.25, 6.75]),
        ("field of an array", "o[i] = r.b[i] + r['a'][i]", [3.5, 9.5]),
        ("store", "r[i].a = 9\nr[i]['b'] = 0.5\no[i] = r[i].a + r[i].b", 9.5),
        ("copy", "r[i] = r[0] if i == 0 else r[1]\no[i] = r[i].c", [3.25, 6.75]),
        ("variable", "q = r[i]\nq.c = 8\no[i] = r[i].c", 8),
    ):
        yield row(f"record: {name}", body, want, np.zeros(2), r=r)
    nested = np.zeros(2, NESTED)
    nested["v"], nested["n"] = [[1, 2, 3], [4, 5, 6]], [7, 8]
    yield row("array in a record", "o[i] = r[i].v[1] + r[i].n", [9, 13], np.zeros(2), r=nested)
    yield row(
        "array in a record, stored", "r[i].v[2] = 50\no[i] = r[i].v[2]", 50, np.zeros(2), r=nested
    )
    inner = np.zeros(2, INNER)
    inner["p"]["b"], inner["q"] = [1.5, 2.5], [3, 4]
    yield row("record in a record", "o[i] = r[i].p.b + r[i].q", [4.5, 6.5], np.zeros(2), r=inner)
    t = np.array(["2020-01-01", "2020-01-05"], "datetime64[D]")
    yield row("datetime compared", "o[i] = x[1] > x[0]", 1, np.zeros(1), x=t)


# Memory -------------------------------------------------------------------------------------------


def memory():
    x = np.arange(8, dtype=F4)
    for kind in (
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "bool_",
    ):
        yield row(
            f"shared {kind}",
            f"s = cuda.shared.array(8, np.{kind})\ns[i] = i % 2\ncuda.syncthreads()\n"
            "o[i] = s[7 - i].real"
            if "complex" in kind
            else f"s = cuda.shared.array(8, np.{kind})\ns[i] = i % 2\ncuda.syncthreads()\no[i] = s[7 - i]",
            [1, 0] * 4,
            np.zeros(8, F4),
            x=x,
        )
        yield row(
            f"local {kind}",
            f"s = cuda.local.array(4, np.{kind})\nfor k in range(4):\n    s[k] = k % 2\n"
            "o[i] = s[1].real + s[2].real"
            if "complex" in kind
            else f"s = cuda.local.array(4, np.{kind})\nfor k in range(4):\n    s[k] = k % 2\no[i] = s[1] + s[2]",
            1,
            np.zeros(2, F4),
            x=x,
        )
    rows = {
        "shared matrix": (
            "s = cuda.shared.array((2, 4), numba.float32)\ns[i // 4, i % 4] = x[i]\ncuda.syncthreads()\n"
            "o[i] = s[1 - i // 4, i % 4]",
            [4, 5, 6, 7, 0, 1, 2, 3],
        ),
        "shared by name": (
            "s = cuda.shared.array(shape=8, dtype=np.float32)\ns[i] = x[i]\ncuda.syncthreads()\n"
            "o[i] = s[7 - i]",
            x[::-1],
        ),
        "shared, a type of the array": (
            "s = cuda.shared.array(8, x.dtype)\ns[i] = x[i]\ncuda.syncthreads()\no[i] = s[7 - i]",
            x[::-1],
        ),
        "shared, size of a global": (
            "s = cuda.shared.array(EIGHT, numba.int32)\ns[i] = i\ncuda.syncthreads()\n"
            "o[i] = s[7 - i]",
            x[::-1],
        ),
        "two shared arrays": (
            "s = cuda.shared.array(8, numba.float32)\nt = cuda.shared.array(8, numba.int16)\n"
            "s[i] = x[i]\nt[i] = i\ncuda.syncthreads()\no[i] = s[7 - i] + t[0]",
            x[::-1],
        ),
        "shared aligned": (
            "s = cuda.shared.array(8, numba.int8, alignment=16)\ns[i] = i\ncuda.syncthreads()\n"
            "o[i] = s[7 - i]",
            x[::-1],
        ),
        "local aligned": (
            "s = cuda.local.array(8, numba.int8, alignment=16)\ns[0] = i\no[i] = s[0]",
            x,
        ),
        "local matrix": (
            "s = cuda.local.array((2, 2), numba.float64)\ns[0, 1] = x[i]\ns[1, 0] = 2\n"
            "o[i] = s[0, 1] * s[1, 0]",
            2 * x,
        ),
        "constant array": ("c = cuda.const.array_like(TABLE)\no[i] = c[i]", 2 * x),
        "constant matrix": (
            "c = cuda.const.array_like(MATRIX)\no[i] = c[1, i % 3]",
            MATRIX[1][np.arange(8) % 3],
        ),
        "constant records": (
            "c = cuda.const.array_like(CONSTANT_RECORDS)\no[i] = c[1].b + c[0].a",
            6,
        ),
        "global array": ("o[i] = TABLE[i] + MATRIX[0, 1]", 2 * x + 1),
        "threadfence": (
            "o[i] = x[i]\ncuda.threadfence()\ncuda.threadfence_block()\ncuda.threadfence_system()",
            x,
        ),
        "tree reduction": (
            "s = cuda.shared.array(8, numba.float32)\ns[i] = x[i]\ncuda.syncthreads()\nk = 4\nwhile k:\n"
            "    if i < k:\n        s[i] += s[i + k]\n    cuda.syncthreads()\n    k //= 2\no[i] = s[0]",
            28,
        ),
        "cooperative groups": ("g = cuda.cg.this_grid()\ng.sync()\no[i] = x[i]", x),
        "cache hints": (
            "cuda.stcs(o, i, cuda.ldca(x, i) + cuda.ldcg(x, i) + cuda.ldcs(x, i) + cuda.ldcv(x, i))",
            4 * x,
        ),
    }
    for name, (body, want) in rows.items():
        yield row(name, body, want, np.zeros(8, F4), x=x)
    yield row(
        "shared of records",
        "s = cuda.shared.array(8, record)\ns[i].b = x[i]\ncuda.syncthreads()\no[i] = s[7 - i].b",
        x[::-1],
        np.zeros(8, F4),
        x=x,
        names={"record": lambda: numba.from_dtype(RECORD)},
    )
    yield row(
        "dynamic shared",
        "s = cuda.shared.array(0, numba.float32)\ns[i] = x[i]\ncuda.syncthreads()\no[i] = s[7 - i]",
        x[::-1],
        np.zeros(8, F4),
        shared=32,
        x=x,
    )
    yield row(
        "dynamic shared in two parts",
        "s = cuda.shared.array(0, numba.float32)\n"
        "a = s[:8]\nb = s[8:16]\na[i] = x[i]\nb[i] = 2 * x[i]\ncuda.syncthreads()\no[i] = a[7 - i] + b[7 - i]",
        3 * x[::-1],
        np.zeros(8, F4),
        shared=64,
        x=x,
    )
    yield row(
        "dynamic shared in two types",
        "s = cuda.shared.array(0, numba.float32)\nt = cuda.shared.array(0, numba.int16)\n"
        "u = t[16:]\ns[i] = x[i]\nu[i] = i\ncuda.syncthreads()\no[i] = s[7 - i] + u[7 - i]",
        2 * x[::-1],
        np.zeros(8, F4),
        shared=48,
        x=x,
    )


# Half precision -----------------------------------------------------------------------------------


def half_precision():
    x, y = np.array([1.5, -2.25, 0.1, 8], F2), np.array([0.5, 3, 7, -2], F2)
    for text, want in (
        ("x[i] + y[i]", x + y),
        ("x[i] - y[i]", x - y),
        ("x[i] * y[i]", x * y),
        ("x[i] / y[i]", x / y),
        ("-x[i]", -x),
        ("abs(x[i])", abs(x)),
        ("min(x[i], y[i])", np.minimum(x, y)),
        ("max(x[i], y[i])", np.maximum(x, y)),
        ("x[i] > y[i]", x > y),
        ("x[i] == y[i]", x == y),
        ("x[i] <= y[i]", x <= y),
        ("np.float16(x[i] + 1)", x + F2(1)),
        ("x[i] * np.float16(2)", x * F2(2)),
        ("np.float32(x[i]) * np.float32(3)", x.astype(F4) * F4(3)),
    ):
        yield row(f"float16: {text}", f"o[i] = {text}", want, np.zeros(4, F2), x=x, y=y)
    two = {
        "hadd": x + y,
        "hsub": x - y,
        "hmul": x * y,
        "hdiv": x / y,
        "hmax": np.maximum(x, y),
        "hmin": np.minimum(x, y),
    }
    for name, want in two.items():
        yield row(
            f"fp16.{name}", f"o[i] = cuda.fp16.{name}(x[i], y[i])", want, np.zeros(4, F2), x=x, y=y
        )
    for name, want in {
        "heq": x == y,
        "hne": x != y,
        "hgt": x > y,
        "hge": x >= y,
        "hlt": x < y,
        "hle": x <= y,
    }.items():
        yield row(
            f"fp16.{name}", f"o[i] = cuda.fp16.{name}(x[i], y[i])", want, np.zeros(4, B1), x=x, y=y
        )
    for name, want in {
        "hneg": -x,
        "habs": abs(x),
        "hfloor": np.floor(x),
        "hceil": np.ceil(x),
        "hrint": np.rint(x),
        "htrunc": np.trunc(x),
    }.items():
        yield row(f"fp16.{name}", f"o[i] = cuda.fp16.{name}(x[i])", want, np.zeros(4, F2), x=x)
    p = np.array([0.5, 1, 2.5, 3], F2)
    for name, function in {
        "hsqrt": np.sqrt,
        "hexp": np.exp,
        "hlog": np.log,
        "hsin": np.sin,
        "hcos": np.cos,
        "hexp2": np.exp2,
        "hexp10": lambda v: 10**v,
        "hlog2": np.log2,
        "hlog10": np.log10,
        "hrcp": lambda v: 1 / v,
        "hrsqrt": lambda v: 1 / np.sqrt(v),
    }.items():
        yield row(
            f"fp16.{name}",
            f"o[i] = cuda.fp16.{name}(x[i])",
            lambda x, f=function: f(x.astype(F4)),
            np.zeros(4, F2),
            2e-3,
            x=p,
        )
    yield row(
        "fp16.hfma",
        "o[i] = cuda.fp16.hfma(x[i], y[i], x[i])",
        (x.astype(F8) * y.astype(F8) + x.astype(F8)).astype(F2),
        np.zeros(4, F2),
        x=x,
        y=y,
    )


# libdevice, random numbers, vector types ----------------------------------------------------------


def libraries():
    x = np.array([0.25, 0.5, 1.5, 2.75])
    for name, function in {
        "sin": np.sin,
        "cos": np.cos,
        "exp": np.exp,
        "log": np.log,
        "sqrt": np.sqrt,
        "tanh": np.tanh,
        "rsqrt": lambda v: 1 / np.sqrt(v),
        "cbrt": np.cbrt,
        "rint": np.rint,
        "exp2": np.exp2,
        "exp10": lambda v: 10**v,
        "log1p": np.log1p,
        "sinpi": lambda v: np.sin(np.pi * v),
        "erf": np.vectorize(math.erf),
        "floor": np.floor,
    }.items():
        yield row(
            f"libdevice.{name}",
            f"o[i] = libdevice.{name}(x[i])",
            function(x),
            np.zeros(4),
            1e-12,
            x=x,
        )
        if f"{name}f" in dir(libdevice):
            yield row(
                f"libdevice.{name}f",
                f"o[i] = libdevice.{name}f(x[i])",
                function(x),
                np.zeros(4, F4),
                3e-6,
                x=x.astype(F4),
            )
    for name, want in {
        "fast_expf": np.exp(x),
        "fast_sinf": np.sin(x),
        "fast_logf": np.log(x),
    }.items():
        yield row(
            f"libdevice.{name}",
            f"o[i] = libdevice.{name}(x[i])",
            want,
            np.zeros(4, F4),
            1e-5,
            x=x.astype(F4),
        )
    yield row(
        "libdevice.sincos",
        "s, c = libdevice.sincos(x[i])\no[i] = s + 10 * c",
        np.sin(x) + 10 * np.cos(x),
        np.zeros(4),
        1e-13,
        x=x,
    )
    yield row(
        "libdevice.fmaf",
        "o[i] = libdevice.fmaf(x[i], x[i], x[i])",
        x * x + x,
        np.zeros(4, F4),
        1e-6,
        x=x.astype(F4),
    )
    yield row(
        "libdevice.popc",
        "o[i] = libdevice.popc(x[i])",
        [1, 2],
        np.zeros(2, I4),
        x=np.array([4, 5], I4),
    )
    yield row("libdevice.powi", "o[i] = libdevice.powi(x[i], 3)", x**3, np.zeros(4), 1e-13, x=x)
    states = np.zeros(4, xoroshiro128p_dtype)
    states["s0"], states["s1"] = np.arange(4) + 12345, np.arange(4) * 77 + 999
    for kind in ("uniform_float32", "uniform_float64", "normal_float32", "normal_float64"):
        size = F4 if "32" in kind else F8
        yield row(
            f"xoroshiro128p_{kind}",
            f"v = draw(s, i)\nw = draw(s, i)\no[i] = v != w and {'-20' if 'norm' in kind else 0}"
            " <= v < 20",
            1,
            np.zeros(4, size),
            s=states,
            names={"draw": lambda k=kind: getattr(cuda.random, f"xoroshiro128p_{k}")},
        )
    yield row(
        "xoroshiro128p next",
        "draw(s, i)\no[i] = s[i]['s0']",
        xoroshiro_next(states["s0"], states["s1"])[0],
        np.zeros(4, U8),
        s=states,
        names={"draw": lambda: cuda.random.xoroshiro128p_next},
    )
    for base, size in itertools.product(
        ("int8", "uint16", "int32", "uint32", "float32", "float64"), (2, 3, 4)
    ):
        fields = "xyzw"[:size]
        yield row(
            f"{base}x{size}",
            f"v = cuda.{base}x{size}({', '.join(f'{k} + i' for k in range(1, size + 1))})\n"
            f"o[i] = {' + '.join(f'v.{f}' for f in fields)}",
            np.arange(2) * size + size * (size + 1) // 2,
            np.zeros(2),
        )
    yield row(
        "float4 of shorter ones",
        "a = cuda.float2(1, 2)\nv = cuda.float4(a, 3, i)\no[i] = v.y * 100 + v.z * 10 + v.w",
        [230, 231],
        np.zeros(2),
    )


def xoroshiro_next(s0, s1):
    """(s0, s1) after one step of xoroshiro128+ (Blackman and Vigna 2018), with its first constants
    55, 14, 36."""

    def rotl(v, k):
        return v << U8(k) | v >> U8(64 - k)

    mixed = s0 ^ s1
    return rotl(s0, 55) ^ mixed ^ mixed << U8(14), rotl(mixed, 36)


FAMILIES = {
    f.__name__: f
    for f in (mathematics, atomics, warps, language, arrays, memory, half_precision, libraries)
}


@functools.cache
def rows(family):
    return tuple(FAMILIES[family]())
