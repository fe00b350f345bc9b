"""GPU instructions that Python cannot express: intrinsics, each with its functional twin for the
emulator (inline_ptx.py).

`load4` and `store4` move four neighbouring elements with one instruction (PTX ISA, section 9.7.9,
`ld`/`st` with `.v4`). Four times fewer memory instructions is what brings a streaming kernel to the
speed of memory.

Of a float16 or bfloat16 array they give and take float32: 8 bytes move, and what is stored is
rounded to the nearest such number, ties to even. So a kernel written with them computes in float32
whichever of the three its arrays hold.
"""

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..dtypes import is_half
from ..emulator import twin
from .bfloat16 import bfloat16
from .inline_ptx import f32, i32, instruction


def _vector_address(context, builder, array_type, array, index):
    """Address of `array[index]` (a 1-D view of a contiguous array) as a pointer to a vector of
    four."""
    data = context.make_array(array_type)(context, builder, value=array).data
    element = builder.gep(data, [index])
    vector = ir.VectorType(context.get_data_type(array_type.dtype), 4)
    return builder.bitcast(element, vector.as_pointer(getattr(data.type, "addrspace", 0)))


def _arithmetic_type(array):
    """The type in which a kernel computes with the elements of an array."""
    return types.float32 if array.dtype in (types.float16, bfloat16) else array.dtype


@intrinsic
def load4(typingctx, array, index):
    """(a[i], a[i+1], a[i+2], a[i+3]) of a contiguous array; `index` must be a multiple of 4."""
    given = _arithmetic_type(array)

    def codegen(context, builder, sig, args):
        vector = builder.load(
            _vector_address(context, builder, sig.args[0], args[0], args[1]),
            align=4 * array.dtype.bitwidth // 8,
        )
        lanes = [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(4)]
        lanes = [context.cast(builder, lane, array.dtype, given) for lane in lanes]
        return context.make_tuple(builder, sig.return_type, lanes)

    return types.UniTuple(given, 4)(array, types.int64), codegen


@twin(load4)
def _load4(machine, array, index):
    values = machine.access.load_vector(array, index, 4)
    return tuple(map(np.float32, values)) if is_half(array.dtype) else values


@intrinsic
def store4(typingctx, array, index, a, b, c, d):
    """array[i], …, array[i+3] = a, b, c, d of a contiguous array; `index` must be a multiple of 4."""
    taken = _arithmetic_type(array)

    def codegen(context, builder, sig, args):
        address = _vector_address(context, builder, sig.args[0], args[0], args[1])
        vector = ir.Constant(address.type.pointee, ir.Undefined)
        for i, lane in enumerate(args[2:]):
            lane = context.cast(builder, lane, taken, array.dtype)
            vector = builder.insert_element(vector, lane, ir.Constant(ir.IntType(32), i))
        builder.store(vector, address, align=4 * array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, taken, taken, taken, taken), codegen


@twin(store4)
def _store4(machine, array, index, *values):
    machine.access.store_vector(array, index, values)


@instruction("mov.b32 $0, $1;", ordered=True)
def opaque(machine, number: i32) -> i32:
    """`number` (int32) as an opaque value: what follows from it is computed here, not kept in a
    register from an earlier computation."""
    return number


@instruction("mul.rn.f32 $0, $1, $2;")
def product(machine, a: f32, b: f32) -> f32:
    """a · b of two float32, rounded by itself: no compiler joins it with a sum into one
    instruction."""
    return np.float32(a) * np.float32(b)


# typed literals: an untyped 0.0 drags float64 into a kernel
float32, int32, uint32, int64 = np.float32, np.int32, np.uint32, np.int64
