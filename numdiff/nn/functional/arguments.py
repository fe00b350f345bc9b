"""Whether an operation is given Tensors, Parameters and arrays where its annotations say so:
`checked`.

A NumPy array has a shape, a dtype and a `data`, as a Tensor has. Unchecked, it is noticed deep in a
kernel, in the backward pass, or not at all.
"""

import functools
import inspect
import itertools
import typing

import numpy as np

from ...errors import shown
from ..parameter import Parameter
from ..tensor import Tensor

REMEDIES = {
    Tensor: "give Tensor({})",
    Parameter: "give one of a layer, or make one and set its data to the values",
    np.ndarray: "give {}.data",
}


def checked(function):
    """`function`, which refuses an argument of the wrong kind with a `TypeError`. It remembers
    which types it has seen, and so takes a third of a microsecond longer; only layers, [(weight,
    bias)], are looked at each time."""
    signature = inspect.signature(function)
    kinds = {
        name: kind
        for name, parameter in signature.parameters.items()
        if (kind := _kind(parameter.annotation))
    }
    place = next(
        (place for place, name in enumerate(signature.parameters) if name == "layers"), None
    )
    seen = set()

    @functools.wraps(function)
    def call(*given, **named):
        types = (
            (*map(type, given), *named, *map(type, named.values()))
            if named
            else (*map(type, given),)
        )
        if (
            types not in seen
            or place is not None
            and not _are_layers(given[place] if place < len(given) else named["layers"])
        ):
            _check(function.__name__, signature, kinds, given, named)
            seen.add(types)
        return function(*given, **named)

    return call


def _are_layers(layers):
    return {*map(type, itertools.chain.from_iterable(layers))} == {Parameter}


def _kind(annotation):
    """Which of `REMEDIES` an annotation is about: it is one of them, or a union or a sequence with
    one; or None."""
    if annotation in REMEDIES:
        return annotation
    return next(filter(None, map(_kind, typing.get_args(annotation))), None)


def _check(function, signature, kinds, given, named):
    try:
        arguments = signature.bind(*given, **named).arguments
    except TypeError:  # Python says what is missing when `function` is called
        return
    for name, kind in kinds.items():
        absent = type(None) in typing.get_args(signature.parameters[name].annotation)
        for value in _each(arguments.get(name, ())):
            if not (value is None and absent) and not _fits(value, kind):
                wanted = "an array" if kind is np.ndarray else f"a {kind.__name__}"
                raise TypeError(
                    f"{function}: {name} must be {wanted}, and not {shown(value)}: "
                    f"{REMEDIES[kind].format(name)}."
                )


def _fits(value, kind):
    if kind is np.ndarray:  # or what stands for an array, on whatever device
        return not isinstance(value, (Tensor, Parameter))
    return isinstance(value, kind)


def _each(value):
    """The elements of lists and tuples within each other, or the value itself."""
    if isinstance(value, (list, tuple)):
        for element in value:
            yield from _each(element)
    else:
        yield value
