"""Signatures of kernels and of device functions: which one a call takes, and what becomes of its
arguments.

A signature is made of Numba's types, so that Numba has been imported where there is one. Its own
rules give the possible conversions and their quality. Of several signatures that fit, Numba takes
the one with the fewest unsafe conversions, then the fewest safe ones, then the fewest promotions.
"""

import enum
import functools
import sys
from types import GeneratorType

import numpy as np

from . import values
from .arrays import contiguous_strides
from .faults import LaunchRefused, Unsupported
from .values import dtype_of, scalar, type_named

NO_SIGNATURES = (
    "a signature needs Numba, which knows its types: leave it out, or pip install numba numba-cuda"
)
_NAMES = {
    bool: "boolean",
    np.bool_: "boolean",
    int: "int64",
    float: "float64",
    complex: "complex128",
    values.Literal: "int64",
    **{t.kind: name for name, t in values.INTEGER_TYPES.items()},
}


@functools.cache
def numba_parts(mlir=False):
    """(types, from_dtype, the typing context) of the Numba that has been imported, or of
    numba-cuda-mlir."""
    for root in (
        ("numba_cuda_mlir.numba_cuda",)
        if mlir
        else ("numba.cuda", "numba.core", "numba_cuda_mlir.numba_cuda")
    ):
        types = sys.modules.get(f"{root}.types")
        support = sys.modules.get(f"{root}.np.numpy_support") or sys.modules.get(
            "numba.np.numpy_support"
        )
        if hasattr(types, "Array") and support is not None:
            if "mlir" in root:
                context = sys.modules["numba_cuda_mlir.descriptor"].mlir_target.typing_context
            elif "numba.cuda.descriptor" in sys.modules:
                context = sys.modules["numba.cuda.descriptor"].cuda_target.typing_context
            else:  # Numba's simulator has none; numbers are converted by the same rules
                context = sys.modules["numba.core.typing.context"].Context()
            return types, support.from_dtype, context
    raise Unsupported("the emulator finds no Numba, whose types a signature is made of")


def is_mlirs(kind):
    return type(kind).__module__.startswith("numba_cuda_mlir")


def type_of(value, mlir=False):
    """Numba's type of a launch's argument, or of what a kernel holds; None if it has none."""
    types, from_dtype, _ = numba_parts(mlir)
    if isinstance(value, np.generic) and not isinstance(value, np.bool_):
        return from_dtype(value.dtype)
    if isinstance(value, (tuple, list)):
        return types.BaseTuple.from_types(tuple(type_of(v, mlir) for v in value))
    if value is None:
        return types.none
    if isinstance(value, str):
        return types.unicode_type
    if isinstance(value, enum.Enum):
        of_enum = types.IntEnumMember if isinstance(value, int) else types.EnumMember
        return of_enum(type(value), type_of(value.value, mlir))
    if isinstance(getattr(value, "shape", None), tuple):
        dtype, strides = value.dtype, value.strides
        layout = (
            "C"
            if strides == contiguous_strides(value.shape, dtype.itemsize)
            else (
                "F"
                if strides[::-1] == contiguous_strides(value.shape[::-1], dtype.itemsize)
                else "A"
            )
        )
        return types.Array(from_dtype(dtype), len(value.shape), layout)
    name = _NAMES.get(value.__class__)
    if name == "int64" and not -values.HALF64 <= value < values.HALF64:
        name = "uint64"
    return name and getattr(types, name)


def best(signatures, arguments, ambiguous=True):
    """The signature (types of arguments) of several that Numba takes for arguments; None if no one
    fits.

    ambiguous: whether of several that fit as well the first is taken; else that is a
    `LaunchRefused`
    """
    mlir = any(map(is_mlirs, (kind for types in signatures for kind in types)))
    given, rated = tuple(type_of(a, mlir) for a in arguments), []
    _, _, context = numba_parts(mlir)
    for k, types in enumerate(signatures):
        if len(types) != len(given):
            continue
        ratings = [
            None if a is None else context.can_convert(a, t)
            for a, t in zip(given, types, strict=True)
        ]
        names = [getattr(r, "name", None) for r in ratings]
        if None not in names:
            rated.append((*(names.count(kind) for kind in ("unsafe", "safe", "promote")), k))
    rated.sort()
    if not rated:
        return None
    if not ambiguous and len(rated) > 1 and rated[0][:3] == rated[1][:3]:
        raise LaunchRefused(
            f"the signatures {described(signatures[rated[0][3]])} and "
            f"{described(signatures[rated[1][3]])} fit ({', '.join(map(str, given))}) equally well"
        )
    return signatures[rated[0][3]]


def described(types):
    return f"({', '.join(map(str, types))})"


