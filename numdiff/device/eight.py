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

from ..emulator.group_copies import start_copy
from ..emulator.memory import READ_SITE
from . import bfloat16
from .inline_ptx import (
    F32,
    GLOBAL,
    I32,
    I64,
    SHARED,
    address_in,
    anything,
    boolean,
    contiguous,
    element_pointer,
    emit,
    f32,
    i32,
    i64,
    instruction,
    many,
)

BYTES = 16  # of one instruction
NUMBERS = 8
PAIR = ir.VectorType(ir.HalfType(), 2)


# Eight numbers and their words: 4 of 16-bit floats, 8 of float32 ----------------------------------

# With plain casts of the two halves the compiler would split the load in two: it prefers vectors of
# four.
UNPACK = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)
PACK = "cvt.rn.f16x2.f32 $0, $2, $1;"


def _quad(context, builder, array_type, array, index, kind):
    """Pointer to four words, integers or float32, from an element of an array."""
    pointer, quad = (
        element_pointer(context, builder, array_type, array, index),
        ir.VectorType(kind, 4),
    )
    return builder.bitcast(pointer, quad.as_pointer(getattr(pointer.type, "addrspace", 0)))


def _load_words(context, builder, array_type, array, index, kind=I32):
    """The words of eight elements of an array in memory."""
    address, words = _quad(context, builder, array_type, array, index, kind), []
    for k in range(array_type.dtype.bitwidth // 16):
        quad = builder.load(builder.gep(address, [I32(k)]), align=BYTES)
        words += [builder.extract_element(quad, I32(i)) for i in range(4)]
    return words


def _store_words(context, builder, array_type, array, index, words):
    address = _quad(context, builder, array_type, array, index, words[0].type)
    for k in range(0, len(words), 4):
        quad = ir.Constant(address.type.pointee, ir.Undefined)
        for i in range(4):
            quad = builder.insert_element(quad, words[k + i], I32(i))
        builder.store(quad, builder.gep(address, [I32(k // 4)]), align=BYTES)
    return context.get_dummy_value()


def _get(context, builder, array_type, array, count=NUMBERS):
    """The first elements of a thread's local array."""
    places = (element_pointer(context, builder, array_type, array, I32(k)) for k in range(count))
    return [builder.load(place) for place in places]


def _put(context, builder, array_type, array, values):
    for k, value in enumerate(values):
        builder.store(value, element_pointer(context, builder, array_type, array, I32(k)))
    return context.get_dummy_value()


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


def _words(builder, numbers, kind):
    """The words of eight float32, rounded to an array's type."""
    if kind.bitwidth == 32:
        return [builder.bitcast(number, I32) for number in numbers]
    text = bfloat16.PACK if kind == bfloat16.bfloat16 else PACK
    return [emit(builder, text, [I32], numbers[k : k + 2])[0] for k in range(0, NUMBERS, 2)]


def _read(machine, array, index):
    """Eight elements, in the emulator."""
    step = BYTES // array.itemsize
    return [
        v
        for i in range(0, NUMBERS, step)
        for v in machine.access.load_vector(array, index + i, step)
    ]


def _write(machine, array, index, values):
    step = BYTES // array.itemsize
    for i in range(0, NUMBERS, step):
        machine.access.store_vector(array, index + i, [values[i + k] for k in range(step)])


def _get_elements(machine, array, count=NUMBERS):
    """The first elements of a thread's local array, in the emulator."""
    place = machine.site_here() << READ_SITE
    return [machine.access.load(array, k, place) for k in range(count)]


def _put_elements(machine, array, values):
    """Write the first elements of a thread's local array, in the emulator."""
    site = machine.site_here()
    for k, value in enumerate(values):
        machine.access.store(array, k, value, site)


def _numbers_of(machine, array, words):
    """The eight numbers, of the type of `array`, whose words these are, as float32, in the
    emulator."""
    found = np.array(_get_elements(machine, words, 2 * array.itemsize), np.uint32)
    return found.view(array.dtype).astype(np.float32)


# As a tuple ---------------------------------------------------------------------------------------


def _load8(context, builder, sig, args):
    kind = sig.args[0].dtype
    words = _load_words(context, builder, sig.args[0], *args, F32 if kind == f32 else I32)
    if kind == types.float16:
        values = [half for word in words for half in emit(builder, UNPACK, (F32, F32), [word])]
    else:
        values = words if kind == f32 else _numbers(builder, words, kind)
    return context.make_tuple(builder, sig.return_type, values)


@instruction(_load8)
def load8(machine, array: contiguous, index: i64) -> many(f32, 8):
    """(a[i], …, a[i+7]) of a contiguous array of 16 or 32-bit floats, as float32; `index` must be a
    multiple of 8."""
    return tuple(map(np.float32, _read(machine, array, index)))


def _store8(context, builder, sig, args):
    words, kind = [builder.extract_value(args[2], i) for i in range(NUMBERS)], sig.args[0].dtype
    if kind != f32:
        words = _words(builder, words, kind)
    return _store_words(context, builder, sig.args[0], *args[:2], words)


@instruction(_store8)
def store8(machine, array: contiguous, index: i64, values: many(f32, 8)):
    """a[i], …, a[i+7] = values, a tuple of eight float32; `index` must be a multiple of 8."""
    _write(machine, array, index, values)


def _copy8(context, builder, sig, args):
    to = address_in(SHARED, context, builder, sig.args[0], *args[:2])
    source = address_in(GLOBAL, context, builder, sig.args[2], *args[2:])
    operands = builder.ptrtoint(to, I32), builder.ptrtoint(source, I64)
    for offset in range(0, NUMBERS * sig.args[2].dtype.bitwidth // 8, BYTES):
        text = f"cp.async.cg.shared.global [$0+{offset}], [$1+{offset}], {BYTES};"
        emit(builder, text, (), operands, ordered=True)
    return context.get_dummy_value()


@instruction(_copy8)
def copy8(machine, target: anything, to: i64, source: contiguous, index: i64):
    """Start copies of eight elements, source[index …] to the shared array's target[to …]; both
    multiples of 8."""
    size, frame = source.dtype.itemsize, sys._getframe(1)
    for first in range(0, NUMBERS, BYTES // size):
        address = machine.shared_address(target) + (int(to) + first) * size
        start_copy(machine, address, source, index + first, BYTES, BYTES, frame)


def _as_stored(context, builder, sig, args):
    stored = context.cast(builder, args[1], f32, sig.args[0].dtype)
    return context.cast(builder, stored, sig.args[0].dtype, f32)


@instruction(_as_stored)
def as_stored(machine, array: anything, x: f32) -> f32:
    """x, a float32, as it reads once it has been stored in the array: rounded to 16 bits if they
    have no more there."""
    return np.float32(array.dtype.type(x))


@instruction(
    lambda context, builder, sig, args: ir.Constant(
        ir.IntType(1), int(sig.args[0].dtype.bitwidth == 16)
    )
)
def has_16_bits(machine, array: anything) -> boolean:
    """Whether the array's elements have 16 bits: a branch on it is gone once a kernel has been
    compiled."""
    return array.dtype.itemsize == 2


# With a thread's numbers in a local array ---------------------------------------------------------


def _load8_into(context, builder, sig, args):
    words = _load_words(context, builder, sig.args[0], *args[:2])
    numbers = _numbers(builder, words, sig.args[0].dtype)
    return _put(context, builder, sig.args[2], args[2], numbers)


@instruction(_load8_into)
def load8_into(machine, array: contiguous, index: i64, into: anything):
    """into[0 … 7] = array[index … index + 7] as float32; `index` a multiple of 8, `into` a local
    array."""
    _put_elements(machine, into, map(np.float32, _read(machine, array, index)))


def _store8_from(context, builder, sig, args):
    words = _words(builder, _get(context, builder, sig.args[2], args[2]), sig.args[0].dtype)
    return _store_words(context, builder, sig.args[0], *args[:2], words)


@instruction(_store8_from)
def store8_from(machine, array: contiguous, index: i64, values: anything):
    """array[index … index + 7] = values[0 … 7], float32, rounded to the type of `array`."""
    _write(machine, array, index, _get_elements(machine, values))


def _fetch8(context, builder, sig, args):
    words = _load_words(context, builder, sig.args[0], *args[:2])
    return _put(context, builder, sig.args[2], args[2], words)


@instruction(_fetch8)
def fetch8(machine, array: contiguous, index: i64, words: anything):
    """As `load8_into`, but unconverted, into a local array of eight uint32: nothing waits until
    they are used."""
    values = np.array(_read(machine, array, index), array.dtype)
    _put_elements(machine, words, values.view(np.uint32))


def _of_words(context, builder, sig, args):
    """The numbers of an array's type in a local array of words, as float32."""
    kind = sig.args[0].dtype
    words = _get(context, builder, sig.args[1], args[1], kind.bitwidth // 4)
    return _numbers(builder, words, kind)


def _add8(context, builder, sig, args):
    numbers = _of_words(context, builder, sig, args)
    for k, number in enumerate(numbers):
        place = element_pointer(context, builder, sig.args[2], args[2], I32(k))
        builder.store(builder.fadd(builder.load(place), number), place)
    return context.get_dummy_value()


@instruction(_add8)
def add8(machine, array: anything, words: anything, values: anything):
    """values[0 … 7] += what `fetch8` brought from `array`."""
    numbers = _numbers_of(machine, array, words)
    sums = np.array(_get_elements(machine, values), np.float32) + numbers
    _put_elements(machine, values, sums)


@instruction(
    lambda context, builder, sig, args: _put(
        context, builder, sig.args[2], args[2], _of_words(context, builder, sig, args)
    )
)
def numbers8(machine, array: anything, words: anything, values: anything):
    """values[0 … 7] = what `fetch8` brought from `array`, or `words8` made, as float32."""
    _put_elements(machine, values, _numbers_of(machine, array, words))


def _words8(context, builder, sig, args):
    words = _words(builder, _get(context, builder, sig.args[1], args[1]), sig.args[0].dtype)
    return _put(context, builder, sig.args[2], args[2], words)


@instruction(_words8)
def words8(machine, array: anything, values: anything, words: anything):
    """The words of values[0 … 7], float32, rounded to the type of `array`."""
    numbers = np.array(_get_elements(machine, values), np.float32)
    _put_elements(machine, words, numbers.astype(array.dtype).view(np.uint32))


# Memory and choices -------------------------------------------------------------------------------


@instruction("prefetch.global.L2 [$0];", ordered=True)
def prefetch_l2(machine, array: contiguous, index: i64):
    """Prefetch the sector of array[index] into the L2 cache: nothing waits for it, nothing else
    changes."""


@instruction("fence.acq_rel.gpu;", ordered=True)
def fence(machine):
    """As `cuda.threadfence`, but without its single order of all fences of the device, which takes
    longer."""
    if machine.checked:
        machine.access.fence()


@instruction("slct.f32.s32 $0, $2, $3, $1;")
def by_sign(machine, sign: i32, positive: f32, negative: f32) -> f32:
    """`positive` where `sign` is 0 or more, otherwise `negative`: both are already computed: no
    branch, no address."""
    return positive if sign >= 0 else negative


def _select(context, builder, kind, arrays, signs):
    """The first of these arrays in global memory, or the last one whose sign is not negative."""
    made = [context.make_array(kind)(context, builder, value=array) for array in arrays]
    place = ir.PointerType(made[0].data.type.pointee, GLOBAL)
    words = [builder.ptrtoint(builder.addrspacecast(m.data, place), I64) for m in made]
    chosen = words[0]
    for sign, word in zip(signs, words[1:], strict=True):
        chosen = emit(builder, "slct.b64.s32 $0, $2, $3, $1;", [I64], [sign, word, chosen])[0]
    made[0].data = builder.addrspacecast(builder.inttoptr(chosen, place), made[0].data.type)
    return made[0]._getvalue()


@instruction(
    lambda context, builder, sig, args: _select(
        context, builder, sig.return_type, args[1:], args[:1]
    )
)
def one_of(
    machine, sign: i32, first: contiguous, second: contiguous
) -> lambda sign, first, second: first:
    """`first` where `sign` is negative, otherwise `second`: arrays of one type in global memory.

    ptxas does not know that an array chosen by Python's `if` is not in shared memory, and keeps its
    loads and stores in order with those that are.
    """
    return first if sign < 0 else second


def _array_of(context, builder, sig, args):
    count = len(sig.args[1])
    arrays = [builder.extract_value(args[1], k) for k in range(count)]
    signs = (builder.sub(args[0], I32(k)) for k in range(1, count))
    return _select(context, builder, sig.return_type, arrays, signs)


def _same_arrays(name, arrays):
    contiguous(name, arrays.dtype if isinstance(arrays, types.UniTuple) else arrays)
    return arrays


@instruction(_array_of)
def array_of(machine, number: i32, arrays: _same_arrays) -> lambda number, arrays: arrays.dtype:
    """arrays[number] of a tuple of arrays of one type in global memory, as `one_of`."""
    return arrays[int(number)]
