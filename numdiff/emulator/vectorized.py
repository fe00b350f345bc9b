"""`numba.vectorize` and `numba.guvectorize` with target="cuda" in the emulator."""

import itertools
import re
import warnings

import numpy as np

from .device_arrays import EmulatedArray, on_device
from .faults import LaunchRefused
from .signatures import best, converted, signatures_of
from .values import dtype_of, scalar


def _on_host(value):
    value = on_device(value)
    return value.on_host() if isinstance(value, EmulatedArray) else np.asarray(value)


class Vectorized:
    """A function of numbers, element by element over arrays that are broadcast; a result on the
    device if an argument is there."""

    def __init__(self, machine, function, signatures):
        self._function, self._signatures = machine.unchecked(function), signatures
        self.__name__ = function.__name__
        self.nin = function.__code__.co_argcount

    def __call__(self, *arguments, out=None, stream=0):
        if len(arguments) == self.nin + 1:
            *arguments, out = arguments
        arrays = np.broadcast_arrays(*map(_on_host, arguments))
        types = best([t for t, _ in self._signatures], [a.dtype.type(0) for a in arrays])
        if types is None and self._signatures:
            raise LaunchRefused(
                f"{self.__name__} has no signature for {', '.join(str(a.dtype) for a in arrays)}."
            )
        result = dict(self._signatures).get(types)
        values = []
        with np.errstate(all="ignore"):
            for numbers in zip(*(a.reshape(-1) for a in arrays), strict=True):
                numbers = [scalar(n) for n in numbers]
                value = self._function(*(map(converted, numbers, types) if types else numbers))
                values.append(value if result is None else converted(value, result))
        dtype = dtype_of(str(result)) if result is not None else np.result_type(*values)
        made = np.array(values, dtype).reshape(arrays[0].shape)
        if out is not None:
            out = on_device(out)
            _on_host(out)[...] = made
            if isinstance(out, EmulatedArray):
                out.mark_written()
            return out
        if any(isinstance(on_device(a), EmulatedArray) for a in arguments):
            return EmulatedArray(made.shape, made.dtype, made)
        return made if made.shape else made[()]

    def reduce(self, array, stream=0):
        """The function of the elements so far and the next one."""
        first, *others = _on_host(array)
        for each in others:
            first = self(first, each)
        return first


def _cores(side):
    """[(names of axes)] of one side of a layout."""
    return [tuple(filter(None, core.split(","))) for core in re.findall(r"\(([^)]*)\)", side)]


class GeneralVectorized:
    """A function of arrays whose shapes a layout such as "(n),()->(n)" names, over all other axes:
    one launch of one thread for each."""

    def __init__(self, machine, function, signatures, layout):
        self._machine, self._python, self._signatures = machine, function, signatures
        inputs, outputs = layout.replace(" ", "").split("->")
        self._inputs, self._outputs = map(_cores, (inputs, outputs))
        self.__name__ = function.__name__

    def __call__(self, *arguments, out=None, stream=0):
        count = len(self._inputs), len(self._inputs) + len(self._outputs)
        if len(arguments) not in count:
            raise TypeError(
                f"{self.__name__}: gufunc accepts {count[0]} positional arguments (the inputs), or "
                f"{count[1]} positional arguments (with the results). Got {len(arguments)} "
                f"positional argument{'' if len(arguments) == 1 else 's'}."
            )
        if out is not None and len(arguments) > count[0]:
            raise ValueError("cannot specify argument 'out' as both positional and keyword")
        given = list(map(_on_host, arguments[: len(self._inputs)]))
        sizes = {}
        for array, core in zip(given, self._inputs, strict=True):
            for name, n in zip(core, array.shape[array.ndim - len(core) :], strict=True):
                if sizes.setdefault(name, n) != n:
                    raise LaunchRefused(f"{self.__name__}: {name} is {sizes[name]} and {n}.")
        loop = np.broadcast_shapes(
            *(a.shape[: a.ndim - len(c)] for a, c in zip(given, self._inputs, strict=True))
        )
        types = self._signatures[0][0] if self._signatures else ()
        results = list(arguments[len(self._inputs) :]) or ([out] if out is not None else [])
        if not results:
            results = [
                np.zeros(
                    (*loop, *(sizes[n] for n in core)),
                    dtype_of(str(kind.dtype)) if kind is not None else given[0].dtype,
                )
                for core, kind in itertools.zip_longest(self._outputs, types[len(given) :])
            ]
        results = list(map(on_device, results))
        written = list(map(_on_host, results))
        for at in np.ndindex(*loop):
            parts = [
                np.broadcast_to(a, (*loop, *a.shape[a.ndim - len(c) :]))[at]
                for a, c in zip(given, self._inputs, strict=True)
            ]
            parts = [
                np.ascontiguousarray(p) if c else p[()] if isinstance(p, np.ndarray) else p
                for p, c in zip(parts, self._inputs, strict=True)
            ]
            ends = [
                w[at] if core else w[at + (None,)]
                for w, core in zip(written, self._outputs, strict=True)
            ]
            self._machine.launch(self._python, 1, 1, *parts, *ends)
        for k, result in enumerate(results):
            if isinstance(result, EmulatedArray):
                result.mark_written()
            elif (
                len(arguments) == count[0]
                and out is None
                and any(isinstance(on_device(a), EmulatedArray) for a in arguments)
            ):
                results[k] = EmulatedArray(result.shape, result.dtype, result)
        return results[0] if len(results) == 1 else tuple(results)


# options of `vectorize` that Numba takes; in Python none of them changes a result
OPTIONS = {"nopython", "identity", "cache", "fastmath", "writable_args"}


def check_options(options):
    """`vectorize` raises a KeyError for an option that it does not know, and warns of "nopython", as
    Numba's for CUDA."""
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise KeyError(f"Unrecognized options: {', '.join(unknown)}. Known: {sorted(OPTIONS)}")
    if "nopython" in options:
        warnings.warn("nopython kwarg for cuda target is redundant", RuntimeWarning, stacklevel=3)


def check_general_options(options, signatures):
    """`guvectorize` raises a TypeError for an option that it does not know, and for a signature with
    a result."""
    if options.get("nopython", True) is not True:
        raise TypeError("nopython flag must be True")
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise TypeError(f"The following target options are not supported: {', '.join(unknown)}")
    for types, result in signatures:
        if result is not None and str(result) not in ("none", "void"):
            raise TypeError(
                "guvectorized functions cannot return values: the signature "
                f"({', '.join(map(str, types))}) specifies {result} return type"
            )


def vectorize(machine, mlir=False):
    """`numba.vectorize` for target="cuda"."""

    def decorate(signatures=(), *, target=None, **options):
        check_options(options)
        if callable(signatures) and not hasattr(signatures, "args"):
            return Vectorized(machine, signatures, [])
        return lambda function: Vectorized(
            machine, function, signatures_of(signatures, mlir) if signatures else []
        )

    return decorate


def guvectorize(machine, mlir=False):
    """`numba.guvectorize` for target="cuda"."""

    def decorate(signatures, layout=None, *, target=None, **options):
        if layout is None:
            signatures, layout = [], signatures
        known = signatures_of(signatures, mlir) if signatures else []
        check_general_options(options, known)
        return lambda function: GeneralVectorized(machine, function, known, layout)

    return decorate
