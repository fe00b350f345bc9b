"""Eight neighbours at a time: 16 bytes of float16 or bfloat16 in one instruction, 32 bytes of
float32 in two.

`load4` moves 8 bytes of float16; a warp then reads 256 bytes at a time, and a memory-bound kernel
needs twice the instructions, and twice the loads in flight, for the same bytes. As with `load4`,
arithmetic is float32: what is loaded is widened, what is stored is rounded to the nearest number of
the array's type, ties to even.

    load8(array, index), store8(array, index, values)   `index` a multiple of 8, values a tuple of eight
    copy8(target, to, source, index)                    the same, started by cp.async, from memory to shared memory
    as_stored(array, x)                                 x as it reads once it has been stored in the array
    has_16_bits(array)                                  whether its elements have; known when a kernel is compiled

For a thread that keeps its numbers in local arrays:

    load8_into(array, index, into)                      into[0 … 7] = array[index …]
    store8_from(array, index, values)                   array[index …] = values[0 … 7]
    fetch8(array, index, words), numbers8(array, words, values)
                                                        the two halves of a load, which is
                                                        asynchronous until its first use
    add8(array, words, values), words8(array, values, words)
                                                        numbers += words; numbers to words
    prefetch_l2(array, index)                           global memory to the L2 cache
    fence()                                             orders memory for all blocks
    by_sign(sign, a, b), one_of(sign, first, second)    one of two numbers, of two arrays

SOURCE  PTX ISA, sections 9.7.9 (ld, st), 9.7.9.21 (cvt), 9.7.9.25.3 (cp.async) and 9.7.13.4 (fence); sm_80 and later.
"""

import sys

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import twin
from ..emulator.group_copies import start_copy
from . import bfloat16
from .inline_ptx import (
    F32,
    GLOBAL,
    I32,
    I64,
    SHARED,
    element_pointer,
    emit,
    require_contiguous,
    statement,
)

EIGHT = types.UniTuple(types.float32, 8)
BYTES = 16  # of one instruction
NUMBERS = 8
HALF, PAIR, QUAD = ir.HalfType(), ir.VectorType(ir.HalfType(), 2), ir.VectorType(I32, 4)


def _pieces(array):
    """(elements of an instruction, instructions)."""
    elements = BYTES * 8 // array.dtype.bitwidth
    return elements, 8 // elements


def _address(context, builder, array_type, array, index, first, kind):
    """Pointer to a vector of four of `kind`, `first` elements after array[index]."""
    pointer = builder.gep(
        element_pointer(context, builder, array_type, array, index), [ir.Constant(I64, first)]
    )
    return builder.bitcast(
        pointer, ir.VectorType(kind, 4).as_pointer(getattr(pointer.type, "addrspace", 0))
    )


# With plain casts of the two halves the compiler would split the load in two: it prefers vectors of
# four.
UNPACK = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)
PACK = "cvt.rn.f16x2.f32 $0, $2, $1;"


def _packed(builder, low, high, kind):
    """Two float32 as a word of two numbers of an array's type."""
    return emit(builder, bfloat16.PACK if kind == bfloat16.bfloat16 else PACK, [I32], [low, high])[
        0
    ]


@intrinsic
def load8(typingctx, array, index):
    """(a[i], …, a[i+7]) of a contiguous array of 16 or 32-bit floats, as float32; `index` must be a
    multiple of 8."""
    require_contiguous("load8", array)
    elements, pieces = _pieces(array)
    kind = I32 if elements == 8 else F32

    def codegen(context, builder, sig, args):
        values = []
        for piece in range(pieces):
            address = _address(context, builder, array, args[0], args[1], piece * elements, kind)
            vector = builder.load(address, align=BYTES)
            for k in range(4):
                word = builder.extract_element(vector, I32(k))
                if kind is F32:
                    values.append(word)
                elif array.dtype == bfloat16.bfloat16:
                    values += bfloat16.widen_word(builder, word)
                else:
                    values += emit(builder, UNPACK, (F32, F32), [word])
        return context.make_tuple(builder, sig.return_type, values)

    return EIGHT(array, types.int64), codegen


@twin(load8)
def _load8(machine, array, index):
    step = BYTES // array.dtype.itemsize
    values = [
        v for i in range(0, 8, step) for v in machine.access.load_vector(array, index + i, step)
    ]
    return tuple(map(np.float32, values))


