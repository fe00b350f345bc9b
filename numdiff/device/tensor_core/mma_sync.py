"""`mma.sync`: a warp multiplies two small matrices, of float16, tf32 or E4M3, and adds a third in
float32.

SOURCE  PTX ISA, section 9.7.14.5 (`mma`).
"""

import itertools
import sys

from ...emulator.fragments import (
    fragment_a_m16n8k8,
    fragment_a_m16n8k8_tf32,
    fragment_a_m16n8k16,
    fragment_a_m16n8k32,
    fragment_b_m16n8k8,
    fragment_b_m16n8k8_tf32,
    fragment_b_m16n8k16,
    fragment_b_m16n8k32,
)
from ...emulator.warp_matrix import (
    MatrixProduct,
    e4m3_of_words,
    float16_of_words,
    tf32_of_words,
)
from ..inline_ptx import (
    F32,
    I64,
    TypingError,
    contiguous,
    element_pointer,
    emit,
    f32,
    i64,
    instruction,
    many,
    registers,
    u32,
)


def _accumulators(name, array):
    if contiguous(name, array).dtype != f32:
        raise TypingError(f"an mma sums in float32, not in {array}")
    return array


def make_mma(product, kind):
    """(mma(a, b, c), mma_into(accumulators, first, a, b)) of a `MatrixProduct`.

    kind: of the elements of a and b, in PTX: "f16", "bf16", "tf32" or "e4m3". a and b are tuples of words,
    or one word; c and the result of the first four float32, accumulators an array of float32.
    """
    words = [places.shape[1] for places in (product.a_places, product.b_places)]
    number, groups = itertools.count(), []
    for count in (4, *words, 4):
        groups.append(f"{{{', '.join(f'${next(number)}' for _ in range(count))}}}")
    text = f"mma.sync.aligned.m16n8k{product.k}.row.col.f32.{kind}.{kind}.f32 {', '.join(groups)};"
    left, right = (u32 if count == 1 else many(u32, count) for count in words)

    @instruction(text, collective=True)
    def mma(machine, a: left, b: right, c: many(f32, 4)) -> many(f32, 4):
        """a · b + c over the warp."""
        return tuple(product(machine, a, b, c, sys._getframe(1)))

    def codegen(context, builder, sig, args):
        indices = [builder.add(args[1], I64(i)) for i in range(4)]
        slots = [
            element_pointer(context, builder, sig.args[0], args[0], index) for index in indices
        ]
        operands = registers(context, builder, sig.args[2:], args[2:])
        operands += [builder.load(slot) for slot in slots]
        values = emit(builder, text, [F32] * 4, operands, collective=True)
        for slot, value in zip(slots, values, strict=True):
            builder.store(value, slot)
        return context.get_dummy_value()

    @instruction(codegen)
    def mma_into(machine, accumulators: _accumulators, first: i64, a: left, b: right):
        """accumulators[first … first + 3] += a · b over the warp."""
        product.into(machine, accumulators, first, a, b, sys._getframe(1))

    return mma, mma_into


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
PRODUCT_M16N8K32_E4M3 = MatrixProduct(
    "mma.m16n8k32.e4m3", 32, fragment_a_m16n8k32, fragment_b_m16n8k32, e4m3_of_words
)

mma_m16n8k16, mma_m16n8k16_into = make_mma(PRODUCT_M16N8K16, "f16")
mma_m16n8k8, mma_m16n8k8_into = make_mma(PRODUCT_M16N8K8, "f16")
mma_m16n8k8_tf32, mma_m16n8k8_tf32_into = make_mma(PRODUCT_M16N8K8_TF32, "tf32")
mma_m16n8k32_e4m3, mma_m16n8k32_e4m3_into = make_mma(PRODUCT_M16N8K32_E4M3, "e4m3")
