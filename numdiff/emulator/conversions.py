"""From a float to an integer as PTX does it, and a product and a sum that are rounded once."""

import math

import numpy as np

float16, float32, float64 = np.float16, np.float32, np.float64


def integer_of(value, bits, signed, nearest=False):
    """A float as an integer of a width: `cvt`, which cuts off the fraction and saturates.

    From float32 and float64 to 8 bits NVVM converts to 16, of which the lower half stays. Numba
    converts float16 to the nearest, ties to even. NaN is 0 where the float has at most 32 bits and
    the integer less than 64, else the highest bit alone (PTX ISA, section 9.7.9, `cvt`).

    nearest: to the nearest for each type, ties to even (`cvt.rni`)
    """
    half = value.__class__ is float16
    width = bits if half else max(bits, 16)
    low = -(1 << width - 1) if signed else 0
    high = low + (1 << width) - 1
    if value != value:
        whole = (
            (low if signed else 1 << width - 1)
            if value.__class__ in (float64, float) or width == 64
            else 0
        )
    elif math.isinf(value):
        whole = high if value > 0 else low
    else:
        whole = min(max(round(float(value)) if nearest or half else int(value), low), high)
    if width > bits:
        low = -(1 << bits - 1) if signed else 0
        whole = (whole - low & (1 << bits) - 1) + low
    return whole


def fma(a, b, c):
    """a·b + c, rounded once to the arguments' type.

    float32: the product is exact in float64; the sum is computed in float64 with rounding to odd,
        after which rounding to float32 is correct (Boldo and Melquiond 2008, "Emulation of FMA and
        correctly rounded sums").
    """
    kind = a.__class__
    if kind is float64:
        from fractions import Fraction

        if not all(math.isfinite(v) for v in (a, b, c)):
            return a * b + c
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        try:
            return float64(exact.numerator / exact.denominator) if exact else a * b + c
        except OverflowError:
            return float64(math.copysign(math.inf, exact))
    product, addend = float(a) * float(b), float(c)
    total = product + addend
    if math.isfinite(total):
        back = total - product
        error = (product - (total - back)) + (addend - back)
        if error and not int(np.float64(total).view(np.uint64)) & 1:
            total = math.nextafter(total, math.inf if error > 0 else -math.inf)
    return kind(total)
