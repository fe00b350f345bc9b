"""Words of 32 bits: two float16, a tf32 or the bits of a float32, packed, unpacked, loaded and
stored.

SOURCE  PTX ISA, section 9.7.9.21 (`cvt`).
"""

import math
import struct

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ...emulator import twin
from ...emulator.arrays import CheckedArray, IntegerArray
from ...emulator.memory import POISON
from ...emulator.values import WORD, UInt32, float32, float32_bits, float32_of_bits
from ..inline_ptx import F32, I32, element_pointer, require_contiguous, statement

LOW_WORD = 0xFFFFFFFF
WORDS2, WORDS4, HALF, HALVES, HALF_WORD = map(struct.Struct, ("<2I", "<4I", "<e", "<2e", "<H"))


def word_tuple(count):
    """The Numba type of `count` registers of a fragment."""
    return types.UniTuple(types.uint32, count)


@intrinsic
def pack_half2(typingctx, low, high):
    """Two float32, each rounded to the nearest float16 (ties to even; too large is infinite), as a
    word, low first."""
    return types.uint32(types.float32, types.float32), statement(
        "cvt.rn.f16x2.f32 $0, $2, $1;", [I32]
    )


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
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
        [F32, F32],
    )


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
    """A float32 rounded to tf32 (10 mantissa bits, ties away from zero), as the word that an mma
    takes."""
    return types.uint32(types.float32), statement("cvt.rna.tf32.f32 $0, $1;", [I32])


@twin(round_tf32)
def _round_tf32(machine, x):
    if not math.isfinite(x):
        return UInt32(0x7FC00000) if x != x else word_of_float(x)  # NaN as an H100 has it
    return UInt32(word_of_float(x) + 0x1000 & 0xFFFFE000)  # half of the last bit that is kept


@intrinsic
def word_of(typingctx, x):
    """The bits of a float32 as a uint32. An mma reads them as a tf32 that is truncated instead of
    rounded."""
    return types.uint32(types.float32), lambda context, builder, sig, args: builder.bitcast(
        args[0], I32
    )


def word_of_float(x):
    return UInt32(float32_bits(x))


@twin(word_of)
def _word_of(machine, x):
    return word_of_float(x)


@intrinsic
def float_of(typingctx, word):
    """The float32 whose bits are this uint32."""
    return types.float32(types.uint32), lambda context, builder, sig, args: builder.bitcast(
        args[0], F32
    )


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
    """`size` bytes from element `index` of an array, in the emulator; NaN, or all bits set, after a
    fault."""
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
    found = machine.access.range_of(
        array, index, size // array.itemsize, site, "writes", align=size
    )
    if found is not None:
        memory, offset, _ = found
        machine.access.before_write(memory, offset, size, site, array.itemsize)
        memory.bytes[offset : offset + size].data[:] = data


def _inside(array, start, size):
    if not 0 <= start <= array.nbytes - size:
        raise IndexError(f"{size} bytes from byte {start} of {array.nbytes}")
    return slice(start, start + size)


@intrinsic
def load_word(typingctx, array, index):
    """The 4 bytes at `array[index]` of a contiguous array; a multiple of 4 bytes."""
    require_contiguous("load_word", array)
    return types.uint32(array, types.int64), lambda context, builder, sig, args: builder.load(
        _word_pointer(context, builder, sig, args, 1), align=4
    )


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

    return word_tuple(count)(array, types.int64), codegen


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


LOAD_WHERE = (
    "{ .reg .pred inside; setp.ne.s32 inside, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; "
    "mov.b32 $3, 0; @inside ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)


@intrinsic
def load_words4_where(typingctx, array, index, inside):
    """`load_words4` of an array in global memory that the kernel does not write, where `inside` (an
    int32) is not 0; elsewhere zeros, and nothing is read. No branch: many such loads are under way
    together."""
    require_contiguous("load_words4_where", array)
    return word_tuple(4)(array, types.int64, types.int32), statement(LOAD_WHERE, [I32] * 4)


@twin(load_words4_where)
def _load_words4_where(machine, array, index, inside):
    return (
        tuple(map(UInt32, WORDS4.unpack(_read(machine, array, index, 16))))
        if inside
        else (UInt32(0),) * 4
    )


@intrinsic
def low_halves(typingctx, a, b):
    """The low 16 bits of a, then those of b, as a word."""
    return types.uint32(types.uint32, types.uint32), statement(
        "prmt.b32 $0, $1, $2, 0x5410;", [I32]
    )


@twin(low_halves)
def _low_halves(machine, a, b):
    return UInt32(int(a) & 0xFFFF | (int(b) & 0xFFFF) << 16)


@intrinsic
def high_halves(typingctx, a, b):
    """The high 16 bits of a, then those of b, as a word."""
    return types.uint32(types.uint32, types.uint32), statement(
        "prmt.b32 $0, $1, $2, 0x7632;", [I32]
    )


@twin(high_halves)
def _high_halves(machine, a, b):
    return UInt32(int(a) >> 16 & 0xFFFF | int(b) & 0xFFFF0000)


@intrinsic
def choose_bytes(typingctx, a, b, selector):
    """Four of eight bytes, 0 … 3 of a and 4 … 7 of b: the selector's lowest four bits name the
    lowest of the result, its 16 low bits all. 0x5410 gives low_halves(a, b), 0x7632 high_halves."""
    return types.uint32(types.uint32, types.uint32, types.uint32), statement(
        "prmt.b32 $0, $1, $2, $3;", [I32]
    )


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
