"""numba.cuda.libdevice: every function of Numba's list, and values of each kind."""

import math

import numpy as np
import pytest
from numba.cuda import libdevicefuncs

from numdiff.emulator.libdevice import LIBDEVICE as L

F, D = np.float32, np.float64


def test_every_function_of_numbas_is_known():
    assert [name for name in libdevicefuncs.functions if name.removeprefix("__nv_") not in L] == []


def test_every_function_gives_numbas_types():
    """Results and pointers, in order, of small arguments."""
    of_numpy = {"float32": F, "float64": D}
    for name, (result, arguments) in libdevicefuncs.functions.items():
        inputs = [a.ty for a in arguments if not a.is_ptr]
        got = L[name.removeprefix("__nv_")](*(of_numpy.get(str(t), int)(1) for t in inputs))
        wanted = [
            str(t) for t in (result, *(a.ty for a in arguments if a.is_ptr)) if str(t) != "none"
        ]
        got = got if isinstance(got, tuple) else (got,)
        for value, kind in zip(got, wanted, strict=True):
            known = {"Int32": "int32", "Int16": "int16", "int": "int64"}.get(
                type(value).__name__, type(value).__name__
            )
            assert known == kind, (name, value, wanted)


@pytest.mark.parametrize(
    "name, arguments, want",
    [
        ("fmaxf", (F(2), F(3)), 3),
        ("fmaxf", (F(math.nan), F(3)), 3),
        ("fmin", (D(2), D(3)), 2),
        ("fdimf", (F(5), F(3)), 2),
        ("fdim", (D(3), D(5)), 0),
        ("round", (D(-2.5),), -3),
        ("rint", (D(2.5),), 2),
        ("llround", (D(2.5),), 3),
        ("llrintf", (F(2.5),), 2),
        ("rsqrtf", (F(4),), 0.5),
        ("rcbrt", (D(8),), 0.5),
        ("saturatef", (F(1.5),), 1),
        ("saturatef", (F(math.nan),), 0),
        ("sinpi", (D(1),), 0),
        ("cospif", (F(0.5),), 0),
        ("logb", (D(10),), 3),
        ("ilogbf", (F(0),), -(2**31)),
        ("scalbn", (D(3), 4), 48),
        ("powif", (F(2), -2), 0.25),
        ("clz", (1,), 31),
        ("clzll", (1,), 63),
        ("popc", (-1,), 32),
        ("ffs", (8,), 4),
        ("brev", (1,), -(2**31)),
        ("byte_perm", (0x33221100, 0x77665544, 0x7520), 0x77552200),
        ("sad", (-5, 3, 10), 18),
        ("hadd", (-3, 2), -1),
        ("mulhi", (-(2**31), 4), -2),
        ("umulhi", (-1, 16), 15),
        ("mul64hi", (-(2**63), 4), -2),
        ("mul24", (-3, 5), -15),
        ("umax", (-1, 5), -1),
        ("llmin", (-1, 5), -1),
        ("float_as_int", (F(1),), 0x3F800000),
        ("int_as_float", (0x40000000,), 2),
        ("double2hiint", (D(1),), 0x3FF00000),
        ("hiloint2double", (0x40000000, 0), 2),
        ("float2half_rn", (F(1),), 0x3C00),
        ("half2float", (0x4000,), 2),
        ("isnand", (D(math.nan),), 1),
        ("float2int_ru", (F(1.25),), 2),
        ("double2int_rd", (D(-1.25),), -2),
        ("float2uint_rz", (F(3e9),), 3000000000 - 2**32),
        ("double2ll_rn", (D(2.5),), 2),
        ("ll2float_rz", (2**24 + 1,), 2**24),
        ("ll2float_ru", (2**24 + 1,), 2**24 + 2),
        ("double2float_rd", (D(0.1),), np.nextafter(F(0.1), F(0))),
    ],
)
def test_values(name, arguments, want):
    assert L[name](*arguments) == want


@pytest.mark.filterwarnings("ignore:overflow")
def test_sums_products_and_roots_rounded_in_each_direction():
    small = D(2.0**-80)
    assert L["dadd_ru"](D(1), small) == np.nextafter(D(1), D(2)) and L["dadd_rd"](D(1), small) == 1
    assert (
        L["dadd_rz"](D(-1), small) == -np.nextafter(D(1), D(0)) and L["dadd_rn"](D(1), small) == 1
    )
    third = L["fdiv_rd"](F(1), F(3)), L["fdiv_rn"](F(1), F(3)), L["fdiv_ru"](F(1), F(3))
    assert third[0] < third[2] and third[1] in third[::2] and third[1] == F(1) / F(3)
    assert (
        L["frcp_rz"](F(3)) == third[0]
        and L["fsqrt_rd"](F(2)) < L["fsqrt_ru"](F(2))
        and L["fsqrt_ru"](F(4)) == 2
    )
    assert L["fmaf_ru"](F(1), F(1), F(2**-40)) > 1 == L["fmaf_rd"](F(1), F(1), F(2**-40))
    assert (
        L["fmul_rz"](F(3e38), F(3e38)) == np.finfo(F).max
        and L["fmul_ru"](F(3e38), F(3e38)) == math.inf
    )


@pytest.mark.parametrize(
    "name, x, want",
    [
        ("erfinv", 0.5, 0.47693627620446987),
        ("erfcinv", 0.1, 1.1630871536766743),
        ("normcdfinv", 0.975, 1.959963984540054),
        ("normcdf", -2.0, 0.022750131948179207),
        ("erfcx", 30.0, 0.018795888861416751),
        ("j0", 2.5, -0.048383776468197996),
        ("j1", 30.0, -0.11875106261662290),
        ("y0", 1.0, 0.088256964215676957),
        ("y1", 2.5, 0.14591813796678578),
        ("tgamma", 4.5, 11.631728396567448),
    ],
)
def test_special_functions(name, x, want):
    assert math.isclose(L[name](D(x)), want, rel_tol=1e-9)
