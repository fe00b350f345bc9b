"""Arithmetic of four neighbours, tuples as `load4` returns them, element by element.

    store4(y, i, *add4(load4(x, i), load4(y, i)))       y[i … i + 3] += x[i … i + 3]

Sums that a loop carries are better four variables: for a tuple that one iteration hands to the next,
the compiler makes other code, with more registers in some kernels.

SOURCE
    nothing to cite.
READ NEXT
    eight.py, eight neighbours at a time.
"""

from . import device_inline


@device_inline
def add4(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@device_inline
def subtract4(a, b):
    return a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3]


@device_inline
def multiply4(a, b):
    return a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]


@device_inline
def scale4(factor, a):
    """factor · a; factor: one number for all four."""
    return factor * a[0], factor * a[1], factor * a[2], factor * a[3]


@device_inline
def shift4(number, a):
    """number + a; number: one for all four."""
    return number + a[0], number + a[1], number + a[2], number + a[3]


@device_inline
def sum4(a):
    return (a[0] + a[1]) + (a[2] + a[3])


@device_inline
def dot4(a, b):
    return (a[0] * b[0] + a[1] * b[1]) + (a[2] * b[2] + a[3] * b[3])
