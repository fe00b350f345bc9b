"""Functions that `numba.extending.overload`, or numba.cuda's, gives another text for a kernel.

The function itself is a stub for Python. An overload gets the types of a call's arguments and
returns the function that is compiled for them, or None if it does not take them.
"""

import inspect
import sys

from .faults import Unsupported
from .signatures import type_of
from .values import is_numbas

_REGISTRIES = (
    "numba.cuda.typing.templates",
    "numba_cuda_mlir.numba_cuda.typing.templates",
    "numba.core.typing.templates",
)
_TARGETS = ("cuda", "gpu", "generic", None)  # those that CUDA takes, the nearest first
# how many templates the registries had -> {id of a function: (the function, its overloads)}
_known = {}


def overloads_of(function):
    """The overloads of a function for CUDA, in the order in which Numba tries them; none of Numba's
    own."""
    # the templates of numba-cuda 0.20 have no registry: its overloads are in Numba's
    found = (getattr(sys.modules.get(name), "builtin_registry", None) for name in _REGISTRIES)
    registries = [registry.globals for registry in found if registry is not None]
    size = tuple(map(len, registries))
    if size not in _known:
        _known.clear()
        _known[size] = _by_function(registries)
    return _known[size].get(id(function), (None, []))[1]


def _by_function(registries):
    found = {}
    for function, kind in (entry for registry in registries for entry in registry):
        for template in getattr(kind, "templates", ()):
            overload = getattr(template, "_overload_func", None)
            target = getattr(template, "metadata", {}).get("target")
            if target not in _TARGETS or is_numbas(
                getattr(overload, "__module__", None) or "numba"
            ):
                continue
            found.setdefault(id(function), (function, []))[1].append(
                (_TARGETS.index(target), overload)
            )
    return {
        key: (
            function,
            list(dict.fromkeys(o for _, o in sorted(overloads, key=lambda each: each[0]))),
        )
        for key, (function, overloads) in found.items()
    }


def overloaded(machine, name, overloads):
    """The function that a kernel calls under the name of one with overloads."""
    made = {}  # types of the arguments -> the function

    def call(*arguments, **named):
        types = (
            tuple(map(type_of, arguments)),
            tuple((key, type_of(value)) for key, value in named.items()),
        )
        if types not in made:
            found = next(
                filter(
                    None,
                    (
                        overload(*types[0], **dict(types[1]))
                        for overload in overloads
                        if _takes(overload, arguments, named)
                    ),
                ),
                None,
            )
            if found is None:
                raise Unsupported(
                    f"no overload of {name} takes ({', '.join(map(str, types[0]))}), and Numba does not "
                    "compile the call"
                )
            made[types] = machine.function(found)
        return made[types](*arguments, **named)

    return call


def _takes(overload, arguments, named):
    try:
        inspect.signature(overload).bind(*arguments, **named)
    except TypeError:
        return False
    return True
