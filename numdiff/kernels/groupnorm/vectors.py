"""Eight neighbouring channels of a thread: 16 bytes of float16 or 32 of float32, as GroupNorm's one pass moves them.

    load8, store8       an array's eight elements to or from eight float32
    fetch8, numbers8    the first half of a load and the second: whoever does not look at the words yet goes on
    add8, words8        numbers += words; numbers to words
    copy8               global to shared memory by cp.async
    prefetch_l2         global memory to the L2 cache
    fence               orders memory for all blocks
    by_sign, one_of     one of two numbers, of two arrays

SOURCE  PTX ISA, sections 9.7.9.22 (cvt.rn.f16x2.f32), 9.7.9.25.3
        (cp.async), 9.7.13.4 (fence).
"""
import math
import sys
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ...device import cuda, float32, int32, int64
from ...device.approximate import power_of_two, reciprocal
from ...device.inline_ptx import F32, GLOBAL, I32, I64, SHARED, element_pointer, emit, require_contiguous, statement
from ...emulator import twin
from ...emulator.group_copies import start_copy
from ..common import divide

WARP, WARP_BITS = 32, 5  # threads; t >> 5 is t // 32 without a division
VECTOR = 8  # channels of a thread
WORDS = 8  # that eight float32 take; float16 use the first four
THREADS = 512  # at most: 16 warps hide a multiprocessor's latencies where its shared memory is filled by one block
PARTS = 4  # groups of copies: sums begin when the first has come
LOG2_E = float32(math.log2(math.e))

# Intrinsics -----------------------------------------------------------------------------------------------------------

HALF, PAIR, QUAD = ir.HalfType(), ir.VectorType(ir.HalfType(), 2), ir.VectorType(I32, 4)


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


def _numbers(builder, words):
    """Eight float32 from the words of eight float16 or float32."""
    if len(words) == VECTOR:
        return [builder.bitcast(word, F32) for word in words]
    pairs = [builder.bitcast(word, PAIR) for word in words]
    return [builder.fpext(builder.extract_element(pair, I32(i)), F32) for pair in pairs for i in range(2)]


def _put(context, builder, array_type, array, values):
    for k, value in enumerate(values):
        builder.store(value, element_pointer(context, builder, array_type, array, I32(k)))


def _words(context, builder, array, values_type, values):
    """The words of eight float32 in a local array, rounded to the type of `array`."""
    numbers = [builder.load(element_pointer(context, builder, values_type, values, I32(k))) for k in range(VECTOR)]
    if array.dtype.bitwidth == 16:
        return [emit(builder, "cvt.rn.f16x2.f32 $0, $2, $1;", [I32], numbers[k:k + 2])[0] for k in range(0, VECTOR, 2)]
    return [builder.bitcast(number, I32) for number in numbers]


@intrinsic
def load8(typingctx, array, index, into):
    """into[0 … 7] = array[index … index + 7] as float32; `index` a multiple of 8, `into` a local array."""
    require_contiguous("load8", array)

    def codegen(context, builder, sig, args):
        words = _load_words(context, builder, sig.args[0], args[0], args[1])
        _put(context, builder, sig.args[2], args[2], _numbers(builder, words))
        return context.get_dummy_value()

    return types.void(array, types.int64, into), codegen


@twin(load8)
def _load8(machine, array, index, into):
    half = 16 // array.itemsize
    for first in range(0, VECTOR, half):
        for k, value in enumerate(machine.access.load_vector(array, index + first, half)):
            into[first + k] = np.float32(value)


@intrinsic
def store8(typingctx, array, index, values):
    """array[index … index + 7] = values[0 … 7], float32, rounded to the type of `array`."""
    require_contiguous("store8", array)

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


@twin(store8)
def _store8(machine, array, index, values):
    half = 16 // array.itemsize
    for first in range(0, VECTOR, half):
        machine.access.store_vector(array, index + first, [values[first + k] for k in range(half)])


