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
import sys

from numba.cuda import types
from numba.cuda.datamodel import PrimitiveModel
from numba.cuda.extending import intrinsic, lower_cast, register_model
from numba.cuda.typeconv import Conversion

from ..emulator import twin
from ..emulator.fragments import (
    fragment_a_m16n8k8,
    fragment_a_m16n8k16,
    fragment_b_m16n8k8,
    fragment_b_m16n8k16,
)
from ..emulator.values import UInt32, float32_bits, float32_of_bits
from ..emulator.warp_matrix import MatrixProduct, bfloat16_of_words
from .inline_ptx import F32, I16, I32, emit, statement
from .tensor_core import (
    M16N8K8,
    M16N8K16,
    mma,
    mma_into,
    mma_m16n8k8,
    mma_m16n8k8_into,
    mma_m16n8k16,
    mma_m16n8k16_into,
    ones_half2,
    pack_half2,
    unpack_half2,
)

WORDS2, WORDS4 = types.UniTuple(types.uint32, 2), types.UniTuple(types.uint32, 4)
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


@intrinsic
def pack_bfloat2(typingctx, low, high):
    """Two float32, each rounded to the nearest bfloat16 (ties to even), as a word, low first."""
    return types.uint32(types.float32, types.float32), statement(PACK, [I32])


@twin(pack_bfloat2)
def _pack_bfloat2(machine, low, high):
    return UInt32(_bits(low) | _bits(high) << 16)


def _bits(x):
    word = float32_bits(x)
    # 0x7FFF: the NaN that cvt gives
    return 0x7FFF if x != x else word + 0x7FFF + (word >> 16 & 1) >> 16


@intrinsic
def unpack_bfloat2(typingctx, word):
    """The two bfloat16 of a word as two float32, the low half first."""

    def codegen(context, builder, sig, args):
        return context.make_tuple(builder, sig.return_type, widen_word(builder, args[0]))

    return types.UniTuple(types.float32, 2)(types.uint32), codegen


@twin(unpack_bfloat2)
def _unpack_bfloat2(machine, word):
    return float32_of_bits(int(word) << 16 & 0xFFFFFFFF), float32_of_bits(int(word) & 0xFFFF0000)


@intrinsic
def ones_bfloat2(typingctx):
    """A word of two bfloat16, both one."""
    return types.uint32(), lambda context, builder, sig, args: I32(0x3F803F80)


@twin(ones_bfloat2)
def _ones_bfloat2(machine):
    return UInt32(0x3F803F80)


# mma ----------------------------------------------------------------------------------------------


def _text(of_half):
    return of_half.replace(".f32.f16.f16.f32", ".f32.bf16.bf16.f32")


PRODUCT_M16N8K16_BF16 = MatrixProduct(
    "mma.m16n8k16.bf16", 16, fragment_a_m16n8k16, fragment_b_m16n8k16, bfloat16_of_words
)
PRODUCT_M16N8K8_BF16 = MatrixProduct(
    "mma.m16n8k8.bf16", 8, fragment_a_m16n8k8, fragment_b_m16n8k8, bfloat16_of_words
)


@intrinsic
def mma_m16n8k16_bf16(typingctx, a, b, c):
    """a · b + c over the warp: a four words, b two words of bfloat16, c and the result four
    float32."""
    return mma(_text(M16N8K16), WORDS4, WORDS2)


@twin(mma_m16n8k16_bf16)
def _mma_m16n8k16_bf16(machine, a, b, c):
    return tuple(PRODUCT_M16N8K16_BF16(machine, a, b, c, sys._getframe(1)))


@intrinsic
def mma_m16n8k16_bf16_into(typingctx, accumulators, first, a, b):
    """accumulators[first … first + 3] += a · b over the warp: a four words, b two words of
    bfloat16; float32."""
    return mma_into(_text(M16N8K16), accumulators, WORDS4, WORDS2)


@twin(mma_m16n8k16_bf16_into)
def _mma_m16n8k16_bf16_into(machine, accumulators, first, a, b):
    PRODUCT_M16N8K16_BF16.into(machine, accumulators, first, a, b, sys._getframe(1))


@intrinsic
def mma_m16n8k8_bf16(typingctx, a, b, c):
    """a · b + c over the warp: a two words, b one word of bfloat16, c and the result four float32."""
    return mma(_text(M16N8K8), WORDS2, types.uint32)


@twin(mma_m16n8k8_bf16)
def _mma_m16n8k8_bf16(machine, a, b, c):
    return tuple(PRODUCT_M16N8K8_BF16(machine, a, b, c, sys._getframe(1)))


@intrinsic
def mma_m16n8k8_bf16_into(typingctx, accumulators, first, a, b):
    """accumulators[first … first + 3] += a · b over the warp: a two words, b one word of bfloat16;
    float32."""
    return mma_into(_text(M16N8K8), accumulators, WORDS2, types.uint32)


@twin(mma_m16n8k8_bf16_into)
def _mma_m16n8k8_bf16_into(machine, accumulators, first, a, b):
    PRODUCT_M16N8K8_BF16.into(machine, accumulators, first, a, b, sys._getframe(1))


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
