"""Words of 32 bits: two float16, a tf32 or the bits of a float32, packed, unpacked, loaded and
stored.

SOURCE  PTX ISA, section 9.7.9.21 (`cvt`).
"""

import math
import struct

import numpy as np
from llvmlite import ir

from ...emulator.arrays import CheckedArray, IntegerArray
from ...emulator.memory import POISON
from ...emulator.values import WORD, UInt32, float32, float32_bits, float32_of_bits
from ..inline_ptx import (
    F32,
    I32,
    contiguous,
    element_pointer,
    f32,
    i32,
    i64,
    instruction,
    many,
    u32,
)

LOW_WORD = 0xFFFFFFFF
WORDS2, WORDS4, HALF, HALVES, HALF_WORD = map(struct.Struct, ("<2I", "<4I", "<e", "<2e", "<H"))


@instruction("cvt.rn.f16x2.f32 $0, $2, $1;")
def pack_half2(machine, low: f32, high: f32) -> u32:
    """Two float32, each rounded to the nearest float16 (ties to even; too large is infinite), as a
    word, low first."""
    return UInt32(_half_bits(low) | _half_bits(high) << 16)


def _half_bits(x):
    if x != x:
        return 0x7FFF  # the NaN that cvt gives
    try:
        return HALF_WORD.unpack(HALF.pack(x if x.__class__ is float32 else float32(x)))[0]
    except OverflowError:
        return 0x7C00 if x > 0 else 0xFC00


@instruction(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)
def unpack_half2(machine, word: u32) -> many(f32, 2):
    """The two float16 of a word as two float32, the low half first."""
    return tuple(float32(v) for v in HALVES.unpack(WORD.pack(int(word) & LOW_WORD)))


@instruction(lambda context, builder, sig, args: I32(0x3C003C00))
def ones_half2(machine) -> u32:
    """A word of two float16, both one."""
    return UInt32(0x3C003C00)


@instruction("cvt.rna.tf32.f32 $0, $1;")
def round_tf32(machine, x: f32) -> u32:
    """A float32 rounded to tf32 (10 mantissa bits, ties away from zero), as the word that an mma
    takes."""
    if not math.isfinite(x):
        return UInt32(0x7FC00000) if x != x else word_of_float(x)  # NaN as an H100 has it
    return UInt32(word_of_float(x) + 0x1000 & 0xFFFFE000)  # half of the last bit that is kept


@instruction(lambda context, builder, sig, args: builder.bitcast(args[0], I32))
def word_of(machine, x: f32) -> u32:
    """The bits of a float32 as a uint32. An mma reads them as a tf32 that is truncated instead of
    rounded."""
    return word_of_float(x)


def word_of_float(x):
    return UInt32(float32_bits(x))


@instruction(lambda context, builder, sig, args: builder.bitcast(args[0], F32))
def float_of(machine, word: u32) -> f32:
    """The float32 whose bits are this uint32."""
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


def _load(count):
    """Decorator: a load of `count` words at once."""

    def codegen(context, builder, sig, args):
        loaded = builder.load(_word_pointer(context, builder, sig, args, count), align=4 * count)
        if count == 1:
            return loaded
        words = [builder.extract_element(loaded, I32(i)) for i in range(count)]
        return context.make_tuple(builder, sig.return_type, words)

    return instruction(codegen)


@_load(1)
def load_word(machine, array: contiguous, index: i64) -> u32:
    """The 4 bytes at `array[index]` of a contiguous array; a multiple of 4 bytes."""
    return UInt32(WORD.unpack(_read(machine, array, index, 4))[0])


@_load(2)
def load_words2(machine, array: contiguous, index: i64) -> many(u32, 2):
    """The 8 bytes at `array[index]` of a contiguous array as two words; a multiple of 8 bytes."""
    return tuple(map(UInt32, WORDS2.unpack(_read(machine, array, index, 8))))


@_load(4)
def load_words4(machine, array: contiguous, index: i64) -> many(u32, 4):
    """The 16 bytes at `array[index]` of a contiguous array as four words; a multiple of 16 bytes."""
    return tuple(map(UInt32, WORDS4.unpack(_read(machine, array, index, 16))))


LOAD_WHERE = (
    "{ .reg .pred inside; setp.ne.s32 inside, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; "
    "mov.b32 $3, 0; @inside ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)


@instruction(LOAD_WHERE)
def load_words4_where(machine, array: contiguous, index: i64, inside: i32) -> many(u32, 4):
    """`load_words4` of an array in global memory that the kernel does not write, where `inside` (an
    int32) is not 0; elsewhere zeros, and nothing is read. No branch: many such loads are under way
    together."""
    return (
        tuple(map(UInt32, WORDS4.unpack(_read(machine, array, index, 16))))
        if inside
        else (UInt32(0),) * 4
    )


@instruction("prmt.b32 $0, $1, $2, 0x5410;")
def low_halves(machine, a: u32, b: u32) -> u32:
    """The low 16 bits of a, then those of b, as a word."""
    return UInt32(int(a) & 0xFFFF | (int(b) & 0xFFFF) << 16)


@instruction("prmt.b32 $0, $1, $2, 0x7632;")
def high_halves(machine, a: u32, b: u32) -> u32:
    """The high 16 bits of a, then those of b, as a word."""
    return UInt32(int(a) >> 16 & 0xFFFF | int(b) & 0xFFFF0000)


@instruction("prmt.b32 $0, $1, $2, $3;")
def choose_bytes(machine, a: u32, b: u32, selector: u32) -> u32:
    """Four of eight bytes, 0 … 3 of a and 4 … 7 of b: the selector's lowest four bits name the
    lowest of the result, its 16 low bits all. 0x5410 gives low_halves(a, b), 0x7632 high_halves."""
    both = (int(a) & LOW_WORD) | (int(b) & LOW_WORD) << 32
    return UInt32(sum((both >> 8 * (int(selector) >> 4 * k & 7) & 255) << 8 * k for k in range(4)))


def _store(count):
    """Decorator: a store of `count` words at once."""

    def codegen(context, builder, sig, args):
        value = args[2]
        if count > 1:
            value = ir.Constant(ir.VectorType(I32, count), ir.Undefined)
            for i, word in enumerate(args[2:]):
                value = builder.insert_element(value, word, I32(i))
        builder.store(value, _word_pointer(context, builder, sig, args, count), align=4 * count)
        return context.get_dummy_value()

    return instruction(codegen)


@_store(1)
def store_word(machine, array: contiguous, index: i64, word: u32):
    """Write 4 bytes at `array[index]` of a contiguous array; a multiple of 4 bytes."""
    _write(machine, array, index, WORD.pack(int(word) & LOW_WORD))


@_store(2)
def store_words2(machine, array: contiguous, index: i64, a: u32, b: u32):
    """Write two words, 8 bytes, at `array[index]` of a contiguous array; a multiple of 8 bytes."""
    _write(machine, array, index, WORDS2.pack(*[int(w) & LOW_WORD for w in (a, b)]))


@_store(4)
def store_words4(machine, array: contiguous, index: i64, a: u32, b: u32, c: u32, d: u32):
    """Write four words, 16 bytes, at `array[index]` of a contiguous array; a multiple of 16 bytes."""
    _write(machine, array, index, WORDS4.pack(*[int(w) & LOW_WORD for w in (a, b, c, d)]))
