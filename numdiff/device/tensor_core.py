"""Tensor cores of sm_80 and later: `ldmatrix`, `mma.sync`, and the words of float16 that travel between them.

A tensor-core instruction is executed by a whole warp. Each of its operands, a small matrix called a fragment, is spread
over the registers of the 32 lanes; which element lies where is documented in `numdiff/emulator/fragments.py`. A warp
loads fragments from shared memory with `ldmatrix`, which spreads them in just that way, and accumulates their products:

    a = ldmatrix_x4(a_address)                          # 16 × 16 of float16
    b = ldmatrix_x4(b_address)                          # 16 × 16 of float16: two fragments of 16 × 8
    mma_m16n8k16_into(accumulators, 0, a, (b[0], b[1]))         # accumulators[0 … 3] += a · b, 16 × 8 of float32
    mma_m16n8k16_into(accumulators, 4, a, (b[2], b[3]))

WORDS AND FRAGMENTS
    A fragment of float16 or tf32 is a tuple of uint32, each with two float16 (the low half is the first) or one tf32;
    where it is a single register, a plain uint32. Accumulators are float32: a tuple of four, or (…_into) four
    neighbours in a `cuda.local.array` of one axis, which a loop can index. Such an array stays in registers as long as
    every index into it is known once its loops are unrolled.

    ldmatrix_x1, _x2, _x4 (address), ldmatrix_x1_trans, …   one, two or four 8 × 8 matrices of 16-bit elements
    mma_m16n8k16(a, b, c)       float16: 4, 2 and 4 registers → 4       mma_m16n8k16_into(accumulators, first, a, b)
    mma_m16n8k8(a, b, c)        float16: 2, one and 4 registers → 4     mma_m16n8k8_into(accumulators, first, a, b)
    mma_m16n8k8_tf32(a, b, c)   tf32: 4, 2 and 4 registers → 4          mma_m16n8k8_tf32_into(accumulators, first, a, b)
    pack_half2(low, high), unpack_half2(word), ones_half2(), round_tf32(x), word_of(x), float_of(word)
    load_word(array, index), store_word(array, index, word)     4 bytes of an array of any type
    load_words2(array, index), store_words2(array, index, a, b)     8 bytes: 2 float32, or 4 float16, as two words
    load_words4(array, index), store_words4(array, index, …)    16 bytes: 8 float16 as four words
    load_words4_where(array, index, inside)                     the same, or zeros, without a branch
    low_halves(a, b), high_halves(a, b)                         the low, the high 16 bits of two words, as a word
    choose_bytes(a, b, selector)                                any four of their eight bytes

ADDRESSES
    As in async_copy.py: `ldmatrix` takes 32-bit shared addresses (each row of 8 elements starts at a multiple of 16
    bytes), the loads and stores of words take a contiguous array and an element's index counted over all its axes.

ACCUMULATION
    Products of two float16, or of two tf32, are exact in float32. The emulator adds them to c one by one in the order
    of k, rounding each sum to the nearest float32. The hardware adds a group of products and c in one step, aligned to
    the largest of them and truncated (Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical behavior of NVIDIA tensor
    cores"), so results differ in their last bits. Of tf32 operands the low 13 bits are ignored.

SOURCE  PTX ISA, sections 9.7.9.21 (`cvt`) and 9.7.14.5 (`mma`, `ldmatrix`).
"""
import math
import struct
import sys

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import twin
from ..emulator.fragments import (
    fragment_a_m16n8k8,
    fragment_a_m16n8k8_tf32,
    fragment_a_m16n8k16,
    fragment_b_m16n8k8,
    fragment_b_m16n8k8_tf32,
    fragment_b_m16n8k16,
)
from ..emulator.memory import POISON, CheckedArray, IntegerArray
from ..emulator.values import WORD, UInt32, float32, float32_bits, float32_of_bits
from ..emulator.warp_matrix import MatrixProduct, float16_of_words, load_matrices, tf32_of_words
from .inline_ptx import F32, I32, I64, TypingError, element_pointer, emit, registers, require_contiguous, statement

LOW_WORD = 0xFFFFFFFF
WORDS2, WORDS4, HALF, HALVES, HALF_WORD = map(struct.Struct, ("<2I", "<4I", "<e", "<2e", "<H"))


def _words(count):
    """The Numba type of `count` registers of a fragment."""
    return types.UniTuple(types.uint32, count)