@intrinsic
def store8(typingctx, array, index, values):
    """a[i], …, a[i+7] = values, a tuple of eight float32; `index` must be a multiple of 8."""
    require_contiguous("store8", array)
    elements, pieces = _pieces(array)
    kind = I32 if elements == 8 else F32

    def codegen(context, builder, sig, args):
        given = [builder.extract_value(args[2], i) for i in range(8)]
        if kind is I32:
            given = [_packed(builder, *given[i : i + 2], array.dtype) for i in range(0, 8, 2)]
        for piece in range(pieces):
            vector = ir.Constant(ir.VectorType(kind, 4), ir.Undefined)
            for k in range(4):
                vector = builder.insert_element(vector, given[4 * piece + k], I32(k))
            builder.store(
                vector,
                _address(context, builder, array, args[0], args[1], piece * elements, kind),
                align=BYTES,
            )
        return context.get_dummy_value()

    return types.void(array, types.int64, EIGHT), codegen


@twin(store8)
def _store8(machine, array, index, values):
    step = BYTES // array.dtype.itemsize
    for i in range(0, 8, step):
        machine.access.store_vector(array, index + i, values[i : i + step])


@intrinsic
def copy8(typingctx, target, to, source, index):
    """Start copies of eight elements, source[index …] to the shared array's target[to …]; both
    multiples of 8."""
    require_contiguous("copy8", source)

    def codegen(context, builder, sig, args):
        addresses = [
            builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space))
            for space, pointer in (
                (SHARED, element_pointer(context, builder, sig.args[0], args[0], args[1])),
                (GLOBAL, element_pointer(context, builder, sig.args[2], args[2], args[3])),
            )
        ]
        operands = [
            builder.ptrtoint(a, kind) for a, kind in zip(addresses, (I32, I64), strict=True)
        ]
        for offset in range(0, NUMBERS * source.dtype.bitwidth // 8, BYTES):
            emit(
                builder,
                f"cp.async.cg.shared.global [$0+{offset}], [$1+{offset}], 16;",
                (),
                operands,
                ordered=True,
            )
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), codegen


@twin(copy8)
def _copy8(machine, target, to, source, index):
    size, half = source.dtype.itemsize, 16 // source.dtype.itemsize
    for first in range(0, NUMBERS, half):
        start_copy(
            machine,
            machine.shared_address(target) + (int(to) + first) * size,
            source,
            index + first,
            16,
            16,
            sys._getframe(1),
        )


@intrinsic
def as_stored(typingctx, array, x):
    """x, a float32, as it reads once it has been stored in the array: rounded to 16 bits if they
    have no more there."""

    def codegen(context, builder, sig, args):
        stored = context.cast(builder, args[1], types.float32, array.dtype)
        return context.cast(builder, stored, array.dtype, types.float32)

    return types.float32(array, types.float32), codegen


@twin(as_stored)
def _as_stored(machine, array, x):
    return np.float32(array.dtype.type(x))


@intrinsic
def has_16_bits(typingctx, array):
    """Whether the array's elements have 16 bits: a branch on it is gone once a kernel has been
    compiled."""

    def codegen(context, builder, sig, args):
        return ir.Constant(ir.IntType(1), int(array.dtype.bitwidth == 16))

    return types.boolean(array), codegen


@twin(has_16_bits)
def _has_16_bits(machine, array):
    return array.dtype.itemsize == 2


# With a thread's numbers in a local array ---------------------------------------------------------


def _words_address(context, builder, array_type, array, index):
    """Pointer to four words, from an element of an array."""
    pointer = element_pointer(context, builder, array_type, array, index)
    return builder.bitcast(pointer, QUAD.as_pointer(getattr(pointer.type, "addrspace", 0)))


