"""E4M3, float of 8 bits, in kernels (sm_90): see numdiff/float8.py for the format.

    An array of it                  is one of uint8, or of its words, uint32, four numbers each
    pack_e4m3x4(a, b, c, d)         four float32, each rounded to the nearest (ties to even; beyond 448 it is ±448, a
                                    NaN stays one), as a word, a in its lowest byte

wgmma.py has the products.

SOURCE  PTX ISA, section 9.7.9.21 (`cvt`).
"""
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import twin
from ..emulator.values import UInt32
from ..float8 import bits_of
from .inline_ptx import I32, statement

PACK = ("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }")


@intrinsic
def pack_e4m3x4(typingctx, a, b, c, d):
    """Four float32, each rounded to the nearest E4M3, as a word, a in its lowest byte."""
    return types.uint32(*[types.float32] * 4), statement(PACK, [I32])


@twin(pack_e4m3x4)
def _pack_e4m3x4(machine, a, b, c, d):
    return UInt32(int.from_bytes(bits_of([a, b, c, d]).tobytes(), "little"))
