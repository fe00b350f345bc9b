"""Puzzle 21, 16-byte loads: four elements for each thread.

A thread can load 16 bytes in one instruction: four floats. `load4(a, i)` returns the four elements
from index i on, `store4(out, i, x, y, z, w)` stores four. The index must be a multiple of 4. A
quarter of the instructions moves the same bytes. Thread number t has the elements 4 t to 4 t + 3;
the count of elements is a multiple of 4.

NumPy: out = a + b
"""

from numba import cuda

from numdiff.device import load4, store4


def specification(a, b):
    return a + b


@cuda.jit
def kernel(a, b, out):  # 2 blocks of 64 threads, at most 512 elements
    i = 4 * cuda.grid(1)
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "a0, a1, a2, a3 = load4(a, i)",
    "store4(out, i, a0 + b0, a1 + b1, a2 + b2, a3 + b3)",
    "The guard is that of puzzle 6, and one guard is enough for four elements.",
)
COALESCE = "Use load4 and store4: one instruction for four elements."
LIMITS = {"requests": (12, "Use load4 and store4: one instruction for four elements.")}


def problems(rng):
    yield 2, 64, (rng.standard_normal(500, "f4"), rng.standard_normal(500, "f4"))
    yield 2, 64, (rng.standard_normal(512, "f4"), rng.standard_normal(512, "f4"))
