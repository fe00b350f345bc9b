"""`a is b` in kernels: what the emulator makes of it, and what Numba compiles (identity.py).

Pairs of types are in operators.py.
"""

import enum

import numpy as np
import pytest
from numba import njit, types

from numdiff import emulator
from numdiff.device import cuda
from numdiff.emulator import Emulator
from numdiff.emulator.values import scalar
from tests.emulator.operators import function_of

BOOLEAN = (  # of two booleans
    *("a is True", "a is False", "a is not True", "a is not False", "True is a", "a is None"),
    *("a is not None", "a is 1", "a is 1.0", "(a is True) is True", "(a & b) is True"),
    *("(a and b) is True", "(not a) is False", "(a == b) is True", "(a is b) is not False"),
    *("bool(a) is True", "a is b is True", "a is True is b", "(a, 1) is (True, 1)"),
    *("(a, b) is (b, a)", "(a is True) + (b is True)", "1 if a is True else 0", "'a' is 'a'"),
)
INTEGER = (  # of an int64 and a boolean
    *("a is True", "a is 1", "a is 1000", "a is not 1000", "a is 1.0", "a is None", "1 is True"),
    *("(a > 0) is True", "(a > 0) is b", "(not a) is b", "a * 1000 is 1000", "a is int32(a)"),
    *("int32(a) is int32(1)", "int32(a) + 1 is 2", "(a, a) is (1, 1)", "(a,) is (a, a)"),
    *("(a, 1.5) is (a, 1.5)", "float32(a) is 1.0", "float64(a) is 1.0", "(float32(a) > 0) is b"),
)


@pytest.mark.filterwarnings("ignore:.is:SyntaxWarning")
@pytest.mark.parametrize("kind, texts", [("boolean", BOOLEAN), ("int64", INTEGER)])
def test_identity_of_numbers_is_numbas(kind, texts):
    compiled = njit([(getattr(types, kind), types.boolean)])(function_of(texts))
    for value in (0, 1, 1000):
        a = np.bool_(value) if kind == "boolean" else np.int64(value)
        for b in np.array([False, True]):
            want = dict(zip(texts, compiled(a, b), strict=True))
            for checks in (True, False):
                function = Emulator(checks=checks).function(function_of(texts))
                for of_python in (False, True):
                    given = scalar(a), bool(b) if of_python else b
                    got = dict(zip(texts, function(*given), strict=True))
                    assert got == want, (a, b, checks)


YES, ZERO, ONE, THOUSAND = True, 0, 1, 1000


class Colour(enum.Enum):
    RED, BLUE = 1, 2


@cuda.jit(device=True)
def is_true(value=True):
    return value is True


@cuda.jit(device=True)
def is_none(value=None):
    return value is None


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("checks", [True, False])
def test_booleans_of_every_origin(checks, compile):
    """Arguments, elements, a module's, a closure's, results of functions, of `match`."""
    no = False

    @cuda.jit
    def kernel(flag, flags, numbers, out):
        shared = cuda.shared.array(2, np.bool_)
        shared[0], computed = flag, numbers[0] > 0
        out[0] = flag is True
        out[1] = flags[1] is False
        out[2] = shared[0] is not False
        out[3] = computed is True
        out[4] = YES is flag
        out[5] = flags[1] is no
        out[6] = is_true(flag) and is_true() and not is_true(1) and is_true(computed)
        out[7] = is_none() and not is_none(flag) and is_none(None)
        out[8] = cuda.all_sync(0x1, flag) is True
        out[9] = Colour.RED is Colour.RED and Colour.RED is not Colour.BLUE
        if flags[0] is True:
            out[10] = 1
        while computed is not False:
            computed = False
            out[11] += 1
        match flag:
            case False:
                out[12] = 7
            case True if flags[1] is False:
                out[12] = 1
        match numbers[0]:
            case True | False:
                out[13] = 7
            case 3 | True:
                out[13] = 1

    with emulator.device(checks=checks, compile=compile):
        for flag in (True, np.bool_(True)):
            out = np.zeros(14, np.int32)
            kernel[1, 1](flag, np.array([True, False]), np.array([3], np.int32), out)
            assert out.tolist() == [1] * 14


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("checks", [True, False])
def test_numbers_of_threads_and_elements(checks, compile):
    """PTX of these is a constant 0 where a type has another width."""

    @cuda.jit
    def kernel(narrow, wide, out):
        thread = cuda.threadIdx.x
        out[0] = cuda.threadIdx.x is ZERO
        out[1] = thread is ZERO
        out[2] = thread is cuda.blockIdx.x
        out[3] = cuda.grid(1) is ZERO
        out[4] = narrow[0] is THOUSAND
        out[5] = wide[0] is THOUSAND
        out[6] = wide[0] is ONE
        out[7] = narrow[0] is narrow[0]

    with emulator.device(checks=checks, compile=compile):
        out = np.full(8, -1, np.int32)
        kernel[1, 1](np.array([1000], np.int32), np.array([1000]), out)
        assert out.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("checks", [True, False])
def test_arrays_are_the_same_by_place_and_type(checks):
    def kernel(x, y, whole, part, whole_number, out):
        out[0] = x is x
        out[1] = x is y
        out[2] = x is whole
        out[3] = x is part
        out[4] = x is not whole
        out[5] = whole_number is x
        out[6] = x is None
        out[7] = x[1:] is part

    x, out = np.zeros(4, np.float32), np.full(8, -1, np.int32)
    Emulator(checks=checks).launch(kernel, 1, 1, x, x.copy(), x, x[1:], x.view(np.int32), out)
    assert out.tolist() == [1, 0, 1, 0, 0, 0, 0, 1]
