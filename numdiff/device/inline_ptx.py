"""A row of the instruction set: the PTX of an instruction, its types, and its twin in Python.

Numba calls an intrinsic while it compiles a kernel: it says which types it takes and returns, and
generates the code of one call. The emulator calls a twin in its place. `instruction` makes both of
one function:

    @instruction("prmt.b32 $0, $1, $2, 0x5410;")
    def low_halves(machine, a: u32, b: u32) -> u32:
        '''The low 16 bits of a, then those of b, as a word.'''
        return UInt32(int(a) & 0xFFFF | (int(b) & 0xFFFF) << 16)

The files that have such rows: intrinsics.py, approximate.py, tensor_core/, bfloat16.py, float8.py,
eight.py, async_copy.py, mbarrier.py, cluster.py, tma.py, wgmma.py and system_scope.py.
"""

import functools
import inspect

from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import RequireLiteralValue, TypingError
from numba.cuda.extending import intrinsic

from ..emulator import twin

i32, u32, i64, u64 = types.int32, types.uint32, types.int64, types.uint64
f32, boolean = types.float32, types.boolean
I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
GLOBAL, SHARED = 1, 3  # LLVM's numbers of PTX's state spaces
# LLVM type -> the kind of register, as a constraint
LETTERS = {I16: "h", I32: "r", I64: "l", F32: "f"}

# LLVM type of a result in a register
REGISTERS = {i32: I32, u32: I32, i64: I64, u64: I64, f32: F32, boolean: I32}


def instruction(code, **how):
    """Decorator: an intrinsic, of which the decorated function is the documentation and the twin.

    code: the PTX, as in `statement`; or, where a call is more than that, its code generator
    how: see `statement`

    The function takes the emulator's machine first (`emulator.twin`), then the arguments. Their
    annotations are their types in a kernel: a Numba type, or `check(name, type)` that returns the
    type or raises a `TypingError`, such as `contiguous`. The annotation of the result is its type,
    or a function of the types of the arguments; without one there is no result.
    """

    def make(function):
        names = inspect.signature(function)
        _, *parameters = names.parameters.values()
        checks = [parameter.annotation for parameter in parameters]
        name, result = function.__name__, function.__annotations__.get("return", types.void)
        codegen = statement(code, **how) if isinstance(code, str) else code

        @functools.wraps(function)
        def typed(typingctx, *given, **named):
            given = names.bind(typingctx, *given, **named).args[1:]
            taken = [
                check if isinstance(check, types.Type) else check(name, kind)
                for check, kind in zip(checks, given, strict=True)
            ]
            made = result if isinstance(result, types.Type) else result(*taken)
            return made(*taken), codegen

        typed.__signature__ = names
        made = intrinsic(typed)
        made.__signature__ = names.replace(parameters=parameters)
        twin(made)(function)
        return made

    return make


def many(kind, count):
    """The Numba type of `count` registers."""
    return types.UniTuple(kind, count)


def statement(text, ordered=False, collective=False):
    """Code generator of an intrinsic that is one PTX statement.

    text: the PTX; $0, $1, … are the registers of the results, then those of the arguments (see
        `registers`)
    ordered: it reads or writes memory, or its timing matters: it is kept, in its place among memory
    accesses
    collective: the lanes of a warp execute it together: it is never copied into the branches of an
    `if`
    """

    def codegen(context, builder, sig, args):
        kind, results = sig.return_type, []
        if isinstance(kind, types.BaseTuple):
            results = [REGISTERS[one] for one in kind]
        elif kind != types.void:
            results = [REGISTERS[kind]]
        operands = registers(context, builder, sig.args, args)
        values = emit(builder, text, results, operands, ordered, collective)
        if not results:
            return context.get_dummy_value()
        if kind == boolean:
            return builder.icmp_unsigned("!=", values[0], I32(0))
        return values[0] if len(results) == 1 else context.make_tuple(builder, kind, values)

    return codegen


def emit(builder, text, results, operands, ordered=False, collective=False):
    """Emit one PTX statement over LLVM values; the list of its results. See `statement`."""
    if len(results) > 1:
        result = ir.LiteralStructType(results)
    else:
        result = results[0] if results else ir.VoidType()
    constraints = ["=" + LETTERS[r] for r in results] + [LETTERS[o.type] for o in operands]
    if ordered:
        constraints.append("~{memory}")
    assembly = ir.InlineAsm(
        ir.FunctionType(result, [o.type for o in operands]),
        text,
        ",".join(constraints),
        side_effect=ordered,
    )
    value = builder.call(assembly, operands, attrs=("convergent",) if collective else ())
    if len(results) > 1:
        return [builder.extract_value(value, i) for i in range(len(results))]
    return [value] if results else []


def registers(context, builder, numba_types, values):
    """The LLVM values of an intrinsic's arguments that PTX takes in registers.

    A tuple is its elements one by one, a literal is none; an array and the int64 index after it are
    one 64-bit address in the global state space, an array alone the generic address of its start.
    """
    found, pairs = [], list(zip(numba_types, values, strict=True))
    while pairs:
        kind, value = pairs.pop(0)
        if isinstance(kind, types.IntegerLiteral):
            continue
        if isinstance(kind, types.Array) and pairs and pairs[0][0] == i64:
            _, index = pairs.pop(0)
            found.append(
                builder.ptrtoint(address_in(GLOBAL, context, builder, kind, value, index), I64)
            )
        elif isinstance(kind, types.Array):
            start = element_pointer(context, builder, kind, value, I32(0))
            found.append(builder.ptrtoint(start, I64))
        elif isinstance(kind, types.BaseTuple):
            found.extend(builder.extract_value(value, i) for i in range(kind.count))
        else:
            found.append(value)
    return found


def element_pointer(context, builder, array_type, array, index):
    """Pointer to the element of a contiguous array with this index, counted over all its axes."""
    return builder.gep(context.make_array(array_type)(context, builder, value=array).data, [index])


def address_in(space, context, builder, array_type, array, index=None):
    """`element_pointer`, of the first element without an index, in a state space."""
    pointer = element_pointer(
        context, builder, array_type, array, I32(0) if index is None else index
    )
    return builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space))


# Annotations of `instruction` -------------------------------------------------------------------


def contiguous(name, array):
    """A contiguous array of any type."""
    if not isinstance(array, types.Array) or array.layout != "C":
        raise TypingError(f"{name} takes a contiguous array, not {array}")
    return array


def anything(name, kind):
    """An argument of any type."""
    return kind


def literal(low, high):
    """An integer that the compiler knows: a literal or a constant of the module."""

    def check(name, value):
        if not isinstance(value, types.IntegerLiteral):
            raise RequireLiteralValue(
                f"{name} takes a literal or a constant by name, such as PENDING = 1 in the module; "
                "not an expression"
            )
        if not low <= value.literal_value <= high:
            raise TypingError(
                f"{name} takes a number from {low} to {high}, not {value.literal_value}"
            )
        return value

    return check
