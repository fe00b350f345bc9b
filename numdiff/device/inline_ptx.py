"""One PTX statement as the body of a Numba intrinsic, and addresses of array elements.

An intrinsic is a function that Numba calls while it compiles a kernel: it says which types it takes
and returns, and generates the code of one call. `statement` makes that code generator for a PTX
statement, so that an intrinsic is its signature, its documentation and the line of PTX that it
stands for.
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import RequireLiteralValue, TypingError

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
GENERIC, GLOBAL, SHARED = 0, 1, 3  # LLVM's numbers of PTX's state spaces
# LLVM type -> the kind of register, as a constraint
LETTERS = {I16: "h", I32: "r", I64: "l", F32: "f"}


def statement(text, results=(), ordered=False, collective=False):
    """Code generator of an intrinsic that is one PTX statement.

    text: the PTX; $0, $1, … are the registers of the results, then those of the arguments (a tuple
        is its elements one by one, an array and the index after it are one 64-bit address in the
        global state space, a literal is none)
    results: LLVM types of what it gives: none, one number, or a tuple of several
    ordered: it reads or writes memory, or its timing matters: it is kept, in its place among memory
    accesses
    collective: the lanes of a warp execute it together: it is never copied into the branches of an
    `if`
    """

    def codegen(context, builder, sig, args):
        operands = registers(context, builder, sig.args, args)
        values = emit(builder, text, results, operands, ordered, collective)
        if not results:
            return context.get_dummy_value()
        return (
            values[0] if len(results) == 1 else context.make_tuple(builder, sig.return_type, values)
        )

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
    """The LLVM values of an intrinsic's arguments that PTX takes in registers."""
    found, pairs = [], iter(zip(numba_types, values, strict=True))
    for kind, value in pairs:
        if isinstance(kind, types.IntegerLiteral):
            continue
        if isinstance(kind, types.Array):
            _, index = next(pairs)
            pointer = element_pointer(context, builder, kind, value, index)
            pointer = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, GLOBAL))
            found.append(builder.ptrtoint(pointer, I64))
        elif isinstance(kind, types.BaseTuple):
            found.extend(builder.extract_value(value, i) for i in range(kind.count))
        else:
            found.append(value)
    return found


def element_pointer(context, builder, array_type, array, index):
    """Pointer to the element of a contiguous array with this index, counted over all its axes."""
    return builder.gep(context.make_array(array_type)(context, builder, value=array).data, [index])


def require_contiguous(name, array):
    """Refuse, while a kernel is compiled, an argument that is not a contiguous array."""
    if not isinstance(array, types.Array) or array.layout != "C":
        raise TypingError(f"{name} takes a contiguous array, not {array}")


def literal(name, value, low, high):
    """The value of an argument that must be a number known to the compiler: a literal or a constant
    of the module."""
    if not isinstance(value, types.IntegerLiteral):
        raise RequireLiteralValue(
            f"{name} takes a literal or a constant by name, such as PENDING = 1 in the module; "
            "not an expression"
        )
    if not low <= value.literal_value <= high:
        raise TypingError(f"{name} takes a number from {low} to {high}, not {value.literal_value}")
    return value.literal_value