def converted(value, kind):
    """A number, or a tuple of them, in a type of Numba's; arrays as they are."""
    if isinstance(value, tuple) and hasattr(kind, "__iter__"):
        made = [converted(v, t) for v, t in zip(value, kind, strict=True)]
        return getattr(type(value), "_make", tuple)(made)
    if (
        isinstance(value, enum.Enum)
        or isinstance(getattr(value, "shape", None), tuple)
        and value.shape
    ):
        return value
    to = type_named(str(getattr(kind, "literal_type", kind)))
    return value if to is None else to(scalar(value))


def signatures_of(given, mlir=False):
    """[(types of the arguments, type of the result or None)] of what was given to `cuda.jit`: a
    signature, a string, or a list of them."""
    readers = (
        "numba_cuda_mlir.numba_cuda.core.sigutils",
        "numba.cuda.core.sigutils",
        "numba.core.sigutils",
    )
    read = next(
        (
            sys.modules[name].normalize_signature
            for name in (readers if mlir else readers[1:] + readers[:1])
            if name in sys.modules
        ),
        None,
    )
    if read is None:
        raise Unsupported(NO_SIGNATURES)
    return [
        read(one)
        for one in (
            given if isinstance(given, (list, tuple)) and not _is_signature(given) else [given]
        )
    ]


def _is_signature(given):
    """Whether a tuple is one signature: (int32, float32) and not of several."""
    return isinstance(given, tuple) and not any(
        isinstance(one, (str, tuple)) or hasattr(one, "args") for one in given
    )


def explicit_signatures(kernel):
    """As `signatures_of`, of a function of Numba's or the emulator's; [] of one that takes any
    types."""
    if hasattr(kernel, "signatures_given"):
        return kernel.signatures_given
    if getattr(kernel, "_can_compile", True) or not hasattr(kernel, "py_func"):
        return []
    device = kernel.targetoptions.get("device")
    return [
        (types, made.signature.return_type if device else None)
        for types, made in kernel.overloads.items()
    ]


def convert_arguments(kernel, arguments):
    """The arguments of a launch in the types of the signature that fits best: Numba casts numbers,
    and refuses other arrays."""
    compiled = getattr(kernel, "compiled_for", None)  # Numba itself has chosen
    known = (
        [compiled] if compiled is not None else [types for types, _ in explicit_signatures(kernel)]
    )
    if not known:
        return arguments
    arguments = [a.value if is_hint(a) else a for a in arguments]
    if compiled is not None:
        return [converted(_signed_as(a, t), t) for a, t in zip(arguments, compiled, strict=True)]
    # Numba looks at no types then: bits are taken as they are
    if len(known) == 1 and len(known[0]) == len(arguments):
        arguments = list(map(_signed_as, arguments, known[0]))
    types = best(known, arguments, ambiguous=False)
    if types is None:
        raise LaunchRefused(
            f"{kernel.__name__}: its signature has {' or '.join(map(described, known))}; these "
            f"arguments are ({', '.join(map(_in_words, arguments))})."
        )
    return list(map(converted, arguments, types))


def _signed_as(argument, kind):
    """An array of integers with or without signs, as those of the type that a signature has."""
    dtype = getattr(argument, "dtype", None)
    to = type_named(str(getattr(kind, "dtype", None))) and dtype_of(str(kind.dtype))
    if (
        not getattr(argument, "shape", ())
        or to is None
        or to == dtype
        or {to.kind, dtype.kind} != {"i", "u"}
        or (to.itemsize != dtype.itemsize)
    ):
        return argument
    return argument.view(to)


def _in_words(argument):
    shape = getattr(argument, "shape", ())
    return f"{argument.dtype}[{', '.join(':' * len(shape))}]" if shape else type(argument).__name__


def is_hint(argument):
    """Whether an argument is a `cuda.In`, `cuda.Out` or `cuda.InOut`."""
    return type(argument).__name__ in ("In", "Out", "InOut") and type(argument).__module__.endswith(
        "cuda.args"
    )


def with_signatures(name, python, function, signatures):
    """A device function that converts what it is given and what it gives, as its signatures say."""
    known, results, code = [types for types, _ in signatures], dict(signatures), python.__code__
    names, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()

    def call(*arguments, **named):
        if named or len(arguments) < len(names):
            given = {
                **dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)),
                **dict(zip(names, arguments, strict=False)),
                **named,
            }
            arguments = [given[n] for n in names if n in given]
        types = best(known, arguments)
        if types is None:
            raise Unsupported(
                f"{name} has the signature {' or '.join(map(described, known))}, and Numba does not "
                f"compile a call with ({', '.join(str(type_of(a)) for a in arguments)})"
            )
        value, result = function(*map(converted, arguments, types)), results[types]
        if result is None or str(result) == "none":
            return value
        return (
            _later(value, result) if value.__class__ is GeneratorType else converted(value, result)
        )

    return call


def _later(generator, kind):
    """What a function that waits by `yield` (generators.py) returns, converted."""
    return converted((yield from generator), kind)
