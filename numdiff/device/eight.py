"""Eight neighbours at a time: 16 bytes of float16 in one instruction, 32 bytes of float32 in two.

`load4` moves 8 bytes of float16; a warp then asks for 256 bytes a time, and a kernel that does little else needs twice
the instructions, and twice the loads under way, for the same bytes. As with `load4`, arithmetic is float32: what is
loaded is widened, what is stored is rounded to the nearest float16, ties to even.

    load8(array, index), store8(array, index, values)   `index` a multiple of 8, values a tuple of eight
    copy8(target, to, source, index)                    the same, started by cp.async, from memory to shared memory
    as_stored(array, x)                                 x as it reads once it has been stored in the array

SOURCE  PTX ISA, sections 9.7.9 (ld, st), 9.7.9.22 (cvt) and 9.7.9.25.3 (cp.async); sm_80 and later.
"""
import sys

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import twin
from ..emulator.group_copies import start_copy
from .inline_ptx import F32, GLOBAL, I32, I64, SHARED, element_pointer, emit, require_contiguous

EIGHT = types.UniTuple(types.float32, 8)
BYTES = 16  # of one instruction


def _pieces(array):
    """(elements of an instruction, instructions)."""
    elements = BYTES * 8 // array.dtype.bitwidth
    return elements, 8 // elements


def _address(context, builder, array_type, array, index, first, kind):
    """Pointer to a vector of four of `kind`, `first` elements after array[index]."""
    pointer = builder.gep(element_pointer(context, builder, array_type, array, index), [ir.Constant(I64, first)])
    return builder.bitcast(pointer, ir.VectorType(kind, 4).as_pointer(getattr(pointer.type, "addrspace", 0)))


# As plain casts of the two halves, the compiler would split the load in two: it prefers vectors of four.
UNPACK = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
PACK = "cvt.rn.f16x2.f32 $0, $2, $1;"


@intrinsic
def load8(typingctx, array, index):
    """(a[i], …, a[i+7]) of a contiguous array of float16 or float32, as float32; `index` must be a multiple of 8."""
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
                values += [word] if kind is F32 else emit(builder, UNPACK, (F32, F32), [word])
        return context.make_tuple(builder, sig.return_type, values)

    return EIGHT(array, types.int64), codegen


@twin(load8)
def _load8(machine, array, index):
    step = BYTES // array.dtype.itemsize
    values = [v for i in range(0, 8, step) for v in machine.access.load_vector(array, index + i, step)]
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
            given = [emit(builder, PACK, (I32,), given[i:i + 2])[0] for i in range(0, 8, 2)]
        for piece in range(pieces):
            vector = ir.Constant(ir.VectorType(kind, 4), ir.Undefined)
            for k in range(4):
                vector = builder.insert_element(vector, given[4 * piece + k], I32(k))
            builder.store(vector, _address(context, builder, array, args[0], args[1], piece * elements, kind),
                          align=BYTES)
        return context.get_dummy_value()

    return types.void(array, types.int64, EIGHT), codegen


@twin(store8)
def _store8(machine, array, index, values):
    step = BYTES // array.dtype.itemsize
    for i in range(0, 8, step):
        machine.access.store_vector(array, index + i, values[i:i + step])


@intrinsic
def copy8(typingctx, target, to, source, index):
    """Start a copy of source[index …] to the shared array's target[to …], arrays of one type; multiples of 8."""
    require_contiguous("copy8", source)
    elements, pieces = _pieces(source)

    def codegen(context, builder, sig, args):
        for piece in range(pieces):
            skip = ir.Constant(I64, piece * elements)
            addresses = [builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space))
                         for space, pointer in (
                (SHARED, element_pointer(context, builder, sig.args[0], args[0], builder.add(args[1], skip))),
                (GLOBAL, element_pointer(context, builder, sig.args[2], args[2], builder.add(args[3], skip))))]
            operands = [builder.ptrtoint(a, kind) for a, kind in zip(addresses, (I32, I64), strict=True)]
            emit(builder, f"cp.async.cg.shared.global [$0], [$1], {BYTES};", (), operands, ordered=True)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), codegen


@twin(copy8)
def _copy8(machine, target, to, source, index):
    size = source.dtype.itemsize
    step, start = BYTES // size, machine.shared_address(target)
    for i in range(0, 8, step):
        start_copy(machine, start + (int(to) + i) * size, source, index + i, BYTES, BYTES, sys._getframe(2))


@intrinsic
def as_stored(typingctx, array, x):
    """x, a float32, as it reads once it has been stored in the array: rounded to float16 if that is its type."""
    def codegen(context, builder, sig, args):
        stored = context.cast(builder, args[1], types.float32, array.dtype)
        return context.cast(builder, stored, array.dtype, types.float32)

    return types.float32(array, types.float32), codegen


@twin(as_stored)
def _as_stored(machine, array, x):
    return np.float32(array.dtype.type(x))
