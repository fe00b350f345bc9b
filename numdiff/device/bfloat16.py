"""bfloat16 on the tensor cores of sm_80 and later: float32's range in 16 bits, with 8 significant bits instead of 24.

    pack_bfloat2(low, high)         two float32, each rounded to the nearest bfloat16 (ties to even), as a word
    mma_m16n8k16_bf16(a, b, c)      4, 2 and 4 registers → 4: a · b + c over the warp; fragments lie as float16's do

SOURCE  PTX ISA, sections 9.7.9.21 (`cvt`) and 9.7.14.5 (`mma`).
"""
import sys

import numpy as np
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import twin
from ..emulator.fragments import fragment_a_m16n8k16, fragment_b_m16n8k16
from ..emulator.values import UInt32, float32_bits
from ..emulator.warp_matrix import MatrixProduct
from .inline_ptx import F32, I32, statement

SUMS = types.UniTuple(types.float32, 4)
M16N8K16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, " \
           "{$10, $11, $12, $13};"


@intrinsic
def pack_bfloat2(typingctx, low, high):
    """Two float32, each rounded to the nearest bfloat16 (ties to even), as a word, low first."""
    return types.uint32(types.float32, types.float32), statement("cvt.rn.bf16x2.f32 $0, $2, $1;", [I32])


@twin(pack_bfloat2)
def _pack_bfloat2(machine, low, high):
    return UInt32(_bits(low) | _bits(high) << 16)


def _bits(x):
    word = float32_bits(x)
    return 0x7FFF if x != x else word + 0x7FFF + (word >> 16 & 1) >> 16  # 0x7FFF: the NaN that cvt gives


@intrinsic
def mma_m16n8k16_bf16(typingctx, a, b, c):
    """a · b + c over the warp: a four words, b two words of bfloat16, c and the result four float32."""
    words4, words2 = types.UniTuple(types.uint32, 4), types.UniTuple(types.uint32, 2)
    return SUMS(words4, words2, SUMS), statement(M16N8K16, [F32] * 4, collective=True)


def bfloat16_of_words(words):
    """uint32 (…) → float32 (…, 2): the two bfloat16 in each."""
    return np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], axis=-1).view(np.float32)


PRODUCT_M16N8K16_BF16 = MatrixProduct("mma.m16n8k16.bf16", 16, fragment_a_m16n8k16, fragment_b_m16n8k16,
                                      bfloat16_of_words)


@twin(mma_m16n8k16_bf16)
def _mma_m16n8k16_bf16(machine, a, b, c):
    return tuple(PRODUCT_M16N8K16_BF16(machine, a, b, c, sys._getframe(2)))
