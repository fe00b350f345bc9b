"""E4M3, float of 8 bits, in kernels (sm_89): see numdiff/float8.py for the format.

    An array of it                  is one of uint8, or of its words, uint32, four numbers each
    pack_e4m3x4(a, b, c, d)         four float32, each rounded to the nearest (ties to even; beyond 448 it is ±448, a
                                    NaN stays one), as a word, a in its lowest byte
    unpack_e4m3x4(word)             the four numbers of a word as float32, the lowest byte's first
    larger_halves(a, b)             of two words the larger halves, as unsigned integers
    transpose_bytes(a, b, c, d)     four words as the rows of a 4 × 4 matrix of bytes: the words of its columns

tensor_core/ and wgmma.py have the products; ada.py replaces what sm_89 lacks.

SOURCE  PTX ISA, sections 9.7.9.21 (`cvt`), 9.7.1.13 (`max`) and 9.7.9.7 (`prmt`).
"""

import numpy as np

from ..emulator.values import UInt32
from ..float8 import bits_of, numbers_of
from .inline_ptx import f32, instruction, many, u32

PACK = (
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)
UNPACK = (
    "{ .reg .b16 low, high, v0, v1, v2, v3; .reg .b32 first, second; mov.b32 {low, high}, $4; "
    "cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high; mov.b32 {v0, v1}, first; "
    "mov.b32 {v2, v3}, second; cvt.f32.f16 $0, v0; cvt.f32.f16 $1, v1; cvt.f32.f16 $2, v2; "
    "cvt.f32.f16 $3, v3; }"
)
TRANSPOSE = (
    "{ .reg .b32 a, b, c, d; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $4, $5, 0x7362; "
    "prmt.b32 c, $6, $7, 0x5140; prmt.b32 d, $6, $7, 0x7362; prmt.b32 $0, a, c, 0x5410; "
    "prmt.b32 $1, a, c, 0x7632; prmt.b32 $2, b, d, 0x5410; prmt.b32 $3, b, d, 0x7632; }"
)


@instruction(PACK)
def pack_e4m3x4(machine, a: f32, b: f32, c: f32, d: f32) -> u32:
    """Four float32, each rounded to the nearest E4M3, as a word, a in its lowest byte."""
    return UInt32(int.from_bytes(bits_of([a, b, c, d]).tobytes(), "little"))


@instruction(UNPACK)
def unpack_e4m3x4(machine, word: u32) -> many(f32, 4):
    """The four E4M3 of a word as float32, the lowest byte's first; exact."""
    return tuple(numbers_of(_bytes_of(word)))


@instruction(TRANSPOSE)
def transpose_bytes(machine, a: u32, b: u32, c: u32, d: u32) -> many(u32, 4):
    """Word i of the result has byte i of a, b, c and d, a's lowest."""
    columns = np.stack([*map(_bytes_of, (a, b, c, d))]).T
    return tuple(UInt32(int.from_bytes(column.tobytes(), "little")) for column in columns)


def _bytes_of(word):
    return np.frombuffer(int(word).to_bytes(4, "little"), np.uint8)


@instruction("max.u16x2 $0, $1, $2;")
def larger_halves(machine, a: u32, b: u32) -> u32:
    """The larger of the low 16 bits of two words, and of the high, as unsigned integers; of float16
    without a sign the larger numbers."""
    a, b = int(a), int(b)
    return UInt32(max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16)
