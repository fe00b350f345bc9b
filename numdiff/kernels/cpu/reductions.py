"""Sums over a row for loops that are compiled for the host's cores (`on_host`), many numbers at
once.

MATHEMATICS
    dot = Σ a·b, total = Σ a, each as several sums, one for each place of the core's vectors, which
    are added up at the end. In the order in which they stand, each addition would wait four cycles
    for the one before it.
SHAPES
    a, b (n,) float32; the result a float32
DETERMINISM
    the order depends on n and on how long the vectors of the machine's cores are.
SOURCE
    Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2: more sums, a smaller
    error.
READ NEXT
    gate_adaln.py, which takes them.
"""

import functools

import numpy as np

from ...device import on_host


@functools.partial(on_host, reorders=True)
def dot(a, b):
    found = np.float32(0)
    for i in range(len(a)):
        found += a[i] * b[i]
    return found


@functools.partial(on_host, reorders=True)
def total(a):
    found = np.float32(0)
    for i in range(len(a)):
        found += a[i]
    return found
