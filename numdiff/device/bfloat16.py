"""bfloat16 in kernels (sm_80 and later): float32's range in 16 bits, with 8 significant bits
instead of 24.

    An array of it                  load4, load8 … give float32, and arithmetic takes an element x[i] for the float32
                                    that it is; what is stored is rounded to the nearest, ties to even
    pack_bfloat2(low, high)         two float32, each rounded likewise, as a word
    unpack_bfloat2(word), ones_bfloat2()    the two bfloat16 of a word as two float32; a word of two ones
    mma_m16n8k16_bf16(a, b, c), mma_m16n8k16_bf16_into(accumulators, first, a, b), mma_m16n8k8_bf16 …
                                    a · b + c over the warp; fragments as float16's (tensor_core/)

half.py makes of a kernel whose text names float16's instructions one that has those of bfloat16.

SOURCE  PTX ISA, sections 9.7.9.21 (`cvt`) and 9.7.14.5 (`mma`).
"""

import importlib

from numba.cuda import types
from numba.cuda.datamodel import PrimitiveModel
from numba.cuda.extending import lower_cast, register_model
from numba.cuda.typeconv import Conversion

from ..emulator.fragments import (
    fragment_a_m16n8k8,
    fragment_a_m16n8k16,
    fragment_b_m16n8k8,
    fragment_b_m16n8k16,
)
from ..emulator.values import UInt32, float32_bits, float32_of_bits
from ..emulator.warp_matrix import MatrixProduct, bfloat16_of_words
from .inline_ptx import F32, I16, I32, emit, f32, instruction, many, u32
from .tensor_core import (
    make_mma,
    mma_m16n8k8,
    mma_m16n8k8_into,
    mma_m16n8k16,
    mma_m16n8k16_into,
    ones_half2,
    pack_half2,
    unpack_half2,
)

SUFFIX = "_bf16"  # of the names of kernels that `in_bfloat16` makes


# The type -----------------------------------------------------------------------------------------


class Bfloat16(types.Number):
    """The element type of an array: 16 bits that can be cast to float32 and from it. Numba has such
    a type, whose casts call functions of C++ that have to be linked."""

    bitwidth = 16

    def __init__(self):
        super().__init__(name="bfloat16")

    def can_convert_from(self, typingctx, other):
        return Conversion.unsafe if other == types.float32 else None

    def can_convert_to(self, typingctx, other):
        return Conversion.safe if other == types.float32 else None


bfloat16 = Bfloat16()
importlib.import_module("numba.cuda.typing.npydecl")  # it looks up NumPy's type of each in that set
# where Numba looks up whether a shared array may have such elements
types.number_domain |= {bfloat16}


@register_model(Bfloat16)
class Bfloat16Model(PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, I16)


@lower_cast(Bfloat16, types.float32)
def widen(context, builder, kind, to, value):
    """The upper half of a float32."""
    return builder.bitcast(builder.shl(builder.zext(value, I32), I32(16)), F32)


@lower_cast(types.float32, Bfloat16)
def narrow(context, builder, kind, to, value):
    return emit(builder, "cvt.rn.bf16.f32 $0, $1;", [I16], [value])[0]


# Words --------------------------------------------------------------------------------------------

PACK = "cvt.rn.bf16x2.f32 $0, $2, $1;"


def widen_word(builder, word):
    """LLVM values: a word's two bfloat16 as two float32, the low half first."""
    return [
        builder.bitcast(bits, F32)
        for bits in (builder.shl(word, I32(16)), builder.and_(word, I32(0xFFFF0000)))
    ]


@instruction(PACK)
def pack_bfloat2(machine, low: f32, high: f32) -> u32:
    """Two float32, each rounded to the nearest bfloat16 (ties to even), as a word, low first."""
    return UInt32(_bits(low) | _bits(high) << 16)


def _bits(x):
    word = float32_bits(x)
    # 0x7FFF: the NaN that cvt gives
    return 0x7FFF if x != x else word + 0x7FFF + (word >> 16 & 1) >> 16


@instruction(
    lambda context, builder, sig, args: context.make_tuple(
        builder, sig.return_type, widen_word(builder, args[0])
    )
)
def unpack_bfloat2(machine, word: u32) -> many(f32, 2):
    """The two bfloat16 of a word as two float32, the low half first."""
    return float32_of_bits(int(word) << 16 & 0xFFFFFFFF), float32_of_bits(int(word) & 0xFFFF0000)


@instruction(lambda context, builder, sig, args: I32(0x3F803F80))
def ones_bfloat2(machine) -> u32:
    """A word of two bfloat16, both one."""
    return UInt32(0x3F803F80)


# mma ----------------------------------------------------------------------------------------------


PRODUCT_M16N8K16_BF16 = MatrixProduct(
    "mma.m16n8k16.bf16", 16, fragment_a_m16n8k16, fragment_b_m16n8k16, bfloat16_of_words
)
PRODUCT_M16N8K8_BF16 = MatrixProduct(
    "mma.m16n8k8.bf16", 8, fragment_a_m16n8k8, fragment_b_m16n8k8, bfloat16_of_words
)
mma_m16n8k16_bf16, mma_m16n8k16_bf16_into = make_mma(PRODUCT_M16N8K16_BF16, "bf16")
mma_m16n8k8_bf16, mma_m16n8k8_bf16_into = make_mma(PRODUCT_M16N8K8_BF16, "bf16")


# What stands for what in `in_bfloat16` (half.py) --------------------------------------------------

COUNTERPARTS = {
    pack_half2: lambda: pack_bfloat2,
    unpack_half2: lambda: unpack_bfloat2,
    ones_half2: lambda: ones_bfloat2,
    mma_m16n8k16: lambda: mma_m16n8k16_bf16,
    mma_m16n8k16_into: lambda: mma_m16n8k16_bf16_into,
    mma_m16n8k8: lambda: mma_m16n8k8_bf16,
    mma_m16n8k8_into: lambda: mma_m16n8k8_bf16_into,
}


def counterpart(of_half, make):
    """`make()` gives for bfloat16 what the intrinsic `of_half` is for float16; returns `of_half`."""
    COUNTERPARTS[of_half] = make
    return of_half