# Words ----------------------------------------------------------------------------------------------------------------

@intrinsic
def pack_half2(typingctx, low, high):
    """Two float32, each rounded to the nearest float16 (ties to even; too large is infinite), as a word, low first."""
    return types.uint32(types.float32, types.float32), statement("cvt.rn.f16x2.f32 $0, $2, $1;", [I32])


@twin(pack_half2)
def _pack_half2(machine, low, high):
    return UInt32(_half_bits(low) | _half_bits(high) << 16)


def _half_bits(x):
    if x != x:
        return 0x7FFF  # the NaN that cvt gives
    try:
        return HALF_WORD.unpack(HALF.pack(x if x.__class__ is float32 else float32(x)))[0]
    except OverflowError:
        return 0x7C00 if x > 0 else 0xFC00


@intrinsic
def unpack_half2(typingctx, word):
    """The two float16 of a word as two float32, the low half first."""
    return types.UniTuple(types.float32, 2)(types.uint32), statement(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }", [F32, F32])


@twin(unpack_half2)
def _unpack_half2(machine, word):
    return tuple(float32(v) for v in HALVES.unpack(WORD.pack(int(word) & LOW_WORD)))


@intrinsic
def ones_half2(typingctx):
    """A word of two float16, both one."""
    return types.uint32(), lambda context, builder, sig, args: I32(0x3C003C00)


@twin(ones_half2)
def _ones_half2(machine):
    return UInt32(0x3C003C00)


@intrinsic
def round_tf32(typingctx, x):
    """A float32 rounded to tf32 (10 mantissa bits, ties away from zero), as the word that an mma takes."""
    return types.uint32(types.float32), statement("cvt.rna.tf32.f32 $0, $1;", [I32])


@twin(round_tf32)
def _round_tf32(machine, x):
    if not math.isfinite(x):
        return UInt32(0x7FFFFFFF) if x != x else word_of_float(x)
    return UInt32(word_of_float(x) + 0x1000 & 0xFFFFE000)  # half of the last bit that is kept


@intrinsic
def word_of(typingctx, x):
    """The bits of a float32 as a uint32. An mma reads them as a tf32 that is truncated instead of rounded."""
    return types.uint32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], I32)


def word_of_float(x):
    return UInt32(float32_bits(x))


@twin(word_of)
def _word_of(machine, x):
    return word_of_float(x)


@intrinsic
def float_of(typingctx, word):
    """The float32 whose bits are this uint32."""
    return types.float32(types.uint32), lambda context, builder, sig, args: builder.bitcast(args[0], F32)


@twin(float_of)
def _float_of(machine, word):
    return float32_of_bits(int(word) & LOW_WORD)


def _word_pointer(context, builder, sig, args, count):
    """Pointer to `count` words at element args[1] of the array args[0]."""
    pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
    kind = I32 if count == 1 else ir.VectorType(I32, count)
    return builder.bitcast(pointer, kind.as_pointer(getattr(pointer.type, "addrspace", 0)))


def _bytes_of(array):
    """All bytes of an array in a kernel that is not checked."""
    return (array.data if array.__class__ is IntegerArray else array).reshape(-1).view(np.uint8)


