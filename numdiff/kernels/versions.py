"""The names of versions: `matmul_forward(a, b, version="hopper")` is `version=6`.

A version is a number to count up a ladder, and a name to say what is new on it. Launchers take either; a name becomes
the number before anything else happens, so that launches, graphs and compiled kernels know numbers only.

CEILINGS
    A launcher chooses the fastest version that takes its operands. Within `at_most({"matmul": "tiled"})` it chooses
    none above that, so that a whole training step can climb the ladder a technique at a time (benchmark/ladder.py).
    A call that names its version gets it. Two entries have a rung 0, the same mathematics without the operation: of
    "flash_attention" attention/unfused.py, of "epilogue" an activation in a separate pass, after the norm or the
    layer before it.

SOURCE
    plain bookkeeping; the words are those of the operations' files, under VERSIONS.
"""
import contextlib
import functools
import inspect
import math

import numpy as np

from .. import extensions
from ..device import is_device

WIDE = {"naive": 1, "vectorised": 2}  # a thread an element (a backward: a column); four, by 16-byte loads and stores
SWITCHED = extensions.entries("conv2d_switched")  # chosen by a switch of the device
CONV2D = {"direct": 1, "im2col": 2, "implicit-gemm": 3, "narrow": 3, "mma": 4, **dict.fromkeys(SWITCHED, 4),
          "hopper-columns": 5, "hopper": 6, **{name: 7 + i for i, name in enumerate(extensions.entries("conv2d"))}}
# Of names that share a number: the operands' type that each is for.
FOR = {"mma": "float16 and bfloat16", "narrow": "float16 and bfloat16", "implicit-gemm": "float32",
       **dict.fromkeys(SWITCHED, "float32")}

# {operation: {name: number}}, a backward only where its versions are not its forward's
NAMES = {
    "im2col": WIDE,
    **dict.fromkeys(("conv2d", "conv2d_input_gradient", "conv2d_weight_gradient"), CONV2D),
}

# What `at_most` knows
CEILED = {**NAMES, "epilogue": {"apart": 0, "fused": 1}, "flash_attention": {"unfused": 0}}
_asking = set(CEILED) - set(NAMES)  # operations whose launchers call `capped`
_ceilings = {}  # {operation: highest version that launchers choose by themselves}; empty but within `at_most`


def declare(operation, numbers, has_ceiling=True):
    """Enter the versions of an operation that has a record (operation.py), {name: number}.

    has_ceiling: `at_most` knows it; False for one with another operation's versions
    """
    NAMES[operation] = numbers
    if has_ceiling:
        CEILED[operation] = CEILED.get(operation, {}) | numbers
        _asking.add(operation)


@contextlib.contextmanager
def at_most(ceilings):
    """Context: launchers choose no version above these. ceilings: {operation of CEILED: number, or name}

    Launchers are asked at each call: a captured step keeps the versions that it was captured with.
    """
    global _ceilings
    wanted = {}
    for operation, version in ceilings.items():
        known = CEILED.get(operation, {})
        number = known.get(version, version)
        if number not in known.values() or 1 < number < max(known.values()) and operation not in _asking:
            raise ValueError(f"there is no version {version!r} of {operation!r} to stop at: use one of "
                             f"{', '.join(known) or ', '.join(CEILED)}; of operations that do not ask only the first")
        wanted[operation] = number
    before, _ceilings = _ceilings, wanted
    try:
        yield
    finally:
        _ceilings = before


def capped(operation, choice):
    """The version that a launcher chose for itself, or the ceiling where that is lower."""
    return min(choice, _ceilings.get(operation, choice))


def operation_of(name):
    """The key in `NAMES` of a function, or of an operation of `numdiff kernels check`; None if it has one version."""
    if name == "cast_into":
        return "cast"
    short = name.removesuffix("_forward")
    return next((n for n in (short, short.removesuffix("_backward")) if n in NAMES), None)


def numbers_of(name):
    """The versions of an operation, as numbers in order; () if it has one."""
    return tuple(sorted(set(NAMES.get(operation_of(name), {}).values())))


def name_of(name, number, dtype=None):
    """What a version is called in operands of this type, None if it has no name; dtype None: "mma or tf32"."""
    found = [n for n, v in NAMES.get(operation_of(name), {}).items() if v == number]
    if len(found) > 1 and dtype is not None:
        found = [n for n in found if np.dtype(dtype).name in FOR[n].split(" and ")] or found
    return " or ".join(found) or None


def label(name, number, dtype=None):
    """A version as a message says it: "6 (hopper)"."""
    found = name_of(name, number, dtype)
    return f"{number} ({found})" if found else str(number)


def number_of(name, version, dtype=None):
    """The number of a version that is given by its name; a `ValueError` for one that there is not.

    dtype: of the operands; a name that stands for another type's kernel is refused
    """
    operation = operation_of(name)
    known = NAMES[operation]
    if version not in known:
        *names, last = known
        raise ValueError(f"there is no version {version!r} of {operation}: use {', '.join(names)} or {last}, or a "
                         f"number from 1 to {max(known.values())}")
    number = known[version]
    fitting = name_of(operation, number, dtype)
    if dtype is not None and fitting != version:
        raise ValueError(f"version {version!r} of {operation} is for {FOR[version]}, and these operands are {dtype}: "
                         f"use version={fitting!r}, or cast_forward first")
    return number


def _dtype(arguments):
    """The type of the first array of a device; None if there is none."""
    for value in arguments:
        array = getattr(value, "array", getattr(value, "a", value))  # of `Matrices`, of a `Pair`
        if is_device(array):
            return array.dtype
    return None


def versions_by_name(function=None, *, asks=False):
    """A launcher whose argument `version` may be a name, too; None: its own choice, at most what `at_most` says.

    asks: the launcher calls `capped` itself; of the others a ceiling of 1 is the version, which takes all operands
    """
    if function is None:
        return functools.partial(versions_by_name, asks=asks)
    parameter = inspect.signature(function).parameters["version"]
    place = math.inf if parameter.kind is parameter.KEYWORD_ONLY else list(
        inspect.signature(function).parameters).index("version")
    operation = operation_of(function.__name__)
    if operation is None:
        raise ValueError(f"{function.__name__}: give its versions names, in NAMES of {__name__}")
    if asks:
        _asking.add(operation)

    @functools.wraps(function)
    def launcher(*args, **kwargs):
        given = args[place] if len(args) > place else kwargs.get("version")
        if isinstance(given, str):
            given = number_of(function.__name__, given, _dtype((*args, *kwargs.values())))
        elif not (_ceilings and given is None and not asks and _ceilings.get(operation) == 1):
            return function(*args, **kwargs)
        else:
            given = 1
        if len(args) > place:
            return function(*args[:place], given, *args[place + 1:], **kwargs)
        return function(*args, **{**kwargs, "version": given})
    return launcher
