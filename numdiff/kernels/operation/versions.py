"""The names of versions: `matmul_forward(a, b, version="hopper")` is `version=6`.

A version is a number to count up a ladder, and a name to say what is new on it. An operation's
record (record.py) declares both, and its function takes either.

CEILINGS
    A launcher chooses the fastest version that takes its operands. Within `at_most({"matmul":
    "tiled"})` it chooses none above that, so that a whole training step can climb the ladder a
    technique at a time (benchmark/ladder.py).
    A call that names its version gets it. Two entries have a rung 0, the same mathematics without
    the operation: of "flash_attention" attention/unfused.py, of "epilogue" an activation in a
    separate pass, after the norm or the layer before it.

SOURCE
    plain bookkeeping; the words are those of the operations' files, under VERSIONS.
"""

import contextlib

import numpy as np

FOR = {}  # of names that share a number: the operands' type that each is for
NAMES = {}  # {operation: {name: number}}, of their records
# what `at_most` knows
CEILED = {"epilogue": {"apart": 0, "fused": 1}, "flash_attention": {"unfused": 0}}
# {operation: highest version that launchers choose by themselves}; empty but within `at_most`
_ceilings = {}


def declare(operation, numbers, has_ceiling=True):
    """Enter the versions of an operation that has a record (record.py), {name: number}.

    has_ceiling: `at_most` knows it; False for one with another operation's versions
    """
    NAMES[operation] = numbers
    if has_ceiling:
        CEILED[operation] = CEILED.get(operation, {}) | numbers


@contextlib.contextmanager
def at_most(ceilings):
    """Context: launchers choose no version above these. ceilings: {operation of CEILED: number, or
    name}

    Launchers are asked at each call: a captured step keeps the versions that it was captured with.
    """
    global _ceilings
    wanted = {}
    for operation, version in ceilings.items():
        known = CEILED.get(operation, {})
        number = known.get(version, version)
        if number not in known.values():
            raise ValueError(
                f"there is no version {version!r} of {operation!r} to stop at: use one of "
                f"{', '.join(known) or ', '.join(CEILED)}"
            )
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
    """The key in `NAMES` of a function, or of an operation of `numdiff kernels check`; None if it
    has one version."""
    if name == "cast_into":
        return "cast"
    short = name.removesuffix("_forward")
    return next((n for n in (short, short.removesuffix("_backward")) if n in NAMES), None)


def numbers_of(name):
    """The versions of an operation, as numbers in order; () if it has one."""
    return tuple(sorted(set(NAMES.get(operation_of(name), {}).values())))


def name_of(name, number, dtype=None):
    """What a version is called in operands of this type, None if it has no name; dtype None: "mma
    or tf32"."""
    found = [n for n, v in NAMES.get(operation_of(name), {}).items() if v == number]
    if len(found) > 1 and dtype is not None:
        found = [n for n in found if np.dtype(dtype).name in FOR[n].split(" and ")] or found
    return " or ".join(found) or None


def label(name, number, dtype=None):
    """A version as a message says it: "6 (hopper)"."""
    found = name_of(name, number, dtype)
    return f"{number} ({found})" if found else str(number)
