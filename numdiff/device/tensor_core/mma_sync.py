"""`mma.sync`: a warp multiplies two small matrices, of float16 or tf32, and adds a third in
float32.

SOURCE  PTX ISA, section 9.7.14.5 (`mma`).
"""

import sys

from numba.cuda import types
from numba.cuda.extending import intrinsic

from ...emulator import twin
from ...emulator.fragments import (
    fragment_a_m16n8k8,
    fragment_a_m16n8k8_tf32,
    fragment_a_m16n8k16,
    fragment_b_m16n8k8,
    fragment_b_m16n8k8_tf32,
    fragment_b_m16n8k16,
)
from ...emulator.warp_matrix import MatrixProduct, float16_of_words, tf32_of_words
from ..inline_ptx import (
    F32,
    I64,
    TypingError,
    element_pointer,
    emit,
    registers,
    require_contiguous,
    statement,
)
from .words import word_tuple

M16N8K16 = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
    "{$10, $11, $12, $13};"
)
M16N8K8 = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
M16N8K8_TF32 = (
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
    "{$10, $11, $12, $13};"
)
ACCUMULATORS = types.UniTuple(types.float32, 4)


def mma(text, a, b):
    """Signature and code of d = a · b + c."""
    return ACCUMULATORS(a, b, ACCUMULATORS), statement(text, [F32] * 4, collective=True)


def mma_into(text, accumulators, a, b):
    """Signature and code of the form whose accumulators are four neighbours in an array."""
    require_contiguous("an mma", accumulators)
    if accumulators.dtype != types.float32:
        raise TypingError(f"an mma sums in float32, not in {accumulators}")

    def codegen(context, builder, sig, args):
        indices = [builder.add(args[1], I64(i)) for i in range(4)]
        slots = [
            element_pointer(context, builder, sig.args[0], args[0], index) for index in indices
        ]
        operands = registers(context, builder, sig.args[2:], args[2:]) + [
            builder.load(slot) for slot in slots
        ]
        for slot, value in zip(
            slots, emit(builder, text, [F32] * 4, operands, collective=True), strict=True
        ):
            builder.store(value, slot)
        return context.get_dummy_value()

    return types.void(accumulators, types.int64, a, b), codegen


PRODUCT_M16N8K8 = MatrixProduct(
    "mma.m16n8k8", 8, fragment_a_m16n8k8, fragment_b_m16n8k8, float16_of_words
)
PRODUCT_M16N8K16 = MatrixProduct(
    "mma.m16n8k16",
    16,
    fragment_a_m16n8k16,
    fragment_b_m16n8k16,
    float16_of_words,
    PRODUCT_M16N8K8,
)
PRODUCT_M16N8K8_TF32 = MatrixProduct(
    "mma.m16n8k8.tf32", 8, fragment_a_m16n8k8_tf32, fragment_b_m16n8k8_tf32, tf32_of_words
)


@intrinsic
def mma_m16n8k16(typingctx, a, b, c):
    """a · b + c over the warp: a four words, b two words of float16, c and the result four float32."""
    return mma(M16N8K16, word_tuple(4), word_tuple(2))


@twin(mma_m16n8k16)
def _mma_m16n8k16(machine, a, b, c):
    return tuple(PRODUCT_M16N8K16(machine, a, b, c, sys._getframe(1)))


@intrinsic
def mma_m16n8k16_into(typingctx, accumulators, first, a, b):
    """accumulators[first … first + 3] += a · b over the warp: a four words, b two words of float16;
    float32."""
    return mma_into(M16N8K16, accumulators, word_tuple(4), word_tuple(2))


@twin(mma_m16n8k16_into)
def _mma_m16n8k16_into(machine, accumulators, first, a, b):
    PRODUCT_M16N8K16.into(machine, accumulators, first, a, b, sys._getframe(1))


@intrinsic
def mma_m16n8k8(typingctx, a, b, c):
    """a · b + c over the warp: a two words, b one word of float16, c and the result four float32."""
    return mma(M16N8K8, word_tuple(2), types.uint32)


@twin(mma_m16n8k8)
def _mma_m16n8k8(machine, a, b, c):
    return tuple(PRODUCT_M16N8K8(machine, a, b, c, sys._getframe(1)))


@intrinsic
def mma_m16n8k8_into(typingctx, accumulators, first, a, b):
    """accumulators[first … first + 3] += a · b over the warp: a two words, b one word of float16;
    float32."""
    return mma_into(M16N8K8, accumulators, word_tuple(2), types.uint32)


@twin(mma_m16n8k8_into)
def _mma_m16n8k8_into(machine, accumulators, first, a, b):
    PRODUCT_M16N8K8.into(machine, accumulators, first, a, b, sys._getframe(1))


@intrinsic
def mma_m16n8k8_tf32(typingctx, a, b, c):
    """a · b + c over the warp: a four words, b two words of tf32, c and the result four float32."""
    return mma(M16N8K8_TF32, word_tuple(4), word_tuple(2))


@twin(mma_m16n8k8_tf32)
def _mma_m16n8k8_tf32(machine, a, b, c):
    return tuple(PRODUCT_M16N8K8_TF32(machine, a, b, c, sys._getframe(1)))


@intrinsic
def mma_m16n8k8_tf32_into(typingctx, accumulators, first, a, b):
    """accumulators[first … first + 3] += a · b over the warp: a four words, b two words of tf32;
    float32."""
    return mma_into(M16N8K8_TF32, accumulators, word_tuple(4), word_tuple(2))


@twin(mma_m16n8k8_tf32_into)
def _mma_m16n8k8_tf32_into(machine, accumulators, first, a, b):
    PRODUCT_M16N8K8_TF32.into(machine, accumulators, first, a, b, sys._getframe(1))