def _read(machine, array, index, size):
    """`size` bytes from element `index` of an array, in the emulator; NaN, or all bits set, after a fault."""
    if array.__class__ is not CheckedArray:
        start = int(index) * array.itemsize
        return _bytes_of(array)[_inside(array, start, size)].tobytes()
    site = machine.site_here()
    found = machine.access.range_of(array, index, size // array.itemsize, site, "reads", align=size)
    if found is None:
        return bytes([POISON]) * size
    return machine.access.read_bytes(*found, site, array.itemsize).tobytes()


def _write(machine, array, index, data):
    """Write bytes from element `index` of an array, in the emulator."""
    if array.__class__ is not CheckedArray:
        start = int(index) * array.itemsize
        _bytes_of(array)[_inside(array, start, len(data))] = np.frombuffer(data, np.uint8)
        return
    site, size = machine.site_here(), len(data)
    found = machine.access.range_of(array, index, size // array.itemsize, site, "writes", align=size)
    if found is not None:
        memory, offset, _ = found
        machine.access.before_write(memory, offset, size, site, array.itemsize)
        memory.bytes[offset:offset + size].data[:] = data


def _inside(array, start, size):
    if not 0 <= start <= array.nbytes - size:
        raise IndexError(f"{size} bytes from byte {start} of {array.nbytes}")
    return slice(start, start + size)


@intrinsic
def load_word(typingctx, array, index):
    """The 4 bytes at `array[index]` of a contiguous array; a multiple of 4 bytes."""
    require_contiguous("load_word", array)
    return types.uint32(array, types.int64), lambda context, builder, sig, args: builder.load(
        _word_pointer(context, builder, sig, args, 1), align=4)


@twin(load_word)
def _load_word(machine, array, index):
    return UInt32(WORD.unpack(_read(machine, array, index, 4))[0])


def _load_words(array, count):
    """Signature and code of a load of `count` words at once."""
    require_contiguous(f"load_words{count}", array)

    def codegen(context, builder, sig, args):
        vector = builder.load(_word_pointer(context, builder, sig, args, count), align=4 * count)
        words = [builder.extract_element(vector, I32(i)) for i in range(count)]
        return context.make_tuple(builder, sig.return_type, words)

    return _words(count)(array, types.int64), codegen


@intrinsic
def load_words2(typingctx, array, index):
    """The 8 bytes at `array[index]` of a contiguous array as two words; a multiple of 8 bytes."""
    return _load_words(array, 2)


@twin(load_words2)
def _load_words2(machine, array, index):
    return tuple(map(UInt32, WORDS2.unpack(_read(machine, array, index, 8))))


@intrinsic
def load_words4(typingctx, array, index):
    """The 16 bytes at `array[index]` of a contiguous array as four words; a multiple of 16 bytes."""
    return _load_words(array, 4)


@twin(load_words4)
def _load_words4(machine, array, index):
    return tuple(map(UInt32, WORDS4.unpack(_read(machine, array, index, 16))))


LOAD_WHERE = ("{ .reg .pred inside; setp.ne.s32 inside, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; "
              "mov.b32 $3, 0; @inside ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }")


@intrinsic
def load_words4_where(typingctx, array, index, inside):
    """`load_words4` of an array in global memory that the kernel does not write, where `inside` (an int32) is not 0;
    elsewhere zeros, and nothing is read. No branch: many such loads are under way together."""
    require_contiguous("load_words4_where", array)
    return _words(4)(array, types.int64, types.int32), statement(LOAD_WHERE, [I32] * 4)


@twin(load_words4_where)
def _load_words4_where(machine, array, index, inside):
    return tuple(map(UInt32, WORDS4.unpack(_read(machine, array, index, 16)))) if inside else (UInt32(0),) * 4


@intrinsic
def low_halves(typingctx, a, b):
    """The low 16 bits of a, then those of b, as a word."""
    return types.uint32(types.uint32, types.uint32), statement("prmt.b32 $0, $1, $2, 0x5410;", [I32])


@twin(low_halves)
def _low_halves(machine, a, b):
    return UInt32(int(a) & 0xFFFF | (int(b) & 0xFFFF) << 16)


@intrinsic
def high_halves(typingctx, a, b):
    """The high 16 bits of a, then those of b, as a word."""
    return types.uint32(types.uint32, types.uint32), statement("prmt.b32 $0, $1, $2, 0x7632;", [I32])


@twin(high_halves)
def _high_halves(machine, a, b):
    return UInt32(int(a) >> 16 & 0xFFFF | int(b) & 0xFFFF0000)


@intrinsic
def choose_bytes(typingctx, a, b, selector):
    """Four of eight bytes, 0 … 3 of a and 4 … 7 of b: the selector's lowest four bits name the lowest of the result,
    its 16 low bits all. 0x5410 gives low_halves(a, b), 0x7632 high_halves."""
    return types.uint32(types.uint32, types.uint32, types.uint32), statement("prmt.b32 $0, $1, $2, $3;", [I32])


@twin(choose_bytes)
def _choose_bytes(machine, a, b, selector):
    both = (int(a) & LOW_WORD) | (int(b) & LOW_WORD) << 32
    return UInt32(sum((both >> 8 * (int(selector) >> 4 * k & 7) & 255) << 8 * k for k in range(4)))


@intrinsic
def store_word(typingctx, array, index, word):
    """Write 4 bytes at `array[index]` of a contiguous array; a multiple of 4 bytes."""
    require_contiguous("store_word", array)

    def codegen(context, builder, sig, args):
        builder.store(args[2], _word_pointer(context, builder, sig, args, 1), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint32), codegen


@twin(store_word)
def _store_word(machine, array, index, word):
    _write(machine, array, index, WORD.pack(int(word) & LOW_WORD))


def _store_words(array, count):
    """Signature and code of a store of `count` words at once."""
    require_contiguous(f"store_words{count}", array)

    def codegen(context, builder, sig, args):
        vector = ir.Constant(ir.VectorType(I32, count), ir.Undefined)
        for i, word in enumerate(args[2:]):
            vector = builder.insert_element(vector, word, I32(i))
        builder.store(vector, _word_pointer(context, builder, sig, args, count), align=4 * count)
        return context.get_dummy_value()

    return types.void(array, types.int64, *[types.uint32] * count), codegen


@intrinsic
def store_words2(typingctx, array, index, a, b):
    """Write two words, 8 bytes, at `array[index]` of a contiguous array; a multiple of 8 bytes."""
    return _store_words(array, 2)


@twin(store_words2)
def _store_words2(machine, array, index, *words):
    _write(machine, array, index, WORDS2.pack(*[int(w) & LOW_WORD for w in words]))


@intrinsic
def store_words4(typingctx, array, index, a, b, c, d):
    """Write four words, 16 bytes, at `array[index]` of a contiguous array; a multiple of 16 bytes."""
    return _store_words(array, 4)


@twin(store_words4)
def _store_words4(machine, array, index, *words):
    _write(machine, array, index, WORDS4.pack(*[int(w) & LOW_WORD for w in words]))


# ldmatrix -------------------------------------------------------------------------------------------------------------

def _ldmatrix(count, which, transposed=""):
    """Signature and code of a load of `count` matrices."""
    result = types.uint32 if count == 1 else _words(count)
    registers = ", ".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.{which}{transposed}.shared.b16 {{{registers}}}, [${count}];"
    return result(types.uint32), statement(text, [I32] * count, ordered=True, collective=True)


@intrinsic
def ldmatrix_x1(typingctx, address):
    """An 8 × 8 matrix of 16-bit elements from shared memory: lane l gets elements 2·(l % 4) and the next of row l // 4.

    Lanes 0 … 7 give the addresses of the rows.
    """
    return _ldmatrix(1, "x1")


@twin(ldmatrix_x1)
def _ldmatrix_x1(machine, address):
    return load_matrices(machine, address, 1, False, sys._getframe(1))


@intrinsic
def ldmatrix_x2(typingctx, address):
    """Two such matrices; lanes 0 … 7 give the rows of the first, 8 … 15 those of the second."""
    return _ldmatrix(2, "x2")


@twin(ldmatrix_x2)
def _ldmatrix_x2(machine, address):
    return load_matrices(machine, address, 2, False, sys._getframe(1))


@intrinsic
def ldmatrix_x4(typingctx, address):
    """Four such matrices; lane l gives row l % 8 of matrix l // 8.

    The A of an m16n8k16: lane l gives row l % 16, k from 8·(l // 16). Two Bs, stored (N, K): lane l gives n = l % 8 +
    8·(l // 16), k from 8·(l // 8 % 2); registers 0 and 1 are the first B, 2 and 3 the second.
    """
    return _ldmatrix(4, "x4")


@twin(ldmatrix_x4)
def _ldmatrix_x4(machine, address):
    return load_matrices(machine, address, 4, False, sys._getframe(1))


@intrinsic
def ldmatrix_x1_trans(typingctx, address):
    """As `ldmatrix_x1`, of the transposed matrix: lane l gets rows 2·(l % 4) and the next of column l // 4."""
    return _ldmatrix(1, "x1", ".trans")


@twin(ldmatrix_x1_trans)
def _ldmatrix_x1_trans(machine, address):
    return load_matrices(machine, address, 1, True, sys._getframe(1))


@intrinsic
def ldmatrix_x2_trans(typingctx, address):
    """As `ldmatrix_x2`, each matrix transposed: the B of an m16n8k16 stored (K, N), lane l giving row k = l."""
    return _ldmatrix(2, "x2", ".trans")


@twin(ldmatrix_x2_trans)
def _ldmatrix_x2_trans(machine, address):
    return load_matrices(machine, address, 2, True, sys._getframe(1))


@intrinsic
def ldmatrix_x4_trans(typingctx, address):
    """As `ldmatrix_x4`, each matrix transposed."""
    return _ldmatrix(4, "x4", ".trans")


@twin(ldmatrix_x4_trans)
def _ldmatrix_x4_trans(machine, address):
    return load_matrices(machine, address, 4, True, sys._getframe(1))


# mma ------------------------------------------------------------------------------------------------------------------

M16N8K16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, " \
           "{$10, $11, $12, $13};"
M16N8K8 = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
M16N8K8_TF32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, " \
               "{$10, $11, $12, $13};"
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
        slots = [element_pointer(context, builder, sig.args[0], args[0], index) for index in indices]
        operands = registers(context, builder, sig.args[2:], args[2:]) + [builder.load(slot) for slot in slots]
        for slot, value in zip(slots, emit(builder, text, [F32] * 4, operands, collective=True), strict=True):
            builder.store(value, slot)
        return context.get_dummy_value()

    return types.void(accumulators, types.int64, a, b), codegen


PRODUCT_M16N8K16 = MatrixProduct("mma.m16n8k16", 16, fragment_a_m16n8k16, fragment_b_m16n8k16, float16_of_words)
PRODUCT_M16N8K8 = MatrixProduct("mma.m16n8k8", 8, fragment_a_m16n8k8, fragment_b_m16n8k8, float16_of_words)
PRODUCT_M16N8K8_TF32 = MatrixProduct("mma.m16n8k8.tf32", 8, fragment_a_m16n8k8_tf32, fragment_b_m16n8k8_tf32,
                                     tf32_of_words)


@intrinsic
def mma_m16n8k16(typingctx, a, b, c):
    """a · b + c over the warp: a four words, b two words of float16, c and the result four float32."""
    return mma(M16N8K16, _words(4), _words(2))


@twin(mma_m16n8k16)
def _mma_m16n8k16(machine, a, b, c):
    return tuple(PRODUCT_M16N8K16(machine, a, b, c, sys._getframe(1)))


@intrinsic
def mma_m16n8k16_into(typingctx, accumulators, first, a, b):
    """accumulators[first … first + 3] += a · b over the warp: a four words, b two words of float16; float32."""
    return mma_into(M16N8K16, accumulators, _words(4), _words(2))


@twin(mma_m16n8k16_into)
def _mma_m16n8k16_into(machine, accumulators, first, a, b):
    PRODUCT_M16N8K16.into(machine, accumulators, first, a, b, sys._getframe(1))


@intrinsic
def mma_m16n8k8(typingctx, a, b, c):
    """a · b + c over the warp: a two words, b one word of float16, c and the result four float32."""
    return mma(M16N8K8, _words(2), types.uint32)


@twin(mma_m16n8k8)
def _mma_m16n8k8(machine, a, b, c):
    return tuple(PRODUCT_M16N8K8(machine, a, b, c, sys._getframe(1)))


@intrinsic
def mma_m16n8k8_into(typingctx, accumulators, first, a, b):
    """accumulators[first … first + 3] += a · b over the warp: a two words, b one word of float16; float32."""
    return mma_into(M16N8K8, accumulators, _words(2), types.uint32)


@twin(mma_m16n8k8_into)
def _mma_m16n8k8_into(machine, accumulators, first, a, b):
    PRODUCT_M16N8K8.into(machine, accumulators, first, a, b, sys._getframe(1))


@intrinsic
def mma_m16n8k8_tf32(typingctx, a, b, c):
    """a · b + c over the warp: a four words, b two words of tf32, c and the result four float32."""
    return mma(M16N8K8_TF32, _words(4), _words(2))


@twin(mma_m16n8k8_tf32)
def _mma_m16n8k8_tf32(machine, a, b, c):
    return tuple(PRODUCT_M16N8K8_TF32(machine, a, b, c, sys._getframe(1)))


@intrinsic
def mma_m16n8k8_tf32_into(typingctx, accumulators, first, a, b):
    """accumulators[first … first + 3] += a · b over the warp: a four words, b two words of tf32; float32."""
    return mma_into(M16N8K8_TF32, accumulators, _words(4), _words(2))


@twin(mma_m16n8k8_tf32_into)
def _mma_m16n8k8_tf32_into(machine, accumulators, first, a, b):
    PRODUCT_M16N8K8_TF32.into(machine, accumulators, first, a, b, sys._getframe(1))
