"""Sums over a row, and over columns, in loops that are compiled for the host's cores (`on_host`),
many numbers at once.

MATHEMATICS
    dot = Σ a·b, total = Σ a, each as several sums, one for each place of the core's vectors, which
    are added up at the end. In the order in which they stand, each addition would wait four cycles
    for the one before it.
    column_totals = Σ over rows of x, each column by itself: ROWS rows at a time, then those sums.
SHAPES
    a, b (n,) float32; the result a float32. x (M, N) float32; totals (N,) float32
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

ROWS = 256  # of a partial sum over columns: keeps float32 accurate


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


@on_host
def column_totals(x, totals):
    """Add the sum of each column of x to `totals`."""
    part = np.empty(x.shape[1], np.float32)
    for first in range(0, len(x), ROWS):
        part[:] = 0
        for i in range(first, min(first + ROWS, len(x))):
            for k in range(len(part)):
                part[k] += x[i, k]
        for k in range(len(part)):
            totals[k] += part[k]
