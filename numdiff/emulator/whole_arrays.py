"""`x.sum()`, `x.mean()`, `x.argmax()` and their kin in a kernel: element by element, as Numba
compiles them."""

import numpy as np

from .arithmetic import CLASS, LETTER, add, convert, mul, sub, truediv
from .functions import MATH

# letters of the sums of integers
_WIDE = {**dict.fromkeys("bsmil", "l"), **dict.fromkeys("tvwu", "u")}


def elements(array):
    for index in np.ndindex(tuple(array.shape)):
        yield array[index]


def _accumulated(array, start, operation, integers_as=None):
    kind = None
    for value in elements(array):
        if kind is None:
            kind = LETTER[value.__class__]
            kind = integers_as if kind in _WIDE and integers_as else _WIDE.get(kind, kind)
            total = convert(start, kind)
        total = convert(operation(total, value), kind)
    return total if kind else start


def total(array):
    return _accumulated(array, 0, add)


def product(array):
    return _accumulated(array, 1, mul)


def mean(array):
    """Sums of integers are float64; a float32 divided by the size is a float64."""
    return truediv(_accumulated(array, 0, add, "d"), int(array.size))


def variance(array):
    middle, squares = mean(array), 0
    for value in elements(array):
        difference = sub(value, middle)
        if difference.__class__ in (CLASS["c"], CLASS["z"]):
            squares = add(
                squares,
                add(mul(difference.real, difference.real), mul(difference.imag, difference.imag)),
            )
        else:
            squares = add(squares, mul(difference, difference))
    return truediv(squares, int(array.size))


def _extreme(array, largest):
    """(the least or largest element, its place); the first NaN is both."""
    best, place = None, 0
    for k, value in enumerate(elements(array)):
        if value != value:
            return value, k
        if best is None or (value > best if largest else value < best):
            best, place = value, k
    if best is None:
        raise ValueError("the least or largest element of an array without elements")
    return best, place


WHOLE = {
    "sum": total,
    "prod": product,
    "mean": mean,
    "var": variance,
    "std": lambda a: MATH.sqrt(variance(a)),
    "min": lambda a: _extreme(a, False)[0],
    "max": lambda a: _extreme(a, True)[0],
    "argmin": lambda a: _extreme(a, False)[1],
    "argmax": lambda a: _extreme(a, True)[1],
    "all": lambda a: all(bool(v) for v in elements(a)),
    "any": lambda a: any(bool(v) for v in elements(a)),
}


def method(name, owner, *arguments):
    """The function for `owner.name(…)` in a kernel: for an array one of the above, else the owner's
    own."""
    if not arguments and hasattr(owner, "strides") and hasattr(owner, "dtype"):
        return WHOLE[name](owner)
    return getattr(owner, name)(*arguments)
