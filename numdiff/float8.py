"""E4M3, a float of 8 bits: what its 256 numbers are, and how a float32 is rounded to one.

    E4M3        1 sign, 4 exponent, 3 mantissa bits, bias 7: 4 significant bits, from 2⁻⁹ to 448; no infinity, and one
                NaN of each sign, S.1111.111

NumPy has no such type, so an array of it is one of uint8, the bits. `numbers_of` and `bits_of` are
exact in what they
say: kernels (device/float8.py), the emulator and NumPy round to the same bits.

SOURCE
    Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433, table 1; PTX ISA,
    section 9.7.9.21 (`cvt.rn.satfinite.e4m3x2.f32`), for what becomes of numbers beyond 448.
"""

import numpy as np

LARGEST = 448.0
NAN_BITS = 0x7F
LEAST_EXPONENT = -6  # of a number with its first bit; below, steps of 2⁻⁹


def _table():
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(
        exponent, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa.astype(float), -9)
    )
    size[(bits & 127) == NAN_BITS] = np.nan
    return np.where(bits & 128, -size, size).astype(np.float32)


NUMBERS = _table()  # float32 (256,): what each byte stands for


def numbers_of(bits):
    """uint8 (…) → float32 (…)."""
    return NUMBERS[bits]


def bits_of(x):
    """float32 (…) → uint8 (…): to the nearest, ties to even; what is beyond 448, infinity too,
    becomes ±448."""
    x = np.asarray(x, np.float32)
    size = np.minimum(np.abs(x), np.float32(LARGEST))
    exponent = np.frexp(np.maximum(size, np.float32(2.0**LEAST_EXPONENT)))[1] - 1
    # 8 … 16 of them, or fewer below 2⁻⁶
    steps = np.rint(np.ldexp(np.nan_to_num(size), 3 - exponent))
    bits = (steps + 8 * (exponent - LEAST_EXPONENT)).astype(np.uint8) | np.signbit(x).astype(
        np.uint8
    ) << np.uint8(7)
    return np.where(np.isnan(x), np.uint8(NAN_BITS), bits)