@intrinsic
def fetch8(typingctx, array, index, words):
    """As `load8`, but as they are, into a local array of eight uint32: whoever does not look at them yet goes on."""
    require_contiguous("fetch8", array)

    def codegen(context, builder, sig, args):
        _put(context, builder, sig.args[2], args[2], _load_words(context, builder, sig.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.int64, words), codegen


@twin(fetch8)
def _fetch8(machine, array, index, words):
    half = 16 // array.itemsize
    for first in range(0, VECTOR, half):
        values = np.array(machine.access.load_vector(array, index + first, half), array.dtype)
        for k, word in enumerate(values.view(np.uint32)):
            words[4 * first // half + k] = word


@intrinsic
def add8(typingctx, array, words, values):
    """values[0 … 7] += what `fetch8` brought from `array`."""

    def codegen(context, builder, sig, args):
        count = array.dtype.bitwidth // 4
        numbers = _numbers(builder, [builder.load(element_pointer(context, builder, sig.args[1], args[1], I32(k)))
                                     for k in range(count)])
        places = [element_pointer(context, builder, sig.args[2], args[2], I32(k)) for k in range(VECTOR)]
        for place, number in zip(places, numbers, strict=True):
            builder.store(builder.fadd(builder.load(place), number), place)
        return context.get_dummy_value()

    return types.void(array, words, values), codegen


@twin(add8)
def _add8(machine, array, words, values):
    numbers = np.array([int(words[k]) for k in range(2 * array.itemsize)], np.uint32).view(array.dtype)
    for k in range(VECTOR):
        values[k] = np.float32(values[k]) + np.float32(numbers[k])


@intrinsic
def numbers8(typingctx, array, words, values):
    """values[0 … 7] = what `fetch8` brought from `array`, or `words8` made, as float32."""

    def codegen(context, builder, sig, args):
        words = [builder.load(element_pointer(context, builder, sig.args[1], args[1], I32(k)))
                 for k in range(array.dtype.bitwidth // 4)]
        _put(context, builder, sig.args[2], args[2], _numbers(builder, words))
        return context.get_dummy_value()

    return types.void(array, words, values), codegen


@twin(numbers8)
def _numbers8(machine, array, words, values):
    numbers = np.array([int(words[k]) for k in range(2 * array.itemsize)], np.uint32).view(array.dtype)
    for k in range(VECTOR):
        values[k] = np.float32(numbers[k])


@intrinsic
def words8(typingctx, array, values, words):
    """The words of values[0 … 7], float32, rounded to the type of `array`."""

    def codegen(context, builder, sig, args):
        _put(context, builder, sig.args[2], args[2], _words(context, builder, array, sig.args[1], args[1]))
        return context.get_dummy_value()

    return types.void(array, values, words), codegen


@twin(words8)
def _words8(machine, array, values, words):
    rounded = np.array([np.float32(values[k]) for k in range(VECTOR)], np.float32).astype(array.dtype)
    for k, word in enumerate(rounded.view(np.uint32)):
        words[k] = word


@intrinsic
def copy8(typingctx, target, to, source, index):
    """Start copies of eight elements, source[index …] to the shared array's target[to …]; both multiples of 8."""
    require_contiguous("copy8", source)

    def codegen(context, builder, sig, args):
        addresses = [builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space)) for space, pointer in (
            (SHARED, element_pointer(context, builder, sig.args[0], args[0], args[1])),
            (GLOBAL, element_pointer(context, builder, sig.args[2], args[2], args[3])))]
        operands = [builder.ptrtoint(a, kind) for a, kind in zip(addresses, (I32, I64), strict=True)]
        for offset in range(0, VECTOR * source.dtype.bitwidth // 8, 16):
            emit(builder, f"cp.async.cg.shared.global [$0+{offset}], [$1+{offset}], 16;", (), operands, ordered=True)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), codegen


@twin(copy8)
def _copy8(machine, target, to, source, index):
    size, half = source.dtype.itemsize, 16 // source.dtype.itemsize
    for first in range(0, VECTOR, half):
        start_copy(machine, machine.shared_address(target) + (int(to) + first) * size, source, index + first, 16, 16,
                   sys._getframe(2))


@intrinsic
def prefetch_l2(typingctx, array, index):
    """Ask for the sector of array[index] to come to the L2 cache: nothing waits for it, nothing else changes."""
    require_contiguous("prefetch_l2", array)
    return types.void(array, types.int64), statement("prefetch.global.L2 [$0];", ordered=True)


@twin(prefetch_l2)
def _prefetch_l2(machine, array, index):
    """Nothing that a program could see."""


@intrinsic
def fence(typingctx):
    """As `cuda.threadfence`, which also puts all fences of the device into one order, and takes longer for that."""
    return types.void(), statement("fence.acq_rel.gpu;", ordered=True)


@twin(fence)
def _fence(machine):
    if machine.checked:
        machine.access.fence()


@intrinsic
def by_sign(typingctx, sign, positive, negative):
    """`positive` where `sign` is 0 or more, otherwise `negative`: both are there already, no branch, no address."""
    return types.float32(types.int32, types.float32, types.float32), statement("slct.f32.s32 $0, $2, $3, $1;", [F32])


@twin(by_sign)
def _by_sign(machine, sign, positive, negative):
    return positive if sign >= 0 else negative


@intrinsic
def one_of(typingctx, sign, first, second):
    """`first` where `sign` is negative, otherwise `second`: arrays of one type in global memory.

    Of an array that Python's `if` chose ptxas does not know that it is no shared memory: its loads and stores would
    have to keep their places among those that are.
    """
    require_contiguous("one_of", first)

    def codegen(context, builder, sig, args):
        made = [context.make_array(sig.return_type)(context, builder, value=array) for array in args[1:]]
        words = [builder.ptrtoint(builder.addrspacecast(m.data, ir.PointerType(m.data.type.pointee, GLOBAL)), I64)
                 for m in made]
        chosen = emit(builder, "slct.b64.s32 $0, $2, $3, $1;", [I64], [args[0], *reversed(words)])[0]
        pointer = builder.inttoptr(chosen, ir.PointerType(made[0].data.type.pointee, GLOBAL))
        made[0].data = builder.addrspacecast(pointer, made[0].data.type)
        return made[0]._getvalue()

    return first(types.int32, first, first), codegen


@twin(one_of)
def _one_of(machine, sign, first, second):
    return first if sign < 0 else second


# What kernels are given, and pass on ----------------------------------------------------------------------------------

class Shape(NamedTuple):
    """Of an array (B, P, C) that is read from two, of which the first has `seam` channels. width: channels a group"""

    P: int
    C: int
    seam: int
    width: int


class Walk(NamedTuple):
    """A thread's way over its pixels, of P: in x from the element `first` on, by steps; in shared memory from `own` on,
    by turns."""

    P: int
    first: int
    step: int
    own: int
    turn: int


class BackwardWalk(NamedTuple):
    """As `Walk`; in dy, too, which lies `half` behind x in shared memory."""

    P: int
    first: int
    step: int
    first_dy: int
    step_dy: int
    own: int
    turn: int
    half: int


class Arrays(NamedTuple):
    """In global memory; of x, residual and dx the one of two in which the thread's channels are."""

    x: object
    dy: object
    residual: object
    dx: object


class Affine(NamedTuple):
    """A thread's eight channels: z = (x - mean) · scale + shift."""

    means: object
    scales: object
    shifts: object


# Device functions -----------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def sigmoid(z):
    return reciprocal(float32(1) + power_of_two(-LOG2_E * z))


@cuda.jit(device=True, forceinline=True)
def clear(values):
    for k in range(VECTOR):
        values[k] = float32(0)


@cuda.jit(device=True, forceinline=True)
def locate(c, pixel, b, P, C, seam, rows):
    """Channel c of a pixel of sample b in two arrays that are read as one, of which the first has `seam` of C channels:
    (negative if it is in the first one, for `one_of`; its element there; how far from it the pixel `rows` later is)."""
    beyond = int32(c - seam)
    channels, channel = (int32(seam), c) if beyond < 0 else (int32(C - seam), beyond)
    return beyond, int64(b) * int32(P * channels) + int32(pixel * channels + channel), int32(rows * channels)


@cuda.jit(device=True, forceinline=True)
def find_groups(first, width, groups):
    """groups[k]: the group of channel first + k."""
    group, before = divide(first, width)
    left = int32(width - before)  # channels of this group from here on
    for k in range(VECTOR):
        groups[k] = group
        left -= int32(1)
        if left == 0:
            group, left = int32(group + 1), int32(width)


@cuda.jit(device=True, forceinline=True)
def lanes_sum(total, lanes):
    """The sum over `lanes` neighbouring lanes, a power of two, in all of them."""
    step = int32(lanes >> 1)
    while step > 0:
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        step >>= int32(1)
    return total


@cuda.jit(device=True, forceinline=True)
def accumulate(value, d, total_gx, total_g):
    for k in range(VECTOR):
        total_gx[k] += d[k] * value[k]
        total_g[k] += d[k]


@cuda.jit(device=True, forceinline=True)
def gradient8(x, d, means, scales, bias, activate):
    """x -= mean; d becomes the gradient of z = x · scale + bias."""
    for k in range(VECTOR):
        x[k] -= means[k]
    if activate:
        for k in range(VECTOR):
            z = x[k] * scales[k] + bias[k]
            s = sigmoid(z)
            d[k] *= s * (float32(1) + z * (float32(1) - s))