def _load_words(context, builder, array_type, array, index):
    """The four or eight words of eight elements."""
    address, words = _words_address(context, builder, array_type, array, index), []
    for k in range(array_type.dtype.bitwidth // 16):
        quad = builder.load(builder.gep(address, [I32(k)]), align=16)
        words += [builder.extract_element(quad, I32(i)) for i in range(4)]
    return words


def _numbers(builder, words, kind):
    """Eight float32 from the words of eight numbers of an array's type."""
    if len(words) == NUMBERS:
        return [builder.bitcast(word, F32) for word in words]
    if kind == bfloat16.bfloat16:
        return [number for word in words for number in bfloat16.widen_word(builder, word)]
    pairs = [builder.bitcast(word, PAIR) for word in words]
    return [
        builder.fpext(builder.extract_element(pair, I32(i)), F32)
        for pair in pairs
        for i in range(2)
    ]


def _put(context, builder, array_type, array, values):
    for k, value in enumerate(values):
        builder.store(value, element_pointer(context, builder, array_type, array, I32(k)))


def _words(context, builder, array, values_type, values):
    """The words of eight float32 in a local array, rounded to the type of `array`."""
    numbers = [
        builder.load(element_pointer(context, builder, values_type, values, I32(k)))
        for k in range(NUMBERS)
    ]
    if array.dtype.bitwidth == 16:
        return [_packed(builder, *numbers[k : k + 2], array.dtype) for k in range(0, NUMBERS, 2)]
    return [builder.bitcast(number, I32) for number in numbers]


@intrinsic
def load8_into(typingctx, array, index, into):
    """into[0 … 7] = array[index … index + 7] as float32; `index` a multiple of 8, `into` a local
    array."""
    require_contiguous("load8_into", array)

    def codegen(context, builder, sig, args):
        words = _load_words(context, builder, sig.args[0], args[0], args[1])
        _put(context, builder, sig.args[2], args[2], _numbers(builder, words, array.dtype))
        return context.get_dummy_value()

    return types.void(array, types.int64, into), codegen


@twin(load8_into)
def _load8_into(machine, array, index, into):
    half = 16 // array.itemsize
    for first in range(0, NUMBERS, half):
        for k, value in enumerate(machine.access.load_vector(array, index + first, half)):
            into[first + k] = np.float32(value)


@intrinsic
def store8_from(typingctx, array, index, values):
    """array[index … index + 7] = values[0 … 7], float32, rounded to the type of `array`."""
    require_contiguous("store8_from", array)

    def codegen(context, builder, sig, args):
        words = _words(context, builder, array, sig.args[2], args[2])
        address = _words_address(context, builder, sig.args[0], args[0], args[1])
        for k in range(0, len(words), 4):
            quad = ir.Constant(QUAD, ir.Undefined)
            for i in range(4):
                quad = builder.insert_element(quad, words[k + i], I32(i))
            builder.store(quad, builder.gep(address, [I32(k // 4)]), align=16)
        return context.get_dummy_value()

    return types.void(array, types.int64, values), codegen


@twin(store8_from)
def _store8_from(machine, array, index, values):
    half = 16 // array.itemsize
    for first in range(0, NUMBERS, half):
        machine.access.store_vector(array, index + first, [values[first + k] for k in range(half)])


@intrinsic
def fetch8(typingctx, array, index, words):
    """As `load8_into`, but unconverted, into a local array of eight uint32: nothing waits until
    they are used."""
    require_contiguous("fetch8", array)

    def codegen(context, builder, sig, args):
        _put(
            context,
            builder,
            sig.args[2],
            args[2],
            _load_words(context, builder, sig.args[0], args[0], args[1]),
        )
        return context.get_dummy_value()

    return types.void(array, types.int64, words), codegen


@twin(fetch8)
def _fetch8(machine, array, index, words):
    half = 16 // array.itemsize
    for first in range(0, NUMBERS, half):
        values = np.array(machine.access.load_vector(array, index + first, half), array.dtype)
        for k, word in enumerate(values.view(np.uint32)):
            words[4 * first // half + k] = word


@intrinsic
def add8(typingctx, array, words, values):
    """values[0 … 7] += what `fetch8` brought from `array`."""

    def codegen(context, builder, sig, args):
        count = array.dtype.bitwidth // 4
        numbers = _numbers(
            builder,
            [
                builder.load(element_pointer(context, builder, sig.args[1], args[1], I32(k)))
                for k in range(count)
            ],
            array.dtype,
        )
        places = [
            element_pointer(context, builder, sig.args[2], args[2], I32(k)) for k in range(NUMBERS)
        ]
        for place, number in zip(places, numbers, strict=True):
            builder.store(builder.fadd(builder.load(place), number), place)
        return context.get_dummy_value()

    return types.void(array, words, values), codegen


@twin(add8)
def _add8(machine, array, words, values):
    numbers = np.array([int(words[k]) for k in range(2 * array.itemsize)], np.uint32).view(
        array.dtype
    )
    for k in range(NUMBERS):
        values[k] = np.float32(values[k]) + np.float32(numbers[k])


@intrinsic
def numbers8(typingctx, array, words, values):
    """values[0 … 7] = what `fetch8` brought from `array`, or `words8` made, as float32."""

    def codegen(context, builder, sig, args):
        words = [
            builder.load(element_pointer(context, builder, sig.args[1], args[1], I32(k)))
            for k in range(array.dtype.bitwidth // 4)
        ]
        _put(context, builder, sig.args[2], args[2], _numbers(builder, words, array.dtype))
        return context.get_dummy_value()

    return types.void(array, words, values), codegen


@twin(numbers8)
def _numbers8(machine, array, words, values):
    numbers = np.array([int(words[k]) for k in range(2 * array.itemsize)], np.uint32).view(
        array.dtype
    )
    for k in range(NUMBERS):
        values[k] = np.float32(numbers[k])


@intrinsic
def words8(typingctx, array, values, words):
    """The words of values[0 … 7], float32, rounded to the type of `array`."""

    def codegen(context, builder, sig, args):
        _put(
            context,
            builder,
            sig.args[2],
            args[2],
            _words(context, builder, array, sig.args[1], args[1]),
        )
        return context.get_dummy_value()

    return types.void(array, values, words), codegen


@twin(words8)
def _words8(machine, array, values, words):
    rounded = np.array([np.float32(values[k]) for k in range(NUMBERS)], np.float32).astype(
        array.dtype
    )
    for k, word in enumerate(rounded.view(np.uint32)):
        words[k] = word


@intrinsic
def prefetch_l2(typingctx, array, index):
    """Prefetch the sector of array[index] into the L2 cache: nothing waits for it, nothing else
    changes."""
    require_contiguous("prefetch_l2", array)
    return types.void(array, types.int64), statement("prefetch.global.L2 [$0];", ordered=True)


@twin(prefetch_l2)
def _prefetch_l2(machine, array, index):
    """It has no visible effect."""


@intrinsic
def fence(typingctx):
    """As `cuda.threadfence`, but without its single order of all fences of the device, which takes
    longer."""
    return types.void(), statement("fence.acq_rel.gpu;", ordered=True)


@twin(fence)
def _fence(machine):
    if machine.checked:
        machine.access.fence()


@intrinsic
def by_sign(typingctx, sign, positive, negative):
    """`positive` where `sign` is 0 or more, otherwise `negative`: both are already computed: no
    branch, no address."""
    return types.float32(types.int32, types.float32, types.float32), statement(
        "slct.f32.s32 $0, $2, $3, $1;", [F32]
    )


@twin(by_sign)
def _by_sign(machine, sign, positive, negative):
    return positive if sign >= 0 else negative


@intrinsic
def one_of(typingctx, sign, first, second):
    """`first` where `sign` is negative, otherwise `second`: arrays of one type in global memory.

    ptxas does not know that an array chosen by Python's `if` is not in shared memory, and keeps its
    loads and stores in order with those that are.
    """
    require_contiguous("one_of", first)

    def codegen(context, builder, sig, args):
        made = [
            context.make_array(sig.return_type)(context, builder, value=array) for array in args[1:]
        ]
        words = [
            builder.ptrtoint(
                builder.addrspacecast(m.data, ir.PointerType(m.data.type.pointee, GLOBAL)), I64
            )
            for m in made
        ]
        chosen = emit(builder, "slct.b64.s32 $0, $2, $3, $1;", [I64], [args[0], *reversed(words)])[
            0
        ]
        pointer = builder.inttoptr(chosen, ir.PointerType(made[0].data.type.pointee, GLOBAL))
        made[0].data = builder.addrspacecast(pointer, made[0].data.type)
        return made[0]._getvalue()

    return first(types.int32, first, first), codegen


@twin(one_of)
def _one_of(machine, sign, first, second):
    return first if sign < 0 else second


@intrinsic
def array_of(typingctx, number, arrays):
    """arrays[number] of a tuple of arrays of one type in global memory, as `one_of`."""
    require_contiguous("array_of", arrays.dtype if isinstance(arrays, types.UniTuple) else arrays)

    def codegen(context, builder, sig, args):
        made = [
            context.make_array(sig.return_type)(
                context, builder, value=builder.extract_value(args[1], k)
            )
            for k in range(len(arrays))
        ]
        words = [
            builder.ptrtoint(
                builder.addrspacecast(m.data, ir.PointerType(m.data.type.pointee, GLOBAL)), I64
            )
            for m in made
        ]
        chosen = words[0]
        for k, word in enumerate(words[1:], 1):
            index = builder.sub(args[0], I32(k))
            chosen = emit(builder, "slct.b64.s32 $0, $2, $3, $1;", [I64], [index, word, chosen])[0]
        pointer = builder.inttoptr(chosen, ir.PointerType(made[0].data.type.pointee, GLOBAL))
        made[0].data = builder.addrspacecast(pointer, made[0].data.type)
        return made[0]._getvalue()

    return arrays.dtype(types.int32, arrays), codegen


@twin(array_of)
def _array_of(machine, number, arrays):
    return arrays[int(number)]
